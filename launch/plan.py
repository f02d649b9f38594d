"""The plan of one attempt: argv, environment and CPU set of every rank, decided before anything runs; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launch.affinity import CpuSet, cpu_sets, rank_gpus, rank_numa, rank_order
from launch.env import HIDDEN, environments, is_secret, visible_devices
from launch.env_lint import lint
from netcheck.data_network import chosen_iface, rdma_ports
from netcheck.rank_env import Var, computed_environment
from netcheck.topology import NodeTopology, data_cards, node_topology
from r4090c.errors import UsageError
from r4090c.model import Cluster, Node, NodeFacts, P2pProof, PortTest
from r4090c.paths import RunPaths

SCHEMA = "r4090c.plan/1"
LEASE_S = 5.0
"""est.: a peer silent for this long is lost; agents beat once a second over TCP, so four beats may be late."""
START_TIMEOUT_S = 30.0
"""est.: the agents of an attempt start within a second of each other."""
GRACE_S = 2.0
"""est.: what a rank gets between TERM and KILL. A rank blocked in a collective cannot act on TERM at all."""
RANK_GRACE_S = 2.0
"""est.: torchrun looks at its ranks every 0.1 s and logs a death at once."""
HANG_FLOOR_S, HANG_FACTOR, HANG_START_S = 120.0, 10.0, 1800.0
"""est.: ten steps without one is no slow step; where steps are short, two minutes: a slow disk, a lost packet. Imports, 13B
parameters from a slow NFS, compiling kernels and writing a checkpoint take minutes, seldom half an hour.
"""
USER_FOLDER = "user"
"""Where a user's own code lies in the synced tree."""
SHUTDOWN_TIMEOUT_S = 2
"""How long torchrun waits for the other local ranks after one failed; its default of 30 s is why peers linger."""
OMP_THREADS, DATA_WORKERS = "OMP_NUM_THREADS", "R4090C_DATA_WORKERS"
CPU_SHARES = {
    OMP_THREADS: Var("1", "CPU ranks: the same sums everywhere"),
    DATA_WORKERS: Var("0", "CPU ranks: the cores are for the arithmetic; a rank loads its data itself"),
}
"""Of a rank without a GPU. It does the arithmetic: a sum's order, and so a loss, must not depend on the node's core count."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank: its place, its CPUs, the NUMA node of its memory, its own variables."""

    rank: int
    local_rank: int
    cpus: tuple[int, ...]
    memory_node: int | None
    reason: str
    env: Mapping[str, Var]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: torchrun's argv, the environment all its ranks share, the ranks."""

    name: str
    node_rank: int
    data_address: str
    cwd: str
    torchrun: tuple[str, ...]
    env: Mapping[str, Var]
    ranks: tuple[RankPlan, ...]
    leases: tuple[str, ...] = ()
    """What the agent holds for itself while the attempt runs: the PCI addresses of the GPUs its ranks drive."""


@dataclass(frozen=True, slots=True)
class Code:
    """A synced tree and the sha256 of its content."""

    tree: str
    digest: str


@dataclass(frozen=True, slots=True)
class Gang:
    """Where the lead's agent listens, and the gang's times."""

    address: str
    port: int
    lease_s: float = LEASE_S
    start_timeout_s: float = START_TIMEOUT_S
    rank_grace_s: float = RANK_GRACE_S


@dataclass(frozen=True, slots=True)
class Hang:
    """A rank hangs that is silent for max(factor × median step, floor_s), or start_s before step 2 and while it saves."""

    floor_s: float = HANG_FLOOR_S
    factor: float = HANG_FACTOR
    start_s: float = HANG_START_S


HANG = Hang()


