"""Whether the shared folder is there, and is the mount that cluster.yaml states."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from netcheck.checks._majority import majority, others
from netcheck.checks._wording import as_root
from netcheck.data_network import is_address
from netcheck.facts.mounts import option, split_source
from r4090c.model import Cluster, DiskFact, Finding, Mount, Node, Status

ID, GROUP, SCOPE, NEEDS = "mount", "storage", "cluster", ("mounts", "disks")
RULE = (
    "the shared folder answers; NFS: the stated type and export on all nodes, hard, writable (fail), rsize and wsize 1 MiB,"
    " other NFS mounts hard, nconnect from 25 Gbit/s on (warn)"
)
SOURCE = "nfs(5); est."

NFS_TYPES = {"nfs4": ("nfs4",), "nfs": ("nfs", "nfs4")}
"""storage.kind -> file system types of /proc/mounts that satisfy it."""
IO_SIZE_MIN = 1_048_576
"""1 MiB, the largest rsize/wsize of the Linux client: what it takes by itself unless a mount option or the server asks less."""
NCONNECT_FROM_GBIT_S = 25
"""est.: from this rate on one TCP connection, the default without nconnect, no longer fills the wire."""


def check(
    mounts: Mapping[str, tuple[Mount, ...]], disks: Mapping[str, tuple[DiskFact, ...]], cluster: Cluster
) -> Iterator[Finding]:
    """Yield one Finding per fault of the shared folder of a node, else one pass. A node without GPUs may have a slow mount."""
    holding = {name: holding_mount(cluster.node(name).paths.shared, table) for name, table in mounts.items()}
    nfs = {name: mount for name, mount in holding.items() if mount is not None and mount.fstype in ("nfs", "nfs4")}
    sources = {name: mount.source for name, mount in nfs.items()}
    for name in mounts:
        node, mount = cluster.node(name), holding[name]
        faults = list(_folder_faults(node, disks[name], cluster))
        if not faults and cluster.storage.kind in NFS_TYPES and not _is_server(node, cluster):
            faults = list(_nfs_faults(node, mount, sources, cluster))
        faults += _soft_elsewhere(node, mounts[name], mount)
        if faults:
            yield from faults
        else:
            told = f"{mount.fstype} {mount.source}" if mount is not None else "present"
            yield Finding(ID, name, Status.PASS, f"{node.paths.shared}: {told}", f"the shared folder ({cluster.storage.kind})")


def holding_mount(path: str, mounts: tuple[Mount, ...]) -> Mount | None:
    """Return the mount that holds `path`: the longest target above it, the last one mounted when there are several."""
    best: Mount | None = None
    for mount in mounts:
        if PurePosixPath(path).is_relative_to(mount.target) and (best is None or len(mount.target) >= len(best.target)):
            best = mount
    return best


def _folder_faults(node: Node, disks: tuple[DiskFact, ...], cluster: Cluster) -> Iterator[Finding]:
    path = node.paths.shared
    disk = next((disk for disk in disks if disk.path == path), None)
    if disk is None:
        yield Finding(
            ID, node.name, Status.UNKNOWN, f"not read: {path}", "the shared folder", "", f"r4090c facts --nodes {node.name}"
        )
    elif disk.error is not None:
        why = "a mount that does not answer freezes every process that touches it"
        remedy = as_root(node, f"umount -f -l {shlex.quote(path)}", f"mount {shlex.quote(path)}")
        yield Finding(ID, node.name, Status.FAIL, f"{path} does not answer: {disk.error}", "an answer in seconds", why, remedy)
    elif not disk.exists:
        why = "code, data, runs and checkpoints live there"
        commands = [f"mkdir -p {shlex.quote(path)}"]
        if cluster.storage.kind in NFS_TYPES and cluster.storage.source is not None and not _is_server(node, cluster):
            target = cluster.storage.mount or path
            commands = [f"mkdir -p {shlex.quote(target)}", _mount_command(cluster.storage.source, target)]
        yield Finding(ID, node.name, Status.FAIL, f"{path} does not exist", "the shared folder", why, as_root(node, *commands))


def _nfs_faults(node: Node, mount: Mount | None, sources: Mapping[str, str], cluster: Cluster) -> Iterator[Finding]:
    storage, path = cluster.storage, node.paths.shared
    agreed = majority(sources)
    wanted = storage.source or agreed.value or next(iter(sources.values()), "NAS:/EXPORT")
    command = _mount_command(wanted, storage.mount or path)
    if mount is None or mount.fstype not in ("nfs", "nfs4"):
        lies_on = f"{mount.fstype} {mount.source} ({mount.target})" if mount is not None else "nothing that is mounted"
        why = "the node writes to its own disk: the others will not see its checkpoints, and the disk fills up"
        yield Finding(
            ID,
            node.name,
            Status.FAIL,
            f"{path} lies on {lies_on}",
            f"a mount of type {storage.kind}",
            why,
            as_root(node, command),
        )
        return
    again = as_root(node, f"umount {shlex.quote(mount.target)}", command)
    if mount.fstype not in NFS_TYPES[storage.kind]:
        version = option(mount, "vers") or "3"
        why = "NFS 3 has no atomic open and keeps locks outside of the protocol"
        yield Finding(
            ID, node.name, Status.FAIL, f"{path}: NFS version {version}", f"type {storage.kind} (cluster.yaml)", why, again
        )
    if storage.source is not None:
        if not same_source(mount.source, storage.source):
            why = "this node reads and writes another export than the others"
            yield Finding(ID, node.name, Status.FAIL, f"{path} is {mount.source}", f"{storage.source} (cluster.yaml)", why, again)
    elif node.name in agreed.odd:
        right = f"{agreed.value}, as on most nodes" if agreed.value else f"one export; {others(sources, node.name)} (no majority)"
        yield Finding(ID, node.name, Status.FAIL, f"{path} is {mount.source}", right, "the nodes do not share one folder", again)
    if option(mount, "soft") is not None or option(mount, "softerr") is not None:
        why = "a soft mount gives up after a while and turns a slow server into a damaged checkpoint"
        yield Finding(ID, node.name, Status.FAIL, f"{path} is mounted soft", "hard", why, again)
    if option(mount, "ro") is not None:
        yield Finding(ID, node.name, Status.FAIL, f"{path} is mounted read-only", "rw", "no checkpoint can be written", again)
    if node.gpus == 0:
        return  # how fast it is does not matter there: a server with little memory allows small requests only
    sizes = {name: option(mount, name) or "" for name in ("rsize", "wsize")}
    small = [f"{name}={size}" for name, size in sizes.items() if size.isdigit() and int(size) < IO_SIZE_MIN]
    if small:
        why = "small requests cost a round trip each"
        yield Finding(ID, node.name, Status.WARN, f"{path}: {', '.join(small)}", f"{IO_SIZE_MIN} (1 MiB)", why, again)
    rate = cluster.network.rate_gbit_s
    if rate is not None and rate >= NCONNECT_FROM_GBIT_S and option(mount, "nconnect") is None:
        why = f"one TCP connection does not fill {rate:g} Gbit/s"
        yield Finding(ID, node.name, Status.WARN, f"{path}: no nconnect", "nconnect=4 or more", why, again)


def _soft_elsewhere(node: Node, mounts: tuple[Mount, ...], shared: Mount | None) -> Iterator[Finding]:
    """Yield a warning for each soft NFS mount beside the shared folder: homes and data live on such."""
    for mount in mounts:
        soft = option(mount, "soft") is not None or option(mount, "softerr") is not None
        if soft and mount.fstype in ("nfs", "nfs4") and mount != shared:
            why = "a soft mount gives up after a while: a slow server turns into I/O errors in whatever is written or read there"
            why += "; what /etc/fstab says comes back with the next boot"
            again = f"mount -t {mount.fstype} -o hard {shlex.quote(mount.source)} {shlex.quote(mount.target)}"
            remedy = as_root(node, f"umount {shlex.quote(mount.target)}", again)
            yield Finding(ID, node.name, Status.WARN, f"{mount.target} is mounted soft", "hard", why, remedy)


def _mount_command(source: str, target: str) -> str:
    return f"mount -t nfs4 -o hard,vers=4.2,nconnect=8 {shlex.quote(source)} {shlex.quote(target)}"


def same_source(seen: str, stated: str) -> bool:
    """Return whether two "server:/export" texts mean the same; a server may be a name here and an address there."""
    (seen_host, seen_path), (stated_host, stated_path) = split_source(seen), split_source(stated)
    if seen_path.rstrip("/") != stated_path.rstrip("/"):
        return False
    if is_address(seen_host) != is_address(stated_host):
        return True
    if "." in seen_host and "." in stated_host:
        return seen_host == stated_host
    return seen_host.split(".")[0] == stated_host.split(".")[0]


def _is_server(node: Node, cluster: Cluster) -> bool:
    """Return whether this node exports the folder itself: there it is a local disk, and rightly so."""
    host, _ = split_source(cluster.storage.source or "")
    return bool(host) and host in (node.name, node.ssh.address, node.data_address)
