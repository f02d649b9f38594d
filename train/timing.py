"""Where the time of a step goes, on this rank: data, forward, backward, communication, optimizer. They add up to the step.

On a GPU the marks are CUDA events on the stream that computes, read when the step has ended anyway: nothing waits for them. A
mark costs some microseconds. `comm` is what nothing hides: the stream that computes stands in a collective, or waits for one (and
so for the slowest rank). Collectives on a stream of their own (overlap_comm) run beside the backward pass: they are told apart,
and how much of them is hidden only a trace says (train/profiling.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal

import torch

from train.device import Device

Part = Literal["data", "forward", "backward", "comm", "optimizer"]

PARTS: tuple[Part, ...] = ("data", "forward", "backward", "comm", "optimizer")
COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_to_all_single",
)
"""Methods of deepspeed.comm's backend, through which all traffic of DeepSpeed's engines goes (deepspeed/comm/torch.py)."""


class StepTimes:
    """Takes the marks of one step after the other. Outside of a step (start, checkpoints) nothing is taken."""

    def __init__(self, device: Device) -> None:
        self.gpu = device.kind == "cuda"
        self.main = torch.cuda.current_stream() if self.gpu else None
        self.marks: list[tuple[Part, Any]] = []
        self.apart: list[tuple[Any, Any]] = []
        self.unused: list[Any] = []
        self.inside = False

    def begin(self, part: Part) -> None:
        """From here on the time is that of `part`."""
        self.marks.append((part, self._now()))

    def split(self) -> dict[str, float]:
        """End the step; return seconds by part, and `comm_overlap`, of collectives on streams of their own, if there are any."""
        self.begin("data")
        seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        if self.gpu:
            self.marks[-1][1].synchronize()
        for (part, began), (_, ended) in zip(self.marks, self.marks[1:], strict=False):
            seconds[part] += self._between(began, ended)
        if self.apart:
            seconds["comm_overlap"] = sum(self._between(began, ended) for began, ended in self.apart)
        if self.gpu:
            self.unused += [mark for _, mark in self.marks] + [mark for pair in self.apart for mark in pair]
        self.marks, self.apart = [], []
        return seconds

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Take what runs in here as communication."""
        if not self.marks or self.inside:  # collectives call each other
            yield
            return
        self.inside = True
        aside, part = self.gpu and torch.cuda.current_stream() != self.main, self.marks[-1][0]
        began = self._now()
        if not aside:
            self.marks.append(("comm", began))
        try:
            yield
        finally:
            self.inside = False
            if aside:
                self.apart.append((began, self._now()))
            else:
                self.begin(part)

    def watch(self, backend: Any) -> None:
        """Take all collectives of deepspeed.comm's `backend` as communication, in place of whoever watched before."""
        for name in COLLECTIVES:
            method = getattr(type(backend), name, None)
            if method is not None:
                setattr(backend, name, self._timed(method.__get__(backend)))

    def _timed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.communicating():
                work = collective(*args, **kwargs)
            return _Waited(work, self) if hasattr(work, "wait") else work

        return timed

    def _now(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = self.unused.pop() if self.unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        if not self.gpu:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000


class _Waited:
    """A collective under way: waiting for it is communication, and so is what it still has to do then."""

    def __init__(self, work: Any, times: StepTimes) -> None:
        self._work, self._times = work, times

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._times.communicating():
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
