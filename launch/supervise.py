"""Start an attempt on its nodes, follow it to its end, stop it: the controller's side of the agents.

The agents keep the gang by themselves; the supervisor tells a person what happens, notices what no agent can tell (a node that
no longer answers), names the first cause and makes sure that nothing is left. "SSH lost" is not "node lost": a lost connection
is reopened, and only when the others have ended, or nobody answers, does it count.
"""

from __future__ import annotations

import getpass
import json
import os
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Protocol

from launch.diagnose import Cause, first_cause
from launch.holders import GpusTaken, holders_of
from launch.plan import NodePlan, Plan, plan_json, secrets_of
from launch.sync import AGENT
from r4090c.errors import CouldNotTell, R4090cError, TrainingFailed
from r4090c.paths import RunPaths
from r4090c.remote import Fleet, NodeError, Shell, Stream, Verdict, ssh_command

SILENT_S = 3.0
"""A follower prints a beat every second; this long without one and its connection is reopened."""
UNREACHABLE_S = 5.0
"""est.: how long reopening is tried, once the other nodes have ended, before the node counts as lost."""
NOBODY_S = 30.0
"""est.: when no node at all answers for this long, the controller's own network is the likelier fault."""
PATIENT_S = 1800.0
"""est.: a supervisor that starts runs again outlasts a reboot of its own router or switch; the agents go on without it."""
START_ANSWER_S = 40.0
"""A start may wait 15 s for a start or a stop that goes on, and 14 s for its agent to come up (launch/agent.py)."""
STOP_GRACE_S = 5.0
"""est.: what an agent gets to end its ranks when asked to stop."""
STOP_ANSWER_S = 45.0
"""A stop may wait 15 s for a start that goes on, 15 s for the agent, 5.5 s for what it left (launch/agent.py)."""
LATE_S = 8.0
"""est.: the gang ends an attempt everywhere in about 3 s; a node that goes on for longer after another has failed is stopped."""


