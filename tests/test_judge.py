"""From findings to a verdict, and how the runner treats what was not read: no check can turn it into a pass."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck.checks import REGISTRY, Check
from netcheck.checks._majority import majority
from netcheck.checks.clock_skew import judge_skew
from netcheck.checks.mount import same_source
from netcheck.data_network import unfit
from netcheck.facts import observe
from netcheck.judge import exit_code, judge, verdict
from netcheck.measure import nonce, ports
from netcheck.measure.figure import Figure
from netcheck.preflight import select_checks
from netcheck.report import report, screen
from r4090c.errors import Exit, ParseError, UsageError
from r4090c.model import ClockFact, Cluster, Fact, Finding, Gpu, Node, Status
from tests.checks.cases import build
from tests.facts.samples import FIXTURES, csv_answer, probe_result

GOLDEN = Path(__file__).parent / "golden"


def finding(status: Status, check: str = "limits", subject: str = "node01") -> Finding:
    return Finding(check, subject, status, "seen", "wanted", "because", "mend it")


# --------------------------------------------------------------------------- verdict and exit code


@pytest.mark.parametrize(
    ("statuses", "word", "code"),
    [
        (["pass", "pass"], "fit", Exit.OK),
        (["pass", "warn"], "fit", Exit.OK),
        (["pass", "skip"], "fit", Exit.OK),
        (["pass", "fail", "unknown", "warn"], "not fit", Exit.FAILED),
        (["pass", "unknown", "warn"], "could not tell", Exit.UNKNOWN),
        (["skip"], "could not tell", Exit.UNKNOWN),
        ([], "could not tell", Exit.UNKNOWN),
    ],
)
def test_verdict_and_exit_code(statuses: list[str], word: str, code: Exit) -> None:
    findings = [finding(Status(status)) for status in statuses]
    assert (verdict(findings), exit_code(findings)) == (word, code)


# --------------------------------------------------------------------------- the runner


def a_check(judged: Any, **change: Any) -> Check:
    base = Check("a-check", "os", "node", ("clock",), (), Status.SKIP, lambda node, cluster: True, lambda *read: None, judged)
    return replace(base, **change)


def passes(node: Node, clock: ClockFact, cluster: Cluster) -> Iterator[Finding]:
    yield Finding("a-check", node.name, Status.PASS, "fine")


def statuses(check: Check, case: dict[str, Any]) -> dict[str, str]:
    return {one.subject: one.status.value for one in judge(*build(case), [check])}


def test_a_missing_tool_is_skipped_unless_it_is_demanded() -> None:
    case = {"facts": {"node02": {"clock": {"absent": "chronyc"}}}}
    assert statuses(a_check(passes), case) == {"node01": "pass", "node02": "skip", "node03": "pass"}
    assert statuses(a_check(passes, absent=Status.UNKNOWN), case) == {"node01": "pass", "node02": "unknown", "node03": "pass"}
    (skipped,) = [one for one in judge(*build(case), [a_check(passes)]) if one.status is Status.SKIP]
    assert skipped.remedy == "ssh -t train@192.168.1.12 'sudo apt-get install -y chronyc'"


def test_a_check_that_does_not_apply_says_nothing() -> None:
    check = a_check(passes, applies=lambda node, cluster: node.name != "node02")
    assert statuses(check, {"facts": {"node02": {"clock": {"error": "hidden"}}}}) == {"node01": "pass", "node03": "pass"}


def test_a_cluster_check_sees_only_the_nodes_that_answered() -> None:
    seen: list[list[str]] = []

    def look(clocks: dict[str, ClockFact], cluster: Cluster) -> Iterator[Finding]:
        seen.append(list(clocks))
        yield Finding("a-check", "node01", Status.PASS, "fine")

    check = a_check(look, scope="cluster")
    case = {
        "facts": {"node02": {"clock": {"error": "clock was set"}}},
        "reach": {"node03": {"verdict": "timeout", "observed": "no answer", "next_command": "ping node03"}},
    }
    assert statuses(check, case) == {"node02": "unknown", "node03": "unknown", "node01": "pass"}
    assert seen == [["node01"]]


def test_a_check_that_raises_is_a_bug_and_not_hidden() -> None:
    def breaks(node: Node, clock: ClockFact, cluster: Cluster) -> Iterator[Finding]:
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        judge(*build({}), [a_check(breaks)])


def test_nodes_that_were_not_asked_are_not_judged() -> None:
    cluster, raw, facts = build({"nodes": 3})
    raw = replace(raw, reach={"node02": raw.reach["node02"]})
    findings = judge(cluster, raw, facts)
    subjects = {one.subject.partition("/")[0] for one in findings}
    assert subjects == {"node02", "atelier"}  # atelier: the measurements, which were not taken
    assert exit_code(findings) == Exit.OK


def measured(names: list[str], **change: Any) -> Check:
    def judged(value: Any, cluster: Cluster) -> Iterator[Finding]:
        for name in names:
            yield Finding("a-check", name, Status.FAIL, "blocked")

    return a_check(judged, scope="measurement", needs=("ports",), **change)


def test_a_measurement_counts_for_the_judged_nodes_only() -> None:
    cluster, raw, facts = build({"measurements": {"ports": {}}})
    raw = replace(raw, reach={name: raw.reach[name] for name in ("node01", "node02")})
    findings = judge(cluster, raw, facts, [measured(["node01", "node02/x", "node03", "stranger"])])
    assert [(one.subject, one.status.value) for one in findings] == [("node01", "fail"), ("node02/x", "fail")]


def test_a_node_that_was_not_measured_is_unknown() -> None:
    cluster, raw, facts = build({"measurements": {"ports": {}}})
    findings = judge(cluster, raw, facts, [measured(["node01", "node03"])])
    assert [(one.subject, one.status.value) for one in findings] == [
        ("node01", "fail"),
        ("node03", "fail"),
        ("node02", "unknown"),
    ]
    assert findings[-1].remedy == "r4090c preflight --only a-check"


@pytest.mark.parametrize("check", [check for check in REGISTRY if check.scope == "measurement"], ids=lambda check: check.id)
def test_a_real_measurement_without_a_node_or_with_a_stranger(check: Check) -> None:
    """Nobody the measurement does not speak of passes, and nobody is judged who was not asked for."""
    answer = {"bound": [33501], "busy": {}, "reached": {}, "started_s": 0.0, "ended_s": 5.0}
    wrote = {"seconds": 0.1}
    lost = {"error": "the connection broke", "unreached": True, "next_command": "ssh there"}
    own = {
        "ports": {"answers": {"node01": answer, "stranger": answer}},
        "nonce": {"write": {"node01": wrote, "stranger": wrote}, "read": {}, "remove": {}},
    }
    record = {"name": "node01", "data": {}, "parts": {"node01": lost, "stranger": lost}}
    values = {need: own.get(need, {"level": "full", "rounds": [[record]]}) for need in check.needs}
    findings = judge(*build({"measurements": values, "nodes": 2}), [check])
    assert {one.subject for one in findings} in ({"node01", "node02"}, {"atelier"})
    assert {one.status for one in findings if one.subject != "node01"} == {Status.UNKNOWN}
    if check.needs[0] not in own:
        assert {one.status for one in findings} <= {Status.UNKNOWN, Status.SKIP}


def test_two_halves_of_a_driver_that_differ_end_as_a_fail() -> None:
    """From nvidia-smi's own words to the verdict."""
    cluster, raw, facts = build({})
    text = (FIXTURES / "query-gpu" / "nvml-version-mismatch.txt").read_text()
    seen = observe("gpus", probe_result("gpus", csv_answer(text, rc=18)), cluster.nodes[1], cluster)
    facts["node02"] = replace(facts["node02"], gpus=cast(Fact[tuple[Gpu, ...]], seen))
    findings = judge(cluster, raw, facts)
    (fault,) = [one for one in findings if one.status is Status.FAIL]
    assert (fault.check, fault.subject) == ("gpu-driver", "node02")
    assert "version mismatch" in fault.observed and "reboot" in fault.why
    assert exit_code(findings) == Exit.FAILED


