"""Launches with a random fault at a random moment, after which nothing may be left: python -m bench.chaos.

A case is decided by the seed and its number alone, so `--seed S --only N` repeats it (but for the machine's timing). After each
there is, on every node, no process, no listening port, no held lock or lease, and no half checkpoint that a resume would not
remove; and on this machine no command of ours. What a case that fails has written is kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.processes import end_on_sigterm
from bench.record import BenchError, Record, arguments_parser, package_versions, positive, spread, table
from tests import cli
from tests.lab import Lab, LabError, faults
from tests.lab.faults import Answer, Do, Fault, Scene
from tests.lab.trial import LOOK_S, Trial, half_checkpoints, launchers_of, left_behind

NODES = 3
"""Two for the run, and a spare."""
SPARE = "node03"
TOY_ENDS_S, REAL_ENDS_S = 150.0, 300.0
"""So long a case may take, waits between attempts included."""
CLEAN_S = 40.0
"""est.: an agent that is cut off ends by its lease in 5 s, one that is frozen is killed by `stop` after 20."""
NO_FAULT = Fault("chaos", "", "", Answer("again"))


def send(number: signal.Signals, *, twice: bool = False) -> Do:
    """Send the launch a signal, or two of them."""

    def strike(scene: Scene) -> None:
        assert scene.launcher is not None
        for _ in range(2 if twice else 1):
            scene.launcher.send_signal(number)
            time.sleep(0.05)

    return strike


def freeze(*roles: faults.Role) -> Do:
    """SIGSTOP processes of the member; a launch with --hang-after, or the gang's lease, must end them."""

    def strike(scene: Scene) -> None:
        frozen = scene.hit(scene.member, *roles, name="STOP")
        scene.undoing.callback(scene.signal, scene.member, frozen, "CONT")

    return strike


def freeze_launch(scene: Scene) -> None:
    """SIGSTOP the launch itself for some seconds."""
    assert scene.launcher is not None
    scene.launcher.send_signal(signal.SIGSTOP)
    scene.undoing.callback(scene.launcher.send_signal, signal.SIGCONT)


KINDS: Mapping[str, Do] = {
    "ctrl-c": send(signal.SIGINT),
    "ctrl-c twice": send(signal.SIGINT, twice=True),
    "SIGTERM to the launch": send(signal.SIGTERM),
    "SIGHUP to the launch": send(signal.SIGHUP),
    "kill -9 launch": faults.kill_supervisor,
    "kill -9 rank": faults.kill("member", "rank"),
    "kill -9 torchrun": faults.kill("member", "torchrun"),
    "kill -9 agent": faults.kill("member", "agent"),
    "kill -9 follower": faults.kill("member", "follower"),
    "kill -9 agent and torchrun": faults.kill("member", "agent", "torchrun"),
    "SIGSTOP rank": freeze("rank"),
    "SIGSTOP torchrun": freeze("torchrun"),
    "SIGSTOP agent": freeze("agent"),
    "SIGSTOP launch": freeze_launch,
    "sshd stopped": faults.stop_sshd,
    "sshd frozen": faults.freeze_sshd,
    "link cut": faults.cut("member"),
    "power off": faults.power_off,
}
MOMENTS = ("start", "train", "checkpoint", "restart", "stop", "end")
BY_HAND = ("ctrl-c", "ctrl-c twice", "SIGTERM to the launch", "SIGHUP to the launch")


@dataclass(frozen=True)
class Case:
    """One launch: what strikes when, and what follows. `undone_s`: after the fault, where there is something to undo.

    `then`: what is done about a run whose launch was killed: attach, stop, or nothing (it ends by itself).
    """

    number: int
    fault: str
    moment: str
    node: str
    delay_s: float
    undone_s: float
    ranks: int
    steps: int
    then: str
    real: bool


