"""Ranks that do nothing, and so start at once. `wait.py SECONDS [exit RANK CODE]`: that rank leaves after a second."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
print(f"rank {rank} waits in {Path.cwd()}", flush=True)
seconds = float(sys.argv[1])
if sys.argv[2:3] == ["exit"] and rank == int(sys.argv[3]):
    time.sleep(1)
    sys.exit(int(sys.argv[4]))
time.sleep(seconds)
