"""Whether all nodes run the same versions, and torch and DeepSpeed are there at all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from netcheck.checks._majority import majority, others
from netcheck.checks._wording import as_root, on
from r4090c.model import Cluster, Finding, Node, OsFact, PythonFact, Status

ID, GROUP, SCOPE, NEEDS = "version-agreement", "software", "cluster", ("python", "os")
DEMANDED = ("torch", "deepspeed")
"""Packages without which nothing can be trained."""
WANTED = ("transformers",)
"""Packages some recipes need."""
COMPARED = {
    "torch": Status.FAIL,
    "nccl": Status.FAIL,
    "deepspeed": Status.FAIL,
    "transformers": Status.WARN,
    "python": Status.WARN,
    "kernel": Status.WARN,
    "distribution": Status.WARN,
}
"""What must be the same -> what a difference is worth. Different torch, NCCL or DeepSpeed do not speak one protocol."""

WHY = {
    Status.FAIL: "ranks built from different versions hang or disagree in the first collective",
    Status.WARN: "a difference between nodes is the first suspect when one of them misbehaves",
}


def unread(node: Node, need: str, error: str) -> Finding | None:
    """Return the finding for a training Python that is not there: that is a fault, not something that could not be told."""
    if need != "python" or not error.endswith(("not there", "not executable by this account")):
        return None
    environment = node.paths.python.removesuffix("/bin/python").removesuffix("/bin/python3")
    return Finding(
        ID,
        f"{node.name}/python",
        Status.FAIL,
        error,
        f"{node.paths.python} (cluster.yaml), with torch and deepspeed",
        "every rank is started with it",
        on(node, f"python3 -m venv {environment} && {node.paths.python} -m pip install torch deepspeed transformers"),
    )


def check(pythons: Mapping[str, PythonFact], systems: Mapping[str, OsFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per missing package and per odd version (subject node/what), else one pass per node."""
    versions = {name: versions_of(pythons[name], systems[name]) for name in pythons}
    faults: dict[str, list[Finding]] = {name: [] for name in versions}
    for name, have in versions.items():
        faults[name] += _missing(cluster.node(name), have)
    for what, status in COMPARED.items():
        values = {name: have[what] for name, have in versions.items() if what in have}
        agreed = majority(values)
        for name in agreed.odd:
            right = (
                f"{agreed.value}, as on most nodes"
                if agreed.value is not None
                else f"one version on all; {others(values, name)} (no majority)"
            )
            remedy = _remedy(cluster.node(name), what, agreed.value or max(values.values(), key=_numbers))
            faults[name].append(Finding(ID, f"{name}/{what}", status, f"{what} {values[name]}", right, WHY[status], remedy))
    for name, have in versions.items():
        told = ", ".join(f"{what} {have[what]}" for what in ("torch", "deepspeed") if what in have)
        yield from faults[name] or [Finding(ID, name, Status.PASS, told, "the same versions on all nodes")]


def versions_of(python: PythonFact, system: OsFact) -> dict[str, str]:
    """Return what -> version for what a node has of COMPARED. NCCL is the wheel torch brings (nvidia-nccl-cu12, -cu13 …)."""
    have = {what: python.packages[what] for what in ("torch", "deepspeed", "transformers") if what in python.packages}
    nccl = sorted(version for package, version in python.packages.items() if package.startswith("nvidia-nccl-"))
    if nccl:
        have["nccl"] = ", ".join(nccl)
    return {**have, "python": python.version, "kernel": system.kernel, "distribution": system.distribution}


def _missing(node: Node, have: Mapping[str, str]) -> Iterator[Finding]:
    pip = f"{node.paths.python} -m pip install"
    for package in DEMANDED:
        if package not in have:
            why = "every rank imports it"
            remedy = on(node, f"{pip} {package}")
            yield Finding(
                ID,
                f"{node.name}/{package}",
                Status.FAIL,
                f"{package} is not installed",
                f"{package} in {node.paths.python}",
                why,
                remedy,
            )
    for package in WANTED:
        if package not in have and "torch" in have:
            why = "recipes with a language model need it"
            expected = f"{package} in {node.paths.python}"
            remedy = on(node, f"{pip} {package}")
            yield Finding(ID, f"{node.name}/{package}", Status.WARN, f"{package} is not installed", expected, why, remedy)


def _numbers(version: str) -> tuple[int, ...]:
    """Return what orders versions: their numbers; without a majority the newest is proposed."""
    return tuple(int(digits) for digits in re.findall(r"\d{1,9}", version))


def _remedy(node: Node, what: str, version: str) -> str:
    if what in ("torch", "deepspeed", "transformers"):
        return on(node, f"{node.paths.python} -m pip install {what}=={version}")
    if what == "nccl":
        return on(node, f"{node.paths.python} -m pip install --force-reinstall torch")
    if what == "python":
        return on(node, f"{node.paths.python} --version")
    return as_root(node, "apt-get dist-upgrade")
