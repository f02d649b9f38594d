"""Tokens per second of train/main.py against the same training by torch DDP, accelerate and HF Trainer: python -m bench.train."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench import peertools
from bench.processes import end_on_sigterm
from bench.record import (
    REPOSITORY,
    BenchError,
    Goal,
    Record,
    arguments_parser,
    child_environment,
    package_versions,
    positive,
    ratios,
    spread,
    table,
)
from launch.recipe import load_recipe

OURS, DDP, ACCELERATE, TRAINER, BY_HAND = (
    "r4090c (ZeRO-2)",
    "torch DDP",
    "accelerate + DeepSpeed",
    "HF Trainer + DeepSpeed",
    "DeepSpeed",
)
DEFAULT = ", default AdamW"
"""What follows a name where the optimizer is torch's AdamW as it is by default, not the fused one."""
RANKS = 2
SETS = (
    "steps=1000000",  # until it is ended
    "resume=false",
    "checkpoint.every_steps=1000000",
    "schedule.warmup_steps=0",
    "schedule.min_lr_ratio=1.0",
    "optimizer.lr=0.0005",
    "data.sequence_length=256",
    "micro_batch=32",
    "model.config.max_position_embeddings=256",
    "model.config.hidden_size=128",
    "model.config.intermediate_size=384",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "model.config.num_hidden_layers=2",
)
"""Recipe `tiny` at a constant learning rate, in the proportions of the recipes for 4090s: 8,192 tokens a micro-batch, as
llama7b has, and two of them a step. What ZeRO-2 does beyond DDP (it reduces gradients after every micro-batch) grows with
the parameters, the matrix products with parameters × tokens. The model is small so that a step takes a second.
"""
FIRST_STEPS = 3
"""Steps of a start: the slow ones."""
NOT_TIMED = 2
"""Steps of a turn before the clock runs: the one that was interrupted, and one that fills the caches."""
START_S, STEP_S = 300.0, 120.0
"""est.: a start takes 10 s, a step 1 s; on a machine that others use many times as long."""
COMPARED_STEPS, SAME_LOSS = 30, 1e-4
"""Losses must be ours for so many steps, as far as a contender got: rounding differs between DDP and ZeRO."""
NO_SLOWER, OWN_PERCENT = 1.03, 2.0
"""The goals: the best peer's tokens/s over ours, and the share of a step that is the loop's own."""
OWN_STEPS = 8
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DS_ACCELERATOR": "cpu",
    "R4090C_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "R4090C_COLLECTIVE_TIMEOUT_S": "3600",  # the others' turns count
}
"""What all ranks get."""

STEP = re.compile(r"^step (\d+)/\d+ loss ([\d.]+)|^STEP (\d+) loss ([\d.]+)")
OUR_ENGINE = re.compile(r"^ranks +(\d+) x .*, (\w+), ZeRO stage (\d)")
ENGINE = re.compile(r"^ENGINE (\w+) zero (\d) world (\d+) backend (\w+)(?: optimizer (\w+) fused (\w+))?")
OWN = re.compile(r"^OWN ([\d.]+) ([\d.]+)")


@dataclass(frozen=True)
class Ran:
    """What a contender really ran on. `optimizer` "": it did not say, and its program has one only (AdamW, fused)."""

    engine: str
    zero_stage: int
    world_size: int
    backend: str
    optimizer: str = ""

    def __str__(self) -> str:
        told = f"{self.engine}, ZeRO {self.zero_stage}, {self.world_size} ranks, {self.backend}"
        return f"{told}, {self.optimizer}" if self.optimizer else told


FUSED, NOT_FUSED = "AdamW fused True", "AdamW fused False"
ZERO2 = Ran("DeepSpeedEngine", 2, RANKS, "gloo")
PLAIN_DDP = Ran("DistributedDataParallel", 0, RANKS, "gloo", FUSED)


@dataclass(frozen=True)
class Contender:
    """A program (arguments follow it) and what it must run on. `peer`: it counts for the goal."""

    name: str
    argv: tuple[str, ...]
    wanted: Ran
    peer: bool = True


def read_engine(line: str) -> Ran | None:
    """Return what a line of output says a contender runs on, None for any other line."""
    if match := OUR_ENGINE.match(line):  # train/loop.py ends a run whose engine is not a DeepSpeedEngine
        return Ran("DeepSpeedEngine", int(match[3]), int(match[1]), match[2])
    if match := ENGINE.match(line):
        return Ran(match[1], int(match[2]), int(match[3]), match[4], f"{match[5]} fused {match[6]}" if match[5] else "")
    return None


def read_step(line: str) -> tuple[int, float] | None:
    """Return step and loss that a line of output tells, None for any other line."""
    match = STEP.match(line)
    return None if match is None else (int(match[1] or match[3]), float(match[2] or match[4]))


