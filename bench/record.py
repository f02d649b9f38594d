"""What a benchmark keeps: JSON lines as they come, and at the end a Markdown table of medians and ratios."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "bench" / "results"
TOLD_CHARACTERS = 200
"""Of what was wrong with a run, in the Markdown; the JSON line has all of it."""


class BenchError(RuntimeError):
    """The benchmark cannot be run here; the message says what is missing and what to do."""


def arguments_parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds", type=positive, default=rounds, metavar="N", help=f"runs of every contender (default: {rounds})"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the .jsonl and .md go (default: bench/results)"
    )
    return parser


def positive(text: str) -> int:
    """Return a whole number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def child_environment(**variables: str) -> dict[str, str]:
    """Return our environment for a contender: .pyc files are written and used, nothing of ours shadows what is installed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
    return {**environment, **variables}


def machine() -> dict[str, Any]:
    """Return what the figures depend on: cores, memory, CPU, kernel, Python, commit."""
    memory_kib = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    models = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "cpu": models[0] if models else platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
        "load_1min": os.getloadavg()[0],
    }


def package_versions(*names: str) -> dict[str, str]:
    """Return the version of each package installed beside this Python; "absent" where there is none."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def said_version(*argv: str) -> str:
    """Return the first line a program prints about its version, "absent" where it does not run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError:
        return "absent"
    return ((done.stdout + done.stderr).strip().splitlines() or ["absent"])[0]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return "median [min-max]", "–" for no values."""
    if not values:
        return "–"
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


@dataclass(frozen=True)
class Goal:
    """A goal and what was measured against it: `measured` must be at most `limit`."""

    text: str
    limit: float
    measured: float | None

    def cells(self) -> list[str]:
        """Return the row of the table of goals."""
        if self.measured is None:
            return [self.text, f"<= {self.limit:g}", "–", "not measured"]
        return [self.text, f"<= {self.limit:g}", f"{self.measured:.2f}", "met" if self.measured <= self.limit else "MISSED"]


def ratios(runs: Iterable[dict[str, Any]], key: str, contender: str, base: str) -> list[float]:
    """Return contender/base of `key` for every round in which both have a counted run.

    Pairs of one round, since the speed of a shared machine drifts by 10 to 40 % over minutes.
    """
    by_round: dict[int, dict[str, float]] = {}
    for run in runs:
        by_round.setdefault(run["round"], {})[run["contender"]] = run[key]
    return [pair[contender] / pair[base] for pair in by_round.values() if contender in pair and base in pair]


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


class Record:
    """`<name>.jsonl` (the machine first, then every run as it ends) and `<name>.md` in one folder."""

    def __init__(self, folder: Path, name: str, **about: Any) -> None:
        """Start both files anew; `about` goes beside the machine's description: versions, options."""
        folder.mkdir(parents=True, exist_ok=True)
        self.lines, self.markdown = folder / f"{name}.jsonl", folder / f"{name}.md"
        self.about = {**machine(), **about}
        self.runs: list[dict[str, Any]] = []
        """The counted runs."""
        self.left_out: list[dict[str, Any]] = []
        self.lines.write_text(json.dumps({"kind": "about", **self.about}) + "\n")

    def add(self, run: dict[str, Any], problem: str = "") -> None:
        """Keep one run and tell of it on stderr. With a `problem` it is not counted."""
        (self.left_out if problem else self.runs).append({**run, "problem": problem} if problem else run)
        with self.lines.open("a") as file:
            file.write(
                json.dumps({"kind": "left out" if problem else "run", **run, **({"problem": problem} if problem else {})}) + "\n"
            )
        told = "  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in run.items())
        print(told + (f"  LEFT OUT: {problem}" if problem else ""), file=sys.stderr, flush=True)

    def finish(self, title: str, body: str, goals: Sequence[Goal]) -> None:
        """Write the Markdown and print it on stdout."""
        about = self.about
        where = (
            f"{about['date']}, {about['cores']} cores ({about['cpu']}), {about['memory_gib']} GiB, Linux {about['kernel']}, "
            f"Python {about['python']}, commit {about['commit']}, load {about['load_1min']:.2f} at the start"
        )
        parts = [
            f"# {title}\n",
            where + "  ",
            f"Versions: {', '.join(f'{name} {is_}' for name, is_ in about['versions'].items())}\n",
            body,
        ]
        if goals:
            parts.append(table(["goal", "limit", "measured", ""], [goal.cells() for goal in goals]))
        for run in self.left_out:
            parts.append(f"Left out: {run['contender']}, round {run['round']}: {run['problem'][:TOLD_CHARACTERS]}\n")
        text = "\n".join(parts)
        self.markdown.write_text(text)
        print(text)
