"""Write a file whole or not at all: a report that is cut, or an old one that is gone, is worse than an error."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from r4090c.errors import UsageError


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`, or leave what is there. Raises UsageError when it cannot be written.

    What a symbolic link points to is written, and a device or pipe is written into, never replaced: also /dev/stdout, whatever
    that is.
    """
    try:
        if path.absolute().parts[1:2] in (("dev",), ("proc",)) or (path.exists() and not path.is_file()):
            with path.open("ab") as stream:
                stream.write(data)
            return
        place = path.resolve()
        temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(data)
            temporary.replace(place)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: symbolic links that lead to each other (Python < 3.13)
        observed = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise UsageError(str(path), observed, "a writable file name", f"ls -ld {path.parent}") from error
