"""Measurements between nodes, on real nodes: a planted fault is named, and nothing else; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from r4090c.errors import Exit
from tests.lab import Lab, wiring
from tests.test_preflight import REPOSITORY, ask, bad, changed, r4090c

pytestmark = pytest.mark.lab

WITHOUT_IPERF3 = (
    "mkdir -p /tmp/upper /tmp/work"
    " && mount -t overlay overlay -o lowerdir=/usr/bin,upperdir=/tmp/upper,workdir=/tmp/work /usr/bin && rm /usr/bin/iperf3"
)
CLIENT_DIES = '#!/bin/sh\ncase " $* " in *" -c "*) (sleep 0.4; kill -9 $$) & ;; esac\nexec /usr/bin/iperf3 "$@"\n'
"""A stand-in that starts the real iperf3 and kills it in the middle of the test when it is a client."""


def limit(lab: Lab, node: str, rate: str, *, sends: bool) -> None:
    """Limit only what `node` sends, or only what it receives."""
    namespace, device = (lab.node(node).namespace, "eth0") if sends else (lab.switch, node)
    wiring.tool("tc", "-netns", namespace, "qdisc", "replace", "dev", device, "root", *wiring.shaping(rate))


def findings(answer: dict[str, Any], check: str) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in answer["findings"] if finding["check"] == check}


def measured(bundle: Path, name: str) -> dict[str, Any]:
    with tarfile.open(bundle) as tar:
        file = tar.extractfile(f"measurements/{name}.json")
        assert file is not None
        value: dict[str, Any] = json.load(file)
        return value


def with_expect(lab: Lab, folder: Path, **expect: Any) -> Path:
    """A copy of the lab's cluster.yaml with some thresholds of its own."""
    wish = yaml.safe_load(lab.cluster_file.read_text())
    wish["expect"] = {**wish.get("expect", {}), **expect}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(wish))
    return file


# --------------------------------------------------------------------------- bandwidth


@pytest.mark.slow
def test_a_node_that_sends_slowly_is_named_with_the_direction(mended_lab4: Lab) -> None:
    for name in mended_lab4.nodes:
        mended_lab4.shape(name, "100mbit")
    limit(mended_lab4, "node02", "10mbit", sends=True)
    code, answer = ask(mended_lab4, "--only", "bandwidth")
    assert (code, bad(answer)) == (Exit.FAILED, {("tcp-bandwidth", "node02", "fail")})
    finding = findings(answer, "tcp-bandwidth")["node02"]
    assert finding["observed"].startswith("sends slowly: 0.00") and "not tested again" not in finding["observed"]
    assert "ethtool eth0" in finding["remedy"]
    assert {finding["subject"] for finding in answer["findings"]} == {*mended_lab4.nodes}  # the others pass


@pytest.mark.long
def test_one_slow_link_of_sixteen_nodes_is_named_in_fifteen_rounds(lab: Callable[..., Lab], tmp_path: Path) -> None:
    running = lab(nodes=16)
    for name in running.nodes:
        running.shape(name, "50mbit")
    limit(running, "node07", "5mbit", sends=False)
    cluster_file, bundle = with_expect(running, tmp_path, tcp_streams=1), tmp_path / "b.tar.gz"
    words = ("preflight", "--full", "--only", "bandwidth", "--json", "--save", str(bundle))
    done = r4090c("--cluster", str(cluster_file), *words, timeout=200)
    assert done.returncode == Exit.FAILED, done.stderr
    answer = json.loads(done.stdout)
    assert bad(answer) == {("tcp-bandwidth", "node07", "fail")}
    assert findings(answer, "tcp-bandwidth")["node07"]["observed"].startswith("receives slowly: 0.00")
    rounds = measured(bundle, "tcp")["rounds"]
    stages = [one[0]["data"]["stage"] for one in rounds]
    assert stages[:15] == ["screening"] * 15 and stages.count("screening") == 15
    assert {*stages[15:]} == {"again"} and len(stages) <= 17
    pairs = [frozenset(record["parts"]) for one in rounds[:15] for record in one]
    assert len(pairs) == len({*pairs}) == 120


@pytest.mark.slow
def test_what_cannot_connect_is_not_known_and_says_where(mended_lab4: Lab) -> None:
    rules = (
        'nft add table inet f && nft "add chain inet f i { type filter hook input priority 0; }"'
        " && nft add rule inet f i tcp dport 1024-65535 ct state new drop"
    )
    with changed(mended_lab4, "node03", rules, "nft delete table inet f"):
        code, answer = ask(mended_lab4, "--only", "tcp-bandwidth")
    assert code == Exit.UNKNOWN
    assert bad(answer) == {("tcp-bandwidth", "node02->node03", "unknown")}
    finding = findings(answer, "tcp-bandwidth")["node02->node03"]
    assert "timed out" in finding["observed"]
    assert finding["remedy"].endswith("preflight --only ports")


