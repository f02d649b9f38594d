"""What a run tells the outside while it runs: metrics.jsonl, heartbeats and the lines of the rank log.

Nothing is ever half there: a heartbeat is replaced as a whole, a line of metrics is one write.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Phase = Literal["import", "init", "train", "eval", "checkpoint", "done"]

HEARTBEAT_EVERY_S = 1.0


def replace_file(file: Path, text: str) -> None:
    """Write `text` to `file` in one piece: readers see the old content or the new, also on NFS and after a kill."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


LOCAL = "R4090C_LOCAL"
"""Environment: a folder on this node's own disk, where who watches this rank looks."""


class Heartbeat:
    """The file `heartbeats/<rank>.json`: rank, phase, step and time. Written on a new phase, else at most once a second.

    First the same goes to `beat-<rank>.json` in the node's own folder: the shared one may hang, and then no beat is what tells.
    """

    def __init__(self, run: Path, rank: int) -> None:
        local = os.environ.get(LOCAL)
        self.local_file = Path(local) / f"beat-{rank}.json" if local else None
        self.file = run / "heartbeats" / f"{rank}.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.rank, self.phase, self.step, self.written_at_s = rank, "", 0, 0.0

    def beat(self, phase: Phase, step: int | None = None) -> None:
        """Say that this rank is alive, in `phase`, and has finished `step`."""
        now_s = time.time()
        self.step = self.step if step is None else step
        if phase == self.phase and 0 <= now_s - self.written_at_s < HEARTBEAT_EVERY_S:
            return
        self.phase, self.written_at_s = phase, now_s
        beat = {"rank": self.rank, "phase": phase, "step": self.step, "time": round(now_s, 3)}
        if self.local_file is not None:
            with contextlib.suppress(OSError):  # a full /tmp must not end the training
                replace_file(self.local_file, json.dumps(beat) + "\n")
        replace_file(self.file, json.dumps(beat) + "\n")


class Metrics:
    """The file `metrics.jsonl`, one object an optimizer step; global rank 0 alone writes it."""

    def __init__(self, run: Path, resumed_at: int) -> None:
        """Open the file for appending; lines beyond step `resumed_at` will be written again and are dropped."""
        file = run / "metrics.jsonl"
        if file.exists():
            text = file.read_text(encoding="utf-8")
            kept = keep_until(text, resumed_at)
            if kept != text:
                replace_file(file, kept)
        self.file = file.open("a", encoding="utf-8", buffering=1)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line, and let readers see it at once. A number that is none, which JSON lacks, is null.

        So is the gradient norm of a step that fp16 skips.
        """
        told = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()}
        self.file.write(json.dumps(told, allow_nan=False) + "\n")
        self.file.flush()


def metrics_line(
    step: int,
    unit: str,
    units_per_step: int,
    loss: float,
    grad_norm: float,
    lr: float,
    step_time_s: float,
    times_s: Mapping[str, float],
    peaks_gib: Mapping[str, float] | None = None,
    mfu: float | None = None,
    power_w: float = math.nan,
) -> dict[str, Any]:
    """Return one line of metrics.jsonl (contract, pinned by tests/golden/metrics*.jsonl).

    `tokens` (or `images`: `unit` names both keys) counts from step 1, over all ranks, like the rate. Times are rank 0's: of
    `data`, `forward`, `backward`, `comm`, `optimizer` and, where collectives run beside them, `comm_overlap` (train/timing.py);
    the first five make up the step. Absent is what is not known here: gpu_mem_gib (of tensors) and gpu_reserved_gib, rank 0's
    peaks so far; mfu (train/flops.py); power_w, of all GPUs of the run together, and tokens_per_s_per_w.
    """
    rate = units_per_step / step_time_s
    line = {
        "step": step,
        unit: step * units_per_step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "step_time_s": round(step_time_s, 6),
        "data_time_s": round(times_s["data"], 6),
        f"{unit}_per_s": round(rate, 1),
        "time": round(time.time(), 3),
    }
    line |= {f"{part}_time_s": round(seconds, 6) for part, seconds in times_s.items() if part != "data"}
    line |= peaks_gib or {}
    if mfu is not None:
        line["mfu"] = round(mfu, 4)
    if math.isfinite(power_w) and power_w > 0:
        line |= {"power_w": round(power_w, 1), f"{unit}_per_s_per_w": round(rate / power_w, 4)}
    return line


def keep_until(text: str, step: int) -> str:
    """Return the lines of metrics whose step is at most `step`; a torn line (a kill while writing) is dropped."""
    kept = []
    for line in text.splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, TypeError, KeyError):
            continue
    return "".join(kept)
