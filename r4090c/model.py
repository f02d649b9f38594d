"""The nouns: what was wished (Cluster and its parts), what was observed (Fact and the facts), what was judged (Finding).

Standard library only; everything is frozen. Units stand in the names: `_s`, `_mib`, `_gib`, `_gbit_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

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
    """One machine. `data_address` is where its peers reach it on the data network; `gpus` is how many it should have.

    `spare`: a run uses it only when it is named, or in the place of a node that fails.
    """

    name: str
    ssh: Ssh
    data_address: str
    gpus: int
    paths: Paths
    env: Mapping[str, str] = field(default_factory=dict)
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """The data network. `kind`: roce, infiniband, tcp, or loopback (demo only). None = not stated, so not demanded."""

    kind: str = "tcp"
    subnet: str | None = None
    rate_gbit_s: float | None = None
    mtu: int | None = None

    @property
    def rdma(self) -> bool:
        """True when the network is stated to be one of RDMA."""
        return self.kind in ("roce", "infiniband")


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
    memory_available_min_pct: float = 25.0
    """est.: before a run most of the memory is free, also beside a file cache of the kernel or of ZFS (half by default)."""
    memory_corrected_per_day_warn: float = 10.0
    """mcelog's default for one module (mcelog.conf, ce-error-threshold = 10 / 24h)."""
    stack_min_mib: float = 8.0
    """The default of Linux; threads of NCCL and of data workers take their stack's size from it (pthread_create(3))."""
    flaps_per_day_fail: float = 5.0
    """est.: a sound link is lost at reboots and when a hand pulls the cable."""
    rdma_mtu_min: int = 4096
    """The largest of RDMA: 98.0 of 100 Gbit/s carry data, 92.6 with 1024 (headers of RoCE v2)."""
    compiler: bool = False
    """true: nvcc, ninja and c++ must be there, as recipes build DeepSpeed's own operators (CPU offload, fused optimizers)."""
    storage_visible_warn_s: float = 2.0
    """est.: a file written by one node should be seen by all within this time."""
    ssh_slow_warn_s: float = 3.0
    """est.: a login that takes longer points at DNS or PAM trouble."""
    gpu_memory_mib: int = 24_564
    """What nvidia-smi tells of an RTX 4090 as sold; ECC takes a part of it, rebuilt cards have twice as much."""
    gpu_pcie_width_min: int = 16
    """An RTX 4090 has 16 lanes (Ada whitepaper); without P2P all traffic between GPUs goes over them."""
    gpu_pcie_gen_min: int = 4
    """An RTX 4090 is a card of PCIe generation 4 (Ada whitepaper)."""
    gpu_heat_warn_c: int = 10
    """est.: degrees below the temperature at which the card slows itself down; a warm afternoon takes them."""
    gpu_heat_fail_c: int = 3
    """est.: as gpu_heat_warn_c; so near the limit the clocks already give way."""
    gpu_memory_used_warn_mib: int = 600
    """est.: held while no program computes; a desktop on the card takes less."""
    p2p_bar1_min_gib: float = 32.0
    """Patched open kernel modules (tinygrad, aikitoria) map a card's whole memory through BAR1; its sizes are powers of two."""
    aer_corrected_per_hour_warn: float = 10.0
    """est.: a sound link corrects no errors for weeks."""
    nccl_intra_warn_gbyte_s: float = 8.0
    """est.: 8 stock RTX 4090 in one machine reach 14.4 to 15.0 (NVIDIA/nccl-tests issues 269, 307)."""
    nccl_intra_fail_gbyte_s: float = 3.0
    """est.: what a slot with four lanes, or memory of one channel, leaves."""
    nccl_sockets_warn_gbyte_s: float = 4.0
    """est., as nccl_intra_warn_gbyte_s where GPUs hang on different sockets or NUMA nodes."""
    nccl_sockets_fail_gbyte_s: float = 1.5
    """est., as nccl_intra_fail_gbyte_s where GPUs hang on different sockets or NUMA nodes."""
    nccl_100g_warn_gbyte_s: float = 7.0
    """est.: all_reduce over 100 Gbit/s without GPUDirect RDMA, which a GeForce never has; the wire carries 12.2."""
    nccl_100g_fail_gbyte_s: float = 5.0
    """est., as nccl_100g_warn_gbyte_s."""
    nccl_25g_warn_gbyte_s: float = 2.3
    """est.: all_reduce over 25 Gbit/s; the wire carries 2.9 to 3.1."""
    nccl_25g_fail_gbyte_s: float = 1.5
    """est., as nccl_25g_warn_gbyte_s."""
    nccl_10g_warn_gbyte_s: float = 0.9
    """est.: all_reduce over 10 Gbit/s; TCP carries 1.17 to 1.24."""
    nccl_10g_fail_gbyte_s: float = 0.6
    """est., as nccl_10g_warn_gbyte_s."""
    nccl_other_warn: float = 0.56
    """est.: share of any other rate that all_reduce reaches; that of 100 Gbit/s."""
    nccl_other_fail: float = 0.4
    """est., as nccl_other_warn."""
    gloo_warn: float = 0.7
    """est.: share of the rate that gloo's all_reduce reaches between CPUs; 0.98 of iperf3 on a link shaped to 1 Gbit/s."""
    gloo_fail: float = 0.45
    """est., as gloo_warn."""
    p2p_faster_min: float = 1.05
    """est.: P2P must be faster than the way through host memory by more than two runs differ, or it is left off."""
    gpu_copy_warn_gbyte_s: float = 22.0
    """est.: PCIe 4.0 x16 gives 25 to 26 GB/s between host and card in practice."""
    gpu_copy_fail_gbyte_s: float = 12.0
    """est.: what x8, or generation 3, gives in practice."""
    gpu_compute_warn: float = 0.9
    """est.: share of the median rate of all GPUs of the cluster; all ranks wait for the slowest."""
    storage_warn_mbyte_s: float = 200.0
    """est.: on 10 GbE, alone or all nodes together; a checkpoint of 13 GB takes a minute."""
    storage_fail_mbyte_s: float = 50.0
    """est., as storage_warn_mbyte_s."""
    figure_tolerance: float = 0.10
    """est.: share by which a measured figure may be worse than the locked one; measurements repeat within half of it."""
    tcp_streams: int = 4
    """Every link is measured with one TCP stream and with this many, the better one counts; 1: with one, in half the time."""
    tcp_slow_nic_warn: float = 0.92
    """Share of the rate of NICs up to 10 Gbit/s: 9.2 of 10; 9.41 is all that TCP can carry of them at MTU 1500."""
    tcp_fast_nic_warn: float = 0.80
    """Share of the rate of faster NICs: 20 of 25, where one core begins to count. est."""
    tcp_one_core_gbit_s: float = 20.0
    """est.: what one core moves at MTU 1500 and what no NIC is asked to exceed; iperf3 before 3.16 has one thread."""
    tcp_fail: float = 0.5
    """est.: share of the warning limit of faster NICs: a link that trained one generation lower (25 -> 10) fails."""
    tcp_slow_nic_fail: float = 0.35
    """est.: share of the rate of NICs up to 10 Gbit/s: loss makes TCP slow, which is a warning; 10 -> 1 fails."""
    tcp_sent_again_warn: float = 0.001
    """Share of segments sent again: with more TCP cannot fill 25 Gbit/s at 100 us (Mathis et al. 1997, MSS/RTT 1.22/sqrt(p))."""
    tcp_streams_warn: float = 0.5
    """est.: several streams carry at least this share of what one carries; else they disturb each other (queues, buffers)."""
    link_median_warn: float = 0.5
    """est.: where no rate is known, share of what the links of this cluster mostly carry."""
    link_median_fail: float = 0.2
    """est.: as link_median_warn; shared virtual links differ by less."""
    rdma_warn: float = 0.9
    """est.: share of what the link can carry in packets of its MTU; ib_write_bw reaches 0.99 of it on sound hardware."""
    rdma_fail: float = 0.8
    """est.: as rdma_warn."""
    rdma_latency_warn_us: float = 3.0
    """est.: t_typical of ib_send_lat over one switch; 1 to 2 us are usual for ConnectX-4 and later."""
    rdma_latency_fail_us: float = 5.0
    """est.: as rdma_latency_warn_us."""
    rdma_iterations: int = 5000
    """Messages of 1 MiB ib_write_bw sends: 0.4 s at 100 Gbit/s. perftest's own default."""
    rdma_latency_iterations: int = 1000
    """Messages ib_send_lat sends. perftest's own default."""


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
    lock: Mapping[str, Any] | None = None
    """What `r4090c lock` recorded beside cluster.yaml (netcheck.lock), None = no lock or not looked for."""

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
    duplex: str | None = None
    """"full" or "half"; None = not told (down, virtual, wireless)."""
    link_losses: int | None = None
    """How often the carrier went away since the interface is there; kernels before 4.16 do not count."""
    lower: tuple[str, ...] = ()
    """What a bond, VLAN or bridge is made of."""


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
    board: str | None = None
    """What kind of card it is, e.g. "MT_0000000359"; firmware can be compared only between equals."""
    sm_lid: int | None = None
    """InfiniBand: address of the subnet manager, 0 = there is none. Without meaning on RoCE."""

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
class PciDevice:
    """One display or network function on the PCI bus, from sysfs. `kind`: "gpu" (NVIDIA display or 3D controller) or "nic".

    Widths in lanes, speeds in GT/s (8.0 = generation 3, 16.0 = generation 4), None = not told. `numa` -1 = firmware is silent.
    `upstream`: PCI addresses of the bridges from the root port (first) down to the device; empty on a root bus.
    `aer`: counter name ("correctable/RxErr", "fatal/TOTAL_ERR_FATAL" …) -> count since boot. `netdevs`, `hcas`: names of a nic.
    """

    pci: str
    kind: str
    vendor: str
    width: int | None
    width_max: int | None
    speed_gt_s: float | None
    speed_max_gt_s: float | None
    numa: int | None
    upstream: tuple[str, ...] = ()
    upstream_width_max: int | None = None
    upstream_speed_max_gt_s: float | None = None
    """Of the port right above the device: a card cannot be faster than its slot."""
    aer: Mapping[str, int] = field(default_factory=dict)
    netdevs: tuple[str, ...] = ()
    hcas: tuple[str, ...] = ()
    port_aer: Mapping[str, int] = field(default_factory=dict)
    """Like `aer`, of the port right above: it counts the errors of what the card sends."""
    driver: str | None = None
    """The kernel driver bound to it (nvidia, vfio-pci, nouveau, mlx5_core …), None = none."""
    iommu: str | None = None
    """Domain type of its IOMMU group: "identity" (pass-through), "DMA", "DMA-FQ" …; "off" = in no group; None = not told."""
    aspm: tuple[str, ...] = ()
    """Power-saving states that are on for its link: "l0s", "l1"."""
    acs: tuple[str, ...] | None = None
    """Those of `upstream` that redirect peer traffic (PCIe ACS); None = could not be read, which takes root."""


