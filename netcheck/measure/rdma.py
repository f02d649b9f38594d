"""What RDMA carries between the nodes, and how soon: ib_write_bw both ways, ib_send_lat. Pure.

Each end names its own device, port and GID: those that serve the data network (netcheck.data_network); of a node with several
ports the first active one. Server and client must run the same program, or both wait for ever without a word: every step has its
timeout. perftest's text is read, not its JSON, which many distributions' versions write invalid.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from netcheck.attribution import Suspect, after_again, explain, retests
from netcheck.counters import globs
from netcheck.data_network import data_iface, gid_index, peers_of, rdma_ports
from netcheck.expected import (
    Cell,
    Limits,
    compared_limits,
    interface,
    link_mtu,
    link_rate_gbit_s,
    rdma_limits,
    rdma_mtu,
)
from netcheck.facts.question import as_list, as_mapping, as_str
from netcheck.measure.figure import Figure
from netcheck.measure.job import (
    NOT_INSTALLED,
    NOT_STARTED,
    Job,
    Level,
    Part,
    PartResult,
    Record,
    Round,
    Setting,
    Step,
    StepResult,
    read_rounds,
)
from netcheck.measure.schedule import all_pairs, disjoint, pick_ports, ring_pairs
from netcheck.tools import perftest
from r4090c.errors import ParseError
from r4090c.model import Cluster, NetFact, Node, NodeFacts, RdmaPort

NAME, TITLE, LEVEL = "rdma-pairs", "RDMA between pairs", Level.DEFAULT

BANDWIDTH, LATENCY = "ib_write_bw", "ib_send_lat"
MESSAGE_BYTES = 1 << 20
"""Large enough that the rate of messages does not count, also on slow cores."""
SLOWEST_GBIT_S = 5.0
"""est.: what a test is given time for; a link slower than that is told as one that did not end in time."""
SLACK_S = 15.0
"""est.: registering memory, exchanging addresses, the retries of a broken path (7 of up to 1 s each)."""
SCREENING, AGAIN = "screening", "again"
STAGES = (SCREENING, AGAIN)
ROUNDS_AGAIN_MAX = 6
"""est.: so many suspects are no longer single faults."""
RETRY_ON = ("Couldn't connect to", "Unable to init the socket connection")
"""What a client says when the server does not listen yet."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of perftest. `gbit_s` or `typical_us`: what it found; both None where it found nothing, for the reason in `error`.

    `mtu_bytes`: the packets it really used. `kind`: the sort of error (netcheck.tools.perftest.ERRORS). `absent`: the node that
    has no perftest.
    """

    program: str
    sender: str
    receiver: str
    stage: str
    gbit_s: float | None = None
    typical_us: float | None = None
    mtu_bytes: int | None = None
    error: str = ""
    kind: str = ""
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Rdma:
    """All that was measured. `failed`: node -> why it took no part, with the command to look."""

    tests: tuple[Trial, ...]
    failed: Mapping[str, tuple[str, str]]
    nodes: tuple[str, ...]

    def between(self, names: Collection[str]) -> Rdma:
        """Return only what concerns `names`: a bundle may be judged for fewer nodes, or be forged."""
        tests = tuple(test for test in self.tests if {test.sender, test.receiver, test.absent or test.sender} <= {*names})
        failed = {name: why for name, why in self.failed.items() if name in names}
        return Rdma(tests, failed, tuple(name for name in self.nodes if name in names))

    def last(self, program: str, stages: Sequence[str] = STAGES) -> dict[Cell, Trial]:
        """Return link -> its last test that found something."""
        found = {}
        for stage in stages:
            for test in self.tests:
                if (test.program, test.stage) == (program, stage) and not test.error:
                    found[test.sender, test.receiver] = test
        return found

    def cells(self, stages: Sequence[str] = STAGES) -> dict[Cell, float]:
        """Return what each link carries."""
        return {cell: test.gbit_s for cell, test in self.last(BANDWIDTH, stages).items() if test.gbit_s is not None}

    def typical_us(self, stages: Sequence[str] = STAGES) -> dict[Cell, float]:
        """Return the typical latency of each pair, in both orders: it is half of a round trip."""
        told = {cell: test.typical_us for cell, test in self.last(LATENCY, stages).items() if test.typical_us is not None}
        return {**told, **{(other, one): value for (one, other), value in told.items()}}

    def silent(self, program: str) -> dict[Cell, Trial]:
        """Return link -> the first test of those where no test of it found anything."""
        measured = self.last(program)
        found: dict[Cell, Trial] = {}
        for test in self.tests:
            cell = test.sender, test.receiver
            if test.program == program and test.error and not test.absent and cell not in measured:
                found.setdefault(cell, test)
        return found


# --------------------------------------------------------------------------- what runs


@dataclass(frozen=True, slots=True)
class End:
    """One node's end of all its links."""

    port: RdmaPort
    gid: int | None

    @property
    def words(self) -> tuple[str, ...]:
        """How perftest is told."""
        gid = ("-x", str(self.gid)) if self.gid is not None else ()
        return "-d", self.port.hca, "-i", str(self.port.port), *gid