# --------------------------------------------------------------------------- parts


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2)))
def test_the_majority_is_never_named(values: dict[str, int]) -> None:
    found = majority(values)
    if found.value is None:
        assert set(found.odd) == set(values)
    else:
        agreeing = [node for node, value in values.items() if value == found.value]
        assert len(agreeing) * 2 > len(values)
        assert set(found.odd) == set(values) - set(agreeing)


@pytest.mark.parametrize(
    ("skew_s", "bound_s", "status"),
    [
        (0.0, 0.1, "pass"),
        (0.45, 0.1, "pass"),  # at worst a warning: the estimate decides
        (0.55, 0.1, "warn"),
        (-0.7, 0.1, "warn"),
        (5.05, 0.1, "warn"),  # it may be less than 5
        (5.2, 0.1, "fail"),
        (0.0, 0.6, "unknown"),
        (3.0, 2.7, "unknown"),
        (3.0, 2.0, "warn"),
        (9.0, 2.0, "fail"),
    ],
)
def test_the_error_bound_is_taken_into_account(skew_s: float, bound_s: float, status: str) -> None:
    assert judge_skew(skew_s, bound_s, 0.5, 5.0).value == status


@pytest.mark.parametrize(
    "name",
    [
        "lo",
        "docker0",
        "br-3f2a91",
        "veth12ab",
        "virbr0",
        "tun0",
        "wg0",
        "tailscale0",
        "zt7nnig26",
        "vxlan.calico",
        "cni0",
        "flannel.1",
        "CloudflareWARP",
    ],
)
def test_interfaces_that_no_training_traffic_belongs_on(name: str) -> None:
    assert unfit(name)


