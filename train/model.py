"""The model that trains: weights, random or from a folder; quantized and with adapters where the method says so."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM  # noqa: F401  (what all families share, on startup's diet)

from train.device import Device
from train.errors import FAILED, Stop
from train.families import TESTED, causal_class, require_family, takes_sdpa
from train.flash import flatten_rows
from train.loss import use_chunks
from train.recipe import Kernels, Recipe
from train.resnet import build_resnet
from train.weights import Weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLASH = "flash_attention_2"
"""flash-attn, as transformers calls it."""
INT8_THRESHOLD = 6.0
"""Activations beyond it are multiplied in 16 bits (Dettmers et al. 2022, LLM.int8(), arXiv 2208.07339)."""


@dataclass(frozen=True)
class Chosen:
    """What of the recipe's `kernels` runs here; `notices` say what was left out and why."""

    attention: str
    liger: bool
    compile: bool
    notices: tuple[str, ...] = ()


def choose_kernels(wanted: Kernels, device: Device, precision: str, family: str) -> Chosen:
    """Return which of the kernels wished for this machine and family have. The arithmetic is the same: a missing one is no error.

    Raises Stop for a family that transformers does not know, and for sdpa by name where it has none for the family.
    """
    gpu, notices = device.kind == "cuda", []
    known = family in (*TESTED, "resnet")
    flash = known and gpu and precision != "fp32" and importlib.util.find_spec("flash_attn") is not None
    sdpa = family == "resnet" or takes_sdpa(family)
    if wanted.attention == "sdpa" and not sdpa:
        observed = f"sdpa: transformers has none for {family}"
        raise Stop("recipe kernels.attention", observed, "auto or eager", "--set kernels.attention=eager")
    best = FLASH if flash else "sdpa" if sdpa else "eager"
    if wanted.attention == "flash" and not flash:
        needs = f"a GPU, 16 bits, the package flash-attn and a family of {', '.join(TESTED)}"
        notices.append(f"kernels.attention flash: needs {needs}; {best} is used")
    elif wanted.attention == "auto" and not sdpa:
        notices.append(f"kernels.attention auto: transformers has no sdpa for {family}; eager is used, which is slower")
    attention = best if wanted.attention in ("auto", "flash") else wanted.attention
    liger = wanted.liger and gpu and importlib.util.find_spec("liger_kernel") is not None
    if wanted.liger and not liger:
        notices.append("kernels.liger: needs a GPU and the package liger-kernel; left out")
    compiler = importlib.util.find_spec("triton") if gpu else shutil.which("g++") or shutil.which("clang++")
    if wanted.compile and not compiler:
        notices.append(f"kernels.compile: needs {'triton' if gpu else 'a C++ compiler'}; left out")
    return Chosen(attention, liger, wanted.compile and bool(compiler), tuple(notices))


def build_model(
    recipe: Recipe, weights: Weights | None, device: Device, precision: str, *, kernels: Chosen, sharded: bool
) -> torch.nn.Module:
    """Return the model on the device (on the host when `sharded`: ZeRO-3 divides it there), ready to train.

    The same seed gives the same weights and adapters on every rank. Trainable parameters are all, or the adapters alone.
    """
    dtype, place = DTYPES[precision], "cpu" if sharded else device.name
    if recipe.model.family == "resnet":
        return build_resnet(recipe, device, dtype)
    if recipe.method in ("int8", "qlora") and sharded:
        raise Stop(
            f"recipe method {recipe.method}", "ZeRO stage 3", "stage 0, 1 or 2: quantized weights lie whole on every GPU",
            "--set ds_config=zero2.json",
        )  # fmt: skip
    config = configuration(recipe, weights)
    if recipe.model.family not in TESTED:
        require_family(recipe, config, kernels.attention)
    attention = kernels.attention
    model: Any = _load(recipe, weights, config, attention) if weights else _random(recipe, config, dtype, place, attention)
    model.config.use_cache = False
    if kernels.liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    if recipe.loss_chunk_tokens:
        use_chunks(model, recipe.loss_chunk_tokens)
    if kernels.attention == FLASH:
        flatten_rows(model)
    if recipe.activation_checkpointing:
        options = {"use_reentrant": False}  # else gradients would reach ZeRO more than once a backward pass
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    if recipe.method != "full":
        model.requires_grad_(False)
        if recipe.method != "lora":
            quantize(model, recipe.method, dtype, place)
        model = add_adapters(model, recipe)
    for tensor in model.parameters():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(place, dtype)
    model.to(place)  # buffers: they keep their precision
    if kernels.compile:
        for layer in (model.get_base_model() if recipe.method != "full" else model).model.layers:
            layer.compile()
    return model.train()


def configuration(recipe: Recipe, weights: Weights | None) -> Any:
    """Return transformers' configuration of the model. Raises Stop for fields and values that it does not know."""
    causal_class(recipe.model.family)
    try:
        plain = {"local_files_only": True}
        found = AutoConfig.from_pretrained(weights.folder, **plain) if weights else AutoConfig.for_model(recipe.model.family)
        # transformers 5 keeps rope_theta there, and ignores one that is given beside a folder.
        rotary = getattr(found, "rope_parameters", None) or {}
        unknown = [
            key
            for key, value in recipe.model.config.items()
            if not hasattr(found, key) and not (key == "rope_theta" and rotary and (not weights or rotary.get(key) == value))
        ]
        if unknown:
            expected = f"fields of transformers.{type(found).__name__}"
            raise Stop("recipe model.config", f"unknown: {', '.join(unknown)}", expected, "correct the recipe")
        if weights:
            return AutoConfig.from_pretrained(weights.folder, local_files_only=True, **recipe.model.config)
        return AutoConfig.for_model(recipe.model.family, **recipe.model.config)
    except Stop:
        raise
    except Exception as error:
        raise Stop("recipe model.config", f"{error}", "values transformers accepts", "correct the recipe") from error


