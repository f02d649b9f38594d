"""Step times of two ranks bound as planned, not bound, sharing cores, and bound to one core: python -m bench.affinity."""

from __future__ import annotations

import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from launch.affinity import cpu_sets
from netcheck.facts.cpus import parse_cpu_list
from r4090c.model import CpuFact

RANKS = 2
WARM_UP_STEPS, STEPS = 5, 60
"""Steps of each part; some 25 ms each, so that a part is longer than what the scheduler does now and then."""
MATRIX, PRODUCTS, BUFFER_MIB = 512, 4, 48
"""A step multiplies matrices that fit the cache, then adds two buffers that do not fit any (the CPU's L3 here has 32 MiB)."""
BUSY_S, IDLE_S = 0.03, 0.07
"""The third process: busy for 30 of every 100 ms, as a monitoring agent or somebody's shell is."""
TIMEOUT_S = 60.0
PLANNED, UNBOUND, SHARING, ONE_CORE = "bound as planned", "not bound", "not bound, OMP_NUM_THREADS not set", "both on one core"
QUIET, DISTURBED = "quiet", "disturbed"
NO_SLOWER = 1.05
"""The goal against unbound ranks, of the median step."""


@dataclass(frozen=True)
class Contender:
    """How two ranks are placed: their CPUs (none = not bound) and their own variables."""

    name: str
    cpus: tuple[tuple[int, ...], ...]
    env: Mapping[str, str] = field(default_factory=dict)


def this_machine() -> CpuFact:
    """Return what the planner needs to know of the CPUs here."""
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    siblings = {
        parse_cpu_list(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()) for cpu in allowed
    }
    return CpuFact("", allowed, allowed, allowed, tuple(sorted(siblings)), 1, (), None)


def contenders(machine: CpuFact) -> list[Contender]:
    """Return the contenders. Raises BenchError with fewer than two physical cores."""
    planned = cpu_sets(machine, [None] * RANKS)
    if len({one.cpus for one in planned}) < RANKS:
        raise BenchError("two physical cores are needed, one for each rank")
    one_thread = {"OMP_NUM_THREADS": "1"}
    core = planned[0].cpus
    return [
        Contender(PLANNED, tuple(one.cpus for one in planned), one_thread),
        Contender(UNBOUND, ((),) * RANKS, one_thread),
        Contender(SHARING, ((),) * RANKS),
        Contender(ONE_CORE, (core,) * RANKS, one_thread),
    ]


# --------------------------------------------------------------------------- a rank


def be_rank(folder: Path) -> None:
    """Be one of the two ranks: for every line on stdin, steps that each end with an all-reduce; their seconds go to a pipe."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=RANKS)
    matrix = torch.rand(MATRIX, MATRIX)
    one, other = torch.rand(BUFFER_MIB * 2**18), torch.rand(BUFFER_MIB * 2**18)
    answers = os.fdopen(int(os.environ["ANSWERS"]), "w")
    placed = {"cpus": sorted(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    print(json.dumps(placed), file=answers, flush=True)
    for _ in sys.stdin:
        dist.barrier()
        times_s = []
        for _ in range(WARM_UP_STEPS + STEPS):
            began = time.perf_counter()
            result = matrix
            for _ in range(PRODUCTS):
                result = result @ matrix / MATRIX
            one.add_(other, alpha=1e-9)
            dist.all_reduce(result[:1])
            times_s.append(time.perf_counter() - began)
        print(json.dumps(times_s[WARM_UP_STEPS:]), file=answers, flush=True)


class Ranks:
    """The two ranks of a contender. They are started by the rank wrapper of a launch (launch/rank.py), which binds them."""

    def __init__(self, contender: Contender) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[int] = []
        folder = self._folder.name
        env = {name: {"value": value} for name, value in contender.env.items()}
        ranks = [{"rank": rank, "cpus": cpus, "memory_node": None, "env": env} for rank, cpus in enumerate(contender.cpus)]
        told = {"run_dir": folder, "attempt": 1, "node": {"ranks": ranks}}
        Path(folder, "node.json").write_text(json.dumps(told))
        environment = child_environment(R4090C_LOCAL=folder, GLOO_SOCKET_IFNAME="lo")
        environment.pop("OMP_NUM_THREADS", None)
        python = sys.executable
        argv = [python, "-I", "-S", "launch/rank.py", "--", python, "-m", "bench.affinity", "--be-rank", folder]
        for rank in range(RANKS):
            here, there = os.pipe()
            own = {**environment, "RANK": str(rank), "ANSWERS": str(there)}
            self._processes.append(
                subprocess.Popen(argv, cwd=REPOSITORY, env=own, stdin=subprocess.PIPE, pass_fds=[there], bufsize=0)
            )
            os.close(there)
            self._answers.append(here)

    def answers(self) -> list[Any]:
        """Return the next line of each rank. Raises BenchError when one ends, or says nothing in TIMEOUT_S."""
        found = []
        for here in self._answers:
            line = b""
            while not line.endswith(b"\n"):
                ready, _, _ = select.select([here], [], [], TIMEOUT_S)
                more = os.read(here, 65536) if ready else b""
                if not more:
                    raise BenchError(f"a rank tells nothing: {self._log()}")
                line += more
            found.append(json.loads(line))
        return found

    def steps_s(self) -> list[float]:
        """Return the seconds of rank 0's steps; it waits for the other in each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        times_s: list[float] = self.answers()[0]
        return times_s

    def _log(self) -> str:
        path = Path(self._folder.name, "attempt_1", "0.log")
        return path.read_text()[-300:] if path.exists() else "no log"

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