class Watcher(Protocol):
    """What the command line shows while an attempt runs. Called from one thread."""

    def metrics(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""

    def log(self, line: str) -> None:
        """One line of global rank 0's log."""

    def event(self, event: Mapping[str, Any]) -> None:
        """One event of an agent."""

    def note(self, text: str) -> None:
        """Something a person may want to know."""


@dataclass(slots=True)
class _NodeView:
    """What is known of one node: its last agent state, and since when it has not been heard (monotonic seconds)."""

    state: dict[str, Any] | None = None
    over: bool = False
    silent_since: float | None = None
    why: str = ""
    events_seen: int = 0

    @property
    def outcome(self) -> str | None:
        """What the agent told of its end; None when it told none."""
        end = (self.state or {}).get("end")
        return str(end["outcome"]) if end else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. `outcome`: done, failed, stopped. `left`: node -> pids that would not go."""

    outcome: str
    cause: Cause | None
    left: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Supervisor:
    """One attempt of one run."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        token: str | None,
        *,
        me: Mapping[str, str] | None = None,
        nobody_s: float = NOBODY_S,
        successor: bool = False,
    ) -> None:
        """`token` None: another supervisor started the attempt, and this one only looks on until the lead's lock is free.

        `successor`: that one has handed it over to us, so that we supervise also when the attempt has ended by now.
        `me`: what `who_i_am` returned for the attempts before. `nobody_s`: how long it may be that no node answers at all.
        """
        self.fleet = fleet
        self.plan = plan
        self.me = me or who_i_am()
        self.supervises = token is not None or successor
        self._other: str | None = None
        self._nobody_s = nobody_s
        self.paths = RunPaths(PurePosixPath(plan.run_dir))
        self._token = token
        self._queue: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._views = {node.name: _NodeView() for node in plan.nodes}
        self._streams: dict[str, Stream] = {}
        self._closing = threading.Event()
        self._ended_badly_at: float | None = None  # monotonic seconds

    @property
    def names(self) -> list[str]:
        """The nodes, the lead first."""
        return [node.name for node in self.plan.nodes]

    # ------------------------------------------------------------------ start

    def start(self, files: Mapping[str, str], *, again: bool = False) -> None:
        """Start the agent on every node; `files` (path -> text) are written by the lead first.

        `again`: nobody asked for it but the supervisor of the attempt before, so it is refused once the run has been stopped.
        Raises the first NodeError or TrainingFailed; then nothing is left running.
        """
        plan = plan_json(self.plan)
        secrets = secrets_of(self.plan)

        def start_one(shell: Shell) -> dict[str, Any]:
            name = shell.node.name
            request: dict[str, Any] = {"plan": plan, "node": name, "token": self._token, "secrets": {name: secrets[name]}}
            if name == self.names[0]:
                folders = (
                    self.paths.agents,
                    self.paths.attempt(self.plan.attempt),
                    self.paths.heartbeats,
                    self.paths.checkpoints,
                )
                request["folders"] = [str(folder) for folder in folders]
                text = json.dumps(plan, indent=1)
                request["files"] = {str(self.paths.plan): text, str(self.paths.attempt_plan(self.plan.attempt)): text, **files}
                request["outdated"] = [str(self.paths.diagnosis), str(self.paths.between)]
                request["outdated"] += [] if again else [str(self.paths.stop)]
                request["supervisor"] = self.me
                request["unless"] = str(self.paths.stop) if again else None
            done = shell.run(
                ["python3", "-I", "-S", f"{self.plan.code.tree}/launch/agent.py", "start"],
                stdin=json.dumps(request).encode(),
                timeout_s=START_ANSWER_S,
            )
            try:
                answer = json.loads(done.stdout.strip().splitlines()[-1])
            except (ValueError, IndexError):
                answer = {"error": (done.stderr.strip().splitlines() or [f"exit status {done.rc}"])[-1]}
            assert isinstance(answer, dict)
            return answer

        try:
            results = self.fleet.map(start_one, self.names)
        except BaseException:
            self.stop("the controller (start was interrupted)")
            raise
        for name, result in results.items():
            if isinstance(result, NodeError):
                self.stop("the controller (an agent did not start)", follows=True)
                raise result
            if result.get("busy"):
                self.stop("the controller (another run holds the GPUs)", follows=True)
                taken = {name: one["busy"] for name, one in results.items() if not isinstance(one, NodeError) and one.get("busy")}
                raise GpusTaken([holder for name, busy in taken.items() for holder in holders_of(name, busy)])
            if "error" in result:
                self.stop("the controller (an agent did not start)", follows=True)
                raise TrainingFailed(name, f"the agent did not start: {result['error']}", "", f"r4090c preflight --nodes {name}")

    # ------------------------------------------------------------------ follow

    def _follow_one(self, node: NodePlan) -> None:
        """Keep a follower on `node` until it has told the end; runs in a thread of its own."""
        files: dict[str, list[Any]] = {}
        if node.node_rank == 0:
            files = {
                "metrics": ["metrics", str(self.paths.metrics), 0],
                "log": ["log", str(self.paths.rank_log(self.plan.attempt, 0)), 0],
            }
        while not self._closing.is_set():
            try:
                why = self._follow_once(node, files)
            except Exception as error:  # noqa: BLE001 -- a node may say anything: its thread must not end unheard
                why = f"what it says cannot be read ({type(error).__name__}: {error})"
            if why is None or self._closing.is_set():  # a stream that `stop` closed says nothing about the node
                return
            self._queue.put((node.name, {"silent": why}))
            self.fleet.drop(node.name)
            self._closing.wait(0.5)

    def _follow_once(self, node: NodePlan, files: dict[str, list[Any]]) -> str | None:
        """Queue what the follower on `node` tells; return None when it told the end, else why it stopped telling."""
        what: dict[str, Any] = {
            "run_id": self.plan.run_id,
            "node": node.name,
            "attempt": self.plan.attempt,
            "begun": self._token is not None or self._views[node.name].state is not None,
            "files": list(files.values()),
        }
        if node.node_rank == 0:
            what["supervisor"] = self.me
        argv = ["python3", "-I", "-S", f"{self.plan.code.tree}/launch/agent.py", "follow", json.dumps(what)]
        try:
            stream = self._streams[node.name] = self.fleet.shell(node.name).stream(argv)
        except NodeError as error:
            return error.observed
        stream.set_timeout(SILENT_S)
        try:
            for line in stream.lines():
                if node.node_rank == 0:
                    stream.send("")  # a beat: who is silent supervises no longer
                try:
                    message = json.loads(line)
                except ValueError:
                    continue  # a login shell that prints something
                if not isinstance(message, dict):
                    continue
                if "line" in message:
                    files[message["line"][0]][2] = message["offset"]
                self._queue.put((node.name, message))
                if message.get("agent_gone") or (message.get("state") or {}).get("state") == "ended":
                    return None
        finally:
            stream.close()
        return "the connection to it broke"

    def follow(self, watcher: Watcher) -> Outcome:
        """Follow the attempt to its end, and return how it ended. Raises CouldNotTell when no node answers any more."""
        for node in self.plan.nodes:
            threading.Thread(target=self._follow_one, args=(node,), daemon=True, name=f"follow-{node.name}").start()
        try:
            while not self._finished():
                self._stop_the_late(watcher)
                try:
                    name, message = self._queue.get(timeout=0.2)
                except queue.Empty:
                    continue
                self._take(name, message, watcher)
        finally:
            self._closing.set()
        return self._outcome()

    def _take(self, name: str, message: dict[str, Any], watcher: Watcher) -> None:
        view = self._views[name]
        if "silent" in message:
            if view.silent_since is None:
                view.silent_since = time.monotonic()
                watcher.note(f"{name}: {message['silent']}; trying again")
            view.why = message["silent"]
            return
        if view.silent_since is not None:
            view.silent_since = None
            watcher.note(f"{name}: answers again")
        if "supervisor" in message:
            self._note_supervisor(message["supervisor"], watcher)
        if "line" in message:
            kind, text = message["line"]
            if kind == "log":
                watcher.log(text)
            else:
                try:
                    told = json.loads(text)
                except ValueError:
                    told = None
                if isinstance(told, dict):
                    watcher.metrics(told)
                else:
                    watcher.note(f"{name}: a line of metrics.jsonl is not a JSON object")
        if "state" in message and message["state"] is not None:
            view.state = message["state"]
            events = view.state.get("events", [])
            for event in events[view.events_seen :]:
                if event.get("node") == name:
                    watcher.event(event)
            view.events_seen = len(events)
            view.over = view.state.get("state") == "ended"
        if message.get("agent_gone"):
            view.over = True

    def _note_supervisor(self, told: Mapping[str, Any], watcher: Watcher) -> None:
        other = None if told.get("id") == self.me["id"] else str(told.get("who"))
        if other is not None and other != self._other:
            watcher.note(f"{other} supervises this run; looking on only")
        elif other is None and self._other is not None:
            watcher.note(f"{self._other} is gone; supervising from here on")
        elif other is None and self._token is None and not self.supervises:
            watcher.note("nobody supervises this run; supervising from here on")
        self._other, self.supervises = other, other is None

    def _stop_the_late(self, watcher: Watcher) -> None:
        """Stop the nodes that go on long after another has ended badly: their agents may not have met it yet."""
        if not self.supervises:
            return
        if self._ended_badly_at is None:
            if any(view.over and view.outcome != "done" for view in self._views.values()):
                self._ended_badly_at = time.monotonic()
        elif time.monotonic() - self._ended_badly_at > LATE_S:
            self._ended_badly_at = float("inf")  # once
            late = [name for name in self._known() if not self._views[name].over and self._views[name].silent_since is None]
            if late:
                watcher.note(f"stopping {', '.join(late)}, which went on although the attempt had ended elsewhere")
                by = "the supervisor (the attempt had ended elsewhere)"
                ask = {"by": by, "token": self._token, "starts": self._starts(), "follows": True}
                threading.Thread(target=stop_run, args=(self.fleet, self.plan.run_id, late), kwargs=ask, daemon=True).start()

    def _finished(self) -> bool:
        now = time.monotonic()
        views = self._views.values()
        silent = [view for view in views if not view.over and view.silent_since is not None]
        if len(silent) == len(self._views) and all(now - (view.silent_since or now) > self._nobody_s for view in silent):
            raise CouldNotTell(
                self.plan.run_id,
                f"no node has answered for {self._nobody_s:g} s: {silent[0].why}",
                "at least one reachable node",
                "r4090c jobs   (the run goes on without us)",
            )
        waiting = [view for view in views if not view.over]
        if not waiting:
            return True
        others_ended = len(waiting) < len(self._views)
        return others_ended and all(view.silent_since is not None and now - view.silent_since > UNREACHABLE_S for view in waiting)

    def _outcome(self) -> Outcome:
        views = self._views
        if any(view.outcome == "done" for view in views.values()):  # an agent ends so once every node's ranks have ended well
            return Outcome("done", None)
        unreachable = {name: view.why for name, view in views.items() if not view.over}
        left = self._sweep() if self.supervises else {}
        events = [event for view in views.values() if view.state is not None for event in view.state.get("events", [])]
        for name, view in views.items():
            if view.over and view.outcome is None:
                detail = f"the agent on {name} is gone"
                events.append({"node": "controller", "kind": "agent-lost", "peer": name, "time": time.time(), "detail": detail})
        cause = first_cause(
            events,
            unreachable,
            self.plan.run_id,
            recipe=None if self.plan.steps is None else self.plan.recipe,
            ssh={name: ssh_command(self.fleet.nodes[name]) for name in self.names},
        )
        outcome = "stopped" if cause.kind == "stopped" else "failed"
        if self.supervises:
            self._write_diagnosis(cause)
        return Outcome(outcome, cause, left)

    def take_over(self, outcome: Outcome) -> Outcome:
        """Do for an attempt that ended while we only looked on what its supervisor, which is gone, has not done."""
        assert outcome.cause is not None
        self.supervises = True
        left = self._sweep()
        self._write_diagnosis(outcome.cause)
        return replace(outcome, left=left)

    def _reachable(self) -> list[str]:
        return [name for name, view in self._views.items() if view.over]

    def _sweep(self) -> Mapping[str, Sequence[int]]:
        """End what the attempt may have left on the nodes that answer; return what would not go."""
        names = [name for name in self._known() if name in self._reachable()]
        return self.stop("the supervisor (the attempt had ended)", only=names, follows=True).left

    def _known(self) -> list[str]:
        """Return the nodes whose start can be named: a stop that names none would end any attempt of the run."""
        return [name for name, view in self._views.items() if self._token is not None or view.state is not None]

    def _write_diagnosis(self, cause: Cause) -> None:
        """Keep the cause in the run folder, by the first node that can write it.

        Where no agent told an end, whoever supervised meanwhile may know more: then what is there stays.
        """
        guessed = all(view.outcome is None for view in self._views.values())
        text = json.dumps({"schema": "r4090c.diagnosis/1", "attempt": self.plan.attempt, **asdict(cause)}, indent=1)
        for name in self._reachable():
            try:
                shell = self.fleet.shell(name)
                if guessed and shell.run(["test", "-e", str(self.paths.attempt_diagnosis(self.plan.attempt))]).rc == 0:
                    return
                for path in (self.paths.diagnosis, self.paths.attempt_diagnosis(self.plan.attempt)):
                    shell.put(str(path), text.encode(), timeout_s=10)
                return
            except NodeError:
                continue

    # ------------------------------------------------------------------ stop

    def leave(self) -> None:
        """Follow no longer; the attempt goes on."""
        self._closing.set()
        for stream in list(self._streams.values()):
            stream.close()

    def stop(self, by: str, only: Sequence[str] | None = None, *, follows: bool = False) -> Stopped:
        """End the attempt on every node (or `only` those); return what would not go and who did not answer.

        Nodes that do not answer are left to their own agents' leases. `follows`: the attempt has failed already.
        """
        self.leave()
        names = self.names if only is None else only
        return stop_run(self.fleet, self.plan.run_id, names, by, token=self._token, starts=self._starts(), follows=follows)

    def _starts(self) -> dict[str, str]:
        """Return node -> what its agent's start is called, as far as it was heard: for whoever has no token."""
        return {name: str(view.state["start_name"]) for name, view in self._views.items() if view.state is not None}


