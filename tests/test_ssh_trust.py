"""The planners of ssh-trust: golden plans, and the same plans carried out on real folders until nothing is left to do."""

from __future__ import annotations

import base64
import dataclasses
import getpass
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision import on_node
from provision.apply import file_seen, to_json
from provision.ssh_trust import (
    AUTHORIZED_KEYS,
    CONFIG,
    FILES,
    KEY,
    KNOWN_HOSTS,
    FileSeen,
    KeySeen,
    NodeSeen,
    Peer,
    TrustWish,
    explain,
    fingerprint,
    known_name,
    plan_forget_host_keys,
    plan_host_keys,
    plan_trust,
    plan_undo,
    reachable_endpoint,
)
from provision.steps import MakeKey, RemoveFile, RemoveFolder, RemoveKey, Step, WriteFile

TOOLS = {"ssh": "/usr/bin/ssh", "ssh-keygen": "/usr/bin/ssh-keygen"}


def blob(letter: str) -> str:
    """A well-formed ed25519 public key that nobody holds."""
    return base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + letter.encode() * 32).decode()


def peers(*names: str, port: int = 22) -> tuple[Peer, ...]:
    return tuple(Peer(name, (f"192.168.1.1{place}", port), f"10.10.0.1{place}") for place, name in enumerate(names, start=1))


def seen(name: str, letter: str = "", *, home: str = "/home/train", **changes: object) -> NodeSeen:
    """A node where nothing was done yet; `letter`: it has this key pair."""
    folder = f"{home}/.ssh"
    node = NodeSeen(
        node=name,
        home=home,
        user="train",
        folder=folder,
        files={file: FileSeen(f"{folder}/{file}") for file in FILES},
        key=KeySeen(f"{folder}/{KEY}", exists=bool(letter), public=f"ssh-ed25519 {blob(letter)} a comment" if letter else ""),
        host_keys=(("ssh-ed25519", blob(name[-1])),),
        tools=TOOLS,
    )
    return dataclasses.replace(node, **changes)  # type: ignore[arg-type]


def plan(*nodes: NodeSeen, wish: TrustWish) -> tuple[Step, ...]:
    return plan_trust({node.node: node for node in nodes}, wish)


def with_file(node: NodeSeen, name: str, content: bytes | None, refused: str = "") -> NodeSeen:
    return dataclasses.replace(node, files={**node.files, name: FileSeen(f"{node.folder}/{name}", content, refused)})


def lines_of(steps: tuple[Step, ...], node: str, name: str) -> tuple[str, ...]:
    (step,) = [step for step in steps if (step.node, step.id) == (node, name)]
    return step.lines


def content_of(steps: tuple[Step, ...], node: str, name: str) -> str:
    (step,) = [step for step in steps if (step.node, step.id) == (node, name)]
    assert isinstance(step.action, WriteFile)
    return step.action.content.decode()


TWO = TrustWish("atelier", peers("node1", "node2"))

# ------------------------------------------------------------------------------------------ golden plans


def test_two_new_nodes_get_config_host_keys_a_key_pair_and_then_each_others_keys() -> None:
    steps = plan(seen("node1"), seen("node2"), wish=TWO)
    assert [(step.node, step.id) for step in steps] == [
        (node, part) for node in ("node1", "node2") for part in (CONFIG, KNOWN_HOSTS, KEY, AUTHORIZED_KEYS)
    ]
    assert content_of(steps, "node2", CONFIG) == (
        "# r4090c begin ssh-trust (cluster atelier)\n"
        "# note: file-made\n"
        "Host node1\n    HostName 192.168.1.11\n    Port 22\n    User train\n"
        "Host node2\n    HostName 192.168.1.12\n    Port 22\n    User train\n"
        "Host *\n"
        "# r4090c end ssh-trust (cluster atelier)\n"
    )
    assert content_of(steps, "node2", KNOWN_HOSTS) == (
        "# r4090c begin ssh-trust (cluster atelier)\n"
        "# note: file-made\n"
        f"node1,192.168.1.11,10.10.0.11 ssh-ed25519 {blob('1')} r4090c@node1\n"
        f"node2,192.168.1.12,10.10.0.12 ssh-ed25519 {blob('2')} r4090c@node2\n"
        "# r4090c end ssh-trust (cluster atelier)\n"
    )
    assert steps[2].action == MakeKey("/home/train/.ssh/id_ed25519", "r4090c@node1")
    waiting = steps[3]
    assert waiting.needs == (f"node1:{KEY}", f"node2:{KEY}")
    assert waiting.action is None
    assert waiting.lines == ("+ the key that is made on node1", "+ the key that is made on node2")


