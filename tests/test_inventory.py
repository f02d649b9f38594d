"""cluster.yaml -> Cluster or every mistake in it; --nodes; hostfiles; the JSON Schema and its reference in docs/.

`python -m tests.test_inventory` rewrites the golden files and the table in docs/cluster-yaml.md.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from r4090c import inventory
from r4090c.errors import Exit, InputErrors, UsageError
from r4090c.inventory import FILL_IN, expand_range, json_schema, load_cluster, load_cluster_text, parse_hostfile, select_nodes
from r4090c.model import Cluster, Expect, Paths, Ssh

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "inventory"
EXAMPLE = ROOT / "cluster.yaml"
DOCS = ROOT / "docs" / "cluster-yaml.md"
HOME = "/home/someone"

PATHS = "paths: {shared: /mnt/shared, python: /opt/venv/bin/python}\n"
HEAD = "name: atelier\n" + PATHS  # two lines: the node entries below start in line 4
ONE = "nodes:\n  - {name: node01, gpus: 8}\n"


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", HOME)  # does not exist: the defaults must not depend on whose machine this is


def load(text: str) -> Cluster:
    return load_cluster_text(text, "cluster.yaml")


def mistakes(call: Callable[[], object]) -> list[UsageError]:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.exit_code == Exit.USAGE
    return caught.value.errors if isinstance(caught.value, InputErrors) else [caught.value]


def mistake(text: str) -> UsageError:
    found = mistakes(lambda: load(text))
    assert len(found) == 1, [str(error) for error in found]
    return found[0]


# --------------------------------------------------------------------------- what loads


def test_example_is_resolved_as_the_golden_file_says() -> None:
    resolved = dataclasses.asdict(load_cluster(EXAMPLE))
    resolved["file"] = Path(resolved["file"]).name
    del resolved["expect"]  # checks add thresholds; what is pinned here is the resolution
    assert json.loads(json.dumps(resolved)) == json.loads((GOLDEN / "cluster.json").read_text())


def test_smallest_file() -> None:
    cluster = load(HEAD + ONE)
    (node,) = cluster.nodes
    assert node.ssh == Ssh("node01", known_hosts=(f"{HOME}/.config/r4090c/known_hosts",))
    assert node.data_address == "node01"
    assert node.paths == Paths("/mnt/shared", "/mnt/shared/r4090c/runs", "/opt/venv/bin/python")
    assert (cluster.name, cluster.file, cluster.expect, cluster.expect_origin) == ("atelier", "cluster.yaml", Expect(), {})
    assert (cluster.network.kind, cluster.network.subnet, cluster.network.rate_gbit_s, cluster.network.mtu) == (
        "tcp",
        None,
        None,
        None,
    )
    assert (cluster.storage.kind, cluster.storage.source, cluster.storage.mount) == ("nfs4", None, None)


def test_defaults_use_the_files_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    for name in ("config", "known_hosts"):
        (tmp_path / ".ssh" / name).touch()
    ssh = load(HEAD + ONE).nodes[0].ssh
    assert ssh.config == f"{tmp_path}/.ssh/config"
    assert ssh.known_hosts == (f"{tmp_path}/.ssh/known_hosts", f"{tmp_path}/.config/r4090c/known_hosts")
    stated = load(HEAD + ONE + 'ssh: {config: "", known_hosts: [~/mine, /etc/ssh/ssh_known_hosts]}\n').nodes[0].ssh
    assert (stated.config, stated.known_hosts) == ("", (f"{tmp_path}/mine", "/etc/ssh/ssh_known_hosts"))


def test_node_overrides() -> None:
    cluster = load(
        HEAD
        + """\
ssh: {user: train, port: 2200, key: ~/.ssh/id, jump: "ops@bastion:22", config: "", known_hosts: [], connect_timeout_s: 2}
env: {NCCL_DEBUG: WARN}
nodes:
  - {name: a, gpus: 8}
  - name: b
    address: fe80::1%eth0
    data_address: 10.0.0.2
    gpus: 0
    ssh: {user: root, port: 22, jump: "", key: /k}
    paths: {python: /data/venv/bin/python}
    env: {NCCL_SOCKET_NTHREADS: "2"}
"""
    )
    a, b = cluster.nodes
    assert a.ssh == Ssh("a", 2200, "train", f"{HOME}/.ssh/id", "ops@bastion:22", "", (), 2.0)
    assert b.ssh == Ssh("fe80::1%eth0", 22, "root", "/k", "", "", (), 2.0)
    assert (b.data_address, b.gpus, b.paths.python, b.env) == (
        "10.0.0.2",
        0,
        "/data/venv/bin/python",
        {"NCCL_SOCKET_NTHREADS": "2"},
    )
    assert (a.paths.python, a.env, cluster.env) == ("/opt/venv/bin/python", {}, {"NCCL_DEBUG": "WARN"})


def test_every_text_of_an_entry_may_carry_a_range() -> None:
    nodes = load(
        HEAD
        + """\
nodes:
  - name: n[08-10]
    address: 192.168.1.[8-10]
    data_address: 10.0.0.[8,9,20]
    gpus: 8
    ssh: {user: "u[1-3]", key: "/keys/[a]", known_hosts: ["/k[1-3]"]}
    paths: {python: "/v[1-3]/python"}
    env: {PLACE: "rack[1-3]", REGEX: "[a-z]+", INDEX: "[0]"}
  - {name: single, gpus: 8, env: {DIGITS: "[0-9]"}}
