"""What a cluster was like when it was known to be good, and what has changed since. Pure.

A lock is JSON: {"schema", "cluster", "level", "common": what all nodes have, "nodes": {name: what only it has},
"figures": what was measured}. What a node has is item -> value; the name of an item begins with the fact it comes from:
"os.kernel", "python.torch", "gpus.0.power_limit_w", "net.enp65s0f0.mtu". Equal clusters give equal locks, byte for byte: there is
no time in it, and no secret (versions, models, addresses on the PCI bus, speeds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netcheck import figures as figures_module
from netcheck.data_network import data_iface, peers_of
from netcheck.facts.question import as_mapping, as_str
from netcheck.measure.figure import Figure
from r4090c.errors import ParseError
from r4090c.model import (
    Cluster,
    CpuFact,
    Expect,
    Gpu,
    MemoryFact,
    NetFact,
    Node,
    NodeFacts,
    OsFact,
    PythonFact,
    RdmaPort,
    ToolchainFact,
    TopologyMatrix,
)

SCHEMA = "r4090c.lock/1"
Value = str | int | float
Items = dict[str, Value]
PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "triton",
    "flash-attn",
    "xformers",
    "r4090c",
)
"""Python packages whose version changes what a training computes, or how fast. est."""
PACKAGE_PREFIXES = ("nvidia-nccl-", "nvidia-cuda-runtime-", "nvidia-cudnn-", "nvidia-cublas-")
"""Wheels that torch brings; the end of their names tells the CUDA version."""
THERE = "there"
"""What stands for the value of a part (a GPU, an interface, a port) that came or went as a whole."""
MEMORY = "memory.total_mib"
"""The one item that is compared with a tolerance: the kernel keeps a little more or less of it for itself."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock as it was read. `items`: node -> item -> value."""

    cluster: str
    level: str
    items: Mapping[str, Mapping[str, Value]]
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """An item that is not what it was; None: it is not there (any more, or was not). A whole part, as "gpus.1", was THERE."""

    item: str
    was: Value | None
    now: Value | None


