"""From kill -9 of a rank to the next step: `r4090c launch` against torchrun's elastic restart: python -m bench.restart."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import processes
from bench.launch import ENGINE, NODES, OURS, STEP, Job, Ports, job_of, newest_run, peers_proof, wait_until_idle
from bench.launch import Watched as Ended
from bench.record import (
    REPOSITORY,
    BenchError,
    Goal,
    Record,
    arguments_parser,
    child_environment,
    package_versions,
    ratios,
    spread,
    table,
)
from tests.lab import Lab, LabError
from tests.lab.faults import Scene

ELASTIC = "torchrun, c10d, --max-restarts 3"
OWN_STORE = f"{ELASTIC}, a store of its own for each try"
"""torchrun lets the ranks meet in the store of its own rendezvous, where they find each other's addresses of the try before; this
variable of torch's gives them a new one."""
NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
PEER = REPOSITORY / "bench" / "peers" / "resume_zero2.py"
STEPS, EVERY_STEPS, KILL_AT = 14, 5, 7
SETS = (f"steps={STEPS}", f"checkpoint.every_steps={EVERY_STEPS}")
MEMBER = "node02"
AGAIN_S = 150.0
"""est.: five times what a restart takes here; a launcher that has made no step by then has failed."""
START_S = 120.0
WORDS = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception): .*|^error: .*")
"""What a launcher and its ranks say of a failure."""
TOLD_LINES, TOLD_LETTERS = 4, 160
RATIO = 1.0


@dataclass
class Killed:
    """A run whose rank was killed. `seen_s`: the launcher's first line after that; `step_s`: the first step made again."""

    seen_s: float | None = None
    step_s: float | None = None
    exit_codes: list[int | None] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)


def ours(lab: Lab) -> list[list[str]]:
    """Return the real command, with nothing but its defaults."""
    program = Path(sys.executable).with_name("r4090c")
    if not program.exists():
        raise BenchError(f"{program} is not there; run: make setup")
    sets = [word for key in SETS for word in ("--set", key)]
    return [[str(program), "launch", "tiny", "--nodes", str(NODES), *sets, "--cluster", str(lab.cluster_file)]]


def elastic(job: Job, ports: Ports, *variables: str) -> list[list[str]]:
    """Return what torchrun's documentation proposes: on each node, over ssh, one torchrun that meets the other at node01.

    `variables`: NAME=VALUE for it.
    """
    port, run = ports.next(), f"run{time.monotonic_ns()}"
    shape = ["--nnodes", str(NODES), "--nproc_per_node", "1", "--max-restarts", "3", "--rdzv_id", run]
    where = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{job.addresses[0]}:{port}"]
    script = [str(PEER), *job.script[1:]]
    return job.on_each_node(
        lambda rank: [
            *variables,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *shape,
            *where,
            "--local-addr",
            job.addresses[rank],
            *script,
        ]
    )


def run(commands: Sequence[Sequence[str]], folder: Path, kill: Callable[[], None]) -> Killed:
    """Start the commands, kill a rank once step KILL_AT is told, and go on until all have ended, or AGAIN_S after the kill."""
    told: queue.Queue[tuple[float, str | None]] = queue.Queue()
    started: list[subprocess.Popen[str]] = []
    killed = Killed()
    try:
        for command in commands:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=folder,
                env=child_environment(R4090C_STATE=str(folder / "state")),
                start_new_session=True,
            )
            started.append(process)
            threading.Thread(target=read, args=(process, told), daemon=True).start()
        follow(len(started), told, killed, kill)
        killed.exit_codes = [process.poll() for process in started]
    finally:
        for process in started:
            processes.kill_group(process)  # type: ignore[arg-type]
    return killed


def read(process: subprocess.Popen[str], told: queue.Queue[tuple[float, str | None]]) -> None:
    """Queue the lines of a process with the time they came, and None at their end."""
    assert process.stdout is not None
    for line in process.stdout:
        told.put((time.perf_counter(), line.rstrip()))
    process.wait()
    told.put((time.perf_counter(), None))


def follow(many: int, told: queue.Queue[tuple[float, str | None]], killed: Killed, kill: Callable[[], None]) -> None:
    """Take the lines of `many` processes until they end. The first step at or before the last one is the one made again."""
    last, struck, deadline = 0, 0.0, time.perf_counter() + START_S
    while many:
        try:
            when, line = told.get(timeout=max(0.0, deadline - time.perf_counter()))
        except queue.Empty:
            return
        if line is None:
            many -= 1
            continue
        killed.lines.append(line)
        match = STEP.search(line)
        if struck and killed.seen_s is None and not match:
            killed.seen_s = when - struck
        if not match:
            continue
        step = int(match[1] or match[3])
        if match[2]:
            killed.losses[step] = float(match[2])
        if struck and step <= last and killed.step_s is None:
            killed.step_s = when - struck
        last = max(last, step) if not killed.step_s else last
        if not struck and step >= KILL_AT:
            struck, deadline = time.perf_counter(), time.perf_counter() + AGAIN_S
            kill()


