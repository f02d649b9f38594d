"""All links of 4, 8 and 16 nodes: `r4090c preflight` against a loop of iperf3 over ssh: python -m bench.preflight."""

from __future__ import annotations

import json
import os
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from bench import processes
from bench.fanout import write_ssh_config
from bench.processes import CpuAccount
from bench.record import (
    BenchError,
    Goal,
    Record,
    arguments_parser,
    child_environment,
    package_versions,
    positive,
    said_version,
    spread,
    table,
)
from netcheck.measure import tcp
from netcheck.measure.schedule import all_pairs, ring_pairs
from r4090c.errors import ParseError
from r4090c.model import Expect
from tests.lab import Lab, LabError

FULL, DEFAULT, QUICK, LOOP = "preflight --full", "preflight", "preflight --quick", "loop over ssh"
WORDS = {FULL: ["--full", "--only", "bandwidth"], DEFAULT: ["--only", "bandwidth"], QUICK: ["--quick"]}
RATE, RATE_GBIT_S = "200mbit", 0.2
"""Of every link, so that the wire and not the cores of one machine is the limit."""
WRONG = 0.25
"""Share by which a link may differ from its rate before a run does not count."""
PORTS = (5201, 5202)
"""Of the loop's servers, in turn: one that has just served is still busy for a moment, and refuses."""
LOOPED_PAIRS = 8
"""The loop is timed on as many pairs, drawn anew in every round: one after the other, all of them take as long in proportion."""
TIMEOUT_S = 400.0
PAUSE_S = 0.3
FULL_RATIO = 0.2
"""The goal at the largest number of nodes. All pairs of 16 take 15 rounds instead of 120: 0.125, and the rest is overhead."""


def loop_script(lab: Lab, folder: Path, pairs: Sequence[tuple[str, str]]) -> Path:
    """Write what one would write by hand: servers everywhere, then pair after pair, one login a pair; return it."""
    config, log = write_ssh_config(lab, folder), folder / "loop.jsonl"
    lines = ["#!/bin/sh", "set -e", f"rm -f {log}"]
    ends = sorted({name for pair in pairs for name in pair})
    serve = " && ".join(f"iperf3 -s -D -p {port} --pidfile /tmp/iperf3-{port}.pid" for port in PORTS)
    lines += [f"ssh -F {config} {lab.address(name)} '{serve}'" for name in ends]
    ways = [(back, streams) for back in ("", "-R") for streams in tcp.stream_counts(Expect())]
    for one, other in pairs:
        tests = [
            f"iperf3 -J -t {tcp.SECONDS[tcp.SCREENING]} -P {streams} {back} -p {PORTS[place % 2]} -c {lab.address(other)}"
            for place, (back, streams) in enumerate(ways)
        ]
        lines.append(f"ssh -F {config} {lab.address(one)} '{' && '.join(tests)}' >> {log}")
    end = 'for file in /tmp/iperf3-*.pid; do kill $(tr -d "\\0" < $file); done'
    lines += [f"ssh -F {config} {lab.address(name)} '{end}'" for name in ends]
    script = folder / "loop.sh"
    script.write_text("\n".join(lines) + "\n")
    return script


