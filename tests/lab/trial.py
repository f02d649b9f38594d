"""One `r4090c launch` in a lab with one fault, watched from outside: when each process went, what was told, what is left.

Nothing is taken from what r4090c says of itself but the cause: processes are watched by pidfds, ports, locks and half checkpoints
are looked for where they would be.
"""

from __future__ import annotations

import json
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import cli
from tests.lab.faults import NODE_WITHIN_S, Fault, Role, Scene, role_of
from tests.lab.lab import Lab, _outer_of
from tests.lab.processes import all_processes
from tests.lab.toy import changed_cluster, toy_python

STEP = re.compile(r"^step (\d+)/\d+ ")
RUN = re.compile(r"^run (\S+)  (\S+)$")
ROUTINE = ("checking ", "starting ", "run ", "warning: ", "done in ")
"""How lines on stderr begin that tell of no fault."""
LOOK_S = 0.02
STRIKE_AT = 7
"""The step after which most faults strike: a checkpoint is there, and the next one is not begun."""
EVERY_STEPS = 5
GOES_ON_S, GOES_ON_STEPS = 5.0, 5
"""How long a run is seen to go on: longer than a follower may be silent (launch/supervise.py, 3 s)."""
GONE_WITHIN_S = 60.0
"""How long after the end something may still be going."""
HALF = re.compile(r"step_\d{8}\.(partial|old)")
"""What train/checkpoint.py removes at the next start."""


@dataclass
class Watched:
    """One process of the run as it was when the fault struck. `gone`: when it went (time.monotonic), None = not yet."""

    node: str
    role: Role
    pidfd: int
    gone: float | None = None


class Watch:
    """All processes of all runs on some nodes, from now on."""

    def __init__(self, lab: Lab, nodes: Sequence[str]) -> None:
        self.all: list[Watched] = []
        for node in nodes:
            for process in lab.node_processes(node):
                role = role_of(" ".join(process.argv))
                if role is None:
                    continue
                try:
                    self.all.append(Watched(node, role, os.pidfd_open(process.pid)))
                except ProcessLookupError:
                    continue

    def look(self) -> None:
        """Note who has gone since."""
        waiting = {one.pidfd: one for one in self.all if one.gone is None}
        for pidfd in select.select(list(waiting), [], [], 0)[0]:
            waiting[pidfd].gone = time.monotonic()

    def gone_s(self, since: float, *roles: Role, nodes: Sequence[str]) -> float | None:
        """Return how long after `since` the last of these went; None when one has not, or there was none."""
        found = [one.gone for one in self.all if one.role in roles and one.node in nodes]
        return max(one - since for one in found if one is not None) if found and None not in found else None

    def close(self) -> None:
        """Close the descriptors."""
        for one in self.all:
            os.close(one.pidfd)
        self.all = []


@dataclass
class Found:
    """What came of a trial, in seconds after the fault struck; None = it did not come.

    `noticed_s`: an agent recorded it. `said_s`: the launch said something of it. `told_s`: the cause was there. `peers_s`: the
    ranks of the other nodes had stopped. `all_s`: all that ran had. `resumed_s`: the first step of a later attempt was told.
    `ended_s`: the launch had ended. `step`: the last one.
    """

    noticed_s: float | None = None
    said_s: float | None = None
    told_s: float | None = None
    peers_s: float | None = None
    all_s: float | None = None
    resumed_s: float | None = None
    ended_s: float | None = None
    cause: Mapping[str, Any] | None = None
    attempts: int = 0
    step: int = 0
    exit_code: int | None = None