def make(cluster: Cluster, level: str, facts: Mapping[str, NodeFacts], figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the lock of `cluster` as it is."""
    items = {node.name: items_of(node, cluster, facts[node.name]) for node in cluster.nodes if node.name in facts}
    return {
        "schema": SCHEMA,
        "cluster": cluster.name,
        "level": level,
        **items_json(items),
        "figures": figures_module.to_json(figures),
    }


def items_json(items: Mapping[str, Mapping[str, Value]]) -> dict[str, Any]:
    """Return {"common": what all nodes have, "nodes": {name: the rest}}, sorted."""
    shared = None
    for own in items.values():
        pairs = {(name, type(value), value) for name, value in own.items()}
        shared = pairs if shared is None else shared & pairs
    common = {name: value for name, _, value in sorted(shared or set(), key=lambda entry: entry[0])}
    return {
        "common": common,
        "nodes": {
            node: {name: value for name, value in sorted(own.items()) if name not in common}
            for node, own in sorted(items.items())
        },
    }


def read_items(value: Mapping[str, Any]) -> dict[str, dict[str, Value]]:
    """Return node -> item -> value from what `items_json` wrote. Raises ParseError."""
    common = _values(value.get("common"), "common")
    return {node: {**common, **_values(own, node)} for node, own in as_mapping(value.get("nodes"), "nodes").items()}


def read(value: object) -> Lock:
    """Return the lock in `value`. Raises ParseError for anything else."""
    lock = as_mapping(value, "lock")
    if lock.get("schema") != SCHEMA:
        raise ParseError(f"its schema is {lock.get('schema')!r:.60}, not {SCHEMA}")
    return Lock(
        cluster=as_str(lock.get("cluster"), "cluster"),
        level=as_str(lock.get("level"), "level"),
        items=read_items(lock),
        figures=figures_module.from_json(lock.get("figures")),
    )


def _values(value: object, what: str) -> Items:
    items = as_mapping(value, what)
    for name, one in items.items():
        if not isinstance(one, (str, int, float)) or isinstance(one, bool) or one != one:
            raise ParseError(f"{name}: {type(one).__name__}, not a text or number")
    return dict(items)


def changes(was: Mapping[str, Value], now: Mapping[str, Value], expect: Expect) -> list[Change]:
    """Return what is different in `now`, by name. A GPU, interface or port that came or went with all its items is one change."""
    found: dict[str, Change] = {}
    for item in sorted({*was, *now}):
        before, after = was.get(item), now.get(item)
        if before is not None and after is not None and same(item, before, after, expect):
            continue
        part = item.rpartition(".")[0]
        came, went = (not any(one.startswith(f"{part}.") for one in items) for items in (was, now))
        if "." in part and (came or went):
            found[part] = Change(part, None if came else THERE, None if went else THERE)
        else:
            found[item] = Change(item, before, after)
    return list(found.values())


def same(item: str, was: Value, now: Value, expect: Expect) -> bool:
    """Return whether an item is what it was."""
    if item == MEMORY and isinstance(was, (int, float)) and isinstance(now, (int, float)):
        return abs(now - was) <= expect.memory_tolerance * was
    return was == now


def label(item: str) -> str:
    """Return an item as people name it: "kernel", "torch", "gpu0.power_limit_w", "enp65s0f0.mtu", "cpu.cores"."""
    fact, _, rest = item.partition(".")
    if fact == "gpus":
        return f"gpu{rest}" if rest[:1].isdigit() else f"gpu.{rest}"
    return rest if fact in ("os", "python", "net", "rdma", "gpu_topology") else f"{fact.removesuffix('s')}.{rest}"


def told(value: Value | None) -> str:
    """Return a value as text, numbers without needless digits."""
    if value is None:
        return "not there"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------- the items of a node


def items_of(node: Node, cluster: Cluster, facts: NodeFacts) -> Items:
    """Return what is worth locking of one node; what was not read has no items."""
    values = {name: getattr(facts, name).value for name in READERS}
    return items_from(node, cluster, values)


def items_from(node: Node, cluster: Cluster, values: Mapping[str, Any]) -> Items:
    """Return the same from fact -> value (None = not read)."""
    return {
        f"{name}.{item}": value
        for name, reader in READERS.items()
        if values.get(name) is not None
        for item, value in reader(values[name], node, cluster)
        if value is not None
    }


Read = Iterator[tuple[str, Value | None]]


def _system(system: OsFact, node: Node, cluster: Cluster) -> Read:
    yield "kernel", system.kernel
    yield "distribution", system.distribution
    yield "machine", system.machine


def _python(python: PythonFact, node: Node, cluster: Cluster) -> Read:
    yield "python", python.version
    for name, version in python.packages.items():
        if name in PACKAGES or name.startswith(PACKAGE_PREFIXES):
            yield name, version


def _toolchain(toolchain: ToolchainFact, node: Node, cluster: Cluster) -> Read:
    yield "cuda", toolchain.cuda


def _cpus(cpus: CpuFact, node: Node, cluster: Cluster) -> Read:
    yield "model", cpus.model
    yield "sockets", cpus.sockets
    yield "cores", len(cpus.cores)
    yield "online", len(cpus.online)
    yield "numa_nodes", len(cpus.numa)


def _memory(memory: MemoryFact, node: Node, cluster: Cluster) -> Read:
    yield "total_mib", memory.total_mib


def _gpus(gpus: Sequence[Gpu], node: Node, cluster: Cluster) -> Read:
    yield "count", len(gpus)
    drivers = sorted({gpu.driver for gpu in gpus if gpu.driver})
    yield "driver", ", ".join(drivers) or None
    for gpu in gpus:
        yield f"{gpu.index}.model", gpu.name
        yield f"{gpu.index}.memory_mib", gpu.memory_total_mib
        yield f"{gpu.index}.power_limit_w", gpu.power_limit_w
        yield f"{gpu.index}.pci", gpu.pci
        yield f"{gpu.index}.numa", gpu.numa
        yield f"{gpu.index}.pcie_width_max", gpu.pcie_width_max


def _topology(matrix: TopologyMatrix, node: Node, cluster: Cluster) -> Read:
    yield from matrix.links.items()


def _net(net: NetFact, node: Node, cluster: Cluster) -> Read:
    """Of interfaces with a wire that are up, and of the one the data network goes over."""
    data, _ = data_iface(net, node, peers_of(node, cluster), loopback=cluster.network.kind == "loopback")
    for iface in net.ifaces:
        if (not iface.virtual and iface.operstate == "up") or iface.name == data:
            yield f"{iface.name}.mtu", iface.mtu
            yield f"{iface.name}.speed_mbit_s", iface.speed_mbit_s
    yield "data_interface", data


def _rdma(ports: Sequence[RdmaPort], node: Node, cluster: Cluster) -> Read:
    for port in ports:
        if port.state == "ACTIVE":
            yield f"{port.name}.rate_gbit_s", port.rate_gbit_s
            yield f"{port.name}.link_layer", port.link_layer
            yield f"{port.name}.numa", port.numa
        yield f"{port.name}.firmware", port.firmware


READERS: Mapping[str, Callable[[Any, Node, Cluster], Read]] = {
    "os": _system,
    "python": _python,
    "toolchain": _toolchain,
    "cpus": _cpus,
    "memory": _memory,
    "gpus": _gpus,
    "gpu_topology": _topology,
    "net": _net,
    "rdma": _rdma,
}
"""Fact -> what of it is locked."""
