"""Whether storage answers: no process hangs in NFS, no server has gone silent, the home folder and /tmp answer.

That the shared folder itself answers is judged by `mount`, which can say how to mount it again.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from netcheck.checks._wording import as_root, listed, on
from netcheck.checks.mount import holding_mount
from netcheck.facts.mounts import option, split_source
from r4090c.model import BlockedProcess, Cluster, DiskFact, Finding, KernelLog, Mount, Node, Status

ID, GROUP, NEEDS, OPTIONAL = "storage-answers", "storage", ("disks",), ("blocked", "kernel_log", "mounts")
RULE = "every folder answers in 5 s, no process hangs in NFS, no NFS server that the kernel calls silent (all fail)"
SOURCE = "statvfs(3); wchan of proc(5); NeMo-RL PR 3504"

EXPECTED = "an answer in seconds"


def check(
    node: Node,
    disks: tuple[DiskFact, ...],
    blocked: tuple[BlockedProcess, ...] | None,
    log: KernelLog | None,
    mounts: tuple[Mount, ...] | None,
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per kind of silence, else one pass."""
    judged_by_mount = (node.paths.shared, node.paths.runs)
    silent = [disk for disk in disks if disk.error is not None]
    faults = 0
    for disk in silent:
        if disk.path in judged_by_mount:
            continue
        faults += 1
        why = "every login and every rank that touches it freezes, and what is frozen there cannot be killed"
        target = disk.path if disk.path == "~" else shlex.quote(disk.path)
        remedy = on(node, f"timeout 10 stat -f {target} || grep -E 'nfs|cifs|fuse' /proc/mounts")
        yield Finding(ID, node.name, Status.FAIL, f"{disk.path} does not answer: {disk.error}", EXPECTED, why, remedy)
    if blocked:
        faults += 1
        told = listed(f"{process.name} ({process.pid}) in {process.wait}" for process in blocked)
        why = "they wait for a server that does not answer, and cannot be killed: bring the server back, or reboot the node"
        remedy = on(node, "ps -eo pid,user,stat,wchan:32,args | grep ' D'; findmnt -t nfs,nfs4")
        yield Finding(ID, node.name, Status.FAIL, f"hangs for seconds: {told}", "no process that hangs in NFS", why, remedy)
    gone = [server for server in (log.nfs_silent if log is not None else ()) if _waited_for(server, mounts, disks)]
    if gone:
        faults += 1
        servers = listed(gone)
        why = "the kernel still waits for it: what touches its files freezes; look at the server and the way to it"
        remedy = as_root(node, 'dmesg | grep -i "nfs: server" | tail')
        yield Finding(
            ID, node.name, Status.FAIL, f"the kernel says: {servers} not responding", "servers that answer", why, remedy
        )
    if faults:
        return
    if any(disk.path in judged_by_mount for disk in silent):
        remedy = f"r4090c preflight --only mount --nodes {node.name}"
        yield Finding(ID, node.name, Status.SKIP, "not applicable: the shared folder does not answer", EXPECTED, "", remedy)
    elif blocked is None:
        remedy = f"r4090c facts --nodes {node.name}"
        yield Finding(ID, node.name, Status.UNKNOWN, "not read: whether processes hang", EXPECTED, "", remedy)
    else:
        yield Finding(ID, node.name, Status.PASS, f"{len(disks)} folders answer, nothing hangs", EXPECTED)


def _waited_for(server: str, mounts: tuple[Mount, ...] | None, disks: tuple[DiskFact, ...]) -> bool:
    """Return whether a server that the kernel called silent still is: the log need not tell that it came back, or was given up.

    Of a soft mount the kernel says "timed out" and never "OK"; one that was unmounted by force it does not mention again.
    """
    if mounts is None:
        return True
    of_server = [mount for mount in mounts if mount.fstype in ("nfs", "nfs4") and split_source(mount.source)[0] == server]
    hard = any(option(mount, "soft") is None and option(mount, "softerr") is None for mount in of_server)
    return hard and not any(disk.error is None and holding_mount(disk.path, mounts) in of_server for disk in disks)
