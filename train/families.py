"""Families of language models beyond the tested ones: what this training relies on is tried before their weights are loaded.

A small model of the same configuration runs on the CPU: as wide a head, the same kinds of layers, scales, caps and positions, but
few of them, and random weights. It takes about a second on each rank, without a collective; all ranks find the same.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from train.errors import Stop
from train.recipe import Recipe

TESTED = ("llama", "mistral", "qwen2", "qwen3")
"""Of these the tests show on whole models what is tried here for the others."""
SUPPORTED = f"{', '.join(TESTED)}, or a causal language model with layers in model.layers and a linear lm_head, as gemma or phi3"
OTHER_MODEL = "take another model"

LAYERS, WIDE, VOCABULARY, LENGTHS = 4, 64, 64, ((5, 7), (8, 4))
"""est.: of the small model and the documents of its two rows; more make the trial slower, and no difference larger."""
TOLERANCE = 1e-3
"""est.: of the largest logit. Seen in fp32 on 20 families: 1e-7 to 2e-5 where nothing differs, 6e-3 and more where it does."""


def causal_class(family: str) -> Any:
    """Return transformers' class of the family's causal language model. Raises Stop where it knows none."""
    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
    except KeyError:
        observed = f"{family} is no causal language model that transformers {transformers.__version__} knows"
        raise Stop("recipe model.family", observed, SUPPORTED, "correct model.family, or pip install -U transformers") from None


def takes_sdpa(family: str) -> bool:
    """Return whether transformers computes the family's attention with torch's scaled_dot_product_attention."""
    return family in TESTED or bool(causal_class(family)._supports_sdpa)


def require_family(recipe: Recipe, config: Any, attention: str) -> None:
    """Raise Stop where the model of transformers' configuration `config` is not one that this training can train as asked for."""
    family = recipe.model.family
    try:
        with torch.device("meta"):
            whole: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise Stop("recipe model.config", f"{error}", "values transformers accepts", "correct the recipe") from error
    layers, head = getattr(getattr(whole, "model", None), "layers", None), getattr(whole, "lm_head", None)
    if not isinstance(layers, torch.nn.ModuleList) or not isinstance(head, torch.nn.Linear):
        lacking = "layers in model.layers" if not isinstance(layers, torch.nn.ModuleList) else "linear lm_head"
        raise Stop("recipe model.family", f"{family}: {type(whole).__name__} has no {lacking}", SUPPORTED, OTHER_MODEL)
    if recipe.activation_checkpointing and not whole.supports_gradient_checkpointing:
        observed = f"true: transformers' {family} cannot"
        raise Stop("recipe activation_checkpointing", observed, "false", "--set activation_checkpointing=false")
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            _try(recipe, _small(config), attention)
    except Stop:
        raise
    except Exception as error:
        observed = f"{family}: a small model of it, which is tried first, fails: {type(error).__name__}: {error}"
        remedy = f"--set kernels.attention=eager, or {OTHER_MODEL}" if attention != "eager" else OTHER_MODEL
        raise Stop("recipe model.family", observed, SUPPORTED, remedy) from error


def _small(config: Any) -> Any:
    """Return the configuration of a model of the same kind: heads as wide, for the sake of rotary tables, but two of them."""
    told, small = config.to_dict(), copy.deepcopy(config)
    types = getattr(config, "layer_types", None) or []
    kept = sorted({types.index(kind) for kind in types} | set(range(min(LAYERS, config.num_hidden_layers))))
    heads = config.num_attention_heads
    grouped = (getattr(config, "num_key_value_heads", None) or heads) != heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    few = {"vocab_size": VOCABULARY, "hidden_size": 2 * width, "num_hidden_layers": len(kept)}
    few |= {"num_attention_heads": 2, "num_key_value_heads": 1 if grouped else 2}
    for key, value in told.items():
        if key.endswith("intermediate_size") and isinstance(value, int):
            few[key] = WIDE
        elif key.endswith("token_id"):
            few[key] = None
        elif isinstance(value, list) and len(value) == config.num_hidden_layers:  # one for each layer
            few[key] = [value[place] for place in kept]
    for key, value in few.items():
        if hasattr(config, key):
            setattr(small, key, value)
    return small


def _try(recipe: Recipe, config: Any, attention: str) -> None:
    """Raise Stop where documents of a packed row, its loss or its loss in chunks are not what they have to be."""
    family = recipe.model.family
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    drawn = torch.Generator().manual_seed(0)
    for one in model.parameters():  # far from what models begin with: there, much makes no difference
        noise = torch.randn(one.shape, generator=drawn)
        one.copy_(noise * one.shape[-1] ** -0.5 if one.dim() > 1 else one + 0.1 * noise)
    head = model.lm_head.weight
    head.copy_(torch.randn(head.shape, generator=drawn))
    positions = torch.stack([torch.cat([torch.arange(one) for one in row]) for row in LENGTHS])
    ids = torch.randint(0, VOCABULARY, positions.shape, generator=drawn)
    packed = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    logits = model(**packed).logits

    def differ(other: torch.Tensor) -> bool:
        return not float((logits - other).abs().max()) <= TOLERANCE * float(logits.abs().max())  # NaN differs

    documents = [one for row, lengths in zip(ids, LENGTHS, strict=True) for one in row.split(list(lengths))]
    alone = torch.cat([model(input_ids=one.unsqueeze(0), use_cache=False).logits[0] for one in documents])
    packs = any(data.kind == "prepared" for data in (recipe.data, recipe.eval.data) if data)
    if packs and differ(alone.view_as(logits)):
        observed = f"{family}: a document of a packed row sees the one before"
        raise Stop("recipe model.family", observed, "a family that keeps apart what position_ids tell apart", OTHER_MODEL)
    loss = model(**packed, labels=ids, num_items_in_batch=2.0).loss
    wanted = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum") / 2
    if not float((loss - wanted).abs()) <= TOLERANCE * float(wanted):
        observed = f"{family}: its loss is not the cross-entropy over num_items_in_batch"
        raise Stop("recipe model.family", observed, SUPPORTED, OTHER_MODEL)
    hidden = model.model(**packed).last_hidden_state
    if recipe.loss_chunk_tokens and (model.lm_head.bias is not None or differ(functional.linear(hidden, head))):
        observed = f"{recipe.loss_chunk_tokens}: between lm_head.weight and the logits of {family} lies a bias, a scale or a cap"
        raise Stop("recipe loss_chunk_tokens", observed, "0", "--set loss_chunk_tokens=0")
