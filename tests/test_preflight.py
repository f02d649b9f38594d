"""The preflight as a whole: on this machine, on the lab's nodes over real SSH, and from a bundle."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from netcheck.bundle import save_bundle
from netcheck.checks import REGISTRY
from netcheck.measure.job import Level
from netcheck.preflight import read_clocks_again, run_preflight, select_checks
from netcheck.raw import Raw, parse_raw
from r4090c.errors import Exit
from r4090c.model import Cluster, Expect, Finding, Network, Node, Paths, Ssh, Status, Storage
from r4090c.remote import NodeError, Verdict
from tests.facts.local import LocalShell
from tests.lab import Lab

REPOSITORY = Path(__file__).resolve().parents[1]


class LocalFleet:
    """A remote.Fleet whose nodes are this machine; it stands at the process boundary, where SSH would be."""

    def __init__(self, nodes: Iterable[Node], lost: Iterable[str] = ()) -> None:
        self.shells = {node.name: LocalShell(node) for node in nodes}
        self.lost = set(lost)

    def map(self, function: Callable[[Any], Any], nodes: Iterable[str] | None = None) -> dict[str, Any]:
        names = list(self.shells if nodes is None else nodes)

        def one(name: str) -> Any:
            if name in self.lost:
                return NodeError(name, Verdict.TIMEOUT, "no answer from 10.0.0.9:22 in 5 s", "a node that is up", f"ping {name}")
            return function(self.shells[name])

        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            return dict(zip(names, pool.map(one, names), strict=True))

    def shell(self, name: str) -> LocalShell:
        if name in self.lost:
            raise NodeError(name, Verdict.TIMEOUT, "no answer from 10.0.0.9:22 in 5 s", "a node that is up", f"ping {name}")
        return self.shells[name]

    def close(self) -> None:
        """Nothing is open."""


def local_cluster(shared: Path, *names: str) -> Cluster:
    """Nodes that are all this machine, as `r4090c demo` has them."""
    shared.mkdir(exist_ok=True)
    paths = Paths(str(shared), str(shared / "runs"), sys.executable)
    nodes = tuple(Node(name, Ssh("127.0.0.1", user="train"), "127.0.0.1", 0, paths) for name in names)
    expect = Expect(disk_free_min_gib=0.001, tmp_free_min_gib=0.001, inodes_free_min=1, nofile_min=1, clock_skew_warn_s=2.0)
    return Cluster("local", nodes, Network("loopback"), Storage("local"), expect)


def preflight(cluster: Cluster, lost: Iterable[str] = (), **how: Any) -> tuple[Raw, list[Finding]]:
    fleet: Any = LocalFleet(cluster.nodes, lost)
    raw, _, findings = run_preflight(fleet, cluster, cluster.nodes, **how)
    return raw, findings


def by_check(findings: Iterable[Finding], check: str) -> dict[str, str]:
    return {finding.subject: finding.status.value for finding in findings if finding.check == check}


# --------------------------------------------------------------------------- this machine


def test_this_machine_is_read_measured_and_judged(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path / "shared", "n1", "n2", "n3")
    told: list[str] = []
    raw, findings = preflight(cluster, progress=told.append)
    assert by_check(findings, "shared-path") == {"n1": "pass", "n2": "pass", "n3": "pass"}
    assert by_check(findings, "free-ports") == {"n1": "pass", "n2": "pass", "n3": "pass"}
    assert by_check(findings, "clock-skew") == {"n1": "pass", "n2": "pass", "n3": "pass"}
    assert by_check(findings, "disk-space") == {"n1": "pass", "n2": "pass", "n3": "pass"}
    # Demo nodes are one machine without GPUs: checks that this does not concern say nothing, all others say something.
    concerned = [check for check in REGISTRY if any(check.applies(node, cluster) for node in cluster.nodes)]
    assert {finding.check for finding in findings} == {check.id for check in concerned}
    assert list((tmp_path / "shared").iterdir()) == []
    assert json.loads(json.dumps(raw.measurements)) == raw.measurements
    assert told == ["reading 3 nodes", "measuring between 3 nodes"]


def test_quick_writes_and_opens_nothing(tmp_path: Path) -> None:
    raw, findings = preflight(local_cluster(tmp_path / "shared", "n1", "n2"), level=Level.QUICK)
    assert raw.measurements == {}
    assert by_check(findings, "shared-path") == by_check(findings, "free-ports") == {"local": "skip"}


def test_only_what_the_chosen_checks_need_is_measured(tmp_path: Path) -> None:
    raw, findings = preflight(local_cluster(tmp_path / "shared", "n1", "n2"), checks=select_checks(["storage"], []))
    assert set(raw.measurements) == {"nonce"}
    assert {finding.check for finding in findings} == {check.id for check in REGISTRY if check.group == "storage"}


def test_a_lost_node_is_unknown_in_every_group(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path / "shared", "n1", "n2")
    _, findings = preflight(cluster, lost=["n2"], checks=select_checks(["storage", "time", "ports"], []))
    assert {finding.status for finding in findings if finding.subject == "n2"} == {Status.UNKNOWN}
    assert {finding.check for finding in findings if finding.subject == "n2"} == {
        "mount",
        "storage-answers",
        "disk-space",
        "shared-path",
        "caches",
        "clock-skew",
        "time-daemon",
        "free-ports",
    }


def test_two_folders_of_one_name_are_no_shared_folder(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path / "shared", "n1", "n2", "n3")
    other = tmp_path / "own"
    other.mkdir()
    odd = replace(cluster.nodes[2], paths=replace(cluster.nodes[2].paths, shared=str(other)))
    cluster = replace(cluster, nodes=(*cluster.nodes[:2], odd))
    _, findings = preflight(cluster, checks=select_checks(["shared-path"], []))
    assert by_check(findings, "shared-path") == {"n1": "pass", "n2": "pass", "n3": "fail"}
    assert list(other.iterdir()) == []


def test_a_clock_read_too_coarsely_is_read_again(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path / "shared", "n1", "n2", "n3")
    raw, _ = preflight(cluster, level=Level.QUICK)
    slow = {**raw.answers["n2"], "sent_at_s": raw.answers["n2"]["sent_at_s"] - 8.0}  # an answer that was 8 s on its way
    coarse = replace(raw, answers={**raw.answers, "n2": slow})
    fleet: Any = LocalFleet(cluster.nodes)
    closer = read_clocks_again(fleet, coarse, 1.0)
    clocks = [facts.clock.value for facts in parse_raw(closer, cluster).values()]
    assert all(clock is not None and clock.error_bound_s < 2 and abs(clock.offset_s) < 2 for clock in clocks)
    assert closer.answers["n1"] == raw.answers["n1"]
    assert closer.answers["n2"]["answers"] == raw.answers["n2"]["answers"]
    lost: Any = LocalFleet(cluster.nodes, lost=["n2"])
    assert read_clocks_again(lost, coarse, 1.0) == coarse


# --------------------------------------------------------------------------- the command, offline


def r4090c(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line, in a folder without cluster.yaml unless told; `state` is where history goes, by default nowhere."""
    state = how.pop("state", "/dev/null")
    how = {"cwd": "/", "timeout": 240, **how}
    environment = {key: value for key, value in os.environ.items() if key != "R4090C_CLUSTER"} | {"R4090C_STATE": str(state)}
    return subprocess.run(
        [sys.executable, "-c", "from r4090c.cli import main; main()", *words],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        **how,
    )


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three bundles of this machine: all is well, a clock is off, a node was not reached."""
    folder = tmp_path_factory.mktemp("bundles")
    cluster = local_cluster(folder / "shared", "n1", "n2", "n3")
    raw, _ = preflight(cluster, checks=select_checks([], ["free-ports"]))
    late = raw.answers["n2"]
    shift_ns = 20_000_000_000
    answers = {
        **raw.answers,
        "n2": {**late, "time_ns_received": late["time_ns_received"] + shift_ns, "time_ns_sent": late["time_ns_sent"] + shift_ns},
    }
    lost, _ = preflight(cluster, lost=["n3"], level=Level.QUICK)
    kept = {"fit": raw, "skewed": replace(raw, answers=answers), "lost": lost}
    for name, one in kept.items():
        save_bundle(folder / f"{name}.tar.gz", cluster, one)
    return {name: folder / f"{name}.tar.gz" for name in kept}


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [("fit", Exit.OK, "fit"), ("skewed", Exit.FAILED, "not fit"), ("lost", Exit.UNKNOWN, "could not tell")],
)
def test_a_bundle_is_judged_offline(bundles: dict[str, Path], name: str, code: Exit, word: str) -> None:
    # version-agreement depends on what the Python that runs the tests has installed
    done = r4090c("preflight", "--from", str(bundles[name]), "--skip", "software", "--json")
    assert done.returncode == code, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    keys = ["schema", "cluster", "started_at", "duration_s", "verdict", "findings", "facts_file", "level", "figures"]
    assert list(answer) == keys
    assert (answer["schema"], answer["cluster"], answer["verdict"]) == ("r4090c.preflight/1", "local", word)
    assert answer["facts_file"] == str(bundles[name])
    assert all(
        list(finding) == ["check", "subject", "status", "observed", "expected", "why", "remedy"] for finding in answer["findings"]
    )


def test_the_screen_names_the_node_and_the_remedy(bundles: dict[str, Path]) -> None:
    done = r4090c("preflight", "--from", str(bundles["skewed"]), "--only", "time")
    assert done.returncode == Exit.FAILED
    first, *rest = done.stdout.splitlines()
    assert first.startswith("local: not fit   1 failed on n2")
    assert any("n2" in line and "clock-skew" in line and "ahead" in line for line in rest)
    assert any(line.strip().startswith("fix: ssh -t train@127.0.0.1 'sudo ") for line in rest)
    assert done.stderr == ""


def test_a_choice_of_nodes_of_a_bundle(bundles: dict[str, Path]) -> None:
    done = r4090c("preflight", "--from", str(bundles["lost"]), "--only", "access", "--nodes", "n1,n2")
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert "n3" not in done.stdout


def test_a_reader_that_goes_away_is_no_error(bundles: dict[str, Path]) -> None:
    command = f"{sys.executable} -c 'from r4090c.cli import main; main()' preflight --from {bundles['fit']} -v; echo $? >&2"
    done = subprocess.run(
        ["sh", "-c", f"({command}) | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout.startswith("local: ")
    assert "Traceback" not in done.stderr and "Broken pipe" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--only", "clok-skew"),
        ("--skip", "nothing-like-it"),
        ("--nodes", "n9"),
        ("--save", "x.tar.gz"),
        ("--quick",),
        ("--cluster", "cluster.yaml"),
    ],
)
def test_mistakes_of_the_command_line(bundles: dict[str, Path], words: tuple[str, ...]) -> None:
    done = r4090c("preflight", "--from", str(bundles["fit"]), *words)
    assert done.returncode == Exit.USAGE
    assert done.stderr.startswith("error: --") and "expected:" in done.stderr
    assert done.stdout == ""


def test_a_bundle_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "b.tar.gz").write_bytes(b"nothing")
    for file in ("b.tar.gz", "missing.tar.gz"):
        assert r4090c("preflight", "--from", str(tmp_path / file)).returncode == Exit.USAGE


def test_a_choice_of_nodes_counts_only_their_measurements(tmp_path: Path) -> None:
    """n3 has another folder of the same name: judged without n3, nothing is wrong."""
    cluster = local_cluster(tmp_path / "shared", "n1", "n2", "n3")
    other = tmp_path / "own"
    other.mkdir()
    odd = replace(cluster.nodes[2], paths=replace(cluster.nodes[2].paths, shared=str(other)))
    cluster = replace(cluster, nodes=(*cluster.nodes[:2], odd))
    raw, _ = preflight(cluster, checks=select_checks(["shared-path"], []))
    save_bundle(tmp_path / "b.tar.gz", cluster, raw)
    words = ("preflight", "--from", str(tmp_path / "b.tar.gz"), "--only", "shared-path", "--json")
    assert r4090c(*words).returncode == Exit.FAILED
    done = r4090c(*words, "--nodes", "n1,n2")
    assert done.returncode == Exit.OK
    assert {(one["subject"], one["status"]) for one in json.loads(done.stdout)["findings"]} == {("n1", "pass"), ("n2", "pass")}


# --------------------------------------------------------------------------- the command, to a node that refuses


@pytest.fixture
def refusing(tmp_path: Path) -> Path:
    """A cluster.yaml with one node where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f'name: one\nssh: {{port: {port}, config: ""}}\nnodes:\n  - {{name: n1, address: 127.0.0.1, gpus: 0}}\n'
        "network: {kind: tcp}\nstorage: {kind: local}\npaths: {shared: /tmp, python: /usr/bin/python3}\n"
    )
    return file


