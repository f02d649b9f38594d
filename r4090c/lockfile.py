"""The file beside cluster.yaml that holds the lock of a cluster known to be good (netcheck.lock says what is in it)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from r4090c.errors import UsageError
from r4090c.files import write_whole
from r4090c.model import Cluster

MAX_LOCK_BYTES = 16 << 20
"""est.: a full lock of 16 nodes with 8 GPUs each is below 0.2 MiB."""


def lock_path(cluster_file: str) -> Path:
    """Return where the lock of an inventory lies: `cluster.lock.json` beside `cluster.yaml`."""
    file = Path(cluster_file)
    return file.with_name(f"{file.stem}.lock.json")


def with_lock(cluster: Cluster) -> Cluster:
    """Return `cluster` with the lock beside its file, if there is one. Raises UsageError for a file that is no lock of it."""
    path = lock_path(cluster.file)
    lock = read_lock(path) if cluster.file else None
    if lock is None:
        return cluster
    if lock.get("cluster") != cluster.name:
        observed = f"is the lock of {lock.get('cluster')!r:.80}, and the cluster is called {cluster.name!r}"
        raise UsageError(str(path), observed, "the lock of this cluster", f"mv {path} {path}.old")
    return replace(cluster, lock=lock)


def read_lock(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`, None when there is no such file. Raises UsageError for anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LOCK_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(str(path), f"cannot be read: {error.strerror}", "a lock", f"ls -ld {path}") from error
    try:
        lock = json.loads(data) if len(data) <= MAX_LOCK_BYTES else None
    except (ValueError, RecursionError) as error:
        raise UsageError(str(path), f"is not JSON: {error}", "a lock as `r4090c lock` writes", "r4090c lock") from error
    if not isinstance(lock, dict):
        raise UsageError(str(path), "is not a lock", "a lock as `r4090c lock` writes", "r4090c lock")
    return lock


def write_lock(path: Path, lock: Mapping[str, Any]) -> None:
    """Write `lock` to `path`, whole or not at all: equal locks give equal bytes. Raises UsageError when it cannot be written."""
    text = json.dumps(lock, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_whole(path, text.encode("utf-8", "replace"))