""".replace('key: "/keys/[a]", ', "")
    ).nodes
    assert [node.name for node in nodes] == ["n08", "n09", "n10", "single"]
    assert [node.ssh.address for node in nodes[:3]] == ["192.168.1.8", "192.168.1.9", "192.168.1.10"]
    assert [node.data_address for node in nodes[:3]] == ["10.0.0.8", "10.0.0.9", "10.0.0.20"]
    third = nodes[2]
    assert (third.ssh.user, third.ssh.known_hosts, third.paths.python) == ("u3", ("/k3",), "/v3/python")
    assert third.env == {"PLACE": "rack3", "REGEX": "[a-z]+", "INDEX": "[0]"}
    assert nodes[3].env == {"DIGITS": "[0-9]"}


def test_python_may_be_stated_by_every_node_instead() -> None:
    text = "name: a\npaths: {shared: /s}\nnodes: [{name: 'x[1-2]', gpus: 1, paths: {python: '/p[1-2]'}}]\n"
    assert [node.paths.python for node in load(text).nodes] == ["/p1", "/p2"]


def test_expect_overrides_carry_their_origin() -> None:
    cluster = load(HEAD + ONE + "expect: {clock_skew_warn_s: 1, python_min: [3, 10], nofile_min: 4096, memory_tolerance: .1}\n")
    assert (cluster.expect.clock_skew_warn_s, cluster.expect.python_min) == (1.0, (3, 10))
    assert (cluster.expect.nofile_min, cluster.expect.memory_tolerance) == (4096, 0.1)
    assert cluster.expect_origin == dict.fromkeys(
        ["clock_skew_warn_s", "python_min", "nofile_min", "memory_tolerance"], "cluster.yaml"
    )
    assert cluster.expect.clock_skew_fail_s == Expect().clock_skew_fail_s


def test_every_threshold_of_the_model_can_be_overridden() -> None:
    stated = {name.name: name.default for name in dataclasses.fields(Expect)}
    text = yaml.safe_dump({"expect": {key: list(value) if isinstance(value, tuple) else value for key, value in stated.items()}})
    cluster = load(HEAD + ONE + text)
    assert cluster.expect == Expect()
    assert set(cluster.expect_origin) == set(stated)


def test_anchors_and_merge_keys() -> None:
    cluster = load(
        HEAD
        + "nodes:\n  - &base {name: a, gpus: 8, env: &e {A: x}}\n"
        + "  - {<<: *base, name: b}\n  - {<<: [{gpus: 2}, *base], name: c, env: *e}\n"
    )
    assert [(node.name, node.gpus, node.env) for node in cluster.nodes] == [
        ("a", 8, {"A": "x"}),
        ("b", 8, {"A": "x"}),
        ("c", 2, {"A": "x"}),
    ]


def test_texts_that_yaml_1_1_would_mangle_stay_texts() -> None:
    cluster = load(
        HEAD + "nodes:\n  - {name: 2026-11-30, gpus: 8, env: {OCTAL: 010, HEX: 0x1F, TIME: 1:30:00, DATE: 2026-99-99}}\n"
    )
    assert cluster.nodes[0].name == "2026-11-30"
    assert cluster.nodes[0].env == {"OCTAL": "010", "HEX": "0x1F", "TIME": "1:30:00", "DATE": "2026-99-99"}


def test_paths_are_normalized() -> None:
    paths = load("name: a\npaths: {shared: //mnt///shared/, runs: /r/./x/, python: /p}\n" + ONE).nodes[0].paths
    assert paths == Paths("/mnt/shared", "/r/x", "/p")


def test_more_than_64_nodes() -> None:
    assert len(load(HEAD + "nodes: [{name: 'n[001-200]', gpus: 8}]\n").nodes) == 200


def test_one_machine_and_demo_may_use_loopback() -> None:
    assert load(HEAD + "nodes: [{name: localhost, gpus: 0}]\n").nodes[0].data_address == "localhost"
    demo = load(HEAD + "network: {kind: loopback}\nnodes: [{name: 'd[1-2]', address: 127.0.0.1, gpus: 0, ssh: {port: 2222}}]\n")
    assert [node.ssh.address for node in demo.nodes] == ["127.0.0.1"] * 2


def test_same_address_behind_two_ports_is_two_nodes() -> None:
    text = HEAD + "nodes:\n  - {name: a, address: nat, data_address: 10.0.0.1, gpus: 8, ssh: {port: 2201}}\n"
    assert len(load(text + "  - {name: b, address: nat, data_address: 10.0.0.2, gpus: 8, ssh: {port: 2202}}\n").nodes) == 2


def test_same_address_behind_two_jump_hosts_is_two_nodes() -> None:
    text = HEAD + "nodes:\n  - {name: a, address: inner, data_address: 10.0.0.1, gpus: 8, ssh: {jump: left}}\n"
    assert len(load(text + "  - {name: b, address: inner, data_address: 10.0.0.2, gpus: 8, ssh: {jump: right}}\n").nodes) == 2


# --------------------------------------------------------------------------- what does not: one case a class of mistake


def entry(text: str) -> str:
    """One node entry in line 4."""
    return HEAD + "nodes:\n  - {" + text + "}\n"


# name -> (text, "line: path", part of observed, part of expected, part of the hint)
CASES: dict[str, tuple[str, str, str, str, str]] = {
    # structure
    "unknown key": (
        HEAD + ONE + "netwrok: {}\n",
        "5: netwrok",
        "unknown key",
        "one of: name, ssh, nodes, network",
        "did you mean 'network'?",
    ),
    "unknown key in ssh": (
        HEAD + ONE + "ssh: {prot: 1}\n",
        "5: ssh.prot",
        "unknown key",
        "one of: user, port, key",
        "did you mean 'port'?",
    ),
    "unknown key in a node": (
        entry("name: a, gpus: 1, adress: b"),
        "4: nodes[0].adress",
        "unknown key",
        "data_address",
        "'address'?",
    ),
    "unknown key in a node's ssh": (
        entry("name: a, gpus: 1, ssh: {usr: b}"),
        "4: nodes[0].ssh.usr",
        "unknown key",
        "user",
        "'user'?",
    ),
    "unknown key in a node's paths": (
        entry("name: a, gpus: 1, paths: {pyton: /b}"),
        "4: nodes[0].paths.pyton",
        "unknown",
        "python",
        "'python'?",
    ),
    "unknown key in network": (
        HEAD + ONE + "network: {subnets: x}\n",
        "5: network.subnets",
        "unknown key",
        "rate_gbit_s",
        "'subnet'?",
    ),
    "unknown key in storage": (HEAD + ONE + "storage: {knd: x}\n", "5: storage.knd", "unknown key", "source", "'kind'?"),
    "unknown threshold": (
        HEAD + ONE + "expect: {clock_skew: 1}\n",
        "5: expect.clock_skew",
        "unknown key",
        "nofile_min",
        "clock_skew_",
    ),
    "another tool's key": (
        entry("name: a, gpus: 1, hostname: b"),
        "4: nodes[0].hostname",
        "unknown key",
        "address",
        "did you mean 'address'?",
    ),
    "a key of a section": (
        entry("name: a, gpus: 1, port: 22"),
        "4: nodes[0].port",
        "unknown key",
        "ssh",
        "it belongs under `ssh:`",
    ),
    "a shared path per node": (
        entry("name: a, gpus: 1, paths: {shared: /b}"),
        "4: nodes[0].paths.shared",
        "unknown",
        "python",
        "the top-level `paths:`",
    ),
    "missing name": (PATHS + ONE, "1: name", "missing", "Name of the cluster", "add `name:`"),
    "missing nodes": (HEAD, "1: nodes", "missing", "The nodes", "add `nodes:`"),
    "missing paths": ("name: a\n" + ONE, "1: paths", "missing", "Absolute paths", "add `paths:`"),
    "missing shared": (
        "name: a\npaths: {python: /p}\n" + ONE,
        "2: paths.shared",
        "missing",
        "same path on every node",
        "add `shared:`",
    ),
    "missing python": (
        "name: a\npaths: {shared: /p}\n" + ONE,
        "2: paths.python",
        "missing",
        "`paths` of each node",
        "add `python:`",
    ),
    "missing gpus": (entry("name: a"), "4: nodes[0].gpus", "missing", "0 = a CPU node", "add `gpus:`"),
    "missing node name": (entry("gpus: 1, address: b"), "4: nodes[0].name", "missing", "Name of the node", "add `name:`"),
    "no nodes": (HEAD + "nodes: []\n", "3: nodes", "no nodes", "at least one node", "- name:"),
    "nodes without value": (
        HEAD + "nodes:\n",
        "3: nodes",
        "nothing (the key has no value)",
        "a list of nodes, at least one",
        "remove the line",
    ),
    "section without value": (HEAD + ONE + "ssh:\n", "5: ssh", "nothing", "a mapping with any of: user, port", "write a value"),
    "nodes as a mapping": (HEAD + "nodes: {a: {gpus: 1}}\n", "3: nodes", "a mapping", "lines that start with `- name:`", ""),
    "node as a text": (
        HEAD + "nodes:\n  - node01\n",
        "4: nodes[0]",
        "'node01'",
        "a mapping with at least `name` and `gpus`",
        "{name: node01",
    ),
    "section as a list": (HEAD + ONE + "network: [roce]\n", "5: network", "a list", "a mapping with any of: kind", ""),
    "key that is a list": (HEAD + ONE + "ssh: {[a]: b}\n", "5: ssh.?", "a key that is not text", "a plain key", ""),
    "duplicate key": (
        HEAD + ONE + "ssh:\n  port: 22\n  user: a\n  port: 23\n",
        "8: ssh.port",
        "line 6 and in line 8",
        "each key once",
        "remove",
    ),
    "duplicate section": (
        HEAD + ONE + "env: {}\nenv: {}\n",
        "6: env",
        "stated twice, in line 5 and in line 6",
        "each key once",
        "",
    ),
    # texts
    "number as a name": ("name: 12\n" + PATHS + ONE, "1: name", "12", "text (Name of the cluster", 'quote it: "12"'),
    "truth value as a user": (HEAD + ONE + "ssh: {user: yes}\n", "5: ssh.user", "yes", "text (Login name", 'quote it: "yes"'),
    "shell in a node name": (entry("name: node;rm -rf, gpus: 1"), "4: nodes[0].name", "'node;rm -rf'", "letters, digits", ""),
    "path in a node name": (entry("name: ../x, gpus: 1"), "4: nodes[0].name", "'../x'", "letters, digits", ""),
    "option as a node name": (
        entry("name: -oProxyCommand=x, gpus: 1"),
        "4: nodes[0].name",
        "'-oProxyCommand=x'",
        "letter or digit at both ends",
        "",
    ),
    "newline in a node name": (entry('name: "a\\n", gpus: 1'), "4: nodes[0].name", r"'a\n'", "letters, digits", ""),
    "long node name": (
        entry(f"name: {'a' * 201}, gpus: 1"),
        "4: nodes[0].name",
        "(201 characters)",
        "at most 200 characters",
        "",
    ),
    "umlaut in a node name": (entry("name: knöten, gpus: 1"), "4: nodes[0].name", "'knöten'", "letters, digits", ""),
    "shell in the cluster's name": ("name: $(x)\n" + PATHS + ONE, "1: name", "'$(x)'", "letters, digits", ""),
    "name that is no address": (
        entry("name: a..b, gpus: 1"),
        "4: nodes[0].name",
        "'a..b'",
        "a name that is also an address",
        "add `address:`",
    ),
    "option as an address": (
        entry("name: a, gpus: 1, address: -oProxyCommand=x"),
        "4: nodes[0].address",
        "-oProxy",
        "a host name, an IPv4",
        "",
    ),
    "shell in an address": (
        entry("name: a, gpus: 1, address: 'b`x`'"),
        "4: nodes[0].address",
        "'b`x`'",
        "a host name, an IPv4",
        "",
    ),
    "port in an address": (entry("name: a, gpus: 1, address: 'b:22'"), "4: nodes[0].address", "'b:22'", "no port", ""),
    "octet above 255": (entry("name: a, gpus: 1, address: 10.0.0.256"), "4: nodes[0].address", "'10.0.0.256'", "an IPv4", ""),
    "zeros in an octet": (entry("name: a, gpus: 1, address: 10.0.0.010"), "4: nodes[0].address", "'10.0.0.010'", "an IPv4", ""),
    "address of nobody": (entry("name: a, gpus: 1, address: 0.0.0.0"), "4: nodes[0].address", "'0.0.0.0'", "an IPv4", ""),
    "multicast": (entry("name: a, gpus: 1, data_address: 224.0.0.1"), "4: nodes[0].data_address", "'224.0.0.1'", "an IPv4", ""),
    "shell in a zone": (
        entry("name: a, gpus: 1, address: 'fe80::1%;x'"),
        "4: nodes[0].address",
        "'fe80::1%;x'",
        "an IPv6 address",
        "",
    ),
    "option as a user": (HEAD + ONE + "ssh: {user: -oProxyCommand=x}\n", "5: ssh.user", "'-oProxyCommand=x'", "a user name", ""),
    "shell in a user": (entry("name: a, gpus: 1, ssh: {user: a b}"), "4: nodes[0].ssh.user", "'a b'", "a user name", ""),
    "option as a jump host": (HEAD + ONE + "ssh: {jump: -x}\n", "5: ssh.jump", "'-x'", "[user@]host[:port]", ""),
    "option behind a jump user": (HEAD + ONE + "ssh: {jump: 'u@-x'}\n", "5: ssh.jump", "'u@-x'", "[user@]host[:port]", ""),
    "port of a jump host": (HEAD + ONE + "ssh: {jump: 'b:0'}\n", "5: ssh.jump", "'b:0'", "[user@]host[:port]", ""),
    "two jump hosts": (HEAD + ONE + "ssh: {jump: 'a,b'}\n", "5: ssh.jump", "'a,b'", "one jump host", ""),
    # paths
    "relative shared": ("name: a\npaths: {shared: mnt, python: /p}\n" + ONE, "2: paths.shared", "'mnt'", "an absolute path", ""),
    "home on the nodes": (
        "name: a\npaths: {shared: ~/x, python: /p}\n" + ONE,
        "2: paths.shared",
        "'~/x'",
        "an absolute path",
        "on each node",
    ),
    "parent in a path": (
        "name: a\npaths: {shared: /a/../b, python: /p}\n" + ONE,
        "2: paths.shared",
        "'/a/../b'",
        "without '..'",
        "",
    ),
    "newline in a path": (
        'name: a\npaths: {shared: "/a\\nb", python: /p}\n' + ONE,
        "2: paths.shared",
        r"'/a\nb'",
        "control characters",
        "",
    ),
    "relative runs": (
        f"name: a\npaths: {{shared: /s, runs: {FILL_IN}, python: /p}}\n" + ONE,
        "2: paths.runs",
        FILL_IN,
        "an absolute path",
        "",
    ),
    "relative python of a node": (
        entry("name: a, gpus: 1, paths: {python: python3}"),
        "4: nodes[0].paths.python",
        "'python3'",
        "absolute",
        "",
    ),
    "relative mount": (HEAD + ONE + "storage: {mount: mnt}\n", "5: storage.mount", "'mnt'", "an absolute path", ""),
    "relative key": (
        HEAD + ONE + "ssh: {key: id_ed25519}\n",
        "5: ssh.key",
        "'id_ed25519'",
        "an absolute path or one below '~/'",
        "",
    ),
    "parent in a key": (HEAD + ONE + "ssh: {key: ~/../k}\n", "5: ssh.key", "'~/../k'", "without '..'", ""),
    "nobody's home": (HEAD + ONE + "ssh: {key: ~no-such-user/k}\n", "5: ssh.key", "'~no-such-user/k'", "an absolute path", ""),
    "relative config": (HEAD + ONE + "ssh: {config: ./c}\n", "5: ssh.config", "'./c'", "an absolute path or one below '~/'", ""),
    "known_hosts as a text": (
        HEAD + ONE + "ssh: {known_hosts: /k}\n",
        "5: ssh.known_hosts",
        "'/k'",
        "a list of file names",
        "write [/k]",
    ),
    "relative known_hosts": (
        HEAD + ONE + "ssh: {known_hosts: [/k, l]}\n",
        "5: ssh.known_hosts[1]",
        "'l'",
        "an absolute path or",
        "",
    ),
    "number in known_hosts": (
        HEAD + ONE + "ssh: {known_hosts: [1]}\n",
        "5: ssh.known_hosts[0]",
        "1",
        "the path of a file",
        'quote it: "1"',
    ),
    # numbers
    "port 0": (HEAD + ONE + "ssh: {port: 0}\n", "5: ssh.port", "0", "a whole number from 1 to 65535", ""),
    "port 65536": (entry("name: a, gpus: 1, ssh: {port: 65536}"), "4: nodes[0].ssh.port", "65536", "from 1 to 65535", ""),
    "port as a text": (HEAD + ONE + 'ssh: {port: "22"}\n', "5: ssh.port", "'22'", "a whole number from 1 to 65535", ""),
    "port with a point": (HEAD + ONE + "ssh: {port: 22.0}\n", "5: ssh.port", "22.0", "a whole number", ""),
    "octal port": (HEAD + ONE + "ssh: {port: 022}\n", "5: ssh.port", "'022'", "a whole number", ""),
    "gpus below 0": (entry("name: a, gpus: -1"), "4: nodes[0].gpus", "-1", "a whole number from 0 to 32", ""),
    "too many gpus": (entry("name: a, gpus: 80"), "4: nodes[0].gpus", "80", "a whole number from 0 to 32", ""),
    "gpus as a truth value": (entry("name: a, gpus: yes"), "4: nodes[0].gpus", "yes", "a whole number", ""),
    "gpus with 100 digits": (entry(f"name: a, gpus: {'9' * 100}"), "4: nodes[0].gpus", "999", "a whole number", ""),
    "timeout 0": (
        HEAD + ONE + "ssh: {connect_timeout_s: 0}\n",
        "5: ssh.connect_timeout_s",
        "0",
        "a number above 0 and at most 600",
        "",
    ),
    "rate as a text": (HEAD + ONE + "network: {rate_gbit_s: 100G}\n", "5: network.rate_gbit_s", "'100G'", "a number above 0", ""),
    "rate below 0": (HEAD + ONE + "network: {rate_gbit_s: -1}\n", "5: network.rate_gbit_s", "-1", "a number above 0", ""),
    "mtu too small": (HEAD + ONE + "network: {mtu: 9}\n", "5: network.mtu", "9", "a whole number from 576 to 65536", ""),
    "mtu without value": (
        HEAD + ONE + "network: {mtu: ~}\n",
        "5: network.mtu",
        "nothing",
        "a whole number from 576",
        "remove the line",
    ),
    "switch": (HEAD + ONE + "expect: {compiler: 1}\n", "5: expect.compiler", "1", "true or false", ""),
    "threshold nan": (HEAD + ONE + "expect: {shm_min_gib: .nan}\n", "5: expect.shm_min_gib", ".nan", "a number from 0 up", ""),
    "threshold beyond all": (
        HEAD + ONE + "expect: {shm_min_gib: 1.0e+300}\n",
        "5: expect.shm_min_gib",
        "1.0e+300",
        "below 1e12",
        "",
    ),
    "no stream": (HEAD + ONE + "expect: {tcp_streams: 0}\n", "5: expect.tcp_streams", "0", "from 1 to 128", ""),
    "more streams than iperf3 has": (
        HEAD + ONE + "expect: {tcp_streams: 129}\n",
        "5: expect.tcp_streams",
        "129",
        "from 1 to 128",
        "",
    ),
    "threshold inf": (HEAD + ONE + "expect: {shm_min_gib: .inf}\n", "5: expect.shm_min_gib", ".inf", "a number from 0 up", ""),
    "threshold below 0": (
        HEAD + ONE + "expect: {shm_min_gib: -0.5}\n",
        "5: expect.shm_min_gib",
        "-0.5",
        "a number from 0 up",
        "",
    ),
    "threshold without end": (
        HEAD + ONE + "expect: {shm_min_gib: 1.0e+999}\n",
        "5: expect.shm_min_gib",
        "1.0e+999",
        "a number",
        "",
    ),
    "count below 0": (HEAD + ONE + "expect: {nofile_min: -1}\n", "5: expect.nofile_min", "-1", "a whole number from 0 up", ""),
    "tolerance in percent": (
        HEAD + ONE + "expect: {memory_tolerance: 5}\n",
        "5: expect.memory_tolerance",
        "5",
        "a number from 0 to 1",
        "",
    ),
    "version as a number": (HEAD + ONE + "expect: {python_min: 3.10}\n", "5: expect.python_min", "3.10", "like [3, 8]", ""),
    "version of one number": (
        HEAD + ONE + "expect: {python_min: [3]}\n",
        "5: expect.python_min",
        "a list",
        "two whole numbers",
        "",
    ),
    "version of three": (
        HEAD + ONE + "expect: {python_min: [3, 8, 1]}\n",
        "5: expect.python_min",
        "a list",
        "two whole numbers",
        "",
    ),
    "version of texts": (HEAD + ONE + "expect: {python_min: [3, x]}\n", "5: expect.python_min[1]", "'x'", "a whole number", ""),
    "warn above fail": (
        HEAD + ONE + "expect: {clock_skew_warn_s: 9}\n",
        "5: expect.clock_skew_warn_s",
        "warns at 9 and fails at 5",
        "no later",
        "",
    ),
    "fail below warn": (
        HEAD + ONE + "expect: {clock_skew_fail_s: .1}\n",
        "5: expect.clock_skew_fail_s",
        "warns at 0.5 and fails at 0.1",
        "no later",
        "",
    ),
    # choices
    "network kind": (
        HEAD + ONE + "network: {kind: RoCEv2}\n",
        "5: network.kind",
        "'RoCEv2'",
        "one of: roce, infiniband, tcp, loopback",
        "'roce'?",
    ),
    "storage kind": (
        HEAD + ONE + "storage: {kind: nfs3}\n",
        "5: storage.kind",
        "'nfs3'",
        "one of: nfs4, nfs, local, other",
        "did you mean 'nfs",
    ),
    "network kind as a number": (HEAD + ONE + "network: {kind: 1}\n", "5: network.kind", "1", "one of: roce", ""),
    "storage source": (HEAD + ONE + "storage: {source: nas}\n", "5: storage.source", "'nas'", "server:/path, for kind nfs4", ""),
    "option as a source": (
        HEAD + ONE + "storage: {kind: other, source: -x}\n",
        "5: storage.source",
        "'-x'",
        "not starting with '-'",
        "",
    ),
    # environment
    "env number": (HEAD + ONE + "env: {A: 1}\n", "5: env.A", "1", "text, in quotes", 'quote it: "1"'),
    "env truth value": (HEAD + ONE + "env: {A: on}\n", "5: env.A", "on", "text, in quotes", 'quote it: "on"'),
    "env yes": (entry("name: a, gpus: 1, env: {A: yes}"), "4: nodes[0].env.A", "yes", "text, in quotes", 'quote it: "yes"'),
    "env decimal": (HEAD + ONE + "env: {A: 1.50}\n", "5: env.A", "1.50", "text, in quotes", 'quote it: "1.50"'),
    "env nothing": (HEAD + ONE + "env: {A: }\n", "5: env.A", "nothing", "text, in quotes", "write a value"),
    "env list": (HEAD + ONE + "env: {A: [b]}\n", "5: env.A", "a list", "text, in quotes", ""),
    "env with a newline": (HEAD + ONE + 'env: {A: "b\\nc"}\n', "5: env.A", r"'b\nc'", "one line of text", ""),
    "env with a NUL": (HEAD + ONE + 'env: {A: "b\\0c"}\n', "5: env.A", r"'b\x00c'", "one line of text", ""),
    "env name": (HEAD + ONE + "env: {A-B: c}\n", "5: env.A-B", "'A-B'", "a variable name", ""),
    "env name with a digit first": (
        entry("name: a, gpus: 1, env: {1A: c}"),
        "4: nodes[0].env.1A",
        "'1A'",
        "not starting with a digit",
        "",
    ),
    "env name with shell": (HEAD + ONE + 'env: {"A;b": c}\n', "5: env['A;b']", "'A;b'", "a variable name", ""),
    "env as a list": (HEAD + ONE + "env: [A=b]\n", "5: env", "a list", "a mapping from variable names", ""),
    # network
    "bad CIDR": (HEAD + ONE + "network: {subnet: 10.0.0.0/33}\n", "5: network.subnet", "'10.0.0.0/33'", "CIDR notation", ""),
    "host bits": (
        HEAD + ONE + "network: {subnet: 10.0.0.5/24}\n",
        "5: network.subnet",
        "'10.0.0.5/24'",
        "no host bits",
        "write 10.0.0.0/24",
    ),
    "no prefix": (
        HEAD + ONE + "network: {subnet: 10.0.0.0}\n",
        "5: network.subnet",
        "'10.0.0.0'",
        "CIDR notation",
        "prefix length",
    ),
    "outside the subnet": (
        HEAD + "network: {subnet: 10.0.0.0/24}\nnodes:\n  - {name: a, data_address: 10.0.1.1, gpus: 1}\n",
        "5: nodes[0].data_address",
        "'10.0.1.1'",
        "an address inside network.subnet 10.0.0.0/24",
        "",
    ),
    "SSH address outside the subnet": (
        HEAD + "network: {subnet: 10.0.0.0/24}\nnodes:\n  - {name: a, address: 192.168.0.1, gpus: 1}\n",
        "5: nodes[0].address",
        "'192.168.0.1'",
        "an address inside network.subnet",
        "add `data_address:`",
    ),
    "IPv6 outside an IPv4 subnet": (
        HEAD + "network: {subnet: 10.0.0.0/24}\nnodes:\n  - {name: a, data_address: 'fd00::1', gpus: 1}\n",
        "5: nodes[0].data_address",
        "'fd00::1'",
        "an address inside network.subnet",
        "",
    ),
    "peers on localhost": (
        HEAD + "nodes:\n  - {name: a, gpus: 1}\n  - {name: localhost, gpus: 1}\n",
        "5: nodes[1].name",
        "'localhost'",
        "an address that the other nodes reach",
        "network.kind: loopback",
    ),
    # two of a kind
    "duplicate name": (
        HEAD + "nodes:\n  - {name: a, gpus: 1}\n  - {name: a, address: b, gpus: 1}\n",
        "5: nodes[1].name",
        "'a' is also the name of another node (line 4)",
        "one name a node",
        "",
    ),
    "name inside a range": (
        HEAD + "nodes:\n  - {name: 'n[1-3]', gpus: 1}\n  - {name: n2, address: b, gpus: 1}\n",
        "5: nodes[1].name",
        "'n2' is also the name",
        "one name a node",
        "",
    ),
    "name twice in a range": (
        entry("name: 'n[1,1]', address: 'b[1,2]', gpus: 1"),
        "4: nodes[0].name",
        "'n1' is also",
        "one name a node",
        "",
    ),
    "duplicate data_address": (
        HEAD + "nodes:\n  - {name: a, data_address: 'fd00::1', gpus: 1}\n  - {name: b, data_address: 'fd00:0::1', gpus: 1}\n",
        "5: nodes[1].data_address",
        "'fd00:0::1' is also the data address of a (line 4)",
        "one data address a node",
        "",
    ),
    "duplicate data_address in other letters": (
        HEAD + "nodes:\n  - {name: a, data_address: x, gpus: 1}\n  - {name: b, data_address: X, gpus: 1}\n",
        "5: nodes[1].data_address",
        "'X' is also the data address of a (line 4)",
        "one data address a node",
        "",
    ),
    "duplicate SSH address": (
        HEAD
        + "nodes:\n  - {name: a, address: x, data_address: 10.0.0.1, gpus: 1}\n"
        + "  - {name: b, address: X, data_address: 10.0.0.2, gpus: 1}\n",
        "5: nodes[1].address",
        "'X' is also the SSH address of a (line 4)",
        "one SSH address a node",
        "",
    ),
    # ranges
    "ranges of unequal length": (
        entry("name: 'n[1-4]', address: '10.0.0.[1-3]', gpus: 1"),
        "4: nodes[0].address",
        "'10.0.0.[1-3]' stands for 3, the name for 4",
        "ranges of one length",
        "",
    ),
    "range without one in the name": (
        entry("name: n, address: 'b[1-3]', gpus: 1"),
        "4: nodes[0].address",
        "for 3, the name for 1",
        "one length",
        "",
    ),
    "env range of another length": (
        entry("name: 'n[1-2]', gpus: 1, env: {A: '[1-3]'}"),
        "4: nodes[0].env.A",
        "for 3, the name for 2",
        "",
        "",
    ),
    "two ranges in a text": (
        entry("name: 'n[1-2]m[1-2]', gpus: 1"),
        "4: nodes[0].name",
        "more than one range",
        "one range a text",
        "",
    ),
    "open bracket": (entry("name: 'n[1-2', gpus: 1"), "4: nodes[0].name", "do not match", "one range a text", ""),
    "letters in a range": (entry("name: 'n[a-c]', gpus: 1"), "4: nodes[0].name", "'a-c' is neither a number", "node[01-04]", ""),
    "range that counts down": (entry("name: 'n[4-1]', gpus: 1"), "4: nodes[0].name", "4-1 counts down", "node[01-04]", ""),
    "range without end": (entry("name: 'n[0-999999999]', gpus: 1"), "4: nodes[0].name", "more than 1,024 names", "", ""),
    "range outside an entry": (HEAD + ONE + "ssh: {user: 'u[1-2]'}\n", "5: ssh.user", "'u[1-2]'", "a user name", ""),
    # YAML
    "tag that runs code": (
        HEAD + ONE + "env: {A: !!python/object/apply:os.system [x]}\n",
        "5: env.A",
        "'!!python/object/apply:os.system'",
        "never",
        "",
    ),
    "tag on a text": (
        HEAD + ONE + "env: {A: !secret b}\n",
        "5: env.A",
        "the tag '!secret'",
        "tags are never followed",
        "remove the tag",
    ),
    "tag on a mapping": (HEAD + ONE + "env: !!omap {A: b}\n", "5: env", "the tag '!!omap'", "a plain value", ""),
    "half a character": (HEAD + ONE + 'env: {A: "\\ud800"}\n', "5: env.A", r"'\ud800'", "UTF-8", ""),
    "half a character in a key": (HEAD + ONE + 'env: {"\\ud800": b}\n', r"5: env['\ud800']", r"'\ud800'", "UTF-8", ""),
    "merge of a text": (HEAD + ONE + "env: {<<: x}\n", "5: env.<<", "'x'", "a mapping to merge", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_mistake(case: str) -> None:
    text, where, observed, expected, hint = CASES[case]
    found = mistake(text)
    assert found.culprit == f"cluster.yaml:{where}"
    assert observed in found.observed
    assert expected in found.expected
    assert hint in found.next_command
    assert bool(hint) <= bool(found.next_command)
    assert "\n" not in found.culprit + found.observed + found.expected + found.next_command


@pytest.mark.parametrize(
    ("text", "culprit", "observed", "expected"),
    [
        ("", "cluster.yaml", "empty", "an inventory of your nodes"),
        ("# only a comment\n", "cluster.yaml", "empty", "an inventory of your nodes"),
        ("- a\n- b\n", "cluster.yaml", "a list", "a mapping: lines like `name: …`"),
        ("hello\n", "cluster.yaml", "plain text", "a mapping"),
        ("name: a\n\tnodes: b\n", "cluster.yaml:2:1", "'\\t'", "spaces: YAML takes no tab here"),
        ("name: a\nnodes: [\n", "cluster.yaml:3:1", "flow", "valid YAML"),
        (
            "nodes:\n  - {name: n[1-4], gpus: 1}\n",
            "cluster.yaml:2:13",
            "got '['",
            "quotes around a range that stands between { }",
        ),
        ("name: a: b\n", "cluster.yaml:1:8", "mapping values are not allowed here", "valid YAML"),
        ("name: a\n---\nname: b\n", "cluster.yaml:2:1", "another document", "valid YAML"),
        ("name: *nobody\n", "cluster.yaml:1:7", "undefined alias 'nobody'", "valid YAML"),
        ("name: a\nssh: {key: a\x07}\n", "cluster.yaml:2", r"'\x07'", "printable text"),
        ('name: "\\U00110000"\n', "cluster.yaml", "not YAML", "valid YAML"),
        ("a: " + "[" * 5000, "cluster.yaml", "nested too deep", "at most 16 levels"),
        ("a: " + "[" * 20 + "]" * 20, "cluster.yaml:1", "nested deeper than 16 levels", "alias"),
        ("a: [" + "x," * 60_000 + "]", "cluster.yaml:1:99999", "more than 50,000 values", ""),
        ("a: &a [*a]\n", "cluster.yaml:1", "nested deeper than 16 levels", "alias"),
        ("a: &a {<<: *a}\n", "cluster.yaml:1", "nested deeper than 16 levels", "alias"),
        ("x" * 1_048_577, "cluster.yaml", "1,048,577 characters", "at most 1,048,576"),
        (
            HEAD + "nodes:\n" + "".join(f"  - {{name: 'n{i}x[1-1000]', gpus: 1}}\n" for i in range(2)),
            "cluster.yaml:5: nodes[1]",
            "more than 1,024 nodes",
            "",
        ),
    ],
)
def test_text_that_is_no_inventory(text: str, culprit: str, observed: str, expected: str) -> None:
    found = mistake(text)
    assert (found.culprit, found.exit_code) == (culprit, Exit.USAGE)
    assert observed in found.observed
    assert expected in found.expected


def test_hostfile_given_as_an_inventory_is_recognized() -> None:
    assert mistake("node01 slots=8\nnode02 slots=8\n").next_command == "r4090c nodes --import cluster.yaml > cluster.yaml"


def test_alias_bomb_is_stopped_quickly() -> None:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    started = time.perf_counter()
    assert "more than 50,000 values" in mistake(bomb).observed
    assert time.perf_counter() - started < 60.0


def test_tags_construct_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    mistakes(lambda: load(HEAD + ONE + f"env: !!python/object/apply:os.system ['touch {trace}']\n"))
    assert not trace.exists()


def test_all_mistakes_at_once_in_line_order() -> None:
    found = mistakes(lambda: load_cluster_text((GOLDEN / "mistakes.yaml").read_text(), "mistakes.yaml"))
    assert "\n".join(map(str, found)) + "\n" == (GOLDEN / "mistakes.txt").read_text()


def test_a_mistake_in_one_entry_does_not_hide_what_concerns_others() -> None:
    text = (
        HEAD
        + "network: {kind: rocee, subnet: 10.0.0.0/24}\n"
        + "nodes:\n  - {name: a, gpus: x}\n  - {name: a, address: 10.1.0.1, gpus: 8}\n"
    )
    assert [error.culprit.split(": ")[1] for error in mistakes(lambda: load(text))] == [
        "network.kind",
        "nodes[0].gpus",
        "nodes[1].name",
        "nodes[1].address",
    ]


def test_mistakes_of_a_range_are_told_once() -> None:
    assert mistake(entry("name: 'n[1-100]', gpus: 99")).observed == "99"


def test_a_flood_of_mistakes_is_counted() -> None:
    found = mistakes(lambda: load(HEAD + ONE + "env: {" + ", ".join(f"A{i}: {i}" for i in range(150)) + "}\n"))
    assert len(found) == 101
    assert found[-1].observed == "50 more mistakes"


# --------------------------------------------------------------------------- files


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "binary").write_bytes(b"\x7fELF\x00\x01")
    (tmp_path / "latin1").write_bytes("name: atelier\nnodes: # für\n".encode("latin-1"))
    (tmp_path / "big").write_bytes(b"#" * 1_048_577)
    expected = {
        "missing": ("missing", "no such file"),
        ".": ("", "a folder"),
        "loop": ("loop'", "symbolic links"),
        "x" * 300: ("x'", "name too long"),
        "binary": ("binary", "a NUL byte at 4"),
        "latin1": ("latin1:2", "the byte 0xfc is not UTF-8"),
        "big": ("big", "larger than 1 MiB"),
        "a\0b": ("b'", "null byte"),
        "/dev/zero": ("/dev/zero", "larger than 1 MiB"),
    }
    for name, (culprit, observed) in expected.items():
        (found,) = mistakes(lambda name=name: load_cluster(tmp_path / name))  # type: ignore[misc]
        assert found.culprit.endswith(culprit)
        assert observed in found.observed.lower().replace("nul byte", "NUL byte").replace("utf", "UTF").replace("mib", "MiB")


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + (HEAD + ONE).replace("\n", "\r\n").encode())
    assert load_cluster(file).file == str(file)


# --------------------------------------------------------------------------- ranges and --nodes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node", ["node"]),
        ("", [""]),
        ("node[01-04]", ["node01", "node02", "node03", "node04"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("n[098-101]x", ["n098x", "n099x", "n100x", "n101x"]),
        ("n[0-2]", ["n0", "n1", "n2"]),
        ("[1,3,5-7]", ["1", "3", "5", "6", "7"]),
        ("n[ 1 , 3 - 4 ]", ["n1", "n3", "n4"]),
        ("n[7]", ["n7"]),
    ],
)
def test_expand_range(text: str, names: list[str]) -> None:
    assert expand_range(text) == names


@pytest.mark.parametrize(
    ("text", "observed"),
    [
        ("n[1-2][3-4]", "more than one range"),
        ("n[]", "'' is neither"),
        ("n[1-2", "do not match"),
        ("n1-2]", "do not match"),
        ("n]1[", "do not match"),
        ("n[[1]]", "do not match"),
        ("n[1]]", "do not match"),
        ("n[1-2-3]", "neither a number"),
        ("n[-1]", "neither a number"),
        ("n[²]", "neither a number"),
        ("n[1,,2]", "neither a number"),
        ("n[3-1]", "counts down"),
        ("n[1-04]", "more zeros in front"),
        ("n[1-1025]", "more than 1,024"),
    ],
)
def test_expand_range_refuses(text: str, observed: str) -> None:
    (found,) = mistakes(lambda: expand_range(text))
    assert observed in found.observed
    assert "one range a text, such as node[01-04]" in found.expected


@pytest.fixture
def six() -> Cluster:
    return load(HEAD + "nodes: [{name: 'node[01-04]', gpus: 8}, {name: gpu-a, gpus: 1}, {name: '7', address: g7, gpus: 0}]\n")


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, "node01 node02 node03 node04 gpu-a 7"),
        ("2", "node01 node02"),
        ("6", "node01 node02 node03 node04 gpu-a 7"),
        ("7", "7"),
        ("node03,node01", "node03 node01"),
        ("node[01-04]", "node01 node02 node03 node04"),
        ("gpu-a, node[01,03-04]", "gpu-a node01 node03 node04"),
    ],
)
def test_select_nodes(six: Cluster, wanted: str | None, names: str) -> None:
    assert [node.name for node in select_nodes(six, wanted)] == names.split()


@pytest.mark.parametrize(
    ("wanted", "observed", "expected", "hint"),
    [
        ("0", "6 nodes", "a count from 1 to 6", ""),
        ("8", "6 nodes", "a count from 1 to 6", ""),
        ("-1", "6 nodes", "a count from 1 to 6", ""),
        ("nod01", "'nod01'", "node01, node02", "did you mean 'node01'?"),
        ("node05", "'node05'", "node04", "node0"),
        ("", "''", "a count, or names", ""),
        ("node01,", "''", "a count, or names", ""),
        ("2,node04", "'2'", "a count, or names", ""),
        ("node01,node01", "node01 is asked for twice", "each node once", ""),
        ("node[01-03],node02", "node02 is asked for twice", "each node once", ""),
        ("node[1-", "do not match", "one range a text", ""),
    ],
)
def test_select_nodes_refuses(six: Cluster, wanted: str, observed: str, expected: str, hint: str) -> None:
    (found,) = mistakes(lambda: select_nodes(six, wanted))
    assert observed in found.observed
    assert expected in found.expected
    assert hint in found.next_command


def test_spares_are_taken_only_when_they_are_named() -> None:
    cluster = load(HEAD + "nodes:\n  - {name: a, gpus: 1}\n  - {name: b, gpus: 1, spare: true}\n  - {name: c, gpus: 1}\n")
    assert [node.name for node in select_nodes(cluster, None)] == ["a", "b", "c"]
    assert [node.name for node in select_nodes(cluster, None, spares=False)] == ["a", "c"]
    assert [node.name for node in select_nodes(cluster, "2", spares=False)] == ["a", "c"]
    assert [node.name for node in select_nodes(cluster, "b,a", spares=False)] == ["b", "a"]
    (found,) = mistakes(lambda: select_nodes(cluster, "3", spares=False))
    assert found.observed.endswith("has 2 nodes and 1 spare")
    only = load(HEAD + "nodes:\n  - {name: a, gpus: 1, spare: true}\n")
    (found,) = mistakes(lambda: select_nodes(only, None, spares=False))
    assert found.observed == "all are spares"


def test_select_nodes_tells_all_mistakes(six: Cluster) -> None:
    assert len(mistakes(lambda: select_nodes(six, "x,y,node01,node01"))) == 3


# --------------------------------------------------------------------------- hostfiles


def test_hostfile_becomes_the_golden_file() -> None:
    assert parse_hostfile((GOLDEN / "hostfile").read_text()) == (GOLDEN / "hostfile.yaml").read_text()


def test_imported_text_loads_once_the_paths_are_filled_in() -> None:
    text = parse_hostfile((GOLDEN / "hostfile").read_text())
    assert [error.culprit.split(": ")[1] for error in mistakes(lambda: load(text))] == ["paths.shared", "paths.python"]
    nodes = load(text.replace(FILL_IN, "/mnt/x")).nodes
    assert [(node.name, node.gpus, node.ssh.user) for node in nodes] == [
        ("node01", 8, ""),
        ("node02", 8, ""),
        ("node03", 8, ""),
        ("node05", 4, ""),
        ("node06", 4, ""),
        ("gpu-a", 2, "train"),
        ("on", 1, ""),
        ("10.0.0.9", 8, ""),
        ("10.0.0.10", 8, ""),
    ]


def test_only_hosts_that_are_alike_share_an_entry() -> None:
    text = parse_hostfile("\ufeffa1 slots=1\na2 slots=2\na3 slots=2\nu@a4 slots=2\n")
    assert re.findall(r"name: (a.*)", text) == ["a1", "a[2-3]", "a4"]
    nodes = load(text.replace(FILL_IN, "/x")).nodes
    assert [(node.name, node.gpus, node.ssh.user) for node in nodes] == [
        ("a1", 1, ""),
        ("a2", 2, ""),
        ("a3", 2, ""),
        ("a4", 2, "u"),
    ]


def test_one_user_for_all_goes_to_the_top() -> None:
    cluster = load(parse_hostfile("no@a slots=1\r\nno@b max-slots=4 slots=2\r\n").replace(FILL_IN, "/x"))
    assert [(node.name, node.ssh.user) for node in cluster.nodes] == [("a", "no"), ("b", "no")]


@pytest.mark.parametrize(
    ("line", "observed", "hint"),
    [
        ("b", "b has no number of slots", "write `b slots=8`"),
        ("b max_slots=8", "b has no number of slots", ""),
        ("b slot=8", "'slot=8'", "did you mean 'slots'?"),
        ("b gpus=8", "'gpus=8'", ""),
        ("b slots=", "slots=''", ""),
        ("b slots=x", "slots='x'", ""),
        ("b slots=-1", "slots='-1'", ""),
        ("b slots=999", "slots='999'", ""),
        ("b slots=8 slots=9", "a second 'slots=9'", ""),
        ("b:8 slots=9", "a second 'slots=9'", ""),
        ("b:", "slots=''", ""),
        ("-oProxyCommand=x slots=8", "the host '-oProxyCommand=x'", ""),
        ("b;x slots=8", "the host 'b;x'", ""),
        ("10.0.0.300 slots=8", "the host '10.0.0.300'", ""),
        ("fe80::1 slots=8", "the host 'fe80::1'", "an IPv6 address goes into `address:`"),
        ("-x@b slots=8", "the user '-x'", ""),
        ("@b slots=8", "the user ''", ""),
        ("a slots=8", "a again (first in line 1)", ""),
        ("A slots=8", "A again (first in line 1)", ""),
        ("localhost slots=8", "localhost", ""),
        ("127.0.0.1 slots=8", "127.0.0.1", ""),
    ],
)
def test_bad_line_of_a_hostfile(line: str, observed: str, hint: str) -> None:
    (found,) = mistakes(lambda: parse_hostfile(f"a slots=8\n# comment\n{line}\n", "hosts"))
    assert found.culprit == "hosts:3"
    assert observed in found.observed
    assert found.expected
    assert hint in found.next_command


def test_all_bad_lines_at_once() -> None:
    found = mistakes(lambda: parse_hostfile("a\nb slots=8\n-c slots=8\nb slots=1\n"))
    assert [error.culprit for error in found] == ["hostfile:1", "hostfile:3", "hostfile:4"]


@pytest.mark.parametrize("text", ["", "# nothing\n\n", " \n"])
def test_hostfile_without_hosts(text: str) -> None:
    assert mistakes(lambda: parse_hostfile(text))[0].observed == "no hosts"


# --------------------------------------------------------------------------- any text: a Cluster or a UsageError

QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def survives(call: Callable[[], object], kind: type) -> None:
    try:
        assert isinstance(call(), kind)
    except UsageError as error:
        str(error).encode()  # printable: no half characters
        for one in error.errors if isinstance(error, InputErrors) else [error]:
            assert one.culprit
            assert one.observed


@QUICK
@given(st.one_of(st.text(), st.text(alphabet="ab:-[]{}&*!<|>%@\"'\\,# \n\t01.~?")))
@example("? a")
@example("%YAML 9.9\n--- a")
@example("!<tag:yaml.org,2002:merge> a: b")
@example("=: =")
@example("&a : *a")
@example("{<<: [1, {a: b}]}")
@example("nodes: [{paths: 5}]\npaths: {}")
@example("nodes: [{env: 5, ssh: [], name: {}}]\nssh: 1\nnetwork: x\nexpect: []")
def test_any_text(text: str) -> None:
    survives(lambda: load(text), Cluster)


EXAMPLE_TEXTS = [re.sub(r"(?m)^\s*#.*\n", "", EXAMPLE.read_text()), (GOLDEN / "mistakes.yaml").read_text()]


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Return an inventory with a few places overwritten."""
    text = draw(st.sampled_from(EXAMPLE_TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 12))
        text = (
            text[:start]
            + draw(st.one_of(st.text(max_size=6), st.sampled_from(["\n", ": ", "[1-3]", "null", "!!int", "&a", "*a", "-"])))
            + text[start + cut :]
        )
    return text


