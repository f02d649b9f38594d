"""The nouns: what was wished (Cluster and its parts), what was observed (Fact and the facts), what was judged (Finding).

Standard library only; everything is frozen. Units stand in the names: `_s`, `_mib`, `_gib`, `_gbit_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")

# --------------------------------------------------------------------------- wish: cluster.yaml


@dataclass(frozen=True, slots=True)
class Ssh:
    """How the controller reaches one node. Paths are expanded; an empty `config` means no ssh_config is read."""

    address: str
    port: int = 22
    user: str = ""
    key: str = ""
    jump: str = ""
    config: str = ""
    known_hosts: tuple[str, ...] = ()
    connect_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Paths:
    """Absolute paths on one node."""

    shared: str
    runs: str
    python: str


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. `data_address` is where its peers reach it on the data network; `gpus` is how many it should have."""

    name: str
    ssh: Ssh
    data_address: str
    gpus: int
    paths: Paths
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """The data network. `kind`: roce, infiniband, tcp, or loopback (demo only). None = not stated, so not demanded."""

    kind: str = "tcp"
    subnet: str | None = None
    rate_gbit_s: float | None = None
    mtu: int | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """The shared storage behind `paths.shared`. `kind`: nfs4, nfs, local (one machine or a test), other."""

    kind: str = "nfs4"
    source: str | None = None
    mount: str | None = None


@dataclass(frozen=True, slots=True)
class Expect:
    """Every threshold of the checks, in one place; cluster.yaml `expect:` overrides each. "est." = our estimate."""

    clock_skew_warn_s: float = 0.5
    """est.: logs of two nodes can still be ordered."""
    clock_skew_fail_s: float = 5.0
    """est.: certificates, NFS attribute caches and file times start to lie."""
    nofile_min: int = 65_536
    """est.: NCCL opens a few descriptors per connection and channel, data workers many more."""
    memlock_min_gib: float = 32.0
    """est.: registered buffers of 8 ranks; only demanded with RDMA."""
    shm_min_gib: float = 8.0
    """NCCL takes about 10 MB of /dev/shm a connection; docker's default of 64 MiB breaks it (NCCL issues 290, 342, 525)."""
    disk_free_min_gib: float = 20.0
    """est.: one checkpoint of a small model; recipes state their own need."""
    tmp_free_min_gib: float = 1.0
    """est.: compiler caches and logs of one run."""
    inodes_free_min: int = 100_000
    """est.: a Python environment has 50 000 files."""
    python_min: tuple[int, int] = (3, 8)
    """The node side is written for it."""
    memory_tolerance: float = 0.05
    """est.: share by which one node's memory may differ from the majority."""
    storage_visible_warn_s: float = 2.0
    """est.: a file written by one node should be seen by all within this time."""
    ssh_slow_warn_s: float = 3.0
    """est.: a login that takes longer points at DNS or PAM trouble."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The whole wish. `file` is where it was read from; `env` is the layer common to all nodes."""

    name: str
    nodes: tuple[Node, ...]
    network: Network
    storage: Storage
    expect: Expect
    env: Mapping[str, str] = field(default_factory=dict)
    file: str = ""
    expect_origin: Mapping[str, str] = field(default_factory=dict)
    """Threshold name -> "cluster.yaml" for each one that was overridden there."""

    def node(self, name: str) -> Node:
        """Return the node called `name`; KeyError when there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)


# --------------------------------------------------------------------------- observation: facts


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """One observation: a value, or why there is none. Exactly one of the three is set.

    `error`: it could not be read (a check must say `unknown`). `absent`: the named tool is not installed (`skip`).
    """

    value: T | None = None
    error: str | None = None
    absent: str | None = None

    @property
    def known(self) -> bool:
        """True when there is a value."""
        return self.error is None and self.absent is None


@dataclass(frozen=True, slots=True)
class OsFact:
    """Operating system. `distribution` like "debian 12"; `kernel` like "6.1.0-18-amd64"; `python3`: version of its own Python."""

    hostname: str
    kernel: str
    machine: str
    distribution: str
    boot_id: str
    uptime_s: float | None
    python3: str | None = None


@dataclass(frozen=True, slots=True)
class UserFact:
    """The account the tool logs in as."""

    uid: int
    gid: int
    name: str
    home: str
    shell: str


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node: its CPUs and memory (MiB)."""

    index: int
    cpus: tuple[int, ...]
    memory_mib: int


