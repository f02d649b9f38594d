"""Checkpoints that are either whole or not there, whatever moment the run is killed at.

    checkpoints/
      step_00000020/            appears by one rename, after every rank has finished writing
        complete                the manifest: files with sizes and hashes, step, world size, data, recipe
        state/…                 DeepSpeed's own files
      step_00000040.partial/    being written, or left over from a kill
      latest                    the name of the newest complete one, for people and tools

A folder that is not complete is never read, and rank 0 removes it at the next start. What is wrong on one rank ends all of
them, with the same line.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from train.errors import FAILED, Stop, counted
from train.metrics import replace_file
from train.recipe import AUTO, Checkpoint, Recipe
from train.storage import ROOM, flush_to_disk, limited, refused, sha256_of, told_bytes

STATE = "state"
"""DeepSpeed's tag: the folder below ours that it writes."""

COMPLETE = "complete"

PARTIAL, OLD = ".partial", ".old"
"""Suffixes of a checkpoint that is being written, and of one that is being removed."""
_OURS = re.compile(r"step_\d{8}")

Files = dict[str, dict[str, Any]]
"""Name below the checkpoint's folder -> {"bytes", "sha256"}."""


@dataclass(frozen=True)
class Ranks:
    """All ranks, as far as checkpoints need them. `gather(value)` returns everyone's values, in order of ranks, to everyone."""

    rank: int
    count: int
    gather: Callable[[Any], list[Any]]


NFS_CACHE_S = 60.0
"""So long a client may go on believing that a new file is not there (nfs(5): acdirmax)."""

