"""What NCCL and torch left in /dev/shm, and whether anybody uses it. Asked in a child: a hung process holds its memory map."""

from __future__ import annotations

from netcheck.facts.question import Question, Reply, as_float, as_int, as_list, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import Cluster, Node, ShmFile

NAME = "shm_files"
SHM = "/dev/shm"
MIB = 1 << 20


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. 5 s (est.): only where there are such files are the maps of all processes read."""
    return Question(natives={"shm": [SHM]}, timeout_s=5)


def parse(reply: Reply) -> tuple[ShmFile, ...]:
    """Return the files by name. Raises ParseError when the folder or the processes could not be looked at in time."""
    answer = as_mapping(reply.native("shm"), "shm").get(SHM)
    if isinstance(answer, dict) and "error" in answer:
        raise ParseError(f"{SHM}: {as_str(answer['error'], SHM)}")
    files = []
    for entry in as_list(answer, SHM):
        fields = as_mapping(entry, SHM)
        used = fields.get("used")
        if used is not None and not isinstance(used, bool):
            raise ParseError(f"{SHM}: used is to be true, false or null")
        files.append(
            ShmFile(
                name=as_str(fields.get("name"), SHM),
                uid=as_int(fields.get("uid"), SHM),
                size_mib=as_int(fields.get("bytes"), SHM) / MIB,
                age_s=as_float(fields.get("age_s"), SHM),
                used=used,
            )
        )
    return tuple(sorted(files, key=lambda file: file.name))
