"""Remedies that change a file are run here against a copy of it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from netcheck.checks import REGISTRY
from netcheck.judge import judge
from r4090c.model import Finding, Status
from tests.checks.cases import HERE, build

CONTROLLER_COMMANDS = {"ssh", "r4090c", "sudo", "ping", "getent", "ip", "ssh-keygen", "ssh-keyscan", "ssh-copy-id"}
"""What a remedy may start with: it is pasted into a shell of the controller."""
NODE_COMMANDS = re.findall(
    r"\S+",
    """
    apt-get cat chcpu chmod chown chronyc command dcb devlink df dmesg dmidecode du ethtool findmnt grep head ib_send_lat
    ib_write_bw ibstat ibv_devinfo id install ip iperf3 loginctl ls lspci mkdir modprobe mount nfsstat nft nvidia-smi ping
    printf ps python rdma reboot rm sed setpci sh sort ss sshd stat sysctl systemctl tail tc tee timedatectl timeout touch
    true ufw umount uname update-grub usermod
    """,
)
"""What may start a command of a remedy on a node."""
PHYSICAL_ACTS: tuple[str, ...] = ()
"""Remedies that are no command at all; there are none: what hands must do stands in `why`."""


FINDINGS: list[tuple[str, dict[str, str]]] = [
    (f"{file.parent.name}/{file.stem}", finding)
    for file in sorted(HERE.glob("*/*.json"))
    for finding in json.loads(file.read_text())["findings"]
]


def assert_pasteable(line: str, known: set[str]) -> None:
    """Assert that every command of a shell line parses and starts with a program that is known here."""
    subprocess.run(["sh", "-n", "-c", line], check=True, capture_output=True)
    words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
    starts = [words[0]] + [after for word, after in pairwise(words) if word in ("|", "||", "&&", ";")]
    for place, start in enumerate(starts):
        if start == "sudo":
            starts[place] = words[words.index("sudo") + 1]
    assert {Path(start).name for start in starts} <= known | {"python3"}, line


@pytest.mark.parametrize("check", sorted({case.partition("/")[0] for case, _ in FINDINGS}))
def test_remedies_are_commands_to_paste(check: str) -> None:
    own = [(case, finding) for case, finding in FINDINGS if case.partition("/")[0] == check]
    for case, finding in own:
        assert finding["remedy"] or finding["status"] not in (Status.WARN, Status.FAIL, Status.UNKNOWN), case
    for line in sorted({finding["remedy"] for _, finding in own} - {"", *PHYSICAL_ACTS}):
        assert_remedy(line)


def assert_remedy(line: str) -> None:
    """Assert that a line can be pasted here, and what it runs over ssh on the node."""
    subprocess.run(["sh", "-n", "-c", line], check=True, capture_output=True)
    words = shlex.split(line)
    assert words[0] in CONTROLLER_COMMANDS, line
    if words[0] != "ssh":
        assert_pasteable(line, CONTROLLER_COMMANDS | set(NODE_COMMANDS))
    elif "@" in words[-2] and " " in words[-1]:
        assert_pasteable(words[-1], set(NODE_COMMANDS))


@pytest.mark.parametrize("text", ["set gpus: 3 for node02 in cluster.yaml", "see host-key", "ls   (then restart)"])
def test_prose_is_not_taken_for_a_command(text: str) -> None:
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        assert_pasteable(text, set(NODE_COMMANDS))


# --------------------------------------------------------------------------- names and paths that a shell would read

ODD = "/mnt/my data/$(touch hit)"
ODD_PATHS = {"shared": ODD, "runs": f"{ODD}/runs", "python": f"{ODD}/bin/python"}
FULL = {"fstype": "ext4", "total_gib": 100.0, "free_gib": 0.001, "free_inodes": 3, "error": None}


def disks(**change: object) -> list[dict[str, object]]:
    base = {"exists": True, "writable": False, **FULL, **change}
    return [{"path": path, **base} for path in (ODD, f"{ODD}/runs", "/tmp")]


ODD_CASES: dict[str, dict[str, object]] = {
    "missing": {"disks": disks(exists=False)},
    "full and not writable": {"disks": disks()},
    "writable not told, space not told": {"disks": disks(writable=None, free_gib=None)},
    "does not answer": {"disks": disks(error="no answer in 5 s")},
    "not mounted": {
        "mounts": [{"source": "/dev/sda1", "target": "/", "fstype": "ext4", "options": ["rw"]}],
        "disks": disks(writable=True),
    },
    "mounted soft": {
        "mounts": [{"source": "old:/x", "target": ODD, "fstype": "nfs", "options": ["ro", "soft", "rsize=4096"]}],
        "disks": disks(writable=True),
    },
    "no python": {"python": {"error": f"{ODD}/bin/python: not there"}},
    "no torch": {"python": {"packages": {"=": {}}}},
    "other versions": {
        "python": {"version": "3.9.1", "packages": {"torch": "2.5.0", "nvidia-nccl-cu12": "2.20.5", "deepspeed": "0.16.0"}}
    },
}


def odd_findings(facts: dict[str, object]) -> list[Finding]:
    late = {"seen": {"node02": {"waited_s": 3.0}, "node03": {"waited_s": 3.0}}}
    case = {
        "cluster": {"nodes": {"*": {"paths": ODD_PATHS}}, "storage": {"source": "nas:/my export/$(touch hit)", "mount": ODD}},
        "facts": {"*": {"disks": disks(writable=True, free_gib=90.0, free_inodes=10**9)}, "node02": facts},
        "measurements": {
            "nonce": {
                "write": {"node01": {"error": "Permission denied"}, "node02": {"seconds": 0.1}, "node03": {"seconds": 0.1}},
                "read": {"node02": late, "node03": late},
                "remove": {},
            }
        },
    }
    wanted = ("mount", "disk-space", "shared-path", "version-agreement")
    found = judge(*build(case), [check for check in REGISTRY if check.id in wanted])
    return [one for one in found if one.status is not Status.PASS]


@pytest.mark.parametrize("name", ODD_CASES)
def test_a_path_with_a_blank_and_a_substitution_is_one_word(name: str, tmp_path: Path) -> None:
    """Run every remedy in a real shell of the controller and of the node; all programs are stand-ins that print their words."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in [*NODE_COMMANDS, "python3"]:
        (programs / program).write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    (programs / "touch").write_text('#!/bin/sh\n[ "$1" != hit ] || : > "$HIT"\nfor word; do printf "%s\\n" "$word"; done\n')
    (programs / "ssh").write_text('#!/bin/sh\nfor last; do :; done\nexec /bin/sh -c "$last"\n')
    (programs / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    for file in programs.iterdir():
        file.chmod(0o755)
    for finding in odd_findings(ODD_CASES[name]):
        done = subprocess.run(
            ["/bin/sh", "-c", finding.remedy],
            cwd=tmp_path,
            env={"PATH": str(programs), "HIT": str(tmp_path / "hit")},
            capture_output=True,
            text=True,
        )
        assert not (tmp_path / "hit").exists(), finding.remedy
        broken = [line for line in done.stdout.splitlines() if line in ("/mnt/my", "nas:/my") or line.startswith("data/")]
        assert broken == [], finding.remedy
        # pip is started by its own path, which is not there; behind a pipe a stand-in swallows what it is given.
        told = finding.remedy.startswith("ssh ") and ODD in finding.remedy
        if told and "/bin/python" not in finding.remedy and "|" not in finding.remedy:
            assert any(ODD in line for line in done.stdout.splitlines()), finding.remedy


def test_all_kinds_of_odd_findings_are_there() -> None:
    """The cases above reach the remedies they are about."""
    verbs = " ".join(one.remedy for facts in ODD_CASES.values() for one in odd_findings(facts))
    for verb in (
        "mkdir -p",
        "mount -t nfs4",
        "umount",
        "findmnt",
        "du -xh",
        "df -h",
        "chown",
        "touch",
        "stat -f",
        "venv",
        "pip install",
    ):
        assert verb in verbs, verb


def test_the_raised_limit_is_root_s_as_well() -> None:
    """limits.conf(5): `*` does not apply to root."""
    for case in ("limits/as-root-and-overridden.json", "limits/memlock-with-rdma.json"):
        findings = json.loads((HERE / case).read_text())["findings"]
        for line in (finding["remedy"] for finding in findings if finding["remedy"]):
            command = shlex.split(line)[-1].replace("sudo ", "").partition("| tee")[0]
            written = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True).stdout.splitlines()
            assert [entry.split()[0] for entry in written] == ["*", "root"]
            assert len({entry.split(maxsplit=1)[1] for entry in written}) == 1