def case_of(seed: int, number: int, *, real: bool) -> Case:
    """Return case `number` of a seed. Kinds and moments take turns in an order that the seed shuffles, so that all come up."""
    turns = list(KINDS)
    random.Random(seed).shuffle(turns)
    dice = random.Random(f"{seed}/{number}")
    kind = turns[number % len(turns)]
    moment = MOMENTS[(number + number // len(turns)) % len(MOMENTS)]
    if moment == "stop" and kind in BY_HAND:
        moment = "train"  # a second signal while stopping is "ctrl-c twice"
    return Case(
        number,
        kind,
        moment,
        dice.choice(("node01", "node02")),
        dice.uniform(0.0, {"start": 4.0, "train": 0.3, "checkpoint": 0.2, "restart": 4.0, "stop": 0.6, "end": 0.5}[moment]),
        dice.choice((dice.uniform(0.2, 3.0), dice.uniform(5.0, 12.0))),
        dice.choice((1, 1, 2)),
        dice.randint(12, 30),
        dice.choice(("attach", "stop", "nothing")),
        real,
    )


# ------------------------------------------------------------------------------------------ one case


class Over(Exception):
    """The launch has ended before the fault could strike."""


def until(one: Trial, condition: Any, timeout_s: float) -> None:
    """Return once the condition holds. Raises Over when the launch has ended, TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert one.scene.launcher is not None
        if one.scene.launcher.poll() is not None:
            raise Over
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(LOOK_S)


def wait_for_moment(one: Trial, case: Case) -> None:
    """Return when it is time to strike; raises Over when that never comes."""
    launcher, patience_s = one.scene.launcher, 120.0 if case.real else 40.0
    assert launcher is not None
    if case.moment in ("train", "restart", "stop"):
        until(one, lambda: one.found.step >= 2 + case.number % 8, patience_s)
    if case.moment == "restart":
        one.strike(faults.kill("member", "rank"))
    elif case.moment == "stop":
        launcher.send_signal(signal.SIGINT)
    elif case.moment == "checkpoint":
        until(one, lambda: one.run_dir is not None and any(one.run_dir.glob("checkpoints/*.partial")), patience_s)
    elif case.moment == "end":
        until(one, lambda: one.found.step >= case.steps - 1, patience_s)
    time.sleep(case.delay_s)


def play(lab: Lab, case: Case, folder: Path) -> tuple[dict[str, Any], str]:
    """Run one case; return what came of it, and what is wrong ("" = nothing)."""
    (folder / "state").mkdir(parents=True)
    options: tuple[str, ...] = ("--hang-after", "3", "--nproc-per-node", str(case.ranks))
    options += () if case.real else ("--env", "TOY_STEP_S=0.05", "--env", "TOY_SAVE_S=0.4")
    one = Trial(lab, NO_FAULT, folder / "state", toy=not case.real, steps=case.steps, options=options, spare=SPARE)
    one.scene.member = case.node
    began = time.monotonic()
    struck, problem = "no", ""
    undo: threading.Timer | None = None
    try:
        one.launch()
        try:
            wait_for_moment(one, case)
            one.strike(KINDS[case.fault])
            struck = "yes"
        except (Over, LabError):
            pass  # there was nothing to hit: it had ended, or not begun
        undo = threading.Timer(case.undone_s, one.mend)
        undo.start()
        ends_s = REAL_ENDS_S if case.real else TOY_ENDS_S
        found = one.wait(ends_s)
        if found.exit_code == -signal.SIGKILL and one.scene.run_id:
            follow_up(one, case, ends_s)
        undo.join()
        undo = None
        problem = complaint(one, case)
    except (AssertionError, TimeoutError) as error:
        problem = f"{type(error).__name__}: {error}"
    except (LabError, OSError) as error:  # the lab itself
        problem = f"the lab: {type(error).__name__}: {error}"
    finally:
        if undo is not None:
            undo.cancel()
        left_now = bool(problem)
        with contextlib.suppress(Exception):
            one.close()
        (folder / "said.txt").write_text("\n".join([*one.output, "---", *one.errors]))
        if left_now and one.run_dir is not None and one.run_dir.is_dir():
            shutil.copytree(one.run_dir, folder / "run", ignore=shutil.ignore_patterns("*.bin", "*.pt"), dirs_exist_ok=True)
    told = {"struck": struck, "exit_code": one.found.exit_code, "attempts": one.attempt(), "took_s": time.monotonic() - began}
    return told, problem


def follow_up(one: Trial, case: Case, timeout_s: float) -> None:
    """Do what the case says about a run that nobody supervises any more."""
    cluster = ("--cluster", str(one.scene.cluster))
    if case.then == "attach":
        one.start("attach", one.scene.run_id)
        one.wait(timeout_s)
    elif case.then == "stop":
        deadline = time.monotonic() + CLEAN_S
        while True:  # a node may be cut off for some seconds
            code, output, errors = cli.run("stop", one.scene.run_id, *cluster, state=one.state)
            if code in (0, 2):  # 2: it was killed before there was a run
                return
            assert time.monotonic() < deadline, f"stop: exit code {code}: {output}{errors}"
            time.sleep(1)


def complaint(one: Trial, case: Case) -> str:
    """Return what is wrong after a case, "" when nothing is."""
    patience_s = CLEAN_S + (60 if case.then == "nothing" and one.found.exit_code == -signal.SIGKILL else 0)
    wrong = left_behind(one.lab, patience_s)
    code = one.found.exit_code
    ended = code == 2 and any("has ended" in line for line in one.errors)  # so `attach` of a run that was ended meanwhile
    if not ended and code not in (0, 1, 3, 130, 143, 129, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP):
        wrong.append(f"exit code {code}")
    wrong += [line for line in (*one.output, *one.errors) if "Traceback" in line or line.startswith("bug:")]
    if one.run_dir is not None:
        wrong += half_checkpoints(one.run_dir, done=code == 0)
        if code == 0:
            lines = (one.run_dir / "metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line)["step"] for line in lines]
            if steps != list(range(1, case.steps + 1)):
                wrong.append(f"done, but its metrics tell steps {steps}")
    wrong += [f"`r4090c jobs` says that it is {state}" for state in states(one) if state not in ("done", "failed", "stopped")]
    wrong += [f"still there: process {pid} about {one.scene.cluster.name}" for pid in launchers_of(one.scene.cluster)]
    return "; ".join(wrong)


def states(one: Trial) -> list[str]:
    """Return how `r4090c jobs` says that the run stands; nothing of one that never came to be."""
    told = cli.run_json("jobs", "--cluster", str(one.scene.cluster), state=one.state)
    return [str(job["state"]) for job in told if job["id"] == one.scene.run_id]


# ------------------------------------------------------------------------------------------ all cases


def main() -> int:
    """Entry point."""
    parser = arguments_parser(__doc__ or "", rounds=1)
    parser.add_argument("--launches", type=positive, default=100, metavar="N", help="cases (default: 100)")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="begin no case after so long (default: 30)")
    parser.add_argument("--seed", type=int, default=None, metavar="S", help="repeat another time's cases (default: by the clock)")
    parser.add_argument("--only", default="", metavar="N,…", help="only the cases with these numbers")
    parser.add_argument("--real", type=int, default=3, metavar="N", help="so many cases train for real (default: 3)")
    parser.add_argument("--labs", type=positive, default=2, metavar="N", help="labs side by side (default: 2)")
    parser.add_argument(
        "--keep", type=Path, default=None, metavar="FOLDER", help="where cases that fail are kept, and what each said"
    )
    options = parser.parse_args()
    end_on_sigterm()
    try:
        return bench(options)
    except (BenchError, LabError) as error:
        print(f"bench.chaos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the labs are down", file=sys.stderr)
        return 130


def bench(options: argparse.Namespace) -> int:
    """Play the cases in as many labs as asked for, and write what came of them; 1 when one of them failed."""
    seed = int(time.time()) if options.seed is None else options.seed
    numbers = [int(word) for word in options.only.split(",")] if options.only else list(range(options.launches))
    every = max(1, options.launches // options.real) if options.real else 0
    cases = [case_of(seed, number, real=bool(every) and number % every == every - 1) for number in numbers]
    keep = options.keep or Path(tempfile.mkdtemp(prefix="r4090c-chaos-"))
    print(f"seed {seed}, {len(cases)} cases; what fails is kept in {keep}", file=sys.stderr, flush=True)
    record = Record(options.out, "chaos", versions=package_versions("r4090c", "torch", "deepspeed"), seed=seed, labs=options.labs)
    waiting: queue.Queue[Case] = queue.Queue()
    for case in cases:
        waiting.put(case)
    ends, lock = time.monotonic() + 60 * options.minutes, threading.Lock()
    failed: list[int] = []

    def work(lab: Lab, folder: Path) -> None:
        while time.monotonic() < ends:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                return
            own = folder / str(case.number)
            told, problem = play(lab, case, own)
            with lock:
                record.add({"contender": case.fault, "round": case.number, **asdict(case), **told}, problem)
                if problem:
                    failed.append(case.number)
                    print(f"again: python -m bench.chaos --seed {seed} --only {case.number}", file=sys.stderr, flush=True)
                    shutil.copytree(own, keep / f"{seed}-{case.number}", dirs_exist_ok=True)
            if options.keep is not None:
                (keep / "said").mkdir(parents=True, exist_ok=True)
                shutil.copyfile(own / "said.txt", keep / "said" / f"{seed}-{case.number}.txt")
            shutil.rmtree(own, ignore_errors=True)
            if problem:  # whatever it left must not be the next one's
                for name in lab.nodes:
                    lab.reboot(name)
            lab.mend()

    with tempfile.TemporaryDirectory(prefix="r4090c-bench-") as name, contextlib.ExitStack() as stack:
        workers = []
        for number in range(options.labs):
            folder = Path(name) / str(number)
            lab = stack.enter_context(Lab.up(folder / "lab", NODES))
            workers.append(threading.Thread(target=work, args=(lab, folder / "cases")))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    report(record, len(cases), failed)
    return 1 if failed else 0


def report(record: Record, wanted: int, failed: list[int]) -> None:
    """Write the table of kinds."""
    rows = []
    every = [*record.runs, *record.left_out]
    for fault in KINDS:
        mine = [run for run in every if run["fault"] == fault]
        codes = collections.Counter(str(run["exit_code"]) for run in mine)
        rows.append(
            [
                fault,
                str(len(mine)),
                ", ".join(f"{count} × {code}" for code, count in sorted(codes.items())),
                spread([run["took_s"] for run in mine], 1),
                str(sum("problem" in run for run in mine)),
            ]
        )
    real = sum(run["real"] for run in every)
    body = (
        f"{len(every)} of {wanted} launches on {NODES} nodes of a lab, {real} of them real training, the others with a stand-in "
        f"for torch (tests/lab/toy.py); seed {record.about['seed']}. "
        f"{len(failed)} left something behind, or ended as none may.\n\n"
    )
    record.finish("Chaos", body + table(["fault", "launches", "exit codes", "seconds", "failed"], rows), [])


if __name__ == "__main__":
    sys.exit(main())
