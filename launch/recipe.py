"""Recipes: YAML data under train/recipes (or a user's own file), with `--set key=value`, resolved to the JSON the training reads.

Nothing of `train` is imported: the two sides meet in the file.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from r4090c.errors import InputErrors, UsageError

FOLDER = Path(__file__).resolve().parent.parent / "train" / "recipes"
REQUIRED: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "script": str,
    "model": dict,
    "data": dict,
    "steps": int,
    "micro_batch": int,
    "gradient_accumulation": int,
    "precision": str,
    "optimizer": dict,
    "schedule": dict,
    "gradient_clipping": (int, float),
    "ds_config": str,
    "checkpoint": dict,
    "seed": int,
}
"""Keys every recipe has, and their types; train/ checks the values."""
DEFAULTS: dict[str, Any] = {
    "method": "full",
    "lora": {
        "rank": 16,
        "alpha": 32,
        "dropout": 0.05,
        "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    },
    "global_batch": 0,
    "activation_checkpointing": False,
    "loss_chunk_tokens": 0,
    "kernels": {"attention": "auto", "liger": False, "compile": False},
    "loss_spike": 0.0,
    "eval": {"every_steps": 0, "sequences": 64, "data": None},
    "wandb": "",
    "elastic": True,
}
"""What a recipe that is silent about these means; `--set` may change them."""
CHECKPOINT_DEFAULTS: dict[str, Any] = {"keep_hours": 0.0, "copy_to": None}
"""The same for what may be left out below `checkpoint`."""
OPTIONAL = ("description", "resume", *DEFAULTS)
TRAINABLE: dict[str, tuple[Any, ...]] = {
    "method": ("full", "lora", "int8", "qlora"),
    "data.kind": ("text", "prepared", "images"),
    "optimizer.name": ("adamw", "adamw8bit"),
}
"""What train/ runs today; everything else can be planned. Whether a model's family trains the nodes' transformers says."""
MODEL_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "tie_word_embeddings"),
)
"""Fields of a model's config.json that memory and speed follow from; the rest the nodes read from the folder itself."""
AUTO = "auto"
"""`micro_batch: auto`: the ranks find the largest that fits, and keep `global_batch`."""
OTHER_NAMES = {
    "batch_size": "micro_batch or global_batch",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_steps": "steps",
    "epochs": "steps",
    "num_train_epochs": "steps",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "warmup_steps": "schedule.warmup_steps",
    "max_seq_length": "data.sequence_length",
    "sequence_length": "data.sequence_length",
    "gradient_checkpointing": "activation_checkpointing",
    "output_dir": "nothing: runs lie in paths.runs of cluster.yaml",
    "deepspeed": "ds_config",
    "dataset": "data",
}
"""What other tools call our keys."""
POSITIVE = ("steps", "micro_batch", "gradient_accumulation")
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises: for what is no YAML, for a date or a number that cannot be, for lists in lists without end."""
DEPTH_MAX = 32
"""est.: lists and mappings in each other, of a recipe; those of an alias that contains itself have no end."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A recipe's name becomes part of a folder's name."""


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with r4090c."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def ds_config_names() -> list[str]:
    """Return the DeepSpeed configurations that come with r4090c."""
    return sorted(path.name for path in (FOLDER.parent.parent / "ds_configs").glob("*.json"))


def is_script(target: str) -> bool:
    """True when `launch TARGET` means a script of the user's own."""
    return target.endswith(".py")


