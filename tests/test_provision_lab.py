"""ssh-trust on real nodes, through the real command line: what it does, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from r4090c.inventory import load_cluster
from r4090c.remote import fetch_host_keys, known_host_keys
from tests.lab import Lab

pytestmark = pytest.mark.lab

NAMES = ("node01", "node02", "node03")
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass
class Controller:
    """A home of its own for the command line, and a cluster.yaml that knows no host keys."""

    lab: Lab
    home: Path

    @property
    def cluster_file(self) -> Path:
        return self.home / "cluster.yaml"

    @property
    def known_hosts(self) -> Path:
        return self.home / ".config" / "r4090c" / "known_hosts"

    def run(self, *words: str, stdin: Any = subprocess.DEVNULL, **environment: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", "from r4090c.cli import main; main()", "provision", "ssh-trust", *words]
        keep = {key: value for key, value in os.environ.items() if key not in ("SSH_AUTH_SOCK", "R4090C_CLUSTER")}
        return subprocess.run(
            [*argv, "--cluster", str(self.cluster_file)],
            capture_output=True,
            text=True,
            stdin=stdin,
            timeout=120,
            cwd=self.home,
            env={**keep, "HOME": str(self.home), "PYTHONPATH": str(REPOSITORY), **environment},
        )

    def report(self, *words: str, rc: int = 0) -> dict[str, Any]:
        done = self.run("--json", *words)
        assert done.returncode == rc, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        assert report["exit_code"] == rc
        return report

    def change_wish(self, **changes: Any) -> None:
        wish = yaml.safe_load(self.cluster_file.read_text())
        self.cluster_file.write_text(yaml.safe_dump({**wish, **changes}))


def controller_of(lab: Lab, home: Path) -> Controller:
    controller = Controller(lab, home)
    wish = yaml.safe_load(lab.cluster_file.read_text())
    del wish["ssh"]["known_hosts"]  # what a user has: ~/.ssh/known_hosts and ours
    controller.cluster_file.write_text(yaml.safe_dump(wish))
    return controller


@pytest.fixture
def trust(lab: Callable[..., Lab], tmp_path: Path) -> Iterator[Controller]:
    yield controller_of(lab(nodes=3, trust=False), tmp_path)


def snapshot(lab: Lab) -> dict[str, tuple[bytes | None, int, int]]:
    """All of the nodes' homes: path -> content, mode, time of the last change."""
    found = {}
    for name in lab.nodes:
        for path in sorted(lab.home(name).rglob("*")):
            stat = path.stat()
            found[f"{name}/{path.relative_to(lab.home(name))}"] = (
                path.read_bytes() if path.is_file() else None,
                stat.st_mode & 0o7777,
                stat.st_mtime_ns if path.is_file() else 0,
            )
    return found


def without_times(shot: dict[str, tuple[bytes | None, int, int]]) -> dict[str, tuple[bytes | None, int]]:
    return {name: (content, mode) for name, (content, mode, _) in shot.items()}


def logs_in(lab: Lab, source: str, peer: str) -> bool:
    """Plain ssh by name, as a launcher does it, started on the node itself."""
    done = lab.exec(source, "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "UpdateHostKeys=no", peer, "hostname")
    return (done.returncode, done.stdout) == (0, f"{peer}\n")


def full_mesh(lab: Lab, names: tuple[str, ...] = NAMES) -> bool:
    return all(logs_in(lab, source, peer) for source in names for peer in names)


def furnish(lab: Lab) -> None:
    """Give the nodes what accounts have: odd files, modes and line ends; node03 has no ~/.ssh."""
    for name in ("node01", "node02"):
        (lab.home(name) / ".ssh").mkdir(mode=0o700)
    one, two = lab.home("node01") / ".ssh", lab.home("node02") / ".ssh"
    (one / "authorized_keys").write_bytes(b"# nobody yet, and no newline")
    (one / "authorized_keys").chmod(0o640)
    (one / "known_hosts").write_bytes(b"")
    (two / "config").write_bytes(b"ServerAliveInterval 7\r\nHost node*\r\n  Port 9\r\n")
    (two / "config").chmod(0o644)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "own", "-f", str(two / "id_ed25519")], check=True)


