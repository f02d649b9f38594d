"""Read the facts, measure what needs two ends, judge: all input and output of the preflight is here."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from netcheck.checks import REGISTRY, Check
from netcheck.conduct import carry_out
from netcheck.gather import gather
from netcheck.judge import judge, reached
from netcheck.measure import PLANNED, nonce, ports, rdma
from netcheck.measure.job import Level, Setting
from netcheck.port_tests import port_tests
from netcheck.raw import Raw, parse_raw
from r4090c.errors import ParseError, UsageError
from r4090c.model import Cluster, Finding, Node, NodeFacts
from r4090c.remote import Fleet, NodeError, Shell, Verdict, ssh_command

SLACK_S = 10.0
"""est.: what a loaded node may need on top of a measurement's own time limit before it is given up."""

TELL_TIME = (
    "import time\n"
    "def main(request):\n"
    "    received = time.time_ns()\n"
    "    return {'time_ns_received': received, 'time_ns_sent': time.time_ns()}\n"
)
"""Program for a node: nothing but its clock."""

Progress = Callable[[str], None]
"""Called with a few words about what happens now."""


def run_preflight(
    fleet: Fleet,
    cluster: Cluster,
    nodes: Sequence[Node],
    *,
    level: Level = Level.DEFAULT,
    checks: Sequence[Check] = REGISTRY,
    progress: Progress = lambda words: None,
) -> tuple[Raw, dict[str, NodeFacts], list[Finding]]:
    """Return what `nodes` of `cluster` said, the facts in it, and the findings of `checks`.

    At Level.QUICK only facts are read: one round trip, nothing is written or opened on a node; checks over measurements that
    the level leaves out say `skip`. Nothing is left on a node, also on Ctrl-C.
    """
    raw, facts = read_nodes(fleet, cluster, nodes, progress)
    alive = [node for node in nodes if node.name in reached(raw.reach)]
    wanted = wanted_measurements(checks, level, alive, cluster)
    if wanted:
        setting = Setting(tuple(alive), facts, cluster, level, secrets.randbits(64))
        raw = replace(raw, measurements=take_measurements(fleet, setting, wanted, progress))
    return raw, facts, judge(cluster, raw, facts, checks)


def read_nodes(fleet: Fleet, cluster: Cluster, nodes: Sequence[Node], progress: Progress) -> tuple[Raw, dict[str, NodeFacts]]:
    """Return what `nodes` said when asked for their facts, and the facts in it."""
    progress(f"reading {len(nodes)} nodes")
    raw = gather(fleet, cluster, [node.name for node in nodes])
    raw = read_clocks_again(fleet, raw, cluster.expect.clock_skew_warn_s / 2)
    return raw, parse_raw(raw, cluster)


def wanted_measurements(checks: Sequence[Check], level: Level, nodes: Sequence[Node], cluster: Cluster) -> set[str]:
    """Return the measurements that `checks` need at `level` about any of `nodes`."""
    return {
        need
        for check in checks
        if check.scope == "measurement" and check.level <= level and any(check.applies(node, cluster) for node in nodes)
        for need in check.needs
    }


def read_clocks_again(fleet: Fleet, raw: Raw, bound_s: float) -> Raw:
    """Return `raw` with a closer look at the clocks that are known to no better than ± `bound_s`.

    The way to a node includes starting Python there; many nodes on one loaded machine (a test lab, virtual machines) wait for
    each other. Asked one after the other, with nothing to do but tell the time, they answer at once. The better of the two
    round trips is kept.
    """
    answers = dict(raw.answers)
    for name, answer in raw.answers.items():
        if _clock_bound_s(answer) <= bound_s:
            continue
        again = fleet.map(lambda shell: shell.ask(TELL_TIME, None, timeout_s=SLACK_S), [name])[name]
        if isinstance(again, NodeError) or not isinstance(again.value, dict):
            continue
        closer = {**again.value, "sent_at_s": again.sent_at_s, "received_at_s": again.received_at_s}
        if _clock_bound_s(closer) < _clock_bound_s(answer):
            answers[name] = {**answer, **closer}
    return replace(raw, answers=answers)