@dataclass(frozen=True, slots=True)
class KernelFact:
    """How the kernel was started and set, and what logind does to shared memory; None = the kernel has no such setting.

    `clocksources`: those it could use. `numa_balancing`: 0 off, 1 on, 2 tiering. `aspm_policy`: default, performance, powersave,
    powersupersave. `iommu_groups`: how many; 0 = no IOMMU in use. `smt`: on, off, forceoff, notsupported, notimplemented.
    `remove_ipc`: RemoveIPC as logind.conf and its drop-ins state it, None = not stated, so the distribution's default.
    `logind`: it runs. `lingering`: accounts that logind never takes for logged out, None = could not be listed.
    `container`: what kind it runs in ("lxc", "docker" …) as its systemd tells; None = in none, or without systemd.
    """

    cmdline: str
    clocksource: str | None = None
    clocksources: tuple[str, ...] = ()
    numa_balancing: int | None = None
    aspm_policy: str | None = None
    iommu_groups: int | None = None
    smt: str | None = None
    logind: bool = False
    remove_ipc: bool | None = None
    lingering: tuple[str, ...] | None = None
    container: str | None = None

    def argument(self, name: str) -> str | None:
        """Return what the kernel's command line says last about `name`: "" for the bare word, None for nothing."""
        found = None
        for word in self.cmdline.split():
            key, _, value = word.partition("=")
            if key == name:
                found = value
        return found


