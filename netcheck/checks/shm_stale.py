"""Whether files of killed runs lie in /dev/shm, where the next run needs the room."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from netcheck.checks._wording import as_root, listed, on, size
from r4090c.model import Cluster, Finding, Node, ShmFile, Status, UserFact

ID, GROUP, NEEDS, OPTIONAL = "shm-stale", "os", ("shm_files",), ("user",)
RULE = "no nccl-* or torch_* file in /dev/shm that no living process has (warn)"
SOURCE = "NCCL issue 1518"

YOUNG_S = 60.0
"""est.: a run makes its files and maps them in less time; younger ones are left alone."""
NAMED_AT_MOST = 6
"""Files the remedy names one by one; beyond that a loop looks at each again."""


def check(node: Node, files: tuple[ShmFile, ...], user: UserFact | None, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding: nothing left behind (pass), or how much (warn). What could not be looked into is never called stale."""
    stale = [file for file in files if file.used is False and file.age_s > YOUNG_S]
    expected = "nothing that no process uses"
    if not stale:
        unseen = sum(file.used is None for file in files)
        told = f"{len(files)} files in use" if files else "no files of NCCL or torch"
        yield Finding(ID, node.name, Status.PASS, told + (f", {unseen} of them other accounts'" if unseen else ""), expected)
        return
    total, oldest_s = size(sum(file.size_mib for file in stale) / 1024), max(file.age_s for file in stale)
    observed = (
        f"{listed((file.name for file in stale), 3)} in /dev/shm: {total}, up to {_age(oldest_s)} old, and no process has them"
    )
    why = "a run that was killed left them; they take the memory and the room that NCCL needs"
    yield Finding(ID, node.name, Status.WARN, observed, expected, why, _removed(node, stale, user))


def _age(seconds: float) -> str:
    for unit, length_s in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _removed(node: Node, stale: Sequence[ShmFile], user: UserFact | None) -> str:
    """Return the command that removes the files; as root unless all of them are the login's own."""
    own = user is not None and all(file.uid == user.uid for file in stale)
    if len(stale) <= NAMED_AT_MOST:
        command = f"rm -f {' '.join(shlex.quote(f'/dev/shm/{file.name}') for file in stale)}"
    else:
        loop = 'cd /dev/shm && for f in nccl-* torch_*; do grep -qsF "/dev/shm/$f" /proc/[0-9]*/maps || rm -f -- "$f"; done'
        command = f"sh -c {shlex.quote(loop)}"
    return on(node, command) if own else as_root(node, command)
