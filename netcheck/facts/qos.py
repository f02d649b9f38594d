"""Flow and congestion control of the network cards: PFC and DSCP priorities over rtnetlink, RoCE's ECN from the vendor's sysfs.

Asked only where RDMA is wished: plain TCP needs none of it.
"""

from __future__ import annotations

import re

from netcheck.facts.question import Question, Reply, as_int, as_list, as_mapping
from r4090c.errors import ParseError
from r4090c.model import Cluster, IfaceQos, Node

NAME = "qos"
NET = "/sys/class/net"
ECN = ("roce_np", "roce_rp")
"""Notification point and reaction point of RoCE's congestion control (DCQCN). Only MLNX_OFED's driver shows them."""
PRIORITIES = 8
"""IEEE 802.1Q has eight."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`; nothing unless the data network is to be RDMA."""
    if not cluster.network.rdma:
        return Question()
    return Question(files=tuple(f"{NET}/*/ecn/{point}/enable/*" for point in ECN), natives={"dcb": [f"{NET}/*"]}, timeout_s=5)


def parse(reply: Reply) -> tuple[IfaceQos, ...]:
    """Return one entry an interface whose driver tells anything; none where nothing was asked. Raises ParseError."""
    if "probe" in reply.errors or "dcb" in reply.errors:
        raise ParseError(reply.errors.get("probe") or f"dcb: {reply.errors['dcb']}")
    answers = as_mapping(reply.natives.get("dcb", {}), "dcb")
    ecn = _ecn(reply)
    found = []
    for iface in sorted({*ecn, *(iface for iface, answer in answers.items() if answer is not None)}):
        answer = answers.get(iface)
        fields = {} if answer is None else as_mapping(answer, iface)
        mask = fields.get("pfc")
        pairs = [[as_int(number, iface) for number in as_list(pair, iface)] for pair in as_list(fields.get("dscp", []), iface)]
        if any(len(pair) != 2 for pair in pairs):
            raise ParseError(f"{iface}: expected [code point, priority]")
        found.append(
            IfaceQos(
                iface=iface,
                pfc=None if mask is None else tuple(bit for bit in range(PRIORITIES) if as_int(mask, iface) >> bit & 1),
                dscp=None if answer is None else tuple((point, priority) for point, priority in sorted(pairs)),
                ecn=ecn.get(iface),
            )
        )
    return tuple(found)


def _ecn(reply: Reply) -> dict[str, tuple[int, ...]]:
    """Return iface -> the priorities for which both ends of congestion control are on."""
    on: dict[str, list[set[int]]] = {}
    for path, text in reply.files.items():
        match = re.fullmatch(rf"{NET}/([^/]+)/ecn/({'|'.join(ECN)})/enable/([0-7])", path)
        if match:
            points = on.setdefault(match.group(1), [set() for _ in ECN])
            if text.strip() == "1":
                points[ECN.index(match.group(2))].add(int(match.group(3)))
    return {iface: tuple(sorted(set.intersection(*points))) for iface, points in on.items()}
