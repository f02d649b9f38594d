"""Turn a run's checkpoint into a folder that transformers or peft loads: `export.py RUN --data-dir FOLDER [--merged]`.

    method full           config.json and safetensors of all weights, in the precision they trained in; a ResNet too
    lora, int8, qlora     the adapters alone, for peft, beside the model they were trained on
        with --merged     one model: the adapters added to the weights they were trained beside; of int8 and qlora these are
                          the quantized ones, brought back to 16 bits, so that the model answers as it did in training

Runs on a CPU, needs no ranks, and reads nothing that the manifest's hashes do not vouch for. Exit codes as train/main.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

TREE = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(TREE)  # was train/

from train import checkpoint  # noqa: E402
from train.checkpoint import Saved  # noqa: E402
from train.edge import leave_with  # noqa: E402
from train.errors import FAILED, Stop  # noqa: E402
from train.recipe import Kernels, Recipe, check  # noqa: E402
from train.storage import told_bytes  # noqa: E402
from train.weights import Weights, find_weights  # noqa: E402

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)
"""What transformers reads besides config.json and weights."""
TEMPLATE_FILE = "chat_template.jinja"
SHARD = "5GB"
"""Size of a safetensors file, as transformers and the Hub have it."""
OF_DEEPSPEED = ("deepspeed.runtime.", "deepspeed.utils.tensor_fragment.")
"""Modules whose classes its shards hold beside tensors: ZeroStageEnum, LossScaler, fragment_address (0.19.8)."""

Say = Callable[[str], None]


def choose(checkpoints: Path, step: int | None, say: Say) -> Saved:
    """Return the newest checkpoint whose files are what was written, or the one of `step`. Raises Stop."""
    whole = checkpoint.all_complete(checkpoints)
    if step is not None:
        found = [saved for saved in whole if saved.step == step]
        if not found:
            steps = ", ".join(str(saved.step) for saved in whole) or "none"
            raise Stop(checkpoints, f"no whole checkpoint of step {step}", f"one of: {steps}", "give another --step, or none")
        whole = found
    damaged = [f"{name}: {told}" for name, told in checkpoint.all_damaged(checkpoints).items()]
    for saved in reversed(whole):
        say(f"reading {saved.folder.name}, {told_bytes(saved.bytes)}")
        told = checkpoint.find_damage(saved)
        if told is None:
            return saved
        damaged.append(f"{saved.folder.name}: {told}")
        say(f"left {damaged[-1]}")
    observed = f"no checkpoint is whole ({'; '.join(damaged)})" if damaged else "no checkpoint yet"
    raise Stop(checkpoints, observed, "a whole one", "let the run save one, or give another --step")


def recipe_of(saved: Saved) -> Recipe:
    """Return the recipe that a checkpoint was made by. Raises Stop when this version does not know it."""
    try:
        return check(saved.manifest["recipe"], "")
    except Stop as stop:
        _, observed, _, _ = stop.told
        remedy = "use the version of r4090c that trained it"
        raise Stop(saved.folder / checkpoint.COMPLETE, f"its recipe: {observed}", "keys of this version", remedy) from None


def export(run: Path, models: Path, data_dir: Path, out: Path, *, merged: bool, step: int | None, say: Say) -> dict[str, Any]:
    """Write the folder `out`, which appears as a whole, and return what it holds. Raises Stop."""
    if out.exists():
        raise Stop(out, "is there already", "a folder to be made", "remove it, or give another --out")
    saved = choose(run / "checkpoints", step, say)
    recipe = recipe_of(saved)
    weights = find_weights(recipe.model, models)
    notices = []
    if merged:
        checkpoint.require_same_base(saved, "a CPU")
    if merged and recipe.method == "full":
        merged = False
        notices.append("--merged has no effect: method full has no adapters, all weights are in one place already")
    adapters = recipe.method != "full" and not merged
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        remedy = "give another --out, where you may write: the run may be somebody else's"
        raise Stop(out, f"cannot be made: {error.strerror}", "a folder to be made", remedy) from None
    try:
        say(f"importing torch, transformers{'' if recipe.method == 'full' else ', peft'}")
        state = trained_weights(saved, recipe)
        if adapters:
            told = _write_adapters(partial, out, state, recipe, weights)
        elif merged:
            told = _write_merged(partial, out, state, recipe, weights, saved.manifest["precision"], say)
        else:
            told = _write_model(partial, out, state, recipe, weights, saved.manifest["precision"])
        del state
        brought = _bring_tokenizer(partial, recipe, weights, data_dir)
        if brought:
            told["chat_template"], notice = _bring_template(partial, recipe, data_dir)
            notices += [notice] if notice else []
        origin = {
            "run": run.name,
            "step": saved.step,
            "recipe": recipe.name,
            "method": recipe.method,
            **told,
            "tokenizer": brought,
            **({"notices": notices} if notices else {}),
        }
        (partial / "r4090c.json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
        size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return {"out": str(out), **origin, "bytes": size}


def trained_weights(saved: Saved, recipe: Recipe) -> dict[str, Any]:
    """Return what the checkpoint holds of the weights: name -> tensor, in the precision of the training.

    Raises Stop for a checkpoint that is more than tensors and DeepSpeed's own classes: it may be of somebody else's run, and
    unpickling runs what it names.
    """
    import pickle

    import torch

    from train.model import DTYPES

    state = saved.folder / checkpoint.STATE
    whole = state / "mp_rank_00_model_states.pt"
    if whole.exists():  # ZeRO up to stage 2: rank 0 has all that it computes with
        try:
            return dict(torch.load(whole, map_location="cpu", mmap=True, weights_only=True)["module"])
        except pickle.UnpicklingError as error:
            raise _foreign(whole, str(error).splitlines()[0]) from None
    for shard in sorted(state.glob("*.pt")):  # DeepSpeed unpickles these whatever they name
        named = torch.serialization.get_unsafe_globals_in_checkpoint(str(shard))
        foreign = [name for name in named if not name.startswith(OF_DEEPSPEED)]
        if foreign:
            raise _foreign(shard, f"names {', '.join(foreign[:3])}")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(
        str(saved.folder), tag=checkpoint.STATE, exclude_frozen_parameters=recipe.method != "full"
    )
    dtype = DTYPES[saved.manifest["precision"]]
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def _foreign(file: Path, observed: str) -> Stop:
    return Stop(file, observed, "tensors, and classes of DeepSpeed", "do not load it: it would run code that no checkpoint has")


def _write_model(
    partial: Path, out: Path, state: dict[str, Any], recipe: Recipe, weights: Weights | None, precision: str
) -> dict[str, Any]:
    """Write all weights as transformers has them into `partial`, which becomes `out`."""
    import torch
    from transformers import AutoModelForCausalLM

    from train.device import choose_device
    from train.model import DTYPES, configuration
    from train.resnet import DEVIATION, MEAN, build_resnet

    told = {"kind": "model", "precision": precision}
    if recipe.model.family == "resnet":
        model: Any = build_resnet(recipe, choose_device(0), DTYPES[precision])
        del model.forward  # ours takes bytes and returns the loss
        model.load_state_dict(state, strict=True)
        model.save_pretrained(partial)
        pixels = f"pixels are (byte / 255 - {list(MEAN)}) / {list(DEVIATION)}"
        return {**told, "load": f"transformers.AutoModelForImageClassification.from_pretrained({str(out)!r}); {pixels}"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(recipe, weights), dtype=DTYPES[precision])
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    _save(model, partial)
    return {**told, "load": f"transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})"}


def _save(model: Any, out: Path) -> None:
    model.config.use_cache = True  # off in training alone
    model.save_pretrained(out, max_shard_size=SHARD)


def _write_adapters(partial: Path, out: Path, state: dict[str, Any], recipe: Recipe, weights: Weights | None) -> dict[str, Any]:
    """Write the adapters as peft has them into `partial`, which becomes `out`."""
    from safetensors.torch import save_file

    from train.model import adapter_config

    config = adapter_config(recipe)
    config.task_type, config.inference_mode = "CAUSAL_LM", True
    config.base_model_name_or_path = str(weights.folder) if weights else None
    config.save_pretrained(partial)
    named = {name.replace(".default.", "."): tensor.contiguous() for name, tensor in state.items()}
    save_file(named, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    base = str(weights.folder) if weights else f"random weights of seed {recipe.seed}; only --merged gives a model"
    return {"kind": "adapters", "base": base, "load": f"peft.PeftModel.from_pretrained(BASE, {str(out)!r})"}


def _write_merged(
    partial: Path, out: Path, state: dict[str, Any], recipe: Recipe, weights: Weights | None, precision: str, say: Say
) -> dict[str, Any]:
    """Write the adapters added to the weights that they were trained beside into `partial`, which becomes `out`."""
    from train.device import choose_device
    from train.model import DTYPES, build_model, choose_kernels

    device = choose_device(0)
    plain = recipe.model_copy(
        update={"loss_chunk_tokens": 0, "activation_checkpointing": False, "kernels": Kernels(attention="eager")}
    )
    kernels = choose_kernels(plain.kernels, device, precision, recipe.model.family)
    say("loading the model that the adapters belong to")
    model: Any = build_model(plain, weights, device, precision, kernels=kernels, sharded=False)
    told = model.load_state_dict(state, strict=False)
    if told.unexpected_keys:
        observed = f"has tensors that the recipe's adapters lack: {', '.join(told.unexpected_keys[:3])}"
        raise Stop("checkpoint", observed, "the adapters of its own recipe", "report this", FAILED)
    bits = {"int8": "8-bit ", "qlora": "4-bit "}.get(recipe.method, "")
    merged_into = f"the {bits}weights it trained beside" + (f", brought back to {precision}" if bits else "")
    say(f"merging into {merged_into}")
    _save(merge(model, DTYPES[precision]), partial)
    return {
        "kind": "merged model",
        "merged_into": merged_into,
        "precision": precision,
        "load": f"transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})",
    }


def merge(model: Any, dtype: Any) -> Any:
    """Return the model inside the PeftModel `model`, with plain matrices: what quantized ones stand for, plus the adapters.

    peft's own merge would quantize the sum again. The sum is made in fp32, one matrix after the other.
    """
    import torch
    from peft.utils.integrations import dequantize_bnb_weight

    base = model.get_base_model()
    for name, one in list(base.named_modules()):
        adapted = hasattr(one, "get_delta_weight")
        linear = one.get_base_layer() if adapted else one
        quantized = type(getattr(linear, "weight", None)).__name__ in ("Params4bit", "Int8Params")
        if name.endswith(".base_layer") or not (adapted or quantized):
            continue
        weight = dequantize_bnb_weight(linear.weight, state=getattr(linear, "state", None)) if quantized else linear.weight
        values = weight.float() + (one.get_delta_weight("default").float() if adapted else 0)
        new = torch.nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta", dtype=dtype)
        new.weight, new.bias = torch.nn.Parameter(values.to(dtype), requires_grad=False), linear.bias
        base.set_submodule(name, new)
    for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):  # train/model.py set them, for peft
        setattr(base, flag, False)
    return base


def _bring_tokenizer(out: Path, recipe: Recipe, weights: Weights | None, data_dir: Path) -> str | None:
    """Copy the tokenizer's files beside the weights; return where they are from, None when it is not known."""
    folders, whole = [weights.folder] if weights else [], (out / "config.json").exists()
    if recipe.data.path:
        try:
            name = json.loads((data_dir / recipe.data.path / "manifest.json").read_text(encoding="utf-8"))["tokenizer"]["name"]
            named = data_dir.parent / "models" / name  # the manifest has names, as the data may be from another machine
            folders.append(named.parent if named.suffix == ".json" else named)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the data may be gone; the weights' own tokenizer is as good
    for folder in folders:
        files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file() and (whole or "generation" not in name)]
        if any(file.name.startswith("token") for file in files):
            for file in files:
                if not (out / file.name).exists():
                    shutil.copyfile(file, out / file.name)
            return str(folder)
    return None


