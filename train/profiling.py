"""`--profile`: a trace of some steps, to be looked at with https://ui.perfetto.dev, and how much of the communication it hides.

The share is measured on intervals: those in which a collective runs, and those in which anything else computes. On a GPU both are
kernels, and NCCL's are told by their names; on a CPU gloo's and torch's operations.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST, LAST = 3, 5
"""Steps of this attempt, counted from 1, that are traced: the first two still allocate and fill caches."""
COLLECTIVE_KERNEL, COLLECTIVE_OPERATION = "nccl", "gloo:"
COMPUTING_OPERATION = "aten::"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds in which collectives ran, in which something computed meanwhile, and in which anything computed."""

    comm_s: float
    hidden_s: float
    compute_s: float

    @property
    def hidden_share(self) -> float | None:
        """What part of the communication is hidden behind computation, None without communication."""
        return self.hidden_s / self.comm_s if self.comm_s else None

    def __str__(self) -> str:
        if self.hidden_share is None:
            return f"no communication; {self.compute_s:.3f} s of computation"
        told = f"{self.hidden_share:.0%} of the communication is hidden behind computation"
        return f"{told}: {self.hidden_s:.3f} of {self.comm_s:.3f} s; {self.compute_s:.3f} s of computation"


def overlap_of(events: Iterable[Mapping[str, Any]]) -> Overlap:
    """Return how communication and computation overlap in the events of a trace (Chrome's format, times in microseconds).

    Where the trace has kernels only they count. Copies hide nothing.
    """
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    if kernels:
        comm = [event for event in kernels if COLLECTIVE_KERNEL in event["name"].lower()]
        compute = [event for event in kernels if COLLECTIVE_KERNEL not in event["name"].lower()]
    else:
        comm = [event for event in complete if event["name"].startswith(COLLECTIVE_OPERATION)]
        compute = [event for event in complete if event["name"].startswith(COMPUTING_OPERATION)]
    busy, computing = (union((event["ts"], event["ts"] + event["dur"]) for event in kind) for kind in (comm, compute))
    return Overlap(length(busy) / 1e6, length(common(busy, computing)) / 1e6, length(computing) / 1e6)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time in intervals that neither touch nor overlap, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Return the time that lies in both; each as `union` returns it."""
    both: list[Interval] = []
    at = 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        for other_begin, other_end in other[at:]:
            if other_begin >= end:
                break
            both.append((max(begin, other_begin), min(end, other_end)))
    return both


def length(intervals: list[Interval]) -> float:
    """Return how long they are together."""
    return sum(end - begin for begin, end in intervals)


class Tracer:
    """Traces steps FIRST to LAST of this attempt into `profile/rank<n>.json.gz`; the first rank of each node does."""

    def __init__(self, run: Path, rank: int, *, gpu: bool) -> None:
        """`gpu`: the kernels of this rank's GPU are traced as well."""
        self.gpu = gpu
        self.file = run / "profile" / f"rank{rank}.json.gz"
        self.profiler: Any = None
        self.steps = 0

    def begin_step(self) -> None:
        """Start the profiler where the first traced step begins."""
        self.steps += 1
        if self.steps == FIRST:
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])]
            self.profiler = profile(activities=activities)
            self.profiler.start()

    def end_step(self, *, last: bool = False) -> None:
        """Stop it after the last traced step, write the trace, and say what is hidden. `last`: no step follows."""
        if self.profiler is not None and (self.steps == LAST or last):
            self.profiler.stop()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(self.file))
            self.profiler = None
            with gzip.open(self.file, "rt", encoding="utf-8") as opened:
                events = json.load(opened)["traceEvents"]
            print(f"profile  steps {FIRST} to {self.steps} of this attempt: {overlap_of(events)}", flush=True)
            print(f"profile  {self.file}, to be opened in https://ui.perfetto.dev", flush=True)
        elif last and self.steps < FIRST:
            print(f"profile  nothing: steps from the {FIRST}rd on are traced, and there were {self.steps}", flush=True)
