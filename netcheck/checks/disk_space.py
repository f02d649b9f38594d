"""Whether there is room to write, where runs and checkpoints go."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from netcheck.checks._wording import account, as_root, on, origin, size
from r4090c.model import Cluster, DiskFact, Finding, Node, Status

ID, GROUP, NEEDS = "disk-space", "storage", ("disks",)
RULE = (
    "shared and run folder writable with at least {disk_free_min_gib:g} GiB and {inodes_free_min} inodes free (fail), /tmp with"
    " {tmp_free_min_gib:g} GiB (warn)"
)
SOURCE = "statvfs(3), access(2); est."


def check(node: Node, disks: tuple[DiskFact, ...], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per fault of the shared folder, the run folder or /tmp, else one pass.

    A run folder that does not exist yet is no fault where it can be made: the first launch does, and the fact tells about the
    nearest folder above it. A shared folder that does not exist is the fault of `mount`, and skipped here. Other paths are not
    judged.
    """
    seen = {disk.path: disk for disk in disks}
    faults = 0
    for path in dict.fromkeys((node.paths.shared, node.paths.runs, "/tmp")):
        disk = seen.get(path)
        if disk is None:
            faults += 1
            remedy = f"r4090c facts --nodes {node.name}"
            yield Finding(ID, node.name, Status.UNKNOWN, f"not read: {path}", "free space and the right to write", "", remedy)
            continue
        shared = seen.get(node.paths.shared)
        if disk.error is not None and path == node.paths.runs and shared is not None and shared.error == disk.error:
            continue  # told with the shared folder
        judged_before = path == node.paths.runs and _same_file_system(disk, shared)
        for finding in [*_access_faults(node, disk), *([] if judged_before else _space_faults(node, disk, cluster))]:
            faults += 1
            yield finding
    if not faults:
        yield Finding(
            ID,
            node.name,
            Status.PASS,
            f"{size(seen[node.paths.shared].free_gib or 0)} free in {node.paths.shared}",
            "room to write",
        )


def _access_faults(node: Node, disk: DiskFact) -> Iterator[Finding]:
    path, is_shared, quoted = disk.path, _is_shared(node, disk), shlex.quote(disk.path)
    if disk.error is not None:
        remedy = on(node, f"timeout 10 stat -f {quoted}")
        yield Finding(
            ID, node.name, Status.UNKNOWN, f"not read: {path}: {disk.error}", "an answer from the file system", "", remedy
        )
        return
    if not disk.exists and path == node.paths.shared:
        remedy = f"r4090c preflight --only mount --nodes {node.name}"
        yield Finding(ID, node.name, Status.SKIP, f"not applicable: {path} does not exist", "room to write", "", remedy)
        return
    if disk.writable is False and not disk.exists:
        why = "the folder above it is not this account's to write"
        remedy = as_root(node, f"install -d -o {account(node)} {quoted}")
        yield Finding(ID, node.name, Status.FAIL, f"{path} does not exist and cannot be made", "the right to write", why, remedy)
    elif disk.writable is False:
        owner = f"chown {account(node)}: {quoted}" if is_shared else f"chmod 1777 {quoted}"
        why = "no permission, a read-only mount, or an NFS export that squashes this user"
        remedy = as_root(node, owner)
        if disk.fstype in ("nfs", "nfs4"):  # the rights are the server's: no chown from here can help
            why = "no permission there, or the server exports it read-only or squashes this user (`exportfs -v` on the server)"
            remedy = on(node, f"findmnt -no SOURCE,OPTIONS -T {quoted}; ls -ldn {quoted}; id -u")
        yield Finding(
            ID,
            node.name,
            Status.FAIL if is_shared else Status.WARN,
            f"{path} is not writable",
            "the right to write",
            why,
            remedy,
        )
    elif disk.writable is None and is_shared:
        remedy = on(node, f"touch {quoted}/.probe && rm {quoted}/.probe")
        yield Finding(ID, node.name, Status.UNKNOWN, f"not read: whether {path} is writable", "the right to write", "", remedy)


def _space_faults(node: Node, disk: DiskFact, cluster: Cluster) -> Iterator[Finding]:
    expect, path, is_shared = cluster.expect, disk.path, _is_shared(node, disk)
    if disk.error is not None or (not disk.exists and path == node.paths.shared):
        return
    field = "disk_free_min_gib" if is_shared else "tmp_free_min_gib"
    needed_gib = getattr(expect, field)
    quoted = shlex.quote(path)
    full = f"du -xh --max-depth=2 {quoted} | sort -h | tail"
    inodes = f"du -x --inodes --max-depth=2 {quoted} | sort -n | tail"
    if disk.free_gib is None:
        yield Finding(ID, node.name, Status.UNKNOWN, f"not read: free space of {path}", "", "", on(node, f"df -h {quoted}"))
    elif disk.free_gib < needed_gib:
        why = "a checkpoint that meets a full disk is lost" if is_shared else "compilers, caches and logs write there"
        yield Finding(
            ID,
            node.name,
            Status.FAIL if is_shared else Status.WARN,
            f"{size(disk.free_gib)} free in {path}",
            f"at least {needed_gib:g} GiB{origin(cluster, field)}",
            why,
            as_root(node, full),
        )
    if disk.free_inodes is not None and disk.free_inodes < expect.inodes_free_min:
        yield Finding(
            ID,
            node.name,
            Status.FAIL if is_shared else Status.WARN,
            f"{disk.free_inodes} inodes free in {path}",
            f"at least {expect.inodes_free_min}{origin(cluster, 'inodes_free_min')}",
            "no file can be made without an inode, however many GiB are free",
            as_root(node, inodes),
        )


def _same_file_system(one: DiskFact, other: DiskFact | None) -> bool:
    """Return whether two paths share their space, as far as type and size tell."""
    return other is not None and other.total_gib is not None and (one.fstype, one.total_gib) == (other.fstype, other.total_gib)


def _is_shared(node: Node, disk: DiskFact) -> bool:
    return disk.path in (node.paths.shared, node.paths.runs)