def _bring_template(out: Path, recipe: Recipe, data_dir: Path) -> tuple[str | None, str]:
    """Give the exported tokenizer the chat template of the data when it has none; return whose it has now, and a notice or ""."""
    told = source = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the data may be gone, or of another kind
        manifest = json.loads((data_dir / recipe.data.path / "manifest.json").read_text(encoding="utf-8"))
        told, source = manifest.get("template"), manifest.get("chat_template")
    own = own_template(out)
    if own is None and source:
        (out / TEMPLATE_FILE).write_text(source, encoding="utf-8")
        return f"of the data ({told})", ""
    if own is not None and source and own != source:
        notice = f"the tokenizer keeps its own chat template, but the data was made with another (its --template: {told})"
        return "of the tokenizer", f"{notice}: ask the model in that one"
    return ("of the tokenizer" if own is not None else None), ""


def own_template(folder: Path) -> str | None:
    """Return the chat template of the tokenizer in `folder` as transformers finds it, None where it has none."""
    beside = folder / TEMPLATE_FILE
    if beside.exists():
        return beside.read_text(encoding="utf-8")
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(found, list):  # several by name
        return next((one["template"] for one in found if one.get("name") == "default"), None)
    return found


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--data-dir", type=Path, required=True, metavar="FOLDER", help="as the training had it; models/ lies beside it"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to make [default: RUN/export, or RUN/export-merged]")
    parser.add_argument("--merged", action="store_true", help="add the adapters to the weights they were trained beside")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after this step [default: the newest whole one]")
    parser.add_argument("--json", action="store_true", help="tell everything as JSON, one object a line, also errors")
    return parser.parse_args()


def main() -> NoReturn:
    """Run and leave at once."""
    arguments = parse_arguments()
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(json.dumps({"doing": text}) if arguments.json else f"export   {text}", flush=True)

    os.environ.update({"R4090C_DEVICE": "cpu", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""})
    warnings.filterwarnings("ignore")  # the libraries', about devices nobody asked for
    run = arguments.run
    out = (arguments.out or run / ("export-merged" if arguments.merged else "export")).absolute()
    models = arguments.data_dir.parent / "models"

    def work() -> None:
        told = export(run, models, arguments.data_dir, out, merged=arguments.merged, step=arguments.step, say=say)
        if arguments.json:
            print(json.dumps({"result": told}), flush=True)
            return
        for notice in told.get("notices", ()):
            print(f"notice   {notice}", flush=True)
        size, took_s = told_bytes(told["bytes"]), time.monotonic() - began_s
        print(f"export   {told['kind']}, {size} in {took_s:.1f} s: {out}", flush=True)

    leave_with(work, out, as_json=arguments.json)


if __name__ == "__main__":
    main()
