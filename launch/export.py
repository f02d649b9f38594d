"""Export or evaluate a run's checkpoint where its folder can be seen: on a node of it, or on this machine.

The programs are train/export.py and train/evaluate.py; both are called alike, and tell what they do in lines of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from launch.jobs import Run
from launch.sync import PROJECT, our_files, sync
from r4090c.errors import CouldNotTell, Exit, R4090cError, UsageError
from r4090c.model import Cluster, Node
from r4090c.paths import SharedPaths
from r4090c.remote import Fleet, NodeError, ssh_command

EXPORT, EVALUATE = "train/export.py", "train/evaluate.py"
DOING = {EXPORT: "exporting", EVALUATE: "evaluating"}
MERGE_STREAMS = ("sh", "-c", 'exec "$@" 2>&1', "sh")
"""What libraries say on standard error belongs to what is told when the program ends badly."""
TOLD_LINES = 5


def run_on_node(
    program: str, fleet: Fleet, cluster: Cluster, run: Run, options: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Export or evaluate `run` on the first of its nodes that answers, with today's code; return what is told.

    Raises R4090cError.
    """
    if not run.plan.get("steps"):
        raise UsageError(f"run {run.id}", "is of a script of your own", "a run of a recipe", "r4090c jobs")
    node, tree = _reach(fleet, cluster, run)
    say(f"{DOING[program]} on {node.name}")
    data = str(SharedPaths(PurePosixPath(node.paths.shared)).data)
    argv = [node.paths.python, "-u", f"{tree}/{program}", run.run_dir, "--data-dir", data, "--json", *options]
    stream = fleet.shell(node.name).stream([*MERGE_STREAMS, *argv])
    try:
        told = _follow(stream.lines(), lambda: stream.rc, say, f"{program} on {node.name}")
        return {**told, "node": node.name}
    except _LostError:
        raise CouldNotTell(node.name, f"the connection broke while {DOING[program]}", "an answer", ssh_command(node)) from None
    finally:
        stream.close()


def _reach(fleet: Fleet, cluster: Cluster, run: Run) -> tuple[Node, str]:
    """Return a node of the run that answers, and the code that was brought there. Raises R4090cError."""
    known = {node.name: node for node in cluster.nodes}
    last: NodeError | None = None
    for name in (name for name in run.nodes if name in known):
        try:
            code, _ = sync(fleet, [name], known[name].paths.shared, our_files())
            return known[name], code.tree
        except NodeError as error:
            last = error
    if last is not None:
        observed = f"none of its nodes answers; the last, {last}"
        raise CouldNotTell(f"run {run.id}", observed, "one that does", "r4090c preflight --quick")
    raise UsageError(f"run {run.id}", f"its nodes {', '.join(run.nodes)} are not in the inventory", "one of them", "r4090c nodes")


def run_here(program: str, run_dir: Path, options: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Export or evaluate the run in a folder of this machine, with this Python; return what is told. Raises R4090cError."""
    if not (run_dir / "checkpoints").is_dir():
        raise UsageError(str(run_dir), "has no checkpoints", "the folder of a run, or a run's id", "r4090c jobs")
    data = run_dir.resolve().parent.parent / "data"
    command = [sys.executable, "-u", str(PROJECT / program), str(run_dir), "--data-dir", str(data), "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        return _follow((line.rstrip("\n") for line in process.stdout), process.wait, say, f"{program} on this machine")


class _LostError(Exception):
    """The program's end was not told."""


def _follow(lines: Iterable[str], end: Callable[[], int | None], say: Callable[[str], None], where: str) -> dict[str, Any]:
    """Return the program's result, saying meanwhile what it does. Raises its error."""
    tail: deque[str] = deque(maxlen=TOLD_LINES)
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            tail.append(line)
        elif "result" in told:
            return dict(told["result"])
        elif "error" in told:
            if told["exit_code"] == Exit.INTERRUPTED:
                raise KeyboardInterrupt
            kind = UsageError if told["exit_code"] == Exit.USAGE else R4090cError
            raise kind(*told["error"])
        elif "doing" in told:
            say(str(told["doing"]))
    code = end()
    if code is None:
        raise _LostError
    raise R4090cError(where, f"ended with {code}: {' | '.join(tail) or 'it said nothing'}", "a result")