def test_dry_run_trust_second_run_and_undo(trust: Controller) -> None:
    lab = trust.lab
    furnish(lab)
    before = snapshot(lab)
    assert not logs_in(lab, "node01", "node02")

    dry = trust.report("--dry-run")  # the host keys are not accepted yet: that is all it can tell
    assert [step["node"] for step in dry["steps"]] == ["this machine"]
    assert dry["waiting"] == list(NAMES)
    asked = trust.run()
    assert asked.returncode == 2
    assert "--yes" in asked.stderr
    for name in NAMES:
        public = lab.node(name).folder / "host_key.pub"
        line = subprocess.run(["ssh-keygen", "-lf", str(public)], capture_output=True, text=True, check=True).stdout
        assert re.search(rf"{name}  {re.escape(lab.address(name))}  ssh-ed25519  {re.escape(line.split()[1])}", asked.stderr)
    assert not trust.known_hosts.exists()
    assert snapshot(lab) == before

    done = trust.run("--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 of 9 logins work" in done.stdout
    assert full_mesh(lab)
    after = snapshot(lab)
    assert after["node01/.ssh/authorized_keys"][1] == 0o640
    assert after["node02/.ssh/config"][1] == 0o644
    assert after["node03/.ssh/id_ed25519"][1] == 0o600
    assert (lab.home("node03") / ".ssh").stat().st_mode & 0o7777 == 0o700
    assert after["node02/.ssh/id_ed25519"] == before["node02/.ssh/id_ed25519"]  # the account's own key serves
    for name in NAMES:  # the private key is nowhere but in its place
        private = (after[f"{name}/.ssh/id_ed25519"][0] or b"").splitlines()[3]  # the lines before it are alike in all keys
        assert [path for path, (content, _, _) in after.items() if private in (content or b"")] == [f"{name}/.ssh/id_ed25519"]
        assert private.decode() not in done.stdout + done.stderr
    known = trust.known_hosts.read_bytes()

    dry = trust.report("--dry-run")
    assert (dry["steps"], dry["logins"]) == ([], [])
    again = trust.run()
    assert again.returncode == 0, again.stdout + again.stderr
    assert "node01, node02, node03: nothing to do" in again.stdout
    assert snapshot(lab) == after  # times too
    assert trust.known_hosts.read_bytes() == known

    dry = trust.report("--undo", "--dry-run")
    assert {step["state"] for step in dry["steps"]} == {"planned"}
    assert snapshot(lab) == after
    undone = trust.report("--undo")
    assert {step["state"] for step in undone["steps"]} == {"done"}
    assert without_times(snapshot(lab)) == without_times(before)
    assert not (lab.home("node03") / ".ssh").exists()
    assert not trust.known_hosts.exists()
    assert not logs_in(lab, "node02", "node01")


def test_a_dry_run_with_known_host_keys_tells_every_step_and_touches_nothing(trust: Controller) -> None:
    lab = trust.lab
    trust.change_wish(ssh={"user": "root", "key": str(lab.key), "known_hosts": [str(lab.known_hosts)], "config": ""})
    before = snapshot(lab), lab.known_hosts.read_bytes()
    told = trust.run("--dry-run")
    assert told.returncode == 0, told.stderr
    for words in (
        "node01, node02, node03: would put the nodes' host keys into ~/.ssh/known_hosts",
        "+ the key that is made on node02",
        f"+     HostName {lab.address('node03')}",
        "node01, node02, node03: would make the key pair ~/.ssh/id_ed25519",
    ):
        assert words in told.stdout
    assert (snapshot(lab), lab.known_hosts.read_bytes()) == before


def test_a_changed_host_key_is_refused_until_the_old_one_is_dropped(trust: Controller) -> None:
    lab = trust.lab
    assert trust.run("--yes").returncode == 0
    known = trust.known_hosts.read_bytes()
    key = lab.node("node02").folder / "host_key"
    lab.stop_sshd("node02")
    key.unlink()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, stdin=subprocess.DEVNULL, input=None
    )
    lab.start_sshd("node02")
    report = trust.report("--yes", rc=1)
    (trouble,) = report["troubles"]
    assert (trouble["node"], trouble["verdict"]) == ("node02", "host-key-changed")
    assert trouble["next_command"] == f"ssh-keygen -f {trust.known_hosts} -R {lab.address('node02')}"
    assert trust.known_hosts.read_bytes() == known
    assert {(login["source"], login["peer"]) for login in report["logins"]} == {
        (source, peer) for source in ("node01", "node03") for peer in ("node01", "node03")
    }
    subprocess.run(["sh", "-c", trouble["next_command"]], check=True, capture_output=True)
    assert trust.report("--yes")["troubles"] == []
    assert full_mesh(lab)
    assert key.with_suffix(".pub").read_text().split()[1] in (lab.home("node01") / ".ssh" / "known_hosts").read_text()