def who_i_am(heir_of: str | None = None) -> dict[str, str]:
    """Return what this controller is called between supervisors: an id, that of the one it follows (`heir_of`), and words."""
    return {"id": heir_of or secrets.token_hex(8), "who": f"{account()}@{os.uname().nodename}, process {os.getpid()}"}


def account() -> str:
    """Return who runs this, for people."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account that has no name here, as in a container
        return f"account {os.getuid()}"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let no second Ctrl-C (or SIGTERM, SIGHUP) break what ends the ranks: it takes seconds, and says so."""

    def wait_for_it(number: int, frame: object) -> None:
        with suppress(OSError):  # the terminal may have gone
            os.write(2, b"still stopping every rank; this takes some seconds\n")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, wait_for_it) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Stopped:
    """What stopping came to. `left`: node -> pids that would not go; `unreachable`: nodes that did not answer."""

    left: Mapping[str, Sequence[int]]
    unreachable: Sequence[str]


def told_of_stop(stopped: Stopped, names: Sequence[str]) -> str:
    """Return what a person reads of a stop of all of an attempt's nodes, `names`."""
    told = [f"still running: {dict(stopped.left)}"] if stopped.left else []
    if stopped.unreachable:
        told.append(f"no answer from {', '.join(stopped.unreachable)}: {what_follows_there(stopped.unreachable, names)}")
    return "; ".join(["stopped", *(told or ["nothing is left running"])])