def remedy(case: str) -> str:
    """Return the command the case's one fail proposes, without the ssh in front of it."""
    findings = json.loads((HERE / case).read_text())["findings"]
    (line,) = [finding["remedy"] for finding in findings if finding["status"] == "fail"]
    return shlex.split(line)[-1]


def run_on(hosts: Path, command: str) -> None:
    """Run what the remedy would run as root, on a copy of /etc/hosts."""
    subprocess.run(
        ["sh", "-c", command.replace("sudo ", "").replace("/etc/hosts", str(hosts))], check=True, stdout=subprocess.DEVNULL
    )


def test_the_debian_trap_is_mended_and_localhost_stays(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost node02\n127.0.1.1\tnode02\n::1 node02 localhost node02b\n10.10.0.11 node01\n")
    run_on(hosts, remedy("name-resolution/debian-trap.json"))
    assert hosts.read_text() == "127.0.0.1 localhost\n127.0.1.1\n::1 localhost node02b\n10.10.0.11 node01\n10.10.0.12 node02\n"


def test_all_names_behind_localhost_are_taken_out(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost node01 node02 node03\n")
    run_on(hosts, remedy("name-resolution/all-names-at-localhost.json"))
    assert hosts.read_text() == "127.0.0.1 localhost\n10.10.0.11 node01\n10.10.0.12 node02\n10.10.0.13 node03\n"


def test_a_missing_name_is_added(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    run_on(hosts, remedy("name-resolution/one-name-unknown-on-one-node.json"))
    assert hosts.read_text() == "127.0.0.1 localhost\n10.10.0.11 node01\n"