def test_a_node_with_a_read_only_home_is_told_and_the_others_are_served(trust: Controller) -> None:
    lab = trust.lab
    ssh = lab.home("node02") / ".ssh"
    ssh.mkdir(mode=0o700)
    made = lab.exec("node02", "sh", "-c", f"mount --bind {ssh} {ssh} && mount -o remount,bind,ro {ssh}")
    assert made.returncode == 0, made.stderr
    done = trust.run("--yes")
    assert done.returncode == 1
    assert f"node02: use ~/.ssh: {ssh} is not writable" in done.stdout
    assert re.search(rf"next: +ssh .*root@{lab.address('node02')} 'ls -ld {ssh}'", done.stdout)
    assert "node02 -> node01: node02 does not know the host key of node01" in done.stdout
    assert full_mesh(lab, ("node01", "node03"))
    assert list(ssh.iterdir()) == []


def test_an_immutable_file_is_told_and_the_other_files_are_written(trust: Controller) -> None:
    lab = trust.lab
    (lab.home("node03") / ".ssh").mkdir(mode=0o700)
    config = lab.home("node03") / ".ssh" / "config"
    config.write_text("Host x\n")
    made = lab.exec("node03", "mount", "--bind", str(config), str(config))  # a mount point cannot be renamed over
    assert made.returncode == 0, made.stderr
    report = trust.report("--yes", rc=1)
    (failed,) = [step for step in report["steps"] if step["state"] == "failed"]
    assert (failed["node"], failed["id"]) == ("node03", "config")
    assert failed["observed"]
    assert "lsattr" in failed["next_command"]
    assert config.read_text() == "Host x\n"
    assert [path.name for path in config.parent.iterdir() if path.name.startswith(".r4090c")] == []
    assert all(login["ok"] for login in report["logins"])  # the lab's names resolve, so the config is not needed here


def test_a_node_that_is_off_costs_3_and_keeps_its_trust(trust: Controller) -> None:
    lab = trust.lab
    assert trust.run("--yes").returncode == 0
    lab.power_off("node03")
    after = {name: entry for name, entry in snapshot(lab).items() if not name.startswith("node03")}
    report = trust.report(rc=3)
    (trouble,) = report["troubles"]
    assert (trouble["node"], trouble["certain"]) == ("node03", False)
    assert report["steps"] == []
    assert {name: entry for name, entry in snapshot(lab).items() if not name.startswith("node03")} == after
    lab.power_on("node03")
    assert full_mesh(lab)


def test_a_node_that_joins_later_and_a_part_of_the_nodes(trust: Controller) -> None:
    lab = trust.lab
    assert trust.run("--yes", "--nodes", "node01,node02").returncode == 0
    assert full_mesh(lab, ("node01", "node02"))
    assert not (lab.home("node03") / ".ssh").exists()
    assert trust.run("--yes").returncode == 0
    assert full_mesh(lab)
    whole = snapshot(lab)
    assert trust.report("--nodes", "node02")["steps"] == []  # the others' lines stay
    assert snapshot(lab) == whole
    trust.report("--undo", "--nodes", "node03")
    assert not (lab.home("node03") / ".ssh").exists()
    assert lab.address("node03") not in trust.known_hosts.read_text()
    assert full_mesh(lab, ("node01", "node02"))
    assert trust.run("--undo", "--nodes", "node03").returncode == 3  # its host key is forgotten: nobody can look


def test_noise_on_stdout_and_a_key_with_a_passphrase_are_failures_with_their_causes(trust: Controller) -> None:
    lab = trust.lab
    lab.stand_in("node02", "hello", "#!/bin/sh\necho Welcome to node02\n")
    (lab.home("node02") / ".bashrc").write_text("hello\n")
    folder = lab.home("node03") / ".ssh"
    folder.mkdir(mode=0o700)
    key = folder / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret words", "-C", "own", "-f", str(key)], check=True)
    before = key.read_bytes()
    done = trust.run("--yes")
    assert done.returncode == 1
    assert f"node03: use the key ~/.ssh/id_ed25519: {key} has a passphrase" in done.stdout
    assert "ssh-keygen -p -f" in done.stdout
    assert "node01 -> node02: the login shell of node02 prints 'Welcome to node02'" in done.stdout
    assert "node03 -> node01: node01 refuses the key of node03" in done.stdout
    assert logs_in(lab, "node01", "node03")  # the other direction works
    assert "secret" not in done.stdout + done.stderr
    assert key.read_bytes() == before
    undone = trust.run("--undo")
    assert undone.returncode == 0, undone.stdout
    assert key.read_bytes() == before


