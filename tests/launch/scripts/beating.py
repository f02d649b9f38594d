"""Ranks that go from step to step on their own and beat as train/ does. `beating.py STEPS [quiet]`: quiet = no faulthandler."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

if sys.argv[2:] != ["quiet"]:
    faulthandler.register(signal.SIGUSR1)
rank, local = int(os.environ["RANK"]), Path(os.environ["R4090C_LOCAL"])


def beat(phase: str, step: int) -> None:
    aside = local / f"beat-{rank}.tmp"
    aside.write_text(json.dumps({"rank": rank, "phase": phase, "step": step, "time": time.time()}))
    aside.replace(local / f"beat-{rank}.json")


def one_step() -> None:
    time.sleep(0.1)


beat("init", 0)
for step in range(int(sys.argv[1])):
    beat("train", step)
    one_step()
    if step == 5:
        print("step 5", flush=True)
beat("done", int(sys.argv[1]))
