"""The preflight before a real kernel NFS server and client: what they do when an export is wrong, gone, or its server silent."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from netcheck.tools import proc_mounts
from r4090c.model import Mount
from tests.vmlab import VmLab
from tests.vmlab.two_ends import of, preflight, worst

pytestmark = pytest.mark.vm

STORAGE = ("--only", "storage")
CLIENTS = "10.77.0.0/24"

Export = Callable[[str, str], Path]


@pytest.fixture
def export(vmlab: VmLab, tmp_path: Path) -> Iterator[Export]:
    """Give a function (name, export options) -> cluster.yaml, with /mnt/<name> of node01 exported and mounted on node02."""
    with ExitStack() as undo:

        def share(name: str, options: str) -> Path:
            folder = f"/mnt/{name}"
            undo.callback(vmlab.sh, "node01", f"exportfs -u {CLIENTS}:{folder}", check=False)
            undo.callback(vmlab.sh, "node02", f"umount -f -l {folder}", check=False)
            vmlab.sh("node01", f"mkdir -p {folder} && exportfs -o {options},sync,no_subtree_check {CLIENTS}:{folder}")
            vmlab.sh("node02", f"mkdir -p {folder} && mount -t nfs4 -o hard,vers=4.2 node01:{folder} {folder}")
            return vmlab.write_cluster(tmp_path / f"{name}.yaml", shared=folder, source=f"node01:{folder}")

        yield share


def mounted(lab: VmLab, target: str) -> Mount:
    return next(each for each in proc_mounts.parse(lab.sh("node02", "cat /proc/mounts").stdout) if each.target == target)


def test_a_good_mount_passes(vmlab: VmLab, tmp_path: Path) -> None:
    code, findings = preflight(vmlab.cluster_file, tmp_path, *STORAGE)
    assert code == 0, findings
    assert {each["status"] for each in findings} <= {"pass", "skip"}
    assert worst(findings, "mount", "node02")["observed"] == "/mnt/shared: nfs4 node01:/mnt/shared"
    assert "sees the files of 1 peers" in worst(findings, "shared-path", "node01")["observed"]
    left = vmlab.sh("node01", "find /mnt/shared -name '.r4090c*'").stdout
    assert left == ""


def test_the_kernel_says_how_it_mounted(vmlab: VmLab) -> None:
    mount = next(
        each for each in proc_mounts.parse(vmlab.sh("node02", "cat /proc/mounts").stdout) if each.target == "/mnt/shared"
    )
    assert (mount.fstype, mount.source) == ("nfs4", "node01:/mnt/shared")
    assert {"hard", "vers=4.2", "rsize=1048576", "wsize=1048576"} <= set(mount.options)


def test_root_squash_is_told(export: Export, tmp_path: Path) -> None:
    code, findings = preflight(export("squash", "rw,root_squash"), tmp_path, *STORAGE)
    assert code == 1
    found = worst(findings, "shared-path", "node02")
    assert found["status"] == "fail"
    assert found["observed"] == "cannot write into /mnt/squash: Permission denied"
    assert "root_squash" in found["why"]
    assert worst(findings, "disk-space", "node02")["status"] == "fail"
    assert worst(findings, "shared-path", "node01")["status"] == "pass", "the server writes to its own disk"


def test_a_read_only_export_of_a_mount_that_says_rw(vmlab: VmLab, export: Export, tmp_path: Path) -> None:
    cluster = export("readonly", "ro,no_root_squash")
    assert "rw" in mounted(vmlab, "/mnt/readonly").options, "the mount options do not tell"
    code, findings = preflight(cluster, tmp_path, *STORAGE)
    assert code == 1
    found = worst(findings, "shared-path", "node02")
    assert (found["status"], found["observed"]) == ("fail", "cannot write into /mnt/readonly: Read-only file system")


def test_a_stale_mount(vmlab: VmLab, export: Export, tmp_path: Path) -> None:
    cluster = export("stale", "rw,no_root_squash")
    vmlab.sh("node02", "ls /mnt/stale")
    vmlab.sh("node01", f"exportfs -u {CLIENTS}:/mnt/stale")
    assert "nfs4" in vmlab.sh("node02", "findmnt -no FSTYPE /mnt/stale").stdout, "the mount table looks healthy"
    code, findings = preflight(cluster, tmp_path, *STORAGE)
    assert code == 1
    found = worst(findings, "mount", "node02")
    assert found["status"] == "fail"
    assert "Stale file handle" in found["observed"]
    assert "Stale file handle" in worst(findings, "shared-path", "node02")["observed"]


def test_an_unknown_export(vmlab: VmLab, tmp_path: Path) -> None:
    """Nothing is mounted: the preflight names the mount command, and the server says no to it in the open."""
    cluster = vmlab.write_cluster(tmp_path / "cluster.yaml", shared="/mnt/nowhere", source="node01:/mnt/nowhere")
    code, findings = preflight(cluster, tmp_path, "--only", "mount")
    assert code == 1
    found = worst(findings, "mount", "node02")
    assert (found["status"], found["observed"]) == ("fail", "/mnt/nowhere does not exist")
    done = vmlab.sh("node02", shlex.split(found["remedy"])[-1], check=False)
    vmlab.sh("node02", "rmdir /mnt/nowhere")
    assert done.returncode != 0
    assert "node01:/mnt/nowhere" in done.stderr
    assert "No such file or directory" in done.stderr


# --------------------------------------------------------------------------- a server that says nothing

ANSWER_S = 90.0
"""The preflight's own limits, for storage (5 s a question, three in a row) and for a node that is gone, on a loaded machine."""


