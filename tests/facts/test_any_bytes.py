"""Whatever a node answers, a fact is a value or a ParseError, and nothing else."""

from __future__ import annotations

import contextlib
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netcheck.facts import FACTS, gpus, mounts, observe
from netcheck.facts.cpus import parse_cpu_list, ranges
from netcheck.facts.os import distribution
from netcheck.facts.python import packages_of
from netcheck.facts.question import as_float, as_int, reply_of
from r4090c.cli.common import to_jsonable
from r4090c.errors import ParseError
from r4090c.model import Fact
from tests.facts.samples import HERE, cluster_of, probe_result

CLUSTER = cluster_of()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NOISE = st.text(max_size=80) | st.binary(max_size=80).map(lambda data: data.decode("utf-8", "replace"))
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def good_answers(fact: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["answer"] for path in sorted((HERE / fact).glob("*.json"))]


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in items for deeper in paths_in(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def check(fact: str, result: object) -> None:
    seen = observe(fact, result, CLUSTER.nodes[0], CLUSTER)
    assert isinstance(seen, Fact)
    assert sum(part is not None for part in (seen.value, seen.error, seen.absent)) == 1
    json.dumps(to_jsonable(seen), allow_nan=False)


@pytest.mark.parametrize("fact", sorted(FACTS))
@quick
@given(data=st.data())
def test_a_damaged_answer(fact: str, data: st.DataObject) -> None:
    """One value anywhere in a good answer becomes something else: other JSON, other text, or cut short."""
    answer = data.draw(st.sampled_from(good_answers(fact)))
    where = data.draw(st.sampled_from(paths_in(answer)))
    old: Any = answer
    for key in where:
        old = old[key]
    cut = st.integers(0, len(old)).map(lambda n: old[:n]) if isinstance(old, str) else st.nothing()
    new = data.draw(JSON | NOISE | cut)
    if where:
        check(fact, probe_result(fact, replaced(answer, where, new)))
    else:
        check(fact, {**probe_result(fact, {}), "answers": {fact: new}})


@pytest.mark.parametrize("fact", sorted(FACTS))
@quick
@given(text=NOISE, times=st.lists(st.floats() | st.integers() | st.none(), min_size=4, max_size=4))
def test_any_bytes_in_every_file_and_output(fact: str, text: str, times: list[Any]) -> None:
    stamps = dict(zip(("sent_at_s", "time_ns_received", "time_ns_sent", "received_at_s"), times, strict=True))
    for answer in good_answers(fact):
        noisy = {**answer, "files": dict.fromkeys(answer.get("files", {}), text)}
        if answer.get("command"):
            noisy["command"] = {**answer["command"], "stdout": text, "stderr": text}
        check(fact, probe_result(fact, noisy))
        check(fact, probe_result(fact, answer, stamps))


@pytest.mark.parametrize("value", [True, None, 1.5, "", "1.5", "1_000", "٣", "--1", "9" * 5000, [1], {}])
def test_what_is_no_whole_number(value: object) -> None:
    with pytest.raises(ParseError):
        as_int(value, "it")


@pytest.mark.parametrize("value", [True, None, "", "nan", "inf", float("nan"), float("-inf"), 10**400, "x", []])
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(ParseError):
        as_float(value, "it")


@quick
@given(JSON)
def test_any_json_as_a_reply(result: object) -> None:
    try:
        reply_of(result, "os")
    except ParseError:
        return
    raise AssertionError("nothing made of random JSON is a reply")


@quick
@given(NOISE)
def test_text_parsers(text: str) -> None:
    for parse in (mounts.parse_proc_mounts, gpus.parse_query, gpus.normalize_pci, parse_cpu_list, distribution):
        with contextlib.suppress(ParseError):
            parse(text)
    assert all(isinstance(version, str) for version in packages_of((text, f"{text}-1.0.dist-info")).values())


@given(st.sets(st.integers(0, 2000), max_size=60))
def test_cpu_list_round_trip(cpus: set[int]) -> None:
    assert parse_cpu_list(ranges(cpus) + "\n") == tuple(sorted(cpus))


def test_cpu_lists_as_the_kernel_writes_them() -> None:
    assert [ranges(cpus) for cpus in ([], [3], [1, 0, 2, 8], [0, 2, 3])] == ["", "3", "0-2,8", "0,2-3"]


@given(st.text(st.sampled_from("ab \t\n\\#040é"), max_size=20))
def test_mount_names_survive_the_kernels_escaping(name: str) -> None:
    escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\#" else c for c in f"/mnt/{name}")
    (mount,) = mounts.parse_proc_mounts(f"source {escaped} ext4 rw 0 0\n")
    assert mount.target == f"/mnt/{name}"
