"""The model, from the recipe's configuration, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from train.errors import Stop
from train.recipe import Model


def build_model(model: Model, seed: int) -> torch.nn.Module:
    """Return the model in fp32 on the CPU; the same seed gives the same weights on every rank."""
    known = LlamaConfig()
    unknown = [key for key in model.config if not hasattr(known, key)]
    if unknown:
        expected = "fields of transformers.LlamaConfig"
        raise Stop("recipe model.config", f"unknown: {', '.join(unknown)}", expected, "correct the recipe")
    torch.manual_seed(seed)
    try:
        return LlamaForCausalLM(LlamaConfig(**model.config))
    except (ValueError, TypeError, RuntimeError) as error:
        raise Stop("recipe model.config", f"{error}", "values transformers accepts", "correct the recipe") from error


def count_parameters(model: torch.nn.Module) -> int:
    """Return how many parameters the model has; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's groups: matrices with weight decay, vectors (norm weights, biases) without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