def test_with_keys_the_authorized_keys_are_the_nodes_keys_without_their_owners_comments() -> None:
    steps = plan(seen("node1", "a"), seen("node2", "b"), wish=TWO)
    assert [step.id for step in steps if step.node == "node1"] == [CONFIG, KNOWN_HOSTS, AUTHORIZED_KEYS]
    assert content_of(steps, "node1", AUTHORIZED_KEYS) == (
        "# r4090c begin ssh-trust (cluster atelier)\n"
        "# note: file-made\n"
        f"ssh-ed25519 {blob('a')} r4090c@node1\n"
        f"ssh-ed25519 {blob('b')} r4090c@node2\n"
        "# r4090c end ssh-trust (cluster atelier)\n"
    )
    assert not any(step.needs for step in steps)


def test_where_the_name_is_the_address_no_config_is_needed() -> None:
    wish = TrustWish("atelier", (Peer("node1", ("node1", 22), "node1"), Peer("node2", ("node2", 22), "node2")))
    steps = plan(seen("node1", "a"), seen("node2", "b"), wish=wish)
    assert {step.id for step in steps} == {KNOWN_HOSTS, AUTHORIZED_KEYS}
    assert f"node1 ssh-ed25519 {blob('1')} r4090c@node1" in content_of(steps, "node1", KNOWN_HOSTS)


def test_ports_and_users_are_told_and_known_hosts_spells_ports_as_ssh_looks_them_up() -> None:
    wish = TrustWish("atelier", (Peer("node1", ("10.0.0.1", 2222), "10.0.0.1"), Peer("node2", ("10.0.0.2", 22), "10.0.0.2")))
    steps = plan(seen("node1", "a"), seen("node2", "b", user="root"), wish=wish)
    assert content_of(steps, "node2", CONFIG).splitlines()[2:-2] == [
        "Host node1",
        "    HostName 10.0.0.1",
        "    Port 2222",
        "    User train",
        "Host node2",
        "    HostName 10.0.0.2",
        "    Port 22",
        "    User root",
    ]
    names = [line.split()[1] for line in lines_of(steps, "node1", KNOWN_HOSTS)]
    assert names == [
        "[node1]:2222,[10.0.0.1]:2222",
        "node2,10.0.0.2",
    ]  # port 22 of 10.0.0.1 is not claimed: it may be another server


def test_nodes_that_share_one_account_on_one_machine_list_its_key_once_and_both_host_keys() -> None:
    wish = TrustWish("demo", (Peer("demo1", ("127.0.0.1", 2201), "127.0.0.1"), Peer("demo2", ("127.0.0.1", 2202), "127.0.0.1")))
    steps = plan(seen("demo1", "a"), seen("demo2", "a"), wish=wish)
    assert lines_of(steps, "demo1", AUTHORIZED_KEYS) == (f"+ ssh-ed25519 {blob('a')} r4090c@demo1",)
    assert [line.split()[1] for line in lines_of(steps, "demo1", KNOWN_HOSTS)] == [
        "[demo1]:2201,[127.0.0.1]:2201",
        "[demo2]:2202,[127.0.0.1]:2202",
    ]
    for name in FILES:
        assert content_of(steps, "demo1", name) == content_of(steps, "demo2", name)


def test_a_node_behind_a_forwarded_port_is_reached_at_its_data_address() -> None:
    peer = Peer("node1", ("bastion", 2201), "10.10.0.11")
    assert peer.endpoints == (("bastion", 2201), ("10.10.0.11", 2201), ("10.10.0.11", 22))
    answers = {("bastion", 2201): False, ("10.10.0.11", 2201): False, ("10.10.0.11", 22): True}
    wish = TrustWish("atelier", (peer, Peer("node2", ("10.10.0.12", 22), "10.10.0.12")))
    nodes = [seen("node1", "a", reach=answers), seen("node2", "b", reach=answers)]
    assert reachable_endpoint(peer, nodes) == ("10.10.0.11", 22)
    steps = plan(*nodes, wish=wish)
    assert "Host node1\n    HostName 10.10.0.11\n    Port 22\n" in content_of(steps, "node2", CONFIG)
    assert lines_of(steps, "node2", KNOWN_HOSTS)[0].split()[1] == "node1,10.10.0.11,[bastion]:2201,[10.10.0.11]:2201"


