"""`r4090c lock`: what a good cluster was like, in a file that changes only when the cluster does; and the drift from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck import lock as locks
from netcheck.bundle import load_bundle, save_bundle
from netcheck.figures import figures_of
from netcheck.judge import judge
from netcheck.raw import parse_raw
from r4090c.errors import Exit, ParseError, UsageError
from r4090c.lockfile import lock_path, read_lock, with_lock, write_lock
from r4090c.model import Expect
from tests.checks.cases import build
from tests.cli import run
from tests.lab import Lab
from tests.reports import machine, pairs_of, tcp_measured

NAMES = ("node01", "node02", "node03")


def made(case: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
    cluster, raw, facts = build({"measurements": {"tcp": tcp_measured(pairs_of(NAMES), lambda a, b: 24.0)}, **(case or {})})
    return locks.make(replace(cluster, **how), "full", facts, figures_of(raw.measurements, raw.reach))


# --------------------------------------------------------------------------- what is in it


def test_a_lock_holds_versions_topology_speeds_and_figures() -> None:
    lock = made()
    common = lock["common"]
    assert (lock["schema"], lock["cluster"], lock["level"]) == ("r4090c.lock/1", "atelier", "full")
    assert common["os.kernel"] == "6.8.0-45-generic"
    assert (common["python.torch"], common["python.nvidia-nccl-cu12"], common["python.deepspeed"]) == (
        "2.6.0",
        "2.21.5",
        "0.17.4",
    )
    assert (common["gpus.count"], common["gpus.driver"], common["gpus.0.power_limit_w"]) == (2, "550.90.07", 450.0)
    assert (common["net.enp65s0f0.mtu"], common["net.enp65s0f0.speed_mbit_s"]) == (9000, 100_000)
    assert common["rdma.mlx5_0:1.firmware"] == "16.35.3006"
    assert common["gpu_topology.GPU0-NIC0"] == "PHB"
    assert lock["nodes"] == {name: {} for name in NAMES}
    assert lock["figures"]["tcp"]["4 streams"]["values"]["node01->node02"] == 24.0
    assert not any("docker" in item for item in common), "what is down or virtual is not the cluster's"


def test_only_what_differs_is_told_by_node() -> None:
    lock = made({"facts": {"node02": {"os": {"kernel": "6.8.0-49-generic"}}}})
    assert "os.kernel" not in lock["common"]
    assert {name: own.get("os.kernel") for name, own in lock["nodes"].items()} == {
        "node01": "6.8.0-45-generic",
        "node02": "6.8.0-49-generic",
        "node03": "6.8.0-45-generic",
    }
    assert locks.read(lock).items["node02"]["os.kernel"] == "6.8.0-49-generic"
    assert locks.read(lock).items["node01"]["python.torch"] == "2.6.0"


def test_equal_clusters_give_equal_bytes_whenever_they_are_locked(tmp_path: Path) -> None:
    for name, case in (("a", {}), ("b", {"reach": {"node01": {"connect_s": 4.0}}, "facts": {"*": {"os": {"uptime_s": 7.0}}}})):
        write_lock(tmp_path / name, made(case))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert "2026" not in (tmp_path / "a").read_text()


def test_no_secret_is_in_a_lock() -> None:
    cluster, _, _ = build({})
    secret = "hunter2hunter2"
    nodes = tuple(
        replace(node, env={"A_TOKEN": secret}, ssh=replace(node.ssh, key="/home/alice/.ssh/id")) for node in cluster.nodes
    )
    text = json.dumps(made(nodes=nodes, env={"WANDB_API_KEY": secret}, file="/home/alice/cluster.yaml"))
    assert secret not in text and "alice" not in text and "192.168" not in text and "10.10" not in text


@pytest.mark.parametrize(
    ("item", "label"),
    [
        ("os.kernel", "kernel"),
        ("python.torch", "torch"),
        ("gpus.0.power_limit_w", "gpu0.power_limit_w"),
        ("gpus.driver", "gpu.driver"),
        ("gpus.1", "gpu1"),
        ("net.eth0.100.mtu", "eth0.100.mtu"),
        ("cpus.cores", "cpu.cores"),
        ("toolchain.cuda", "toolchain.cuda"),
        ("gpu_topology.GPU0-NIC0", "GPU0-NIC0"),
    ],
)
def test_items_have_names_for_people(item: str, label: str) -> None:
    assert locks.label(item) == label


def test_what_comes_or_goes_as_a_whole_is_one_change() -> None:
    card: dict[str, locks.Value] = {"gpus.0.model": "4090", "gpus.0.numa": 0}
    both: dict[str, locks.Value] = {**card, "gpus.1.model": "4090", "gpus.1.numa": 1, "gpus.count": 2}
    changed = [(one.item, one.was, one.now) for one in locks.changes(both, {**card, "gpus.count": 1}, Expect())]
    assert changed == [("gpus.1", "there", None), ("gpus.count", 2, 1)]
    assert ("gpus.1", None, "there") in [(one.item, one.was, one.now) for one in locks.changes(card, both, Expect())]
    assert locks.changes({"python.torch": "2"}, {}, Expect()) == [locks.Change("python.torch", "2", None)]


# --------------------------------------------------------------------------- reading it back


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "r4090c.lock/2"},
        {"schema": None},
        {"nodes": []},
        {"common": {"os.kernel": [1]}},
        {"common": {"os.kernel": True}},
        {"common": {"gpus.0.power_limit_w": float("nan")}},
        {"figures": {"tcp": 7}},
        {"figures": {"tcp": {"x": {"unit": "Gbit/s", "noise": "much", "values": {"a": 1}}}}},
        {"cluster": 7},
    ],
)
def test_what_is_no_lock_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ParseError):
        locks.read({**made(), **change})


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.dictionaries(st.text(max_size=6), inner)))
def test_any_json_is_a_lock_or_refused(value: Any) -> None:
    for candidate in (value, {**made(), "nodes": value}, {**made(), "figures": value}):
        try:
            locks.read(candidate)
        except ParseError:
            continue


def test_a_lock_lies_beside_its_cluster(tmp_path: Path) -> None:
    cluster, _, _ = build({})
    cluster = replace(cluster, file=str(tmp_path / "mine.yaml"))
    assert with_lock(cluster).lock is None
    write_lock(tmp_path / "mine.lock.json", made())
    assert with_lock(cluster).lock == made()
    assert lock_path("/x/cluster.yaml") == Path("/x/cluster.lock.json")
    with pytest.raises(UsageError, match="is the lock of 'atelier'"):
        with_lock(replace(cluster, name="other"))


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "[" * 100_000])
def test_a_file_that_is_no_lock_is_a_usage_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text(text)
    with pytest.raises(UsageError):
        read_lock(tmp_path / "l.json")
    assert read_lock(tmp_path / "none.json") is None
    with pytest.raises(UsageError):
        read_lock(tmp_path)


# --------------------------------------------------------------------------- bundles keep it


def test_a_bundle_keeps_the_lock_and_gives_the_same_findings(tmp_path: Path) -> None:
    cluster, raw = machine(tmp_path, "n1", "n2", rate=lambda sender, receiver: 9.4)
    facts = parse_raw(raw, cluster)
    lock = locks.make(cluster, "full", facts, figures_of(raw.measurements, raw.reach))
    lock["common"]["os.kernel"] = "1.0"
    lock["figures"]["tcp"]["4 streams"]["values"]["n1->n2"] = 12.0
    cluster = replace(cluster, lock=lock, file=str(tmp_path / "cluster.yaml"))
    save_bundle(tmp_path / "b.tar.gz", cluster, raw)
    again, raw_again = load_bundle(tmp_path / "b.tar.gz")
    assert again.lock == lock
    drift = [one for one in judge(cluster, raw, facts) if one.check == "drift"]
    assert [one for one in judge(again, raw_again, parse_raw(raw_again, again)) if one.check == "drift"] == drift
    assert {one.subject for one in drift if one.status.value == "warn"} == {"n1/kernel", "n2/kernel", "n1->n2/tcp-4-streams"}
    code, output, _ = run("preflight", "--from", "b.tar.gz", "--only", "drift", "--json", state=tmp_path)
    assert code == Exit.OK, "drift is a warning"
    told = {(one["subject"], one["status"], one["observed"]) for one in json.loads(output)["findings"]}
    assert told == {(one.subject, one.status.value, one.observed) for one in drift}


def test_a_forged_lock_in_a_bundle_is_unknown_and_no_fault(tmp_path: Path) -> None:
    cluster, raw = machine(tmp_path, "n1")
    save_bundle(tmp_path / "b.tar.gz", replace(cluster, lock={"schema": "r4090c.lock/1", "nodes": 7}), raw)
    code, output, _ = run("preflight", "--from", "b.tar.gz", "--only", "drift", state=tmp_path)
    assert code == Exit.UNKNOWN and "the lock is not understood" in output


# --------------------------------------------------------------------------- the command


def lock_from(tmp_path: Path, *words: str) -> tuple[int, str, str]:
    return run("lock", "--from", "b.tar.gz", "--output", "good.lock.json", *words, state=tmp_path)


def test_the_command_locks_what_a_bundle_holds(tmp_path: Path) -> None:
    save_bundle(tmp_path / "b.tar.gz", *machine(tmp_path, "n1", "n2", rate=lambda sender, receiver: 9.4))
    code, output, errors = lock_from(tmp_path, "--allow-unfit")
    assert (code, errors) == (Exit.OK, "")
    assert "\nlocked: good.lock.json   2 nodes, " in output and "2 figures" in output
    first = (tmp_path / "good.lock.json").read_bytes()
    code, output, _ = lock_from(tmp_path, "--allow-unfit")
    assert "as before" in output and (tmp_path / "good.lock.json").read_bytes() == first
    code, output, errors = lock_from(tmp_path, "--allow-unfit", "--json")
    assert json.loads(output) == json.loads(first)
    code, output, _ = run("lock", "--show", "--output", "good.lock.json", "--cluster", "x.yaml", state=tmp_path)
    assert code == Exit.OK and "kernel" in output and "tcp 4 streams" in output and "9.40 … 9.40 Gbit/s" in output


def test_an_unfit_cluster_is_not_locked(tmp_path: Path) -> None:
    cluster, raw = machine(tmp_path, "n1", "n2")
    late = raw.answers["n2"]
    shift_ns = 20_000_000_000
    late = {**late, "time_ns_received": late["time_ns_received"] + shift_ns, "time_ns_sent": late["time_ns_sent"] + shift_ns}
    save_bundle(tmp_path / "b.tar.gz", cluster, replace(raw, answers={**raw.answers, "n2": late}))
    code, output, errors = lock_from(tmp_path)
    assert code == Exit.FAILED and "clock-skew" in output and errors.startswith("not locked: ")
    assert not (tmp_path / "good.lock.json").exists()
    code, output, errors = lock_from(tmp_path, "--json")
    assert (code, output) == (Exit.FAILED, "") and "clock-skew" in errors
    assert lock_from(tmp_path, "--allow-unfit")[0] == Exit.OK


@pytest.mark.parametrize(
    "words",
    [
        ("lock", "--from", "b.tar.gz"),
        ("lock", "--from", "b.tar.gz", "--full", "--output", "l.json"),
        ("lock", "--show", "--cluster", "nowhere.yaml"),
        ("lock", "--from", "b.tar.gz", "--allow-unfit", "--output", "no/such/folder.json"),
    ],
)
def test_mistakes(words: tuple[str, ...], tmp_path: Path) -> None:
    save_bundle(tmp_path / "b.tar.gz", *machine(tmp_path, "n1"))
    code, _, errors = run(*words, state=tmp_path)
    assert code == Exit.USAGE and errors.startswith("error: ") and "next:" in errors


# --------------------------------------------------------------------------- the lab: a real cluster, locked and changed


@pytest.mark.lab
def test_a_locked_cluster_tells_what_drifts(lab4: Lab, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(lab4.cluster_file.read_text())

    def r4090c(*words: str) -> tuple[int, str, str]:
        return run("--cluster", str(file), *words, state=tmp_path)

    code, output, errors = r4090c("preflight", "--quick", "--diff")
    assert code == Exit.OK and "no earlier preflight" in output, errors
    code, output, errors = r4090c("lock", "--quick")
    assert code == Exit.OK and f"locked: {tmp_path}/cluster.lock.json" in output, errors
    code, output, _ = r4090c("preflight", "--quick", "--diff")
    assert code == Exit.OK and "drift" not in output.partition("passed")[0] and "nothing changed" in output
    assert lab4.exec("node02", "ip", "link", "set", "eth0", "mtu", "1400").returncode == 0
    try:
        code, output, _ = r4090c("preflight", "--quick", "--diff")
    finally:
        lab4.exec("node02", "ip", "link", "set", "eth0", "mtu", "1500")
    assert code == Exit.FAILED, "data-interface fails"
    assert "warn  node02/eth0.mtu  drift" in output and "eth0.mtu: 1400   expected: 1500 (locked)" in output
    assert "finding  node02  data-interface: pass → fail" in output
    assert "changed  node02  eth0.mtu: 1500 → 1400" in output
    code, output, _ = r4090c("preflight", "--quick", "--diff", "--json")
    assert code == Exit.OK
    diff = json.loads(output)["diff"]
    assert (diff["findings"], diff["items"]) == ([], []), "the MTU is back"
