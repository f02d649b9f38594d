"""Whether compilers and libraries keep their caches on a local disk, and no lock of a killed build is left in them.

The ranks of a node, and of all nodes where the home folder is shared, write there at the same time. On nodes with `gpus: 0` only
locks are judged.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from netcheck.checks._wording import listed, on
from r4090c.model import CacheFolder, Cluster, Finding, Node, Status

ID, GROUP, NEEDS = "caches", "storage", ("caches",)
RULE = "TRITON_CACHE_DIR, TORCH_EXTENSIONS_DIR and HF_HOME not on a network file system, no stale lock in them (warn)"
SOURCE = "DeepSpeed issue 5205, PR 1832; torch.utils.cpp_extension"

NETWORK_TYPES = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "fuse.nfs", "9p")
STALE_S = 1800.0
"""est.: DeepSpeed's longest build, cpu_adam, takes 200 s on two cores (measured); a lock as old as this belongs to nobody."""


def check(node: Node, folders: tuple[CacheFolder, ...], cluster: Cluster) -> Iterator[Finding]:
    """Yield at most one warning about the place of the caches and one about locks, else one pass."""
    remote = [folder for folder in folders if folder.fstype in NETWORK_TYPES]
    stale = [(path, age_s) for folder in folders for path, age_s in folder.locks if age_s > STALE_S]
    if remote and node.gpus:
        observed = listed(f"{folder.variable} is {folder.path} on {folder.fstype} {folder.source}" for folder in remote)
        lines = ", ".join(f"{folder.variable}: /var/tmp/r4090c-cache/{_short(folder)}" for folder in remote)
        why = (
            "ranks that compile or load at once wait for each other's locks over the network, some for ever."
            f" After the command write under env in cluster.yaml: {lines}"
        )
        remedy = on(node, "mkdir -p -m 700 /var/tmp/r4090c-cache")
        yield Finding(ID, node.name, Status.WARN, observed, "caches on a local file system", why, remedy)
    if stale:
        paths = [path for path, _ in stale]
        why = "torch waits for the lock of another build without a word and without an end; the build that made it was killed"
        observed = f"{listed(paths, 2)}: a lock {max(age_s for _, age_s in stale) / 3600:.1f} hours old"
        remedy = on(node, f"rm -f {' '.join(map(shlex.quote, paths))}")
        yield Finding(ID, node.name, Status.WARN, observed, "no lock without a build", why, remedy)
    if not stale and not (remote and node.gpus):
        kinds = listed(sorted({folder.fstype or "?" for folder in folders}))
        yield Finding(ID, node.name, Status.PASS, f"caches on {kinds}", "caches on a local file system, no stale lock")


def _short(folder: CacheFolder) -> str:
    return folder.variable.lower().split("_")[0]