def largest_difference(losses: Mapping[int, float], ours: Mapping[int, float]) -> tuple[int, float]:
    """Return how many steps of the first COMPARED_STEPS both have, and by how much their losses differ at most."""
    common = [step for step in range(1, COMPARED_STEPS + 1) if step in losses and step in ours]
    return len(common), max((abs(losses[step] - ours[step]) for step in common), default=0.0)


# --------------------------------------------------------------------------- ranks


def end_with_parent() -> None:
    """Have the kernel kill this process when the benchmark is gone: it may be stopped, and would stay so for ever."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclass
class Ranks:
    """The ranks of a contender, started as torchrun would; they are stopped (SIGSTOP) while it is not their turn."""

    contender: Contender
    folder: Path
    ran: Ran | None = None
    losses: dict[int, float] = field(default_factory=dict)
    rest: bytes = b""
    lines: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start all, let them train FIRST_STEPS, stop them. Raises BenchError when that fails, or they run on something else."""
        self.folder.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for rank in range(RANKS):
            environment = child_environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(RANKS),
                LOCAL_WORLD_SIZE=str(RANKS),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                TMPDIR=str(self.folder),
                **VARIABLES,
            )
            with (self.folder / f"{rank}.err").open("wb") as errors:
                self.processes.append(
                    subprocess.Popen(
                        self.contender.argv,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                        stderr=errors,
                        cwd=REPOSITORY,
                        env=environment,
                        start_new_session=True,
                        preexec_fn=end_with_parent,
                    )
                )
        deadline = time.perf_counter() + START_S
        while len(self.losses) < FIRST_STEPS:
            self.read(deadline)
        self.signal(signal.SIGSTOP)
        if self.ran != self.contender.wanted:
            raise BenchError(f"it runs on {self.ran}, not on {self.contender.wanted}")

    def turn(self, steps: int) -> tuple[float, float]:
        """Let them train; return the seconds of `steps` steps, from one's end to another's, and their CPU seconds."""
        while self.read(0.0):
            continue
        self.signal(signal.SIGCONT)
        ends: list[tuple[float, float]] = []
        while len(ends) < NOT_TIMED + steps:
            found = self.read(time.perf_counter() + STEP_S)
            ends += [(time.perf_counter(), self.cpu_s())] * found
        self.signal(signal.SIGSTOP)
        (began_s, cpu_before_s), (ended_s, cpu_s) = ends[NOT_TIMED - 1], ends[NOT_TIMED + steps - 1]
        return ended_s - began_s, cpu_s - cpu_before_s

    def cpu_s(self) -> float:
        """Return the CPU seconds of all ranks so far."""
        fields = [Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split() for process in self.processes]
        return sum(int(user) + int(system) for *_, user, system in (one[:13] for one in fields)) / os.sysconf("SC_CLK_TCK")

    def read(self, deadline: float) -> int:
        """Read what rank 0 says next; return how many steps it tells. `deadline` 0: what it has said already.

        Raises BenchError at the deadline, and when it has ended.
        """
        output = self.processes[0].stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.perf_counter()))
        if not ready and not deadline:
            return 0
        chunk = os.read(output.fileno(), 65_536) if ready else b""
        if not chunk:
            raise BenchError(f"{'it ended' if ready else 'it says nothing more'}: {self.told()}")
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        steps = 0
        for line in (one.decode(errors="replace") for one in lines):
            self.ran = self.ran or read_engine(line)
            if step := read_step(line):
                self.losses[step[0]] = step[1]
                steps += 1
            else:
                self.lines.append(line)
        return steps

    def told(self) -> str:
        """Return the end of what the ranks said on stderr."""
        told = [
            line for rank in range(RANKS) for line in (self.folder / f"{rank}.err").read_text(errors="replace").splitlines()[-4:]
        ]
        return " / ".join(line.strip() for line in told if line.strip())[-600:]

    def signal(self, number: signal.Signals) -> None:
        """Send all ranks a signal. They are children that nobody has waited for, so their numbers are theirs."""
        for process in self.processes:
            process.send_signal(number)

    def close(self) -> None:
        """End all."""
        for process in self.processes:
            process.kill()  # also when stopped
            process.wait()
            if process.stdout:
                process.stdout.close()


# --------------------------------------------------------------------------- contenders


def our_argv(work: Path, *start: str) -> tuple[str, ...]:
    """Return the command line of our training, begun by `start`."""
    return (*start, "--recipe", str(work / "recipe.json"), "--run-dir", str(work / "run"), "--data-dir", str(work / "data"))


