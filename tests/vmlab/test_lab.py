"""The VM lab itself: what the nodes are, that labs do not meet, and that nothing is left behind however one ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vmlab import VmLab, VmLabError, store
from tests.vmlab.lab import build

pytestmark = pytest.mark.vm

REPOSITORY = Path(__file__).resolve().parents[2]


def processes_of(directory: Path) -> list[str]:
    """Command lines of this machine that name the lab's folder, found without the lab's own code."""
    return [line for line in command_lines() if f"{directory}/" in line]


def command_lines() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def gone(directory: Path, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while processes_of(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_each_node_is_who_it_should_be(vmlab: VmLab) -> None:
    for number, name in enumerate(vmlab.machines, 1):
        told = vmlab.sh(name, "hostname; ip -br -4 address show eth0; cat /sys/class/net/eth0/mtu; uname -r").stdout.splitlines()
        assert told[0] == name
        assert told[1].split()[1:] == ["UP", f"10.77.0.{number}/24"]
        assert told[2] == "9000"
        assert "cloud" not in told[3]


def test_the_clocks_are_right(vmlab: VmLab) -> None:
    for name in vmlab.machines:
        asked = time.time()
        there = float(vmlab.sh(name, "date +%s.%N").stdout)
        assert asked - 1 < there < time.time() + 1


def test_the_nodes_reach_each_other_by_name_and_ssh_and_nothing_else(vmlab: VmLab) -> None:
    for name, peer in (("node01", "node02"), ("node02", "node01")):
        assert vmlab.sh(name, f"ssh -o BatchMode=yes {peer} hostname").stdout == f"{peer}\n"
        assert vmlab.sh(name, f"ping -c 1 -M do -s {9000 - 28} {peer}").returncode == 0
        # restrict=on: the network card that ssh comes through leads to no other machine
        assert vmlab.sh(name, "ip route get 192.0.2.1", check=False).returncode != 0


def test_processes_that_lost_their_parent_are_reaped(vmlab: VmLab) -> None:
    vmlab.sh("node01", "for n in 1 2 3; do (sleep 0.1 &); done; sleep 1")
    states = vmlab.sh("node01", "ps -eo stat=,comm=").stdout.splitlines()
    assert not [line for line in states if line.startswith("Z")]


def test_a_failing_script_tells_its_output(vmlab: VmLab) -> None:
    with pytest.raises(VmLabError, match=r"on node02 ended with 3:\nsaid so"):
        vmlab.sh("node02", "echo said so; exit 3")
    with pytest.raises(VmLabError, match="longer than 1 s"):
        vmlab.sh("node02", "sleep 5", timeout_s=1)


def test_a_paused_node_goes_on_with_the_right_time(fresh_vmlab: VmLab) -> None:
    fresh_vmlab.pause("node02")
    with pytest.raises(VmLabError):
        fresh_vmlab.sh("node02", "true", timeout_s=2)
    fresh_vmlab.resume("node02")
    assert abs(float(fresh_vmlab.sh("node02", "date +%s.%N").stdout) - time.time()) < 1


def test_a_second_lab_is_another_world(vmlab: VmLab, fresh_vmlab: VmLab) -> None:
    assert not set(vmlab.ports.values()) & set(fresh_vmlab.ports.values())
    fresh_vmlab.sh("node01", "echo theirs > /mnt/shared/whose")
    assert fresh_vmlab.sh("node02", "cat /mnt/shared/whose").stdout == "theirs\n"
    assert vmlab.sh("node02", "test -e /mnt/shared/whose", check=False).returncode == 1


def test_down_leaves_logs_only(fresh_vmlab: VmLab) -> None:
    assert processes_of(fresh_vmlab.directory)
    fresh_vmlab.down()
    assert gone(fresh_vmlab.directory, within_s=1)
    kinds = {path.suffix for path in fresh_vmlab.directory.iterdir()}
    assert not kinds & {".qcow2", ".qmp", ".pid", ".mux", ".yaml", ".json"}
    fresh_vmlab.down()


def test_a_killed_owner_takes_its_nodes_along(needs_vmlab: None, tmp_path: Path) -> None:
    program = (
        f"import time; from tests.vmlab import VmLab; lab = VmLab.up({str(tmp_path)!r}); print('up', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == "up\n"
        assert len([line for line in processes_of(tmp_path) if line.startswith("qemu")]) == 2
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert gone(tmp_path)


def test_a_lab_of_the_command_line_outlives_it(needs_vmlab: None, tmp_path: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tests.vmlab", *words]
        return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)

    here = ("--dir", str(tmp_path))
    try:
        up = command("up", *here)
        assert up.stdout.splitlines()[-1] == str(tmp_path / "cluster.yaml"), up.stderr
        assert command("ssh", *here, "2", "hostname").stdout == "node02\n"
        assert command("status", *here).stdout.count("running") == 2
    finally:
        assert command("down", *here).returncode == 0
    assert gone(tmp_path, within_s=1)
    assert "no VM lab is up" in command("status", *here).stderr


def test_a_damaged_snapshot_is_taken_again(needs_vmlab: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, snapshot = build()
    cache = tmp_path / "cache"
    (cache / snapshot.name).mkdir(parents=True)
    (cache / disk.name).symlink_to(disk)
    for path in snapshot.iterdir():
        shutil.copy2(path, cache / snapshot.name / path.name)
    state = cache / snapshot.name / "node02.state"
    state.chmod(0o644)
    with state.open("r+b") as file:
        file.write(b"\0" * 4096)
    monkeypatch.setenv("R4090C_VMLAB_CACHE", str(cache))
    assert store.found("snapshot", snapshot.name.partition("-")[2]), "its sizes are right: only loading it tells"
    with VmLab.up(tmp_path / "lab") as lab:
        assert lab.sh("node02", "cat /sys/class/infiniband/rxe0/ports/1/state").stdout == "4: ACTIVE\n"
    assert not store.damaged(cache / snapshot.name)
    assert os.access(disk / "root.ext4", os.R_OK)
