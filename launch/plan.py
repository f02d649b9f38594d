"""The plan of one attempt: argv, environment and CPU set of every rank, decided before anything runs; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.affinity import cpu_sets, rank_numa
from launch.env import HIDDEN, is_secret, node_environment, visible_devices
from netcheck.rank_env import Var
from r4090c.errors import UsageError
from r4090c.model import Cluster, Node, NodeFacts, P2pProof
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
USER_FOLDER = "user"
"""Where a user's own code lies in the synced tree."""
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
) -> Plan:
    """Return the plan for running `job` on `nodes` (the first is the lead).

    Global ranks follow the order of the nodes. `p2p`: node -> what a two-arm test of it as it stands showed.
    Raises UsageError when the wish cannot be met.
    """
    peers = {node.name: node.data_address for node in nodes}
    lead = nodes[0]
    proofs = p2p or {}
    envs = [node_environment(cluster, node, facts[node.name], peers, job.env or {}, proofs.get(node.name)) for node in nodes]
    counts = [ranks_on(node, job, visible_devices(env)) for node, env in zip(nodes, envs, strict=True)]
    if len(set(counts)) > 1:
        told = ", ".join(f"{node.name}: {count}" for node, count in zip(nodes, counts, strict=True))
        raise UsageError(
            "ranks per node", f"they differ ({told})", "the same number on every node", f"--nproc-per-node {min(counts)}"
        )
    nproc = counts[0]
    own_code = job.script.partition("/")[0] == USER_FOLDER
    root = f"{code.tree}/{USER_FOLDER}" if own_code else code.tree
    planned = []
    for node_rank, (node, env) in enumerate(zip(nodes, envs, strict=True)):
        env["PYTHONPATH"] = _python_path(root, env.get("PYTHONPATH"))
        env["R4090C_RUN_DIR"] = Var(str(run.root), "where a script may write")
        # The option --shutdown-timeout is too young for the oldest torch we take; that one ignores the variable.
        env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", Var(str(SHUTDOWN_TIMEOUT_S), "torchrun waits 30 s for other ranks else"))
        ranks = _rank_plans(node, facts[node.name], env, node_rank * nproc, nproc)
        where = (
            f"--nnodes={len(nodes)}",
            f"--node-rank={node_rank}",
            f"--nproc-per-node={nproc}",
            "--rdzv-backend=static",
            f"--master-addr={lead.data_address}",
            f"--master-port={ports.master}",
        )
        torchrun = _torchrun(node.paths.python, where, code, job)
        planned.append(NodePlan(node.name, node_rank, node.data_address, root, torchrun, env, ranks))
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


def _python_path(root: str, wished: Var | None) -> Var:
    """Return PYTHONPATH: the synced code is found first, whatever else was wished."""
    if wished is None:
        return Var(root, "the synced code")
    return Var(f"{root}:{wished.value}", f"the synced code, then what was {wished.reason}", wished.origin)


def _rank_plans(node: Node, facts: NodeFacts, env: Mapping[str, Var], first_rank: int, nproc: int) -> tuple[RankPlan, ...]:
    """Return the ranks of one node, each with its CPUs."""
    in_pci_order = "CUDA_DEVICE_ORDER" not in env or env["CUDA_DEVICE_ORDER"].value == "PCI_BUS_ID"
    numa = rank_numa((facts.gpus.value or ()) if in_pci_order else (), nproc, visible_devices(env))
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
                rank=first_rank + local_rank,
                local_rank=local_rank,
                cpus=chosen.cpus if chosen else (),
                memory_node=chosen.memory_node if chosen else None,
                reason=chosen.reason if chosen else "CPUs unknown: not bound",
                env=own,
            )
        )
    return tuple(ranks)


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


def _hide(env: dict[str, Any]) -> None:
    for name, var in env.items():
        if is_secret(name, var["value"]):
            var["value"] = HIDDEN


def secrets_of(plan: Plan) -> dict[str, dict[str, str]]:
    """Return node -> the secret variables of its ranks; they travel on stdin only, never in a file."""
    return {node.name: {name: var.value for name, var in node.env.items() if is_secret(name, var.value)} for node in plan.nodes}
