"""The rank wrapper: torchrun starts it once a rank; it binds the rank to its CPUs and memory and becomes the script.

Standard library only, Python >= 3.8. Usage: `rank.py -- PROGRAM ARGUMENT…` under RANK and R4090C_LOCAL (the agent's folder
with node.json). It sends the output to the rank's log, writes `rank-<rank>.json` (pid, start in ticks) for the agent, and execs.
Whatever cannot be bound is told in the rank's log and does not keep the rank from running.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
from typing import List, Optional

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
MPOL_PREFERRED = 1  # include/uapi/linux/mempolicy.h
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers
MOST_NUMA_NODES = 1024  # MAX_NUMNODES of any configuration


def set_memory_policy(node: int) -> Optional[str]:
    """Prefer memory of NUMA node `node` for this process and its children; return why not, or None."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return "no set_mempolicy number known for %s" % platform.machine()
    if not 0 <= node < MOST_NUMA_NODES:
        return "no NUMA node %d" % node
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (MOST_NUMA_NODES // bits))()
    mask[node // bits] = 1 << (node % bits)
    if LIBC.syscall(number, MPOL_PREFERRED, ctypes.byref(mask), ctypes.c_ulong(MOST_NUMA_NODES)) != 0:
        return os.strerror(ctypes.get_errno())
    return None


def set_cpus(cpus: List[int]) -> Optional[str]:
    """Run on `cpus` only; return why not, or None."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when torchrun (`parent`) dies; the setting survives exec."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def write_record(path: str) -> Optional[str]:
    """Write who we are for the agent; return why not, or None."""
    with open("/proc/self/stat", "rb") as handle:
        start = int(handle.read().rpartition(b")")[2].split()[19])
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as handle_out:
            json.dump({"pid": os.getpid(), "start": start}, handle_out)
        os.replace(path + ".tmp", path)
    except OSError as error:
        return "%s: %s" % (path, error.strerror)
    return None


def main() -> None:
    """Bind this process as planned and exec the script."""
    die_with_parent(os.getppid())
    command = sys.argv[sys.argv.index("--") + 1 :]
    folder = os.environ["R4090C_LOCAL"]
    with open(os.path.join(folder, "node.json"), encoding="utf-8") as handle:
        told = json.load(handle)
    rank = int(os.environ["RANK"])
    mine = next(entry for entry in told["node"]["ranks"] if entry["rank"] == rank)

    log = os.path.join(told["run_dir"], "attempt_%d" % told["attempt"], "%d.log" % rank)
    os.makedirs(os.path.dirname(log), exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)

    refused = []
    if mine["cpus"]:
        refused.append(("runs unbound", set_cpus(mine["cpus"])))
    if mine["memory_node"] is not None:
        refused.append(("has no memory policy", set_memory_policy(mine["memory_node"])))
    refused.append(("is not watched by its agent", write_record(os.path.join(folder, "rank-%d.json" % rank))))
    for what, why in refused:
        if why:
            print("r4090c: rank %d %s: %s" % (rank, what, why), flush=True)
    os.environ.update({name: var["value"] for name, var in mine["env"].items()})
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        print("r4090c: rank %d: cannot run %s: %s" % (rank, command[0], error.strerror), flush=True)
        os._exit(127)


if __name__ == "__main__":
    main()