def unkilled(lab: VmLab, name: str) -> list[str]:
    """Return the node's Python processes that could still be ended: those in uninterruptible sleep cannot."""
    lines = lab.sh(name, "ps -eo stat=,pid=,args=").stdout.splitlines()
    return [line for line in lines if "python" in line and not line.startswith("D")]


def test_a_mount_whose_server_is_cut_off(fresh_vmlab: VmLab, tmp_path: Path) -> None:
    fresh_vmlab.cut("node01")
    started = time.monotonic()
    code, findings = preflight(fresh_vmlab.cluster_file, tmp_path, *STORAGE)
    assert time.monotonic() - started < ANSWER_S
    assert code in (1, 3)
    for check in ("mount", "disk-space", "shared-path"):
        found = worst(findings, check, "node02")
        assert found["status"] in ("fail", "unknown"), found
        assert "no answer" in found["observed"], found
        assert found["remedy"]
    assert worst(findings, "mount", "node01")["status"] == "pass"
    assert unkilled(fresh_vmlab, "node02") == []
    assert unkilled(fresh_vmlab, "node01") == []


def test_a_mount_whose_server_has_stopped(fresh_vmlab: VmLab, tmp_path: Path) -> None:
    cluster = fresh_vmlab.cluster_file
    cluster.write_text(cluster.read_text().replace("connect_timeout_s: 30", "connect_timeout_s: 5"))
    fresh_vmlab.pause("node01")
    started = time.monotonic()
    code, findings = preflight(cluster, tmp_path, "--only", "access,storage")
    assert time.monotonic() - started < ANSWER_S
    assert code in (1, 3)
    assert worst(findings, "ssh-reach", "node01")["status"] == "unknown"
    assert worst(findings, "ssh-reach", "node02")["status"] == "pass"
    for check in ("mount", "disk-space", "shared-path"):
        assert "no answer" in worst(findings, check, "node02")["observed"]
        assert {each["status"] for each in of(findings, check, "node01")} <= {"unknown", "skip"}
    assert unkilled(fresh_vmlab, "node02") == []
    # It comes back, and so does everything that waited for it.
    fresh_vmlab.resume("node01")
    fresh_vmlab.sh("node02", "timeout 60 stat -f /mnt/shared")
    code, findings = preflight(cluster, tmp_path, "--only", "mount,disk-space")
    assert code == 0, findings
