"""Attempts on the nodes of a lab, for the tests that run whole ones: start, follow, strike, and see what is left."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from launch.plan import Job, Plan, Ports, make_plan
from launch.supervise import Outcome, Supervisor
from launch.sync import our_files, sync, user_files
from r4090c.errors import CouldNotTell
from r4090c.model import Cluster, NodeFacts
from r4090c.paths import RunPaths, new_run_id
from r4090c.remote import Fleet
from tests.lab import Lab

SCRIPTS = Path(__file__).parent / "scripts"


class Recorder:
    """A Watcher that keeps everything."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[Mapping[str, Any]] = []
        self.notes: list[str] = []

    def metrics(self, line: Mapping[str, Any]) -> None:
        self.lines.append(json.dumps(line))

    def log(self, line: str) -> None:
        self.lines.append(line)

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Attempt:
    """One attempt, followed in a thread."""

    lab: Lab
    supervisor: Supervisor
    watcher: Recorder
    thread: threading.Thread
    outcomes: list[Outcome | Exception]

    @property
    def plan(self) -> Plan:
        return self.supervisor.plan

    @property
    def paths(self) -> RunPaths:
        return self.supervisor.paths

    def wait_for(self, text: str, timeout_s: float = 40.0) -> None:
        """Return once every rank has printed `text`."""
        logs = [Path(self.paths.rank_log(self.plan.attempt, rank)) for rank in range(self.plan.world_size)]
        until(lambda: all(log.exists() and text in log.read_text() for log in logs), f"no {text!r} of every rank", timeout_s)

    def outcome(self, timeout_s: float) -> Outcome:
        """Return how it ended; it must within `timeout_s`."""
        began = time.monotonic()
        self.thread.join(timeout_s)
        assert self.outcomes, f"still going on after {time.monotonic() - began:.1f} s; {self.watcher.notes} {self.watcher.events}"
        if isinstance(self.outcomes[0], Exception):
            raise self.outcomes[0]
        return self.outcomes[0]

    def agent(self, node: str) -> dict[str, Any]:
        """Return agents/<node>.json once it tells the end: it is written a moment after the node-local one."""
        path = Path(self.paths.agent(node))
        until(lambda: json.loads(path.read_text())["state"] == "ended", f"{path} tells no end")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def diagnosis(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(Path(self.paths.diagnosis).read_text())
        return found

    def events(self) -> list[dict[str, Any]]:
        """Return events.jsonl, which the lead has written whole before it tells its end."""
        self.agent(self.plan.nodes[0].name)
        return [json.loads(line) for line in Path(self.paths.events).read_text().splitlines()]


@dataclass(frozen=True)
class Bench:
    """The lab with an open fleet, and the facts of its nodes."""

    lab: Lab
    cluster: Cluster
    fleet: Fleet
    facts: Mapping[str, NodeFacts]

    def plan(
        self,
        script: str,
        *args: str,
        nodes: int = 2,
        nproc: int = 1,
        real: bool = True,
        python: Mapping[str, str] | None = None,
        ports: Ports | None = None,
        env: Mapping[str, str] | None = None,
        affinity: bool = True,
    ) -> Plan:
        """Return a plan for a script of this folder. `python`: node -> another paths.python."""
        chosen = []
        for node in self.cluster.nodes[:nodes]:
            program = (python or {}).get(node.name, node.paths.python if real else str(self.lab.shared / "quick_python"))
            chosen.append(replace(node, paths=replace(node.paths, python=program)))
        files = {**our_files(), **user_files(SCRIPTS / script)}
        code, free = sync(self.fleet, [node.name for node in chosen], str(self.lab.shared), files)
        run = RunPaths(PurePosixPath(chosen[0].paths.runs) / new_run_id(script.removesuffix(".py")))
        job = Job(script, f"user/{script}", args, nproc, env=env, affinity=affinity)
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return make_plan(
            self.cluster, chosen, self.facts, job, run=run, attempt=1, code=code, ports=ports or free, created_at=created
        )

    def start(self, plan: Plan) -> Attempt:
        """Start the attempt and follow it."""
        supervisor, watcher = Supervisor(self.fleet, plan, secrets.token_hex(8)), Recorder()
        supervisor.start({})
        outcomes: list[Outcome | Exception] = []

        def follow() -> None:
            try:
                outcomes.append(supervisor.follow(watcher))
            except CouldNotTell as error:
                outcomes.append(error)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        return Attempt(self.lab, supervisor, watcher, thread, outcomes)


def until(condition: Callable[[], bool], otherwise: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def pids(lab: Lab, node: str, what: str) -> list[int]:
    """Return the pids, as the node sees them, of its `agent`, `torchrun` or ranks."""

    def is_it(line: str) -> bool:
        torchrun = "torch.distributed.run" in line
        return {"agent": "agent.py daemon" in line, "torchrun": torchrun, "rank": "/user/" in line and not torchrun}[what]

    return [pid for pid, line in lab.processes(node) if is_it(line)]


def kill(lab: Lab, node: str, *whats: str, signal_name: str = "KILL") -> None:
    """Send a signal to all of these at once, from inside the node."""
    targets = [pid for what in whats for pid in pids(lab, node, what)]
    assert len(targets) >= len(whats), lab.processes(node)
    lab.kill(node, " ".join(map(str, targets)), signal_name)  # type: ignore[arg-type]


def assert_nothing_left(lab: Lab, timeout_s: float = 5.0) -> None:
    until(lambda: not any(lab.processes(node) for node in lab.nodes), f"left: {[lab.processes(n) for n in lab.nodes]}", timeout_s)
