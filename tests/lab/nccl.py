"""Stand-ins of nccl-tests and mpirun for nodes without GPUs: bytes really move between the nodes, with gloo.

`all_reduce_perf` takes the tool's options and prints the tool's table; between the nodes it is netcheck's own torch program.
It binds to the interface that NCCL_SOCKET_IFNAME names, and says so in a line of NCCL's log, as NCCL would. `mpirun` takes those
options of Open MPI that are used, starts each context's processes over SSH, and gives them their ranks.

    with installed(lab, "node01", mpi=True): …
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.lab import Lab

PROGRAM = Path(__file__).resolve().parents[2] / "netcheck" / "measure" / "collectives.py"
MARKER = "R4090C-COLLECTIVES"


@contextmanager
def installed(lab: Lab, name: str, *, mpi: bool = True, instead: str = "") -> Iterator[None]:
    """Give a node both programs; `mpi` False: nccl-tests without MPI; `instead`: a shell script in the place of nccl-tests."""
    python, here = shlex.quote(sys.executable), shlex.quote(str(Path(__file__).resolve()))
    linked = "# libmpi.so: built with MPI" if mpi else "# no MPI"
    perf = instead or f'exec {python} {here} all_reduce_perf "$@"'
    key, known = shlex.quote(str(lab.key)), shlex.quote(str(lab.known_hosts))
    mpirun = f'R4090C_LAB_KEY={key} R4090C_LAB_KNOWN={known} exec {python} {here} mpirun "$@"'
    scripts = {"all_reduce_perf": f"{linked}\n{perf}", "mpirun": mpirun}
    paths = [lab.stand_in(name, program, f"#!/bin/sh\n{text}\n") for program, text in scripts.items()]
    try:
        yield
    finally:
        for path in paths:
            path.unlink()


# --------------------------------------------------------------------------- what runs on the nodes


def all_reduce_perf(words: list[str]) -> int:
    """Be one process of all_reduce_perf: with MPI's rank one of many, else a world of its own."""
    options = dict(zip(words[::2], words[1::2], strict=True))
    iface = os.environ.get("NCCL_SOCKET_IFNAME", "=lo").removeprefix("=")
    rank, world = os.environ.get("OMPI_COMM_WORLD_RANK", "0"), os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if os.environ.get("NCCL_DEBUG_FILE") == "/dev/stderr":
        place = f"{socket.gethostname()}:{os.getpid()}:{os.getpid()} [0] NCCL INFO"
        address = socket.gethostbyname(socket.gethostname())
        net = f"{place} NET/Socket : Using [0]{iface}:{address}<0>\n{place} Using network Socket\n"
        sys.stderr.write(f"{net}{place} Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n")
        sys.stderr.flush()
    argv = [sys.executable, str(PROGRAM), "--backend", "gloo", "--min-bytes", options["-b"], "--max-bytes", options["-e"]]
    argv += ["--factor", options["-f"], "--iterations", options["-n"], "--warm-up", options["-w"], "--budget-s", "0.5"]
    env = {
        **os.environ,
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": iface,
        "OMP_NUM_THREADS": "1",
    }
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", "29555")
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        sys.stdout.write(both_halves(line))
        sys.stdout.flush()
    return process.wait()


def both_halves(line: str) -> str:
    """Return a line of our table as nccl-tests has it: with out-of-place and in-place columns; gloo has only the one."""
    if line.startswith("#") and "in-place" in line:
        return f"#{'out-of-place':>68}{'in-place':>31}\n"
    if line.startswith("#       size"):
        return line.rstrip("\n") + "     time   algbw   busbw #wrong\n"
    words = line.split()
    if len(words) == 9 and words[0].isdigit():
        return line.rstrip("\n") + line[line.index(words[4]) + len(words[4]) :]
    return line


def mpirun(words: list[str]) -> int:
    """Start the processes of every context and wait for all; the first that fails ends the others."""
    contexts: list[list[str]] = [[]]
    for word in words:
        if word == ":":
            contexts.append([])
        else:
            contexts[-1].append(word)
    if os.geteuid() == 0 and "--allow-run-as-root" not in contexts[0]:
        sys.stderr.write("mpirun has detected an attempt to run as root.\n")
        return 1
    plans = []
    for context in contexts:
        start = context.index("-np")
        count, host = int(context[start + 1]), context[context.index("-H") + 1].partition(":")[0]
        plans += [(host, context[context.index("-H") + 2 :])] * count
    master = {"MASTER_ADDR": socket.gethostbyname(plans[0][0]), "MASTER_PORT": os.environ["OMPI_MCA_btl_tcp_port_min_v4"]}  # noqa: SIM112
    key, known = os.environ["R4090C_LAB_KEY"], os.environ["R4090C_LAB_KNOWN"]
    ssh = ["ssh", "-F", "/dev/null", "-i", key, "-o", f"UserKnownHostsFile={known}", *os.environ["OMPI_MCA_plm_rsh_args"].split()]  # noqa: SIM112
    started = []
    for rank, (host, command) in enumerate(plans):
        world = {**master, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(len(plans))}
        argv = ["env", *(f"{name}={value}" for name, value in world.items()), *command]
        far = host != socket.gethostname()
        started.append(
            subprocess.Popen([*ssh, "-tt", f"root@{host}", shlex.join(argv)] if far else argv, stdin=subprocess.DEVNULL)
        )

    def end(number: int, frame: object) -> None:
        for process in started:
            process.terminate()
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, end)
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit({"all_reduce_perf": all_reduce_perf, "mpirun": mpirun}[sys.argv[1]](sys.argv[2:]))
