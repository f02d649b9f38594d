"""Storage that may refuse, fill up, go stale or hang: whatever it does becomes one line that names the file and the remedy."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.errors import FAILED, Stop

TIMEOUT = "R4090C_STORAGE_TIMEOUT_S"
"""Environment: seconds after which a write or flush that does not end is given up. Default 300, half a collective's limit."""

DATA_SCHEMA = "r4090c.data/1"
"""What a manifest of token files says of itself: train/prepare.py writes it, train/data.py reads it."""
CHUNK_BYTES = 64 << 20
"""est.: what is written, or read to be hashed, at once: a tenth of a second on a slow disk."""
FLUSH_BYTES = 1 << 30
"""est.: so much is flushed to disk at once: 100 s at 10 MB/s, well within the limit above."""

ROOM = ("room on the disk", "room in the quota")
"""What is expected where fewer files would help."""

_MEANING: dict[int, tuple[str, str]] = {
    errno.ENOSPC: (ROOM[0], "make some (df -h, df -i)"),
    errno.EDQUOT: (ROOM[1], "make some (quota -s)"),
    errno.EROFS: ("a file system that can be written", "mount it read-write; after an error Linux makes it read-only: see dmesg"),
    errno.ESTALE: (
        "the folder that the NFS server exports",
        "unmount and mount the share again on this node: the server replaced it",
    ),
    errno.EIO: ("a disk or server without errors", "see dmesg on this node and on the NFS server"),
    errno.ETIMEDOUT: ("an NFS server that answers", "see that it runs and can be reached; mount with `hard` to wait for it"),
    errno.EACCES: ("permission to write", "chown or chmod it; on NFS see root_squash"),
    errno.EPERM: ("permission to write", "chown or chmod it; on NFS see root_squash"),
    errno.ENOENT: ("a folder that stays", "see who removed it"),
}
"""errno -> what was expected, what mends it."""


FULL_OR_GONE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EIO}
"""What no mistake of a program's causes."""


def refused(error: OSError, path: Path) -> Stop:
    """Return what to tell of a refusal; `path` is named where the error itself names none."""
    expected, remedy = _MEANING.get(error.errno or 0, ("storage that can be written", "see dmesg on this node"))
    return Stop(error.filename or path, f"{error.strerror or error}", expected, remedy, FAILED)


@contextmanager
def limited(path: Path, doing: str) -> Iterator[None]:
    """End this process, with one line, when the block takes longer than the limit.

    Nothing gentler works: a thread that waits for a dead NFS server cannot be woken, only the process be ended.
    """
    limit_s = float(os.environ.get(TIMEOUT, "300"))

    def leave() -> None:
        remedy = "see that the disk or the NFS server answers (dmesg; `ps -o pid,stat,wchan:32,cmd`: D = waiting for it)"
        stop = Stop(path, f"{doing} has not ended within {limit_s:g} s", "storage that answers", remedy, FAILED)
        os.write(2, f"train: {stop}\n".encode())
        os._exit(FAILED)

    timer = threading.Timer(limit_s, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class HashedFile:
    """A new file that is hashed while it is written, and on disk once closed. Its `refusal` outlives what torch makes of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes, self._unflushed = path, 0, 0
        self._sha256 = hashlib.sha256()
        self.refusal: OSError | None = None
        with self._guard("opening it"):
            self._file = path.open("wb", buffering=0)

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        try:
            with limited(self.path, doing):
                yield
        except OSError as error:
            self.refusal = OSError(error.errno, error.strerror, str(self.path))
            raise self.refusal from None

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`. Raises OSError with the file's name."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._sha256.update(chunk)
            with self._guard("a write"):
                while chunk:
                    chunk = chunk[self._file.write(chunk) or 0 :]
        self.bytes += len(view)
        self._unflushed += len(view)
        if self._unflushed >= FLUSH_BYTES:
            self.flush_to_disk()
        return len(view)

    def flush(self) -> None:
        """Do nothing: nothing is buffered. torch.save asks for it."""

    def flush_to_disk(self) -> None:
        """Return when all that was written survives a power cut."""
        with self._guard("flushing it to disk"):
            os.fdatasync(self._file.fileno())
        self._unflushed = 0

    def close(self) -> dict[str, int | str]:
        """Return {"bytes", "sha256"} of the file, which is on disk now."""
        self.flush_to_disk()
        with self._guard("closing it"):  # NFS tells now what it could not write
            self._file.close()
        return {"bytes": self.bytes, "sha256": self._sha256.hexdigest()}


def flush_to_disk(path: Path) -> None:
    """Return when a file's content, or the names in a folder, survive a power cut. Raises OSError."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems flush no folders
            raise
    finally:
        os.close(opened)


def sha256_of(file: Path) -> str:
    """Return the sha256 of a file. Raises OSError."""
    total = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        while chunk := opened.read(CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


def hash_of(value: Any) -> str:
    """Return the sha256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_of_hashes(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the hash of a whole folder of token files: over the hashes of its files, as its manifest tells them."""
    return hash_of({name: file["sha256"] for name, file in files.items()})


def told_bytes(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
