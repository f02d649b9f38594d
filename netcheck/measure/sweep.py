"""A collective over a set of nodes: which program runs it, how its ranks are started, and what came of it. Pure.

nccl-tests where it is installed: alone on one node, under mpirun on several when it was built with MPI. Else the torch program
`collectives.py`, which moves data with NCCL on GPUs and with gloo, one rank a node, where there are none. The ranks get the
environment that `launch` gives them (netcheck.rank_env).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from netcheck.facts.question import as_float, as_int, as_list, as_mapping, as_str
from netcheck.measure.job import NOT_INSTALLED, Job, Part, PartResult, Record, Setting, Step
from netcheck.rank_env import measured_environment, visible_gpus
from netcheck.tools import nccl_log, nccl_tests
from netcheck.tools.nccl_log import NcclLog
from netcheck.tools.nccl_tests import Row
from r4090c.errors import ParseError
from r4090c.model import Node, NodeFacts

SOURCE = files("netcheck.measure").joinpath("collectives.py").read_text(encoding="utf-8")
"""The torch program."""
MARKER = "R4090C-COLLECTIVES "
"""Begins the line of its document (collectives.MARKER; a test compares)."""
SCRIPT = "collectives.py"
NCCL_TESTS, MPIRUN, TORCH = "nccl-tests", "mpirun", "torch"
PROGRAMS = {"all_reduce": "all_reduce_perf", "all_gather": "all_gather_perf", "reduce_scatter": "reduce_scatter_perf"}
"""Collective -> program of nccl-tests."""
START_S = 30.0
"""est.: what launchers, Python and torch need to start on a loaded node, on top of the program's own limits."""
SLOW_GBIT_S = 5.0
"""est.: below it a quarter of the size already fills the wire."""
NCCL_TESTS_S = 60.0
"""est.: what a run of nccl-tests may take."""
MPI_PORTS = 64
"""est.: TCP ports Open MPI may listen on; a daemon and a process take one or two each."""