def load_recipe(target: str, sets: Sequence[str] = (), base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the recipe `target` (a name, or a path to a YAML file), or `base` (one resolved earlier), with `sets` applied.

    Raises UsageError naming the key, the value, and the nearest valid name.
    """
    own = target.endswith((".yaml", ".yml"))
    path = Path(target) if own else FOLDER / f"{target}.yaml"
    if base is None and not (path.is_file() if own else target in recipe_names()):
        near = difflib.get_close_matches(target, recipe_names(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(
            f"recipe {target}",
            f"there is none{hint}",
            f"one of {', '.join(recipe_names())}, a .yaml file, or a .py script",
            "r4090c recipes",
        )
    try:
        recipe = copy.deepcopy(base) if base is not None else yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, *NOT_YAML) as error:
        raise UsageError(str(path), " ".join(str(error).split()), "a readable YAML recipe") from error
    if not isinstance(recipe, dict):
        raise UsageError(str(path), f"holds a {type(recipe).__name__}", "a mapping of recipe keys")
    if isinstance(recipe.get("model"), str):
        recipe["model"] = model_in(recipe["model"], f"{path}: model")
    for key, value in DEFAULTS.items():
        recipe.setdefault(key, copy.deepcopy(value))
    if isinstance(recipe.get("model"), dict):
        recipe["model"].setdefault("weights", None)
    if isinstance(recipe.get("checkpoint"), dict):
        for key, value in CHECKPOINT_DEFAULTS.items():
            recipe["checkpoint"].setdefault(key, value)
    if isinstance(recipe.get("optimizer"), dict):
        recipe["optimizer"].setdefault("lr_reference_batch", None)
    errors: list[UsageError] = []
    for text in sets:
        try:
            _set(recipe, text)
        except UsageError as error:
            errors.append(error)
    errors += [_blamed(error, str(path), sets) for error in _mistakes(recipe, str(path))]
    if errors:
        raise errors[0] if len(errors) == 1 else InputErrors(errors)
    return recipe


def model_in(folder: str, culprit: str) -> dict[str, Any]:
    """Return what a recipe says of the model in `folder`, as transformers saves one. Raises UsageError naming the `culprit`."""
    file = Path(folder).expanduser().absolute() / "config.json"
    wanted = (
        "a model's folder, at this path here and on the nodes; a relative one is looked for where this is typed "
        "(`model.weights` in a recipe: below <paths.shared>/r4090c/models, with family and config beside it)"
    )
    remedy = "r4090c recipes show llama7b"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        family = str(config["model_type"])
    except OSError as error:
        raise UsageError(culprit, f"{file}: {error.strerror}", wanted, remedy) from None
    except (ValueError, RecursionError, KeyError, TypeError):
        raise UsageError(culprit, f"{file}: no JSON with model_type", wanted, remedy) from None
    told = {key: config[key] for key in MODEL_KEYS if config.get(key) is not None}
    return {"family": family, "weights": str(file.parent), "config": {**told, "use_cache": False}}


def untrainable(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what this version can plan but not train, like "method qlora (only full)"; nothing when train/ runs the recipe."""
    found = []
    for path, allowed in TRAINABLE.items():
        value: Any = recipe
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in allowed:
            told = [str(yaml.safe_dump(one)).removesuffix("\n...\n") for one in (value, *allowed)]
            found.append(f"{path} {told[0]} (only {' or '.join(told[1:])})")
    return tuple(found)


def require_trainable(recipe: Mapping[str, Any]) -> None:
    """Raise UsageError naming all of a recipe that this version can plan but not train."""
    found = untrainable(recipe)
    if found:
        observed = f"this version plans it, but does not train: {'; '.join(found)}"
        raise UsageError(f"recipe {recipe['name']}", observed, "a recipe that trains", "r4090c recipes")


def accumulation_of(recipe: Mapping[str, Any], world_size: int) -> int:
    """Return the micro-steps of a step, which follow from `global_batch` where that is given (`auto` counts as 1 sequence).

    Raises UsageError when it cannot be divided so.
    """
    if not recipe["global_batch"]:
        return int(recipe["gradient_accumulation"])
    together = world_size * (1 if recipe["micro_batch"] == AUTO else int(recipe["micro_batch"]))
    if recipe["global_batch"] % together:
        observed = f"{recipe['global_batch']} sequences a step: {world_size} ranks of micro_batch {recipe['micro_batch']}"
        wanted = f"a multiple of {together}"
        raise UsageError(f"recipe {recipe['name']}: global_batch", observed, wanted, f"--set global_batch={together}")
    return int(recipe["global_batch"]) // together


def world_sizes_allowed(recipe: Mapping[str, Any], world_size: int, checkpointed_world: int) -> str | None:
    """Return why a run that `checkpointed_world` ranks saved cannot go on with `world_size` of them, None when it can.

    train/ refuses the same; with `at_world_size` the global batch stays.
    """
    if world_size == checkpointed_world:
        return None
    if not recipe.get("elastic", DEFAULTS["elastic"]):
        return f"its checkpoint is of {checkpointed_world} ranks, and the recipe says elastic: false"
    if recipe["optimizer"]["name"] == "adamw8bit":
        return f"its checkpoint is of {checkpointed_world} ranks, and the 8-bit moments of adamw8bit cannot be divided anew"
    try:
        at_world_size(recipe, world_size, checkpointed_world)
    except UsageError as error:
        return f"{error.observed} (expected {error.expected})"
    return None


def at_world_size(recipe: Mapping[str, Any], world_size: int, checkpointed_world: int) -> dict[str, Any]:
    """Return the recipe as `world_size` ranks go on with what `checkpointed_world` saved: the global batch stays.

    micro_batch never grows. `global_batch` is told from then on, so that any later number of ranks keeps it too. Raises
    UsageError when it cannot be divided so.
    """
    if world_size == checkpointed_world:
        return dict(recipe)
    micro_batch = recipe["micro_batch"]
    global_batch = recipe["global_batch"] or micro_batch * recipe["gradient_accumulation"] * checkpointed_world
    if micro_batch != AUTO:
        fitting = [size for size in range(1, micro_batch + 1) if global_batch % (size * world_size) == 0]
        micro_batch = max(fitting, default=1)
    changed = {**recipe, "global_batch": global_batch, "micro_batch": micro_batch}
    accumulation = accumulation_of(changed, world_size)
    return changed if micro_batch == AUTO else {**changed, "gradient_accumulation": accumulation}


def load_ds_config(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed configuration a recipe names. Raises UsageError when it cannot be read here."""
    path = FOLDER.parent.parent / "ds_configs" / recipe["ds_config"]  # an absolute path stays as it is
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"ds_config {path}", str(error), "a DeepSpeed JSON that can be read here too, to be planned") from error
    if not isinstance(found, dict):
        raise UsageError(f"ds_config {path}", f"holds a {type(found).__name__}", "an object of DeepSpeed's keys")
    return found


def _blamed(error: UsageError, source: str, sets: Sequence[str]) -> UsageError:
    """Return the error with the `--set` of the key as its culprit, where there is one; its value may be a secret."""
    key = error.culprit.removeprefix(f"{source}: ")
    guilty = key in {text.partition("=")[0] for text in sets}
    return UsageError(f"--set {key}", error.observed, error.expected, error.next_command) if guilty else error


def _mistakes(recipe: Mapping[str, Any], source: str) -> list[UsageError]:
    """Return one error for each missing, mistyped or unknown key, and for what is not there."""
    errors = []
    for key, kind in REQUIRED.items():
        if key not in recipe:
            errors.append(UsageError(f"{source}: {key}", "missing", _wanted(kind)))
        elif key == "micro_batch" and recipe[key] == AUTO:
            pass
        elif not isinstance(recipe[key], kind) or isinstance(recipe[key], bool):
            errors.append(UsageError(f"{source}: {key}", f"{recipe[key]!r}", _wanted(kind)))
        elif key in POSITIVE and recipe[key] < 1:
            errors.append(UsageError(f"{source}: {key}", f"{recipe[key]!r}", "at least 1"))
    for key in recipe:
        if key not in REQUIRED and key not in OPTIONAL:
            near = OTHER_NAMES.get(str(key)) or next(iter(difflib.get_close_matches(str(key), [*REQUIRED, *OPTIONAL], n=1)), "")
            hint = f"; did you mean {near}?" if near else ""
            errors.append(UsageError(f"{source}: {key}", f"unknown{hint}", f"one of {', '.join([*REQUIRED, *OPTIONAL])}"))
    for key, default in DEFAULTS.items():
        wrong = type(recipe[key]) is not type(default) or (isinstance(default, int) and recipe[key] < 0)
        if wrong:
            errors.append(UsageError(f"{source}: {key}", f"{recipe[key]!r}", f"{_told(default)} like {default!r}"))
    saving = recipe.get("checkpoint")
    copy_to = saving.get("copy_to") if isinstance(saving, dict) else None
    if isinstance(copy_to, str) and ("@" in copy_to.partition("://")[2].partition("/")[0] or "?" in copy_to):
        wanted = "a plain URL: the recipe is kept in the run folder; give credentials with AWS_… variables of the nodes"
        errors.append(UsageError(f"{source}: checkpoint.copy_to", "holds credentials or options", wanted))
    config = recipe.get("ds_config")
    if isinstance(config, str) and not config.startswith("/") and config not in ds_config_names():
        wanted = f"one of {', '.join(ds_config_names())}, or the absolute path of a DeepSpeed JSON on the nodes"
        errors.append(UsageError(f"{source}: ds_config", repr(config), wanted))
    name, script = recipe.get("name"), recipe.get("script")
    if isinstance(name, str) and not NAME.fullmatch(name):
        errors.append(UsageError(f"{source}: name", repr(name), "letters, digits, `.`, `_` and `-`, at most 64"))
    if isinstance(script, str) and not _is_training_script(script):
        errors.append(UsageError(f"{source}: script", repr(script), "a Python file below train/, like main.py"))
    unwritable = None if errors else next(_unwritable(recipe), None)
    if unwritable is not None:
        key, told = unwritable
        errors.append(UsageError(f"{source}: {key}", told, "what JSON can hold: the nodes read the recipe as JSON"))
    return errors


def _unwritable(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong with it) of what JSON cannot hold: dates, NaN, keys that are no text, what contains itself."""
    if depth > DEPTH_MAX:
        yield path[:64], f"lists or mappings more than {DEPTH_MAX} deep"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _unwritable(item, f"{path}.{key}".lstrip("."), depth + 1)
            else:
                yield f"{path}.{key}".lstrip("."), f"a key that is {_told(key)}"
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _unwritable(item, f"{path}[{place}]", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{value!r} is no finite number"
    elif value is not None and not isinstance(value, (str, int, float)):
        yield path, f"{value!r} is {_told(value)}"


def _is_training_script(script: str) -> bool:
    """True for the path, below train/, of a Python file that is there: nothing else is sent to the nodes."""
    if "\0" in script or "\\" in script or not script.endswith(".py"):
        return False
    path = FOLDER.parent / script
    return path.is_file() and path.resolve().is_relative_to(FOLDER.parent) and ".." not in Path(script).parts


def _wanted(kind: type | tuple[type, ...]) -> str:
    return {int: "a whole number", str: "text", dict: "a mapping"}[kind] if isinstance(kind, type) else "a number"


def _set(recipe: dict[str, Any], text: str) -> None:
    """Apply one `key.subkey=value`; the key must exist and the value be of its kind. Raises UsageError."""
    name, equals, raw = text.partition("=")
    culprit = f"--set {text}"
    if not equals or not name:
        raise UsageError(culprit, "no `=`" if name else "no key", "key=value, like steps=20 or optimizer.lr=1e-3")
    try:
        value = yaml.safe_load(raw) if raw else ""
    except NOT_YAML as error:
        raise UsageError(culprit, "the value is not YAML", "a number, a word, true/false, or [a, list]") from error
    if name == "model" and isinstance(value, str):
        recipe["model"] = model_in(value, culprit)
        return
    *folders, last = name.split(".")
    at: Any = recipe
    for depth, part in enumerate([*folders, last]):
        if not isinstance(at, dict) or part not in at:
            raise _no_such_key(culprit, folders[:depth], part, at)
        if depth < len(folders):
            at = at[part]
    old = at[last]
    if isinstance(old, float) and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 1e-3 as text
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(culprit, f"{raw!r} is no finite number", f"{_told(old)} like {old!r}")
    if name == "micro_batch" and AUTO in (old, value):
        old = value  # a number or this word; `_mistakes` looks at it
    if old is not None and type(old) is not type(value):
        raise UsageError(culprit, f"{value!r} is {_told(value)}", f"{_told(old)} like {old!r}")
    at[last] = value


def _no_such_key(culprit: str, walked: Sequence[str], part: str, at: object) -> UsageError:
    names = [str(key) for key in at] if isinstance(at, dict) else []
    near = difflib.get_close_matches(part, names, n=1)
    where = ".".join(walked) or "the recipe"
    if not names:
        return UsageError(culprit, f"{where} has no keys of its own", f"--set {where}=VALUE")
    hint = f"; did you mean {'.'.join([*walked, near[0]])}?" if near else ""
    return UsageError(culprit, f"{where} has no key {part!r}{hint}", f"one of {', '.join(names)}")


def _told(value: object) -> str:
    """Return what kind of value this is, in YAML's words."""
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return "nothing (null)" if value is None else kinds.get(type(value), f"a {type(value).__name__}")
