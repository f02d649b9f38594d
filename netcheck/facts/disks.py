"""Paths that matter: whether they exist, their room, their file system, whether this account may write.

Each is asked in a child process that can be killed: `statvfs` on a hung NFS mount does not come back.
"""

from __future__ import annotations

from netcheck.facts.question import Question, Reply, as_int, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import Cluster, DiskFact, Node

NAME = "disks"
GIB = 1 << 30
HOME = "~"
ANSWER_S = 5.0
"""est.: healthy shared storage answers a statvfs in milliseconds; a hung one never does."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`: its shared folder, its runs, /tmp and the home folder."""
    paths = (node.paths.shared, node.paths.runs, "/tmp", HOME)
    return Question(natives={"disk": list(dict.fromkeys(paths))}, timeout_s=ANSWER_S)


def parse(reply: Reply) -> tuple[DiskFact, ...]:
    """Return one DiskFact a path, in the order asked. A path not made yet tells about its nearest existing parent.

    A path that did not answer has `error` set and everything else unknown; its name is then as asked ("~" = home).
    """
    disks = []
    for asked, value in as_mapping(reply.native("disk"), "disk").items():
        answer = as_mapping(value, asked)
        if "error" in answer:
            error = as_str(answer["error"], asked)
            disks.append(DiskFact(asked, False, None, None, None, None, None, error))
            continue
        exists, writable = answer.get("exists"), answer.get("writable")
        if not isinstance(exists, bool) or not isinstance(writable, bool):
            raise ParseError(f"{asked}: exists and writable are to be true or false")
        fstype = answer.get("fstype")
        disks.append(
            DiskFact(
                path=as_str(answer.get("path"), asked),
                exists=exists,
                fstype=None if fstype is None else as_str(fstype, asked),
                total_gib=_gib(answer.get("total_bytes"), asked),
                free_gib=_gib(answer.get("free_bytes"), asked),
                # A file system that makes inodes as needed (btrfs, some NFS servers) counts none at all.
                free_inodes=as_int(answer.get("free_inodes"), asked) if as_int(answer.get("inodes"), asked) else None,
                writable=writable,
            )
        )
    return tuple(disks)


def _gib(value: object, what: str) -> float:
    number = as_int(value, what)
    if not 0 <= number < 1 << 80:
        raise ParseError(f"{what}: a size of {number} bytes")
    return number / GIB