def contenders(work: Path, cache: Path, only: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders, ours first, and why others are not among them."""
    ours = Contender(OURS, our_argv(work, sys.executable, str(REPOSITORY / "train" / "main.py")), ZERO2, peer=False)
    names = (DDP, ACCELERATE, TRAINER, BY_HAND, DDP + DEFAULT)
    wanted = [name for name in names if not only or any(word in name for word in only)]
    chosen, absent = [ours], dict[str, str]()
    programs = {DDP: "train_ddp.py", ACCELERATE: "train_accelerate.py", TRAINER: "train_trainer.py", BY_HAND: "plain_zero2.py"}
    for name in wanted:
        kind = name.removesuffix(DEFAULT)
        try:
            python = python_with_accelerate(cache) if kind in (ACCELERATE, TRAINER) else sys.executable
        except BenchError as error:
            absent[name] = f"not installed: {error}"
            continue
        argv = [python, str(REPOSITORY / "bench" / "peers" / programs[kind]), "--recipe", str(work / "recipe.json")]
        argv += ["--tokens", str(work / "tokens.bin"), *(["--default-optimizer"] if name != kind else [])]
        optimizer = "" if kind == BY_HAND else FUSED if name == kind else NOT_FUSED
        base = PLAIN_DDP if kind == DDP else ZERO2
        engine = Ran(base.engine, base.zero_stage, base.world_size, base.backend, optimizer)
        chosen.append(Contender(name, tuple(argv), engine, peer=kind != BY_HAND))
    return chosen, absent


def python_with_accelerate(cache: Path) -> str:
    """Return this Python where it has the accelerate that is measured, else one of its own. Raises BenchError without any."""
    try:
        if version("accelerate") == peertools.ACCELERATE.partition("==")[2]:
            return sys.executable
    except PackageNotFoundError:
        pass
    return str(peertools.accelerate(cache))


# --------------------------------------------------------------------------- the measurement


def measure(record: Record, chosen: Sequence[Contender], starts: int, rounds: int, steps: int, work: Path) -> dict[str, Ranks]:
    """Start all contenders `starts` times, each time for `rounds` turns; return the ranks of the first start, ended.

    Where a process's memory lies makes it some percent faster or slower for as long as it lives (two starts of one program differ
    by up to 3 %, measured 2026-11-30), so many starts are compared: with one to four of them the best peer came out anywhere
    between 1.02 and 1.04 of ours. A contender that fails is left out of the rest of a start.
    """
    first: dict[str, Ranks] = {}
    for start in range(starts):
        started = one_start(record, chosen, range(start * rounds, (start + 1) * rounds), steps, work / f"start-{start}", work)
        first = first or started
    return first


def one_start(
    record: Record, chosen: Sequence[Contender], turns: Sequence[int], steps: int, folder: Path, work: Path
) -> dict[str, Ranks]:
    """Start the contenders, add a turn of each for every number of `turns`, and end them; return their ranks."""
    tokens = steps * int(record.about["tokens_per_step"])
    started: dict[str, Ranks] = {}
    folder.mkdir()
    shutil.rmtree(work / "run", ignore_errors=True)
    try:
        for contender in chosen:
            ranks = started[contender.name] = Ranks(contender, folder / f"ranks-{len(started)}")
            try:
                ranks.start()
            except BenchError as error:
                if contender.name == OURS:
                    raise
                record.add({"contender": contender.name, "round": turns[0]}, str(error))
                started.pop(contender.name).close()
            if contender.name == OURS:
                (made,) = (work / "data").glob("*/tokens.bin")
                shutil.copyfile(made, work / "tokens.bin")
        for number in turns:
            for name in random.Random(number).sample(list(started), len(started)):
                try:
                    took_s, cpu_s = started[name].turn(steps)
                except BenchError as error:
                    if name == OURS:
                        raise
                    record.add({"contender": name, "round": number}, str(error))
                    started.pop(name).close()
                    continue
                figures = {"tokens_s": round(tokens / took_s, 1), "cpu_s_step": round(cpu_s / steps, 3)}
                record.add({"contender": name, "round": number, **figures, "load_1min": round(os.getloadavg()[0], 1)})
    finally:
        for ranks in started.values():
            ranks.close()
    return started


def leave_out_others_losses(record: Record, started: Mapping[str, Ranks]) -> None:
    """Take out the runs of contenders that did not train what we trained."""
    for name, ranks in started.items():
        _, difference = largest_difference(ranks.losses, started[OURS].losses)
        if difference > SAME_LOSS:
            record.runs[:] = [run for run in record.runs if run["contender"] != name]
            record.add({"contender": name, "round": 0}, f"its losses differ from ours by up to {difference:.6f}")


def own_percent(work: Path) -> list[float]:
    """Return which share of each step of ours is the loop's own, in percent, by bench/own_time.py. Raises BenchError."""
    argv = our_argv(work, sys.executable, "-m", "bench.own_time")
    ranks = Ranks(Contender("own share", argv, ZERO2), work / "ranks-own")
    shutil.rmtree(work / "run")
    try:
        ranks.start()
        ranks.turn(OWN_STEPS)
    finally:
        ranks.close()
    told = [match for match in map(OWN.match, ranks.lines) if match]
    return [100 * (1 - float(match[2]) / float(match[1])) for match in told[-OWN_STEPS:]]