def test_a_key_that_somebody_already_lists_is_not_listed_again_unless_it_is_restricted() -> None:
    node = with_file(seen("node1", "a"), AUTHORIZED_KEYS, f"ssh-ed25519 {blob('b')} of the admin\n".encode())
    steps = plan(node, seen("node2", "b"), wish=TWO)
    assert lines_of(steps, "node1", AUTHORIZED_KEYS) == (f"+ ssh-ed25519 {blob('a')} r4090c@node1",)
    node = with_file(node, AUTHORIZED_KEYS, f'from="10.0.0.1" ssh-ed25519 {blob("b")} of the admin\n'.encode())
    assert len(lines_of(plan(node, seen("node2", "b"), wish=TWO), "node1", AUTHORIZED_KEYS)) == 2


def test_a_node_whose_name_looks_like_a_key_type_keeps_its_host_key() -> None:
    wish = TrustWish("atelier", peers("ssh-1", "ssh-2"))
    assert len(lines_of(plan(seen("ssh-1", "a"), seen("ssh-2", "b"), wish=wish), "ssh-1", KNOWN_HOSTS)) == 2


def test_a_node_that_is_away_keeps_its_lines_and_one_that_left_the_cluster_loses_them() -> None:
    three = TrustWish("atelier", peers("node1", "node2", "node3"))
    nodes = {node.node: node for node in (seen("node1", "a"), seen("node2", "b"), seen("node3", "c"))}
    first = nodes["node1"]
    for step in plan_trust(nodes, three):
        if step.node == "node1" and isinstance(step.action, WriteFile):
            first = with_file(first, step.id, step.action.content)
    assert not [step for step in plan(first, nodes["node2"], wish=three) if step.node == "node1"]  # node3 is away
    for name in (KNOWN_HOSTS, AUTHORIZED_KEYS):
        gone = lines_of(plan(first, nodes["node2"], wish=TWO), "node1", name)
        assert len(gone) == 1
        assert gone[0].startswith("- ")
        assert gone[0].endswith("r4090c@node3")
    assert lines_of(plan(first, nodes["node2"], wish=TWO), "node1", CONFIG) == (
        "- Host node3",
        "-     HostName 192.168.1.13",
        "-     Port 22",
        "-     User train",
    )


def test_a_new_host_key_of_a_reinstalled_node_replaces_the_old_one() -> None:
    node = seen("node1", "a")
    for step in plan(node, seen("node2", "b"), wish=TWO):
        if step.node == "node1" and isinstance(step.action, WriteFile):
            node = with_file(node, step.id, step.action.content)
    steps = plan(node, seen("node2", "b", host_keys=(("ssh-ed25519", blob("z")),)), wish=TWO)
    gone, come = lines_of(steps, "node1", KNOWN_HOSTS)
    assert blob("2") in gone
    assert blob("z") in come


@pytest.mark.parametrize(
    ("broken", "where", "observed", "command"),
    [
        (
            with_file(seen("node1", "a"), CONFIG, None, "is a symbolic link to /etc/x"),
            CONFIG,
            "is a symbolic link to /etc/x",
            "ls -ld",
        ),
        (
            with_file(seen("node1", "a"), KNOWN_HOSTS, b"# r4090c begin ssh-trust (cluster atelier)\nnode9 x y\n"),
            KNOWN_HOSTS,
            "has no line '# r4090c end ssh-trust (cluster atelier)'",
            "ls -ld",
        ),
        (seen("node1", folder_refused="belongs to root, not to train"), "folder", "belongs to root", "ls -ld /home/train/.ssh"),
        (
            seen(
                "node1",
                "a",
                key=KeySeen("/k", True, "", "/k has a passphrase, and nobody is there to type it", "ssh-keygen -p -f /k"),
            ),
            KEY,
            "has a passphrase",
            "ssh-keygen -p -f /k",
        ),
        (seen("node1", tools={"ssh": "/usr/bin/ssh", "ssh-keygen": ""}), KEY, "ssh-keygen is not installed", "apt install"),
        (seen("node1", "a", tools={"ssh": "", "ssh-keygen": ""}), "ssh", "ssh is not installed", "apt install"),
    ],
)
def test_what_cannot_be_done_is_a_step_with_its_problem_and_the_other_node_is_served(
    broken: NodeSeen, where: str, observed: str, command: str
) -> None:
    steps = plan(broken, seen("node2", "b"), wish=TWO)
    (step,) = [step for step in steps if step.problem]
    assert (step.node, step.id, step.action) == ("node1", where, None)
    assert step.problem is not None
    assert observed in step.problem.observed
    assert command in step.problem.command
    assert [step.id for step in steps if step.node == "node2" and step.action] == [CONFIG, KNOWN_HOSTS, AUTHORIZED_KEYS]


