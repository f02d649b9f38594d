"""Every check against its recorded cases: facts in, findings out. A changed text is a changed case: judge it, then write it.

R4090C_WRITE_CASES=1 writes the findings of the cases anew; their statuses must not change by that.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from netcheck.checks import REGISTRY
from netcheck.measure import MEASUREMENTS
from r4090c.model import NodeFacts, Status
from tests.checks.cases import HERE, TYPES, build, found, merged

FILES = sorted(HERE.glob("*/*.json"))


def read(file: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(file.read_text())
    return case


def name(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_facts_in_findings_out(file: Path) -> None:
    case = read(file)
    findings = found(case, file.parent.name)
    if os.environ.get("R4090C_WRITE_CASES"):
        before = [(finding["subject"], finding["status"]) for finding in case["findings"]]
        assert [(finding["subject"], finding["status"]) for finding in findings] == before
        file.write_text(json.dumps({**case, "findings": findings}, indent=2, ensure_ascii=False) + "\n")
    assert findings == case["findings"]


@pytest.mark.parametrize("check", REGISTRY, ids=lambda check: check.id)
def test_a_check_has_cases_of_every_kind(check: Any) -> None:
    statuses = {finding["status"] for file in FILES if file.parent.name == check.id for finding in read(file)["findings"]}
    assert "pass" in statuses
    assert statuses & {"warn", "fail"}
    assert "unknown" in statuses


def test_no_cases_without_a_check() -> None:
    assert {file.parent.name for file in FILES} == {check.id for check in REGISTRY}


@pytest.mark.parametrize("check", REGISTRY, ids=lambda check: check.id)
def test_what_cannot_be_read_is_never_a_pass(check: Any) -> None:
    """Whatever a check needs: when it could not be read on node02, the check says so about node02."""
    for need in set(check.needs) & set(TYPES):
        findings = found({"lock": {}, "facts": {"node02": {need: {"error": "Input/output error"}}}}, check.id)
        assert [finding["status"] for finding in findings if finding["subject"].split("/")[0] == "node02"] == ["unknown"]


@pytest.mark.parametrize("check", REGISTRY, ids=lambda check: check.id)
def test_an_unreached_node_is_never_a_pass(check: Any) -> None:
    reach = {"node02": {"verdict": "timeout", "observed": "no answer from 192.168.1.12:22 in 5 s", "next_command": "ping node02"}}
    findings = [finding for finding in found({"lock": {}, "reach": reach}, check.id) if finding["subject"] == "node02"]
    if check.scope == "measurement":  # nothing was measured at all
        assert findings == []
        return
    assert [finding["status"] for finding in findings] == ["unknown"]
    assert findings[0]["remedy"] == "ping node02"


def test_a_healthy_cluster_gives_no_warning() -> None:
    for check in REGISTRY:
        for finding in found({"nodes": 4, "lock": {}}, check.id):
            assert finding["status"] in ("pass", "skip"), finding


@pytest.mark.parametrize("check", REGISTRY, ids=lambda check: check.id)
def test_a_check_is_one_file_named_after_its_id(check: Any) -> None:
    module = inspect.getmodule(check.judge)
    assert module is not None and module.__file__ is not None
    assert Path(module.__file__).stem == check.id.replace("-", "_")
    assert inspect.isgeneratorfunction(check.judge)
    known = {field for field in NodeFacts.__dataclass_fields__ if field != "node"} | {"reach", "measurements", *MEASUREMENTS}
    assert set(check.needs + check.optional) <= known


def test_every_check_file_is_registered() -> None:
    folder = Path(inspect.getfile(inspect.getmodule(REGISTRY[0].judge) or pytest)).parent
    assert {file.stem for file in folder.glob("[a-z]*.py")} == {check.id.replace("-", "_") for check in REGISTRY}


def test_what_is_not_a_pass_says_what_to_do() -> None:
    """A fail or warn has what was expected, why it matters and a remedy; an unknown has a way to find out."""
    for file in FILES:
        for finding in read(file)["findings"]:
            assert finding["observed"], file
            if finding["status"] in (Status.FAIL, Status.WARN):
                assert finding["expected"] and finding["why"] and finding["remedy"], (file, finding)
            if finding["status"] == Status.UNKNOWN:
                assert finding["remedy"], (file, finding)


def test_merging_keeps_what_is_not_named() -> None:
    assert merged({"a": {"b": 1, "c": [1, 2]}}, {"a": {"c": [3]}}) == {"a": {"b": 1, "c": [3]}}
    cluster, raw, facts = build({"nodes": 2, "facts": {"node02": {"clock": {"offset_s": 6.0}}}})
    clocks = [facts[node.name].clock.value for node in cluster.nodes]
    assert [clock.offset_s for clock in clocks if clock is not None] == [0.002, 6.0]
    assert list(raw.reach) == ["node01", "node02"]