def report(
    record: Record, chosen: Sequence[Contender], started: Mapping[str, Ranks], own: Sequence[float]
) -> tuple[str, list[Goal]]:
    """Return the Markdown and the goals."""
    rows, best = [], list[tuple[float, str]]()
    turns = [run for run in record.runs if "tokens_s" in run]
    for contender in chosen:
        name = contender.name
        mine, cpu_s = ([run[key] for run in turns if run["contender"] == name] for key in ("tokens_s", "cpu_s_step"))
        compared = ratios(turns, "tokens_s", name, OURS)
        if contender.peer and compared:
            best.append((statistics.median(compared), name))
        same = "–"
        if name in started:
            many, difference = largest_difference(started[name].losses, started[OURS].losses)
            same = f"{difference:.6f} in {many}"
        ran = str(started[name].ran) if name in started else "–"
        rows.append([name, ran, str(len(mine)), spread(mine, 0), spread(compared, 3), spread(cpu_s), same])
    about = record.about
    loads = [run["load_1min"] for run in turns]
    body = (
        f"Recipe `tiny` with `{' '.join(about['set'])}`: {about['tokens_per_step']:,} tokens a step, {RANKS} ranks of a thread "
        f"on the CPU (gloo), {about['steps']} steps a turn, {about['starts']} starts of all. "
        f"All have the fused AdamW (HF Trainer's default), except where the default one is named. "
        f"Load during the runs: {spread(loads, 1)}; the benchmark alone makes about {RANKS}.\n\n"
    )
    heading = [
        "",
        "runs on",
        "turns",
        "tokens/s",
        f"/ {OURS}",
        "CPU s a step, both ranks",
        "largest difference of losses, steps compared",
    ]
    body += table(heading, rows)
    body += f"\nThe loop's own share of a step, %: {spread(own)}, by `bench/own_time.py`.\n"
    for name, why in about["absent"].items():
        body += f"\nNot measured: {name}, {why}\n"
    fastest, name = max(best, default=(None, "the best of DDP, accelerate and HF Trainer"))
    goals = [
        Goal(f"tokens/s, {name} / {OURS}", NO_SLOWER, fastest),
        Goal("the loop's own share of a step, %", OWN_PERCENT, statistics.median(own) if own else None),
    ]
    return body, goals


def main() -> int:
    """Entry point."""
    parser = arguments_parser(__doc__ or "", rounds=3)
    parser.add_argument("--starts", type=positive, default=8, metavar="N", help="starts of all (default: 8)")
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="timed optimizer steps of a turn (default: 3)")
    parser.add_argument("--only", default="", metavar="WORD,…", help="only peers whose name contains a word (ours always)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe further, for trials")
    parser.add_argument(
        "--cache",
        type=Path,
        default=peertools.default_cache(),
        metavar="FOLDER",
        help="where accelerate is installed if it is not",
    )
    options = parser.parse_args()
    end_on_sigterm()
    try:
        bench(options)
    except BenchError as error:
        print(f"bench.train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; all ranks are ended", file=sys.stderr)
        return 130
    return 0


def bench(options: argparse.Namespace) -> None:
    """Start all contenders one after the other, give them turns, and write the results."""
    with tempfile.TemporaryDirectory(prefix="r4090c-bench-train-") as folder:
        work = Path(folder)
        recipe: dict[str, Any] = load_recipe("tiny", (*SETS, *options.set))
        (work / "recipe.json").write_text(json.dumps(recipe))
        chosen, absent = contenders(work, options.cache, [word for word in options.only.split(",") if word])
        tokens = recipe["micro_batch"] * recipe["gradient_accumulation"] * RANKS * recipe["data"]["sequence_length"]
        versions = package_versions("r4090c", "torch", "deepspeed", "transformers")
        versions["accelerate"] = peertools.ACCELERATE.partition("==")[2]
        about = {"steps": options.steps, "starts": options.starts, "tokens_per_step": tokens}
        about |= {"set": [*SETS, *options.set], "absent": absent}
        record = Record(options.out, "train", versions=versions, rounds=options.rounds, **about)
        started = measure(record, chosen, options.starts, options.rounds, options.steps, work)
        leave_out_others_losses(record, started)
        own = own_percent(work)
        record.add({"contender": "own share", "round": 0, "percent": round(statistics.median(own), 3)})
        record.finish("Training", *report(record, chosen, started, own))


if __name__ == "__main__":
    sys.exit(main())