@contextmanager
def third_process() -> Iterator[None]:
    """Keep a process running that is busy now and then."""
    code = (
        "import os, time\n"
        "parent = os.getppid()\n"
        "while os.getppid() == parent:\n"
        f" until = time.perf_counter() + {BUSY_S}\n"
        " while time.perf_counter() < until: pass\n"
        f" time.sleep({IDLE_S})"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def of_steps(times_s: Sequence[float]) -> dict[str, float]:
    """Return median, 95th percentile and the middle nine tenths' width of step times, in ms."""
    cuts = [1000 * cut for cut in statistics.quantiles(times_s, n=20)]
    return {
        "median": round(1000 * statistics.median(times_s), 3),
        "p95": round(cuts[18], 3),
        "width": round(cuts[18] - cuts[0], 3),
    }


def measure(record: Record, chosen: Sequence[Contender], rounds: int) -> None:
    """Add `rounds` runs of every contender, all kept waiting when it is not their turn. Raises BenchError."""
    started = {contender.name: Ranks(contender) for contender in chosen}
    try:
        for contender in chosen:
            placed = started[contender.name].answers()
            wanted = [list(cpus) or sorted(os.sched_getaffinity(0)) for cpus in contender.cpus]
            if [one["cpus"] for one in placed] != wanted:
                raise BenchError(f"{contender.name}: bound to {[one['cpus'] for one in placed]}")
            record.about.setdefault("threads", {})[contender.name] = placed[0]["threads"]
        for ranks in started.values():
            ranks.steps_s()  # the first time memory is touched
        for number in range(rounds):
            for contender in random.Random(number).sample(list(chosen), len(chosen)):
                figures: dict[str, Any] = {}
                for part in (QUIET, DISTURBED):
                    with third_process() if part == DISTURBED else nullcontext():
                        times_s = started[contender.name].steps_s()
                    figures |= {f"{name}_ms_{part}": value for name, value in of_steps(times_s).items()}
                record.add({"contender": contender.name, "round": number, "load_1min": os.getloadavg()[0], **figures})
    finally:
        for ranks in started.values():
            ranks.close()


# --------------------------------------------------------------------------- the result


def report(record: Record, names: Sequence[str]) -> tuple[str, list[Goal]]:
    """Return the Markdown tables and the goals."""
    body = (
        f"Two ranks, {STEPS} steps each part: {PRODUCTS} products of {MATRIX}×{MATRIX} matrices, a sum over two buffers of "
        f"{BUFFER_MIB} MiB, an all-reduce that waits for the slower. Disturbed: a third process, bound to nothing, is busy "
        f"{BUSY_S * 1000:.0f} of every {(BUSY_S + IDLE_S) * 1000:.0f} ms. Ratios are of runs of one round.\n\n"
    )
    loads = [one["load_1min"] for one in record.runs]
    body += f"Load during the runs: {spread(loads, 1)}; the benchmark alone makes about {RANKS}. Above that others had part.\n\n"
    for part in (QUIET, DISTURBED):
        rows = [
            [
                name,
                *(
                    spread([one[f"{figure}_ms_{part}"] for one in record.runs if one["contender"] == name], 1)
                    for figure in ("median", "p95", "width")
                ),
                *(spread(ratios(record.runs, f"{figure}_ms_{part}", name, PLANNED)) for figure in ("median", "width")),
            ]
            for name in names
        ]
        heading = [
            part,
            "median step ms",
            "95th percentile ms",
            "5th to 95th ms",
            f"median / {PLANNED}",
            f"5th to 95th / {PLANNED}",
        ]
        body += table(heading, rows) + "\n"

    def ratio(figure: str, part: str, other: str) -> float | None:
        found = ratios(record.runs, f"{figure}_ms_{part}", PLANNED, other)
        return statistics.median(found) if found else None

    goals = [
        Goal(f"{PLANNED} / {UNBOUND}: median step, quiet", NO_SLOWER, ratio("median", QUIET, UNBOUND)),
        Goal(f"{PLANNED} / {SHARING}: median step, quiet", 1.0, ratio("median", QUIET, SHARING)),
        Goal(f"{PLANNED} / {SHARING}: 5th to 95th, quiet", 1.0, ratio("width", QUIET, SHARING)),
        Goal(f"{PLANNED} / {SHARING}: 5th to 95th, disturbed", 1.0, ratio("width", DISTURBED, SHARING)),
        Goal(f"{PLANNED} / {UNBOUND}: 5th to 95th, disturbed", 1.0, ratio("width", DISTURBED, UNBOUND)),
    ]
    return body, goals


def main() -> int:
    """Entry point."""
    parser = arguments_parser(__doc__ or "", rounds=6)
    parser.add_argument("--be-rank", type=Path, metavar="FOLDER", help="be a rank of the benchmark (started by it)")
    options = parser.parse_args()
    if options.be_rank:
        be_rank(options.be_rank)
        return 0
    try:
        chosen = contenders(this_machine())
    except BenchError as error:
        print(f"bench.affinity: {error}", file=sys.stderr)
        return 2
    record = Record(options.out, "affinity", versions=package_versions("r4090c", "torch"), rounds=options.rounds)
    try:
        measure(record, chosen, options.rounds)
    except BenchError as error:
        print(f"bench.affinity: {error}", file=sys.stderr)
        return 2
    record.finish("Binding ranks to cores", *report(record, [one.name for one in chosen]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
