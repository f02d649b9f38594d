"""A bundle keeps what is needed to judge again, keeps no secret, and is hostile until proven otherwise."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netcheck import bundle
from netcheck.bundle import NOT_STORED, SCHEMA, cleaner, load_bundle, save_bundle, strip_cluster
from netcheck.figures import figures_of
from netcheck.gather import gather
from netcheck.raw import Raw, parse_raw
from r4090c.errors import UsageError
from r4090c.model import Cluster, Expect, Network, Ssh, Storage
from r4090c.remote import NodeError, Verdict
from tests.facts.local import LocalShell
from tests.facts.samples import cluster_of
from tests.reports import pairs_of, tcp_measured
from tests.test_gather import ScriptedFleet

LOST: Any = {"verdict": "lost", "observed": "gone", "next_command": "", "connect_s": None, "noise": ""}
SMALL = Raw("2026-11-30T00:00:00+00:00", {"node01": LOST, "node02": LOST}, {}, {"tcp": {"rows": [1, 2.5, None, "é"]}})


@pytest.fixture(scope="module")
def gathered() -> tuple[Cluster, Raw]:
    cluster = cluster_of(("near", "silent"))
    cluster = replace(
        cluster,
        network=Network(kind="roce", subnet="10.10.0.0/24", rate_gbit_s=100.0, mtu=9000),
        storage=Storage(kind="nfs4", source="nas:/export", mount="/mnt/shared"),
        expect=replace(Expect(), nofile_min=4096, python_min=(3, 9)),
        expect_origin={"nofile_min": "cluster.yaml"},
    )
    shells = {
        "near": LocalShell(cluster.nodes[0]),
        "silent": NodeError("silent", Verdict.TIMEOUT, "no answer", "one", "ssh silent"),
    }
    raw = gather(ScriptedFleet(shells), cluster)
    return cluster, replace(raw, measurements={"tcp pairs/1": {"pairs": [["near", "silent", 9.4]]}})


def test_what_comes_back_is_judged_the_same(gathered: tuple[Cluster, Raw], tmp_path: Path) -> None:
    cluster, raw = gathered
    save_bundle(tmp_path / "b.tar.gz", cluster, raw)
    cluster_again, raw_again = load_bundle(tmp_path / "b.tar.gz")
    assert cluster_again == strip_cluster(cluster)
    assert raw_again == raw
    assert parse_raw(raw_again, cluster_again) == parse_raw(raw, cluster)
    assert cluster_again.expect.python_min == (3, 9)


# --------------------------------------------------------------------------- secrets

SECRETS = {
    "environment value of the cluster": "wandb-0123456789abcdef",
    "environment value of a node": "hunter2hunter2",
    "environment value with a name that tells nothing": "innocuous-but-private",
    "key path": "/home/alice/.ssh/id_for_the_cluster",
    "known_hosts path": "/home/alice/.ssh/known_by_alice",
    "ssh_config path": "/home/alice/.ssh/config_of_alice",
    "jump host": "alice@bastion.example.org:2222",
    "environment of the process": "process-environment-secret",
    "token that a login shell prints": "hf_printedByTheShell",
    "password in a URL": "urlPassw0rd",
    "token in a measurement": "ghp_measured",
    "inventory path": "/home/alice/clusters/cluster.yaml",
}


def test_no_secret_is_in_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRETS["environment of the process"])
    ssh = Ssh(
        address="192.168.1.11",
        user="train",
        key=SECRETS["key path"],
        jump=SECRETS["jump host"],
        config=SECRETS["ssh_config path"],
        known_hosts=(SECRETS["known_hosts path"],),
    )
    cluster = cluster_of(("near", "silent"))
    nodes = tuple(replace(node, ssh=ssh, env={"A_TOKEN": SECRETS["environment value of a node"]}) for node in cluster.nodes)
    env = {
        "WANDB_API_KEY": SECRETS["environment value of the cluster"],
        "FOO": SECRETS["environment value with a name that tells nothing"],
        "NCCL_DEBUG": "WARN",
    }
    cluster = replace(cluster, nodes=nodes, env=env, file=SECRETS["inventory path"])
    noise = (
        f"Welcome to node01\n+ export HF_TOKEN={SECRETS['token that a login shell prints']}\n"
        f"proxy http://alice:{SECRETS['password in a URL']}@proxy:3128/\nFOO={env['FOO']}\n"
    )
    refused = NodeError(
        "silent",
        Verdict.AUTH_FAILED,
        f"login refused; the key {ssh.key} is encrypted",
        f"a key in authorized_keys, known to {ssh.known_hosts[0]}",
        f"ssh-copy-id -F {ssh.config} -i {ssh.key} -J {ssh.jump} train@192.168.1.12",
    )
    raw = gather(ScriptedFleet({"near": LocalShell(nodes[0], noise=noise), "silent": refused}), cluster)
    raw.answers["near"]["answers"]["gpus"]["command"] = {
        "rc": 1,
        "stdout": "",
        "stderr": f"token: '{SECRETS['token in a measurement']}'\n",
        "error": None,
    }
    measured = {
        "log": f"NCCL_DEBUG=WARN PASSWORD = {SECRETS['token in a measurement']} api-key={SECRETS['token in a measurement']}"
    }
    raw = replace(raw, measurements={"nccl": measured})
    before = json.dumps([raw.reach, raw.answers, raw.measurements])
    assert sum(secret in before for secret in SECRETS.values()) >= 7, "the test plants too little"

    path = tmp_path / "b.tar.gz"
    save_bundle(path, cluster, raw)
    unpacked = gzip.decompress(path.read_bytes())
    for what, secret in SECRETS.items():
        assert secret.encode() not in unpacked, what
    assert b"Welcome to node01" in unpacked
    assert b"WANDB_API_KEY" in unpacked
    assert b"NCCL_DEBUG=WARN" in unpacked
    assert NOT_STORED.encode() in unpacked
    cluster_again, raw_again = load_bundle(path)
    assert set(cluster_again.env) == set(env)
    assert parse_raw(raw_again, cluster_again)["near"].os == parse_raw(raw, cluster)["near"].os
    assert json.dumps([raw.reach, raw.answers, raw.measurements]) == before, "saving changed what is judged"


# --------------------------------------------------------------------------- secrets in what tools printed

PLANTED = {
    "environment that nccl-tests prints": "value-of-an-innocuous-variable",
    "the same, of a document that was cut": "value-in-a-cut-document",
    "token in the log of a rank": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "password in the URL of an index": "indexPassw0rd",
    "header of a request": "c2VjcmV0OnNlY3JldA==",
    "bearer token without a name": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.c2lnbmF0dXJl",
    "exported by a shell that traces": "traced-by-the-shell",
    "key in a message": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
    "escaped in a string of a document": "escaped-in-a-string",
    "below a telling name in a document": "below-a-telling-name",
    "value of our own environment": "own-but-private-value",
}


def records_with_secrets() -> dict[str, Any]:
    """Return a measurement as netcheck.conduct keeps it, with secrets wherever a tool may print one."""
    nccl = {
        "env": {"WHATEVER": PLANTED["environment that nccl-tests prints"], "PS1": "${x}"},
        "config": {"nthreads": 1, "api_token": PLANTED["below a telling name in a document"]},
        "args": f'--header "x-api-key: {PLANTED["escaped in a string of a document"]}"',
        "results": [{"size": 1048576, "busbw": 14.25}],
    }
    cut = json.dumps({"version": 1, "env": {"A": "{", "B": PLANTED["the same, of a document that was cut"]}}, indent=1)[:-6]
    log = (
        f"node01:71:71 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5_0:1\n"
        f"+ export HF_TOKEN={PLANTED['token in the log of a rank']}\n{PLANTED['token in the log of a rank']}\n"
        f"Looking in indexes: https://me:{PLANTED['password in the URL of an index']}@pypi.example.org/simple\n"
        f"> Authorization: Basic {PLANTED['header of a request']}\n{PLANTED['bearer token without a name']}\n"
        f"+ PASSWORD='{PLANTED['exported by a shell that traces']}'\nFOO={PLANTED['value of our own environment']}\n"
        f"-----BEGIN RSA PRIVATE KEY-----\n{PLANTED['key in a message']}\n-----END RSA PRIVATE KEY-----\n"
    )
    steps = [
        {"rc": 0, "stdout": f"warming up\n{json.dumps(nccl)}\n", "stderr": log, "error": "", "duration_s": 1.5},
        {"rc": None, "stdout": cut, "stderr": log, "error": "no end within 20 s", "duration_s": 20.0},
    ]
    part = {
        "steps": steps,
        "before": {"/sys/class/net/eth0/statistics/rx_errors": "0\n"},
        "after": {},
        "watched": {"nvidia-smi": [log, log]},
    }
    record = {"name": "node01-node02", "data": {"sender": "node01", "note": log}, "parts": {"node01": part}}
    return {"level": "full", "rounds": [[record]]}


def test_no_secret_of_a_tool_is_in_a_bundle(tmp_path: Path) -> None:
    env = {"FOO": PLANTED["value of our own environment"], "NCCL_IB_HCA": "mlx5_0:1", "LEAD": "node01"}
    cluster = replace(cluster_of(("node01", "node02")), env=env)
    measured = records_with_secrets()
    assert all(secret in json.dumps(measured) for secret in PLANTED.values()), "the test plants too little"
    save_bundle(tmp_path / "b.tar.gz", cluster, replace(SMALL, measurements={"nccl": measured}))
    unpacked = gzip.decompress((tmp_path / "b.tar.gz").read_bytes())
    for what, secret in PLANTED.items():
        assert secret.encode() not in unpacked, what
    _, raw = load_bundle(tmp_path / "b.tar.gz")
    record = raw.measurements["nccl"]["rounds"][0][0]
    assert record["data"]["sender"] == "node01", "the names of nodes are no secret, also where a variable has one"
    first, second = record["parts"]["node01"]["steps"]
    said = json.loads(first["stdout"].partition("\n")[2])
    assert (said["env"], said["results"]) == ({}, [{"size": 1048576, "busbw": 14.25}]), "what is read is as before"
    assert "NCCL_IB_HCA set by environment to mlx5_0:1" in first["stderr"], "libraries' own variables stand in their logs"
    assert second["error"] == "no end within 20 s" and second["stdout"].startswith("{")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abkeytokn_", max_size=8), inner, max_size=3),
        max_leaves=12,
    ),
    st.text(max_size=12),
    st.text(max_size=12),
)
def test_a_document_in_a_text_stays_one(inner: Any, before: str, after: str) -> None:
    """Only strings change, and what has a telling name: the shape stays, so a reader finds what it found before."""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        return [shape(item) for item in value] if isinstance(value, list) else (value if not isinstance(value, str) else "text")

    document = {"end": inner, "n": 1.5}
    text = f"{before.replace('{', '')}\n{json.dumps(document, indent=1)}\n{after}"
    cleaned = cleaner(cluster_of())(text, True)
    again, _ = json.JSONDecoder().raw_decode(cleaned, cleaned.index("{"))
    assert shape(again) == shape(document)


@pytest.mark.parametrize(
    "text", ["{" * 100_000, '{"a":' * 50_000, '{"a":' * 900 + "1" + "}" * 900, '{"env": {"x": 1', "\ud800{}"]
)
def test_hostile_texts_are_cleaned_in_time(text: str) -> None:
    assert isinstance(cleaner(cluster_of())(text, True), str)


def test_measurements_are_judged_the_same_from_a_bundle(tmp_path: Path) -> None:
    """Secrets are taken out, yet every figure of every link is read as before."""
    names = ("node01", "node02")
    cluster = replace(cluster_of(names), env={"NCCL_SOCKET_IFNAME": "=enp65s0f0", "LEAD": "node01", "PORT": "bits_per_second"})
    measured = {"tcp": tcp_measured([names], lambda sender, receiver: 9.417 if sender == "node01" else 4.2)}
    save_bundle(tmp_path / "b.tar.gz", cluster, replace(SMALL, measurements=measured))
    _, raw = load_bundle(tmp_path / "b.tar.gz")
    assert figures_of(raw.measurements, names) == figures_of(measured, names)
    assert len(figures_of(measured, names)) == 2


def test_a_full_preflight_of_sixteen_nodes_is_small(tmp_path: Path) -> None:
    """All pairs with what iperf3 really prints, counters before and after, and a long log of NCCL on every node."""
    names = tuple(f"node{number:02}" for number in range(1, 17))
    real = (Path(__file__).parent / "tools/fixtures/iperf3/own-real-vm-3-18.json").read_text()
    dice = random.Random(4)

    def says(gbit_s: float) -> str:
        return re.sub(r"\d{4,}", lambda number: str(dice.randrange(10 ** len(number[0]))), real)  # no two tests are equal

    tcp = tcp_measured(pairs_of(names), lambda sender, receiver: dice.uniform(20, 25), says)
    counters = {f"/sys/class/net/enp65s0f0/statistics/counter_{number}": f"{dice.getrandbits(48)}\n" for number in range(80)}
    for record in (record for one in tcp["rounds"] for record in one):
        for part in record["parts"].values():
            part.update(before=counters, after={path: f"{dice.getrandbits(48)}\n" for path in counters})
    lines = [
        f"node:{dice.randrange(1 << 16)} [{gpu}] NCCL INFO Channel {gpu:02}/0 : {gpu}[{gpu}] -> {gpu + 1}" for gpu in range(8)
    ]
    log = "\n".join(f"{line} via NET/IB/{dice.randrange(4)}" for line in lines * 400)
    parts = {name: {"steps": [{"rc": 0, "stdout": log, "stderr": log, "error": "", "duration_s": 9.0}]} for name in names}
    nccl = {"level": "full", "rounds": [[{"name": "all", "data": {}, "parts": parts}] for _ in range(4)]}
    save_bundle(tmp_path / "b.tar.gz", cluster_of(names), replace(SMALL, measurements={"tcp": tcp, "nccl-all": nccl}))
    assert (tmp_path / "b.tar.gz").stat().st_size < 5 << 20


def test_a_key_below_home_is_found_in_its_short_form(tmp_path: Path) -> None:
    key = Path.home() / ".ssh" / "id_hidden"
    cluster = cluster_of(("node01", "node02"))
    cluster = replace(cluster, nodes=tuple(replace(node, ssh=replace(node.ssh, key=str(key))) for node in cluster.nodes))
    reach: Any = {**LOST, "next_command": f"ssh -i ~/.ssh/id_hidden node01 || ssh -i {key} node01"}
    save_bundle(tmp_path / "b.tar.gz", cluster, replace(SMALL, reach={"node01": reach}))
    assert b"id_hidden" not in gzip.decompress((tmp_path / "b.tar.gz").read_bytes())


def test_short_values_do_not_eat_the_text(tmp_path: Path) -> None:
    env = {"TOKENIZERS_PARALLELISM": "false", "A_KEY": "1", "NCCL_DEBUG": "WARN"}
    cluster = replace(cluster_of(), env=env, nodes=tuple(replace(node, env=env) for node in cluster_of().nodes))
    raw = replace(SMALL, measurements={"m": {"text": "1 false WARN", "n": 1}})
    save_bundle(tmp_path / "b.tar.gz", cluster, raw)
    cluster_again, raw_again = load_bundle(tmp_path / "b.tar.gz")
    assert raw_again.measurements == raw.measurements
    for kept in (cluster_again.env, *(node.env for node in cluster_again.nodes)):
        assert kept == dict.fromkeys(env, NOT_STORED), "also a short value is nobody's business"


def test_how_a_person_logs_in_is_stripped() -> None:
    ssh = Ssh(address="a", port=2222, user="train", key="/k", jump="j", config="/c", known_hosts=("/h",))
    cluster = cluster_of(("node01",))
    stripped = strip_cluster(replace(cluster, nodes=(replace(cluster.nodes[0], ssh=ssh),), file="/f"))
    assert stripped.nodes[0].ssh == Ssh(address="a", port=2222, user="train")
    assert stripped.file == ""


# --------------------------------------------------------------------------- writing


def test_a_bundle_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    save_bundle(path, cluster_of(), SMALL)
    good = path.read_bytes()
    with pytest.raises(TypeError):  # what cannot be JSON is a bug of the caller; the old file stays
        save_bundle(path, cluster_of(), replace(SMALL, measurements={"m": object()}))
    assert path.read_bytes() == good
    assert [entry.name for entry in tmp_path.iterdir()] == ["b.tar.gz"]


@pytest.mark.parametrize("name", ["no/such/folder/b.tar.gz", "."])
def test_a_place_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save_bundle(tmp_path / name, cluster_of(), SMALL)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- reading hostile files


def members_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def packed(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def plain(name: str, data: bytes = b"{}") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, data


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("good") / "b.tar.gz"
    save_bundle(path, cluster_of(), SMALL)
    return members_of(path)


def sparse(name: str, size: int) -> tuple[tarfile.TarInfo, bytes]:
    """Return a member of 512 bytes that claims to hold `size` (the sparse format 1.0 of GNU tar)."""
    info, data = plain(name, b"1\n0\n0\n".ljust(512, b"\0"))
    headers = {"major": "1", "minor": "0", "name": name, "realsize": str(size)}
    info.pax_headers = {f"GNU.sparse.{key}": value for key, value in headers.items()}
    return info, data


Change = Callable[[dict[str, bytes]], list[tuple[tarfile.TarInfo, bytes]]]


def having(*extra: tuple[tarfile.TarInfo, bytes], without: str = "", **changed: bytes) -> Change:
    """Return a change of the good bundle: one member left out, some replaced, more added."""

    def change(good: dict[str, bytes]) -> list[tuple[tarfile.TarInfo, bytes]]:
        members = {name: changed.get(name.removesuffix(".json"), data) for name, data in good.items() if name != without}
        return [*(plain(name, data) for name, data in members.items()), *extra]

    return change


def forged(twice: bool = False, **changes: Any) -> bytes:
    """Return cluster.json of a good bundle with some values in it that no cluster.yaml may hold."""
    cluster = asdict(strip_cluster(cluster_of()))
    cluster["nodes"][0].update(changes.pop("node", {}))
    for key, change in changes.items():
        cluster[key] = {**cluster[key], **change} if isinstance(change, dict) else change
    if twice:
        cluster["nodes"] = [cluster["nodes"][0]] * 2
    return json.dumps(cluster).encode()


HOSTILE: dict[str, tuple[Change, str]] = {
    "traversal": (having(plain("../evil.json")), "unexpected member"),
    "traversal below a folder": (having(plain("answers/../../evil.json")), "unexpected member"),
    "absolute": (having(plain("/tmp/evil.json")), "unexpected member"),
    "another file": (having(plain("setup.py")), "unexpected member"),
    "symbolic link": (having(special("answers/node01.json", tarfile.SYMTYPE, "/etc/passwd")), "not a plain file"),
    "hard link": (having(special("answers/node01.json", tarfile.LNKTYPE, "cluster.json")), "not a plain file"),
    "fifo": (having(special("answers/node01.json", tarfile.FIFOTYPE)), "not a plain file"),
    "device": (having(special("answers/node01.json", tarfile.CHRTYPE)), "not a plain file"),
    "folder": (having(special("answers", tarfile.DIRTYPE)), "not a plain file"),
    "sparse": (having(sparse("answers/node01.json", 3 << 20)), "not a plain file"),
    "twice": (having(plain("reach.json")), "twice"),
    "no cluster": (having(without="cluster.json"), "has no cluster.json"),
    "no reach": (having(without="reach.json"), "has no reach.json"),
    "no head": (having(without="bundle.json"), "has no bundle.json"),
    "another schema": (having(bundle=b'{"schema": "r4090c.bundle/2"}'), "r4090c.bundle/2"),
    "schema of another type": (having(bundle=b"[1]"), "schema"),
    "head is no JSON": (having(bundle=b"{"), "not JSON"),
    "not UTF-8": (having(reach=b"\xff\xfe"), "not UTF-8"),
    "cluster of another shape": (having(cluster=b'{"name": "x"}'), "cluster.json"),
    "cluster of other types": (
        having(cluster=b'{"name": 7, "nodes": [], "network": {}, "storage": {}, "expect": {}}'),
        "cluster.json",
    ),
    "a subnet that is none": (having(cluster=forged(network={"subnet": "10.10.0"})), "subnet"),
    "a threshold without bounds": (having(cluster=forged(expect={"shm_min_gib": 1e300})), "shm_min_gib"),
    "a name that is a path": (having(cluster=forged(node={"name": "../x"})), "name"),
    "two nodes of one name": (having(cluster=forged(twice=True)), "two of one name"),
    "no node": (having(cluster=forged(nodes=[])), "nodes"),
    "reach of another shape": (having(reach=b'{"node01": {"verdict": 7}}'), "reach.json"),
    "reached without an answer": (
        having(reach=json.dumps({"node01": {**LOST, "verdict": "ok"}}).encode()),
        "no answer of node01",
    ),
    "nested too deep": (having(reach=b"[" * 200_000), ""),
    "measurement nested too deep": (having(plain("measurements/m.json", b"[" * 200_000)), "not JSON"),
    "answer is no JSON": (having(plain("answers/node01.json", b"nonsense")), "not JSON"),
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_hostile_bundles_are_refused_in_memory(
    what: str, good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = HOSTILE[what]
    path = tmp_path / "in" / "b.tar.gz"
    path.parent.mkdir()
    path.write_bytes(packed(change(good)))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with pytest.raises(UsageError) as refused:
        load_bundle(path)
    assert words in refused.value.observed
    assert str(path) == refused.value.culprit
    assert list(work.iterdir()) == []
    assert [p.name for p in path.parent.iterdir()] == ["b.tar.gz"]


def test_the_good_bundle_of_these_tests_is_good(good: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "b.tar.gz").write_bytes(packed(having()(good)))
    assert load_bundle(tmp_path / "b.tar.gz")[1] == SMALL
    assert json.loads(good["bundle.json"])["schema"] == SCHEMA


def test_a_decompression_bomb_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_BUNDLE_BYTES", 1 << 20)
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(bytes(2 << 20)))
    with pytest.raises(UsageError, match="unpacks to more than 1 MiB"):
        load_bundle(tmp_path / "b.tar.gz")


def test_a_member_that_claims_to_be_huge(tmp_path: Path) -> None:
    """A header that promises 64 GiB and a file that ends: neither memory nor time may follow the promise."""
    info = tarfile.TarInfo("reach.json")
    info.size = 64 << 30
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(info.tobuf() + bytes(1024)))
    with pytest.raises(UsageError):
        load_bundle(tmp_path / "b.tar.gz")


def test_many_members_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_MEMBERS", 5)
    (tmp_path / "b.tar.gz").write_bytes(packed([plain(f"answers/n{i}.json") for i in range(6)]))
    with pytest.raises(UsageError, match="more than 5 members"):
        load_bundle(tmp_path / "b.tar.gz")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a tar",
        gzip.compress(b"", mtime=0),
        gzip.compress(b"not a tar", mtime=0),
        gzip.compress(bytes(100_000), mtime=0),
    ],
)
def test_files_that_are_no_bundle(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "b.tar.gz").write_bytes(data)
    with pytest.raises(UsageError):
        load_bundle(tmp_path / "b.tar.gz")


def test_no_file_at_all(tmp_path: Path) -> None:
    for path in (tmp_path / "none.tar.gz", tmp_path):
        with pytest.raises(UsageError):
            load_bundle(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(where=st.integers(0, 10**6), new=st.binary(min_size=1, max_size=4), cut=st.booleans())
def test_a_damaged_bundle_is_a_bundle_or_a_usage_error(
    where: int, new: bytes, cut: bool, good: dict[str, bytes], tmp_path: Path
) -> None:
    """Bytes of the tar (inside gzip, whose checksum would hide them) are overwritten, or the rest is cut away."""
    data = gzip.decompress(packed(having()(good)))
    where %= len(data)
    data = data[:where] if cut else data[:where] + new + data[where + len(new) :]
    path = tmp_path / "b.tar.gz"
    path.write_bytes(gzip.compress(data, 1))
    try:
        cluster, raw = load_bundle(path)
    except UsageError:
        return
    parse_raw(raw, cluster)


def test_what_perftest_says_about_its_own_functions_is_no_secret() -> None:
    text = "ethernet_read_keys: Couldn't read remote address\nread_keys: hidden-value-1"
    clean = cleaner(cluster_of())
    assert clean(text, True) == "ethernet_read_keys: Couldn't read remote address\nread_keys: <not stored>"
