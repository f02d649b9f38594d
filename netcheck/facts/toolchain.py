"""The compilers DeepSpeed needs for its own operators (torch.utils.cpp_extension): looked up, not started."""

from __future__ import annotations

import json
import re

from netcheck.facts.question import Question, Reply
from netcheck.facts.tools import read_tools
from r4090c.model import Cluster, Node, ToolchainFact

NAME = "toolchain"
CUDA = "/usr/local/cuda"
"""Where torch looks when there is neither a CUDA_HOME nor an nvcc on the PATH."""
PROGRAMS = ("nvcc", "ninja", "c++")


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. Nothing is started. torch finds ninja and the compiler on the PATH alone.

    The PATH is that of the login, where the ranks get theirs from, then the one cluster.yaml states.
    """
    stated = {**cluster.env, **node.env}
    cuda = stated.get("CUDA_HOME") or CUDA
    folders = [folder for folder in stated.get("PATH", "").split(":") if folder.startswith("/")]
    further = {"nvcc": [f"{cuda}/bin/nvcc"], "ninja": [], "c++": [stated.get("CXX") or "/usr/bin/c++"]}
    wanted = {program: [[*(f"{folder}/{program}" for folder in folders), *further[program]], ""] for program in PROGRAMS}
    files = (f"{cuda}/version.json",) if node.gpus else ()
    return Question(files=files, natives={"tools": wanted}, timeout_s=5)


def parse(reply: Reply) -> ToolchainFact:
    """Return the ToolchainFact. Raises ParseError when the programs could not be looked up."""
    found = read_tools(reply)
    programs = {program: found[program].path if program in found else None for program in PROGRAMS}
    return ToolchainFact(programs=programs, cuda=_cuda_version(reply))


def _cuda_version(reply: Reply) -> str | None:
    """Return the version of the toolkit in version.json (CUDA >= 11.1), None where it does not tell."""
    texts = [text for path, text in reply.files.items() if path.endswith("/version.json")]
    try:
        version = json.loads(texts[0])["cuda"]["version"] if texts else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return version if isinstance(version, str) and re.fullmatch(r"\d{1,3}(\.\d{1,4}){1,3}", version) else None
