"""ResNets of transformers, trained like the language models: called with a batch, they return its loss.

`depth` 50 is the ResNet-50 that torchvision has (v1.5, stride in the 3 × 3 convolution; 25,557,032 parameters at 1000 classes).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_outputs import ImageClassifierOutput

from train.device import Device
from train.errors import Stop
from train.recipe import Recipe

STAGES = {
    18: ("basic", [2, 2, 2, 2]),
    34: ("basic", [3, 4, 6, 3]),
    50: ("bottleneck", [3, 4, 6, 3]),
    101: ("bottleneck", [3, 4, 23, 3]),
    152: ("bottleneck", [3, 8, 36, 3]),
}
"""Depth -> kind and number of blocks (He et al. 2015, arXiv 1512.03385, table 1)."""
WIDTHS = {"basic": [64, 128, 256, 512], "bottleneck": [256, 512, 1024, 2048]}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, as fractions of 255; every published ResNet expects these."""


def build_resnet(recipe: Recipe, device: Device, dtype: torch.dtype) -> torch.nn.Module:
    """Return the recipe's ResNet with random weights on the device, ready to train. The same seed gives the same weights."""
    from transformers.models.resnet.configuration_resnet import ResNetConfig
    from transformers.models.resnet.modeling_resnet import ResNetForImageClassification

    config = recipe.model.config
    unknown = [key for key in config if key not in ("depth", "num_classes")]
    if unknown or config.get("depth") not in STAGES:
        observed = f"unknown: {', '.join(unknown)}" if unknown else f"depth {config.get('depth')}"
        raise Stop("recipe model.config", observed, f"num_classes, and depth, one of {list(STAGES)}", "correct the recipe")
    kind, depths = STAGES[config["depth"]]
    torch.manual_seed(recipe.seed)
    with torch.device(device.name):
        model: Any = ResNetForImageClassification(
            ResNetConfig(depths=depths, hidden_sizes=WIDTHS[kind], layer_type=kind, num_labels=config["num_classes"])
        )
    memory = torch.channels_last if device.kind == "cuda" else torch.contiguous_format  # what tensor cores convolve
    model.to(dtype=dtype, memory_format=memory)
    logits_of = model.forward
    mean, deviation = (torch.tensor(values, device=device.name).view(1, 3, 1, 1) * 255 for values in (MEAN, DEVIATION))

    def forward(
        pixel_values: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: float | None = None
    ) -> ImageClassifierOutput:
        pixels = ((pixel_values - mean) / deviation).to(dtype=dtype, memory_format=memory)
        logits = logits_of(pixel_values=pixels).logits
        if labels is None:
            return ImageClassifierOutput(logits=logits)
        total = functional.cross_entropy(logits.float(), labels, reduction="sum")
        return ImageClassifierOutput(loss=total / (num_items_in_batch or len(labels)), logits=logits)

    model.forward = forward
    return model.train()