@QUICK
@given(damaged())
def test_any_damage(text: str) -> None:
    survives(lambda: load(text), Cluster)


KEYS = sorted({key for section in inventory._SECTIONS.values() for key in section.model_fields})
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["a", "n[1-3]", "/p", "10.0.0.1", "tcp"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=3)), inner, max_size=6)
    ),
    max_leaves=25,
)


@QUICK
@given(st.dictionaries(st.sampled_from(list(inventory.ClusterFile.model_fields)), VALUES))
def test_any_values(tree: dict[str, Any]) -> None:
    survives(lambda: load(yaml.safe_dump(tree)), Cluster)


@QUICK
@given(st.text(alphabet="n0123[],- x"))
def test_any_range(text: str) -> None:
    survives(lambda: expand_range(text), list)
    survives(lambda: select_nodes(load(HEAD + ONE), text), tuple)


@QUICK
@given(st.one_of(st.text(), st.text(alphabet="ab1.-:@ =slots\n#\t")))
def test_any_hostfile(text: str) -> None:
    survives(lambda: parse_hostfile(text), str)


@QUICK
@given(
    st.lists(
        st.tuples(st.from_regex(r"\A[a-z]{1,2}[0-9]{1,3}(-[a-z])?\Z"), st.integers(0, 8), st.sampled_from(["", "u", "yes", "1"])),
        min_size=1,
        max_size=12,
        unique_by=lambda host: host[0],
    )
)
def test_import_keeps_every_host(hosts: list[tuple[str, int, str]]) -> None:
    text = "".join(f"{user + '@' if user else ''}{name} slots={slots}\n" for name, slots, user in hosts)
    nodes = load(parse_hostfile(text).replace(FILL_IN, "/x")).nodes
    assert [(node.name, node.gpus, node.ssh.user) for node in nodes] == hosts