def test_an_unwritable_file_does_not_lose_the_report(refusing: Path, tmp_path: Path) -> None:
    words = ("--cluster", str(refusing), "preflight", "--quick", "--save", str(tmp_path / "no" / "b.tar.gz"))
    done = r4090c(*words, state=tmp_path / "state")
    assert done.returncode == Exit.UNKNOWN  # what the report says comes first
    assert done.stdout.startswith("one: could not tell")
    assert "b.tar.gz: cannot be written" in done.stderr and "saved" not in done.stderr
    shown = r4090c("--cluster", str(refusing), "facts", "--save", str(tmp_path / "no" / "b.tar.gz"))
    assert shown.returncode == Exit.UNKNOWN
    assert "n1" in shown.stdout and "b.tar.gz: cannot be written" in shown.stderr


def test_a_preflight_is_remembered_and_a_replay_is_not(refusing: Path, tmp_path: Path) -> None:
    state, bundle = tmp_path / "state", tmp_path / "b.tar.gz"
    done = r4090c("--cluster", str(refusing), "preflight", "--quick", "--save", str(bundle), state=state)
    assert (done.returncode, done.stderr) == (Exit.UNKNOWN, f"saved: {bundle}\n")
    r4090c("preflight", "--from", str(bundle), state=state)
    with closing(sqlite3.connect(state / "r4090c.db")) as database:
        rows = database.execute("SELECT cluster, nodes, verdict, findings FROM preflight").fetchall()
    ((cluster, nodes, word, findings),) = rows
    assert (cluster, json.loads(nodes), word) == ("one", ["n1"], "could not tell")
    assert {one["status"] for one in json.loads(findings)} <= {"unknown", "skip"}


