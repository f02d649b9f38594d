"""What TCP carries between the nodes: iperf3, both ways, with one and with several streams. Pure.

A second of each test finds the suspects; they are tested again, longer, against known-good nodes (netcheck.attribution), so that
what disturbed one second is not reported as a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from netcheck.attribution import Suspect, after_again, explain, retests
from netcheck.counters import globs
from netcheck.data_network import is_address
from netcheck.expected import (
    TCP_HEADER_BYTES,
    Cell,
    Limits,
    compared_limits,
    interface,
    is_ipv6,
    link_mtu,
    link_rate_gbit_s,
    tcp_limits,
)
from netcheck.facts.question import as_int, as_list, as_mapping, as_str
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
from netcheck.tools import iperf3
from r4090c.errors import ParseError
from r4090c.model import Cluster, Expect, NetFact

NAME, TITLE, LEVEL = "tcp", "TCP between pairs", Level.DEFAULT

SCREENING, AGAIN = "screening", "again"
SECONDS = {SCREENING: 1, AGAIN: 3}
"""est.: TCP fills a LAN within a tenth of a second; three seconds outlast what disturbs a single one."""
CONNECT_MS = 3000
"""A lost first SYN is sent again after 1 s (Linux)."""
SLACK_S = 10.0
"""est.: connecting, exchanging results, a node under load."""
PORT_TAKEN = "Address already in use"
"""What iperf3's server says when somebody has its port."""
TRIES_MAX = 3
"""est.: of a pair whose ports are taken; of 28,000 ports a busy node may have used some hundreds."""
ROUNDS_AGAIN_MAX = 6
"""est.: so many suspects are no longer single faults; the rest is reported as not tested again."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One iperf3. `gbit_s`: what arrived, None where it did not run, for the reason in `error`.

    `retransmits`: segments sent again, None = not told. `sent_gbyte`: what was sent. `absent`: the node without iperf3.
    """

    sender: str
    receiver: str
    streams: int
    stage: str
    gbit_s: float | None
    retransmits: int | None = None
    sent_gbyte: float = 0.0
    error: str = ""
    absent: str = ""
    pair: Cell = ("", "")
    """Who called, and who listened: not always sender and receiver."""

    def sent_again(self, mtu: int) -> float | None:
        """Return the share of segments that were sent again, None where iperf3 did not tell."""
        segments = self.sent_gbyte * 1e9 / max(1, mtu - TCP_HEADER_BYTES)
        return None if self.retransmits is None or segments < 1 else self.retransmits / segments


@dataclass(frozen=True, slots=True)
class Tcp:
    """All that was measured. `failed`: node -> why it took no part, with the command to look."""

    tests: tuple[Trial, ...]
    failed: Mapping[str, tuple[str, str]]
    nodes: tuple[str, ...]

    def cells(self, stage: str | None = None) -> dict[Cell, float]:
        """Return what each link carries: the best of its streams; of the last stage that tested it, unless one is named."""
        best: dict[tuple[str, Cell], float] = {}
        for test in self.tests:
            if test.gbit_s is not None:
                key = test.stage, (test.sender, test.receiver)
                best[key] = max(best.get(key, 0.0), test.gbit_s)
        stages = (SCREENING, AGAIN) if stage is None else (stage,)
        return {cell: value for wanted in stages for (of, cell), value in best.items() if of == wanted}

    def between(self, names: Collection[str]) -> Tcp:
        """Return only what concerns `names`: a bundle may be judged for fewer nodes, or be forged."""
        tests = tuple(test for test in self.tests if {test.sender, test.receiver, test.absent or test.sender} <= {*names})
        failed = {name: why for name, why in self.failed.items() if name in names}
        return Tcp(tests, failed, tuple(name for name in self.nodes if name in names))

    @property
    def silent(self) -> dict[Cell, str]:
        """Return link -> why it could not be measured. A pair whose ends did not come together is told once: caller, listener."""
        measured = self.cells()
        found: dict[Cell, str] = {}
        for test in self.tests:
            cell = test.sender, test.receiver
            if test.absent or test.stage != SCREENING or cell in measured:
                continue
            both = cell[::-1] not in measured
            found.setdefault(test.pair if both else cell, test.error)
        return found

    def of(self, cell: Cell, stage: str) -> tuple[Trial, ...]:
        """Return the tests of one link in one stage that found something."""
        own = (test for test in self.tests if (test.sender, test.receiver, test.stage) == (*cell, stage))
        return tuple(test for test in own if test.gbit_s is not None)

    def last(self, cell: Cell) -> tuple[Trial, ...]:
        """Return the tests of one link that count: those of the second try where there was one."""
        return self.of(cell, AGAIN) or self.of(cell, SCREENING)


