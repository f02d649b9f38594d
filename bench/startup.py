"""Start-up of the command line, against an empty interpreter and against `import torch`: python -m bench.startup."""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

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

GOAL_S = 0.4
EMPTY, CLI, TORCH = "empty interpreter", "import r4090c.cli", "import torch"
SHOWN_MODULES = 12


def commands() -> dict[str, list[str]]:
    """Return contender -> command line. Raises BenchError where r4090c is not installed beside this Python."""
    program = Path(sys.executable).with_name("r4090c")
    if not program.exists():
        raise BenchError(f"{program} is not there; run: make setup")
    python = sys.executable
    return {
        EMPTY: [python, "-c", "pass"],
        CLI: [python, "-c", "import r4090c.cli"],
        "r4090c --help": [str(program), "--help"],
        "r4090c nodes": [str(program), "nodes", "--cluster", str(REPOSITORY / "cluster.yaml")],
        TORCH: [python, "-c", "import torch"],
    }


def run(argv: list[str]) -> tuple[float, str]:
    """Return the wall seconds of one fresh process, and what went wrong ("" = nothing)."""
    began = time.perf_counter()
    done = subprocess.run(argv, cwd=REPOSITORY, env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wall_s = time.perf_counter() - began
    return wall_s, "" if done.returncode == 0 else f"rc {done.returncode}: {done.stderr.strip()[-300:]}"


def import_times(module: str) -> list[tuple[str, float, float]]:
    """Return (module, own ms, cumulative ms) for every import that `import module` costs, by `python -X importtime`.

    What an empty interpreter imports as well is left out.
    """

    def measured(code: str) -> dict[str, tuple[float, float]]:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code],
            cwd=REPOSITORY,
            env=child_environment(),
            capture_output=True,
            text=True,
        )
        lines = re.findall(r"^import time:\s+(\d+) \|\s+(\d+) \| +(\S+)$", done.stderr, re.MULTILINE)
        return {name: (int(own) / 1000, int(cumulative) / 1000) for own, cumulative, name in lines}

    everyones = measured("pass")
    return [(name, own, total) for name, (own, total) in measured(f"import {module}").items() if name not in everyones]


def main() -> int:
    """Entry point."""
    options = arguments_parser(__doc__ or "", rounds=10).parse_args()
    try:
        contenders = commands()
    except BenchError as error:
        print(f"bench.startup: {error}", file=sys.stderr)
        return 2
    record = Record(options.out, "startup", versions=package_versions("r4090c", "click", "torch"), rounds=options.rounds)
    for argv in contenders.values():
        run(argv)  # writes the .pyc files and warms the page cache
    for number in range(options.rounds):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for contender in order:
            wall_s, problem = run(contenders[contender])
            record.add({"contender": contender, "round": number, "wall_s": round(wall_s, 4)}, problem)
    walls = {name: [one["wall_s"] for one in record.runs if one["contender"] == name] for name in contenders}
    rows = [
        [
            name,
            spread(walls[name], 3),
            spread(ratios(record.runs, "wall_s", name, EMPTY)),
            spread(ratios(record.runs, "wall_s", name, TORCH)),
        ]
        for name in contenders
    ]
    body = table(["fresh process", "wall s", f"/ {EMPTY}", f"/ {TORCH}"], rows)
    largest = sorted(import_times("r4090c.cli"), key=lambda entry: -entry[1])
    body += (
        f"\n`import r4090c.cli`: {len(largest)} modules beyond an empty interpreter, {sum(own for _, own, _ in largest):.0f} ms. "
    )
    body += "The largest:\n\n"
    body += table(
        ["module", "own ms", "with what it imports"],
        [[f"`{name}`", f"{own:.1f}", f"{total:.1f}"] for name, own, total in largest[:SHOWN_MODULES]],
    )
    median = statistics.median(walls[CLI]) if walls[CLI] else None
    record.finish("Start-up", body, [Goal(f"`{CLI}`, wall s", GOAL_S, median)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
