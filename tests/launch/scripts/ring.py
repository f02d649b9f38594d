"""A small gloo job: an all-reduce every tenth of a second. `ring.py STEPS [raise RANK]`."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

steps = int(sys.argv[1])
raising = int(sys.argv[3]) if sys.argv[2:3] == ["raise"] else None
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} of {world} on {os.uname().nodename}, CPUs {sorted(os.sched_getaffinity(0))}: grüß Gott ✓", flush=True)
for step in range(steps):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world
    print(f"step {step}", flush=True)
    time.sleep(0.1)
    if step == 2 and rank == raising:
        raise ValueError("the test asked for it")
dist.destroy_process_group()
