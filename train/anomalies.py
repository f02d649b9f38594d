"""When to stop rather than train on: numbers that are none, and losses that jump. Names the step and the sequences to look at."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from train.data import first_position
from train.recipe import Recipe

WINDOW_STEPS, LEAST_STEPS = 20, 5
"""est.: the median of so many steps is no accident, and a spike is judged from the sixth step on."""
TOLD_SEQUENCES = 8


class LossWatch:
    """Remembers the last losses. Every rank sees the same numbers, so all stop at the same step. A resumed run starts empty."""

    def __init__(self, spike: float) -> None:
        self.spike = spike
        self.recent: deque[float] = deque(maxlen=WINDOW_STEPS)

    def complaint(self, loss: float, grad_norm: float | None) -> str | None:
        """Return what is wrong with a step, None when nothing is.

        `grad_norm` is None under fp16, where an infinite one is normal: DeepSpeed skips that step and scales down.
        """
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if grad_norm is not None and not math.isfinite(grad_norm):
            return f"gradient norm is {grad_norm}"
        if self.spike and len(self.recent) >= LEAST_STEPS and loss > self.spike * (usual := median(self.recent)):
            return f"loss is {loss:.3f}, over {self.spike:g} times {usual:.3f}, the median of the last {len(self.recent)} steps,"
        self.recent.append(loss)
        return None


def find_culprit(losses: torch.Tensor, samples: Any, recipe: Recipe, step: int) -> str:
    """Return which of the step's micro-batches has the worst loss, for people. Every rank calls this with its own `losses`."""
    ranks = dist.get_world_size()
    everyones = [torch.empty_like(losses) for _ in range(ranks)]
    dist.all_gather(everyones, losses)
    worst = int(torch.stack(everyones).nan_to_num(nan=math.inf).argmax())  # the first of equals
    rank, micro_step = divmod(worst, len(losses))
    first = first_position(recipe, step, micro_step, rank, ranks)
    sequences = [str(samples.sequence_at(first + index)) for index in range(min(recipe.micro_batch, TOLD_SEQUENCES))]
    more = ", …" if recipe.micro_batch > TOLD_SEQUENCES else ""
    last = first + recipe.micro_batch - 1
    return f"worst at positions {first} to {last} of the data's order (rank {rank}; sequences {', '.join(sequences)}{more})"
