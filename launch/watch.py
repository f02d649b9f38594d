"""Watch what the nodes do: a sampler (launch/sampler.py) on each over SSH, reached again whenever it is lost.

Nothing of ours need be on a node: the sampler's source travels in argv. It ends by itself when we are gone.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from launch.live import DataLinks, Heard, Sample, Snapshot, data_links, parse_sample, silent, snapshot, stale_after_s, taken
from launch.sync import LEASES
from netcheck.facts import observe, questions
from netcheck.gather import PROBE_SOURCE
from r4090c.errors import ParseError, R4090cError
from r4090c.model import Cluster, Node
from r4090c.remote import Fleet, Shell, Stream, ssh_command

SAMPLER = files("launch").joinpath("sampler.py").read_text(encoding="utf-8")
_RUN = (
    "import sys,json,zlib,base64\n"
    "def main(packed):\n"
    " g={'__name__':'r4090c_node'}\n"
    " exec(compile(zlib.decompress(base64.b64decode(packed)),'r4090c','exec'),g)\n"
    " return g['main']\n"
    "main(sys.argv[1])(json.loads(sys.argv[3]),main(sys.argv[2]))"
)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
"""est.: before a lost node is tried again; doubled each time. A node that boots answers within seconds of its sshd."""
FACTS_S = 15.0
"""est.: interfaces and routes take 0.1 s, a name server that does not answer 6 s."""


def sampler_argv(request: dict[str, Any]) -> list[str]:
    """Return the command that runs the sampler on a node."""
    packed = [base64.b64encode(zlib.compress(source.encode(), 9)).decode() for source in (SAMPLER, LEASES)]
    return ["python3", "-I", "-S", "-c", _RUN, *packed, json.dumps(request)]


class Watch:
    """What `nodes` do now, as `snapshot` tells it; a context manager, one thread a node."""

    def __init__(self, fleet: Fleet, cluster: Cluster, nodes: Sequence[Node], interval_s: float) -> None:
        self.fleet, self.cluster, self.nodes, self.interval_s = fleet, cluster, tuple(nodes), interval_s
        now = time.time()
        self._heard = {node.name: Heard(node.name, since_s=now) for node in nodes}
        self._changed = threading.Condition()
        self._streams: dict[str, Stream] = {}
        self._closing = threading.Event()

    def __enter__(self) -> Watch:
        for node in self.nodes:
            threading.Thread(target=self._watch, args=(node,), daemon=True, name=f"watch-{node.name}").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for stream in list(self._streams.values()):
            stream.close()

    def snapshot(self, only: str | None = None) -> Snapshot:
        """Return what is known now. `only`: no run but this."""
        with self._changed:
            heard = [self._heard[node.name] for node in self.nodes]
        return snapshot(self.cluster.name, heard, self.interval_s, now_s=time.monotonic(), time_s=time.time(), only=only)

    def settle(self, timeout_s: float) -> None:
        """Wait until every node has given two samples, so that there are rates, or has been tried in vain."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while time.monotonic() < deadline and not all(one.before or one.tries for one in self._heard.values()):
                self._changed.wait(max(0.0, deadline - time.monotonic()))

    def _took(self, name: str, sample: Sample) -> None:
        with self._changed:
            self._heard[name] = taken(self._heard[name], sample, time.monotonic(), time.time())
            self._changed.notify_all()

    def _lost(self, name: str, why: str, next_command: str) -> None:
        with self._changed:
            self._heard[name] = silent(self._heard[name], why, next_command, time.time())
            self._changed.notify_all()

    def _watch(self, node: Node) -> None:
        """Keep a sampler on `node`; runs in a thread of its own."""
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                why, next_command = self._once(node), ssh_command(node)
            except R4090cError as error:  # not reached, or an ssh_config or key that is wrong
                why, next_command = error.observed, error.next_command
            if self._closing.is_set():
                return
            self._lost(node.name, why, next_command)
            self.fleet.drop(node.name)
            pause_s = FIRST_PAUSE_S if time.monotonic() - began > stale_after_s(self.interval_s) else pause_s * 2
            self._closing.wait(min(pause_s, LONGEST_PAUSE_S))

    def _once(self, node: Node) -> str:
        """Take samples of `node` until there come no more; return why. Raises NodeError when it is not reached."""
        shell = self.fleet.shell(node.name)
        links = self._data_links(shell, node)
        with self._changed:
            self._heard[node.name] = replace(self._heard[node.name], links=links)
        request = {
            "node": node.name,
            "interval_s": self.interval_s,
            "gpus": node.gpus > 0,
            "shared": [node.paths.shared],
        }
        stream = self._streams[node.name] = shell.stream(sampler_argv(request))
        stream.set_timeout(stale_after_s(self.interval_s))
        said = ""
        try:
            for line in stream.lines():
                try:
                    sample = parse_sample(line)
                except ParseError:
                    said = line.strip()[:200] or said
                    continue
                self._took(node.name, sample)
            rc = stream.rc
        finally:
            stream.close()
        if rc is not None:
            return f"its sampler ended with {rc}" + (f": {said}" if said else "")
        return "the connection to it broke, or it was silent for too long"

    def _data_links(self, shell: Shell, node: Node) -> DataLinks:
        """Return which links of `node` carry the training traffic: asked once a connection, since routes may change."""
        asked = {name: one.to_json() for name, one in questions(node, self.cluster).items() if name in ("net", "rdma")}
        answer = shell.ask(PROBE_SOURCE, {"questions": asked}, timeout_s=FACTS_S)
        value = answer.value if isinstance(answer.value, dict) else {}
        told = {**value, "sent_at_s": answer.sent_at_s, "received_at_s": answer.received_at_s}
        return data_links(node, self.cluster, *(observe(name, told, node, self.cluster) for name in ("net", "rdma")))
