"""Whether all nodes run the same versions, and torch and DeepSpeed are there at all."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from netcheck.checks._majority import majority, others
from netcheck.checks._wording import as_root, on
from r4090c.model import Cluster, Finding, Node, NodeFacts, OsFact, PythonFact, Status

ID, GROUP, SCOPE, NEEDS = "version-agreement", "software", "cluster", ("python", "os")
RULE = (
    "torch and DeepSpeed installed; torch, NCCL and DeepSpeed the same on all nodes (fail); CUDA, transformers, r4090c, Python,"
    " kernel and distribution as well (warn)"
)
SOURCE = "NCCL and DeepSpeed check no version in their first collective; est."
DEMANDED = ("torch", "deepspeed")
"""Packages without which nothing can be trained."""
WANTED = ("transformers",)
"""Packages some recipes need."""
NCCL_WHEELS = "nvidia-nccl-"
CUDA_WHEELS = "nvidia-cuda-runtime"
"""nvidia-cuda-runtime-cu12, and nvidia-cuda-runtime since CUDA 13."""
COMPARED = {
    "torch": Status.FAIL,
    "nccl": Status.FAIL,
    "deepspeed": Status.FAIL,
    "cuda": Status.WARN,
    "transformers": Status.WARN,
    "r4090c": Status.WARN,
    "python": Status.WARN,
    "kernel": Status.WARN,
    "distribution": Status.WARN,
}
"""What must be the same -> what a difference is worth. Different torch, NCCL or DeepSpeed do not speak one protocol."""

WHY = {
    Status.FAIL: "ranks built from different versions hang or disagree in the first collective",
    Status.WARN: "a difference between nodes is the first suspect when one of them misbehaves",
}


def unread(node: Node, need: str, error: str, facts: Mapping[str, NodeFacts]) -> Finding | None:
    """Return the finding for a training Python that is not there: that is a fault, not something that could not be told."""
    if need != "python" or not error.endswith(("not there", "not executable by this account")):
        return None
    environment = node.paths.python.rpartition("/bin/")[0] or node.paths.python
    known = [other.python.value for other in facts.values() if other.python.value is not None]
    packages = " ".join(_pinned(package, _usual(package, known)) for package in (*DEMANDED, *WANTED))
    return Finding(
        ID,
        f"{node.name}/python",
        Status.FAIL,
        error,
        f"{node.paths.python} (cluster.yaml), with torch and deepspeed",
        "every rank is started with it",
        on(node, f"python3 -m venv {shlex.quote(environment)} && {_pip(node)} install {packages}"),
    )


def check(pythons: Mapping[str, PythonFact], systems: Mapping[str, OsFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per missing package and per odd version (subject node/what), else one pass per node."""
    versions = {name: versions_of(pythons[name], systems[name]) for name in pythons}
    faults: dict[str, list[Finding]] = {name: [] for name in versions}
    for name, have in versions.items():
        faults[name] += _missing(cluster.node(name), have, list(pythons.values()))
    for what, status in COMPARED.items():
        values = {name: have[what] for name, have in versions.items() if what in have}
        agreed = majority(values)
        wanted = agreed.value if agreed.value is not None else max(values.values(), key=_numbers, default="")
        model = next((name for name, value in values.items() if value == wanted), "")
        for name in agreed.odd:
            right = (
                f"{agreed.value}, as on most nodes"
                if agreed.value is not None
                else f"one version on all; {others(values, name)} (no majority)"
            )
            node = cluster.node(name)
            if what in ("kernel", "distribution", "python"):
                hint, remedy = _by_hand(node, what, wanted, systems[name], systems[model])
            elif what in ("nccl", "cuda"):
                wheels = _wheels(pythons[model], NCCL_WHEELS if what == "nccl" else CUDA_WHEELS)
                hint, remedy = "", on(node, f"{_pip(node)} install {' '.join(wheels)}")
            else:
                hint, remedy = "", on(node, _install(node, what, values[name], wanted))
            why = f"{WHY[status]}{hint}"
            faults[name].append(Finding(ID, f"{name}/{what}", status, f"{what} {values[name]}", right, why, remedy))
    for name, have in versions.items():
        told = ", ".join(f"{what} {have[what]}" for what in ("torch", "deepspeed") if what in have)
        yield from faults[name] or [Finding(ID, name, Status.PASS, told, "the same versions on all nodes")]


