"""A small gloo job that beats as train/ does. `beating_ring.py RANK`: that rank leaves the collectives for good after step 5."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

faulthandler.register(signal.SIGUSR1)


def beat(phase: str, step: int) -> None:
    aside = local / f"beat-{rank}.tmp"
    aside.write_text(json.dumps({"rank": rank, "phase": phase, "step": step, "time": time.time()}))
    aside.replace(local / f"beat-{rank}.json")


def reads_data_for_ever() -> None:
    while True:
        time.sleep(0.01)


dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, local = dist.get_rank(), Path(os.environ["R4090C_LOCAL"])
for step in range(9999):
    beat("train", step)
    if step == 5:
        print("step 5", flush=True)
        if rank == int(sys.argv[1]):
            reads_data_for_ever()
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