def drawn_on(recipe: Recipe, device: Device, *, sharded: bool = False) -> str | None:
    """Return where random weights that no checkpoint holds are drawn, None where there are none: each kind draws other ones."""
    if recipe.method == "full" or recipe.model.weights is not None:
        return None
    return "a CPU" if sharded or device.kind == "cpu" else torch.cuda.get_device_name(device.name)


def _random(recipe: Recipe, config: Any, dtype: torch.dtype, place: str, attention: str) -> Any:
    torch.manual_seed(recipe.seed)
    try:
        with torch.device(place):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except (ValueError, TypeError, RuntimeError, KeyError, ArithmeticError) as error:
        raise Stop("recipe model.config", f"{error}", "values transformers accepts", "correct the recipe") from error


def _load(recipe: Recipe, weights: Weights, config: Any, attention: str) -> Any:
    """Return the model in the folder, in its own dtype: then the files are mapped, and ranks of a node share the memory."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # what does not fit is told below, in one line
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            weights.folder,
            config=config,
            dtype=getattr(torch, weights.dtype),
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise Stop(weights.folder, f"{error}", f"weights of a {recipe.model.family} model", "copy the folder again") from error
    wrong = [*told["missing_keys"], *told["unexpected_keys"], *(key for key, *_ in told["mismatched_keys"])]
    if wrong:
        observed = f"{len(wrong)} tensors are missing, unknown or of another shape: {', '.join(sorted(wrong)[:3])}"
        raise Stop(weights.folder, observed, "the tensors of the recipe's model", "correct model.config or model.weights")
    return model


def quantize(model: Any, method: str, dtype: torch.dtype, place: str) -> None:
    """Replace the matrices of the layers of `model` by quantized ones on `place`; embeddings, norms and head stay as they are.

    One matrix after the other, so the device never holds the model in 16 bits. Each rank quantizes its own copy.
    """
    bnb = _library("bitsandbytes")
    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if not isinstance(linear, torch.nn.Linear):
                continue
            size, bias = (linear.in_features, linear.out_features), linear.bias is not None
            new: Any
            if method == "qlora":
                new = bnb.nn.Linear4bit(*size, bias=bias, compute_dtype=dtype, quant_type="nf4", device="meta")
                options = {"quant_type": "nf4", "compress_statistics": True}  # the scales are quantized too
                new.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **options)
            else:
                new = bnb.nn.Linear8bitLt(*size, bias=bias, has_fp16_weights=False, threshold=INT8_THRESHOLD, device="meta")
                new.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
            new.bias = linear.bias
            new.register_state_dict_post_hook(_leave_out)
            layer.set_submodule(name, new.to(place))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = method == "qlora", method == "int8"  # peft asks for these


def _leave_out(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Keep what is quantized anew at each start out of checkpoints."""
    for name in [name for name in state if name.startswith(prefix) and name.removeprefix(prefix) != "bias"]:
        del state[name]


def adapter_config(recipe: Recipe) -> Any:
    """Return peft's configuration of the recipe's adapters."""
    lora = recipe.lora
    assert lora is not None  # read_recipe saw to it
    return _library("peft").LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.targets)


def add_adapters(model: Any, recipe: Recipe) -> Any:
    """Return `model` in a PeftModel with LoRA adapters, which alone train. Raises Stop for targets that it does not have."""
    peft, lora = _library("peft"), recipe.lora
    assert lora is not None  # read_recipe saw to it
    config = adapter_config(recipe)
    absent = [target for target in lora.targets if not any(name.endswith(f".{target}") for name, _ in model.named_modules())]
    if absent:
        names = sorted({name.rsplit(".", 1)[-1] for name, one in model.named_modules() if hasattr(one, "in_features")})
        expected = f"some of {', '.join(names)}"
        raise Stop("recipe lora.targets", f"{', '.join(absent)} not in the model", expected, "correct the recipe")
    torch.manual_seed(recipe.seed)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def _library(name: str) -> Any:
    """Return peft or bitsandbytes. Raises Stop where it is not installed."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels for CPUs that nobody asked for
    for message in ("MatMul8bitLt", "`is_gradient_checkpointing`"):  # of bitsandbytes and peft: nothing a user could do
        warnings.filterwarnings("ignore", message=message)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        observed, expected = f"cannot import {name}: {error}", "peft and bitsandbytes, for adapters and optimizers of 8 bits"
        raise Stop("recipe method", observed, expected, f"pip install {name}", FAILED) from error


def build_optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over what trains, fused: one pass over memory, on GPUs and on hosts (offloaded states).

    Its learning rate is 0: the loop sets it before each step, and what DeepSpeed does with the optimizer before changes nothing.
    """
    options = {"lr": 0.0, "betas": recipe.optimizer.betas}
    groups = parameter_groups(model, recipe.optimizer.weight_decay)
    if recipe.optimizer.name == "adamw8bit":
        optimizer: torch.optim.Optimizer = _library("bitsandbytes").optim.AdamW8bit(groups, **options)
        return optimizer
    return torch.optim.AdamW(groups, fused=True, **options)


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return how many parameters the model has, and how many of them train. Shared ones count once."""
    sizes = [(_elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)


def _elements(parameter: Any) -> int:
    """Return how many numbers a parameter stands for: ZeRO-3 keeps a part of them here, bitsandbytes two in a byte."""
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel()) if state is not None else int(parameter.numel())


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's groups: matrices with weight decay, vectors (norm weights, biases) without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