def test_no_step_ever_holds_a_private_key() -> None:
    steps = plan(seen("node1", "a"), seen("node2", "b"), wish=TWO)
    assert "PRIVATE" not in repr(steps)


# ------------------------------------------------------------------------------------------ undo


def test_undo_takes_away_files_folder_and_key_that_were_made_and_nothing_else() -> None:
    made = f"# r4090c begin ssh-trust (cluster atelier)\n# note: file-made folder-made\nssh-ed25519 {blob('a')} r4090c@node1\n"
    made += "# r4090c end ssh-trust (cluster atelier)\n"
    node = with_file(seen("node1"), AUTHORIZED_KEYS, made.encode())
    node = dataclasses.replace(node, key=KeySeen(f"{node.folder}/{KEY}", True, f"ssh-ed25519 {blob('a')} r4090c@node1"))
    kinds = [type(step.action) for step in plan_undo({"node1": node}, TWO)]
    assert kinds == [RemoveFile, RemoveKey, RemoveFolder]
    own = dataclasses.replace(node, key=dataclasses.replace(node.key, public=f"ssh-ed25519 {blob('a')} train@node1"))
    assert RemoveKey not in [type(step.action) for step in plan_undo({"node1": own}, TWO)]
    assert plan_undo({"node1": seen("node1", "a")}, TWO) == ()


def test_undo_keeps_the_key_that_another_clusters_trust_stands_on() -> None:
    other = b"# r4090c begin ssh-trust (cluster other)\nx\n# r4090c end ssh-trust (cluster other)\n"
    node = with_file(seen("node1"), AUTHORIZED_KEYS, other)
    node = dataclasses.replace(node, key=KeySeen(f"{node.folder}/{KEY}", True, f"ssh-ed25519 {blob('a')} r4090c@node1"))
    assert plan_undo({"node1": node}, TWO) == ()


# ------------------------------------------------------------------------------------------ carried out for real


def look(home: Path, name: str) -> NodeSeen:
    """What the program on a node would tell, were `home` the account's home."""
    folder = home / ".ssh"
    key = on_node.look_at_key(str(folder / KEY))
    return NodeSeen(
        node=name,
        home=str(home),
        user=getpass.getuser(),
        folder=str(folder),
        files={each: file_seen(str(folder / each), on_node.look_at_file(str(folder / each))) for each in FILES},
        key=KeySeen(str(folder / KEY), key["exists"], key["public"], key["refused"], key["command"]),
        host_keys=(("ssh-ed25519", blob(name[-1])),),
        folder_exists=folder.exists(),
        folder_refused=on_node.why_not_folder(str(folder)),
        tools=TOOLS,
    )


def act(steps: tuple[Step, ...]) -> list[str]:
    """Carry out the steps that are ready; return the states."""
    ready = [step for step in steps if step.action and not step.needs]
    results = on_node.carry_out([to_json(step) for step in ready])
    assert [result for result in results if result["state"] == "failed"] == []
    return [result["state"] for result in results]


def trust(homes: Mapping[str, Path], wish: TrustWish) -> int:
    """Plan and act until nothing is left; return the number of rounds."""
    for rounds in range(5):
        steps = plan_trust({name: look(home, name) for name, home in homes.items()}, wish)
        assert not [step for step in steps if step.problem]
        if not steps:
            return rounds
        act(steps)
    raise AssertionError("the plan never becomes empty")


