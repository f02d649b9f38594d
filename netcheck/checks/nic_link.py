"""Whether the link under the data interface is sound: full duplex, all members of a bond up, seldom lost, as fast as the others'.

Judged are the cards themselves: those a bond or VLAN is made of, and never a virtual interface (container, test lab), which has
no link of its own. MTU, and the speed where cluster.yaml states one, are judged by `data-interface`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from netcheck.checks._majority import majority, others
from netcheck.checks._wording import counted, on, origin
from netcheck.data_network import cards_of, chosen_iface, is_up
from r4090c.model import Cluster, Finding, Iface, NetFact, Node, OsFact, Status

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "nic-link", "nic", "cluster", ("net",), ("os",)
RULE = "full duplex, all members of a bond up, fewer than {flaps_per_day_fail:g} losses of the link a day, one speed (all fail)"
SOURCE = "sysfs-class-net of the Linux kernel's documentation; est."

EXPECTED = "a link that stays up, full duplex"
DAY_S = 86_400.0


def check(nets: Mapping[str, NetFact], systems: Mapping[str, OsFact | None], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per fault of a node's card, else one pass. Skipped where there is no card, and on a loopback network."""
    if cluster.network.kind == "loopback":
        for name in nets:
            yield Finding(ID, name, Status.SKIP, "not applicable: all nodes are on one machine", EXPECTED)
        return
    chosen = {name: chosen_iface(net, cluster.node(name), cluster) for name, net in nets.items()}
    speeds = {name: iface.speed_mbit_s for name, iface in chosen.items() if iface is not None and iface.speed_mbit_s is not None}
    for name, net in nets.items():
        node, iface = cluster.node(name), chosen[name]
        if iface is None:
            remedy = f"r4090c preflight --only data-interface --nodes {name}"
            yield Finding(ID, name, Status.SKIP, "not applicable: no data interface", EXPECTED, "", remedy)
            continue
        cards = cards_of(iface, net)
        if not cards:
            yield Finding(ID, name, Status.SKIP, f"not applicable: {iface.name} is virtual, without a link of its own", EXPECTED)
            continue
        faults = [finding for card in cards for finding in _faults(node, iface, card, systems.get(name), cluster)]
        if cluster.network.rate_gbit_s is None:
            faults += _slower(node, iface, speeds)
        rate = f" {iface.speed_mbit_s / 1000:g} Gbit/s" if iface.speed_mbit_s else ""
        losses = [card.link_losses for card in cards if card.link_losses is not None]
        told = f"{' + '.join(card.name for card in cards)}{rate}" + (
            f", {counted(sum(losses), 'loss', 'losses')} of the link" if losses else ""
        )
        yield from faults or [Finding(ID, name, Status.PASS, told, EXPECTED)]


def _faults(node: Node, iface: Iface, card: Iface, system: OsFact | None, cluster: Cluster) -> Iterator[Finding]:
    look = on(node, f"ethtool {shlex.quote(card.name)}")
    if card.name != iface.name and not is_up(card):
        why = "the bond carries on with what is left of it, at a part of its rate: cable, transceiver or switch port"
        yield Finding(ID, node.name, Status.FAIL, f"{card.name} below {iface.name} is {card.operstate}", "up", why, look)
    if card.duplex == "half":
        why = "the two ends did not agree: one sends while the other does, and packets are lost under load; cable or switch port"
        yield Finding(ID, node.name, Status.FAIL, f"{card.name}: half duplex", "full duplex", why, look)
    uptime_s = system.uptime_s if system is not None else None
    limit = cluster.expect.flaps_per_day_fail
    if card.link_losses is not None and uptime_s is not None:
        a_day = card.link_losses / max(1.0, uptime_s / DAY_S)
        if a_day >= limit:
            observed = f"{card.name}: {counted(card.link_losses, 'loss', 'losses')} of the link since the boot, {a_day:.0f} a day"
            expected = f"fewer than {limit:g} a day{origin(cluster, 'flaps_per_day_fail')}"
            why = "each time all connections over it stall, RDMA ones break: reseat or change cable and transceiver"
            remedy = on(
                node, f"ethtool -m {shlex.quote(card.name)}; ethtool -S {shlex.quote(card.name)} | grep -iE 'err|fec|phy'"
            )
            yield Finding(ID, node.name, Status.FAIL, observed, expected, why, remedy)


def _slower(node: Node, iface: Iface, speeds: Mapping[str, int]) -> Iterator[Finding]:
    """Yield a finding for a link slower than on most nodes. Without a majority the fastest is what the others should be."""
    if iface.speed_mbit_s is None:
        return
    agreed = majority(speeds)
    usual = agreed.value if agreed.value is not None else max(speeds.values())
    if iface.speed_mbit_s < usual:
        rates = {name: f"{speed / 1000:g} Gbit/s" for name, speed in speeds.items()}
        right = f"{usual / 1000:g} Gbit/s, as on most nodes" if agreed.value is not None else f"{others(rates, node.name)}"
        why = "the link came up slower than it can: cable, transceiver or switch port"
        observed = f"{iface.name}: {iface.speed_mbit_s / 1000:g} Gbit/s"
        yield Finding(ID, node.name, Status.FAIL, observed, right, why, on(node, f"ethtool {shlex.quote(iface.name)}"))