def test_history_that_cannot_be_kept_is_only_a_warning(refusing: Path, tmp_path: Path) -> None:
    done = r4090c("--cluster", str(refusing), "preflight", "--quick", state="/dev/null/state")
    assert done.returncode == Exit.UNKNOWN
    assert done.stdout.startswith("one: could not tell")
    assert done.stderr.startswith("warning: ")


# --------------------------------------------------------------------------- the lab: real SSH to real nodes

needs_lab = pytest.mark.lab


def ask(lab: Lab, *words: str) -> tuple[int, dict[str, Any]]:
    done = r4090c("--cluster", str(lab.cluster_file), "preflight", "--json", *words)
    assert done.returncode in (Exit.OK, Exit.FAILED, Exit.UNKNOWN), done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def bad(answer: dict[str, Any]) -> set[tuple[str, str, str]]:
    """What is neither pass nor skip: (check, subject, status)."""
    return {
        (finding["check"], finding["subject"], finding["status"])
        for finding in answer["findings"]
        if finding["status"] not in ("pass", "skip")
    }


def inside(lab: Lab, node: str, command: str) -> None:
    done = lab.exec(node, "sh", "-c", command)
    assert done.returncode == 0, done.stderr


@contextmanager
def changed(lab: Lab, node: str, do: str, undo: str) -> Iterator[None]:
    inside(lab, node, do)
    try:
        yield
    finally:
        inside(lab, node, undo)


