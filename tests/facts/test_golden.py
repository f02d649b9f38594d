"""Every case of tests/facts/<fact>/*.json: what a node answered, and the fact that must come of it.

A case: {"why": …, "answer": {"files", "errors", "natives", "command"}, "stamps"?: {…}, and one of
"value": the fact as JSON | "error": a part of the message | "absent": the tool}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from netcheck.facts import FACTS, observe
from r4090c.cli.common import to_jsonable
from tests.facts.samples import HERE, cluster_of, probe_result


def rounded(value: Any) -> Any:
    """Return `value` with numbers rounded to a nanosecond: times near 1000 s are not exact in binary."""
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


CASES = sorted(path for name in FACTS for path in (HERE / name).glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden_case(path: Path) -> None:
    case = json.loads(path.read_text())
    assert set(case) <= {"why", "answer", "stamps", "value", "error", "absent"}
    fact = path.parent.name
    cluster = cluster_of()
    seen = observe(fact, probe_result(fact, case["answer"], case.get("stamps")), cluster.nodes[0], cluster)
    if "value" in case:
        assert seen.error is None
        assert seen.absent is None
        assert rounded(to_jsonable(seen.value)) == case["value"]
    elif "absent" in case:
        assert (seen.absent, seen.value, seen.error) == (case["absent"], None, None)
    else:
        assert seen.error is not None, seen
        assert case["error"] in seen.error
        assert seen.value is None


def test_every_fact_has_cases_of_both_kinds() -> None:
    for name in FACTS:
        cases = [json.loads(path.read_text()) for path in CASES if path.parent.name == name]
        assert any("value" in case for case in cases), f"{name} has no good case"
        assert any("value" not in case for case in cases), f"{name} has no bad case"
