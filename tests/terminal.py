"""Run the real command line on a terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

from tests.cli import PROGRAM, environment

_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(*words: str, columns: int, state: Path, cwd: Path | None = None) -> tuple[int, str]:
    """Run `r4090c WORDS` with standard output on a terminal `columns` wide; return (exit code, text without styles)."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {**environment(state), "TERM": "xterm-256color"}
    env.pop("COLUMNS", None)
    process = subprocess.Popen(
        [*PROGRAM, *words], stdin=subprocess.DEVNULL, stdout=slave, stderr=subprocess.DEVNULL, env=env, cwd=cwd or state
    )
    os.close(slave)
    said = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # EIO: the other end was closed
            break
        if not piece:
            break
        said += piece
    os.close(master)
    return process.wait(timeout=60), _STYLE.sub("", said.decode()).replace("\r\n", "\n")