@dataclass(frozen=True, slots=True)
class Plan:
    """Exactly what is run in one attempt; `plan.json` is this."""

    schema: str
    cluster: str
    run_id: str
    run_dir: str
    attempt: int
    recipe: str
    created_at: str
    steps: int | None
    world_size: int
    code: Code
    script: tuple[str, ...]
    gang: Gang
    grace_s: float
    nodes: tuple[NodePlan, ...]
    hang: Hang | None = None
    """When a rank that makes no progress ends the attempt; None = never."""
    options: tuple[str, ...] = ()
    """Of `r4090c launch`, that hold for the attempts after this one as well: --no-gate, --anyway."""
    warnings: tuple[str, ...] = ()
    """What is doubtful about the variables that people set themselves (launch.env_lint), one line each."""
    forecast: Mapping[str, Any] | None = None
    """What the run should need and do (launch.forecast), to be compared with what it does; None for a user's own script."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: the script below the code tree, its arguments, and how many ranks a node.

    `nproc` None = one a GPU, or one on a node without GPUs. `affinity` False = no rank is bound, and GPUs stay in PCI order.
    """

    name: str
    script: str
    args: tuple[str, ...]
    nproc: int | None = None
    steps: int | None = None
    env: Mapping[str, str] | None = None
    affinity: bool = True
    hang: Hang | None = HANG
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ports:
    """Two free TCP ports on the lead: torchrun's store, and the gang."""

    master: int
    gang: int


def ranks_on(node: Node, job: Job, visible: Sequence[str] | None = None) -> int:
    """Return the number of ranks `job` gets on `node`; `visible`: what CUDA_VISIBLE_DEVICES leaves of its GPUs.

    Raises UsageError for more ranks than GPUs.
    """
    gpus = node.gpus if visible is None else min(node.gpus, len(visible))
    nproc = job.nproc if job.nproc is not None else max(1, gpus)
    if gpus and nproc > gpus:
        has = f"{node.name} has {gpus} GPUs" if visible is None else f"CUDA_VISIBLE_DEVICES leaves {gpus} GPUs on {node.name}"
        raise UsageError(f"--nproc-per-node {nproc}", has, f"at most {gpus}", "r4090c nodes")
    return nproc


def make_plan(
    cluster: Cluster,
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    job: Job,
    *,
    run: RunPaths,
    attempt: int,
    code: Code,
    ports: Ports,
    created_at: str,
    p2p: Mapping[str, P2pProof] | None = None,
    port_tests: Mapping[str, Mapping[str, PortTest]] | None = None,
) -> Plan:
    """Return the plan for running `job` on `nodes` (the first is the lead).

    Global ranks follow the order of the nodes. `p2p`: node -> what a two-arm test of it as it stands showed.
    `port_tests`: node -> RDMA port -> what its last bandwidth test showed.
    Raises UsageError when the wish cannot be met.
    """
    lead = nodes[0]
    computed = computed_environment(cluster, nodes, facts, p2p, port_tests)
    by_node = environments(cluster, nodes, computed, job.env or {})
    warnings = tuple(doubt.text for doubt in lint(cluster, nodes, facts, by_node, computed))
    envs = [by_node[node.name] for node in nodes]
    counts = [ranks_on(node, job, visible_devices(env)) for node, env in zip(nodes, envs, strict=True)]
    if len(set(counts)) > 1:
        told = ", ".join(f"{node.name}: {count}" for node, count in zip(nodes, counts, strict=True))
        raise UsageError(
            "ranks per node",
            f"they differ ({told})",
            f"the same number on every node: --nproc-per-node {min(counts)}",
            "r4090c nodes",
        )
    nproc = counts[0]
    own_code = job.script.partition("/")[0] == USER_FOLDER
    root = f"{code.tree}/{USER_FOLDER}" if own_code else code.tree
    planned = []
    for node_rank, (node, env) in enumerate(zip(nodes, envs, strict=True)):
        env["PYTHONPATH"] = _python_path(root, env.get("PYTHONPATH"))
        env["R4090C_RUN_DIR"] = Var(str(run.root), "where a script may write")
        # The option --shutdown-timeout is too young for the oldest torch we take; that one ignores the variable.
        env.setdefault(
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", Var(str(SHUTDOWN_TIMEOUT_S), "otherwise torchrun waits 30 s for the other ranks")
        )
        topology = node_topology(facts[node.name])
        order = _gpu_order(node, topology, env, nproc) if job.affinity else None
        if order is not None:
            env["CUDA_VISIBLE_DEVICES"] = order
        ranks = _rank_plans(cluster, node, facts[node.name], topology, env, node_rank * nproc, nproc, bound=job.affinity)
        where = (
            f"--nnodes={len(nodes)}",
            f"--node-rank={node_rank}",
            f"--nproc-per-node={nproc}",
            "--rdzv-backend=static",
            f"--master-addr={lead.data_address}",
            f"--master-port={ports.master}",
        )
        torchrun = _torchrun(node.paths.python, where, code, job)
        leases = _leases(node, facts[node.name], env, nproc)
        planned.append(NodePlan(node.name, node_rank, node.data_address, root, torchrun, env, ranks, leases))
    return Plan(
        schema=SCHEMA,
        cluster=cluster.name,
        run_id=run.run_id,
        run_dir=str(run.root),
        attempt=attempt,
        recipe=job.name,
        created_at=created_at,
        steps=job.steps,
        world_size=sum(counts),
        code=code,
        script=(job.script, *job.args),
        gang=Gang(address=lead.data_address, port=ports.gang),
        grace_s=GRACE_S,
        nodes=tuple(planned),
        hang=job.hang,
        options=job.options,
        warnings=warnings,
    )


