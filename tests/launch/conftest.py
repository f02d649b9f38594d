"""Fixtures of the tests that run whole attempts in a lab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launch.jobs import list_runs
from launch.supervise import stop_run
from netcheck.measure.job import Level
from netcheck.preflight import run_preflight
from r4090c.inventory import load_cluster
from r4090c.remote import Fleet
from tests.lab import Lab
from tests.launch.attempts import SCRIPTS, Bench, assert_nothing_left


@pytest.fixture(scope="module")
def bench(lab4: Lab) -> Iterator[Bench]:
    lab4.mend()
    cluster = load_cluster(lab4.cluster_file)
    stand_in = lab4.shared / "quick_python"
    stand_in.write_bytes((SCRIPTS / "quick_python").read_bytes())
    stand_in.chmod(0o755)
    with Fleet(cluster.nodes) as fleet:
        _, facts, _ = run_preflight(fleet, cluster, cluster.nodes[:2], level=Level.QUICK)
        yield Bench(lab4, cluster, fleet, facts)


@pytest.fixture
def nothing_left(bench: Bench) -> Iterator[None]:
    """Every test leaves every node empty, whatever was done to it; what one leaves all the same does not harm the next."""
    yield
    try:
        assert_nothing_left(bench.lab)
    except AssertionError:
        for run in list_runs(bench.fleet, bench.cluster):
            stop_run(bench.fleet, run.id, run.nodes, "the test's end")
        raise
