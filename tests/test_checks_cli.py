"""`r4090c checks`: nothing about a check is written twice, and nothing is missing."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from netcheck.catalogue import LEVELS, catalogue, fields_of, filled, markdown, shown, template
from netcheck.checks import REGISTRY, Check
from r4090c.errors import Exit
from r4090c.model import Expect
from tests.cli import run, run_json
from tests.terminal import on_terminal

DOCS = Path(__file__).resolve().parents[1] / "docs" / "checks.md"
CLUSTER = """
name: atelier
nodes: [{name: node01, gpus: 0}]
paths: {shared: /mnt/shared, python: /opt/venv/bin/python}
expect: {clock_skew_warn_s: 0.25}
"""


@pytest.mark.parametrize("check", REGISTRY, ids=lambda check: check.id)
def test_every_check_says_what_it_tells_expects_and_why(check: Check) -> None:
    assert check.what.startswith("Whether "), "the first line of the module is shown to people"
    assert check.rule and "\n" not in check.rule and not check.rule.endswith(".")
    assert check.source and "\n" not in check.source
    assert {*fields_of(check.rule)} <= {*Expect.__dataclass_fields__}
    assert "{" not in filled(check.rule, Expect())


def test_every_threshold_of_every_check_has_its_source() -> None:
    entries = catalogue(Expect(), {})
    assert [entry.id for entry in entries] == [check.id for check in REGISTRY]
    assert {entry.level for entry in entries} <= {*LEVELS}
    assert all(one.source for entry in entries for one in entry.thresholds)
    used = {one.name for entry in entries for one in entry.thresholds}
    assert "clock_skew_warn_s" in used and "figure_tolerance" in used


def test_no_threshold_is_there_for_nothing() -> None:
    used = {one.name for entry in catalogue(Expect(), {}) for one in entry.thresholds}
    elsewhere = "".join(file.read_text() for file in (DOCS.parents[1] / "netcheck").rglob("*.py"))
    assert [name for name in Expect.__dataclass_fields__ if name not in used and name not in elsewhere] == []


def test_the_documentation_is_fresh() -> None:
    fresh = markdown(catalogue(Expect(), {}))
    assert DOCS.read_text() == fresh, "r4090c checks --markdown > docs/checks.md"
    assert fresh.count("\n| `") >= len(REGISTRY)


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [((3, 8), "", "3.8"), (0.5, "g", "0.5"), (0.1, ".0%", "10%"), (5.0, "", "5"), (None, "g", "not stated"), (True, "", "true")],
)
def test_thresholds_as_text(value: object, form: str, text: str) -> None:
    assert shown(value, form) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("f'ip link set {shlex.quote(iface.name)} mtu {mtu:g}'", "ip link set {name} mtu {mtu}"),
        ("'reseat the card'", "reseat the card"),
        ("f'{_pip(node)} install {x + 1}'", "{pip} install {…}"),
        ("7", ""),
    ],
)
def test_a_text_of_the_source_shows_what_varies(source: str, text: str) -> None:
    assert template(ast.parse(source, mode="eval").body) == text


# --------------------------------------------------------------------------- the command


def test_the_list_takes_the_thresholds_of_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    answer = run_json("--cluster", "cluster.yaml", "checks", "time", state=tmp_path)
    assert (answer["schema"], answer["cluster"]) == ("r4090c.checks/1", "atelier")
    assert [one["id"] for one in answer["checks"]] == ["clock-skew", "time-daemon"]
    skew = answer["checks"][0]
    assert list(skew) == ["id", "group", "level", "what", "rule", "source", "measurement", "thresholds", "remedies"]
    assert "0.25 s" in skew["rule"]
    origins = {one["name"]: (one["value"], one["origin"]) for one in skew["thresholds"]}
    assert origins == {"clock_skew_warn_s": (0.25, "cluster.yaml"), "clock_skew_fail_s": (5.0, "default")}


def test_without_a_cluster_the_defaults_are_shown(tmp_path: Path) -> None:
    answer = run_json("checks", state=tmp_path)
    assert answer["cluster"] is None
    assert [one["id"] for one in answer["checks"]] == [check.id for check in REGISTRY]


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_the_table_fits_the_terminal(columns: int, tmp_path: Path) -> None:
    code, text = on_terminal("checks", columns=columns, state=tmp_path)
    assert code == Exit.OK
    assert max(map(len, text.splitlines())) <= columns
    assert all(re.search(rf"^  {check.id}( |$)", text, re.MULTILINE) for check in REGISTRY)


def test_one_check_in_full(tmp_path: Path) -> None:
    code, text, errors = run("checks", "clock-skew", state=tmp_path)
    assert (code, errors) == (Exit.OK, "")
    assert "clock_skew_fail_s: 5 (default)  est.: certificates" in text
    assert "as root on the node: chronyc makestep" in text
    assert "r4090c preflight --only clock-skew" in text


def test_a_name_that_is_none_is_answered_with_the_nearest(tmp_path: Path) -> None:
    code, output, errors = run("checks", "clok-skew", state=tmp_path)
    assert (code, output) == (Exit.USAGE, "")
    assert "r4090c checks clock-skew" in errors


def test_markdown_comes_alone(tmp_path: Path) -> None:
    code, output, _ = run("checks", "--markdown", state=tmp_path)
    assert (code, output) == (Exit.OK, DOCS.read_text())
    assert run("checks", "time", "--markdown", state=tmp_path)[0] == Exit.USAGE


def test_the_list_is_json(tmp_path: Path) -> None:
    code, output, _ = run("checks", "--json", state=tmp_path)
    assert code == Exit.OK and json.loads(output)["checks"]