def _leases(node: Node, facts: NodeFacts, env: Mapping[str, Var], nproc: int) -> tuple[str, ...]:
    """Return the PCI addresses of the GPUs that the ranks drive: all of the node's where it is not known which.

    "gpu0", "gpu1" … where the node did not tell its GPUs.
    """
    gpus = [gpu for gpu in facts.gpus.value or () if gpu.index >= 0]
    if not node.gpus:
        return ()
    if not gpus:
        return tuple(f"gpu{index}" for index in range(node.gpus))
    in_pci_order = "CUDA_DEVICE_ORDER" not in env or env["CUDA_DEVICE_ORDER"].value == "PCI_BUS_ID"
    used = rank_gpus(gpus, nproc, visible_devices(env)) if in_pci_order else (None,)
    known = [gpu.pci for gpu in used if gpu is not None]
    return tuple(sorted(known if len(known) == len(used) else (gpu.pci for gpu in gpus)))


def _python_path(root: str, wished: Var | None) -> Var:
    """Return PYTHONPATH: the synced code is found first, whatever else was wished."""
    if wished is None:
        return Var(root, "the synced code")
    return Var(f"{root}:{wished.value}", f"the synced code, then what was {wished.reason}", wished.origin)


def _gpu_order(node: Node, topology: NodeTopology, env: Mapping[str, Var], nproc: int) -> Var | None:
    """Return CUDA_VISIBLE_DEVICES where another order than PCI's brings neighbouring ranks nearer and the user said nothing."""
    if "CUDA_VISIBLE_DEVICES" in env or "CUDA_DEVICE_ORDER" not in env or env["CUDA_DEVICE_ORDER"].origin != "computed":
        return None
    stated = sorted(topology.gpus, key=lambda place: place.pci)[: node.gpus]
    order = rank_order(replace(topology, gpus=tuple(stated)), nproc)
    return None if order is None else Var(",".join(map(str, order.places)), order.reason)


def _rank_plans(
    cluster: Cluster,
    node: Node,
    facts: NodeFacts,
    topology: NodeTopology,
    env: Mapping[str, Var],
    first_rank: int,
    nproc: int,
    *,
    bound: bool,
) -> tuple[RankPlan, ...]:
    """Return the ranks of one node, each with its CPUs; not `bound`, they share the cores in number only."""
    in_pci_order = "CUDA_DEVICE_ORDER" not in env or env["CUDA_DEVICE_ORDER"].value == "PCI_BUS_ID"
    numa_of = {place.pci: place.numa for place in topology.gpus}
    gpus = [replace(gpu, numa=numa_of[gpu.pci]) for gpu in facts.gpus.value or () if gpu.pci in numa_of]
    numa = rank_numa(gpus if in_pci_order else (), nproc, visible_devices(env))
    sets = cpu_sets(facts.cpus.value, numa, _nic_numa(cluster, node, facts)) if facts.cpus.value is not None else None
    ranks = []
    for local_rank in range(nproc):
        chosen = sets[local_rank] if sets else None
        bind_to = chosen if bound else None
        unbound = "CPUs unknown: not bound" if bound else "not bound: --no-affinity"
        own = _shares(chosen) if node.gpus else CPU_SHARES
        ranks.append(
            RankPlan(
                rank=first_rank + local_rank,
                local_rank=local_rank,
                cpus=bind_to.cpus if bind_to else (),
                memory_node=bind_to.memory_node if bind_to else None,
                reason=bind_to.reason if bind_to else unbound,
                env={name: var for name, var in own.items() if name not in env},
            )
        )
    return tuple(ranks)