def test_without_iperf3_a_node_is_skipped_and_told_how_to_install_it(mended_lab4: Lab) -> None:
    with changed(mended_lab4, "node02", WITHOUT_IPERF3, "umount -l /usr/bin"):
        code, answer = ask(mended_lab4, "--only", "tcp-bandwidth")
    assert (code, bad(answer)) == (Exit.OK, set())
    found = findings(answer, "tcp-bandwidth")
    assert {subject: one["status"] for subject, one in found.items()} == {
        "node01": "pass",
        "node02": "skip",
        "node03": "pass",
        "node04": "pass",
    }
    assert "apt-get install -y iperf3" in found["node02"]["remedy"] and mended_lab4.address("node02") in found["node02"]["remedy"]


def test_a_client_that_dies_is_not_a_slow_link(mended_lab4: Lab) -> None:
    stand_in = mended_lab4.stand_in("node02", "iperf3", CLIENT_DIES)
    try:
        code, answer = ask(mended_lab4, "--only", "tcp-bandwidth")
    finally:
        stand_in.unlink()
    assert (code, bad(answer)) == (Exit.UNKNOWN, {("tcp-bandwidth", "node02->node03", "unknown")})
    assert "not measured" in findings(answer, "tcp-bandwidth")["node02->node03"]["observed"]
    assert leftovers(mended_lab4) == []


@pytest.mark.parametrize("after_s", [1.5, 3.0])
def test_ctrl_c_in_a_round_leaves_no_process(mended_lab4: Lab, after_s: float) -> None:
    words = ["--cluster", str(mended_lab4.cluster_file), "preflight", "--full", "--only", "bandwidth,ssh-mesh"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from r4090c.cli import main; main()", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "R4090C_STATE": "/dev/null"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    deadline = time.monotonic() + 120
    while not any("iperf3" in line for name in mended_lab4.nodes for _, line in mended_lab4.processes(name)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(after_s - 1.0)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == Exit.INTERRUPTED, told
    assert leftovers(mended_lab4) == []


def leftovers(lab: Lab, within_s: float = 30.0) -> list[str]:
    """What still runs on any node, or lies in its /tmp, once there was time to end."""
    deadline = time.monotonic() + within_s
    while True:
        left = [line for name in lab.nodes for _, line in lab.processes(name)]
        left += [line for name in lab.nodes for line in lab.exec(name, "ls", "/tmp").stdout.split() if "r4090c" in line]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


# --------------------------------------------------------------------------- packets and logins


def test_a_narrow_switch_port_is_found_by_the_size_of_packets(mended_lab4: Lab) -> None:
    wiring.tool("ip", "-netns", mended_lab4.switch, "link", "set", "node03", "mtu", "1400")
    try:
        code, answer = ask(mended_lab4, "--only", "nic")
    finally:
        wiring.tool("ip", "-netns", mended_lab4.switch, "link", "set", "node03", "mtu", "1500")
    assert (code, bad(answer)) == (Exit.FAILED, {("path-mtu", "node03", "fail")})
    finding = findings(answer, "path-mtu")["node03"]
    assert "packets of 1500 bytes do not get through" in finding["observed"] and "1400 pass" in finding["observed"]


def test_an_interface_with_a_smaller_mtu_is_mended_by_the_remedy(mended_lab4: Lab) -> None:
    with changed(mended_lab4, "node02", "ip link set eth0 mtu 1400", "ip link set eth0 mtu 1500"):
        _, answer = ask(mended_lab4, "--only", "path-mtu")
        finding = findings(answer, "path-mtu")["node02"]
        assert bad(answer) == {("path-mtu", "node02", "fail")}
        assert "message too long, mtu=1400" in finding["observed"]
        subprocess.run(ssh_of_the_lab(mended_lab4, finding["remedy"]), shell=True, check=True, timeout=20)  # noqa: S602
        code, answer = ask(mended_lab4, "--only", "path-mtu")
    assert (code, bad(answer)) == (Exit.OK, set())


def ssh_of_the_lab(lab: Lab, remedy: str) -> str:
    """The remedy as a person would paste it, with the lab's known_hosts where theirs would be."""
    assert remedy.startswith("ssh ")
    return remedy.replace("ssh ", f"ssh -F /dev/null -o UserKnownHostsFile={lab.known_hosts} -o BatchMode=yes ", 1)


def test_a_node_that_the_others_do_not_trust_is_named(mended_lab4: Lab) -> None:
    with changed(mended_lab4, "node02", "mv ~/.ssh ~/.ssh-away", "mv ~/.ssh-away ~/.ssh"):
        code, answer = ask(mended_lab4, "--only", "ssh-mesh", "--full")
    assert (code, bad(answer)) == (Exit.FAILED, {("ssh-mesh", "node02", "fail")})
    finding = findings(answer, "ssh-mesh")["node02"]
    assert finding["observed"].startswith("cannot log in to")
    assert finding["remedy"].endswith("provision ssh-trust")


def test_provision_ssh_trust_is_what_mends_the_logins(lab: Callable[..., Lab], tmp_path: Path) -> None:
    running = lab(nodes=2, trust=False)
    code, answer = ask(running, "--only", "ssh-mesh")
    assert (code, bad(answer)) == (Exit.FAILED, {("ssh-mesh", "lab", "fail")})
    done = r4090c("--cluster", str(running.cluster_file), "provision", "ssh-trust", "--yes", state=tmp_path)
    assert done.returncode == Exit.OK, done.stderr
    code, answer = ask(running, "--only", "ssh-mesh")
    assert (code, bad(answer)) == (Exit.OK, set())
