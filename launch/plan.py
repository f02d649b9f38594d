"""The plan of one attempt: argv, environment and CPU set of every rank, decided before anything runs; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.affinity import cpu_sets, rank_numa
from launch.env import Var, is_secret, node_environment
from r4090c.errors import UsageError
from r4090c.model import Cluster, Node, NodeFacts
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
SHUTDOWN_TIMEOUT_S = 2
"""How long torchrun waits for the other local ranks after one failed; its default of 30 s is why peers linger."""


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


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: the script below the code tree, its arguments, and how many ranks a node.

    `nproc` None = one a GPU, or one on a node without GPUs.
    """

    name: str
    script: str
    args: tuple[str, ...]
    nproc: int | None = None
    steps: int | None = None
    env: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Ports:
    """Two free TCP ports on the lead: torchrun's store, and the gang."""

    master: int
    gang: int


def ranks_on(node: Node, job: Job) -> int:
    """Return the number of ranks `job` gets on `node`. Raises UsageError for more ranks than GPUs."""
    nproc = job.nproc if job.nproc is not None else max(1, node.gpus)
    if node.gpus and nproc > node.gpus:
        raise UsageError(f"--nproc-per-node {nproc}", f"{node.name} has {node.gpus} GPUs", f"at most {node.gpus}", "r4090c nodes")
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
) -> Plan:
    """Return the plan for running `job` on `nodes` (the first is the lead).

    Global ranks follow the order of the nodes. Raises UsageError when the wish cannot be met.
    """
    peers = {node.name: node.data_address for node in nodes}
    lead = nodes[0]
    counts = [ranks_on(node, job) for node in nodes]
    if len(set(counts)) > 1:
        told = ", ".join(f"{node.name}: {count}" for node, count in zip(nodes, counts, strict=True))
        raise UsageError(
            "ranks per node", f"they differ ({told})", "the same number on every node", f"--nproc-per-node {min(counts)}"
        )
    planned = []
    for node_rank, node in enumerate(nodes):
        planned.append(
            _node_plan(
                cluster,
                node,
                node_rank,
                facts[node.name],
                peers,
                job,
                counts[node_rank],
                run=run,
                code=code,
                ports=ports,
                lead=lead,
            )
        )
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
    )


def _node_plan(
    cluster: Cluster,
    node: Node,
    node_rank: int,
    facts: NodeFacts,
    peers: Mapping[str, str],
    job: Job,
    nproc: int,
    *,
    run: RunPaths,
    code: Code,
    ports: Ports,
    lead: Node,
) -> NodePlan:
    env = node_environment(cluster, node, facts, peers, job.env or {})
    env["PYTHONPATH"] = env.get("PYTHONPATH", Var(code.tree, "the synced code"))
    env["R4090C_RUN_DIR"] = Var(str(run.root), "where a script may write")
    numa = rank_numa(facts.gpus.value or (), nproc)
    sets = cpu_sets(facts.cpus.value, numa) if facts.cpus.value is not None else None
    ranks = []
    for local_rank in range(nproc):
        chosen = sets[local_rank] if sets else None
        own: dict[str, Var] = {}
        if "OMP_NUM_THREADS" not in env:
            threads = chosen.threads if chosen else 1
            # Without a GPU the ranks do the arithmetic: a sum's order, and so a loss, must not depend on the node's core count.
            own["OMP_NUM_THREADS"] = (
                Var(str(threads), f"{threads} physical cores of this rank")
                if node.gpus
                else Var("1", "CPU ranks: the same sums everywhere")
            )
        ranks.append(
            RankPlan(
                rank=node_rank * nproc + local_rank,
                local_rank=local_rank,
                cpus=chosen.cpus if chosen else (),
                memory_node=chosen.memory_node if chosen else None,
                reason=chosen.reason if chosen else "CPUs unknown: not bound",
                env=own,
            )
        )
    python = node.paths.python
    torchrun = (
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(peers)}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={nproc}",
        "--rdzv-backend=static",
        f"--master-addr={lead.data_address}",
        f"--master-port={ports.master}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}",
        "--no-python",
        python,
        f"{code.tree}/launch/rank.py",
        "--",
        python,
        f"{code.tree}/{job.script}",
        *job.args,
    )
    return NodePlan(node.name, node_rank, node.data_address, code.tree, torchrun, env, tuple(ranks))


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON, without the values of secret variables."""
    told = asdict(plan)
    for node in told["nodes"]:
        _hide(node["env"])
        for rank in node["ranks"]:
            _hide(rank["env"])
    return told


def _hide(env: dict[str, Any]) -> None:
    for name, var in env.items():
        if is_secret(name):
            var["value"] = "***"


def secrets_of(plan: Plan) -> dict[str, dict[str, str]]:
    """Return node -> the secret variables of its ranks; they travel on stdin only, never in a file."""
    return {node.name: {name: var.value for name, var in node.env.items() if is_secret(name)} for node in plan.nodes}
