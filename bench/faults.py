"""The fault matrix, measured: how soon a fault is seen, the ranks have stopped, the run goes on: python -m bench.faults."""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.processes import end_on_sigterm
from bench.record import REPOSITORY, BenchError, Goal, Record, arguments_parser, package_versions, spread, table
from tests.lab import Lab, LabError
from tests.lab.faults import FAULTS, NODE_WITHIN_S, RANK_WITHIN_S, Fault
from tests.lab.trial import Trial, steps_for, trial, wrong_with

DOCUMENT = REPOSITORY / "docs" / "reliability.md"
BEGIN, END = "<!-- faults -->", "<!-- /faults -->"
NODES = 3
TOY, REAL = "stand-in", "training"
FROM_THE_LAUNCH = " ¹"
THEN = {
    "goes-on": "goes on",
    "again": "again, same nodes",
    "elsewhere": "again, the spare instead",
    "given-up": "given up; resumes once mended",
    "refused": "refused before any rank starts",
}


def main() -> int:
    """Entry point."""
    parser = arguments_parser(__doc__ or "", rounds=5)
    parser.add_argument("--real", type=int, default=1, metavar="N", help="rounds of real training besides (default: 1)")
    parser.add_argument("--only", default="", metavar="ID,…", help="only these faults")
    parser.add_argument("--document", type=Path, default=DOCUMENT, metavar="FILE", help="where the table goes")
    options = parser.parse_args()
    end_on_sigterm()
    try:
        bench(options)
    except (BenchError, LabError) as error:
        print(f"bench.faults: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the lab is down", file=sys.stderr)
        return 130
    return 0


def bench(options: argparse.Namespace) -> None:
    """Play every fault in every round, in a shuffled order, and write the results."""
    only = [word for word in options.only.split(",") if word]
    chosen = [fault for fault in FAULTS if not only or fault.id in only]
    if unknown := set(only) - {fault.id for fault in chosen}:
        raise BenchError(f"no fault {', '.join(sorted(unknown))}; there are {', '.join(fault.id for fault in FAULTS)}")
    versions = package_versions("r4090c", "torch", "deepspeed")
    with tempfile.TemporaryDirectory(prefix="r4090c-bench-") as name, Lab.up(Path(name) / "lab", NODES) as lab:
        record = Record(options.out, "faults", versions=versions, rounds=options.rounds, real_rounds=options.real)
        for number in range(options.rounds + options.real):
            kind = TOY if number < options.rounds else REAL
            order = [fault for fault in chosen if kind == TOY or fault.torch_has_a_say]
            random.Random(number).shuffle(order)
            for fault in order:
                told, problem = measure(lab, fault, kind, Path(name) / f"{number}-{fault.id}")
                record.add({"contender": fault.id, "round": number, "ranks": kind, **told}, problem)
                lab.mend()
    text = report(record, chosen)
    if BEGIN in (document := options.document.read_text() if options.document.exists() else ""):
        options.document.write_text(renewed(document, text))
    else:
        print(f"{options.document} has no {BEGIN}: the table is in {record.markdown} only", file=sys.stderr)


def measure(lab: Lab, fault: Fault, kind: str, state: Path) -> tuple[dict[str, Any], str]:
    """Play a fault; return what was measured, and what was wrong ("" = nothing)."""
    state.mkdir()
    with trial(lab, fault, state, toy=kind == TOY, steps=steps_for(fault, toy=kind == TOY)) as one:
        try:
            one.play(timeout_s=180)
            problem = ""
        except AssertionError as error:
            problem = str(error)
        one.mend()
        problem = problem or "; ".join(wrong_with(one))
        return measured(one), problem


def measured(one: Trial) -> dict[str, Any]:
    """Return the figures and the cause of a trial."""
    found = asdict(one.found)
    cause = found.pop("cause") or {}
    figures = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
    return {**figures, "cause": cause.get("kind"), "summary": cause.get("summary")}


def report(record: Record, chosen: Sequence[Fault]) -> str:
    """Write the Markdown, and return the table for the document."""
    tables = []
    for kind, title in ((TOY, "Ranks that only step together (tests/lab/toy.py)"), (REAL, "Ranks that train recipe `tiny`")):
        rows = [
            row(fault, [run for run in record.runs if run["contender"] == fault.id and run["ranks"] == kind]) for fault in chosen
        ]
        rows = [one for one in rows if one[2] != "0"]
        if rows:
            columns = ["detected, s", "cause told, s", "other ranks stopped, s", "all stopped, s", "next step, s"]
            heading = ["fault", "what is done", "runs", *columns, "the cause", "answer"]
            tables.append(f"{title}:\n\n{table(heading, rows)}")
    about = record.about
    body = (
        f"{about['rounds']} rounds of a stand-in for torch, {about['real_rounds']} of real training on the CPU; two nodes of a "
        "rank, and a spare, in network namespaces of one machine. Seconds after the fault, median [least-most]. A run counts "
        "only when all was as it should be: the cause named, nothing left on any node, the answer right. "
        f"{FROM_THE_LAUNCH.strip()} From the launch on.\n\n"
    )
    body += "\n".join(tables)
    record.finish("Faults", body, goals(record.runs))
    return body


def row(fault: Fault, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the row of a fault."""

    answer = fault.answer
    ends = bool(answer.kinds)
    mark = "" if fault.strike is not None else FROM_THE_LAUNCH

    def figures(name: str, known: bool) -> str:
        values = [run[name] for run in runs if run[name] is not None] if known else []
        return spread(values) + mark if values else "–"

    noticed = any(run["noticed_s"] is not None for run in runs)
    first = "ended_s" if answer.then == "refused" else "noticed_s" if noticed else "said_s"
    detected = figures(first, fault.id != "supervisor")
    stopped = [figures(name, ends and fault.strike is not None) for name in ("peers_s", "all_s")]
    kinds = sorted({str(run["cause"]) for run in runs if run["cause"]}) if ends else []
    where = f" on {answer.node}" if answer.node else ""
    where += f", rank {answer.rank}" if answer.rank is not None else ""
    cause = f"`{', '.join(kinds)}`{where}" if kinds else "–"
    figured = [detected, figures("told_s", ends), *stopped, figures("resumed_s", ends)]
    return [f"`{fault.id}`", fault.does, str(len(runs)), *figured, cause, THEN[answer.then]]


def goals(runs: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return the contract's goals."""
    limits = {RANK_WITHIN_S: "a killed rank, torchrun or agent", NODE_WITHIN_S: "a node that is cut off or turned off"}
    found = []
    for limit, text in limits.items():
        ids = {fault.id for fault in FAULTS if fault.answer.within_s == limit}
        worst = [run["peers_s"] for run in runs if run["contender"] in ids and run["peers_s"] is not None]
        found.append(Goal(f"the other ranks have stopped after {text}, s (the slowest)", limit, max(worst, default=None)))
    return found


def renewed(document: str, text: str) -> str:
    """Return the document with `text` between its markers."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n{END}", document)


if __name__ == "__main__":
    sys.exit(main())