# --------------------------------------------------------------------------- JSON Schema and docs


def resolve(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return `part` with its $ref followed; what stands beside the $ref wins."""
    (reference,) = part.get("allOf", [part])  # pydantic before 2.9 wraps a $ref that has company
    if "$ref" not in reference:
        return part
    return {**schema["$defs"][reference["$ref"].rpartition("/")[2]], **part}


def schema_complaints(schema: dict[str, Any], part: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Yield what the part of JSON Schema that ours uses says against `value`."""
    part = resolve(schema, part)
    types: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}
    if not isinstance(value, types[part["type"]]):
        yield f"{path}: not {part['type']}"
        return
    if value not in part.get("enum", [value]):
        yield f"{path}: not in {part['enum']}"
    if isinstance(value, (int, float)) and not part.get("minimum", value) <= value <= part.get("maximum", value):
        yield f"{path}: out of bounds"
    if isinstance(value, (int, float)) and value <= part.get("exclusiveMinimum", value - 1):
        yield f"{path}: out of bounds"
    if isinstance(value, list):
        if len(value) < part.get("minItems", 0):
            yield f"{path}: too short"
        for i, item in enumerate(value):
            yield from schema_complaints(
                schema, part["items"] if "items" in part else part["prefixItems"][i], item, f"{path}[{i}]"
            )
    if isinstance(value, dict):
        for key in part.get("required", ()):
            if key not in value:
                yield f"{path}: {key} is missing"
        for key, item in value.items():
            inner = part.get("properties", {}).get(key, part.get("additionalProperties"))
            if inner is False:
                yield f"{path}: {key} is unknown"
            else:
                yield from schema_complaints(schema, inner, item, f"{path}.{key}")


