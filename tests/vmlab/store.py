"""Where images and snapshots are kept, outside of the repository: $R4090C_VMLAB_CACHE, default ~/.cache/r4090c/vmlab.

<kind>-<key>/       one finished entry: built aside, then renamed; manifest.json lists its files with sizes and hashes
<kind>-<key>.lock   held while the entry is built; who comes second waits and finds it ready
building-<kind>-<key>/

A key is a hash of all that decides what the entry holds, so an entry is never out of date: a changed recipe makes another one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.lab.wiring import locked

MANIFEST = "manifest.json"

UNUSED_S = 3 * 86_400
"""est.: entries of other keys that nobody used for this long are removed when a new one is built (about 0.5 GiB each)."""


class VmLabError(RuntimeError):
    """The VM lab could not do what was asked."""


def tell(text: str) -> None:
    """Say on stderr what happens now."""
    print(f"vmlab: {text}", file=sys.stderr, flush=True)


def folder() -> Path:
    """Return the folder of all entries; it need not exist."""
    stated = os.environ.get("R4090C_VMLAB_CACHE")
    return Path(stated).resolve() if stated else Path.home() / ".cache" / "r4090c" / "vmlab"


def key_of(*parts: str | bytes | Iterable[str]) -> str:
    """Return the key of what `parts` decide."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            part = part.encode()
        elif not isinstance(part, bytes):
            part = json.dumps(list(part)).encode()
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def found(kind: str, key: str) -> Path | None:
    """Return the entry when it is there and whole as far as its file sizes tell, else None. Marks it as used."""
    entry = folder() / f"{kind}-{key}"
    try:
        manifest = json.loads((entry / MANIFEST).read_text())
        whole = all((entry / name).stat().st_size == told["bytes"] for name, told in manifest.items())
        if not whole:
            return None
        os.utime(entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return entry


def damaged(entry: Path) -> bool:
    """Return whether a file of the entry is not what was built, by its hash (seconds)."""
    try:
        manifest = json.loads((entry / MANIFEST).read_text())
        return any(_hash_of(entry / name) != told["sha256"] for name, told in manifest.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def take(kind: str, key: str, build: Callable[[Path, int], None]) -> Path:
    """Return the entry; where there is none, or a broken one, `build(folder aside, descriptor of the lock)` makes it first.

    Two callers at once: one builds, the other waits. Whatever `build` raises goes through; nothing half done is left as an entry.
    """
    entry = found(kind, key)
    if entry is not None:
        return entry
    folder().mkdir(parents=True, exist_ok=True)
    entry = folder() / f"{kind}-{key}"
    aside = folder() / f"building-{kind}-{key}"
    lock_file = folder() / f"{kind}-{key}.lock"
    if _is_held(lock_file):
        tell(f"waiting for another process that builds {entry.name}")
    with locked(lock_file) as lock:
        if found(kind, key) is not None:
            return entry
        if entry.exists():
            tell(f"{entry.name} is broken: it is built again")
            _remove(entry)
        _remove(aside)
        aside.mkdir()
        try:
            build(aside, lock)
            manifest = {
                path.name: {"bytes": path.stat().st_size, "sha256": _hash_of(path)} for path in aside.iterdir() if path.is_file()
            }
            (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
            aside.rename(entry)
        finally:
            _remove(aside)
        prune(kind, keep=key)
    return entry


def forget(entry: Path) -> None:
    """Remove one entry; the next `take` builds it again."""
    with locked(entry.with_suffix(".lock")):
        _remove(entry)


def prune(kind: str, keep: str, unused_s: float = UNUSED_S) -> None:
    """Remove the entries of `kind` with another key that nobody used for `unused_s`, and say so."""
    for entry in folder().glob(f"{kind}-*"):
        if not entry.is_dir() or entry.name == f"{kind}-{keep}":
            continue
        age_s = time.time() - entry.stat().st_mtime
        if age_s > unused_s:
            tell(f"removing {entry.name}, made from an older recipe and not used for {age_s / 86_400:.0f} days")
            _remove(entry)


def _is_held(lock_file: Path) -> bool:
    """Return whether somebody else holds the lock."""
    with lock_file.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _hash_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()