def _clock_bound_s(answer: Mapping[str, Any]) -> float:
    """Return how far off a clock reading may be: half of the round trip's time that was not spent answering."""
    try:
        node_s = (answer["time_ns_sent"] - answer["time_ns_received"]) / 1e9
        return float(answer["received_at_s"] - answer["sent_at_s"] - node_s) / 2
    except (KeyError, TypeError):
        return math.inf


def take_measurements(fleet: Fleet, setting: Setting, wanted: Collection[str], progress: Progress) -> dict[str, Any]:
    """Return name -> JSON of the measurements `wanted`.

    The ports and the shared folder are looked at side by side; what loads the network comes after, one at a time.
    """
    nodes, cluster = setting.nodes, setting.cluster
    progress(f"measuring between {len(nodes)} nodes")
    with ThreadPoolExecutor(max_workers=1) as beside:
        try:
            of_ports = beside.submit(measure_ports, fleet, nodes) if ports.NAME in wanted else None
            found = {nonce.NAME: measure_nonce(fleet, cluster, nodes)} if nonce.NAME in wanted else {}
            if of_ports is not None:
                found[ports.NAME] = of_ports.result()
        except KeyboardInterrupt:
            fleet.close()  # ends the thread beside, which would otherwise be waited for
            raise
    for name, module in PLANNED.items():
        if name in wanted:
            found[name] = carry_out(module, fleet, setting, progress)
            if name == rdma.NAME:  # collectives are measured over the ports that a run would use
                nets = {node.name: setting.facts[node.name].net.value for node in nodes}
                with contextlib.suppress(ParseError):  # the check says so
                    tests = port_tests(found[name], nets, cluster, time.strftime("%Y-%m-%d", time.gmtime()))
                    setting = replace(setting, port_tests=tests)
    return found


def measure_ports(fleet: Fleet, nodes: Sequence[Node]) -> dict[str, Any]:
    """Return what `ports.read` takes: every node listens and calls every other at the same time."""
    requests = ports.schedule(nodes, secrets.randbits(64))

    def ask(shell: Shell) -> dict[str, Any]:
        answer = shell.ask(ports.SOURCE, requests[shell.node.name], timeout_s=ports.WINDOW_S + SLACK_S)
        try:
            return ports.record(answer.value, answer.received_at_s)
        except ParseError as error:
            return {"error": str(error)}

    return {"answers": {name: _told(answer) for name, answer in fleet.map(ask, requests).items()}}


def measure_nonce(fleet: Fleet, cluster: Cluster, nodes: Sequence[Node]) -> dict[str, Any]:
    """Return what `nonce.read` takes: every node writes a file, reads everybody's, removes its own.

    Each node holds its file as long as it is heard by us, so that none is left when we are interrupted, or killed.
    """
    token = secrets.token_hex(8)
    holders = _Holders(fleet, nonce.requests("hold", nodes, token, cluster.expect))

    def act(action: str, doers: Sequence[Node], written: Sequence[str]) -> dict[str, Any]:
        requests = nonce.requests(action, doers, token, cluster.expect, written)

        def ask(shell: Shell) -> Any:
            request = requests[shell.node.name]
            return shell.ask(nonce.SOURCE, request, timeout_s=request["answer_within_s"] + SLACK_S).value

        return {name: _told(answer) for name, answer in fleet.map(ask, requests).items()} if requests else {}

    try:
        wrote = holders.begin()
        there = [node for node in nodes if "error" not in wrote[node.name]]
        seen = act("read", there, [node.name for node in there])
        removed = holders.end()
        lost = [name for name, answer in removed.items() if answer.get("unreached")]
        alive = [node for node in there if node.name not in lost]
        if lost and alive:  # who lost power, or its cable, may have left a file that all others see
            act("remove", alive, lost)
    except KeyboardInterrupt:
        for node in nodes:
            fleet.drop(node.name)  # by which each removes its own
        raise
    return {"write": wrote, "read": seen, "remove": {node.name: removed[node.name] for node in there}}


