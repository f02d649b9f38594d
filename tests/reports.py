"""What the tests of reports, locks and comparisons share: outcomes of cases, figures, bundles that the real program replays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from netcheck.diff import Diff
from netcheck.figures import figures_of
from netcheck.judge import judge
from netcheck.measure.figure import Figure
from netcheck.measure.job import Level
from netcheck.raw import Raw
from netcheck.report import Outcome
from r4090c.model import Cluster
from tests.checks.cases import build
from tests.test_preflight import local_cluster, preflight

Rate = Callable[[str, str], float]


def iperf3_says(gbit_s: float, streams: int = 4) -> str:
    """Return what `iperf3 -J` prints, as far as it is read."""
    both = {"bits_per_second": gbit_s * 1e9, "seconds": 1.0, "bytes": gbit_s * 1e9 / 8}
    end = {"sum_sent": {**both, "retransmits": 0}, "sum_received": both}
    return json.dumps({"start": {"test_start": {"protocol": "TCP", "num_streams": streams, "reverse": 0}}, "end": end})


def step(stdout: str, **more: Any) -> dict[str, Any]:
    """Return what run_on_node keeps of one program."""
    return {"rc": 0, "stdout": stdout, "stderr": "", "error": "", "duration_s": 1.1, **more}


def tcp_measured(pairs: Iterable[tuple[str, str]], rate: Rate, says: Callable[[float], str] = iperf3_says) -> dict[str, Any]:
    """Return the JSON of a measurement `tcp` of these pairs, both ways, a round each."""
    rounds = []
    for client, server in pairs:
        tests: list[dict[str, Any]] = [
            {"sender": a, "receiver": b, "streams": 4} for a, b in ((client, server), (server, client))
        ]
        client_steps = [step(says(rate(one["sender"], one["receiver"]))) for one in tests]
        parts = {server: {"steps": [step("") for _ in tests]}, client: {"steps": client_steps}}
        data = {"stage": "screening", "client": client, "server": server, "tests": tests}
        rounds.append([{"name": f"{client}-{server}", "data": data, "parts": parts}])
    return {"level": "full", "rounds": rounds}


def pairs_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return every two of `names`."""
    return [(one, other) for place, one in enumerate(names) for other in names[place + 1 :]]


def outcome_of(case: Mapping[str, Any], figures: Sequence[Figure] = (), diff: Diff | None = None) -> Outcome:
    """Return the outcome of a case (tests.checks.cases) at level full."""
    cluster, raw, facts = build(case)
    return Outcome(cluster, raw, facts, judge(cluster, raw, facts), tuple(figures), "full", 12.5, diff)


def machine(folder: Path, *names: str, rate: Rate | None = None) -> tuple[Cluster, Raw]:
    """Return nodes that are all this machine with what they really said, and TCP figures as `rate` says."""
    cluster = local_cluster(folder / "shared", *names)
    raw, _ = preflight(cluster, level=Level.QUICK)
    if rate is not None:
        raw = replace(raw, measurements={"tcp": tcp_measured(pairs_of(names), rate)})
        assert figures_of(raw.measurements, names)
    return cluster, raw
