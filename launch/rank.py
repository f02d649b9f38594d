"""The rank wrapper: torchrun starts it once a rank; it binds the rank to its CPUs and memory and becomes the script.

Standard library only, Python >= 3.8. Usage: `rank.py -- PROGRAM ARGUMENT…` under RANK, LOCAL_RANK and R4090C_LOCAL (the
agent's folder with node.json). It writes `rank-<rank>-<attempt>.json` there (pid and start time), sends the output to the rank's log, and execs.
"""

import ctypes
import json
import os
import platform
import signal
import sys

PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
MPOL_PREFERRED = 1  # include/uapi/linux/mempolicy.h
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers


def set_memory_policy(node):
    """Prefer memory of NUMA node `node` for this process and its children; return why not, or None."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return "no set_mempolicy number known for %s" % platform.machine()
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << (node % 64)
    if libc.syscall(number, MPOL_PREFERRED, ctypes.byref(mask), 16 * 64) != 0:
        return os.strerror(ctypes.get_errno())
    return None


def die_with_parent(parent):
    """Have the kernel kill this process when torchrun dies; the setting survives exec."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main():
    """Bind this process as planned and exec the script."""
    die_with_parent(os.getppid())
    command = sys.argv[sys.argv.index("--") + 1 :]
    folder = os.environ["R4090C_LOCAL"]
    with open(os.path.join(folder, "node.json")) as handle:
        told = json.load(handle)
    rank = int(os.environ["RANK"])
    mine = next(entry for entry in told["node"]["ranks"] if entry["rank"] == rank)

    log = os.path.join(told["run_dir"], "attempt_%d" % told["attempt"], "%d.log" % rank)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)

    if mine["cpus"]:
        try:
            os.sched_setaffinity(0, mine["cpus"])
        except OSError as error:
            print("r4090c: rank %d runs unbound: %s" % (rank, error), flush=True)
    if mine["memory_node"] is not None:
        why_not = set_memory_policy(mine["memory_node"])
        if why_not:
            print("r4090c: rank %d has no memory policy: %s" % (rank, why_not), flush=True)
    os.environ.update({name: var["value"] for name, var in mine["env"].items()})

    with open("/proc/self/stat") as handle:
        start = int(handle.read().rpartition(")")[2].split()[19])
    path = os.path.join(folder, "rank-%d-%d.json" % (rank, told["attempt"]))
    with open(path + ".tmp", "w") as handle:
        json.dump({"pid": os.getpid(), "start": start}, handle)
    os.replace(path + ".tmp", path)
    os.execvpe(command[0], command, os.environ)


if __name__ == "__main__":
    main()