def test_example_fits_the_json_schema() -> None:
    assert list(schema_complaints(json_schema(), json_schema(), yaml.safe_load(EXAMPLE.read_text()))) == []


def test_json_schema_refuses_what_we_refuse() -> None:
    text = (
        "name: 1\nnodes: [{name: a, gpus: 99, ssh: {prot: 1, port: 0}}]\n"
        "network: {kind: x, rate_gbit_s: 0}\nexpect: {nofile_min: -1}\nenv: {A: 1}\n"
    )
    assert list(schema_complaints(json_schema(), json_schema(), yaml.safe_load(text))) == [
        ": paths is missing",
        ".name: not string",
        ".nodes[0].gpus: out of bounds",
        ".nodes[0].ssh: prot is unknown",
        ".nodes[0].ssh.port: out of bounds",
        ".network.kind: not in ['roce', 'infiniband', 'tcp', 'loopback']",
        ".network.rate_gbit_s: out of bounds",
        ".expect.nofile_min: out of bounds",
        ".env.A: not string",
    ]


def test_json_schema_says_its_draft_and_explains_every_key() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for path, part in schema_keys(schema):
        assert part.get("description"), path
        assert "null" not in json.dumps(part), path
    for name, part in [("", schema), *schema["$defs"].items()]:
        assert part["additionalProperties"] is False, name


