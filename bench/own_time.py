"""train/main.py with a clock: `python -m bench.own_time` takes its arguments, and says how much of each step is the loop's own.

A line a step: OWN, seconds of the step from one line of metrics to the next, and of these the seconds in which something other
than the loop works: forward, backward and optimizer of the engine, collectives, waiting for data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

from train import main as program


class Clock:
    """Adds up the seconds that others take; calls within a call count once."""

    def __init__(self) -> None:
        self.others_s, self.deep = 0.0, 0
        self.step_began: float | None = None

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, its seconds taken."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            began, self.deep = time.perf_counter(), self.deep + 1
            try:
                return function(*args, **kwargs)
            finally:
                self.deep -= 1
                if not self.deep:
                    self.others_s += time.perf_counter() - began

        return run

    def waits(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield from `iterator`, the seconds it makes us wait taken."""
        following = self.timed(lambda: next(iterator, None))
        while (one := following()) is not None:
            yield one

    def tell(self) -> None:
        """End a step and say how it went."""
        now = time.perf_counter()
        if self.step_began is not None:
            print(f"OWN {now - self.step_began:.6f} {self.others_s:.6f}", flush=True)
        self.step_began, self.others_s = time.perf_counter(), 0.0


def watch(loop: Any, clock: Clock) -> None:
    """Put the clock around everything in train.loop that is not its own."""
    engine = loop.deepspeed.DeepSpeedEngine
    for name in ("__call__", "backward", "step", "get_global_grad_norm"):
        setattr(engine, name, clock.timed(getattr(engine, name)))
    loop.dist.all_reduce = clock.timed(loop.dist.all_reduce)
    prefetch, write = loop.prefetch, loop.Metrics.write
    loop.prefetch = lambda *args, **kwargs: clock.waits(prefetch(*args, **kwargs))

    def write_and_tell(metrics: Any, line: dict[str, Any]) -> None:
        write(metrics, line)
        clock.tell()

    loop.Metrics.write = write_and_tell


def main() -> None:
    """Entry point."""
    imports = program.import_libraries

    def import_and_watch(local_rank: int) -> tuple[ModuleType, Any]:
        loop, device = imports(local_rank)
        watch(loop, Clock())
        return loop, device

    program.import_libraries = import_and_watch
    program.main()


if __name__ == "__main__":
    main()
