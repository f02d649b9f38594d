"""Whether all nodes run the same NVIDIA driver, new enough for this card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from netcheck.checks._majority import majority, others
from netcheck.checks._wording import DRIVER_BRANCH, as_root, driver_package
from r4090c.model import Cluster, Finding, Gpu, Node, NodeFacts, OsFact, PythonFact, Status

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "gpu-driver", "gpu", "cluster", ("gpus",), ("os", "python")
RULE = "one version on all nodes, new enough for the CUDA of the training Python (fail), at least 550.40.07 (warn)"
SOURCE = "accelerate pull request 2195; CUDA Toolkit release notes"
ABSENT = Status.UNKNOWN

DRIVER_MIN = (550, 40, 7)
"""accelerate (PR 2195) turns P2P and InfiniBand off by itself on RTX 40 cards below this driver."""

DRIVER_OF_CUDA = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
"""CUDA major version -> oldest driver: CUDA Toolkit release notes, "CUDA Toolkit and Minimum Required Driver Version"."""

REBOOT = "reboot after the installation"
"""Else the kernel keeps the module of the driver before, and nvidia-smi says MISMATCH."""

MISMATCH = "Driver/library version mismatch"
"""nvidia-smi's words for NVML error 18 (NVML_ERROR_LIB_RM_VERSION_MISMATCH)."""


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no driver to judge."""
    return node.gpus > 0


def unread(node: Node, need: str, error: str, facts: Mapping[str, NodeFacts]) -> Finding | None:
    """Return the finding for a driver whose two halves differ: nvidia-smi then shows no card, and that is a fault."""
    if MISMATCH.lower() not in error.lower():
        return None
    why = (
        "the driver was upgraded, and the kernel still runs the old module: no program can use a GPU."
        " Reload the module as told, or reboot where a program holds it"
    )
    reload = as_root(node, "modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia", "modprobe nvidia")
    return Finding(ID, node.name, Status.FAIL, error[:160], "kernel module and library of one version", why, reload)


def check(
    gpus: Mapping[str, tuple[Gpu, ...]],
    systems: Mapping[str, OsFact | None],
    pythons: Mapping[str, PythonFact | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per fault of a node's driver, else one pass per node."""
    drivers = {name: next((gpu.driver for gpu in cards if gpu.driver), "") for name, cards in gpus.items() if cards}
    told = {name: driver for name, driver in drivers.items() if driver}  # a node whose cards are all lost has no vote
    agreed = majority(told)
    for name, driver in drivers.items():
        node, faults, system = cluster.node(name), 0, systems.get(name)
        distribution = system.distribution if system is not None else None
        version = _version(driver)
        if version is None:
            faults += 1
            remedy = f"r4090c facts --nodes {name}"
            yield Finding(ID, name, Status.UNKNOWN, f"not understood: driver {driver!r}", "a version like 550.54.14", "", remedy)
        if name in agreed.odd:
            faults += 1
            right = (
                f"{agreed.value}, as on most nodes" if agreed.value else f"one driver on all; {others(told, name)} (no majority)"
            )
            branch = (agreed.value or max(told.values(), key=lambda text: _version(text) or ())).split(".")[0]
            why = f"CUDA and NCCL choose their paths by driver: nodes that differ hang or run at different speeds; {REBOOT}"
            install = as_root(node, f"apt-get install -y {driver_package(distribution, branch)}")
            yield Finding(ID, name, Status.FAIL, f"driver {driver}", right, why, install)
        coming = _version(agreed.value or "") or () if name in agreed.odd else ()  # the others' driver mends more than one fault
        if version is not None and version < DRIVER_MIN and coming < DRIVER_MIN:
            faults += 1
            why = (
                "accelerate refuses or disables P2P and InfiniBand below it on RTX 40 cards; early 525 drivers lost data over"
                f" P2P; {REBOOT}"
            )
            expected = "at least 550.40.07"
            install = as_root(node, f"apt-get install -y {driver_package(distribution)}")
            yield Finding(ID, name, Status.WARN, f"driver {driver}", expected, why, install)
        cuda = cuda_major(pythons.get(name))
        needed = DRIVER_OF_CUDA.get(cuda or 0, ())
        if version is not None and version < needed and coming < needed:
            faults += 1
            least = ".".join(map(str, needed))
            why = (
                f"the training Python has PyTorch for CUDA {cuda}: torch then finds no GPU. Or install a torch for an older CUDA;"
                f" {REBOOT}"
            )
            branch = str(max(needed[0], int(DRIVER_BRANCH)))
            install = as_root(node, f"apt-get install -y {driver_package(distribution, branch)}")
            yield Finding(ID, name, Status.FAIL, f"driver {driver}", f"at least {least}, for CUDA {cuda}", why, install)
        if not faults:
            yield Finding(ID, name, Status.PASS, f"driver {driver}", "one driver on all nodes, at least 550.40.07")


def cuda_major(python: PythonFact | None) -> int | None:
    """Return the CUDA major version that the training Python's torch was built for, None when nothing tells."""
    packages = python.packages if python is not None else {}
    local = re.search(r"\+cu(\d{2})\d", packages.get("torch", ""))
    if local:
        return int(local.group(1))
    told = [int(match.group(1)) for name in packages if (match := re.fullmatch(r"nvidia-.+-cu(\d{2})", name))]
    return max(told, default=None)


def _version(text: str) -> tuple[int, ...] | None:
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+)+", text) else None
