"""The arithmetic a step cannot do without, and what a card could do at most: together MFU.

Counted as everywhere: a multiply-add is 2 FLOP. A matrix of P elements takes 2 P a token forward, 2 P backward for its input and
2 P for its own gradient where it trains: 6 P, or 4 P of what is frozen. Attention: 2 products of a token with half of the
sequence (it is causal), 2 · layers · length · heads · head size forward, twice as much backward. Embeddings are looked up,
which is no arithmetic. What is computed again for activation checkpointing is not counted: MFU, not HFU (Chowdhery et al. 2022,
PaLM, arXiv 2204.02311, appendix B). Packed documents attend to themselves only; the whole sequence counts all the same.
"""

from __future__ import annotations

from typing import Any

import torch

from train.device import Device
from train.recipe import Recipe

PEAK_TFLOPS = {
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 D": 147.1,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA A100": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
}
"""bf16 and fp16 with FP32 accumulation, dense. Ada whitepaper appendix A (4090 D: 114 of 128 SMs), Ampere GA102 whitepaper,
NVIDIA's data sheets of A100, H100 SXM and H200."""
FAMILIES = ("NVIDIA A100", "NVIDIA H200")
"""Cards whose names go on (-SXM4-80GB) at the same peak; "RTX 4090 Laptop GPU" is another card."""


def peak_flop_per_s(card: str, precision: str) -> float | None:
    """Return the dense peak of the card that torch calls `card`, None where it is not known, and for fp32."""
    name = next((family for family in FAMILIES if card.startswith(family)), card)
    return PEAK_TFLOPS[name] * 1e12 if name in PEAK_TFLOPS and precision in ("bf16", "fp16") else None


def flop_per_token(model: torch.nn.Module, sequence_length: int) -> float:
    """Return the FLOP of one token, forward and backward, of a transformers causal language model, with its adapters."""
    config: Any = model.config
    matrices = 0
    for module in model.modules():
        if hasattr(module, "in_features") and not hasattr(module, "base_layer"):  # peft wraps a matrix and has its sizes
            trains = any(one.requires_grad for one in module.parameters(recurse=False))
            matrices += int(module.in_features) * int(module.out_features) * (6 if trains else 4)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * config.num_hidden_layers * sequence_length * config.num_attention_heads * head_size
    return float(matrices + 3 * attention)


def flop_per_image(model: torch.nn.Module, image_size: int) -> float:
    """Return the FLOP of one image, forward and backward, of a model of convolutions; it is tried with one."""
    counted = 0.0

    def count(module: Any, _: Any, output: torch.Tensor) -> None:
        nonlocal counted
        elements = module.weight[0].numel()  # what one element of the output is summed over
        counted += 2.0 * output.numel() * elements

    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    hooks = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, kinds)]
    first = next(model.parameters())
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=first.device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return 3 * counted


def least_step_s(model: torch.nn.Module, recipe: Recipe, device: Device, precision: str, world_size: int) -> float | None:
    """Return the seconds of a step in which all cards reach their peak: MFU is this against the real ones. None where unknown."""
    peak = peak_flop_per_s(torch.cuda.get_device_name(device.name), precision) if device.kind == "cuda" else None
    if peak is None:
        return None
    images = recipe.unit == "images"
    each = flop_per_image(model, recipe.data.image_size) if images else flop_per_token(model, recipe.data.sequence_length)
    return each * recipe.samples_per_step(world_size) * recipe.units_per_sample / (peak * world_size)
