"""What is doubtful about the variables that people set themselves. Pure.

They win whatever is said here: a warning tells what the value does on these nodes, why that is bad, and what to do. Only what
cluster.yaml or the command line states is looked at; what was computed needs no advice. Adding a rule: one function, one entry of
RULES, its cases in tests/launch/cases/env_lint.json. Files that NCCL reads besides (/etc/nccl.conf, ~/.nccl.conf) are not known
here; the environment goes before them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launch.env import is_secret, shown
from netcheck.data_network import is_up, unfit
from netcheck.facts.rdma import ipv4_of
from netcheck.rank_env import NCCL_FINDS_GID, Var, dotted, nccl_version
from r4090c.model import Cluster, Node, NodeFacts

SOCKET_THREADS_LIMIT, SOCKETS_LIMIT = 16, 64
"""NCCL manual, NCCL_SOCKET_NTHREADS: 1 to 16, and no more than 64 sockets in all."""
NAME_CUTOFF = 0.84
"""est.: difflib's ratio of a misspelt name; NCCL_SOCKET_IFNAMES is 0.97, two real names of the manual mostly below."""
NAMED_MAX = 3
"""Nodes named in a line; the others are counted."""
SHOWN_MAX = 60
"""est.: characters of a value in a warning."""

MANUAL = frozenset(
    re.findall(
        r"\w+",
        """
    NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_SOCKET_RETRY_CNT NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_SOCKET_POLL_TIMEOUT_MSEC
    NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD NCCL_CROSS_NIC NCCL_IB_HCA NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT NCCL_IB_GID_INDEX
    NCCL_IB_ADDR_FAMILY NCCL_IB_ADDR_RANGE NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_TC NCCL_IB_FIFO_TC
    NCCL_IB_RETURN_ASYNC_EVENTS NCCL_OOB_NET_ENABLE NCCL_OOB_NET_IFNAME NCCL_UID_STAGGER_THRESHOLD NCCL_UID_STAGGER_RATE NCCL_NET
    NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN NCCL_ENV_PLUGIN NCCL_IGNORE_CPU_AFFINITY NCCL_CONF_FILE NCCL_DEBUG
    NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_DEBUG_TIMESTAMP_FORMAT NCCL_DEBUG_TIMESTAMP_LEVELS NCCL_COLLNET_ENABLE
    NCCL_COLLNET_NODE_THRESHOLD NCCL_CTA_POLICY NCCL_NETDEVS_POLICY NCCL_TOPO_FILE NCCL_TOPO_DUMP_FILE NCCL_SET_THREAD_NAME
    NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_P2P_DIRECT_DISABLE NCCL_SHM_DISABLE NCCL_BUFFSIZE NCCL_NTHREADS NCCL_MAX_NCHANNELS
    NCCL_MIN_NCHANNELS NCCL_CHECKS_DISABLE NCCL_CHECK_POINTERS NCCL_LAUNCH_MODE NCCL_IB_DISABLE NCCL_IB_AR_THRESHOLD
    NCCL_IB_QPS_PER_CONNECTION NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_CUDA_SUPPORT NCCL_IB_PCI_RELAXED_ORDERING
    NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ECE_ENABLE NCCL_MEM_SYNC_DOMAIN NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_NET_GDR_LEVEL
    NCCL_IB_GDR_LEVEL NCCL_NET_GDR_C2C NCCL_NET_GDR_READ NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS
    NCCL_SINGLE_RING_THRESHOLD NCCL_LL_THRESHOLD NCCL_TREE_THRESHOLD NCCL_ALGO NCCL_PROTO NCCL_NVB_DISABLE NCCL_PXN_DISABLE
    NCCL_P2P_PXN_LEVEL NCCL_PXN_C2C NCCL_RUNTIME_CONNECT NCCL_GRAPH_REGISTER NCCL_LOCAL_REGISTER NCCL_LEGACY_CUDA_REGISTER
    NCCL_WIN_ENABLE NCCL_SET_STACK_SIZE NCCL_GRAPH_MIXING_SUPPORT NCCL_DMABUF_ENABLE NCCL_P2P_NET_CHUNKSIZE NCCL_P2P_LL_THRESHOLD
    NCCL_ALLOC_P2P_NET_LL_BUFFERS NCCL_COMM_BLOCKING NCCL_CGA_CLUSTER_SIZE NCCL_MAX_CTAS NCCL_MIN_CTAS NCCL_NVLS_ENABLE
    NCCL_IB_MERGE_NICS NCCL_MNNVL_ENABLE NCCL_MNNVL_UUID NCCL_MNNVL_CLIQUE_ID NCCL_RAS_ENABLE NCCL_RAS_ADDR
    NCCL_RAS_TIMEOUT_FACTOR NCCL_LAUNCH_ORDER_IMPLICIT NCCL_LAUNCH_RACE_FATAL NCCL_IPC_USE_ABSTRACT_SOCKET
    """,
    )
)
"""The variables of NCCL's manual (user guide of 2.29, "Environment Variables"), old and removed ones included."""
INTERNAL = frozenset(
    re.findall(
        r"\w+",
        """
    NCCL_COMM_ID NCCL_HOSTID NCCL_IB_PKEY NCCL_IB_USE_INLINE NCCL_IB_SPLIT_DATA NCCL_LL_BUFFSIZE NCCL_LL128_BUFFSIZE
    NCCL_LL128_NTHREADS NCCL_NCHANNELS_PER_NET_PEER NCCL_MIN_P2P_NCHANNELS NCCL_MAX_P2P_NCHANNELS NCCL_MAX_NRINGS NCCL_MIN_NRINGS
    NCCL_P2P_READ_ENABLE NCCL_P2P_USE_CUDA_MEMCPY NCCL_P2P_PCI_CHUNKSIZE NCCL_P2P_NVL_CHUNKSIZE NCCL_SHM_USE_CUDA_MEMCPY
    NCCL_SHM_LOCALITY NCCL_GRAPH_FILE NCCL_GRAPH_DUMP_FILE NCCL_GRAPH_DUMP_FILE_RANK NCCL_TOPO_DUMP_FILE_RANK NCCL_PROXY_PROFILE
    NCCL_PROGRESS_APPENDOP_FREQ NCCL_NET_FORCE_FLUSH NCCL_NET_OVERHEAD NCCL_NET_DISABLE_INTRA NCCL_NVLS_CHUNKSIZE
    NCCL_WORK_FIFO_BYTES NCCL_CREATE_THREAD_CONTEXT NCCL_CROSS_CLIQUE NCCL_IGNORE_DISABLED_P2P NCCL_IGNORE_NET_MISMATCH
    NCCL_NVTX_DISABLE NCCL_WARN_ENABLE_DEBUG_INFO NCCL_PROTO_LL128 NCCL_CHUNK_SIZE NCCL_STACK_SIZE NCCL_AGG_CHANNEL_SIZE
    """,
    )
)
"""est.: parameters of NCCL's sources that its manual leaves out; here so that they are not taken for misspelt ones."""
OLD = {
    "NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_CTAS",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_CHECKS_DISABLE": "NCCL_CHECK_POINTERS",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_SINGLE_RING_THRESHOLD": "",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
}
"""Old name -> the one of today, "" where there is none (NCCL's manual; torch 2.2 moved its own to TORCH_NCCL_)."""
OURS = ("R4090C_RUN", "R4090C_NODE", "R4090C_START", "R4090C_LOCAL", "R4090C_RUN_DIR")
OF_EACH_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", *OURS),
)
"""Variables that torchrun (its manual, "Environment Variables") and our agent set, whatever they were."""
ALIKE = (
    *("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_CROSS_NIC"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_IB_TC", "NCCL_IB_SL"),
    *("NCCL_CUMEM_ENABLE", "NCCL_IB_MERGE_NICS", "NCCL_PXN_DISABLE", "NCCL_COLLNET_ENABLE"),
)
"""Variables by which ranks decide what they do together: with different values they wait for ever (NCCL issues 234, 394)."""
LEVELS = {"VERSION", "WARN", "INFO", "ABORT", "TRACE", "NONE"}
NEVER = ("LOC", "0")
"""Distances at which a path is never used: NCCL_P2P_LEVEL, NCCL_NET_GDR_LEVEL."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One node of a run as a rule sees it. `env`: what its ranks get; `computed`: what they would get by themselves."""

    cluster: Cluster
    node: Node
    facts: NodeFacts
    env: Mapping[str, Var]
    computed: Mapping[str, Var]

    def stated(self, *names: str) -> Iterator[tuple[str, str]]:
        """Yield (name, value) of those of `names` that somebody set; a secret is nobody's business."""
        for name in names:
            if name in self.env and self.env[name].origin != "computed" and not is_secret(name, self.env[name].value):
                yield name, self.env[name].value.strip()

    def value(self, name: str) -> str:
        """Return what a variable will be, as a person may see it; "" when it is not set."""
        return shown(name, self.env[name].value.strip()) if name in self.env else ""

    def reckoned(self, name: str) -> str:
        """Return the computed value of a variable, "" when there is none."""
        return self.computed[name].value if name in self.computed else ""


Doubts = Iterator[tuple[str, str]]
"""(variable, what its value does here)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to look for. `look` yields what is doubtful about a node's variables."""

    id: str
    why: str
    remedy: str
    look: Callable[[Scene], Doubts]


@dataclass(frozen=True, slots=True)
class Doubt:
    """One warning. `nodes`: all that it is about; `origin`: who set the variable."""

    rule: str
    variable: str
    origin: str
    nodes: tuple[str, ...]
    observed: str
    why: str
    remedy: str

    @property
    def text(self) -> str:
        """The warning in one line."""
        more = len(self.nodes) - NAMED_MAX
        where = ", ".join(self.nodes[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        return f"{self.variable} ({self.origin}), {where}: {self.observed}: {self.why}; {self.remedy} [{self.rule}]"


def lint(
    cluster: Cluster,
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    envs: Mapping[str, Mapping[str, Var]],
    computed: Mapping[str, Mapping[str, Var]],
) -> tuple[Doubt, ...]:
    """Return what is doubtful about the variables that somebody set, in the order of RULES; equal ones of several nodes are one.

    `envs`, `computed`: node name -> variables, of launch.env.environments and netcheck.rank_env.computed_environment.
    Never raises for what a value holds.
    """
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for rule in RULES:
        for node in nodes:
            scene = Scene(cluster, node, facts[node.name], envs[node.name], computed[node.name])
            for variable, observed in rule.look(scene):
                names = found.setdefault((rule.id, variable, observed, envs[node.name][variable].origin), [])
                if node.name not in names:
                    names.append(node.name)
    doubts = []
    for (rule_id, variable, observed, origin), names in found.items():
        rule = next(rule for rule in RULES if rule.id == rule_id)
        doubts.append(Doubt(rule.id, variable, origin, tuple(names), observed, rule.why, rule.remedy))
    return (*doubts, *_differing(envs))


def _differing(envs: Mapping[str, Mapping[str, Var]]) -> Iterator[Doubt]:
    """Yield one warning per variable of ALIKE that somebody set and that is not the same on all nodes."""
    for name in ALIKE:
        values = {node: env[name].value.strip() if name in env else "not set" for node, env in envs.items()}
        origins = [env[name].origin for env in envs.values() if name in env and env[name].origin != "computed"]
        if origins and len({*values.values()}) > 1:
            told = ", ".join(f"{node} {_cut(shown(name, value))}" for node, value in values.items())
            yield Doubt(DIFFERS.id, name, origins[0], tuple(values), told, DIFFERS.why, DIFFERS.remedy)


def _cut(text: str) -> str:
    """Return a value as a warning may hold it: short, and in one line."""
    text = "".join(sign if sign.isprintable() else " " for sign in text)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…"


def _number(text: str) -> int | None:
    """Return the integer NCCL reads (strtoll with base 0: 8, 0x8, 010), None when it is none."""
    match = re.fullmatch(r"([+-]?)(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,18})", text, re.ASCII)
    if match is None:
        return None
    digits = match[2]
    try:
        base = 16 if digits[:2] in ("0x", "0X") else 8 if len(digits) > 1 and digits[0] == "0" else 10
        return int(match[1] + digits, base)
    except ValueError:  # 08
        return None


def _is_on(text: str) -> bool:
    return _number(text) not in (0, None)


# --------------------------------------------------------------------------- interfaces


@dataclass(frozen=True, slots=True)
class _Filter:
    """A list as NCCL_SOCKET_IFNAME and NCCL_IB_HCA take it: `^` excludes, `=` is exact, else beginnings of names."""

    excludes: bool
    exact: bool
    words: tuple[str, ...]

    def matches(self, word: str, name: str) -> bool:
        return name == word if self.exact else name.startswith(word)

    def admits(self, name: str) -> bool:
        return any(self.matches(word, name) for word in self.words) is not self.excludes


def _filter(text: str) -> _Filter:
    excludes = text.startswith("^")
    text = text.removeprefix("^")
    exact = text.startswith("=")
    return _Filter(excludes, exact, tuple(word for part in text.removeprefix("=").split(",") if (word := part.strip())))


def _named(variable: str, text: str) -> _Filter:
    """Return a list of interfaces; gloo's and TensorPipe's names are exact, whatever stands before them."""
    if variable == "NCCL_SOCKET_IFNAME":
        return _filter(text)
    return _Filter(False, True, tuple(word for part in text.lstrip("^=").split(",") if (word := part.strip())))


IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def _ifaces(scene: Scene) -> list[str]:
    """Return the node's interfaces that carry addresses and are up: those NCCL chooses among."""
    net = scene.facts.net.value
    return [iface.name for iface in net.ifaces if iface.addresses and is_up(iface)] if net is not None else []


def _excluding(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_SOCKET_IFNAME"):
        wished = _filter(text)
        if wished.excludes and wished.admits("lo") and scene.cluster.network.kind != "loopback":
            bad = [one for one in _ifaces(scene) if unfit(one) and wished.admits(one)] or ["lo"]
            yield name, f"{_cut(text)} admits {', '.join(bad)}"


def _look_alikes(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_SOCKET_IFNAME"):
        wished = _filter(text)
        for word in wished.words if not (wished.excludes or wished.exact) else ():
            taken = [one for one in _ifaces(scene) if wished.matches(word, one)]
            if len(taken) > 1:
                yield name, f"{_cut(word)} takes {', '.join(taken)}"


def _missing_iface(scene: Scene) -> Doubts:
    net = scene.facts.net.value
    there = [iface.name for iface in net.ifaces] if net is not None else []
    for name, text in scene.stated(*IFNAMES):
        wished = _named(name, text)
        for word in wished.words if there and not wished.excludes else ():
            if not any(wished.matches(word, one) for one in there):
                yield name, f"there is no interface {_cut(word)}"


def _unfit_iface(scene: Scene) -> Doubts:
    for name, text in scene.stated(*IFNAMES):
        wished = _named(name, text)
        if wished.excludes or scene.cluster.network.kind == "loopback":
            continue
        for one in _ifaces(scene):
            kind = unfit(one)
            if kind is not None and wished.admits(one):
                yield name, f"{one} is {kind}"


def _other_iface(scene: Scene) -> Doubts:
    right = scene.reckoned("GLOO_SOCKET_IFNAME")
    for name, text in scene.stated(*IFNAMES):
        wished = _named(name, text)
        others = [one for one in _ifaces(scene) if wished.admits(one) and one != right and unfit(one) is None]
        if right and others and not wished.excludes:
            yield name, f"takes {', '.join(others)}; {right} leads to the peers"


def _gloo_signs(scene: Scene) -> Doubts:
    for name, text in scene.stated("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if text[:1] in ("=", "^"):
            yield name, f"{_cut(text)} begins with {text[:1]}"


def _gloo_several(scene: Scene) -> Doubts:
    for name, text in scene.stated("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if "," in text:
            yield name, f"{len([part for part in text.split(',') if part.strip()])} interfaces"


def _sockets(scene: Scene) -> Doubts:
    set_here = [name for name, _ in scene.stated("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]
    for name in set_here:
        if (number := _number(scene.value(name))) is None or number < 1:
            yield name, f"{_cut(scene.value(name))!r} is no number of 1 or more"
    threads, sockets = (_number(scene.value(name) or "1") or 1 for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"))
    if threads > SOCKET_THREADS_LIMIT and "NCCL_SOCKET_NTHREADS" in set_here:
        yield "NCCL_SOCKET_NTHREADS", f"{threads} threads"
    if threads * sockets > SOCKETS_LIMIT and set_here:
        yield set_here[-1], f"{threads} threads × {sockets} sockets = {threads * sockets}"


# --------------------------------------------------------------------------- RDMA


def _rdma_off(scene: Scene) -> Doubts:
    if scene.reckoned("NCCL_IB_DISABLE") != "0":
        return
    for name, text in scene.stated("NCCL_IB_DISABLE"):
        if _is_on(text):
            yield name, f"{_cut(text)} sends everything over TCP"
    for name, text in scene.stated("NCCL_NET"):
        if text.lower() == "socket":
            yield name, f"{text} sends everything over TCP"


def _rdma_on(scene: Scene) -> Doubts:
    if scene.reckoned("NCCL_IB_DISABLE") != "1" or not scene.cluster.network.rdma:
        return
    for name, text in scene.stated("NCCL_IB_DISABLE"):
        if not _is_on(text):
            yield name, scene.computed[name].reason
    for name, text in scene.stated("NCCL_NET"):
        if text.lower() == "ib":
            yield name, scene.computed["NCCL_IB_DISABLE"].reason


def _new_gid(scene: Scene) -> Doubts:
    version = nccl_version(scene.facts)
    for name, text in scene.stated("NCCL_IB_GID_INDEX"):
        index = _number(text)
        if version is not None and version >= NCCL_FINDS_GID and (index is None or index >= 0):
            yield name, f"{_cut(text)} with NCCL {dotted(version)}"


def _wrong_gid(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_IB_GID_INDEX"):
        index = _number(text)
        used = _filter(scene.reckoned("NCCL_IB_HCA")).words
        for port in scene.facts.rdma.value or ():
            if index is None or index < 0 or port.name not in used or not port.gids:
                continue
            gid = next((gid for gid in port.gids if gid.index == index), None)
            if gid is None:
                yield name, f"{port.name} has no GID {index}"
            elif gid.kind == "v1" or (gid.kind == "v2" and ipv4_of(gid) is None):
                yield name, f"GID {index} of {port.name} is {gid.kind} {gid.address}"


def _hca(scene: Scene) -> Iterator[tuple[str, str, _Filter]]:
    for name, text in scene.stated("NCCL_IB_HCA"):
        yield name, text, _filter(text)


def _hca_look_alikes(scene: Scene) -> Doubts:
    devices = sorted({port.hca for port in scene.facts.rdma.value or ()})
    for name, _, wished in _hca(scene):
        for word in wished.words if not wished.exact else ():
            taken = [device for device in devices if device.startswith(word.split(":")[0])]
            if len(taken) > 1 and word.split(":")[0] in taken:
                yield name, f"{_cut(word)} takes {', '.join(taken)}"


def _hca_matches(wished: _Filter, word: str, hca: str, port: int) -> bool:
    device, _, number = word.partition(":")
    return wished.matches(device, hca) and number.split(":")[0] in ("", str(port))


def _hca_missing(scene: Scene) -> Doubts:
    ports = scene.facts.rdma.value
    for name, _, wished in _hca(scene):
        for word in wished.words if ports is not None else ():
            if not any(_hca_matches(wished, word, port.hca, port.port) for port in ports or ()):
                yield name, f"there is no port {_cut(word)}"


def _hca_idle(scene: Scene) -> Doubts:
    right = _filter(scene.reckoned("NCCL_IB_HCA")).words
    for name, _, wished in _hca(scene):
        for port in scene.facts.rdma.value or ():
            admitted = any(_hca_matches(wished, word, port.hca, port.port) for word in wished.words) is not wished.excludes
            if not admitted or wished.excludes:
                continue
            if "ACTIVE" not in port.state:
                yield name, f"{port.name} is {port.state}"
            elif right and port.name not in right:
                yield name, f"{port.name} is not one of {', '.join(right)}, the ports that serve the data network"


def _crossing(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_CROSS_NIC"):
        if scene.reckoned(name) == "0" and _number(text) != 0:
            yield name, scene.computed[name].reason


def _gdr(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_NET_GDR_LEVEL", "NCCL_IB_GDR_LEVEL"):
        if text.upper() not in NEVER and scene.node.gpus:
            yield name, f"{_cut(text)} asks for GPUDirect RDMA"
    for name, text in scene.stated("NCCL_NET_GDR_READ", "NCCL_IB_CUDA_SUPPORT"):
        if _is_on(text) and scene.node.gpus:
            yield name, f"{_cut(text)} asks for GPUDirect RDMA"


def _timeout(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_IB_TIMEOUT"):
        number = _number(text)
        if number is None or not 1 <= number <= 31:
            yield name, f"{_cut(text)!r} is not one of 1 to 31"


# --------------------------------------------------------------------------- inside a node


def _shm(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_SHM_DISABLE"):
        if _is_on(text) and scene.node.gpus:
            yield name, f"{_cut(text)} takes away the only way between GPUs of a node without P2P"


def _p2p(scene: Scene) -> Doubts:
    if scene.reckoned("NCCL_P2P_DISABLE") != "1":
        return
    for name, text in scene.stated("NCCL_P2P_DISABLE"):
        if not _is_on(text):
            yield name, f"{_cut(text)} turns P2P on ({scene.computed[name].reason})"


def _p2p_level(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_P2P_LEVEL"):
        if text.upper() in NEVER:
            continue
        if _is_on(scene.value("NCCL_P2P_DISABLE")):
            yield name, f"{_cut(text)} does nothing: NCCL_P2P_DISABLE is 1"
        elif scene.reckoned("NCCL_P2P_DISABLE") == "1":
            yield name, f"{_cut(text)} forces P2P, and nothing has proven it here"


def _devices(scene: Scene) -> Doubts:
    gpus = [gpu for gpu in scene.facts.gpus.value or () if gpu.index >= 0]
    for name, text in scene.stated("CUDA_VISIBLE_DEVICES"):
        words = [word for part in text.split(",") if (word := part.strip())]
        if not words and scene.node.gpus:
            yield name, "empty: no GPU is visible"
        twice = sorted({word for word in words if words.count(word) > 1})
        if twice:
            yield name, f"{_cut(', '.join(twice))} more than once"
        if not gpus:
            continue
        unknown = [
            word
            for word in words
            if not word.startswith("MIG-")
            and not any(word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word)) for gpu in gpus)
        ]
        if unknown:
            yield name, f"there is no GPU {_cut(', '.join(unknown))}; CUDA also drops all that follow it"
        order = scene.value("CUDA_DEVICE_ORDER")
        if order not in ("", "PCI_BUS_ID") and any(word.isdecimal() for word in words):
            yield name, f"indices mean other GPUs under CUDA_DEVICE_ORDER={_cut(order)}"


def _order(scene: Scene) -> Doubts:
    for name, text in scene.stated("CUDA_DEVICE_ORDER"):
        if text != "PCI_BUS_ID":
            yield name, _cut(text)


def _blocking(scene: Scene) -> Doubts:
    for name, text in scene.stated("CUDA_LAUNCH_BLOCKING"):
        if _is_on(text):
            yield name, f"{_cut(text)} makes every kernel wait for the one before"


def _omp(scene: Scene) -> Doubts:
    cpus = scene.facts.cpus.value
    for name, text in scene.stated("OMP_NUM_THREADS"):
        words = [_number(word.strip()) for word in text.split(",")]  # a list is for nested regions
        threads = words[0]
        if threads is None or threads < 1:
            yield name, f"{_cut(text)!r} is no number of 1 or more"
        elif cpus is not None and cpus.allowed and threads * max(1, scene.node.gpus) > len(cpus.allowed):
            yield name, f"{max(1, scene.node.gpus)} ranks × {threads} threads on {len(cpus.allowed)} CPUs"


# --------------------------------------------------------------------------- names, logs, torch


def _old(scene: Scene) -> Doubts:
    for name, _ in scene.stated(*OLD):
        yield name, f"an old name, {OLD[name]} today" if OLD[name] else "no NCCL of these years reads it"


def _not_taken(scene: Scene) -> Doubts:
    for name, _ in scene.stated(*OF_EACH_RANK):
        yield name, "torchrun sets it for every rank" if name not in OURS else "r4090c sets it for every run"


def _misspelt(scene: Scene) -> Doubts:
    for name, _ in scene.stated(*(name for name in scene.env if name.upper().startswith(("NCCL_", "NCLL_", "NNCL_")))):
        if name in MANUAL or name in INTERNAL or name in OLD:
            continue
        near = difflib.get_close_matches(name.upper(), sorted(MANUAL), n=1, cutoff=NAME_CUTOFF)
        if near:
            yield name, f"NCCL's manual knows no such variable, but {near[0]}"


def _log_level(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_DEBUG"):
        if text.upper() not in LEVELS:
            yield name, f"{_cut(text)!r} is none of {', '.join(sorted(LEVELS))}"
        elif text.upper() == "TRACE":
            yield name, "TRACE writes lines for every call of every rank"


def _log_file(scene: Scene) -> Doubts:
    for name, text in scene.stated("NCCL_DEBUG_FILE"):
        if text.startswith("~"):
            yield name, f"{_cut(text)}: ~ is taken as it stands"
        elif text and "%p" not in text and not text.startswith("/dev/"):
            yield name, f"{_cut(text)} is one file for all ranks"


def _watchdog(scene: Scene) -> Doubts:
    handling, blocking = scene.value("TORCH_NCCL_ASYNC_ERROR_HANDLING"), scene.value("TORCH_NCCL_BLOCKING_WAIT")
    for name, text in scene.stated("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        if _number(text) == 0 and not _is_on(blocking):
            yield name, "0: torch's watchdog ends no rank that hangs"
    for name, text in scene.stated("TORCH_NCCL_BLOCKING_WAIT"):
        if _is_on(text) and _is_on(handling):
            yield name, f"together with TORCH_NCCL_ASYNC_ERROR_HANDLING={_cut(handling)}"


DIFFERS = Rule(
    "differs-between-nodes",
    "ranks decide by it what they do together",
    "set it in cluster.yaml env, for all nodes",
    lambda scene: iter(()),
)

RULES: tuple[Rule, ...] = (
    Rule(
        "ifname-admits-lo",
        "an exclusion replaces NCCL's own choice, which puts lo and docker last: what is not excluded is taken, lo included",
        "leave it out, or name the interface: =IFACE",
        _excluding,
    ),
    Rule("ifname-look-alikes", "a bare name is a beginning: NCCL uses all that match", "put = before it", _look_alikes),
    Rule(
        "ifname-missing",
        "NCCL and gloo find no interface and give up",
        "leave it out, or set it per node (nodes.NAME.env)",
        _missing_iface,
    ),
    Rule("ifname-unfit", "peers cannot be reached over it: ranks hang in the first collective", "leave it out", _unfit_iface),
    Rule("ifname-not-data", "training traffic leaves the data network", "leave it out", _other_iface),
    Rule("gloo-no-signs", "gloo and TensorPipe take the name as it stands, signs included", "the bare name", _gloo_signs),
    Rule(
        "gloo-several",
        "all ranks must list the same number of interfaces (torch.distributed's manual)",
        "one interface",
        _gloo_several,
    ),
    Rule(
        "socket-threads",
        "NCCL takes 16 threads and 64 sockets at most, and uses less than you think",
        "4 and 4 for 100 Gbit/s",
        _sockets,
    ),
    Rule("rdma-off", "network.kind states RDMA and it works here: a fraction of the speed is left", "leave it out", _rdma_off),
    Rule("rdma-on", "nodes with RDMA and nodes without wait for each other (NCCL issue 234)", "leave it out", _rdma_on),
    Rule(
        "gid-index-new-nccl",
        "NCCL finds the RoCE v2 GID by itself since 2.21; a fixed index breaks when addresses change",
        "leave it out",
        _new_gid,
    ),
    Rule(
        "gid-index-wrong",
        "link-local and v1 GIDs are not routed: ibv_modify_qp fails, or error 12",
        "the RoCE v2 IPv4 index, or leave it out",
        _wrong_gid,
    ),
    Rule("hca-look-alikes", "a bare name is a beginning: NCCL uses all that match", "put = before it", _hca_look_alikes),
    Rule(
        "hca-missing",
        "a list that matches nothing makes NCCL fall back to TCP in silence",
        "leave it out, or set it per node",
        _hca_missing,
    ),
    Rule("hca-not-data", "a port that is down or on another network leads nowhere", "leave it out", _hca_idle),
    Rule("cross-nic", "a ring that changes rails waits for ever where rails do not meet", "leave it out", _crossing),
    Rule("gdr", "no GeForce has GPUDirect RDMA, also with a patched driver (gdrcopy issue 211)", "leave it out: LOC", _gdr),
    Rule("ib-timeout", "0 and 32 or more mean for ever (NCCL's manual)", "leave it out: 20", _timeout),
    Rule("shm-off", "GPUs of one node then talk over the network card", "leave it out", _shm),
    Rule(
        "p2p-unproven",
        "a stock driver has no P2P on a 4090, some grant it and deliver wrong data",
        "r4090c preflight --only p2p-truth",
        _p2p,
    ),
    Rule(
        "p2p-level", "only a two-arm test shows whether P2P is right and faster", "r4090c preflight --only p2p-truth", _p2p_level
    ),
    Rule("visible-devices", "ranks would share a GPU or find none", "indices as nvidia-smi tells them, each once", _devices),
    Rule(
        "device-order",
        "the CPU plan counts GPUs in PCI order; under another one ranks are not bound near their GPU",
        "leave it out",
        _order,
    ),
    Rule("launch-blocking", "it is for debugging: training is much slower", "leave it out", _blocking),
    Rule("omp-threads", "threads that share a core wait for each other", "leave it out: the cores of each rank", _omp),
    Rule("old-name", "newer versions take another name and may ignore this one", "the new name", _old),
    Rule("not-taken", "what is stated here is never used", "leave it out", _not_taken),
    Rule("misspelt", "NCCL ignores what it does not know", "the name in its manual", _misspelt),
    Rule("debug-level", "a log nobody can read, or none", "WARN; INFO to see what NCCL chooses", _log_level),
    Rule("debug-file", "ranks overwrite each other's log (NCCL's manual)", "a path with %h and %p", _log_file),
    Rule(
        "watchdog",
        "a hung collective keeps its rank: only the supervisor ends it, without torch's trace",
        "leave both out",
        _watchdog,
    ),
    DIFFERS,
)
"""All rules, in the order of their warnings."""
