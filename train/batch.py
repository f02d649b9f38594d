"""`micro_batch: auto`: the largest number of sequences at once that fits, found before the engine is built.

On a GPU the model itself is tried, forward and backward, with no collective in between: a rank that runs out of memory must
not leave the others waiting. What DeepSpeed will add is computed and left free. The ranks then agree on the smallest answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from train.device import Device
from train.errors import FAILED, Stop
from train.recipe import Recipe, zero_of

CPU_TOKENS = 4096
"""est.: from so many tokens on a CPU's matrix products do not get faster, only the memory grows."""
SPARE = 0.05
"""est.: share of the card's memory that is left free: fragmentation, NCCL's buffers."""
DEFAULT_BUCKET = 500_000_000
"""Elements of DeepSpeed's buckets where the configuration says nothing (its configuration reference)."""


def candidates(recipe: Recipe, world_size: int) -> list[int]:
    """Return the sizes that divide a rank's share of the global batch, largest first."""
    share = recipe.global_batch // world_size
    return [size for size in range(share, 0, -1) if share % size == 0]


def largest_that_fits(sizes: list[int], fits: Callable[[int], bool]) -> int:
    """Return the first of `sizes` (largest first) that fits, 0 when none does; halving, as what is smaller fits as well."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            high = middle
        else:
            low = middle + 1
    return sizes[low] if low < len(sizes) else 0


def engine_bytes(trainable: int, config: dict[str, Any], ranks: int, precision: str) -> int:
    """Return what DeepSpeed keeps on each GPU besides the weights: gradients, optimizer states, buckets.

    ZeRO-2 in 16 bits: 18 bytes a trainable parameter over the ranks: 2 gradient, 4 gradient in fp32, 12 master weight and
    moments (DeepSpeed's estimator); below stage 2 the gradients lie whole on every rank, below 1 all does.
    """
    zero = zero_of(config)
    stage = zero.get("stage", 0)
    wide = precision == "fp32"
    gradient, states = (4, 8) if wide else (2, 16)
    if zero.get("offload_optimizer"):
        states = 0
    kept = gradient * trainable // (ranks if stage >= 2 else 1) + states * trainable // (ranks if stage >= 1 else 1)
    buckets = zero.get("reduce_bucket_size", DEFAULT_BUCKET) * (2 if zero.get("overlap_comm") else 1)
    buckets += zero.get("allgather_bucket_size", DEFAULT_BUCKET)
    return int(kept + min(buckets, 2 * trainable) * (4 if wide else 2)) if stage else kept


def find_micro_batch(
    recipe: Recipe, model: torch.nn.Module, trainable: int, config: dict[str, Any], device: Device, precision: str
) -> int:
    """Return the micro-batch that all ranks take. Raises Stop when not even one sequence fits."""
    ranks = dist.get_world_size()
    sizes = candidates(recipe, ranks)
    length = recipe.data.sequence_length
    if device.kind == "cpu":
        found = largest_that_fits(sizes, lambda size: size * length <= max(CPU_TOKENS, length))
    elif zero_of(config).get("stage", 0) == 3:
        raise Stop("recipe micro_batch", "auto under ZeRO stage 3", "a number: no rank has a whole model to try", "give one")
    else:
        total = torch.cuda.get_device_properties(device.name).total_memory
        kept = engine_bytes(trainable, config, ranks, precision)

        def fits(size: int) -> bool:
            peak = _peak_bytes(model, size, length, device)
            free = torch.cuda.mem_get_info(device.name)[0] + torch.cuda.memory_reserved(device.name)
            return peak is not None and peak + kept + SPARE * total <= free

        found = largest_that_fits(sizes, fits)
    agreed = torch.tensor(found, device=device.name)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    if not int(agreed):
        remedy = "r4090c plan says what fits: fewer bits, activation_checkpointing, loss_chunk_tokens, shorter sequences"
        raise Stop("recipe micro_batch", f"auto: not even one sequence of {length} fits", "one that fits", remedy, FAILED)
    return int(agreed)


def _peak_bytes(model: torch.nn.Module, size: int, length: int, device: Device) -> int | None:
    """Return the most memory that `size` sequences take, forward and backward, None when there is not enough.

    Twice, as the first time also loads kernels and workspaces. Gradients are dropped as they arrive, as ZeRO-2 does.
    """
    dropping = [
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    tokens = torch.zeros(size, length, dtype=torch.long, device=device.name)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device.name)
    try:
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
        torch.cuda.synchronize(device.name)
        return torch.cuda.max_memory_allocated(device.name)
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        for hook in dropping:
            hook.remove()
        model.zero_grad(set_to_none=True)
        del tokens
        torch.cuda.empty_cache()