# --------------------------------------------------------------------------- what runs


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return the rounds of pairs (neighbours in the ring, at Level.FULL all), then those that test the suspects again."""
    names = [node.name for node in setting.nodes]
    if not done:
        pairs = all_pairs(names) if setting.level >= Level.FULL else ring_pairs(names)
        return tuple(_round(setting, number, [(pair, (pair, pair[::-1])) for pair in one]) for number, one in enumerate(pairs))
    tcp = read({"rounds": list(done)})
    if any(test.stage == AGAIN for test in tcp.tests):
        return ()
    squatted = [pair for pair in _squatted(done) if not {*pair} & {*tcp.failed}]
    if squatted:
        rounds = disjoint(squatted)
        return tuple(
            _round(setting, len(done) + place, [(pair, (pair, pair[::-1])) for pair in one]) for place, one in enumerate(rounds)
        )
    nets = {node.name: setting.facts[node.name].net.value for node in setting.nodes}
    suspects = suspects_of(tcp, limits_of(tcp, nets, setting.cluster), nets, setting.cluster, again=False)
    names = [name for name in names if name not in tcp.failed]
    # Each kind by itself: who is good in one respect may be a suspect in another.
    cells = [cell for kind in (suspects.slow, suspects.lossy, suspects.uneven) for cell in retests(kind, names)]
    rounds = disjoint([*dict.fromkeys(cells)])[:ROUNDS_AGAIN_MAX]
    return tuple(_round(setting, len(done) + place, [(cell, (cell,)) for cell in one], AGAIN) for place, one in enumerate(rounds))


def _squatted(done: Sequence[Sequence[Mapping[str, Any]]]) -> list[Cell]:
    """Return the pairs (client, server) that are to be tested on other ports: somebody had one of theirs the last time.

    Also their own last tests may: the client's end of a connection keeps its port for a minute (TIME_WAIT).
    """
    tries: dict[Cell, list[bool]] = {}
    for record in (record for one in read_rounds({"rounds": list(done)}) for record in one):
        if record.data.get("stage") == SCREENING:
            client, server = (as_str(record.data.get(key), key) for key in ("client", "server"))
            part = record.parts.get(server)
            said = "".join(step.stdout + step.stderr for step in part.steps) if part is not None else ""
            tries.setdefault((client, server), []).append(PORT_TAKEN in said)
    return [pair for pair, taken in tries.items() if taken[-1] and len(taken) < TRIES_MAX]


def _round(setting: Setting, number: int, pairs: Sequence[tuple[Cell, tuple[Cell, ...]]], stage: str = SCREENING) -> Round:
    """Return one round; each of `pairs` is (the two nodes, the directions to test). The second node serves."""
    streams = stream_counts(setting.cluster.expect)
    ports = iter(pick_ports(setting.seed, number, sum(len(cells) for _, cells in pairs) * len(streams)))
    jobs = []
    for (client, server), cells in pairs:
        tests = [(cell, count, next(ports)) for cell in cells for count in streams]
        servers = tuple(_server(setting, server, port, stage) for _, _, port in tests)
        clients = tuple(_client(setting, client, server, cell, count, port, stage) for cell, count, port in tests)
        told = [{"sender": cell[0], "receiver": cell[1], "streams": count} for cell, count, _ in tests]
        data = {"stage": stage, "client": client, "server": server, "tests": told}
        parts = (_part(setting, server, servers), _part(setting, client, clients))
        jobs.append(Job(f"{client}-{server}", parts, data))
    return tuple(jobs)


def stream_counts(expect: Expect) -> tuple[int, ...]:
    """Return the numbers of streams to measure with: what one core carries, and what the link does."""
    return (1, expect.tcp_streams) if expect.tcp_streams > 1 else (1,)


def _part(setting: Setting, name: str, steps: tuple[Step, ...]) -> Part:
    node, net = setting.cluster.node(name), setting.facts[name].net.value
    iface = interface(node, net, setting.cluster)
    return Part(name, steps, counters=globs(("*",) if iface is None else (iface.name,), ()))


def _server(setting: Setting, name: str, port: int, stage: str) -> Step:
    argv = ("iperf3", "-s", "-1", "-p", str(port), *_bound(setting, name))
    return Step(argv, 2 * (SECONDS[stage] + SLACK_S), listens_on=port)


def _client(setting: Setting, client: str, server: str, cell: Cell, streams: int, port: int, stage: str) -> Step:
    address = setting.cluster.node(server).data_address
    argv = ["iperf3", "-c", address, "-p", str(port), *_bound(setting, client)]
    argv += ["-t", str(SECONDS[stage]), "-P", str(streams), "-J", "--connect-timeout", str(CONNECT_MS)]
    argv += ["-R"] if cell[0] == server else []
    return Step(tuple(argv), SECONDS[stage] + SLACK_S, retry_on=("Connection refused",))


def _bound(setting: Setting, name: str) -> tuple[str, ...]:
    """Return the words that keep a node on its data address; none where cluster.yaml gives a name, which may mean 127.0.1.1."""
    address = setting.cluster.node(name).data_address
    return ("-B", address) if is_address(address) else ()


# --------------------------------------------------------------------------- what came back


def read(measured: object) -> Tcp:
    """Return what was measured. Raises ParseError."""
    tests: dict[tuple[str, ...], list[Trial]] = {}
    failed: dict[str, tuple[str, str]] = {}
    nodes: dict[str, None] = {}
    for record in (record for one in read_rounds(measured) for record in one):
        nodes.update(dict.fromkeys(record.parts))
        failed.update((node, (part.error, part.next_command)) for node, part in record.parts.items() if _is_lost(part))
        own = [*_tests(record)]
        key = (own[0].stage, *own[0].pair, *dict.fromkeys(test.sender for test in own)) if own else ()
        tests[key] = own  # what was tried on other ports counts
    return Tcp(tuple(test for own in tests.values() for test in own), failed, tuple(nodes))


def _is_lost(part: PartResult) -> bool:
    """Return whether the node itself was not reached, rather than waited for a server that never came."""
    return bool(part.error) and not part.error.startswith(NOT_STARTED)


def _tests(record: Record) -> Iterator[Trial]:
    stage, client, server = (as_str(record.data.get(key), key) for key in ("stage", "client", "server"))
    if client not in record.parts or server not in record.parts or stage not in SECONDS:
        raise ParseError(f"{NAME}: no test of {client} and {server}")
    ends = {client, server}
    called = record.parts[client]
    lacking = (node for node in (server, client) if any(step.error == NOT_INSTALLED for step in record.parts[node].steps))
    absent = next(lacking, "")
    wanted = [as_mapping(test, "test") for test in as_list(record.data.get("tests"), "tests")]
    for place, test in enumerate(wanted):
        sender, receiver = as_str(test.get("sender"), "sender"), as_str(test.get("receiver"), "receiver")
        if {sender, receiver} != ends:
            raise ParseError(f"{NAME}: {sender} and {receiver} in a test of {client} and {server}")
        one = Trial(sender, receiver, as_int(test.get("streams"), "streams"), stage, None, pair=(client, server))
        if absent:
            yield replace(one, error="iperf3 is not installed", absent=absent)
        elif place < len(called.steps):
            yield _told(one, called.steps[place])
        else:
            yield replace(one, error=called.error or "not started")


def _told(test: Trial, step: StepResult) -> Trial:
    if step.error:
        return replace(test, error=step.error)
    try:
        found = iperf3.parse(step.stdout)
    except ParseError as error:
        return replace(test, error=str(error))
    if found.error is not None or found.received_gbit_s is None:
        return replace(test, error=(found.error or "nothing arrived").rpartition("etc.: ")[2])
    sent_gbyte = (found.sent_gbit_s or 0.0) / 8 * (found.seconds or 0.0)
    return replace(test, gbit_s=found.received_gbit_s, retransmits=found.retransmits, sent_gbyte=sent_gbyte)


def limits_of(tcp: Tcp, nets: Mapping[str, NetFact | None], cluster: Cluster) -> dict[Cell, Limits]:
    """Return what each measured link should carry: by its rate where that is known, else by what the others carry."""
    ifaces = {node.name: interface(node, nets.get(node.name), cluster) for node in cluster.nodes}
    compared = compared_limits(tcp.cells(SCREENING), cluster.expect)
    found = {}
    for cell in tcp.cells():
        rate = link_rate_gbit_s(cell, ifaces, cluster)
        ipv6 = any(is_ipv6(cluster.node(name).data_address) for name in cell)
        mtu = link_mtu(cell, ifaces, cluster)
        found[cell] = compared if rate is None else tcp_limits(rate, mtu, cluster.expect, ipv6=ipv6)
    return found


def slow_shares(tcp: Tcp, limits: Mapping[Cell, Limits], stage: str) -> dict[Cell, float]:
    """Return what each link carries as a share of its warning limit."""
    return {cell: gbit_s / max(limits[cell].warn_gbit_s, 1e-9) for cell, gbit_s in tcp.cells(stage).items()}


def lossy_shares(tcp: Tcp, nets: Mapping[str, NetFact | None], cluster: Cluster, stage: str) -> dict[Cell, float]:
    """Return threshold / share of segments sent again, of links whose rate is known and is the same at both ends.

    Behind a bottleneck of another rate TCP finds that rate by losing: there it is no fault.
    """
    ifaces = {node.name: interface(node, nets.get(node.name), cluster) for node in cluster.nodes}
    shares = {}
    for cell in tcp.cells(stage):
        speeds = {iface.speed_mbit_s if iface is not None else None for iface in (ifaces.get(name) for name in cell)}
        worst = lost_share(tcp.of(cell, stage), link_mtu(cell, ifaces, cluster))
        if worst is not None and len(speeds) == 1 and None not in speeds:
            shares[cell] = cluster.expect.tcp_sent_again_warn / max(worst, 1e-9)
    return shares


def lost_share(tests: Iterable[Trial], mtu: int) -> float | None:
    """Return the largest share of segments that one of the tests sent again, None where none tells."""
    return max((share for test in tests if (share := test.sent_again(mtu)) is not None), default=None)


def uneven_shares(tcp: Tcp, limits: Mapping[Cell, Limits], cluster: Cluster, stage: str) -> dict[Cell, float]:
    """Return of each link of known rate: what several streams carry / what they should, in relation to a single one.

    Virtual links are as fast as the cores happen to be free: there it says nothing.
    """
    shares = {}
    for cell in tcp.cells(stage):
        told = {test.streams: test.gbit_s for test in tcp.of(cell, stage) if test.gbit_s}
        if len(told) > 1 and limits[cell].ceiling_gbit_s is not None:
            fewest, most = min(told), max(told)
            shares[cell] = told[most] / told[fewest] / max(cluster.expect.tcp_streams_warn, 1e-9)
    return shares


@dataclass(frozen=True, slots=True)
class Suspects:
    """Who is to blame for what: links below their limit, segments sent again, streams that disturb each other."""

    slow: tuple[Suspect, ...]
    lossy: tuple[Suspect, ...]
    uneven: tuple[Suspect, ...]


def suspects_of(
    tcp: Tcp, limits: Mapping[Cell, Limits], nets: Mapping[str, NetFact | None], cluster: Cluster, *, again: bool = True
) -> Suspects:
    """Return the suspects, after what the second tests say (`again` False: before them)."""

    def found(shares: Callable[[str], dict[Cell, float]]) -> tuple[Suspect, ...]:
        first = shares(SCREENING)
        return explain(after_again(first, shares(AGAIN), 1.0) if again else first, 1.0)

    return Suspects(
        slow=found(lambda stage: slow_shares(tcp, limits, stage)),
        lossy=found(lambda stage: lossy_shares(tcp, nets, cluster, stage)),
        uneven=found(lambda stage: uneven_shares(tcp, limits, cluster, stage)),
    )


def figures(measured: object) -> Iterable[Figure]:
    """Return what every link carries, for each number of streams. Raises ParseError."""
    tcp = read(measured)
    for cell in tcp.cells():
        for test in tcp.last(cell):
            if test.gbit_s is not None:
                streams = "1 stream" if test.streams == 1 else f"{test.streams} streams"
                yield Figure(NAME, "->".join(cell), streams, test.gbit_s, "Gbit/s")