def end_of(node: Node, facts: NodeFacts | None, cluster: Cluster) -> End | None:
    """Return the port of `node` to test, None when none that is active serves the data network."""
    if facts is None or facts.rdma.value is None:
        return None
    net = facts.net.value
    iface = data_iface(net, node, peers_of(node, cluster))[0] if net is not None else None
    active = [port for port in rdma_ports(node, facts.rdma.value, net, iface, cluster) if port.state == "ACTIVE"]
    if cluster.network.kind == "infiniband":
        return End(active[0], None) if active else None
    gid, having = gid_index(node, active, net, iface, cluster)
    return End(having[0], gid) if having else None


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return the rounds of pairs (neighbours in the ring, at Level.FULL all), then those that test the suspects again."""
    ends = {node.name: end_of(node, setting.facts.get(node.name), setting.cluster) for node in setting.nodes}
    ready = {name: end for name, end in ends.items() if end is not None}
    if not done:
        pairs = all_pairs([*ready]) if setting.level >= Level.FULL else ring_pairs([*ready])
        return tuple(_round(setting, ready, number, one, SCREENING) for number, one in enumerate(pairs))
    rdma = read({"rounds": list(done)})
    if any(test.stage == AGAIN for test in rdma.tests):
        return ()
    nets = {node.name: setting.facts[node.name].net.value for node in setting.nodes}
    names = [name for name in ready if name not in rdma.failed]
    slow = bandwidth_shares(rdma, limits_of(rdma, nets, setting.cluster))
    suspects = (*explain(slow, 1.0), *explain(latency_shares(rdma, setting.cluster), 1.0))
    # A job tests both directions, so a pair is needed once.
    pairs_again = [*dict.fromkeys((min(cell), max(cell)) for cell in retests(suspects, names))]
    rounds = disjoint(pairs_again)[:ROUNDS_AGAIN_MAX]
    return tuple(_round(setting, ready, len(done) + number, one, AGAIN) for number, one in enumerate(rounds))


def _round(setting: Setting, ends: Mapping[str, End], number: int, pairs: Sequence[Cell], stage: str) -> Round:
    ports = iter(pick_ports(setting.seed, number, 3 * len(pairs)))
    return tuple(_job(setting, ends, pair, (next(ports), next(ports), next(ports)), stage) for pair in pairs)


def _job(setting: Setting, ends: Mapping[str, End], pair: Cell, ports: tuple[int, int, int], stage: str) -> Job:
    """Return one pair's job: the first writes to the second, their latency, then the second writes to the first."""
    one, other = pair
    to, latency, back = ports
    expect = setting.cluster.expect
    address = {name: setting.cluster.node(name).data_address for name in pair}

    def step(program: str, me: str, port: int, peer: str = "") -> Step:
        iterations = expect.rdma_iterations if program == BANDWIDTH else expect.rdma_latency_iterations
        size = ("--report_gbits", "-s", str(MESSAGE_BYTES)) if program == BANDWIDTH else ()
        argv = (program, "-F", *ends[me].words, "-p", str(port), "-n", str(iterations), *size, *([address[peer]] if peer else []))
        moved_s = iterations * MESSAGE_BYTES * 8 / 1e9 / SLOWEST_GBIT_S if program == BANDWIDTH else 0.0
        # A server also waits for the client's retries.
        return Step(argv, SLACK_S + moved_s + (0.0 if peer else SLACK_S), None if peer else port, RETRY_ON if peer else ())

    listener = (step(BANDWIDTH, other, to), step(LATENCY, other, latency), step(BANDWIDTH, other, back, one))
    caller = (step(BANDWIDTH, one, to, other), step(LATENCY, one, latency, other), step(BANDWIDTH, one, back))
    tests = [
        {"program": BANDWIDTH, "sender": one, "receiver": other},
        {"program": LATENCY, "sender": one, "receiver": other},
        {"program": BANDWIDTH, "sender": other, "receiver": one},
    ]
    used = {name: ends[name].port.name for name in pair}
    parts = (_part(setting, ends, other, listener), _part(setting, ends, one, caller))
    return Job(f"{one}-{other}", parts, {"stage": stage, "tests": tests, "ports": used})


def _part(setting: Setting, ends: Mapping[str, End], name: str, steps: tuple[Step, ...]) -> Part:
    iface = interface(setting.cluster.node(name), setting.facts[name].net.value, setting.cluster)
    return Part(name, steps, counters=globs(("*",) if iface is None else (iface.name,), (ends[name].port.hca,)))


# --------------------------------------------------------------------------- what came back


def read(measured: object) -> Rdma:
    """Return what was measured. Raises ParseError."""
    tests: list[Trial] = []
    failed: dict[str, tuple[str, str]] = {}
    nodes: dict[str, None] = {}
    for record in (record for one in read_rounds(measured) for record in one):
        nodes.update(dict.fromkeys(record.parts))
        failed.update(
            (node, (part.error, part.next_command))
            for node, part in record.parts.items()
            if part.error and not part.error.startswith(NOT_STARTED)
        )
        tests += _tests(record)
    return Rdma(tuple(tests), failed, tuple(nodes))


