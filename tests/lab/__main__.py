"""Command line of the lab: python -m tests.lab COMMAND … --dir D (or $R4090C_LAB)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from tests.lab.lab import Lab, LabError, take_down

INTERRUPTED = 130

FAULTS = {
    "cut": "pull the node's cable",
    "heal": "plug it in again",
    "stop-sshd": "end the node's sshd",
    "start-sshd": "start it again",
    "freeze-sshd": "stop the node's sshd with SIGSTOP",
    "thaw-sshd": "let it go on",
    "power-off": "turn the node off at once",
    "power-on": "turn it on again",
    "reboot": "turn the node off and on",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--dir", type=Path, default=os.environ.get("R4090C_LAB"), help="the lab's folder (default: $R4090C_LAB)")
    top = argparse.ArgumentParser(prog="python -m tests.lab", description="A cluster of network namespaces on one machine.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", parents=[where], help="bring up a lab; the last line printed is the path of its cluster.yaml")
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--python", default=sys.executable, help="paths.python of cluster.yaml (default: this Python)")
    up.add_argument("--gpus", type=int, default=0, help="GPUs each node is said to have (default: 0)")
    commands.add_parser("down", parents=[where], help="take it down, also one that crashed; idempotent")
    shape = commands.add_parser("shape", parents=[where], help="limit a node's traffic in both directions")
    shape.add_argument("node")
    shape.add_argument("rate", help="like 100mbit, or off")
    for name, text in FAULTS.items():
        commands.add_parser(name, parents=[where], help=text).add_argument("node")
    commands.add_parser("mend", parents=[where], help="undo all faults of all nodes")
    commands.add_parser("processes", parents=[where], help="list pid (as the node sees it) and command line").add_argument("node")
    execute = commands.add_parser("exec", parents=[where], help="run a command inside a node (--dir comes before the node)")
    execute.add_argument("node")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD")
    guard = commands.add_parser("guard", parents=[where])  # internal: started by `up`
    guard.add_argument("--token", required=True)
    return top


def run(arguments: argparse.Namespace) -> int:
    """Carry out one command and return the exit code."""
    command, directory = arguments.command, arguments.dir
    if command == "up":
        started_at = time.monotonic()
        lab = Lab.up(directory, arguments.nodes, python=arguments.python, gpus=arguments.gpus, outlive_me=True)
        print(f"{arguments.nodes} nodes in {lab.subnet}, up in {time.monotonic() - started_at:.1f} s", file=sys.stderr)
        print(lab.cluster_file, flush=True)
    elif command == "down":
        take_down(directory)
    elif command == "guard":
        if not sys.stdin.buffer.read():  # the end without a word: who started us is gone
            take_down(directory, only_token=arguments.token)
    elif command == "shape":
        Lab.attach(directory).shape(arguments.node, arguments.rate)
    elif command == "mend":
        Lab.attach(directory).mend()
    elif command == "processes":
        for pid, line in Lab.attach(directory).processes(arguments.node):
            print(pid, line)
    elif command == "exec":
        argv = [word for index, word in enumerate(arguments.argv) if index or word != "--"]
        if not argv:
            raise LabError("exec needs a command")
        argv = Lab.attach(directory).exec_argv(arguments.node, *argv)
        os.execvp(argv[0], argv)
    else:
        getattr(Lab.attach(directory), command.replace("-", "_"))(arguments.node)
    return 0


def terminate(signum: int, frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that an `up` in progress cleans up."""
    raise SystemExit(128 + signum)


def main() -> int:
    """Entry point."""
    arguments = parser().parse_args()
    if arguments.dir is None:
        print("tests.lab: which lab? give --dir D or set $R4090C_LAB", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, terminate)
    try:
        return run(arguments)
    except LabError as error:
        print(f"tests.lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