ALONE = Ranks(0, 1, lambda value: [value])


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """The optimizer step after which it was saved."""
        return int(self.manifest["step"])

    @property
    def bytes(self) -> int:
        """What its files take."""
        return sum(int(file["bytes"]) for file in self.manifest["files"].values())


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step`."""
    return checkpoints / f"step_{step:08d}"


def fault_of(manifest: Any, name: str) -> str:
    """Return why something read from JSON is not the manifest of the checkpoint called `name`, "" when it is."""
    try:
        if folder_of(Path(), manifest["step"]).name != name:
            return f"it is of step {manifest['step']}"
        kinds: dict[str, Any] = {"saved_at": (int, float), "world_size": int, "data_sha256": str, "recipe": dict, "files": dict}
        for key, kind in kinds.items():
            if not isinstance(manifest[key], kind):
                return f"{key} is {manifest[key]!r:.60}"
        for file, written in manifest["files"].items():
            if not isinstance(written["bytes"], int) or not isinstance(written["sha256"], str):
                return f"files: {file} is {written!r:.60}"
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                return f"files: {file} lies outside"
    except KeyError as error:
        return f"it lacks {error}"
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    return ""


def read(folder: Path) -> Saved | str:
    """Return the checkpoint in `folder`, or why it is not whole: no manifest, a file missing or of another size.

    Files that the manifest does not name are somebody else's. What is in the files, `find_damage` looks at.
    """
    try:
        manifest = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        wrong = fault_of(manifest, folder.name)
        if wrong:
            return f"{COMPLETE} is not a manifest of ours: {wrong}"
        for name, file in manifest["files"].items():
            found, written = (folder / name).stat().st_size, file["bytes"]
            if found != written:
                return f"{name} has {found} bytes, {written} were written"
        return Saved(folder, manifest)
    except OSError as error:
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    except ValueError as error:
        return f"{COMPLETE} is not a manifest of ours: {error}"


def find_damage(saved: Saved, part: int = 0, of: int = 1) -> str | None:
    """Return which file is not what was written, None when all are. Of `of` ranks each reads its `part` of the files."""
    for name in sorted(saved.manifest["files"])[part::of]:
        try:
            found = sha256_of(saved.folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        written = saved.manifest["files"][name]["sha256"]
        if found != written:
            return f"{name} was changed: its sha256 is {found[:12]}…, {written[:12]}… was written"
    return None


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
            "set resume: true to continue, or begin a new run: r4090c launch without --resume",
        )
    require_same(newest, recipe, world_size, data_sha256)
    return newest


def divided(recipe: Recipe, start: Saved | None, world_size: int) -> Recipe:
    """Return the recipe as so many ranks train it after `start`: with the global batch that the run began with.

    Where that needs it the micro-batch becomes smaller, never larger. Raises Stop when nothing divides it.
    """
    began = first_world_size(start) if start else world_size
    if began == world_size or recipe.micro_batch == AUTO:
        return recipe.divided(world_size)
    batch = recipe.samples_per_step(began)
    fitting = [size for size in range(1, recipe.micro_batch + 1) if batch % (size * world_size) == 0]
    return recipe.model_copy(update={"global_batch": batch}).divided(world_size, max(fitting, default=1))


def first_world_size(start: Saved) -> int:
    """Return how many ranks the run began with: where the recipe tells no global_batch, it follows from them."""
    return int(start.manifest.get("first_world_size", start.manifest["world_size"]))


def agree_on_start(
    start: Saved | None, checkpoints: Path, check: Callable[[Saved], None], ranks: Ranks, say: Callable[[str], None] = print
) -> Saved | None:
    """Return the same checkpoint on every rank: rank 0's choice, or an earlier one where files of that were changed since.

    On network storage another rank may still see an older folder, so rank 0 chooses. `check` raises Stop for one that the run
    cannot continue from. Every file is read, by one of the ranks; `say` is told, on rank 0, what is left alone.
    """
    damaged = []
    step = ranks.gather(start.step if start else 0)[0]
    while step:
        folder = folder_of(checkpoints, step)
        saved = _read_patiently(folder)
        seen = ranks.gather(saved if isinstance(saved, str) else None)
        for rank, told in enumerate(seen):
            if told:
                expected = "the checkpoint that rank 0 continues from"
                remedy = "put paths.shared of cluster.yaml on storage that all nodes share: r4090c preflight --only shared-path"
                raise Stop(folder, f"not whole, as rank {rank} sees it: {told}", expected, remedy)
        assert isinstance(saved, Saved)
        check(saved)
        told = next((told for told in ranks.gather(find_damage(saved, ranks.rank, ranks.count)) if told), None)
        if told is None:
            return saved
        damaged.append(f"{folder.name}: {told}")
        earlier = [one.step for one in all_complete(checkpoints) if one.step < step]
        step = ranks.gather(earlier[-1] if earlier else 0)[0]
        if ranks.rank == 0:
            say(f"left {folder.name} alone, it is damaged: {told}")
    if damaged:
        remedy = "restore them from a copy, or move them away to start anew"
        raise Stop(checkpoints, f"no checkpoint is whole ({'; '.join(damaged)})", "a whole one", remedy)
    return None


def _read_patiently(folder: Path) -> Saved | str:
    """Return what `read` does, once it is good news or NFS has no excuse any more."""
    deadline_s = time.monotonic() + (NFS_CACHE_S if folder.parent.is_dir() else 0)
    while isinstance(saved := read(folder), str) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return saved


def require_same(saved: Saved, recipe: Recipe, world_size: int, data_sha256: str) -> None:
    """Raise Stop unless a run with this world size, data and model can continue from `saved`."""
    manifest, file = saved.manifest, saved.folder / COMPLETE
    quantized = recipe.optimizer.name == "adamw8bit"
    if manifest["world_size"] != world_size and (quantized or not recipe.elastic):
        why = "moments of 8 bits cannot be divided anew" if quantized else "the recipe says elastic: false"
        raise Stop(
            file,
            f"saved by {counted(manifest['world_size'], 'rank')}, this run has {world_size}",
            f"{counted(manifest['world_size'], 'rank')}: {why}",
            f"start {counted(manifest['world_size'], 'rank')}, {'' if quantized else 'set elastic: true, '}or begin a new run: "
            "r4090c launch without --resume (`r4090c export` needs no ranks at all)",
        )
    if manifest["data_sha256"] != data_sha256:
        raise Stop(
            file,
            f"trained on data {manifest['data_sha256'][:12]}, this run has data {data_sha256[:12]}",
            "the same data, so that the run continues where it stopped",
            "restore data in the recipe, and the folder that it names, or begin a new run: r4090c launch without --resume",
        )
    before, now = (_what_trains(one) for one in (manifest["recipe"], recipe.model_dump(mode="json")))
    if before != now:
        keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        raise Stop(
            file,
            "another training: " + ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys),
            "the same model, adapters and optimizer",
            "restore it in the recipe, or begin a new run: r4090c launch without --resume",
        )


def require_same_state(saved: Saved, stage: int, precision: str) -> None:
    """Raise Stop when the optimizer's state was divided among the ranks, or is in numbers, that this run's engine cannot load.

    ZeRO stages 1 and 2 divide it alike.
    """
    before = saved.manifest.get("zero_stage", stage)
    if before != stage and {before, stage} != {1, 2}:
        remedy = "restore ds_config in the recipe, or begin a new run: r4090c launch without --resume"
        raise Stop(saved.folder / COMPLETE, f"saved under ZeRO stage {before}, this run has {stage}", f"stage {before}", remedy)
    wanted = str(saved.manifest.get("precision", precision))
    if wanted != precision:
        remedy = f"set precision: {wanted} in the recipe, or begin a new run: r4090c launch without --resume"
        raise Stop(saved.folder / COMPLETE, f"saved in {wanted}, this run computes in {precision}", wanted, remedy)


def require_same_base(saved: Saved, drawn_on: str | None) -> None:
    """Raise Stop when the adapters lie beside random weights that are drawn anew at each start, and would be others here."""
    before = saved.manifest.get("drawn_on")
    if before and drawn_on and before != drawn_on:
        observed = f"its adapters trained beside random weights that {before} drew, and {drawn_on} draws others"
        where = "continue or evaluate on such a device (export computes on a CPU)"
        remedy = f"{where}; or train adapters beside weights of a folder (model.weights), or with method: full"
        raise Stop(saved.folder / COMPLETE, observed, before, remedy)


def _what_trains(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what of a recipe decides which tensors there are, in a checkpoint too, and what they start from: key -> value.

    Recipes of before said nothing about weights and method: there were none, and all was trained.
    """
    model, method = recipe["model"], recipe.get("method", "full")
    adapters = {f"lora.{key}": value for key, value in (recipe.get("lora") or {}).items()} if method != "full" else {}
    if method != "full" and model.get("weights") is None:  # what lies beside the adapters is made of it at each start
        adapters["seed"] = recipe["seed"]
    told = {"family": model["family"], "weights": model.get("weights"), "method": method, **model["config"], **adapters}
    return {**told, "optimizer.name": recipe["optimizer"]["name"]}  # its moments are in numbers of its own


def changed_keys(saved: Saved, recipe: Recipe) -> list[str]:
    """Return the keys of the recipe that differ from the one that was saved, other than `resume`, which says only that."""
    now = recipe.model_dump(mode="json", exclude={"resume"})
    return sorted(key for key in now if now[key] != saved.manifest["recipe"].get(key))


def save(
    checkpoints: Path,
    step: int,
    write_state: Callable[[Path], Files],
    ranks: Ranks,
    manifest: dict[str, Any],
    rotation: Checkpoint,
    needed_bytes: int = 0,
    in_use: Collection[str] = (),
) -> Path:
    """Save after `step` and return the folder. Every rank calls this; all go on when it is complete, or raise the same Stop.

    `write_state(folder)` writes this rank's files below `folder`/STATE and tells them. Only rank 0 makes, renames and removes
    folders. `needed_bytes`: an estimate for the first one. Those `in_use` are not rotated away.
    """
    folder = folder_of(checkpoints, step)
    partial = folder.with_suffix(PARTIAL)

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        _make_room(checkpoints, needed_bytes, in_use)
        (partial / STATE).mkdir(parents=True)

    def complete() -> None:
        for name, file in files.items():
            found = (partial / name).stat().st_size
            if found != file["bytes"]:
                expected = f"{file['bytes']}, as its rank has written"
                remedy = "put paths.shared of cluster.yaml on storage that all nodes share: r4090c preflight --only shared-path"
                raise Stop(partial / name, f"rank 0 sees {found} bytes", expected, remedy, FAILED)
        told = {"step": step, "saved_at": round(time.time(), 3), **manifest, "files": files}
        publish(partial, told)
        rotate(checkpoints, step, rotation, in_use)

    _together(ranks, partial, lambda: _alone(begin, ranks, partial))
    written = _together(ranks, partial, lambda: write_state(partial))
    files = {name: file for one in written for name, file in sorted(one.items())}
    _together(ranks, partial, lambda: _alone(complete, ranks, partial))
    return folder


def publish(partial: Path, manifest: dict[str, Any]) -> None:
    """Give a checkpoint, whose files are on disk, its manifest and its name. All that survives a power cut."""
    folder = partial.with_suffix("")
    replace_file(partial / COMPLETE, json.dumps(manifest, indent=1))
    for path in (partial / COMPLETE, *sorted({(partial / name).parent for name in manifest["files"]} | {partial})):
        flush_to_disk(path)
    if folder.exists():
        _remove(folder)
    partial.rename(folder)
    replace_file(folder.parent / "latest", folder.name + "\n")
    flush_to_disk(folder.parent)


def _alone(action: Callable[[], None], ranks: Ranks, partial: Path) -> None:
    """Do what only rank 0 does."""
    if ranks.rank == 0:
        with limited(partial, "making, completing or removing folders"):
            action()


def _together(ranks: Ranks, partial: Path, action: Callable[[], Any]) -> list[Any]:
    """Do a part of saving, and return what it gave on every rank. Raises the same Stop on all when it failed on one."""
    told: tuple[str, str, str, str] | None = None
    result = None
    try:
        result = action()
    except OSError as error:
        told = refused(error, partial).told
    except Stop as stop:
        told = stop.told
    everyone = ranks.gather((told, result))
    for rank, (told, _) in enumerate(everyone):
        if told:
            whole = all_complete(partial.parent)
            if ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            culprit, observed, expected, remedy = told
            kept = f"{whole[-1].folder.name} is whole and can be continued from" if whole else "there is no earlier checkpoint"
            if expected in ROOM and len(whole) > 1:
                remedy += ", or lower checkpoint.keep"
            raise Stop(culprit, f"{observed} (rank {rank}, saving {partial.stem})", expected, f"{remedy}; {kept}", FAILED)
    return [result for _, result in everyone]


def _make_room(checkpoints: Path, needed_bytes: int, in_use: Collection[str]) -> None:
    """Raise Stop unless the disk has room for the next checkpoint. Older ones go for that, never the last whole one."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    free, needed, older = _room(checkpoints, needed_bytes, in_use)
    if free + sum(saved.bytes for saved in older) < needed:
        observed = f"{told_bytes(free)} free, {told_bytes(needed)} needed for the next checkpoint"
        raise Stop(checkpoints, observed, "room on the disk", "make some (df -h)", FAILED)
    while free < needed and older:
        oldest = older.pop(0)
        print(f"removed {oldest.folder.name} early: {told_bytes(free)} free, {told_bytes(needed)} needed", flush=True)
        _remove(oldest.folder)
        free = shutil.disk_usage(checkpoints).free


def no_room(checkpoints: Path, needed_bytes: int) -> str:
    """Return a notice when the disk has no room for the next checkpoint as things are, else ""."""
    free, needed, older = _room(checkpoints, needed_bytes)
    if free + sum(saved.bytes for saved in older) >= needed:
        return ""
    told = f"{told_bytes(free)} free, about {told_bytes(needed)} needed for a checkpoint"
    return f"{checkpoints}: {told}: make room (df -h) before the first one, or the run ends there"


def _room(checkpoints: Path, needed_bytes: int, in_use: Collection[str] = ()) -> tuple[int, int, list[Saved]]:
    """Return free bytes, those of the next checkpoint (`needed_bytes` where there is none yet), and what may go for it."""
    whole = all_complete(checkpoints)
    needed = whole[-1].bytes if whole else needed_bytes
    older = [saved for saved in whole[:-1] if saved.folder.name not in in_use]
    folder = checkpoints if checkpoints.is_dir() else checkpoints.parent
    return shutil.disk_usage(folder).free, needed, older


def rotate(checkpoints: Path, step: int, rotation: Checkpoint, in_use: Collection[str] = ()) -> None:
    """Remove what is too many or too old of the whole checkpoints up to `step`, which itself stays.

    Later ones are left alone: the run did not continue from them, as somebody changed them.
    """
    older = [saved for saved in all_complete(checkpoints) if saved.step < step]
    for saved in outdated([(one, float(one.manifest["saved_at"])) for one in older], rotation, time.time()):
        if saved.folder.name in in_use:
            continue
        try:
            _remove(saved.folder)
        except OSError as error:  # no reason to stop training: the next start removes what is left
            print(f"{saved.folder.name} could not be removed: {refused(error, saved.folder)}", flush=True)


def outdated(older: list[tuple[Any, float]], rotation: Checkpoint, now_s: float) -> list[Any]:
    """Return which of the (checkpoint, time of saving), oldest first and all older than the newest, are not kept any more."""
    beyond = len(older) - (rotation.keep - 1) if rotation.keep else 0
    limit_s = rotation.keep_hours * 3600 if rotation.keep_hours else float("inf")
    return [one for index, (one, saved_at_s) in enumerate(older) if index < beyond or now_s - saved_at_s > limit_s]


def _remove(folder: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that a kill meanwhile leaves a half one."""
    old = folder.with_suffix(OLD)
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)