class Trial:
    """One launch with one fault. `toy`: torchrun and the training script are the stand-ins of tests/lab/toy.py.

    `state`: a folder of its own: what is learned of nodes is remembered there. `spare`: a node that may take another's place.
    """

    def __init__(
        self,
        lab: Lab,
        fault: Fault,
        state: Path,
        *,
        toy: bool = True,
        steps: int = 30,
        options: Sequence[str] = (),
        nodes: int = 2,
        spare: str | None = "node03",
    ) -> None:
        self.lab, self.fault, self.state, self.steps = lab, fault, state, steps
        changes: dict[str, Any] = {"python": toy_python(lab)} if toy else {}
        if spare is not None:
            changes[spare] = {"spare": True}
        self.scene = Scene(lab, changed_cluster(lab, "toy" if toy else "real", **changes), changes)
        self.nodes = list(lab.nodes)[:nodes]
        self.spare = spare
        self.options = options
        self.run_dir: Path | None = None
        self.found = Found()
        self.output: list[str] = []
        self.errors: list[str] = []
        self.killed_code: int | None = None
        """Of a launch that another command took over from."""
        self._readers: list[threading.Thread] = []
        self._struck = self._struck_time = 0.0
        self._watch: Watch | None = None

    # ------------------------------------------------------------------------------------------ the launch

    def launch(self, target: str = "tiny") -> None:
        """Make the fault ready, and start the launch."""
        if self.fault.ready is not None:
            self.fault.ready(self.scene)
        sets = (f"steps={self.steps}", f"checkpoint.every_steps={EVERY_STEPS}")
        words = ["launch", target, "--nodes", str(len(self.nodes)), *(word for key in sets for word in ("--set", key))]
        self.start(*words, *self.fault.options, *self.options)

    def start(self, *words: str) -> None:
        """Start a command of r4090c about this lab; its lines are kept."""
        launcher = cli.start(*words, "--cluster", str(self.scene.cluster), state=self.state)
        self.scene.launcher = launcher
        self._readers = [
            threading.Thread(target=self._read, args=(launcher.stdout, self.output), daemon=True),
            threading.Thread(target=self._read, args=(launcher.stderr, self.errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: Any, lines: list[str]) -> None:
        for line in pipe:
            text = line.rstrip("\n")
            lines.append(text)
            if self._struck and lines is self.errors and self.found.said_s is None and not text.startswith(ROUTINE):
                self.found.said_s = time.monotonic() - self._struck
            if match := RUN.match(text):
                self.scene.run_id, self.run_dir = match[1], Path(match[2])
            if match := STEP.match(text):
                self.found.step = int(match[1])
                if self._struck and self.found.resumed_s is None and self.attempt() > 1:
                    self.found.resumed_s = time.monotonic() - self._struck

    def attempt(self) -> int:
        """Return the number of the run's last attempt so far, 0 before there is one."""
        if self.run_dir is None or not self.run_dir.is_dir():
            return 0
        return max((int(path.name.partition("_")[2]) for path in self.run_dir.glob("attempt_[0-9]*")), default=0)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Return once `condition` holds, watching all the while. Raises AssertionError with what was said when it does not."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.look()
            launcher = self.scene.launcher
            over = launcher is not None and launcher.poll() is not None
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s\n{self.told()}"
            assert not over or condition(), f"the launch ended before {what}\n{self.told()}"
            time.sleep(LOOK_S)

    def wait_for_step(self, step: int, timeout_s: float = 300) -> None:
        """Return once the launch has told `step`."""
        self.wait_for(lambda: self.found.step >= step, f"step {step}", timeout_s)

    # ------------------------------------------------------------------------------------------ the fault

    def strike(self, do: Callable[[Scene], None] | None = None) -> None:
        """Do the fault (or `do`) now, and watch from here on."""
        if self._watch is not None:
            self._watch.close()
        self._watch = Watch(self.lab, self.nodes)
        self._struck, self._struck_time = time.monotonic(), time.time()
        action = do or self.fault.strike
        if action is not None:
            action(self.scene)

    def look(self) -> None:
        """Note what has happened since the last look."""
        if self._watch is None or self.run_dir is None:
            return
        self._watch.look()
        since = time.monotonic() - self._struck
        if self.found.cause is None and (cause := self._cause()) is not None:
            self.found.cause, self.found.told_s = cause, since

    def _cause(self) -> dict[str, Any] | None:
        """Return the cause of the attempt that was struck, once it is written."""
        assert self.run_dir is not None
        for path in (self.run_dir / "diagnosis.json", *self.run_dir.glob("attempt_*/diagnosis.json")):
            try:
                told = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if told.get("attempt") == 1:
                return dict(told)
        return None

    def wait(self, timeout_s: float) -> Found:
        """Wait for the end of the launch, and return what came of it."""
        launcher = self.scene.launcher
        assert launcher is not None
        deadline = time.monotonic() + timeout_s
        while launcher.poll() is None:
            self.look()
            assert time.monotonic() < deadline, f"still going on after {timeout_s:g} s\n{self.told()}"
            time.sleep(LOOK_S)
        self.found.ended_s = time.monotonic() - self._struck if self._struck else None
        for reader in self._readers:
            reader.join(5)
        self.found.exit_code = launcher.returncode
        return self.finish()

    def wait_until_stopped(self, timeout_s: float) -> None:
        """Return once every process of the run that was there when the fault struck has gone."""
        assert self._watch is not None
        watch = self._watch
        deadline = time.monotonic() + timeout_s
        while any(one.gone is None for one in watch.all if one.role != "follower"):
            self.look()
            left = [f"{one.role} on {one.node}" for one in watch.all if one.gone is None]
            assert time.monotonic() < deadline, f"{', '.join(left)} still there after {timeout_s:g} s\n{self.told()}"
            time.sleep(LOOK_S)

    def finish(self) -> Found:
        """Return what is known by now."""
        self.look()
        found, culprit = self.found, self.fault.answer.node
        if self._watch is not None:
            others = [node for node in self.nodes if node != culprit]
            found.peers_s = self._watch.gone_s(self._struck, "rank", nodes=others)
            found.all_s = self._watch.gone_s(self._struck, "rank", "torchrun", "agent", nodes=self.nodes)
            found.noticed_s = self._noticed_s()
        found.attempts = self.attempt()
        return found

    def _noticed_s(self) -> float | None:
        """Return when an agent recorded the first event that is no part of a good run."""
        try:
            lines = (self.run_dir / "events.jsonl").read_text().splitlines() if self.run_dir else []
        except OSError:
            return None
        good = ("started", "finished", "placement-differs")
        times = [float(one["time"]) for line in lines if (one := json.loads(line))["kind"] not in good]
        later = [when - self._struck_time for when in times if when >= self._struck_time]
        return min(later, default=None)

    def told(self) -> str:
        """Return what the launch said."""
        return "\n".join([*self.output[-5:], *self.errors[-25:]])

    # ------------------------------------------------------------------------------------------ the end

    def mend(self) -> None:
        """Undo what struck."""
        self.scene.undoing.close()

    def close(self) -> None:
        """End the launch if it still goes on, undo the fault, and stop the run on every node."""
        launcher = self.scene.launcher
        if launcher is not None and launcher.poll() is None:
            launcher.kill()
            launcher.wait()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self.mend()
        self.scene.unreadying.close()
        if self.scene.run_id and any(self.lab.processes(node) for node in self.nodes):
            cli.run("stop", self.scene.run_id, "--cluster", str(self.scene.cluster), state=self.state)

    def play(self, timeout_s: float = 600) -> Found:
        """Launch, strike, and return what came of it once the run has ended.

        What is to go on is seen to do so before that is undone; a launch that was killed is followed by `r4090c attach`.
        """
        answer = self.fault.answer
        self.launch()
        if self.fault.strike is not None:
            self.wait_for_step(STRIKE_AT)
        self.strike()
        if answer.then == "goes-on":
            self._go_on()
        found = self.wait(timeout_s)
        if self.run_dir is not None and answer.then in ("again", "elsewhere"):
            self.wait_until_stopped(NODE_WITHIN_S)  # what runs on a node that is cut off ends by itself
        return self.finish() if found.exit_code is not None else found

    def _go_on(self) -> None:
        """See the run go on, with nobody following or a node that cannot be followed; then undo that."""
        before = self.steps_done()
        until = time.monotonic() + GOES_ON_S
        launcher = self.scene.launcher
        assert launcher is not None
        while time.monotonic() < until or self.steps_done() < before + GOES_ON_STEPS:
            self.look()
            assert time.monotonic() < until + 30, f"it makes no more steps\n{self.told()}"
            time.sleep(LOOK_S)
        self.mend()
        if launcher.poll() is not None:
            self.killed_code = launcher.returncode
            self.start("attach", self.scene.run_id)

    def steps_done(self) -> int:
        """Return the last step in metrics.jsonl: what the ranks did, whoever follows."""
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines() if self.run_dir else []
        except OSError:
            return 0
        return max((int(json.loads(line)["step"]) for line in lines if line.endswith("}")), default=0)


def steps_for(fault: Fault, *, toy: bool = True) -> int:
    """Return the steps of a run that outlasts the fault: of 0.1 s under the stand-in, of about 0.3 s in training.

    One that goes on must do so for longer than we look.
    """
    goes_on = fault.answer.then == "goes-on"
    return (110 if goes_on else 30) if toy else (60 if goes_on else 14)


@contextmanager
def trial(lab: Lab, fault: Fault, state: Path, **how: Any) -> Iterator[Trial]:
    """Yield a trial that is over, and mended, at the end of the block."""
    one = Trial(lab, fault, state, **how)
    try:
        yield one
    finally:
        one.close()


# ------------------------------------------------------------------------------------------ what is left

HELD = r"""
import fcntl, glob
for path in glob.glob("/tmp/r4090c-*/*/*/*lock*") + glob.glob("/tmp/r4090c-leases/*"):
    try:
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("held:", path)
    except OSError:
        pass
"""


def listening(lab: Lab, node: str) -> set[int]:
    """Return the TCP ports that something on the node listens at."""
    outer = _outer_of(lab.node(node))
    if outer is None:
        return set()
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{outer.pid}/net/{name}").read_text().splitlines()[1:]]
    return {int(fields[1].rpartition(":")[2], 16) for fields in map(str.split, lines) if fields[3] == "0A"}


def left_on(lab: Lab, node: str) -> list[str]:
    """Return what a run has left on a node: processes, listening ports, held locks and leases."""
    if _outer_of(lab.node(node)) is None:
        return []
    found = [f"{node}: process {line[:120]}" for _, line in lab.processes(node)]
    found += [f"{node}: port {port}" for port in sorted(listening(lab, node) - {22})]
    return found + [f"{node}: {line}" for line in lab.exec(node, "python3", "-I", "-S", "-c", HELD).stdout.splitlines()]


def half_checkpoints(run_dir: Path, *, done: bool) -> list[str]:
    """Return what is wrong below checkpoints/: half ones that no resume would remove; after a run that is `done`, any."""
    from train.checkpoint import all_damaged

    folder = run_dir / "checkpoints"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    half = [name for name in names if not re.fullmatch(r"step_\d{8}|latest", name)]
    wrong = half if done else [name for name in half if not HALF.fullmatch(name) and not name.startswith(".latest.")]
    return wrong + [f"{name}: {why}" for name, why in all_damaged(folder).items()]


def left_behind(lab: Lab, within_s: float = GONE_WITHIN_S) -> list[str]:
    """Return what is left on any node after `within_s`; at once when there is nothing."""
    deadline = time.monotonic() + within_s
    while left := [text for node in lab.nodes for text in left_on(lab, node)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.2)
    return []


def launchers_of(cluster: Path) -> list[int]:
    """Return the pids of r4090c commands about this cluster on this machine."""
    return [one.pid for one in all_processes() if "r4090c" in one.argv and str(cluster) in one.argv]


def wrong_with(one: Trial) -> list[str]:
    """Return what is not as the table has it, of a trial that was played and mended: [] when all is."""
    fault, found, answer = one.fault, one.found, one.fault.answer
    said = "\n".join(one.errors)
    left = left_behind(one.lab)
    if answer.then == "refused":
        named = answer.node is not None and answer.node in said
        refused = found.exit_code in (1, 2) and found.step == 0
        return [
            *left,
            *([] if named else [f"{answer.node} is not named"]),
            *([] if refused else [f"exit code {found.exit_code}"]),
        ]
    if one.run_dir is None:
        return [*left, "there was no run"]
    wrong = list(left)
    done = answer.then != "given-up"
    cause = found.cause or {}
    if answer.kinds:
        told = tuple(cause.get(key) for key in ("kind", "node", "rank"))
        wanted = (*answer.kinds[:1], answer.node or told[1], answer.rank if answer.node else told[2])
        if told != wanted:
            wrong.append(f"the cause told is {told}, not {wanted}")
        if answer.node is not None and answer.node not in said:
            wrong.append(f"{answer.node} is not named on the terminal")
    if fault.strike is not None and answer.kinds and (found.peers_s is None or found.peers_s > answer.within_s):
        wrong.append(f"the other ranks stopped after {found.peers_s} s, not within {answer.within_s:g}")
    came = (found.exit_code, found.attempts)
    wanted_end = {"goes-on": (0, 1), "again": (0, 2), "elsewhere": (0, 2), "given-up": (1, 1)}[answer.then]
    if came != wanted_end:
        wrong.append(f"exit code and attempts are {came}, not {wanted_end}")
    wrong += half_checkpoints(one.run_dir, done=done)
    metrics = one.run_dir / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if done and steps != list(range(1, one.steps + 1)):
        wrong.append(f"metrics tell steps {steps}")
    plan = one.run_dir / "plan.json"
    nodes = [node["name"] for node in json.loads(plan.read_text())["nodes"]] if plan.exists() else []
    moved = answer.node not in nodes and one.spare in nodes
    if moved != (answer.then == "elsewhere"):
        wrong.append(f"it ended on {', '.join(nodes)}")
    return wrong