def versions_of(python: PythonFact, system: OsFact) -> dict[str, str]:
    """Return what -> version for what a node has of COMPARED. NCCL and CUDA are the wheels torch brings (nvidia-nccl-cu12 …)."""
    have = {what: python.packages[what] for what in (*DEMANDED, *WANTED, "r4090c") if what in python.packages}
    for what, wheels in (("nccl", NCCL_WHEELS), ("cuda", CUDA_WHEELS)):
        versions = sorted(version for package, version in python.packages.items() if package.startswith(wheels))
        if versions:
            have[what] = ", ".join(versions)
    return {**have, "python": python.version, "kernel": system.kernel, "distribution": system.distribution}


def _missing(node: Node, have: Mapping[str, str], pythons: Sequence[PythonFact]) -> Iterator[Finding]:
    for package, status, why in (
        *((package, Status.FAIL, "every rank imports it") for package in DEMANDED),
        *((package, Status.WARN, "recipes with a language model need it") for package in WANTED),
    ):
        if package in have or (package in WANTED and "torch" not in have):
            continue
        remedy = on(node, f"{_pip(node)} install {_pinned(package, _usual(package, pythons))}")
        expected = f"{package} in {node.paths.python}"
        yield Finding(ID, f"{node.name}/{package}", status, f"{package} is not installed", expected, why, remedy)


def _numbers(version: str) -> tuple[int, ...]:
    """Return what orders versions: their numbers; without a majority the newest is proposed."""
    return tuple(int(digits) for digits in re.findall(r"\d{1,9}", version))


def _usual(package: str, pythons: Iterable[PythonFact]) -> str | None:
    """Return the version of `package` most of those nodes have that have it, else the newest; None where nobody has it."""
    counts = Counter(python.packages[package] for python in pythons if package in python.packages)
    return max(counts, key=lambda version: (counts[version] * 2 > counts.total(), _numbers(version)), default=None)


def _pip(node: Node) -> str:
    return f"{shlex.quote(node.paths.python)} -m pip"


def _pinned(package: str, version: str | None) -> str:
    """Return what to give to `pip install`. pip must know the index that holds builds of a label ("2.6.0+cu124")."""
    if version is None:
        return package
    version = version.split(", ")[-1]  # two side by side, what a broken upgrade leaves
    return shlex.quote(f"{package}=={version}")


def _install(node: Node, package: str, have: str, wanted: str) -> str:
    """Return the command that turns one version into another.

    pip takes 2.6.0+cpu for 2.6.0 (PEP 440) and would do nothing: where only the label differs the package is taken out first.
    """
    install = f"{_pip(node)} install {_pinned(package, wanted)}"
    if have != wanted and have.partition("+")[0] == wanted.partition("+")[0]:
        return f"{_pip(node)} uninstall -y {package} && {install}"
    return install


def _wheels(python: PythonFact, prefix: str) -> list[str]:
    """Return the pinned wheels in `python` whose name starts with `prefix`, by their own names: nvidia-nccl-cu12==2.21.5."""
    return [_pinned(name, version) for name, version in python.packages.items() if name.startswith(prefix)]


def _by_hand(node: Node, what: str, wanted: str, own: OsFact, other: OsFact) -> tuple[str, str]:
    """Return (what to do about it, as an end of `why`; a command) for what is no package of the training Python."""
    if what == "python":
        hint = f"; to mend it make the environment anew with Python {wanted}"
        return hint, on(node, f"{shlex.quote(node.paths.python)} --version")
    apt = own.distribution.split(" ")[0] in ("debian", "ubuntu") and own.distribution == other.distribution
    if what == "kernel" and apt:
        return "; reboot after the installation", as_root(node, f"apt-get -y install {shlex.quote(f'linux-image-{wanted}')}")
    if what == "kernel":
        return f"; to mend it install kernel {wanted} and reboot", on(node, "uname -r")
    return f"; to mend it bring the node to {wanted}, by an upgrade or a new installation", on(node, "cat /etc/os-release")