class _Holders:
    """Nodes that hold a file each: a thread and a conversation a node."""

    def __init__(self, fleet: Fleet, requests: Mapping[str, Mapping[str, Any]]) -> None:
        self.fleet, self.requests = fleet, requests
        self.wrote: dict[str, Mapping[str, Any]] = {}
        self.settled = {name: threading.Event() for name in requests}
        self.stops: dict[str, Callable[[], None]] = {}
        self.futures: dict[str, Future[Mapping[str, Any]]] = {}

    def begin(self) -> dict[str, Mapping[str, Any]]:
        """Let all write; return what each says of that."""
        executor = ThreadPoolExecutor(max_workers=max(1, len(self.requests)), thread_name_prefix="holder")
        self.futures = {name: executor.submit(self._hold, name) for name in self.requests}
        executor.shutdown(wait=False)
        deadline = time.monotonic() + nonce.BEGIN_S
        for name, event in self.settled.items():
            if not event.wait(max(0.0, deadline - time.monotonic())):  # the others do not hold theirs for ever
                self.wrote.setdefault(name, self._give_up(name, nonce.BEGIN_S))
        return {name: self.wrote[name] for name in self.requests}

    def end(self) -> dict[str, Mapping[str, Any]]:
        """Let all remove what they wrote; return what each says of that."""
        for stop in [*self.stops.values()]:
            stop()
        limit_s = nonce.ANSWER_WITHIN_S + SLACK_S
        _, late = wait(self.futures.values(), timeout=limit_s)
        return {
            name: self._give_up(name, limit_s) if future in late else future.result() for name, future in self.futures.items()
        }

    def _give_up(self, name: str, limit_s: float) -> Mapping[str, Any]:
        """Close the connection to a node that did not answer; return what is told of it."""
        self.fleet.drop(name)
        node = self.fleet.nodes[name]
        return _told(NodeError(name, Verdict.TIMEOUT, f"no answer within {limit_s:g} s", "", ssh_command(node)))

    def _hold(self, name: str) -> Mapping[str, Any]:
        def told(event: Any) -> None:
            self.wrote[name] = _told(event)
            self.settled[name].set()

        request = self.requests[name]
        limit_s = request["hold_s"] + 2 * request["answer_within_s"] + SLACK_S
        try:
            conversation = self.fleet.shell(name).converse(nonce.SOURCE, request, timeout_s=limit_s)
            self.stops[name] = conversation.stop
            answer = _told(conversation.answer(told))
            return _told(answer.get("remove", answer))
        except NodeError as error:
            self.wrote.setdefault(name, _told(error))
            return _told(error)
        finally:
            self.wrote.setdefault(name, {"error": "nothing was told", "unreached": True})
            self.settled[name].set()


def _told(answer: Any) -> Mapping[str, Any]:
    if isinstance(answer, NodeError):
        return {"error": answer.observed, "unreached": True, "next_command": answer.next_command}
    if not isinstance(answer, dict):
        return {"error": f"the node answered {type(answer).__name__}, not an object", "unreached": True}
    return answer


def select_checks(only: Iterable[str], skip: Iterable[str]) -> tuple[Check, ...]:
    """Return the checks whose group or id is in `only` (all when it is empty) and not in `skip`, in the order of the registry.

    Raises UsageError for a name that is neither a group nor a check, with the nearest one.
    """
    only, skip = tuple(only), tuple(skip)
    known = list(dict.fromkeys([check.group for check in REGISTRY] + [check.id for check in REGISTRY]))
    for option, names in (("--only", only), ("--skip", skip)):
        for name in names:
            if name not in known:
                near = get_close_matches(name, known, n=1, cutoff=0.6)
                groups = ", ".join(dict.fromkeys(check.group for check in REGISTRY))
                command = f"r4090c preflight {option} {near[0]}" if near else "r4090c preflight --help"
                raise UsageError(
                    option, f"no check or group is called {name!r}", f"a group ({groups}) or the id of a check", command
                )
    named = {*only}
    chosen = [check for check in REGISTRY if {check.id, check.group} & named or not (only or check.asked)]
    chosen = [check for check in chosen if check.id not in skip and check.group not in skip]
    if not chosen:
        raise UsageError("--skip", "no check is left", "at least one", "r4090c preflight")
    return tuple(chosen)
