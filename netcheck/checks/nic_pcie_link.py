"""Whether the slots of the network cards that carry the training traffic are as fast as their ports."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import on
from netcheck.checks.gpu_pcie_width import link_command
from netcheck.topology import data_cards, rate_gbit_s
from r4090c.model import Cluster, Finding, KernelLog, NetFact, Node, PciDevice, RdmaPort, Status

ID, GROUP, NEEDS, OPTIONAL = "nic-pcie-link", "pcie", ("pci",), ("net", "rdma", "kernel_log")
RULE = (
    "the link of the data network's card carries its port's rate, or all that the card can (fail), with all lanes that card and"
    " slot have (warn)"
)
SOURCE = "PCIe 3.0 and 4.0 (8b/10b up to 5 GT/s, then 128b/130b); est. for the share of packet headers"

PAYLOAD_SHARE = 0.87
"""est.: 256 bytes of payload in packets with 26 bytes of header and framing, and flow control: what mlx5 cards reach."""


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` sends no gradients."""
    return node.gpus > 0


def check(
    node: Node,
    devices: tuple[PciDevice, ...],
    net: NetFact | None,
    rdma: tuple[RdmaPort, ...] | None,
    log: KernelLog | None,
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per card; `skip` where the cards of the data network, or their links, are not told."""
    judged = 0
    for card in data_cards(node, cluster, devices, net, rdma or ()):
        carries = capacity_gbit_s(card)
        if card.width is None or carries is None:
            continue
        judged += 1
        name = next(iter((*card.hcas, *card.netdevs)), card.pci)
        rate = rate_gbit_s(card, net, rdma or ())
        link = f"x{card.width} at {card.speed_gt_s:g} GT/s"
        kernel = dict(log.pcie_limited).get(card.pci, "") if log is not None else ""
        remedy = on(node, link_command(node, card.pci, card))
        room = min(card.width_max or card.width, card.upstream_width_max or card.width_max or card.width)
        observed = f"{link}: {carries:.0f} Gb/s"
        if rate is not None and carries < rate and not _at_its_best(card):
            why = (
                f"the port sends {rate:g} Gb/s and the slot does not: "
                + ("lanes are lost, reseat the card" if card.width < room else "move the card to a slot with more lanes")
                + (f". The kernel: {kernel}" if kernel else "")
            )
            yield Finding(ID, f"{node.name}/{name}", Status.FAIL, observed, f"at least {rate:g} Gb/s (its port)", why, remedy)
        elif card.width < room:
            why = "lanes are lost, so the card is badly seated or its slot is dirty: it still carries the port's rate, for now"
            yield Finding(ID, f"{node.name}/{name}", Status.WARN, observed, f"x{room}, as card and slot have", why, remedy)
        else:
            expected = "all lanes" if rate is None or carries < rate else f"at least {rate:g} Gb/s (its port)"
            yield Finding(ID, f"{node.name}/{name}", Status.PASS, observed, expected)
    if not judged:
        yield Finding(ID, node.name, Status.SKIP, "no card of the data network tells its PCIe link")


def _at_its_best(card: PciDevice) -> bool:
    """Return whether no slot would help: some ports send more than their card's own link carries (56 Gb/s on x8 at 8 GT/s)."""
    return (card.width, card.speed_gt_s) == (card.width_max, card.speed_max_gt_s)


def capacity_gbit_s(card: PciDevice) -> float | None:
    """Return what the link of a card carries of payload, one way; None when it is not told."""
    if card.width is None or card.speed_gt_s is None:
        return None
    coding = 8 / 10 if card.speed_gt_s <= 5 else 128 / 130
    return card.width * card.speed_gt_s * coding * PAYLOAD_SHARE
