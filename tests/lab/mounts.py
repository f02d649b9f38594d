"""One small file system that every node of a lab sees at the same path: storage that can be filled without harm to anybody."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.lab.lab import Lab
from tests.lab.wiring import LabError, tool

CARRY_OVER = r"""
import ctypes, os, sys
path, namespace = os.fsencode(sys.argv[1]), os.open(sys.argv[2], os.O_RDONLY)
libc = ctypes.CDLL(None, use_errno=True)
OPEN_TREE, MOVE_MOUNT, AT_FDCWD, CLONE, EMPTY_PATH = 428, 429, -100, 1, 4  # unistd.h, mount.h; Linux >= 5.2
tree = libc.syscall(OPEN_TREE, AT_FDCWD, path, CLONE)
if tree < 0:
    sys.exit("open_tree: " + os.strerror(ctypes.get_errno()))
if libc.setns(namespace, 0x20000) != 0:  # CLONE_NEWNS
    sys.exit("setns: " + os.strerror(ctypes.get_errno()))
if libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, path, EMPTY_PATH) != 0:
    sys.exit("move_mount: " + os.strerror(ctypes.get_errno()))
"""
"""A mount of this machine, carried over into a node's mount namespace: a bind mount cannot cross between the two."""


@contextlib.contextmanager
def small_disk(lab: Lab, path: Path, mib: int) -> Iterator[Path]:
    """Mount a tmpfs of `mib` MiB at `path` here and on every node that is on; take it away again. Raises LabError."""
    path.mkdir(exist_ok=True)
    tool("mount", "-n", "-t", "tmpfs", "-o", f"size={mib}m,mode=755", "r4090c-lab", str(path))
    try:
        for name in lab.nodes:
            namespace = f"/proc/{lab._outer(lab.node(name)).pid}/ns/mnt"
            argv = [sys.executable, "-I", "-S", "-c", CARRY_OVER, str(path), namespace]
            done = subprocess.run(argv, capture_output=True, text=True)
            if done.returncode != 0:
                raise LabError(f"{path} cannot be shown to {name}: {done.stderr.strip()}")
        yield path
    finally:
        for name in lab.nodes:
            lab.exec(name, "umount", "-n", "-l", str(path))
        tool("umount", "-n", "-l", str(path))
        path.rmdir()
