"""Carry out the rounds of a measurement: start the servers, await that they listen, start the others, collect. All its I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib.resources import files
from typing import Any

from netcheck.measure.job import NOT_STARTED, Job, MeasurementModule, Part, Round, Setting, read_part
from r4090c.errors import ParseError
from r4090c.remote import Fleet, NodeError, ssh_command

SOURCE = files("netcheck.measure").joinpath("run_on_node.py").read_text(encoding="utf-8")
"""The program a node runs for each part."""
READY_S = 15.0
"""est.: a server that does not listen by then will not."""
SERVER_ENDS_S = 2.0
"""est.: a server that served ends by itself within this time; then it is told to. So are all once a node of their job is lost."""
STOPPED_S = 20.0
"""est.: ending what runs takes 4 s, reading counters and kernel logs once more 10 s; who does not answer then is lost."""
SLACK_S = 10.0
"""est.: what a loaded node may need on top of a part's own limit before it is given up."""
ROUNDS_MAX = 500
"""A plan that never ends is a bug of ours, not a reason to keep a user waiting for ever."""


def carry_out(
    module: MeasurementModule, fleet: Fleet, setting: Setting, progress: Callable[[str], None] = lambda words: None
) -> dict[str, Any]:
    """Return the JSON of one measurement (shapes: netcheck.measure.job): its plan's rounds, until the plan has no more.

    A node that was lost takes no further part. On Ctrl-C the connections are closed, by which every node ends what it runs.
    """
    done: list[list[dict[str, Any]]] = []
    lost: dict[str, dict[str, Any]] = {}
    while len(done) < ROUNDS_MAX:
        rounds = module.plan(setting, done)
        if not rounds:
            break
        total = len(done) + len(rounds)
        for number, one in enumerate(rounds, len(done) + 1):
            progress(f"{module.TITLE}: round {number} of {total}")
            done.append(run_round(fleet, one, lost))
    return {"level": setting.level.word, "rounds": done}


def run_round(fleet: Fleet, jobs: Round, lost: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of `jobs`, run at the same time. Nodes that do not answer are added to `lost`, with their answer."""
    parts = sum(len(job.parts) for job in jobs)
    if not parts:
        return []
    executor = ThreadPoolExecutor(max_workers=parts, thread_name_prefix="part")
    try:
        running = [_Running(fleet, job, executor, lost) for job in jobs]
        pending = {future for one in running for future in one.futures.values()}
        while pending:
            _, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for one in running:
                one.stop_what_waits_in_vain()
        return [one.record() for one in running]
    except KeyboardInterrupt:
        for part in (part for job in jobs for part in job.parts):
            fleet.drop(part.node)
        raise
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


class _Running:
    """One job at work: a thread a part."""

    def __init__(self, fleet: Fleet, job: Job, executor: ThreadPoolExecutor, lost: dict[str, dict[str, Any]]) -> None:
        self.fleet, self.job, self.lost = fleet, job, lost
        self.servers = [part for part in job.parts if part.serves]
        self.settled = {part.node: threading.Event() for part in self.servers}
        self.failed: dict[str, str] = {}
        self.stops: dict[str, Callable[[], None]] = {}
        self.in_vain_since: float | None = None
        self.futures: dict[str, Future[dict[str, Any]]] = {}
        for part in sorted(job.parts, key=lambda one: not one.serves):
            self.futures[part.node] = executor.submit(self._work, part)

    def record(self) -> dict[str, Any]:
        """Return what is kept of the job."""
        parts = {part.node: self.futures[part.node].result() for part in self.job.parts}
        return {"name": self.job.name, "data": dict(self.job.data), "parts": parts}

    def stop_what_waits_in_vain(self) -> None:
        """Tell parts to end after a while: servers when everybody else has ended, all when a node of the job is lost.

        The clients of a server may never have come; ranks would await those of a lost node for minutes.
        """
        clients = [self.futures[part.node] for part in self.job.parts if not part.serves]
        idle = bool(self.servers) and all(future.done() for future in clients)
        lost = any(future.done() and future.result().get("unreached") for future in self.futures.values())
        if not (idle or lost):
            return
        self.in_vain_since = self.in_vain_since or time.monotonic()
        waited_s = time.monotonic() - self.in_vain_since
        if waited_s >= SERVER_ENDS_S:
            for node in [*self.stops]:
                self.stops.pop(node)()
        if waited_s >= SERVER_ENDS_S + STOPPED_S:
            for node in (node for node, future in self.futures.items() if not future.done()):
                self.fleet.drop(node)  # it does not even stop: frozen; its connection is the last that would be heard of it

    def _work(self, part: Part) -> dict[str, Any]:
        if not part.serves:
            for node, event in self.settled.items():
                event.wait(READY_S + SLACK_S)
                if node in self.failed:
                    return {"error": f"{NOT_STARTED}: {node} {self.failed[node]}"}
        try:
            return self._ask(part)
        finally:
            if part.serves:
                self._settle(part, "did not listen")

    def _heard(self, part: Part, event: object) -> None:
        """Take in what a server tells while it works: that it listens, or that it ended without."""
        if part.serves:
            told = event if isinstance(event, Mapping) else {}
            words = f": {told['said']}" if told.get("said") else ""
            self._settle(part, "" if told.get("listens_on") is not None else f"did not listen{words}")

    def _lose(self, part: Part, why: str, next_command: str) -> dict[str, Any]:
        """Note that a node takes no further part, and return what is kept of this one."""
        told = self.lost[part.node] = {"error": why, "unreached": True, "next_command": next_command}
        return told

    def _settle(self, part: Part, failure: str = "") -> None:
        event = self.settled[part.node]
        if failure and not event.is_set():
            self.failed[part.node] = failure
        event.set()

    def _ask(self, part: Part) -> dict[str, Any]:
        if part.node in self.lost:
            return self.lost[part.node]
        try:
            conversation = self.fleet.shell(part.node).converse(SOURCE, part.to_json(), timeout_s=part.limit_s + SLACK_S)
            self.stops[part.node] = conversation.stop
            answer = conversation.answer(lambda event: self._heard(part, event))
        except NodeError as error:
            return self._lose(part, error.observed, error.next_command)
        try:
            done = read_part(answer)
        except ParseError as error:
            return self._lose(part, f"the node's answer is not understood: {error}", "")
        if done.error:
            return self._lose(part, done.error, f"{ssh_command(self.fleet.nodes[part.node])} df -h /tmp /var/tmp .")
        if part.serves and done.steps and done.steps[0].error:
            self._settle(part, done.steps[0].error)
        return dict(answer)
