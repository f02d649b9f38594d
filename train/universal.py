"""Continue a checkpoint with another number of ranks than saved it: each rank takes, of all shards, what is its share now.

    saved by 2    |a a a a a b b b|b b c c c c - -|          a number of each weight, and of each of its moments, in order;
    loaded by 3   |a a a a a b|b b b b c c|c c - - - -|      where a shard ends in a weight, the next one goes on; - is padding

DeepSpeed loads ZeRO's shards only where as many ranks load as saved. Its ds_to_universal writes the whole state to the disk
twice over before anybody can load it, and its loader leaves out what is no parameter. Here nothing is written, so nothing can be
left half or fill the disk: while the engine loads, a reader in the place of its checkpoint engine maps the old shards into
memory and hands over the one that this rank would have written. What happens then is DeepSpeed's own loading. Numbers are
copied, never computed with: weights and moments keep every bit (tests/train/test_universal.py compares them with what
ds_to_universal makes of the same checkpoint).
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from train.checkpoint import STATE, Ranks, Saved
from train.errors import FAILED, Stop, counted
from train.recipe import zero_of
from train.storage import refused

FLAT_WEIGHTS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
"""What DeepSpeed's optimizers call a rank's weights, flat, by group: ZeRO 1 and 2, its BF16_Optimizer, ZeRO 3 (0.19.8)."""


@dataclass(frozen=True)
class Piece:
    """`count` numbers of a weight, from its number `first` on, which lie from `at` on in a rank's flat tensors of `group`."""

    name: str
    first: int
    count: int
    group: int
    at: int


@contextmanager
def divided_anew(engine: Any, saved: Saved, ranks: Ranks) -> Iterator[None]:
    """Within this context the engine loads `saved` as if these ranks had saved it. Raises the same Stop on all ranks, if on one.

    Every rank calls this. Without ZeRO there is nothing to divide.
    """
    came: Reader | tuple[str, str, str, str]
    try:
        came = Reader(engine, saved, ranks)
    except Stop as stop:
        came = stop.told
    except OSError as error:
        came = refused(error, saved.folder).told
    for told in ranks.gather(came if isinstance(came, tuple) else None):
        if told:
            culprit, observed, expected, remedy = told
            raise Stop(culprit, observed, expected, remedy, FAILED)
    assert isinstance(came, Reader)
    reader = came
    usual, engine.checkpoint_engine = engine.checkpoint_engine, reader
    engine._get_all_ckpt_names = lambda *_: [str(reader.model)]  # ZeRO 3 has one for each rank that saved, all alike
    try:
        yield
    finally:
        engine.checkpoint_engine = usual
        del engine._get_all_ckpt_names


class Reader(TorchCheckpointEngine):
    """DeepSpeed's checkpoint engine, which answers with what this rank would have written. Raises Stop when shards do not fit."""

    def __init__(self, engine: Any, saved: Saved, ranks: Ranks) -> None:
        super().__init__()
        folder, self.ranks = saved.folder / STATE, ranks
        stage = engine.zero_optimization_stage()
        self.model = folder / ("zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt")
        self.shard: dict[str, Any] = {}
        if stage:
            before = zero_of(_mapped(self.model)["ds_config"]).get("round_robin_gradients", False)
            if before or engine.zero_round_robin_gradients():  # DeepSpeed then notes places that are not those of the numbers
                remedy = f"start {counted(saved.manifest['world_size'], 'rank')}, as saved it"
                raise Stop(folder, "its ds_config has round_robin_gradients", "shards in the order of the weights", remedy)
            files = [shard_in(folder, rank) for rank in range(saved.manifest["world_size"])]
            shards = [_mapped(file)[OPTIMIZER_STATE_DICT] for file in files]
            if stage == 3:
                shapes = _mapped(self.model)[PARAM_SHAPES]
                there = [share_of(shapes, rank, len(shards)) for rank in range(len(shards))]
                here = share_of(engine._get_zero_param_shapes(), ranks.rank, ranks.count)
            else:
                there, here = pieces_of([shard[PARAM_SLICE_MAPPINGS] for shard in shards]), share_here(engine.param_names)
            self.shard = divide(shards, there, here, engine.optimizer, folder)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return what DeepSpeed asks for: the shard of this rank, or what is common to all ranks."""
        if path.endswith("_optim_states.pt"):
            return {OPTIMIZER_STATE_DICT: self.shard}
        return {**super().load(path, map_location), "dp_world_size": self.ranks.count}


def shard_in(folder: Path, rank: int) -> Path:
    """Return the file of the optimizer's state that `rank` wrote. Raises Stop when it is not there."""
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    found = [file for file in (folder / name, folder / f"bf16_{name}") if file.exists()]
    if not found:
        raise Stop(
            folder / name, "is missing", "a shard of each rank that saved", "restore it, or move the checkpoint away", FAILED
        )
    return found[0]


def _mapped(file: Path) -> Any:
    """Return what a file holds; its tensors stay on the disk until they are looked at.

    Unpickled as DeepSpeed does with the same files when the number of ranks is the same: they are this run's own, hashed in its
    manifest, and hold classes of DeepSpeed's.
    """
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)


def pieces_of(mappings: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Piece]]:
    """Return for each rank which pieces it has, of ZeRO 1 and 2's notes: for each rank and group, name -> place."""
    before: Counter[str] = Counter()
    ranks = []
    for groups in mappings:
        pieces = []
        for group, places in enumerate(groups):
            for name, place in places.items():
                pieces.append(Piece(name, before[name], place.numel, group, place.start))
                before[name] += place.numel
        ranks.append(pieces)
    return ranks