def what_follows_there(unreachable: Sequence[str], names: Sequence[str]) -> str:
    """Return what an attempt of nodes `names` does where a stop did not arrive: an agent ends when it loses any of the others."""
    if set(names) - set(unreachable):
        return "its agent ends by itself, as it loses the others"
    return "IT GOES ON THERE, as no node of it has stopped; say it again once one answers"


def stop_run(
    fleet: Fleet,
    run_id: str,
    nodes: Sequence[str],
    by: str,
    *,
    token: str | None = None,
    starts: Mapping[str, str] | None = None,
    follows: bool = False,
) -> Stopped:
    """End run `run_id` on `nodes`: ask each agent, then sweep what carries the run's mark. Can be said twice.

    `token`: also keep the start that carries it from happening later. `starts`: node -> the start that is meant, where there is
    no token; without either whatever there is of the run is ended. `follows`: this stop is not why the attempt ends.
    """

    def one(shell: Shell) -> dict[str, Any]:
        name = shell.node.name
        request = {"do": "stop", "run_id": run_id, "node": name, "by": by, "token": token, "follows": follows}
        request["start_name"] = (starts or {}).get(name)
        value = shell.ask(AGENT, {**request, "grace_s": STOP_GRACE_S}, timeout_s=STOP_ANSWER_S).value
        assert isinstance(value, dict)
        return value

    with uninterrupted():
        return _stop_all(fleet, nodes, one)