def snapshot(folder: Path) -> dict[str, tuple[bytes | None, int]]:
    """Every path below `folder` with its content and mode."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else None, path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen (package openssh-client)")


@needs_ssh_keygen
@pytest.mark.parametrize("shared_home", [False, True])
def test_two_rounds_do_a_third_finds_nothing_and_undo_restores_every_byte_and_mode(tmp_path: Path, shared_home: bool) -> None:
    homes = {name: tmp_path / ("home" if shared_home else name) for name in ("node1", "node2")}
    for place, home in enumerate(dict.fromkeys(homes.values())):
        home.mkdir(mode=0o700)
        if place == 0:
            (home / ".ssh").mkdir(mode=0o755)
            (home / ".ssh" / "authorized_keys").write_bytes(f"ssh-ed25519 {blob('q')} admin".encode())  # no newline at the end
            (home / ".ssh" / "config").write_bytes(b"User bob\r\nHost x\r\n  Port 1\r\n")
            (home / ".ssh" / "config").chmod(0o640)
    before = snapshot(tmp_path)
    assert trust(homes, TWO) == 2
    after = snapshot(tmp_path)
    first = homes["node1"] / ".ssh"
    assert (first / "config").stat().st_mode & 0o777 == 0o640
    assert (first / "known_hosts").stat().st_mode & 0o777 == 0o600
    assert (first / KEY).stat().st_mode & 0o777 == 0o600
    assert (first / "authorized_keys").read_text().count("r4090c@node") == (1 if shared_home else 2)
    assert not [name for name in after if ".r4090c-" in name]
    if not shared_home:
        assert (homes["node2"] / ".ssh").stat().st_mode & 0o777 == 0o700
    assert subprocess.run(["ssh", "-G", "-F", str(first / "config"), "node2"], capture_output=True, text=True).stdout.count(
        "hostname 192.168.1.12"
    )
    observed = {name: look(home, name) for name, home in homes.items()}
    steps = plan_undo(observed, TWO)
    assert set(act(steps)) <= {"done", "unchanged"}
    assert snapshot(tmp_path) == before
    assert plan_undo({name: look(home, name) for name, home in homes.items()}, TWO) == ()


@needs_ssh_keygen
def test_our_config_comes_first_and_does_not_swallow_the_users_own_global_options(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir(mode=0o700)
    config = tmp_path / ".ssh" / "config"
    config.write_text("ServerAliveInterval 7\nHost node1\n    HostName elsewhere\nHost *\n    Port 9\n    User bob\n")
    trust({"node1": tmp_path, "node2": tmp_path}, TWO)

    def option(host: str, name: str) -> str:
        done = subprocess.run(["ssh", "-G", "-F", str(config), host], capture_output=True, text=True, check=True)
        return next(line.split()[1] for line in done.stdout.splitlines() if line.startswith(f"{name} "))

    assert option("node1", "hostname") == "192.168.1.11"
    assert (option("node1", "port"), option("elsewhere", "port")) == ("22", "9")
    assert (option("node1", "user"), option("elsewhere", "user")) == (getpass.getuser(), "bob")
    assert option("elsewhere", "serveraliveinterval") == "7"
    assert option("node1", "serveraliveinterval") == "7"


# ------------------------------------------------------------------------------------------ the controller's known_hosts

KEYS = [("ssh-ed25519", blob("h")), ("ssh-rsa", blob("r"))]


def test_host_keys_are_added_to_the_block_and_forgotten_again() -> None:
    theirs = b"github.com ssh-ed25519 AAAA"
    step = plan_host_keys(FileSeen("/k", theirs), "atelier", ["node1", "node2"], {"node1": ("[10.0.0.1]:2222", KEYS)})
    assert isinstance(step.action, WriteFile)
    assert step.lines == tuple(f"+ [10.0.0.1]:2222 {kind} {key} r4090c@node1" for kind, key in KEYS)
    more = plan_host_keys(FileSeen("/k", step.action.content), "atelier", ["node1", "node2"], {"node2": ("10.0.0.2", KEYS[:1])})
    assert isinstance(more.action, WriteFile)
    assert more.action.content.decode().splitlines()[3:-1] == [
        *(f"[10.0.0.1]:2222 {kind} {key} r4090c@node1" for kind, key in KEYS),
        f"10.0.0.2 ssh-ed25519 {blob('h')} r4090c@node2",
    ]
    less = plan_forget_host_keys(FileSeen("/k", more.action.content), "atelier", ["node1", "node2"], ["node2"])
    assert less is not None
    assert isinstance(less.action, WriteFile)
    assert less.action.content == step.action.content
    none = plan_forget_host_keys(FileSeen("/k", step.action.content), "atelier", ["node1", "node2"], ["node1", "node2"])
    assert none is not None
    assert isinstance(none.action, WriteFile)
    assert none.action.content == theirs
    assert plan_forget_host_keys(FileSeen("/k", theirs), "atelier", ["node1"], ["node1"]) is None


def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    line = f"ssh-ed25519 {blob('h')} x"
    (tmp_path / "k.pub").write_text(line)
    done = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "k.pub")], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == fingerprint(blob("h"))


def test_known_names() -> None:
    assert known_name(("fe80::1", 22)) == "fe80::1"
    assert known_name(("::1", 2201)) == "[::1]:2201"


# ------------------------------------------------------------------------------------------ what a failed login means


@pytest.mark.parametrize(
    ("rc", "stdout", "stderr", "word", "where", "command"),
    [
        (0, "Welcome!\n", "", "noise", "b", ".bashrc"),
        (127, "", "ssh is not installed", "no ssh", "a", "apt install"),
        (255, "", "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "host key", "a", "-F b"),
        (255, "", "No ED25519 host key is known for b and you have requested strict checking.", "host key", "a", "ssh -G b"),
        (255, "", "ssh: Could not resolve hostname b: Name or service not known", "dns", "a", "ssh -G b"),
        (255, "", "ssh: connect to host b port 22: Connection refused", "refused", "a", "ssh -v b"),
        (255, "", "ssh: connect to host b port 22: Connection timed out", "timeout", "a", "ssh -v b"),
        (None, "", "no end within 15 s", "timeout", "a", "ssh -v b"),
        (255, "", "ssh: connect to host b port 22: No route to host", "no route", "a", "ip route"),
        (255, "", "root@b: Permission denied (publickey).", "auth", "b", "sshd -T"),
        (255, "", "@ WARNING: UNPROTECTED PRIVATE KEY FILE! @\nPermission denied (publickey).", "key mode", "a", "chmod 600"),
        (255, "", "Bad owner or permissions on /h/.ssh/config\r\n", "config", "a", "chmod go-w /h/.ssh/config"),
        (255, "", "/h/.ssh/config: line 3: Bad configuration option: x", "config", "a", "ssh -G b"),
        (255, "", "kex_exchange_identification: Connection closed by remote host", "dropped", "b", "maxstartups"),
        (1, "", "something new\n", "other", "a", "ssh -v b"),
        (255, "", "", "other", "a", "ssh -v b"),
    ],
)
def test_each_cause_has_its_word_its_place_and_its_command(
    rc: int | None, stdout: str, stderr: str, word: str, where: str, command: str
) -> None:
    cause = explain("a", "b", rc, stdout, stderr)
    assert cause is not None
    assert (cause.word, cause.where) == (word, where)
    assert command in cause.command


def test_a_login_is_good_only_with_rc_0_and_silence() -> None:
    assert explain("a", "b", 0, "", "Warning: Permanently added") is None
    assert explain("a", "b", 0, "\n", "") is not None


def test_a_refused_key_is_explained_by_what_others_may_write_to() -> None:
    cause = explain("a", "b", 255, "", "Permission denied (publickey).", ["/home/train", "/home/train/my keys"])
    assert cause is not None
    assert cause.command == "chmod go-w /home/train '/home/train/my keys'"
    assert "StrictModes" in cause.observed


@given(st.one_of(st.none(), st.integers(-1, 255)), st.text(max_size=80), st.text(max_size=200))
def test_whatever_a_login_prints_is_explained(rc: int | None, stdout: str, stderr: str) -> None:
    cause = explain("a", "b", rc, stdout, stderr)
    assert (cause is None) == (rc == 0 and not stdout)


@given(st.binary(max_size=300))
def test_any_authorized_keys_is_planned_or_refused(content: bytes) -> None:
    steps = plan(with_file(seen("node1", "a"), AUTHORIZED_KEYS, content), seen("node2", "b"), wish=TWO)
    (step,) = [step for step in steps if (step.node, step.id) == ("node1", AUTHORIZED_KEYS)]
    assert (step.problem is None) == isinstance(step.action, WriteFile)