def test_keys_are_api() -> None:
    keys = [path for path, _ in schema_keys(json_schema()) if not path.startswith("expect.")]
    assert keys == (GOLDEN / "keys.txt").read_text().split()


def schema_keys(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key as people write it ("nodes[].ssh.port") with its part of the schema."""

    def walk(part: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, inner in part.get("properties", {}).items():
            here = resolve(schema, inner)
            yield path + key, here
            yield from walk(here, f"{path}{key}.")
            if here.get("type") == "array" and "items" in here:
                yield from walk(resolve(schema, here["items"]), f"{path}{key}[].")

    yield from walk(schema, "")


def reference_table(schema: dict[str, Any]) -> str:
    """Return the Markdown table of every key."""
    required = ("name", "nodes", "nodes[].name", "nodes[].gpus", "paths", "paths.shared")
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for path, part in schema_keys(schema):
        default = "" if part.get("default") in (None, "", {}) else f"`{json.dumps(part['default'])}`"
        if path in required:
            default = "**required**"
        elif path.startswith("nodes[].ssh."):
            default = f"`{path.removeprefix('nodes[].')}`"
        rows.append(f"| `{path}` | {value_text(part)} | {default} | {part['description'].replace('|', '/')} |")
    return "\n".join(rows)


def value_text(part: dict[str, Any]) -> str:
    """Return what the schema allows here, in words."""
    if "enum" in part:
        return ", ".join(f"`{choice}`" for choice in part["enum"])
    low, above, high = part.get("minimum"), part.get("exclusiveMinimum"), part.get("maximum")
    lower = "" if low is None and above is None else f" ≥ {low:g}" if low is not None else f" > {above:g}"
    bounds = (
        f" {low:g}–{high:g}" if low is not None and high is not None else lower + (f", ≤ {high:g}" if high is not None else "")
    )
    words = {"object": "mapping", "array": "list", "string": "text", "integer": "whole number", "boolean": "true or false"}
    return words.get(str(part["type"]), "number") + bounds


def test_required_keys_of_the_docs_are_those_of_the_schema() -> None:
    schema = json_schema()
    required = [*schema["required"]]
    required += [f"nodes[].{key}" for key in schema["$defs"]["NodeEntry"]["required"]]
    required += [f"paths.{key}" for key in schema["$defs"]["PathsPart"]["required"]]
    assert sorted(required) == sorted(re.findall(r"(?m)^\| `(.*?)` \|.*\| \*\*required\*\* \|", reference_table(schema)))


def test_docs_explain_every_key() -> None:
    assert reference_table(json_schema()) in DOCS.read_text(), "run: python -m tests.test_inventory"


def test_docs_examples_load() -> None:
    blocks = re.findall(r"(?s)```yaml\n(.*?)```", DOCS.read_text())
    assert len(blocks) >= 2
    for block in blocks:
        load(block)


def _write_golden() -> None:
    """Rewrite what the tests above compare with; read the diff before you commit it."""
    import os

    os.environ["HOME"] = HOME
    resolved = dataclasses.asdict(load_cluster(EXAMPLE))
    resolved["file"] = EXAMPLE.name
    del resolved["expect"]
    (GOLDEN / "cluster.json").write_text(json.dumps(resolved, indent=1) + "\n")
    found = mistakes(lambda: load_cluster_text((GOLDEN / "mistakes.yaml").read_text(), "mistakes.yaml"))
    (GOLDEN / "mistakes.txt").write_text("\n".join(map(str, found)) + "\n")
    (GOLDEN / "hostfile.yaml").write_text(parse_hostfile((GOLDEN / "hostfile").read_text()))
    keys = [path for path, _ in schema_keys(json_schema()) if not path.startswith("expect.")]
    (GOLDEN / "keys.txt").write_text("\n".join(keys) + "\n")
    head, rest = DOCS.read_text().split("<!-- keys -->\n", 1)
    tail = rest.split("<!-- /keys -->", 1)[1]
    DOCS.write_text(f"{head}<!-- keys -->\n{reference_table(json_schema())}\n<!-- /keys -->{tail}")


if __name__ == "__main__":
    _write_golden()