def _stop_all(fleet: Fleet, nodes: Sequence[str], one: Callable[[Shell], dict[str, Any]]) -> Stopped:
    answers = fleet.map(one, nodes)
    lost = [name for name, answer in answers.items() if isinstance(answer, NodeError) and answer.verdict is Verdict.LOST]
    if lost:  # the connection had broken before, or a follower gave it up meanwhile: a new one may do
        answers.update(fleet.map(one, lost))
    left = {name: answer["left"] for name, answer in answers.items() if not isinstance(answer, NodeError) and answer["left"]}
    return Stopped(left, [name for name, answer in answers.items() if isinstance(answer, NodeError)])


def failure(outcome: Outcome, run_id: str) -> R4090cError:
    """Return the error that tells a person how the attempt ended."""
    cause = outcome.cause
    assert cause is not None
    evidence = "\n".join("    " + line for line in cause.evidence.splitlines()[-6:])
    observed = cause.summary + (f"\n{evidence}" if evidence else "")
    if cause.fix:
        observed += f"\n  mend:     {cause.fix[0]}"
    if outcome.left:
        observed += f"\n  still running: {dict(outcome.left)}"
    where = cause.node if cause.rank is None else f"{cause.node}, rank {cause.rank}"
    return TrainingFailed(f"run {run_id} failed ({where})", observed, "", cause.next_command)
