"""Where Triton, torch and Hugging Face keep what they compile and load, on what file system, and lock files left there."""

from __future__ import annotations

from netcheck.facts.question import Question, Reply, as_float, as_list, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import CacheFolder, Cluster, Node

NAME = "caches"
DEFAULTS = {
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "TORCH_EXTENSIONS_DIR": "~/.cache/torch_extensions",
    "HF_HOME": "~/.cache/huggingface",
}
"""Variable -> where the library goes without it (triton/runtime/cache.py, torch/utils/cpp_extension.py,
huggingface_hub/constants.py)."""
LOCKED = "TORCH_EXTENSIONS_DIR"
"""Only there is a left lock a fault. Triton's cache has no locks and thousands of folders, too many to look into over NFS."""
ANSWER_S = 5.0
"""est.: as long as `disks` waits for a file system."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`: the folders of its ranks, which get the variables of cluster.yaml and none of the login's."""
    stated = {**cluster.env, **node.env}
    cache = stated.get("XDG_CACHE_HOME", "~/.cache")
    wanted = [
        [variable, stated.get(variable) or default.replace("~/.cache", cache), variable == LOCKED]
        for variable, default in DEFAULTS.items()
    ]
    return Question(natives={"caches": wanted}, timeout_s=ANSWER_S)


def parse(reply: Reply) -> tuple[CacheFolder, ...]:
    """Return the folders in the order of DEFAULTS; one not made yet tells about its nearest parent. Raises ParseError."""
    found = []
    for variable, value in as_mapping(reply.native("caches"), "caches").items():
        answer = as_mapping(value, variable)
        fstype, source = answer.get("fstype"), answer.get("source")
        locks = []
        for entry in as_list(answer.get("locks"), variable):
            lock = as_list(entry, variable)
            if len(lock) != 2:
                raise ParseError(f"{variable}: expected [lock file, age], got {len(lock)} values")
            locks.append((as_str(lock[0], variable), as_float(lock[1], variable)))
        found.append(
            CacheFolder(
                variable=variable,
                path=as_str(answer.get("path"), variable),
                fstype=None if fstype is None else as_str(fstype, variable),
                source=None if source is None else as_str(source, variable),
                locks=tuple(locks),
            )
        )
    return tuple(found)