@dataclass(frozen=True, slots=True)
class ShmFile:
    """What NCCL or torch left in /dev/shm. `used`: a living process has it, None = not told (another account's process)."""

    name: str
    uid: int
    size_mib: float
    age_s: float
    used: bool | None


@dataclass(frozen=True, slots=True)
class BlockedProcess:
    """A process that hangs in NFS: for seconds it waited without getting on. `wait`: the function of the kernel it is in."""

    pid: int
    name: str
    uid: int
    wait: str


@dataclass(frozen=True, slots=True)
class DimmErrors:
    """Memory errors of one module since the counters were set to zero. `label`: the slot as the board calls it, where it does."""

    label: str
    corrected: int
    uncorrected: int


@dataclass(frozen=True, slots=True)
class MemoryController:
    """One memory controller of EDAC. The counts include errors that no module could be found for.

    `age_s`: how long the counters have run, None = not told.
    """

    name: str
    corrected: int
    uncorrected: int
    age_s: float | None = None
    dimms: tuple[DimmErrors, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """Where one library keeps what it compiles or loads. `variable` sets the place; `locks`: (lock file, its age in seconds)."""

    variable: str
    path: str
    fstype: str | None
    source: str | None
    locks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolchainFact:
    """What DeepSpeed's operators are compiled with: program ("nvcc", "ninja", "c++") -> its path, None = not found.

    `cuda`: version of the CUDA toolkit in CUDA_HOME or /usr/local/cuda, None = not told.
    """

    programs: Mapping[str, str | None]
    cuda: str | None = None


@dataclass(frozen=True, slots=True)
class RdmaMtu:
    """What one RDMA port puts into a packet, bytes; None = not told. RoCE takes the largest that fits its interface's MTU."""

    hca: str
    port: int
    active_bytes: int | None
    max_bytes: int | None

    @property
    def name(self) -> str:
        """The NCCL spelling, `mlx5_0:1`."""
        return f"{self.hca}:{self.port}"


@dataclass(frozen=True, slots=True)
class IfaceQos:
    """How one interface treats RDMA traffic. None = the driver does not tell.

    `pfc`: priorities with priority flow control. `dscp`: code point -> priority; a card that has any trusts the DSCP field, else
    the VLAN tag. `ecn`: priorities with RoCE congestion control (notification and reaction).
    """

    iface: str
    pfc: tuple[int, ...] | None
    dscp: tuple[tuple[int, int], ...] | None
    ecn: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Xid:
    """One NVIDIA Xid of the kernel log. `pci` as logged, `0000:81:00`; `caused_by`: the Xid it names as the earlier one."""

    xid: int
    pci: str
    pid: int | None = None
    time_s: float | None = None
    text: str = ""
    caused_by: int | None = None


@dataclass(frozen=True, slots=True)
class AerEvent:
    """One PCIe AER line. `severity`: corrected, nonfatal, fatal."""

    pci: str
    severity: str
    bits: tuple[str, ...] = ()
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class KernelLog:
    """What matters of the kernel log since boot; equal lines of one fault are one event, in the order of the log.

    `oom_kills`: (pid, name). `nfs_silent`: servers that stopped answering and have not come back. `pcie_limited`: (pci, the
    kernel's words) of "available PCIe bandwidth, limited by".
    """

    xids: tuple[Xid, ...] = ()
    aer: tuple[AerEvent, ...] = ()
    oom_kills: tuple[tuple[int, str], ...] = ()
    nfs_silent: tuple[str, ...] = ()
    pcie_limited: tuple[tuple[str, str], ...] = ()
    since_s: float | None = None
    """Seconds after boot at which the log begins: more than a moment where it dropped its beginning; None = not told."""


@dataclass(frozen=True, slots=True)
class TopologyMatrix:
    """`nvidia-smi topo -m`. `links`: "GPU0-NIC1" -> class, each pair once in the order of the header; `nics`: "NIC0" -> device.

    `cpu_affinity`: gpu index -> CPUs; `numa`: gpu index -> NUMA node; None = N/A or no such column: unknown, not node 0.
    """

    gpus: tuple[int, ...]
    nics: Mapping[str, str]
    links: Mapping[str, str]
    cpu_affinity: Mapping[int, tuple[int, ...] | None]
    numa: Mapping[int, int | None]

    def link(self, one: str, other: str) -> str | None:
        """Return the class of the link between two columns ("GPU0", "NIC1"), None when the matrix does not tell."""
        return self.links.get(f"{one}-{other}") or self.links.get(f"{other}-{one}")


@dataclass(frozen=True, slots=True)
class P2pMatrix:
    """`nvidia-smi topo -p2p`: "0-1" (gpu indices, both orders) -> OK, CNS, GNS, TNS, NS, DR, U …. OK is a grant, not a proof."""

    gpus: tuple[int, ...]
    cells: Mapping[str, str]

    @property
    def granted(self) -> bool:
        """True when any pair is granted P2P."""
        return any(cell == "OK" for cell in self.cells.values())


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A program that holds GPU memory. `uid` None: not told."""

    pid: int
    gpu_uuid: str
    name: str
    memory_mib: int | None
    uid: int | None = None


@dataclass(frozen=True, slots=True)
class GpuDetail:
    """What `nvidia-smi -q` tells of one GPU beyond `Gpu`; None = not told, which is normal for much of it on a GeForce.

    `slowdown_c`: the temperature at which the card slows itself down; `headroom_c`: degrees left to it, where a driver tells
    that instead. `throttle`: the reasons that are active, in nvidia-smi's words ("HW Thermal Slowdown"). `replays`: PCIe packets
    sent again since the driver was loaded. `memory_faults`: pending or failed row remaps and page retirements, one text each.
    """

    pci: str
    uuid: str = ""
    bar1_mib: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    headroom_c: int | None = None
    throttle: tuple[str, ...] = ()
    replays: int | None = None
    ecc: bool | None = None
    memory_faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """A program on a node. `real`: its path without links; `mpi`: it was built with MPI, None = not looked for."""

    path: str
    real: str = ""
    mpi: bool | None = None


@dataclass(frozen=True, slots=True)
class P2pProof:
    """What a two-arm test of a node's P2P showed: right values and faster than without (`proven`), or not.

    `fingerprint`: of the node as it was (netcheck.p2p). `date` like "2026-03-01". `reason`: the figures, or what went wrong.
    """

    fingerprint: str
    proven: bool
    date: str
    reason: str


@dataclass(frozen=True, slots=True)
class PortTest:
    """What the last bandwidth test of an RDMA port showed. `carries`: data came through at all.

    `reason`: the figures, or what failed; `date` like "2026-03-01".
    """

    port: str
    passed: bool
    carries: bool
    date: str
    reason: str


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
    kernel: Fact[KernelFact]
    shm_files: Fact[tuple[ShmFile, ...]]
    blocked: Fact[tuple[BlockedProcess, ...]]
    edac: Fact[tuple[MemoryController, ...]]
    caches: Fact[tuple[CacheFolder, ...]]
    toolchain: Fact[ToolchainFact]
    tools: Fact[Mapping[str, Tool]]
    qos: Fact[tuple[IfaceQos, ...]]
    rdma_mtu: Fact[tuple[RdmaMtu, ...]]
    pci: Fact[tuple[PciDevice, ...]]
    gpu_topology: Fact[TopologyMatrix]
    gpu_p2p: Fact[P2pMatrix]
    gpu_detail: Fact[tuple[GpuDetail, ...]]
    gpu_processes: Fact[tuple[GpuProcess, ...]]
    kernel_log: Fact[KernelLog]


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
