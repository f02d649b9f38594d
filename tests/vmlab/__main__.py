"""Command line of the VM lab: python -m tests.vmlab COMMAND … --dir D (or $R4090C_VMLAB)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from tests.vmlab import image, lab, store
from tests.vmlab.lab import VmLab, VmLabError, take_down

INTERRUPTED = 130

FAULTS = {
    "pause": "stop the node's processor",
    "resume": "let it go on",
    "cut": "pull the node's data cable",
    "heal": "plug it in again",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--dir", type=Path, default=os.environ.get("R4090C_VMLAB"), help="the lab's folder (default: $R4090C_VMLAB)"
    )
    top = argparse.ArgumentParser(prog="python -m tests.vmlab", description="Two virtual machines with soft-RoCE and NFS.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("build", help="make image and snapshot where they are missing; prints their folders")
    commands.add_parser("up", parents=[where], help="bring both nodes up; the last line printed is the path of cluster.yaml")
    commands.add_parser("down", parents=[where], help="take them down, also after a crash; idempotent")
    commands.add_parser("status", parents=[where], help="what is built, and what runs in --dir")
    execute = commands.add_parser("ssh", parents=[where], help="run a command on a node (--dir comes before the node)")
    execute.add_argument("node", help="1, 2, node01 or node02")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD", help="a shell command line; none: a login")
    for name, text in FAULTS.items():
        commands.add_parser(name, parents=[where], help=text).add_argument("node")
    guard = commands.add_parser("guard", parents=[where])  # internal: started by `up`
    guard.add_argument("--token", required=True)
    return top


def run(arguments: argparse.Namespace) -> int:
    """Carry out one command and return the exit code."""
    command = arguments.command
    if command == "build":
        for folder in lab.build():
            print(folder)
        return 0
    directory = arguments.dir
    if command == "status":
        return status(directory)
    if directory is None:
        print("tests.vmlab: which lab? give --dir D or set $R4090C_VMLAB", file=sys.stderr)
        return 2
    if command == "up":
        started_at = time.monotonic()
        running = VmLab.up(directory, outlive_me=True)
        print(f"2 nodes up in {time.monotonic() - started_at:.1f} s", file=sys.stderr)
        print(running.cluster_file, flush=True)
    elif command == "down":
        take_down(directory)
    elif command == "guard":
        if not sys.stdin.buffer.read():  # the end without a word: who started us is gone
            take_down(directory, only_token=arguments.token)
    elif command == "ssh":
        running = VmLab.attach(directory)
        argv = [*running.ssh_argv(arguments.node), *(word for index, word in enumerate(arguments.argv) if index or word != "--")]
        os.chdir(running.directory)
        os.execvp(argv[0], argv)
    else:
        getattr(VmLab.attach(directory), command)(arguments.node)
    return 0


def status(directory: Path | None) -> int:
    """Print what is built and what runs; return 0 when a lab runs in `directory` or, without one, when all is built."""
    reason = lab.why_not()
    built = reason is None and lab.is_built()
    print(
        f"cache: {store.folder()}: "
        + ("image and snapshot are there" if built else reason or f"image {image.key()} is to be built")
    )
    if directory is None:
        return 0 if built else 1
    running = VmLab.attach(directory)
    for name, each in running.machines.items():
        process = each.process()
        told = f"{each.status()}, pid {process.pid}" if process else "off"
        print(f"{name}: {told}, ssh root@127.0.0.1 -p {running.ports[name]}")
    return 0


def terminate(signum: int, frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that an `up` or `build` in progress cleans up."""
    raise SystemExit(128 + signum)


def main() -> int:
    """Entry point."""
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, terminate)
    try:
        return run(arguments)
    except VmLabError as error:
        print(f"tests.vmlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
