"""Measurements: what takes two ends, or time, or disturbs others. Each is a pure plan (netcheck.measure.job) and a pure reader.

To add one: write the file, add its line below; checks name it in NEEDS. `ports` and `nonce` came first and have node programs and
ways of their own (netcheck.preflight); all others are rounds of jobs that netcheck.conduct carries out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from netcheck.measure import (
    gpu_load,
    nccl_all,
    nccl_node,
    nccl_pairs,
    nonce,
    p2p,
    path_mtu,
    ports,
    power,
    rdma,
    ssh_mesh,
    storage_load,
    tcp,
)
from netcheck.measure.job import Level, MeasurementModule


class Named(Protocol):
    """What is known of every measurement."""

    NAME: str
    TITLE: str
    LEVEL: Level


_PLANNED: tuple[MeasurementModule, ...] = (
    ssh_mesh,
    path_mtu,
    tcp,
    rdma,
    nccl_node,
    p2p,
    nccl_pairs,
    nccl_all,
    gpu_load,
    storage_load,
    power,
)
PLANNED: Mapping[str, MeasurementModule] = {module.NAME: module for module in _PLANNED}
"""Carried out one after the other in this order: what is quick and explains the rest comes first."""
_ALL: tuple[Named, ...] = (ports, nonce, *_PLANNED)
MEASUREMENTS: Mapping[str, Named] = {module.NAME: module for module in _ALL}
"""All measurements by name."""
