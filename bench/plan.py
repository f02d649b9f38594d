"""How long `r4090c plan` takes for 16 nodes of 8 GPUs, where torch cannot be imported: python -m bench.plan.

Assumed, and refused with alternatives (the most work there is: every method, stage and batch is planned). In each run, a module
that comes first in the import path raises ImportError for torch, deepspeed, transformers and bitsandbytes, as where none of the
extra `train` is installed.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.record import (
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

GOAL_S = 1.0
SITE = "16x8x4090@100gbe-roce,ram=512gib"
EMPTY, FITS, REFUSED = "empty interpreter", "plan llama13b", "plan llama13b --set method=full"
HIDDEN = ("torch", "deepspeed", "transformers", "bitsandbytes", "peft")
"""What the command must do without."""
HIDE = f"""
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HIDDEN!r}:
            raise ImportError(name + " is hidden by bench.plan")
sys.meta_path.insert(0, Hide())
"""
"""sitecustomize.py of every contender."""


def commands() -> dict[str, tuple[list[str], int]]:
    """Return contender -> (command line, exit code). Raises BenchError where r4090c is not installed beside this Python."""
    program = Path(sys.executable).with_name("r4090c")
    if not program.exists():
        raise BenchError(f"{program} is not there; run: make setup")
    plan = [str(program), "plan", "llama13b", "--assume", SITE]
    return {
        EMPTY: ([sys.executable, "-c", "pass"], 0),
        FITS: (plan, 0),
        f"{FITS} --json": ([*plan, "--json"], 0),
        REFUSED: ([*plan, "--set", "method=full"], 1),
    }


def run(argv: list[str], code: int, hiding: str) -> tuple[float, str]:
    """Return the wall seconds of one fresh process, and what went wrong ("" = nothing)."""
    began = time.perf_counter()
    done = subprocess.run(
        argv,
        cwd="/",
        env=child_environment(PYTHONPATH=hiding),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    wall_s = time.perf_counter() - began
    if done.returncode != code:
        return wall_s, f"rc {done.returncode}, not {code}: {(done.stderr or done.stdout).strip()[-300:]}"
    if "--json" in argv and json.loads(done.stdout)["fits"] is not True:
        return wall_s, "fits is not true"
    return wall_s, ""


def hidden(hiding: str) -> str:
    """Return what is wrong with the hiding ("" = nothing): `import torch` must fail as it does where torch is absent."""
    argv = [sys.executable, "-c", "import torch"]
    done = subprocess.run(argv, env=child_environment(PYTHONPATH=hiding), capture_output=True, text=True)
    return "" if "is hidden by bench.plan" in done.stderr else "torch can still be imported"


def main() -> int:
    """Entry point."""
    options = arguments_parser(__doc__ or "", rounds=10).parse_args()
    with tempfile.TemporaryDirectory() as hiding:
        Path(hiding, "sitecustomize.py").write_text(HIDE, encoding="utf-8")
        try:
            contenders = commands()
            if problem := hidden(hiding):
                raise BenchError(problem)
        except BenchError as error:
            print(f"bench.plan: {error}", file=sys.stderr)
            return 2
        record = Record(options.out, "plan", versions=package_versions("r4090c", "click"), rounds=options.rounds, site=SITE)
        for argv, code in contenders.values():
            run(argv, code, hiding)  # writes the .pyc files and warms the page cache
        for number in range(options.rounds):
            order = list(contenders)
            random.Random(number).shuffle(order)
            for contender in order:
                wall_s, problem = run(*contenders[contender], hiding)
                record.add({"contender": contender, "round": number, "wall_s": round(wall_s, 4)}, problem)
    walls = {name: [one["wall_s"] for one in record.runs if one["contender"] == name] for name in contenders}
    rows = [[name, spread(walls[name], 3), spread(ratios(record.runs, "wall_s", name, EMPTY))] for name in contenders]
    body = f"`--assume {SITE}`, {', '.join(HIDDEN)} not to be imported.\n\n"
    body += table(["fresh process", "wall s", f"/ {EMPTY}"], rows)
    goals = [
        Goal(f"`{name}`, wall s", GOAL_S, statistics.median(walls[name]) if walls[name] else None)
        for name in contenders
        if name != EMPTY
    ]
    record.finish("Plan", body, goals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