def parse_size(text: str) -> int:
    """Return the bytes of "8", "64K", "16M" or "1G" (powers of 1024, as nccl-tests has it). Raises ValueError."""
    match = re.fullmatch(r"(\d{1,12})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise ValueError(f"{text!r} is not a size like 64K, 16M or 1G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to run. Sizes in bytes; `budget_s`: for the iterations of one size; `join_s`, `timeout_s`: as of collectives.py."""

    min_bytes: int
    max_bytes: int
    op: str = "all_reduce"
    factor: int = 2
    iterations: int = 20
    warm_up: int = 5
    budget_s: float = 2.0
    join_s: float = 60.0
    timeout_s: float = 30.0

    @property
    def sizes(self) -> int:
        """How many sizes there are."""
        count, size = 1, self.min_bytes
        while size * self.factor <= self.max_bytes:
            count, size = count + 1, size * self.factor
        return count

    @property
    def limit_s(self) -> float:
        """The longest a program that works may take."""
        return START_S + self.join_s + self.timeout_s + self.sizes * 4 * self.budget_s


def fitted(sweep: Sweep, rate_gbit_s: float | None) -> Sweep:
    """Return `sweep` with fewer iterations, and smaller messages below SLOW_GBIT_S, for a slow network.

    The torch program looks at the clock; nccl-tests runs what it is told: every size in two placements, each at about half of the
    rate and twice through the ring.
    """
    if rate_gbit_s is None or rate_gbit_s <= 0:
        return sweep
    if rate_gbit_s < SLOW_GBIT_S:
        sweep = replace(sweep, min_bytes=max(1, sweep.min_bytes // 4), max_bytes=max(1, sweep.max_bytes // 4))
    total_gbyte = sum(sweep.min_bytes * sweep.factor**place for place in range(sweep.sizes)) / 1e9
    rounds = int(NCCL_TESTS_S / (4 * total_gbyte / (rate_gbit_s / 8 / 2)))
    warm_up = max(1, min(sweep.warm_up, rounds // 4))
    return replace(sweep, iterations=max(2, min(sweep.iterations, rounds - warm_up)), warm_up=warm_up)


@dataclass(frozen=True, slots=True)
class Member:
    """One node that takes part. `gpus`: how CUDA calls those it gives, one a rank; none: `ranks` ranks on its CPUs."""

    node: Node
    facts: NodeFacts
    env: Mapping[str, str]
    gpus: tuple[str, ...] = ()
    cpu_ranks: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks run on it."""
        return len(self.gpus) or self.cpu_ranks


def members(setting: Setting, nodes: Sequence[Node]) -> tuple[Member, ...]:
    """Return `nodes` as members, with all GPUs that ranks may have."""
    envs = measured_environment(setting.cluster, nodes, setting.facts, setting.port_tests)
    found = []
    for node in nodes:
        facts, env = setting.facts[node.name], envs[node.name]
        found.append(Member(node, facts, env, visible_gpus(node, facts, env)))
    return tuple(found)


def has_torch(facts: NodeFacts) -> bool:
    """Return whether the node's training Python has torch."""
    return facts.python.value is not None and "torch" in facts.python.value.packages


def can_take_part(member: Member) -> bool:
    """Return whether the node has a program to take part with, at least alone."""
    return has_torch(member.facts) or (bool(member.gpus) and "all_reduce_perf" in (member.facts.tools.value or {}))


def program_for(team: Sequence[Member], op: str = "all_reduce") -> str | None:
    """Return what runs `op` on these nodes, None when they have nothing in common.

    mpirun has to be Open MPI's: MPICH's takes other options, and finds no library of Open MPI.
    """
    tools = [member.facts.tools.value or {} for member in team]
    if all(member.gpus for member in team) and all(PROGRAMS[op] in one for one in tools):
        if len(team) == 1:
            return NCCL_TESTS
        launchers = [one.get("mpirun") for one in tools]  # any node may come to lead, and all need Open MPI's daemon
        if all(one[PROGRAMS[op]].mpi for one in tools) and all(
            found is not None and not any(word in found.real for word in ("hydra", "mpich")) for found in launchers
        ):
            return MPIRUN
    return TORCH if all(has_torch(member.facts) for member in team) else None


def make_job(
    name: str,
    team: Sequence[Member],
    sweep: Sweep,
    port: int,
    *,
    program: str | None = None,
    env: Mapping[str, str] | None = None,
    data: Mapping[str, Any] | None = None,
    counters: Sequence[str] = (),
) -> Job:
    """Return the job that runs `sweep` on `team`; its first node leads. `program` as of `program_for`, `env` comes on top.

    ValueError when the nodes have no program in common.
    """
    program = program or program_for(team, sweep.op)
    if program is None:
        raise ValueError(f"{name}: no program that all nodes have")
    team = tuple(replace(member, env={**member.env, **(env or {})}) for member in team)
    if program == TORCH:
        parts = tuple(_torch_part(team, place, sweep, port, tuple(counters)) for place in range(len(team)))
    else:
        step = _alone(team[0], sweep) if program == NCCL_TESTS else _under_mpirun(team, sweep, port)
        parts = (Part(team[0].node.name, (step,), counters=tuple(counters)),)
    told = {
        "op": sweep.op,
        "program": program,
        "backend": "nccl" if all(member.gpus for member in team) else "gloo",
        "nodes": [member.node.name for member in team],
        "ranks": [member.ranks for member in team],
    }
    return Job(name, parts, {**told, **(data or {})})


# --------------------------------------------------------------------------- how ranks are started


def _torch_part(team: Sequence[Member], place: int, sweep: Sweep, port: int, counters: tuple[str, ...]) -> Part:
    """Return one node's part: the torch program, which starts the node's ranks."""
    member, first = team[place], sum(one.ranks for one in team[:place])
    backend = "nccl" if all(one.gpus for one in team) else "gloo"
    words = ["--local-ranks", member.ranks, "--first-rank", first, "--backend", backend, "--log-folder", "{folder}"]
    words += ["--op", sweep.op, "--min-bytes", sweep.min_bytes, "--max-bytes", sweep.max_bytes, "--factor", sweep.factor]
    words += ["--iterations", sweep.iterations, "--warm-up", sweep.warm_up, "--budget-s", sweep.budget_s]
    words += ["--join-s", sweep.join_s, "--timeout-s", sweep.timeout_s]
    env = {
        **member.env,
        "WORLD_SIZE": str(sum(one.ranks for one in team)),
        "MASTER_ADDR": team[0].node.data_address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # some machines ask Python not to keep what it compiled: torch takes three times as long
    }
    if member.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(member.gpus)
    argv = (member.node.paths.python, f"{{folder}}/{SCRIPT}", *map(str, words))
    return Part(member.node.name, (Step(argv, sweep.limit_s, env=env),), files={SCRIPT: SOURCE}, counters=counters)


def _perf(member: Member, sweep: Sweep, gpus: int) -> tuple[str, ...]:
    """Return the command line of nccl-tests for one process with `gpus` GPUs; data is checked (-c 1)."""
    words = ("-b", sweep.min_bytes, "-e", sweep.max_bytes, "-f", sweep.factor, "-g", gpus)
    more = ("-n", sweep.iterations, "-w", sweep.warm_up, "-c", 1)
    return ((member.facts.tools.value or {})[PROGRAMS[sweep.op]].path, *map(str, (*words, *more)))


def _nccl_env(member: Member) -> dict[str, str]:
    """Return a member's environment for nccl-tests. NCCL's log goes to standard error, apart from the table."""
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/dev/stderr"}
    return {**member.env, **log, "CUDA_VISIBLE_DEVICES": ",".join(member.gpus)}


def _alone(member: Member, sweep: Sweep) -> Step:
    return Step(_perf(member, sweep, len(member.gpus)), sweep.limit_s, env=_nccl_env(member))


def _under_mpirun(team: Sequence[Member], sweep: Sweep, port: int) -> Step:
    """Return mpirun on the first node: one process a GPU, a context a node, each with its own environment.

    The variables go through env(1) and not through -x, which is one value for all nodes: interfaces are named differently on
    them. Nodes are called by their names, which `r4090c provision ssh-trust` makes enough for the SSH from node to node.
    """
    lead = team[0]
    argv = [(lead.facts.tools.value or {})["mpirun"].path, "--bind-to", "none"]
    if lead.node.ssh.user == "root" or (lead.facts.user.value is not None and lead.facts.user.value.uid == 0):
        argv.append("--allow-run-as-root")
    for place, member in enumerate(team):
        variables = [f"{name}={value}" for name, value in sorted(_nccl_env(member).items())]
        context = ["-np", str(member.ranks), "-H", f"{member.node.name}:{member.ranks}", "env", *variables]
        argv += [":"] * bool(place) + context + list(_perf(member, sweep, 1))
    return Step(tuple(argv), sweep.limit_s, env=_mpi_env(port))


def _mpi_env(port: int) -> dict[str, str]:
    """Return what tells Open MPI (4 and 5) how to reach the other nodes: SSH without questions, a port range of its own, TCP.

    MPI only carries the first contact here; left to itself it tries InfiniBand libraries and every interface.
    """
    ssh = "-o BatchMode=yes -o ConnectTimeout=10"
    low = min(port, 65_535 - MPI_PORTS)
    ports = f"{low}-{low + MPI_PORTS}"
    return {
        "OMPI_MCA_plm_rsh_args": ssh,
        "PRTE_MCA_plm_ssh_args": ssh,
        "OMPI_MCA_oob_tcp_dynamic_ipv4_ports": ports,
        "PRTE_MCA_oob_tcp_dynamic_ipv4_ports": ports,
        "OMPI_MCA_btl_tcp_port_min_v4": str(low),
        "OMPI_MCA_btl_tcp_port_range_v4": str(MPI_PORTS),
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


# --------------------------------------------------------------------------- what came back


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one job.

    `asked`, `ranks`: how many were to take part and did (None = not told). `rows`: what was measured. `wrong`: elements that were
    not what they must be; None = nothing was checked; `wrong_nodes`: where. `error`: why it is no whole run, "" when it is one;
    `missing`: nodes whose ranks never came; `lost`: node -> why it did not answer at all. `said`: node -> its last words, where
    its program failed. `absent`: nodes where the program is not there. `log`: what NCCL's log tells, None = no log.
    """

    name: str
    op: str
    program: str
    backend: str
    nodes: tuple[str, ...]
    asked: int
    data: Mapping[str, Any]
    ranks: int | None = None
    rows: tuple[Row, ...] = ()
    wrong: int | None = None
    wrong_nodes: tuple[str, ...] = ()
    error: str = ""
    phase: str = ""
    missing: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    next_commands: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    log: NcclLog | None = None
    logs: Mapping[str, NcclLog] = field(default_factory=dict)
    each_alone: bool = False
    devices: tuple[str, ...] = ()
    note: str = ""

    @property
    def passed(self) -> bool:
        """True when all ranks took part, the run is whole and its data is right."""
        return not self.error and not self.wrong and self.ranks == self.asked and not self.each_alone

    @property
    def largest(self) -> Row | None:
        """The row of the largest size; of two placements the out-of-place one, of several the slowest."""
        rows = [row for row in self.rows if not row.in_place] or list(self.rows)
        return max(rows, key=lambda row: (row.bytes, -row.busbw_gbyte_s), default=None)

    @property
    def suspects(self) -> tuple[str, ...]:
        """The nodes that the failure itself names: those that did not come, or not answer, or hold wrong data."""
        return tuple(dict.fromkeys((*self.lost, *self.missing, *self.wrong_nodes)))


def read_run(record: Record) -> Run:
    """Return what came of a job of `make_job`. Raises ParseError when the record is of something else."""
    data = record.data
    nodes = tuple(as_str(node, "node") for node in as_list(data.get("nodes"), "nodes"))
    counts = [as_int(count, "ranks") for count in as_list(data.get("ranks"), "ranks")]
    program, op = as_str(data.get("program"), "program"), as_str(data.get("op"), "op")
    known = program in (NCCL_TESTS, MPIRUN, TORCH) and op in PROGRAMS
    if not nodes or len(counts) != len(nodes) or min(counts) < 1 or not known:
        raise ParseError(f"{record.name}: not a run of a collective")
    lost = {node: part.error for node, part in record.parts.items() if part.error}
    run = Run(
        name=record.name,
        op=op,
        program=program,
        backend=as_str(data.get("backend"), "backend"),
        nodes=nodes,
        asked=sum(counts),
        data=data,
        lost=lost,
        next_commands={node: part.next_command for node, part in record.parts.items() if part.error},
        absent=tuple(node for node, part in record.parts.items() if any(step.error == NOT_INSTALLED for step in part.steps)),
        said={node: words for node, part in record.parts.items() if (words := _last_words(part))},
        logs=_logs(record.parts),
        log=_log("\n".join(step.stderr for part in record.parts.values() for step in part.steps)),
    )
    lead = record.parts.get(nodes[0])
    told = _of_torch(run, counts, lead) if program == TORCH else _of_nccl_tests(run, lead)
    if told.error or not (lost or run.absent):
        return told
    first = next(iter(lost or dict.fromkeys(run.absent, NOT_INSTALLED)))
    return replace(told, error=f"{first}: {lost.get(first, NOT_INSTALLED)}")


def _of_torch(run: Run, counts: Sequence[int], lead: PartResult | None) -> Run:
    """Return `run` with what the torch program's document tells."""
    of_rank = [node for node, count in zip(run.nodes, counts, strict=True) for _ in range(count)]
    document = _document(lead)
    if document is None:
        return replace(run, error=_why_nothing(run, lead))
    rows, notes = [], []
    for one in (as_mapping(row, "result") for row in as_list(document.get("results"), "results")):
        time_us, algbw, busbw = (as_float(one.get(key), key) for key in ("time_us", "algbw_gbyte_s", "busbw_gbyte_s"))
        wrong = as_int(one.get("wrong"), "wrong")
        rows.append(Row(as_int(one.get("bytes"), "bytes"), time_us, algbw, busbw, wrong, one.get("in_place") is True))
        notes.append(as_str(one.get("note") or "", "note"))
    ranks = [as_mapping(rank, "rank") for rank in as_list(document.get("ranks"), "ranks")]
    told = replace(
        run,
        backend=as_str(document.get("backend"), "backend"),
        ranks=len(ranks) or None,
        rows=tuple(rows),
        wrong=sum(row.wrong or 0 for row in rows) if rows else None,
        wrong_nodes=tuple(dict.fromkeys(_nodes_of(document.get("wrong_ranks"), of_rank))),
        devices=tuple(dict.fromkeys(as_str(rank.get("name"), "name") for rank in ranks)),
        note=next(filter(None, notes), ""),
    )
    if document.get("error") is None:
        return told if rows else replace(told, error="nothing was measured")
    error = as_mapping(document["error"], "error")
    phase, text = as_str(error.get("phase"), "phase"), as_str(error.get("text"), "text")
    missing = tuple(dict.fromkeys(_nodes_of(error.get("missing"), of_rank)))
    if missing:
        text = f"{', '.join(missing)} did not come"
    return replace(told, error=f"{phase}: {_line(text)}", phase=phase, missing=missing)


def _document(lead: PartResult | None) -> Mapping[str, Any] | None:
    lines = lead.steps[0].stdout.splitlines() if lead is not None and lead.steps else []
    texts = [line.partition(MARKER)[2] for line in lines if MARKER in line]
    if not texts:
        return None
    try:
        return as_mapping(json.loads(texts[-1]), "document")
    except (ValueError, RecursionError) as error:
        raise ParseError(f"the document of {SCRIPT} is not JSON") from error


def _nodes_of(ranks: object, of_rank: Sequence[str]) -> Iterator[str]:
    for rank in as_list(ranks or [], "ranks"):
        place = as_int(rank, "rank")
        if 0 <= place < len(of_rank):
            yield of_rank[place]


def _of_nccl_tests(run: Run, lead: PartResult | None) -> Run:
    """Return `run` with what nccl-tests printed."""
    step = lead.steps[0] if lead is not None and lead.steps else None
    if step is None or step.error == NOT_INSTALLED:
        return replace(run, error=_why_nothing(run, lead))
    try:
        table = nccl_tests.parse(step.stdout)
    except ParseError:
        return replace(run, error=_why_nothing(run, lead))
    error = step.error or table.error or ""
    if not error and not table.complete:
        error = _why_nothing(run, lead) if not table.rows else "the table is cut"
    if not error and table.each_alone and run.asked > 1:
        error = f"every process was a world of its own: {PROGRAMS[run.op]} was built without MPI"
    return replace(
        run,
        ranks=table.ranks,
        rows=table.rows,
        wrong=table.wrong_total,
        error=error if table.wrong_total in (None, 0) or step.error else "",
        each_alone=table.each_alone and run.asked > 1,
    )


def _why_nothing(run: Run, lead: PartResult | None) -> str:
    """Return why a run left nothing to read: the lead's own error, the failure of another node, its last words."""
    if lead is None:
        return "not in the answer"
    if lead.error:
        return lead.error
    step = lead.steps[0] if lead.steps else None
    if step is not None and step.error:
        return step.error
    words = run.said.get(run.nodes[0]) or next(iter(run.said.values()), "")
    return words or "nothing was printed"


def _last_words(part: PartResult) -> str:
    """Return the line that tells why a node's program failed, "" when it did not."""
    for step in part.steps:
        if step.error and step.error != NOT_INSTALLED:
            return step.error
        if step.rc not in (0, None):
            lines = [line.strip() for line in f"{step.stderr}\n{step.stdout}".splitlines() if line.strip() and MARKER not in line]
            own = [line for line in lines if re.match(r"rank \d+ on ", line)]
            raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
            return _line((*own[:1], *raised[-1:], *lines[-1:], f"exit status {step.rc}")[0])
    return ""


def _line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


def _logs(parts: Mapping[str, PartResult]) -> dict[str, NcclLog]:
    found = {}
    for node, part in parts.items():
        log = _log("\n".join(step.stderr for step in part.steps))
        if log is not None:
            found[node] = log
    return found


def _log(text: str) -> NcclLog | None:
    if "NCCL" not in text:
        return None
    try:
        return nccl_log.parse(text)
    except ParseError:
        return None