def share_here(names: Mapping[Any, str]) -> list[Piece]:
    """Return the pieces that ZeRO 1 or 2 has given this rank, of parameter -> name."""
    found = [(name, getattr(parameter, "_hp_mapping", None)) for parameter, name in names.items()]
    return [
        Piece(
            name,
            one.lp_fragment_address.start,
            one.lp_fragment_address.numel,
            one.param_group_index,
            one.hp_fragment_address.start,
        )
        for name, one in found
        if one is not None
    ]


def share_of(shapes: Sequence[Mapping[str, Any]], rank: int, count: int) -> list[Piece]:
    """Return the pieces of `rank` of `count` under ZeRO 3, which divides every weight among all ranks, rounded up."""
    pieces = []
    for group, named in enumerate(shapes):
        at = 0
        for name, shape in named.items():
            share = math.ceil(shape.numel() / count)
            pieces.append(Piece(name, rank * share, max(0, min(share, shape.numel() - rank * share)), group, at))
            at += share
    return pieces


def divide(
    shards: Sequence[dict[str, Any]], there: Sequence[Sequence[Piece]], here: Sequence[Piece], optimizer: Any, folder: Path
) -> dict[str, Any]:
    """Return the shard with the pieces `here`, of shards that have the pieces `there`. Raises Stop when that cannot be.

    `optimizer` is DeepSpeed's on this rank: it tells the sizes of the flat tensors, which hold padding beside the pieces.
    """
    at_three = FP32_FLAT_GROUPS in shards[0]
    weights, inner = (
        (FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT) if at_three else (SINGLE_PARTITION_OF_FP32_GROUPS, BASE_OPTIMIZER_STATE)
    )
    sizes = next([flat.numel() for flat in getattr(optimizer, name)] for name in FLAT_WEIGHTS if hasattr(optimizer, name))
    places: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, pieces in enumerate(there):
        for piece in pieces:
            places[piece.name].append((rank, piece))
    mine: dict[int, list[Piece]] = defaultdict(list)
    for piece in here:
        mine[piece.group].append(piece)

    if not isinstance(shards[0][inner], dict):
        remedy = "start as many ranks as saved it, or without it in ds_config begin a new run: r4090c launch without --resume"
        raise Stop(folder, "saved with elastic_checkpoint", "shards as DeepSpeed writes them by default", remedy, FAILED)
    states = [shard[inner]["state"] for shard in shards]
    kept_first = states[0].get(0, {})  # nothing before the first step, which fp16 may have left out
    kinds = [kind for kind, value in kept_first.items() if torch.is_tensor(value) and value.dim()]
    alike = {kind: value for kind, value in kept_first.items() if kind not in kinds}
    for shard in shards:
        _require_a_number_for_each_weight(shard, weights, inner, kinds, folder)

    made: dict[int, dict[str, Any]] = {group: copy.deepcopy(alike) for group in range(len(sizes))}  # each counts its own steps
    for kind in kinds:
        flats = [{group: kept[kind] for group, kept in state.items()} for state in states]
        for group, size in enumerate(sizes):
            made[group][kind] = _flat(size, mine[group], places, flats, folder)
    flat_weights = [shard[weights] for shard in shards]
    groups = zip(shards[0][inner]["param_groups"], optimizer.state_dict()[inner]["param_groups"], strict=True)
    return {
        **shards[0],
        weights: [_flat(size, mine[group], places, flat_weights, folder) for group, size in enumerate(sizes)],
        inner: {"state": made, "param_groups": [{**saved, "params": now["params"]} for saved, now in groups]},
    }


def _require_a_number_for_each_weight(
    shard: dict[str, Any], weights: str, inner: str, kinds: Sequence[str], folder: Path
) -> None:
    """Raise Stop when the optimizer keeps anything else, such as moments of 8 bits with a scale for each block."""
    for group, kept in shard[inner]["state"].items():
        count = shard[weights][group].numel()
        with_padding = count + (shard[GROUP_PADDINGS][group] if GROUP_PADDINGS in shard else 0)
        odd = [kind for kind in kinds if kept[kind].numel() not in (count, with_padding) or not kept[kind].is_floating_point()]
        if odd:
            remedy = "start as many ranks as saved it: this cannot be divided anew"
            raise Stop(folder, f"its optimizer keeps {', '.join(odd)}", "one number for each weight", remedy, FAILED)


def _flat(
    size: int,
    mine: Sequence[Piece],
    places: Mapping[str, Sequence[tuple[int, Piece]]],
    flats: Sequence[Mapping[int, torch.Tensor] | Sequence[torch.Tensor]],
    folder: Path,
) -> torch.Tensor:
    """Return the flat tensor with the pieces `mine`, copied from those of all ranks: `flats` by rank, then by group.

    `places`: name -> (rank, piece). Raises Stop when numbers are missing.
    """
    made = torch.zeros(size, dtype=flats[0][0].dtype)
    for piece in mine:
        missing = piece.count
        for rank, old in places[piece.name]:
            first, end = max(piece.first, old.first), min(piece.first + piece.count, old.first + old.count)
            if first < end:
                from_here, to_here = old.at - old.first, piece.at - piece.first
                made[first + to_here : end + to_here] = flats[rank][old.group][first + from_here : end + from_here]
                missing -= end - first
        if missing:
            observed = f"its shards lack {missing} of {piece.count} numbers of {piece.name}"
            raise Stop(folder, observed, "all weights of this recipe", "move it away: an earlier checkpoint may do", FAILED)
    return made
