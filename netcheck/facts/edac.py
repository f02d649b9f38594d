"""Memory errors as EDAC counts them (Documentation/admin-guide/RAS): not at all without ECC memory or a driver for it."""

from __future__ import annotations

import re

from netcheck.facts.question import Question, Reply, as_float, as_int
from r4090c.errors import ParseError
from r4090c.model import Cluster, DimmErrors, MemoryController, Node

NAME = "edac"
MC = "/sys/devices/system/edac/mc"
DIMMS = ("dimm", "rank")
"""A module is called dimm<N>, or rank<N> where the driver cannot tell the ranks of one module apart."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`."""
    controllers = ("mc_name", "ce_count", "ue_count", "seconds_since_reset")
    modules = ("dimm_label", "dimm_ce_count", "dimm_ue_count")
    return Question(
        files=(
            *(f"{MC}/mc*/{attribute}" for attribute in controllers),
            *(f"{MC}/mc*/{kind}*/{attribute}" for kind in DIMMS for attribute in modules),
        )
    )


def parse(reply: Reply) -> tuple[MemoryController, ...]:
    """Return the controllers by number; none where the kernel counts no memory errors. Raises ParseError on a strange count."""
    if "probe" in reply.errors:
        raise ParseError(reply.errors["probe"])
    numbers = sorted(
        int(match.group(1)) for path in reply.files if (match := re.fullmatch(rf"{MC}/mc(\d{{1,4}})/ce_count", path))
    )
    return tuple(_controller(reply, f"{MC}/mc{number}") for number in numbers)


def _controller(reply: Reply, folder: str) -> MemoryController:
    age = reply.line(f"{folder}/seconds_since_reset")
    modules = [
        match.group(1)
        for path in sorted(reply.files)
        if (match := re.fullmatch(rf"({re.escape(folder)}/[a-z]+\d{{1,4}})/dimm_ce_count", path))
    ]
    return MemoryController(
        name=reply.line(f"{folder}/mc_name") or folder.rpartition("/")[2],
        corrected=_count(reply, f"{folder}/ce_count"),
        uncorrected=_count(reply, f"{folder}/ue_count"),
        age_s=None if age is None else as_float(age, f"{folder}/seconds_since_reset"),
        dimms=tuple(
            DimmErrors(
                label=reply.line(f"{module}/dimm_label") or "/".join(module.rsplit("/", 2)[1:]),
                corrected=_count(reply, f"{module}/dimm_ce_count"),
                uncorrected=_count(reply, f"{module}/dimm_ue_count"),
            )
            for module in modules
        ),
    )


def _count(reply: Reply, path: str) -> int:
    count = as_int(reply.text(path), path)
    if count < 0:
        raise ParseError(f"{path}: {count}")
    return count
