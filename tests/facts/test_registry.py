"""The registry, the facts of the model, and what the probe understands belong together."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json

import pytest

from netcheck import facts, probe
from netcheck.facts import FACTS, questions
from netcheck.facts.question import NOT_INSTALLED
from r4090c.model import Network, NodeFacts
from tests.facts.samples import cluster_of


def test_one_fact_a_field_of_the_model() -> None:
    assert {field.name for field in dataclasses.fields(NodeFacts)} - {"node"} == set(FACTS)


def test_a_fact_is_called_like_its_file() -> None:
    for name, module in FACTS.items():
        assert name == module.NAME
        assert getattr(module, "__name__") == f"netcheck.facts.{name}"  # noqa: B009 -- the protocol has no __name__


def test_every_question_is_json_and_understood_by_the_probe() -> None:
    natives = {*probe.INLINE, *probe.THREAD, *probe.THREAD_PER_ITEM, *probe.CHILD_PER_ITEM}
    cluster = cluster_of()
    for node in cluster.nodes:
        for name, question in questions(node, cluster).items():
            assert json.loads(json.dumps(question.to_json())) == question.to_json(), name
            assert set(question.natives) <= natives, name
            for pattern in question.files:
                assert all(part.count("*") <= 1 for part in pattern.split("/")), f"{name}: {pattern}"


def test_no_native_of_the_probe_is_left_without_a_user() -> None:
    plain = cluster_of()
    asked = set()
    for cluster in (plain, dataclasses.replace(plain, network=Network(kind="roce"))):
        asked |= {native for question in questions(cluster.nodes[0], cluster).values() for native in question.natives}
    assert {*probe.INLINE, *probe.THREAD, *probe.THREAD_PER_ITEM, *probe.CHILD_PER_ITEM} - asked == set()


def test_the_word_for_a_missing_tool_is_the_same_on_both_sides() -> None:
    assert NOT_INSTALLED == probe.NOT_INSTALLED


@pytest.mark.parametrize("name", sorted(FACTS))
def test_facts_do_no_io(name: str) -> None:
    """import-linter looks at imports; this looks at the calls that need none."""
    tree = ast.parse(inspect.getsource(FACTS[name]))  # type: ignore[arg-type]
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"open", "exec", "eval", "print", "input"}


def test_questions_about_the_network_name_the_peers_and_not_the_node_itself() -> None:
    cluster = cluster_of(("node01", "node02", "node03"))
    question = facts.net.question(cluster.nodes[1], cluster)
    assert question.natives["route"] == ["10.10.0.11", "10.10.0.13"]
    assert question.natives["resolve"] == ["node01", "node02", "node03"]