def test_nodes_that_share_an_account_and_an_address(lab: Callable[..., Lab], tmp_path: Path) -> None:
    """As in the demo: two sshd's on one machine. No entry is there twice, and plain port 22 is not claimed."""
    running = lab(nodes=1, trust=False)
    node = running.node("node01")
    for port in (2201, 2202):
        folder = node.folder / f"second-{port}"
        folder.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key")], check=True)
        config = Path(node.sshd_config).read_text().replace(f"{node.folder}/host_key", f"{folder}/host_key")
        (folder / "sshd_config").write_text(config.replace(f"{node.address}:22", f"{node.address}:{port}"))
        started = running.exec("node01", str(shutil.which("sshd", path="/usr/sbin:/sbin")), "-f", str(folder / "sshd_config"))
        assert started.returncode == 0, started.stderr
    controller = controller_of(running, tmp_path)
    nodes = [
        {"name": f"demo{port - 2200:02d}", "address": node.address, "gpus": 0, "ssh": {"port": port}} for port in (2201, 2202)
    ]
    controller.change_wish(nodes=nodes, network={"kind": "loopback"})
    before = snapshot(running)
    report = controller.report("--yes")
    assert [login["ok"] for login in report["logins"]] == [True] * 4
    folder = running.home("node01") / ".ssh"
    assert (folder / "authorized_keys").read_text().count("ssh-ed25519") == 1
    hosts = [line.split()[0] for line in (folder / "known_hosts").read_text().splitlines() if not line.startswith("#")]
    assert hosts == [f"[demo01]:2201,[{node.address}]:2201", f"[demo02]:2202,[{node.address}]:2202"]
    after = snapshot(running)
    assert controller.report()["steps"] == []
    assert snapshot(running) == after
    assert {step["state"] for step in controller.report("--undo")["steps"]} <= {"done", "unchanged"}
    assert without_times(snapshot(running)) == without_times(before)


def test_the_person_at_the_terminal_is_asked_and_may_say_no(trust: Controller) -> None:
    for answer, rc in (("n\n", 1), ("y\n", 0)):
        master, slave = os.openpty()
        try:
            os.write(master, answer.encode())
            done = trust.run(stdin=slave)
        finally:
            os.close(master)
            os.close(slave)
        assert done.returncode == rc, done.stderr
        assert "Are these the right keys of 3 nodes?" in done.stderr
        assert trust.known_hosts.exists() == (rc == 0)
        if rc:
            assert "were not accepted; nothing was changed" in done.stderr


def test_where_new_host_keys_go(trust: Controller) -> None:
    lab = trust.lab
    users = trust.home / ".ssh" / "known_hosts"
    users.parent.mkdir(mode=0o700)
    users.write_text("somewhere ssh-ed25519 AAAA\n")
    assert trust.run("--yes", "--nodes", "1").returncode == 0  # ours is read as well, so the user's own file stays as it is
    assert users.read_text() == "somewhere ssh-ed25519 AAAA\n"
    assert lab.address("node01") in trust.known_hosts.read_text()
    elsewhere = trust.home / "elsewhere"
    ssh = {"user": "root", "key": str(lab.key), "config": ""}
    trust.change_wish(ssh={**ssh, "known_hosts": [str(elsewhere / "known_hosts"), str(users)]})
    assert trust.run("--yes", "--nodes", "1").returncode == 0  # ours is not read: the first of those that are
    assert (elsewhere / "known_hosts").exists()
    trust.change_wish(ssh={**ssh, "known_hosts": [str(users), str(trust.home / "r4090c" / "known_hosts")]})
    assert trust.run("--yes", "--nodes", "1", R4090C_CONFIG=str(trust.home / "r4090c")).returncode == 0
    assert (trust.home / "r4090c" / "known_hosts").exists()
    trust.change_wish(ssh={**ssh, "known_hosts": []})
    none = trust.run("--yes", "--nodes", "1")
    assert none.returncode == 2
    assert "an empty list" in none.stderr
    link = trust.home / "link"
    link.symlink_to(users)
    trust.change_wish(ssh={**ssh, "known_hosts": [str(link)]})
    refused = trust.run("--yes", "--nodes", "1")
    assert refused.returncode == 1
    assert "is a symbolic link to" in refused.stdout
    assert users.read_text() == "somewhere ssh-ed25519 AAAA\n"


