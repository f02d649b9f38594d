"""The training Python of a node: its version and what is installed in it, without starting it where its folders tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from netcheck.facts.question import Question, Reply, as_list, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import Cluster, Node, PythonFact

NAME = "python"


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. It may be started in the end, from storage that is slow the first time: 15 s (est.)."""
    return Question(natives={"python": [node.paths.python]}, timeout_s=15)


def parse(reply: Reply) -> PythonFact:
    """Return the PythonFact. Raises ParseError when the executable is not there, cannot be run, or tells nonsense."""
    answers = as_mapping(reply.native("python"), "python")
    if len(answers) != 1:
        raise ParseError(f"python: {len(answers)} answers for one executable")
    executable, value = next(iter(answers.items()))
    answer = as_mapping(value, executable)
    if "error" in answer:
        raise ParseError(f"{executable}: {as_str(answer['error'], executable)}")
    version = as_str(answer.get("version"), f"version of {executable}")
    if not re.fullmatch(r"\d{1,3}(\.\d{1,3}){1,2}", version):
        raise ParseError(f"{executable}: not a version: {version[:80]!r}")
    packages: dict[str, str] = {}
    for folder in as_list(answer.get("distributions"), f"distributions of {executable}"):
        for name, found in packages_of(tuple(as_str(entry, executable) for entry in as_list(folder, executable))).items():
            packages.setdefault(name, found)  # the first folder on the path is the one that is imported
    return PythonFact(executable=executable, version=version, packages=packages)


@lru_cache(maxsize=16)  # the same environment on every node is the rule
def packages_of(entries: tuple[str, ...]) -> Mapping[str, str]:
    """Return {normalized name: version} from the *.dist-info and *.egg-info of one folder.

    Names are normalized as in PEP 503. Two versions of one package side by side, what a broken upgrade leaves, are both told:
    "2.4.0, 2.5.0". pip's leftovers ("~orch-2.4.0.dist-info") and entries without a version are not packages.
    """
    versions: dict[str, set[str]] = {}
    for entry in entries:
        match = re.fullmatch(r"([A-Za-z0-9][\w.\-]*?)-(\d[^-]*)(?:-py\d[\w.\-]*)?\.(?:dist|egg)-info", entry)
        if match:
            name = re.sub(r"[-_.]+", "-", match.group(1)).lower()
            versions.setdefault(name, set()).add(match.group(2))
    return {name: ", ".join(sorted(found)) for name, found in sorted(versions.items())}
