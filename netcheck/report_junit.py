"""Findings as JUnit XML, for Jenkins, GitLab and other readers of test results. Pure.

One testsuite a group, one testcase a finding. fail -> failure, unknown -> error, skip -> skipped; a warning is a pass that tells
what it warns of in system-out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from netcheck.checks import REGISTRY
from r4090c.model import Finding, Status

_INVALID = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML 1.0 document may hold, not even escaped (Extensible Markup Language 1.0, 2.2)."""
ELEMENTS = {Status.FAIL: "failure", Status.UNKNOWN: "error", Status.SKIP: "skipped"}
COUNTED = {"failures": Status.FAIL, "errors": Status.UNKNOWN, "skipped": Status.SKIP}


def junit(cluster_name: str, started_at: str, duration_s: float, findings: Sequence[Finding]) -> str:
    """Return the XML document."""
    group_of: Mapping[str, str] = {check.id: check.group for check in REGISTRY}
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(group_of.get(finding.check, "other"), []).append(finding)
    root = Element(
        "testsuites", {"name": _clean(f"preflight of {cluster_name}"), **_counts(findings), "time": f"{duration_s:.3f}"}
    )
    taken: Counter[tuple[str, str]] = Counter()
    for group, members in groups.items():
        head = {"name": _clean(f"{cluster_name} {group}"), **_counts(members), "time": "0", "timestamp": _clean(started_at[:19])}
        suite = SubElement(root, "testsuite", head)
        for finding in members:
            taken[finding.check, finding.subject] += 1
            same = taken[finding.check, finding.subject]
            name = finding.subject if same == 1 else f"{finding.subject} ({same})"
            words = {"classname": _clean(f"preflight.{group}.{finding.check}"), "name": _clean(name), "time": "0"}
            _tell(SubElement(suite, "testcase", words), finding)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _counts(findings: Sequence[Finding]) -> dict[str, str]:
    found = Counter(finding.status for finding in findings)
    return {"tests": str(len(findings)), **{name: str(found[status]) for name, status in COUNTED.items()}}


def _tell(case: Element, finding: Finding) -> None:
    element = ELEMENTS.get(finding.status)
    if element == "skipped":
        SubElement(case, element, {"message": _clean(finding.observed)})
    elif element is not None:
        SubElement(case, element, {"message": _clean(finding.observed), "type": finding.status.value}).text = _text(finding)
    else:
        SubElement(case, "system-out").text = _text(finding)


def _text(finding: Finding) -> str:
    lines = [f"{finding.status.value}: {finding.observed}"]
    for head, text in (("expected", finding.expected), ("why", finding.why), ("fix", finding.remedy)):
        if text:
            lines.append(f"{head}: {text}")
    return _clean("\n".join(lines))


def _clean(text: str) -> str:
    """Return `text` without the characters that XML forbids."""
    return _INVALID.sub("", text)
