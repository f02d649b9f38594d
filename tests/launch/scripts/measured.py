"""Ranks that beat and, on rank 0, tell metrics as train/ does, without torch. `measured.py SECONDS`; the last rank is slow."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

rank, world = int(os.environ["RANK"]), int(os.environ["R4090C_WORLD"])
local, run = Path(os.environ["R4090C_LOCAL"]), Path(os.environ["R4090C_RUN_DIR"])
until = time.time() + float(sys.argv[1])
step = 0
while time.time() < until:
    if step < 2 or rank < world - 1:
        step += 1
    aside = local / f"beat-{rank}.tmp"
    aside.write_text(json.dumps({"rank": rank, "phase": "train", "step": step, "time": time.time()}))
    aside.replace(local / f"beat-{rank}.json")
    if rank == 0:
        line = {"step": step, "tokens": 100 * step, "loss": 5.5, "tokens_per_s": 1000.0, "step_time_s": 0.1, "time": time.time()}
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")
    time.sleep(0.1)