@dataclass(frozen=True, slots=True)
class CpuFact:
    """CPUs. `cores` groups SMT siblings: each inner tuple is one physical core. `allowed` is this account's cpuset."""

    model: str
    present: tuple[int, ...]
    online: tuple[int, ...]
    allowed: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    sockets: int
    numa: tuple[NumaNode, ...]
    governor: str | None


@dataclass(frozen=True, slots=True)
class MemoryFact:
    """Host memory and /dev/shm, MiB."""

    total_mib: int
    available_mib: int
    swap_mib: int
    shm_total_mib: int | None
    shm_free_mib: int | None


@dataclass(frozen=True, slots=True)
class LimitsFact:
    """Soft limits of a NON-interactive shell; None = unlimited."""

    memlock_bytes: int | None
    nofile: int | None
    stack_bytes: int | None
    nproc: int | None


@dataclass(frozen=True, slots=True)
class Iface:
    """One network interface. `addresses` are "10.0.0.1/24" strings; `speed_mbit_s` None = not told (down or virtual)."""

    name: str
    operstate: str
    mtu: int
    speed_mbit_s: int | None
    mac: str
    addresses: tuple[str, ...]
    virtual: bool


@dataclass(frozen=True, slots=True)
class NetFact:
    """Interfaces, the interface and source address towards each peer's data address, and how each node name resolves.

    `routes`: peer address -> (iface or None, own source address or None).
    `names`: node name -> addresses the node resolves it to (empty = does not resolve).
    """

    ifaces: tuple[Iface, ...]
    routes: Mapping[str, tuple[str | None, str | None]]
    names: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/mounts, octal escapes decoded."""

    source: str
    target: str
    fstype: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DiskFact:
    """One path that matters. Sizes in GiB; `writable` None = not tried; `error` = why statvfs did not answer."""

    path: str
    exists: bool
    fstype: str | None
    total_gib: float | None
    free_gib: float | None
    free_inodes: int | None
    writable: bool | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ClockFact:
    """`offset_s`: node clock minus controller clock, corrected for half the round trip; `error_bound_s`: half the round trip."""

    offset_s: float
    error_bound_s: float
    daemon: str | None
    """The time daemon seen running (chronyd, ntpd, systemd-timesyncd …); None = none seen."""


@dataclass(frozen=True, slots=True)
class PythonFact:
    """The training Python of a node. `packages`: normalized distribution name -> version."""

    executable: str
    version: str
    packages: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RdmaGid:
    """One GID table entry. `kind`: "v1", "v2" or "ib"; `address` in IPv6 notation."""

    index: int
    address: str
    kind: str
    netdev: str | None


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One RDMA port from sysfs, named like `mlx5_0:1`."""

    hca: str
    port: int
    state: str
    phys_state: str
    link_layer: str
    rate_gbit_s: float | None
    netdev: str | None
    firmware: str | None
    numa: int | None
    gids: tuple[RdmaGid, ...]

    @property
    def name(self) -> str:
        """The NCCL spelling, `mlx5_0:1`."""
        return f"{self.hca}:{self.port}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU from nvidia-smi and sysfs; None = not told. `pci` in sysfs form `0000:41:00.0`; `numa` -1 = firmware is silent."""

    index: int
    name: str
    uuid: str
    pci: str
    driver: str
    memory_total_mib: int | None
    memory_used_mib: int | None
    pcie_gen: int | None
    pcie_gen_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    utilization_pct: int | None
    persistence: bool | None
    numa: int | None
    faults: tuple[str, ...] = ()
    """Cells that reported an error (`ERR!`, "GPU is lost"), as "field: text"."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """All facts of one node. A field is a Fact so that "could not be read" stays visible."""

    node: str
    os: Fact[OsFact]
    user: Fact[UserFact]
    cpus: Fact[CpuFact]
    memory: Fact[MemoryFact]
    limits: Fact[LimitsFact]
    net: Fact[NetFact]
    mounts: Fact[tuple[Mount, ...]]
    disks: Fact[tuple[DiskFact, ...]]
    clock: Fact[ClockFact]
    python: Fact[PythonFact]
    rdma: Fact[tuple[RdmaPort, ...]]
    gpus: Fact[tuple[Gpu, ...]]


# --------------------------------------------------------------------------- judgement: findings


class Status(str, Enum):
    """What a check says. `unknown`: could not be told, never a pass. `skip`: not applicable, or a tool is missing."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One judgement. The keys are API (`--json`): culprit, what was seen, what was expected and why, the mending command."""

    check: str
    subject: str
    status: Status
    observed: str
    expected: str = ""
    why: str = ""
    remedy: str = ""