def run_loop(lab: Lab, folder: Path, names: Sequence[str], number: int, account: CpuAccount) -> tuple[dict[str, Any], str]:
    """Return the figures of one loop over some pairs of `names`, and what is wrong with it ("" = it counts)."""
    pairs = random.Random(number).sample([*combinations(names, 2)], min(LOOPED_PAIRS, len(names) * (len(names) - 1) // 2))
    script = loop_script(lab, folder, pairs)
    done = processes.run(["sh", str(script)], account, folder=folder, environment=child_environment(), timeout_s=TIMEOUT_S)
    log = folder / "loop.jsonl"
    text = log.read_text() if log.exists() else ""
    found = text.count('"sum_received"')
    wanted = len(pairs) * 2 * len(tcp.stream_counts(Expect()))
    problem = "" if done.rc == 0 and found == wanted else f"rc {done.rc}, {found} of {wanted} tests: {done.stderr.strip()[-200:]}"
    run = {"contender": LOOP, "nodes": len(names), "pairs": len(pairs), "wall_s": round(done.wall_s, 3)}
    return {**run, "pair_s": round(done.wall_s / len(pairs), 3)}, problem


def run_ours(lab: Lab, folder: Path, names: Sequence[str], which: str, account: CpuAccount) -> tuple[dict[str, Any], str]:
    """Return the figures of one preflight of `names`, and what is wrong with it ("" = it counts)."""
    program, bundle = Path(sys.executable).with_name("r4090c"), folder / "bundle.tar.gz"
    if not program.exists():
        raise BenchError(f"{program} is not there; run: make setup")
    words = ["--cluster", str(lab.cluster_file), "--nodes", str(len(names)), "--json", "--save", str(bundle)]
    argv = [str(program), "preflight", *WORDS[which], *words]
    environment = child_environment(R4090C_STATE="/dev/null")
    bundle.unlink(missing_ok=True)
    done = processes.run(argv, account, folder=folder, environment=environment, timeout_s=TIMEOUT_S)
    run = {"contender": which, "nodes": len(names), "wall_s": round(done.wall_s, 3), "client_cpu_s": round(done.cpu_s, 3)}
    if which == QUICK:
        return run, "" if done.rc == 0 else f"rc {done.rc}: {done.stderr.strip()[-200:]}"
    try:
        with tarfile.open(bundle) as tar:
            file = tar.extractfile("measurements/tcp.json")
            measured: Any = json.load(file) if file else {}
        cells = tcp.read(measured).cells()
        rounds = len(measured["rounds"])
    except (OSError, KeyError, ValueError, ParseError) as error:
        return run, f"rc {done.rc}, no measurement ({error}): {done.stderr.strip()[-200:]}"
    wanted = 2 * sum(map(len, all_pairs(names) if which == FULL else ring_pairs(names)))
    wrong = [cell for cell, gbit_s in cells.items() if abs(gbit_s / RATE_GBIT_S - 1) > WRONG]
    problem = "" if len(cells) == wanted and not wrong else f"{len(cells)} of {wanted} links, {len(wrong)} of another rate"
    return {**run, "rounds": rounds}, problem


def main() -> int:
    """Entry point."""
    parser = arguments_parser(__doc__ or "", rounds=3)
    parser.add_argument("--nodes", default="4,8,16", metavar="N,…", help="how many nodes (default: 4,8,16)")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    processes.end_on_sigterm()
    try:
        bench(sorted({positive(word) for word in options.nodes.split(",")}), options.rounds, options.out)
    except (BenchError, LabError) as error:
        print(f"bench.preflight: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the lab is down", file=sys.stderr)
        return 130
    return 0


def bench(counts: list[int], rounds: int, out: Path) -> None:
    """Bring the lab up, run everything in a shuffled order, take the lab down, and write the results."""
    with tempfile.TemporaryDirectory(prefix="r4090c-bench-") as name, CpuAccount("client") as account:
        folder = Path(name)
        with Lab.up(folder / "lab", max(counts)) as lab:
            for node in lab.nodes:
                lab.shape(node, RATE)
            versions = {
                **package_versions("r4090c", "paramiko"),
                "iperf3": said_version("iperf3", "--version"),
                "ssh": said_version("ssh", "-V"),
            }
            record = Record(out, "preflight", versions=versions, rounds=rounds, nodes=counts, rate=RATE)
            nodes = list(lab.nodes)
            run_ours(lab, folder, nodes[: counts[0]], QUICK, account)  # .pyc files, page cache
            for number in range(rounds):
                order = [(which, count) for which in (*WORDS, LOOP) for count in counts]
                random.Random(number).shuffle(order)
                for which, count in order:
                    time.sleep(PAUSE_S)
                    names = nodes[:count]
                    run, problem = (
                        run_loop(lab, folder, names, number, account)
                        if which == LOOP
                        else run_ours(lab, folder, names, which, account)
                    )
                    account.kill_left()
                    record.add({"round": number, **run}, problem)
    report(record, counts)


def ratios_to_loop(record: Record, which: str, count: int) -> list[float]:
    """Return preflight / loop of every round that has both; the loop is scaled to the pairs the preflight tests."""
    pairs = len([*combinations(range(count), 2)]) if which == FULL else sum(map(len, ring_pairs([str(n) for n in range(count)])))
    by_round: dict[int, dict[str, dict[str, Any]]] = {}
    for run in record.runs:
        if run["nodes"] == count:
            by_round.setdefault(run["round"], {})[run["contender"]] = run
    both = [one for one in by_round.values() if which in one and LOOP in one]
    return [one[which]["wall_s"] / (one[LOOP]["pair_s"] * pairs) for one in both]


def report(record: Record, counts: list[int]) -> None:
    """Write the tables."""
    rows = []
    for count in counts:
        runs = [run for run in record.runs if run["nodes"] == count]
        for which in (FULL, DEFAULT, QUICK):
            mine = [run for run in runs if run["contender"] == which]
            compared = spread(ratios_to_loop(record, which, count)) if which != QUICK else "–"
            rounds = spread([run["rounds"] for run in mine], 0) if which != QUICK else "–"
            cells = [spread([run["wall_s"] for run in mine], 1), rounds, compared, spread([run["client_cpu_s"] for run in mine])]
            rows.append([str(count), which, str(len(mine)), *cells])
        looped = [run["pair_s"] for run in runs if run["contender"] == LOOP]
        pairs = count * (count - 1) // 2
        whole = f"{spread([pair_s * pairs for pair_s in looped], 1)} for all {pairs} pairs, by {min(LOOPED_PAIRS, pairs)} of them"
        rows.append([str(count), LOOP, str(len(looped)), whole, "–", "1.00", "–"])
    heading = ["nodes", "", "runs", "wall s", "rounds", "/ loop", "client CPU s"]
    largest = sorted(ratios_to_loop(record, FULL, max(counts)))
    goal = Goal(f"--full / loop, {max(counts)} nodes, wall", FULL_RATIO, largest[len(largest) // 2] if largest else None)
    streams = " and ".join(map(str, tcp.stream_counts(Expect())))
    body = (
        f"Every link is limited to {RATE}. Both test every pair both ways with {streams} "
        f"streams for {tcp.SECONDS[tcp.SCREENING]} s each; ours also reads the facts and tests suspects again.\n\n"
    )
    record.finish("Bandwidth of all links", body + table(heading, rows), [goal])


if __name__ == "__main__":
    sys.exit(main())
