"""Runs on a node: write a file into a folder, read it back, both past the page cache. Python >= 3.8, standard library only.

    storage_on_node.py FOLDER NAME BYTES SECONDS NODES

At most BYTES and about SECONDS each way, less where the folder has little room; NODES write at the same time. Prints one JSON
document: {"bytes", "direct", "write_mbyte_s", "read_mbyte_s", "wrong", "removed", "error"}; MB = 1e6 bytes. The file is removed
in any case but one: killed while the file system hangs. What such a run left behind is removed by the next one.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PREFIX = ".r4090c-load-"
BLOCK = 4 << 20
LEAST_BYTES = 4 * BLOCK
STALE_S = 3600.0
"""est.: no measurement takes an hour."""
O_DIRECT = getattr(os, "O_DIRECT", 0)


def main() -> int:
    """Measure, print the document, return the exit code."""
    folder, name, wanted, seconds, nodes = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, interrupt)
    found = nothing()
    path = os.path.join(folder, PREFIX + name)
    try:
        found["removed"] = remove_stale(folder, path)
        room = os.statvfs(folder)
        wanted = min(wanted, room.f_bavail * (room.f_frsize or room.f_bsize) // (4 * nodes)) // BLOCK * BLOCK
        if wanted < LEAST_BYTES:
            raise OSError(errno.ENOSPC, "too little room to measure")
        block = mmap.mmap(-1, BLOCK)  # its own pages: aligned, as O_DIRECT wants it
        block.write(os.urandom(BLOCK))  # nothing on the way may compress it
        found["bytes"], found["direct"], spent_s = write(path, block, wanted, seconds)
        found["write_mbyte_s"] = found["bytes"] / spent_s / 1e6
        count, found["wrong"], spent_s = read(path, block, found["bytes"], seconds, found["direct"])
        found["read_mbyte_s"] = count / spent_s / 1e6
    except OSError as error:
        found["error"] = error.strerror or str(error)
    except KeyboardInterrupt:
        found["error"] = "stopped"
    finally:
        try:
            os.unlink(path)
        except OSError:
            pass
    print(json.dumps(found))
    return 0


def nothing() -> dict[str, Any]:
    """Return the document of a run that has not begun."""
    return {"bytes": 0, "direct": False, "write_mbyte_s": None, "read_mbyte_s": None, "wrong": 0, "removed": 0, "error": ""}


def interrupt(number: int, frame: object) -> None:
    """Turn a signal into an exception, so that the file is removed."""
    raise KeyboardInterrupt


def remove_stale(folder: str, own: str) -> int:
    """Remove what an earlier run left behind; return how many files."""
    count = 0
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith(PREFIX):
            try:
                if path == own or time.time() - os.lstat(path).st_mtime > STALE_S:
                    os.unlink(path)
                    count += 1
            except OSError:
                pass
    return count


def open_direct(path: str, flags: int) -> tuple[int, bool]:
    """Return a descriptor past the page cache where the file system can, and whether it can."""
    if O_DIRECT:
        try:
            return os.open(path, flags | O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, flags, 0o600), False


def write(path: str, block: mmap.mmap, wanted: int, seconds: float) -> tuple[int, bool, float]:
    """Write `wanted` bytes, or fewer when the time is over, down to the disk; return (bytes, past the cache, seconds)."""
    fd, direct = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        started, written = time.monotonic(), 0
        while written < wanted and (written < LEAST_BYTES or time.monotonic() < started + seconds):
            try:
                count = os.write(fd, block)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct or written:
                    raise
                os.close(fd)  # opened with O_DIRECT and yet refused
                fd, direct = os.open(path, os.O_WRONLY), False
                continue
            if count != BLOCK:
                raise OSError(errno.EIO, "only {} of {} bytes were written".format(count, BLOCK))
            written += count
        os.fsync(fd)
        return written, direct, max(time.monotonic() - started, 1e-6)
    finally:
        os.close(fd)


def read(path: str, block: mmap.mmap, size: int, seconds: float, direct: bool) -> tuple[int, int, float]:
    """Read the file back, or its beginning when the time is over; return (bytes read, bytes in blocks that differ, seconds)."""
    fd = open_direct(path, os.O_RDONLY)[0] if direct else os.open(path, os.O_RDONLY)
    try:
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer, wrong, compared_s, place = mmap.mmap(-1, BLOCK), 0, 0.0, 0
        started = time.monotonic()
        while place < size and (place < LEAST_BYTES or time.monotonic() < started + seconds):
            if os.preadv(fd, [buffer], place) != BLOCK:
                raise OSError(errno.EIO, "the file is shorter than what was written")
            before = time.monotonic()
            if buffer[:] != block[:]:
                wrong += BLOCK
            compared_s += time.monotonic() - before
            place += BLOCK
        return place, wrong, max(time.monotonic() - started - compared_s, 1e-6)
    finally:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