@needs_lab
def test_a_healthy_lab_is_fit_without_a_warning_and_left_as_it_was(lab4: Lab, tmp_path: Path) -> None:
    before = sorted(lab4.shared.iterdir())
    code, answer = ask(lab4, "--save", str(tmp_path / "b.tar.gz"))
    assert (code, answer["verdict"], bad(answer)) == (Exit.OK, "fit", set())
    assert sorted(lab4.shared.iterdir()) == before
    told = {finding["subject"] for finding in answer["findings"] if finding["observed"] != "not measured"}  # that takes --full
    assert told == {"node01", "node02", "node03", "node04"}
    again = r4090c("preflight", "--from", str(tmp_path / "b.tar.gz"), "--json")
    assert again.returncode == Exit.OK
    replayed = json.loads(again.stdout)["findings"]
    # Remedies name the key, which no bundle holds; there is no remedy in a healthy lab.
    assert replayed == answer["findings"]


@needs_lab
def test_a_node_that_is_not_reached_could_not_be_told(mended_lab4: Lab) -> None:
    mended_lab4.stop_sshd("node02")
    code, answer = ask(mended_lab4)
    assert code == Exit.UNKNOWN
    assert {subject for _, subject, _ in bad(answer)} == {"node02"}
    assert ("ssh-reach", "node02", "unknown") in bad(answer)


@needs_lab
def test_a_firewall_is_found_and_the_node_named(lab4: Lab) -> None:
    rules = (
        'nft add table inet f && nft "add chain inet f i { type filter hook input priority 0; }"'
        " && nft add rule inet f i tcp dport 1024-65535 ct state new drop"
    )
    with changed(lab4, "node03", rules, "nft delete table inet f"):
        code, answer = ask(lab4, "--only", "ports")
    assert (code, bad(answer)) == (Exit.FAILED, {("free-ports", "node03", "fail")})
    (finding,) = [finding for finding in answer["findings"] if finding["status"] == "fail"]
    assert "no other node connects to port" in finding["observed"] and "timed out" in finding["observed"]


