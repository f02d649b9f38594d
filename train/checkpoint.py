"""Checkpoints that are either whole or not there, whatever moment the run is killed at.

    checkpoints/
      step_00000020/            appears by one rename, after every rank has finished writing
        complete                the manifest: files and sizes, step, world size, data, recipe
        state/…                 DeepSpeed's own files
      step_00000040.partial/    being written, or left over from a kill
      latest                    the name of the newest complete one, for people and tools

A folder that is not complete is never read, and rank 0 removes it at the next start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.errors import Stop
from train.metrics import replace_file
from train.recipe import Recipe

STATE = "state"
"""DeepSpeed's tag: the folder below ours that it writes."""

COMPLETE = "complete"

PARTIAL, OLD = ".partial", ".old"
"""Suffixes of a checkpoint that is being written, and of one that is being removed."""
_OURS = re.compile(r"step_\d{8}")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """The optimizer step after which it was saved."""
        return int(self.manifest["step"])


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step`."""
    return checkpoints / f"step_{step:08d}"


def read(folder: Path) -> Saved | str:
    """Return the checkpoint in `folder`, or why it is not whole: no manifest, a state file missing or of another size.

    DeepSpeed's helper scripts (*.py) beside the state are no state: somebody may well edit them.
    """
    try:
        manifest = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        state = {name: int(size) for name, size in manifest["files"].items() if not name.endswith(".py")}
        for name, size in state.items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {size} were written"
        if folder != folder_of(folder.parent, manifest["step"]):
            return f"its manifest is of step {manifest['step']}"
        return Saved(folder, manifest)
    except OSError as error:
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{COMPLETE} is not a manifest of ours"


def _finished(checkpoints: Path) -> list[Path]:
    """Return the folders that were given their final name, oldest first: whoever is not whole was damaged later."""
    folders = sorted(checkpoints.glob("step_*")) if checkpoints.is_dir() else []
    return [folder for folder in folders if _OURS.fullmatch(folder.name)]


def all_complete(checkpoints: Path) -> list[Saved]:
    """Return the complete checkpoints, oldest first."""
    return [saved for folder in _finished(checkpoints) if isinstance(saved := read(folder), Saved)]


def all_damaged(checkpoints: Path) -> dict[str, str]:
    """Return name -> what is wrong, of finished checkpoints that are not whole any more. Nobody removes them but their owner."""
    return {folder.name: told for folder in _finished(checkpoints) if isinstance(told := read(folder), str)}


def remove_half_ones(checkpoints: Path) -> list[str]:
    """Remove what a killed run left behind: half written or half removed. Return the names. Rank 0 alone."""
    folders = sorted(checkpoints.glob("step_*")) if checkpoints.is_dir() else []
    half = [folder for folder in folders if folder.suffix in (PARTIAL, OLD) and _OURS.fullmatch(folder.stem)]
    for folder in half:
        shutil.rmtree(folder)
    return [folder.name for folder in half]


def find_start(checkpoints: Path, recipe: Recipe, world_size: int, data_sha256: str) -> Saved | None:
    """Return the checkpoint to continue from, None to start anew. Raises Stop when it cannot be continued."""
    complete = all_complete(checkpoints)
    if not complete:
        damaged = all_damaged(checkpoints)
        if damaged:
            told = "; ".join(f"{name}: {why}" for name, why in damaged.items())
            remedy = "restore them from a copy, or move them away to start anew"
            raise Stop(checkpoints, f"no checkpoint is whole ({told})", "a whole one", remedy)
        return None
    newest = complete[-1]
    if not recipe.resume:
        raise Stop(
            newest.folder,
            "the run folder already has this checkpoint and the recipe says resume: false",
            "an empty run folder",
            "set resume: true to continue, or give another --run-dir",
        )
    require_same(newest, recipe, world_size, data_sha256)
    return newest


def require_same(saved: Saved, recipe: Recipe, world_size: int, data_sha256: str) -> None:
    """Raise Stop unless a run with this world size, data and model can continue from `saved`."""
    manifest, file = saved.manifest, saved.folder / COMPLETE
    if manifest["world_size"] != world_size:
        raise Stop(
            file,
            f"saved by {manifest['world_size']} ranks, this run has {world_size}",
            f"{manifest['world_size']} ranks: ZeRO shards load only at the same number",
            f"start {manifest['world_size']} ranks, or begin anew with another --run-dir",
        )
    if manifest["data_sha256"] != data_sha256:
        raise Stop(
            file,
            f"trained on data {manifest['data_sha256'][:12]}, this run has data {data_sha256[:12]}",
            "the same data, so that the run continues where it stopped",
            "give the old --data-dir and data.sources, or begin anew with another --run-dir",
        )
    before, now = _keys_of(manifest["recipe"]["model"]), _keys_of(recipe.model.model_dump(mode="json"))
    if before != now:
        keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        raise Stop(
            file,
            "another model: " + ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys),
            "the same model",
            "restore it in the recipe, or begin anew with another --run-dir",
        )


def _keys_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's `model` without its folder `config`; recipes of before said nothing about weights: there were none."""
    return {"weights": None, **{key: value for key, value in model.items() if key != "config"}, **model["config"]}


def changed_keys(saved: Saved, recipe: Recipe) -> list[str]:
    """Return the keys of the recipe that differ from the one that was saved."""
    now = recipe.model_dump(mode="json")
    return sorted(key for key in now if now[key] != saved.manifest["recipe"].get(key))


def save(
    checkpoints: Path,
    step: int,
    write_state: Callable[[Path], None],
    barrier: Callable[[], None],
    rank: int,
    manifest: dict[str, Any],
    keep: int,
) -> None:
    """Save after `step`. Every rank calls this; the others go on when all have written, rank 0 then completes it.

    `write_state(folder)` writes this rank's files below `folder`/STATE. Only rank 0 makes, renames and removes folders.
    """
    folder = folder_of(checkpoints, step)
    partial = folder.with_suffix(PARTIAL)
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / STATE).mkdir(parents=True)
    barrier()
    write_state(partial)
    barrier()
    if rank == 0:
        _flush_to_disk(partial)
        files = {str(file.relative_to(partial)): file.stat().st_size for file in sorted(partial.rglob("*")) if file.is_file()}
        replace_file(partial / COMPLETE, json.dumps({"step": step, **manifest, "files": files}, indent=1))
        if folder.exists():
            _remove(folder)
        partial.rename(folder)
        replace_file(checkpoints / "latest", folder.name + "\n")
        for old in all_complete(checkpoints)[:-keep]:
            _remove(old.folder)


def _flush_to_disk(folder: Path) -> None:
    """Make sure that what was written survives a power cut before the checkpoint is called complete.

    One rank is enough: files of ranks on this machine lie in its page cache, and NFS clients flushed theirs on closing them.
    """
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that a kill meanwhile leaves a half one."""
    old = folder.with_suffix(OLD)
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)