def test_all_kinds_of_host_keys_are_fetched_through_a_jump_host_too(trust: Controller) -> None:
    lab = trust.lab
    folder = lab.node("node02").folder
    config = Path(lab.node("node02").sshd_config)
    for kind in ("rsa", "ecdsa"):
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(folder / kind)], check=True)
        config.write_text(config.read_text() + f'HostKey "{folder}/{kind}"\n')
    lab.stop_sshd("node02")
    lab.start_sshd("node02")
    public = {tuple((folder / f"{name}.pub").read_text().split()[:2]) for name in ("host_key", "rsa", "ecdsa")}
    assert set(fetch_host_keys(load_cluster(trust.cluster_file).node("node02"))) == public
    known = trust.home / "jump_known_hosts"
    line = next(line for line in lab.known_hosts.read_text().splitlines() if line.startswith("node01,"))
    known.write_text(f"{line}\n")
    jump = {
        "user": "root",
        "key": str(lab.key),
        "config": "",
        "jump": f"root@{lab.address('node01')}",
        "known_hosts": [str(known)],
    }
    trust.change_wish(ssh=jump)
    node = load_cluster(trust.cluster_file).node("node02")
    assert known_host_keys(node) == []
    assert set(fetch_host_keys(node)) == public
    assert trust.run("--yes", "--nodes", "node02").returncode == 0
    assert set(known_host_keys(load_cluster(trust.cluster_file).node("node02"))) == public
    known.write_text("")
    report = trust.report("--yes", "--nodes", "node02", rc=3)
    assert f"its jump host root@{lab.address('node01')} could not be used" in report["troubles"][0]["observed"]


def test_the_report_has_the_documented_keys(trust: Controller) -> None:
    report = trust.report("--yes", "--nodes", "1")
    assert set(report) == {
        "schema",
        "procedure",
        "cluster",
        "dry_run",
        "undo",
        "exit_code",
        "steps",
        "troubles",
        "waiting",
        "logins",
    }
    assert (report["schema"], report["procedure"]) == ("r4090c.provision/1", "ssh-trust")
    assert set(report["steps"][0]) == {"node", "id", "what", "why", "lines", "state", "observed", "expected", "next_command"}
    assert report["logins"] == [
        {"source": "node01", "peer": "node01", "ok": True, "cause": "", "observed": "", "next_command": ""}
    ]


DEMO = """
import json, subprocess, sys
from pathlib import Path
from provision.loopback import LoopbackCluster
with LoopbackCluster(nodes=2) as file:
    if ".ssh/authorized_keys" not in (file.parent / "demo01" / "sshd_config").read_text():
        print(json.dumps(None))
        sys.exit()
    main = "from r4090c.cli import main; main()"
    argv = [sys.executable, "-c", main, "provision", "ssh-trust", "--json", "--cluster", str(file)]
    done = [subprocess.run([*argv, *words], capture_output=True, text=True) for words in ([], [], ["--undo"])]
    left = sorted(str(path) for path in Path.home().rglob("*"))
    print(json.dumps([[each.returncode, json.loads(each.stdout)] for each in done] + [left]))
"""


def test_the_demo_cluster(lab: Callable[..., Lab]) -> None:
    """Run inside a lab node: the demo's nodes are this account, and its ~/.ssh is not to be the tester's own."""
    running = lab(nodes=1, trust=False)
    before = snapshot(running)
    done = running.exec("node01", "env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-c", DEMO)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer is None:
        pytest.skip("the sshd's of the demo do not read ~/.ssh/authorized_keys")
    (first, report), (second, again), (third, undone), left = answer
    assert (first, second, third) == (0, 0, 0)
    assert [login["ok"] for login in report["logins"]] == [True] * 4
    assert again["steps"] == []
    assert {step["state"] for step in undone["steps"]} <= {"done", "unchanged"}
    assert left == []
    assert snapshot(running) == before