@pytest.mark.parametrize(
    "name", ["eth0", "enp65s0f0np0", "eno1", "bond0", "bond0.2093", "ib0", "ibp65s0", "wlp3s0", "br0", "team0", "loop0x"]
)
def test_interfaces_that_may_be_meant(name: str) -> None:
    assert unfit(name) is None


@pytest.mark.parametrize(
    ("seen", "stated", "same"),
    [
        ("nas:/export/shared", "nas:/export/shared/", True),
        ("nas.lan:/export/shared", "nas:/export/shared", True),
        ("10.0.0.5:/export/shared", "nas:/export/shared", True),
        ("[fd00::5]:/export", "nas:/export", True),
        ("10.0.0.5:/export", "10.0.0.6:/export", False),
        ("nas.lan:/export", "nas.other:/export", False),
        ("oldnas:/export", "nas:/export", False),
        ("nas:/export/a", "nas:/export/b", False),
    ],
)
def test_two_spellings_of_one_export(seen: str, stated: str, same: bool) -> None:
    assert same_source(seen, stated) is same
    assert same_source(stated, seen) is same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70000) | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["answers", "node01", "bound", "busy", "reached", "error", "write", "read", "remove", "seen", "1"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_measurements_are_read_or_refused(value: Any) -> None:
    for read in (ports.read, nonce.read):
        with contextlib.suppress(ParseError):
            read(value)


@given(JSON, JSON)
def test_no_measurement_of_a_bundle_breaks_the_judgement(one: Any, other: Any) -> None:
    case = {"measurements": {"ports": one, "nonce": other}}
    checks = [check for check in REGISTRY if check.scope == "measurement"]
    for found in judge(*build(case), checks):
        assert found.status in set(Status)


# --------------------------------------------------------------------------- which checks


def ids(*arguments: Any) -> list[str]:
    return [check.id for check in select_checks(*arguments)]


def test_checks_are_chosen_by_group_or_id() -> None:
    assert ids([], []) == [check.id for check in REGISTRY if not check.asked]
    assert ids(["power"], []) == ["power"]
    assert ids(["time"], []) == ["clock-skew", "time-daemon"]
    assert ids(["time", "mount"], ["clock-skew"]) == ["time-daemon", "mount"]
    assert "gpu-count" not in ids([], ["gpu"])


@pytest.mark.parametrize(
    ("only", "skip", "near"),
    [(["clok-skew"], [], "clock-skew"), ([], ["acces"], "access"), (["storage"], ["gpucount"], "gpu-count")],
)
def test_an_unknown_name_is_answered_with_the_nearest(only: list[str], skip: list[str], near: str) -> None:
    with pytest.raises(UsageError) as raised:
        select_checks(only, skip)
    assert near in raised.value.next_command


def test_nothing_left_is_a_mistake() -> None:
    with pytest.raises(UsageError):
        select_checks(["time"], ["time"])


# --------------------------------------------------------------------------- what users and scripts hold


def registered() -> list[dict[str, str]]:
    return [{"id": check.id, "group": check.group} for check in REGISTRY]


def reported() -> Any:
    case = {
        "nodes": 2,
        "facts": {"node02": {"clock": {"offset_s": 6.0}, "limits": {"error": "rlimits: not in the answer"}}},
        "cluster": {"nodes": {"*": {"gpus": 0}}, "network": {"kind": "tcp"}},
    }
    cluster, raw, facts = build(case)
    figures = [Figure("tcp", "node01->node02", "4 streams", 9.417, "Gbit/s")]
    findings = judge(cluster, raw, facts)
    found = report(cluster.name, raw.started_at, 1.23456, findings, "bundle.tar.gz", level="full", figures=figures, diff=None)
    return json.loads(json.dumps(found))


def test_ids_and_groups_are_pinned() -> None:
    assert registered() == json.loads((GOLDEN / "preflight-checks.json").read_text()), "python -m tests.test_judge writes them"


def test_the_json_report_is_pinned() -> None:
    assert reported() == json.loads((GOLDEN / "preflight-report.json").read_text()), "python -m tests.test_judge writes it"


def lines(findings: list[Finding], **how: Any) -> list[str]:
    return [line.text for line in screen("atelier", ["node01", "node02"], 1.25, findings, **{"width": None, **how})]


def test_a_screen_without_anything_to_tell_says_why() -> None:
    skipped = Finding("tcp-bandwidth", "atelier", Status.SKIP, "not measured")
    for findings, words in (
        ([], "none of these checks concerns this cluster"),
        ([skipped], "try without --quick"),
        ([replace(skipped, observed="not applicable")], "-v lists why"),
    ):
        first = screen("atelier", ["node01"], 0.1, findings, width=None)[0].text
        assert "could not tell" in first and words in first and "nothing to mend" not in first


def test_the_screen_says_the_worst_first_and_the_remedy_whole() -> None:
    findings = [
        Finding("limits", "node01", Status.WARN, "nofile 1024", "at least 65536", "NCCL opens many", "ssh node01 'raise it'"),
        Finding("limits", "node02", Status.WARN, "nofile 1024", "at least 65536", "NCCL opens many", "ssh node02 'raise it'"),
        Finding("clock-skew", "node02", Status.FAIL, "6.0 s ahead", "within 0.5 s", "logs lie", "ssh node02 'chronyc makestep'"),
        Finding("mount", "node01", Status.PASS, "nfs4"),
        Finding("shm-size", "node01", Status.SKIP, "not applicable"),
    ]
    assert lines(findings) == [
        "atelier: not fit   1 failed on node02; 2 warnings on node01, node02   (2 nodes, 5 findings, 1.2 s)",
        "",
        "fail  node02          clock-skew  6.0 s ahead   expected: within 0.5 s",
        "      why: logs lie",
        "      fix: ssh node02 'chronyc makestep'",
        "warn  node01, node02  limits      nofile 1024   expected: at least 65536",
        "      why: NCCL opens many",
        "      fix: ssh node01 'raise it'   (likewise: node02)",
        "",
        "passed   storage 1",
        "skipped  shm-size (not applicable)",
    ]


def test_an_unreached_node_is_told_once() -> None:
    cluster, raw, facts = build(
        {"nodes": 2, "reach": {"node02": {"verdict": "timeout", "observed": "no answer in 5 s", "next_command": "ping node02"}}}
    )
    text = lines(judge(cluster, raw, facts))
    assert text[0].startswith("atelier: could not tell   node02   (")
    assert len([line for line in text if line.startswith("unknown")]) == 2  # ssh-reach, and all that could not be read


def test_a_narrow_terminal_wraps_words_but_never_a_remedy() -> None:
    remedy = "ssh -p 2222 -i /home/somebody/keys/cluster_ed25519 root@192.168.100.12 'a rather long command line'"
    findings = [Finding("mount", "node01", Status.FAIL, "seen " * 20, "wanted " * 20, "because " * 20, remedy)]
    text = lines(findings, width=80)
    assert [line for line in text if len(line) > 80] == [f"      fix: {remedy}"]


def test_verbose_lists_the_passes() -> None:
    findings = [Finding("mount", "node01", Status.PASS, "nfs4 nas:/export")]
    assert not any("nas:/export" in line for line in lines(findings))
    assert any("nas:/export" in line for line in lines(findings, verbose=True))


if __name__ == "__main__":
    for file, value in (("preflight-checks.json", registered()), ("preflight-report.json", reported())):
        (GOLDEN / file).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