@needs_lab
def test_what_is_wrong_on_single_nodes_is_found_at_once(lab4: Lab) -> None:
    hosts = 'cat /etc/hosts > $HOME/before && sed "s/^.*[[:space:]]node01$/127.0.1.1 node01/" $HOME/before > /etc/hosts'
    rc = lab4.home("node04") / ".bashrc"
    rc.write_text("echo Welcome\n")
    try:
        with (
            changed(lab4, "node01", hosts, "cat $HOME/before > /etc/hosts"),
            changed(lab4, "node02", "ip link set eth0 mtu 1400", "ip link set eth0 mtu 1500"),
            changed(lab4, "node03", f"mount -t tmpfs -o size=30g none {lab4.shared}", f"umount {lab4.shared}"),
        ):
            code, answer = ask(lab4)
    finally:
        rc.unlink()
    assert code == Exit.FAILED
    assert bad(answer) == {
        ("name-resolution", "node01", "fail"),
        ("ssh-mesh", "node01->node01", "fail"),  # by that name nobody listens
        ("data-interface", "node02", "fail"),
        ("path-mtu", "node02", "fail"),
        ("shared-path", "node03", "fail"),
        ("remote-shell", "node04", "fail"),
        ("ssh-mesh", "node04", "fail"),
    }


@needs_lab
def test_a_changed_host_key_is_not_trusted(lab4: Lab, tmp_path: Path) -> None:
    words = [line.split() for line in lab4.known_hosts.read_text().splitlines() if line.strip()]
    first, second = words[0][0], words[1][0]
    swapped = {first: second, second: first}
    known = tmp_path / "known_hosts"
    known.write_text("".join(" ".join([swapped.get(host, host), *rest]) + "\n" for host, *rest in words))
    wish = lab4.cluster_file.read_text().replace(str(lab4.known_hosts), str(known))
    (tmp_path / "cluster.yaml").write_text(wish)
    done = r4090c("--cluster", str(tmp_path / "cluster.yaml"), "preflight", "--quick", "--only", "access", "--json")
    assert done.returncode == Exit.FAILED
    failed = {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"] if finding["status"] == "fail"}
    assert {finding["check"] for finding in failed.values()} == {"host-key"}
    assert set(failed) == {"node01", "node02"}
    assert all("ssh-keygen" in finding["remedy"] and lab4.address(name) in finding["remedy"] for name, finding in failed.items())


@needs_lab
@pytest.mark.parametrize("after_s", [0.5, 0.9, 1.3])
def test_ctrl_c_leaves_nothing_behind(lab4: Lab, after_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from r4090c.cli import main; main()", "--cluster", str(lab4.cluster_file), "preflight"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    # a fast machine may be done by then, and a slow one not yet in main()
    assert process.returncode in (Exit.INTERRUPTED, Exit.OK, -signal.SIGINT), told
    deadline = time.monotonic() + 30
    listening, files = "", [""]
    while time.monotonic() < deadline:
        listening = "".join(lab4.exec(node, "ss", "-Hltn", "sport != :22").stdout for node in lab4.nodes)
        files = [entry.name for entry in lab4.shared.iterdir() if "nonce" in entry.name]
        if not listening and not files:
            break
        time.sleep(0.1)
    assert (listening, files) == ("", [])


@needs_lab
def test_a_killed_controller_leaves_no_file_and_no_process(lab4: Lab) -> None:
    before = sorted(lab4.shared.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "r4090c", "--cluster", str(lab4.cluster_file), "preflight", "--only", "storage"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
    )
    while not any("nonce" in entry.name for entry in lab4.shared.iterdir()):
        assert process.poll() is None, "it ended before a file showed"
        time.sleep(0.005)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(lab4.processes(name) for name in lab4.nodes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert sorted(lab4.shared.iterdir()) == before


@needs_lab
def test_a_node_that_freezes_while_it_writes_is_given_up_and_the_others_are_judged(mended_lab4: Lab) -> None:
    """Everybody holds a file until all have read: not for so long that the others see theirs go."""
    frozen = '#!/bin/sh\ncase "$*" in *buffer.raw*) kill -STOP $$;; esac\nexec /usr/bin/python3 "$@"\n'
    stand_in = mended_lab4.stand_in("node02", "python3", frozen)
    before = sorted(mended_lab4.shared.iterdir())
    began = time.monotonic()
    try:
        code, answer = ask(mended_lab4, "--only", "shared-path")
    finally:
        for pid, _ in mended_lab4.processes("node02"):
            mended_lab4.kill("node02", pid)
        stand_in.unlink()
    assert time.monotonic() - began < 60
    assert code == Exit.UNKNOWN
    assert {finding["subject"]: finding["status"] for finding in answer["findings"]} == {
        "node01": "pass",
        "node02": "unknown",
        "node03": "pass",
        "node04": "pass",
    }
    assert sorted(mended_lab4.shared.iterdir()) == before