def _tests(record: Record) -> Iterator[Trial]:
    stage = as_str(record.data.get("stage"), "stage")
    lacking = (node for node, part in record.parts.items() if any(step.error == NOT_INSTALLED for step in part.steps))
    absent = next(lacking, "")
    for place, value in enumerate(as_list(record.data.get("tests"), "tests")):
        test = as_mapping(value, "test")
        program, sender, receiver = (as_str(test.get(key), key) for key in ("program", "sender", "receiver"))
        if sender not in record.parts or receiver not in record.parts or stage not in STAGES:
            raise ParseError(f"{NAME}: no test of {sender} and {receiver}")
        one = Trial(program, sender, receiver, stage)
        calling, listening = (_step(record.parts[name], place) for name in (sender, receiver))
        if absent:
            yield replace(one, error="perftest is not installed", absent=absent)
        elif calling is None:
            yield replace(one, error=record.parts[sender].error or record.parts[receiver].error or NOT_STARTED)
        else:
            yield _told(one, calling, listening)


def _step(part: PartResult, place: int) -> StepResult | None:
    return part.steps[place] if place < len(part.steps) else None


def _told(test: Trial, calling: StepResult, listening: StepResult | None) -> Trial:
    """Return what the client printed; where it says no more than that the other side went, what the server printed."""
    told = _parsed(test, calling)
    if told.error and told.kind in ("", "closed") and listening is not None and not calling.error:
        other = _parsed(test, listening)
        if other.error and other.kind:
            return other
    return told


def _parsed(test: Trial, step: StepResult) -> Trial:
    try:
        found = perftest.parse(f"{step.stdout}\n{step.stderr}")
    except ParseError as error:
        return replace(test, error=step.error or str(error))
    row, latency = found.largest(), found.smallest()
    if found.error is not None:
        return replace(test, error=found.error.text, kind=found.error.kind)
    if test.program == BANDWIDTH and row is not None:
        return replace(test, gbit_s=row.bw_average_gbit_s, mtu_bytes=found.mtu_bytes)
    if test.program == LATENCY and latency is not None and latency.t_typical_us is not None:
        return replace(test, typical_us=latency.t_typical_us, mtu_bytes=found.mtu_bytes)
    return replace(test, error=step.error or "it printed no row")


def limits_of(rdma: Rdma, nets: Mapping[str, NetFact | None], cluster: Cluster) -> dict[Cell, Limits]:
    """Return what each measured link should carry: by its rate where that is known, else by what the others carry."""
    ifaces = {node.name: interface(node, nets.get(node.name), cluster) for node in cluster.nodes}
    compared = compared_limits(rdma.cells((SCREENING,)), cluster.expect)
    infiniband = cluster.network.kind == "infiniband"
    found = {}
    for cell, test in rdma.last(BANDWIDTH).items():
        rate = link_rate_gbit_s(cell, ifaces, cluster)
        packet = test.mtu_bytes or rdma_mtu(link_mtu(cell, ifaces, cluster))
        found[cell] = compared if rate is None else rdma_limits(rate, packet, cluster.expect, infiniband=infiniband)
    return found


def bandwidth_shares(rdma: Rdma, limits: Mapping[Cell, Limits], stages: Sequence[str] = STAGES) -> dict[Cell, float]:
    """Return what each link carries as a share of its warning limit."""
    return {cell: gbit_s / max(limits[cell].warn_gbit_s, 1e-9) for cell, gbit_s in rdma.cells(stages).items()}


def latency_shares(rdma: Rdma, cluster: Cluster, stages: Sequence[str] = STAGES) -> dict[Cell, float]:
    """Return warning limit / typical latency of each pair, in both orders."""
    return {cell: cluster.expect.rdma_latency_warn_us / max(value, 1e-9) for cell, value in rdma.typical_us(stages).items()}


def slow_suspects(rdma: Rdma, limits: Mapping[Cell, Limits]) -> tuple[Suspect, ...]:
    """Return who is to blame for links below their warning limit, after what the second tests say."""
    first, again = (bandwidth_shares(rdma, limits, (stage,)) for stage in STAGES)
    return explain(after_again(first, again, 1.0), 1.0)


def late_suspects(rdma: Rdma, cluster: Cluster) -> tuple[Suspect, ...]:
    """Return who is to blame for latencies above the warning limit, after what the second tests say."""
    first, again = (latency_shares(rdma, cluster, (stage,)) for stage in STAGES)
    return explain(after_again(first, again, 1.0), 1.0)


def figures(measured: object) -> Iterable[Figure]:
    """Return what every link carries, and the latency of every pair. Raises ParseError."""
    rdma = read(measured)
    for cell, gbit_s in rdma.cells().items():
        yield Figure(NAME, "->".join(cell), "ib_write_bw", gbit_s, "Gbit/s")
    for cell, test in rdma.last(LATENCY).items():
        if test.typical_us is not None:
            yield Figure(NAME, "->".join(cell), "ib_send_lat", test.typical_us, "us", higher_is_better=False, noise=LATENCY_NOISE)


LATENCY_NOISE = 0.2
"""est.: share by which a latency differs between two measurements of a sound link."""
