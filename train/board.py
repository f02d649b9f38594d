"""The metrics for eyes: TensorBoard's event files in the run folder, always; Weights & Biases when the recipe names a project.

In a thread, as importing takes half a second and a service may be slow or away: nothing here may hold up or end the training.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any, Protocol

from train.recipe import Recipe

CLOSE_S = 20.0
"""est.: the last lines are written in milliseconds; a service that does not answer is not waited for any longer."""
NOT_CURVES = ("step", "time")


class Writer(Protocol):
    """Takes the lines of metrics.jsonl."""

    def write(self, line: dict[str, Any]) -> None:
        """Take one line."""

    def close(self) -> None:
        """Bring the rest where it belongs."""


class TensorBoard:
    """Event files, one curve a number. What an earlier attempt wrote beyond `resumed_at` is not shown any more."""

    def __init__(self, run: Path, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(
            str(run / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None, flush_secs=10
        )

    def write(self, line: dict[str, Any]) -> None:
        """Draw one point of each curve."""
        for name, value in line.items():
            if name not in NOT_CURVES and isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, line["step"], walltime=line["time"])

    def close(self) -> None:
        """Write the rest."""
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases that is called like ours, and goes on when ours is resumed.

    Without a key, or with WANDB_MODE=offline, it is written below the run folder, to be sent later with `wandb sync`.
    """

    def __init__(self, run: Path, recipe: Recipe) -> None:
        import wandb

        if "WANDB_API_KEY" not in os.environ and not (Path.home() / ".netrc").exists():
            os.environ.setdefault("WANDB_MODE", "offline")
            print(f"notice   wandb: no WANDB_API_KEY; to be sent later: wandb sync {run}/wandb/offline-run-*", flush=True)
        self.run: Any = wandb.init(
            project=recipe.wandb,
            id=run.name,
            name=run.name,
            resume="allow",
            dir=str(run),
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", init_timeout=CLOSE_S),
        )

    def write(self, line: dict[str, Any]) -> None:
        """Send one line."""
        self.run.log({name: value for name, value in line.items() if name not in NOT_CURVES}, step=line["step"])

    def close(self) -> None:
        """Send the rest."""
        self.run.finish()


class Boards:
    """Hands lines to the writers. A library that is missing or fails costs one notice, and its own curves."""

    def __init__(self, run: Path, recipe: Recipe, resumed_at: int) -> None:
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._work, args=(run, recipe, resumed_at), name="boards", daemon=True)

    def write(self, line: dict[str, Any]) -> None:
        """Take one line; returns at once. The first one starts the thread: its imports shall not hold up the first step."""
        self.lines.put(line)
        if self.thread.ident is None:
            self.thread.start()

    def close(self) -> None:
        """Return when all is written, after CLOSE_S in any case."""
        self.lines.put(None)
        if self.thread.ident is not None:
            self.thread.join(CLOSE_S)

    def _work(self, run: Path, recipe: Recipe, resumed_at: int) -> None:
        writers: dict[str, Writer] = {}
        makers: dict[str, Any] = {"tensorboard": lambda: TensorBoard(run, resumed_at)}
        if recipe.wandb:
            makers["wandb"] = lambda: WeightsAndBiases(run, recipe)
        for name, make in makers.items():
            try:
                writers[name] = make()
            except ImportError:
                print(f"notice   {name} is not installed: none of its curves; pip install {name}", flush=True)
            except Exception as error:  # noqa: BLE001 -- of a service or a disk; the training is not its business
                print(f"notice   {name} is left out: {type(error).__name__}", flush=True)
        while writers:
            line = self.lines.get()
            for name, writer in list(writers.items()):
                try:
                    writer.close() if line is None else writer.write(line)
                except Exception as error:  # noqa: BLE001 -- likewise
                    print(f"notice   {name} stopped: {type(error).__name__}", flush=True)
                    del writers[name]
            if line is None:
                return