def problem_of(name: str, killed: Killed, lab: Lab, expected: dict[int, float]) -> str:
    """Return why a run does not count, "" when it does: it went on, to the end, and its losses are those of a run left alone."""
    said = [match[0].strip()[:TOLD_LETTERS] for match in map(WORDS.search, killed.lines) if match]
    words = " / ".join(list(dict.fromkeys(said))[:TOLD_LINES])
    if killed.step_s is None:
        return f"no step within {AGAIN_S:g} s of the kill; exit codes {killed.exit_codes}; it said: {words}"
    if any(killed.exit_codes) or None in killed.exit_codes:
        return f"exit codes {killed.exit_codes}; it said: {words}"
    losses = killed.losses
    if name == OURS:
        losses = {line["step"]: line["loss"] for line in map(json.loads, Path(newest_run(lab).metrics).read_text().splitlines())}
    else:
        try:
            ran, _ = peers_proof(Ended(None, 0.0, [], killed.lines))
        except ValueError as error:
            return str(error)
        if ran != ENGINE:
            return f"it ran as {ran}"
    different = [step for step in expected if f"{losses.get(step, 0.0):.6f}" != f"{expected[step]:.6f}"]
    return f"the loss of step {different[0]} is {losses.get(different[0])}, not {expected[different[0]]}" if different else ""


def uninterrupted(lab: Lab, folder: Path) -> dict[int, float]:
    """Run ours without a fault: it prepares the data, and its losses are what all others must have. Raises BenchError."""
    done = subprocess.run(
        ours(lab)[0], cwd=folder, env=child_environment(R4090C_STATE=str(folder / "state")), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BenchError(f"our own first run failed: {done.stderr.strip()[-500:]}")
    return {line["step"]: line["loss"] for line in map(json.loads, Path(newest_run(lab).metrics).read_text().splitlines())}


def main() -> int:
    """Entry point."""
    parser = arguments_parser(__doc__ or "", rounds=3)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    processes.end_on_sigterm()
    try:
        bench(options.rounds, options.out)
    except (BenchError, LabError) as error:
        print(f"bench.restart: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the lab is down", file=sys.stderr)
        return 130
    return 0


def bench(rounds: int, out: Path) -> None:
    """Bring two nodes up, run both in turn in every round, and write the results."""
    with tempfile.TemporaryDirectory(prefix="r4090c-bench-") as name, Lab.up(Path(name) / "lab", NODES) as lab:
        folder = Path(name)
        expected = uninterrupted(lab, folder)
        job, ports = job_of(lab, folder), Ports()
        versions = package_versions("r4090c", "torch", "deepspeed", "transformers")
        record = Record(
            out, "restart", versions=versions, rounds=rounds, steps=STEPS, killed_after=KILL_AT, saved_every=EVERY_STEPS
        )
        started: dict[str, Callable[[], list[list[str]]]] = {
            OURS: lambda: ours(lab),
            ELASTIC: lambda: elastic(job, ports),
            OWN_STORE: lambda: elastic(job, ports, f"{NOT_SHARED}=1"),
        }
        names = list(started)
        for number in range(rounds):
            for contender in random.Random(number).sample(names, len(names)):
                shutil.rmtree(job.save, ignore_errors=True)
                killed = run(started[contender](), folder, lambda: kill_rank(lab))
                figures = {"seen_s": rounded(killed.seen_s), "step_s": rounded(killed.step_s)}
                problem = problem_of(contender, killed, lab, expected)
                left = wait_until_idle(lab)
                record.add({"contender": contender, "round": number, **figures, "left_running": len(left)}, problem)
    report(record, names)


def kill_rank(lab: Lab) -> None:
    """SIGKILL the rank on the second node."""
    scene = Scene(lab, lab.cluster_file, member=MEMBER)
    ours_or_peers = [*scene.find(MEMBER, "rank"), *(one for one in lab.node_processes(MEMBER) if is_peer(one.argv))]
    if not ours_or_peers:
        raise BenchError(f"no rank on {MEMBER}: {lab.processes(MEMBER)}")
    scene.signal(MEMBER, ours_or_peers, "KILL")


def is_peer(argv: Sequence[str]) -> bool:
    """Return whether this is a rank of the peer's program."""
    return str(PEER) in argv and "torch.distributed.run" not in argv


def rounded(value: float | None) -> float | None:
    """Return milliseconds' worth of digits."""
    return None if value is None else round(value, 3)


def report(record: Record, names: Sequence[str]) -> None:
    """Write the table."""
    rows: list[Sequence[str]] = []
    for name in names:
        mine: list[dict[str, Any]] = [one for one in record.runs if one["contender"] == name]
        out = [one for one in record.left_out if one["contender"] == name]
        compared = spread(ratios(record.runs, "step_s", name, OURS))
        rows.append([name, str(len(mine)), str(len(out)), spread([one["step_s"] for one in mine]), compared])
    against = {name: ratios(record.runs, "step_s", OURS, name) for name in names if name != OURS}
    job = (
        f"Recipe `tiny`, {NODES} nodes of a rank on the CPU (gloo), a checkpoint every {EVERY_STEPS} steps, kill -9 of the rank "
        f"on {MEMBER} after step {KILL_AT}. A run counts when it goes on by itself to step {STEPS}, with the losses of one that "
        "was left alone.\n\n"
    )
    heading = ["restart by", "runs", "failed", "kill to the next step, s", f"/ {OURS}"]
    goals = [Goal(f"{OURS} / {name}", RATIO, statistics.median(found) if found else None) for name, found in against.items()]
    record.finish("Restart", job + table(heading, rows), goals)


if __name__ == "__main__":
    sys.exit(main())
