"""JUnit XML that readers of test results take: one testsuite a group, one testcase a finding."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck.bundle import save_bundle
from netcheck.checks import REGISTRY
from netcheck.report_junit import junit
from r4090c.errors import Exit
from r4090c.model import Finding, Status
from tests.cli import run
from tests.reports import machine, outcome_of

GROUP_OF = {check.id: check.group for check in REGISTRY}
CASE = {
    "nodes": 3,
    "facts": {"node02": {"clock": {"offset_s": 6.0}, "limits": {"error": "rlimits: not in the answer", "nofile": 1}}},
}
TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=30)
FINDINGS = st.lists(
    st.builds(Finding, st.sampled_from([*GROUP_OF, "gone"]), TEXT, st.sampled_from(Status), TEXT, TEXT, TEXT, TEXT), max_size=6
)


def document(
    findings: list[Finding], name: str = "atelier", started_at: str = "2026-11-30T01:00:00+00:00"
) -> ElementTree.Element:
    return ElementTree.fromstring(junit(name, started_at, 1.25, findings).encode())


def test_every_finding_is_a_testcase_of_its_group() -> None:
    findings = list(outcome_of(CASE).findings)
    root = document(findings)
    cases = [(suite.get("name"), case) for suite in root for case in suite]
    assert len(cases) == len(findings) == int(root.get("tests", ""))
    for suite, case in cases:
        group, check = case.get("classname", "").split(".")[1:]
        assert suite == f"atelier {group}" and GROUP_OF[check] == group
    for suite_element in root:
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite_element.get(attribute, "")) == len(suite_element.findall(f"testcase/{tag}"))
        assert suite_element.get("timestamp") == "2026-11-30T01:00:00"


@pytest.mark.parametrize(
    ("status", "tags"),
    [("pass", ["system-out"]), ("warn", ["system-out"]), ("fail", ["failure"]), ("unknown", ["error"]), ("skip", ["skipped"])],
)
def test_what_becomes_of_a_status(status: str, tags: list[str]) -> None:
    (case,) = document([Finding("limits", "node01", Status(status), "seen", "wanted", "because", "mend it")]).iter("testcase")
    assert [element.tag for element in case] == tags
    text = case[0].get("message") or case[0].text or ""
    assert "seen" in text
    if status in ("fail", "unknown", "warn"):
        assert (case[0].text or "").splitlines() == [f"{status}: seen", "expected: wanted", "why: because", "fix: mend it"]


def test_names_are_unique() -> None:
    twice = [Finding("data-interface", "node01", Status.FAIL, seen) for seen in ("MTU 1400", "10 Gbit/s")]
    assert [case.get("name") for case in document(twice).iter("testcase")] == ["node01", "node01 (2)"]


@given(FINDINGS, TEXT, TEXT)
def test_no_text_breaks_the_document(findings: list[Finding], name: str, started_at: str) -> None:
    root = document(findings, name, started_at)
    assert len(list(root.iter("testcase"))) == len(findings)
    assert {element.tag for element in root.iter()} <= {
        *("testsuites", "testsuite", "testcase", "failure", "error", "skipped", "system-out")
    }


def test_a_reader_of_junit_takes_it(tmp_path: Path) -> None:
    junitparser = pytest.importorskip("junitparser")
    (tmp_path / "results.xml").write_text(junit("atelier", "2026-11-30T01:00:00+00:00", 1.25, outcome_of(CASE).findings))
    suites = junitparser.JUnitXml.fromfile(str(tmp_path / "results.xml"))
    kinds = {junitparser.Failure: "fail", junitparser.Error: "unknown", junitparser.Skipped: "skip"}
    found: dict[str, int] = {}
    for suite in suites:
        for case in suite:
            status = next((kinds[type(result)] for result in case.result), "pass")
            found[status] = found.get(status, 0) + 1
    wanted: dict[str, int] = {}
    for finding in outcome_of(CASE).findings:
        status = "pass" if finding.status is Status.WARN else finding.status.value
        wanted[status] = wanted.get(status, 0) + 1
    assert found == wanted
    assert (suites.failures, suites.errors) == (wanted["fail"], wanted["unknown"])


def test_the_command_writes_it(tmp_path: Path) -> None:
    save_bundle(tmp_path / "b.tar.gz", *machine(tmp_path, "n1", "n2"))
    words = ("preflight", "--from", "b.tar.gz", "--only", "time,os", "--junit", "results.xml", "--json")
    code, output, errors = run(*words, state=tmp_path)
    assert code in (Exit.OK, Exit.FAILED, Exit.UNKNOWN)
    assert output.startswith("{") and errors == "written: results.xml\n"
    root = ElementTree.parse(tmp_path / "results.xml").getroot()
    assert {suite.get("name") for suite in root} == {"local time", "local os"}
