"""Remedies that change a file are run here against a copy of it."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

from tests.checks.cases import HERE


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