def _nic_numa(cluster: Cluster, node: Node, facts: NodeFacts) -> set[int]:
    """Return the NUMA nodes of the cards that carry the training traffic; none where that is not known."""
    net, ports = facts.net.value, facts.rdma.value or ()
    told = [card.numa for card in data_cards(node, cluster, facts.pci.value or (), net, ports)]
    iface = chosen_iface(net, node, cluster) if net is not None else None
    told += [port.numa for port in rdma_ports(node, ports, net, iface.name if iface else None, cluster)]
    return {numa for numa in told if numa is not None and numa >= 0}


def _shares(chosen: CpuSet | None) -> dict[str, Var]:
    """Return how a GPU rank shares its cores among OpenMP and its data loaders."""
    if chosen is None:
        return {OMP_THREADS: Var("1", "CPUs unknown"), DATA_WORKERS: Var("1", "CPUs unknown")}
    rest = chosen.cores - chosen.threads - chosen.workers
    of = f"{chosen.threads} of {chosen.cores} physical cores of this rank"
    spare = f", {rest} left to NCCL's proxy" if rest > 0 else ""
    return {
        OMP_THREADS: Var(str(chosen.threads), f"{of}: {chosen.workers} for data workers{spare}"),
        DATA_WORKERS: Var(str(chosen.workers), f"processes that load data, on {chosen.workers} of {chosen.cores} physical cores"),
    }


def _torchrun(python: str, where: tuple[str, ...], code: Code, job: Job) -> tuple[str, ...]:
    """Return torchrun's argv on one node: it starts the rank wrapper, which becomes the script."""
    return (
        python,
        "-m",
        "torch.distributed.run",
        *where,
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--no-python",
        python,
        "-I",  # neither PYTHONPATH nor the script's folder may put a json.py or a signal.py before the standard library's
        "-S",
        f"{code.tree}/launch/rank.py",
        "--",
        python,
        f"{code.tree}/{job.script}",
        *job.args,
    )


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON, without the values of secret variables."""
    told = asdict(plan)
    for node in told["nodes"]:
        _hide(node["env"])
        for rank in node["ranks"]:
            _hide(rank["env"])
    return told


def plan_from(told: Mapping[str, Any]) -> Plan:
    """Return the plan that `plan_json` told; the values of secret variables are HIDDEN in it.

    Raises KeyError or TypeError for what is none.
    """

    def variables(env: Mapping[str, Mapping[str, Any]]) -> dict[str, Var]:
        return {name: Var(**var) for name, var in env.items()}

    def rank(one: Mapping[str, Any]) -> RankPlan:
        return RankPlan(**{**one, "cpus": tuple(one["cpus"]), "env": variables(one["env"])})

    def node(one: Mapping[str, Any]) -> NodePlan:
        own = {"env": variables(one["env"]), "ranks": tuple(rank(each) for each in one["ranks"])}
        return NodePlan(**{**one, **own, "torchrun": tuple(one["torchrun"]), "leases": tuple(one.get("leases", ()))})

    hang = told.get("hang")
    parts = {
        "code": Code(**told["code"]),
        "gang": Gang(**told["gang"]),
        "nodes": tuple(node(one) for one in told["nodes"]),
        "script": tuple(told["script"]),
        "warnings": tuple(told.get("warnings", ())),
        "options": tuple(told.get("options", ())),
        "hang": None if hang is None else Hang(**hang),
    }
    return Plan(**{**told, **parts})


def _hide(env: dict[str, Any]) -> None:
    for name, var in env.items():
        if is_secret(name, var["value"]):
            var["value"] = HIDDEN


def secrets_of(plan: Plan) -> dict[str, dict[str, str]]:
    """Return node -> the secret variables of its ranks; they travel on stdin only, never in a file."""
    return {node.name: {name: var.value for name, var in node.env.items() if is_secret(name, var.value)} for node in plan.nodes}
