"""How findings speak about links between nodes: whom to name, and where to look. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from netcheck.attribution import Everything, Link, Receiver, Sender, Suspect
from netcheck.checks._wording import listed, on, origin
from netcheck.expected import Cell, Limits
from r4090c.model import Cluster, Iface


@dataclass(frozen=True, slots=True)
class Blame:
    """One culprit as a finding names it. `nodes`: one, the two ends of a link, or none when it is all of them.

    `sends`, `receives`: the links that prove it, by the role of the culprit; of a single link and of all links in `sends`.
    """

    subject: str
    nodes: tuple[str, ...]
    sends: tuple[Cell, ...] = ()
    receives: tuple[Cell, ...] = ()
    certain: bool = True

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All links that prove it."""
        return (*self.sends, *self.receives)


def blames(suspects: Iterable[Suspect], cluster: Cluster) -> list[Blame]:
    """Return the culprits; a node that is slow in both directions is one of them."""
    found: dict[str, Blame] = {}
    for suspect in suspects:
        if isinstance(suspect, Everything):
            found[cluster.name] = Blame(cluster.name, (), suspect.cells)
        elif isinstance(suspect, Link):
            found["->".join(suspect.cells[0])] = Blame(
                "->".join(suspect.cells[0]), suspect.cells[0], suspect.cells, certain=suspect.certain
            )
        else:
            known = found.get(suspect.node, Blame(suspect.node, (suspect.node,)))
            sends = suspect.cells if isinstance(suspect, Sender) else known.sends
            receives = suspect.cells if isinstance(suspect, Receiver) else known.receives
            found[suspect.node] = Blame(suspect.node, (suspect.node,), sends, receives)
    return list(found.values())


def roles(blame: Blame) -> str:
    """Return what a node that is to blame does."""
    verbs = [verb for verb, cells in (("sends", blame.sends), ("receives", blame.receives)) if cells]
    return f"{' and '.join(verbs)} slowly"


def partners(blame: Blame) -> str:
    """Return the other ends of a culprit's links: "to node02, node03; from node02"."""
    told = []
    if blame.sends:
        told.append(f"to {listed(receiver for _, receiver in blame.sends)}")
    if blame.receives:
        told.append(f"from {listed(sender for sender, _ in blame.receives)}")
    return "; ".join(told)


def span(values: Sequence[float], unit: str = "Gbit/s") -> str:
    """Return "0.93–9.41 Gbit/s", one figure where they are alike."""
    low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in (min(values), max(values)))
    return f"{low}–{high} {unit}" if low != high else f"{low} {unit}"


def wanted(limits: Limits, cluster: Cluster) -> str:
    """Return what a link should carry, with where the figure comes from."""
    told = "".join(origin(cluster, field) for field in limits.fields)
    return f"at least {limits.warn_gbit_s:.3g} Gbit/s ({limits.how}){told}"


def look_at(name: str, iface: Iface | None, cluster: Cluster) -> str:
    """Return the command that shows what is wrong with a node's end of its links: rate, errors, and rate limits left behind."""
    if iface is None:
        return on(cluster.node(name), "ip -s -s link; tc qdisc show")
    device = shlex.quote(iface.name)
    return on(cluster.node(name), f"ethtool {device}; ip -s -s link show dev {device}; tc -s qdisc show dev {device}")


def why_slow(blame: Blame) -> str:
    """Return why a culprit matters, and what it may be."""
    ring = "a collective is as fast as its slowest link"
    if not blame.nodes:
        return f"{ring}; what all links share is to blame: the switch, the MTU, or a rate in cluster.yaml above that of the cards"
    if len(blame.nodes) == 1:
        return f"{ring}; its peers do well with each other: its cable, transceiver, switch port or slot, or a rate limit"
    if blame.certain:
        return f"{ring}; both ends do well with others: what lies between them, such as a link of a bundle or a route"
    return f"{ring}; too few links were measured to tell this one from its ends"


def passes(cells: Mapping[Cell, float], blamed: Iterable[Blame], unit: str = "Gbit/s") -> Iterator[tuple[str, str]]:
    """Yield (node, what its links carry) for every node that is not named itself."""
    blamed = list(blamed)
    named = {blame.subject for blame in blamed}
    bad = {cell for blame in blamed for cell in blame.cells}
    for name in dict.fromkeys(name for cell in cells for name in cell):
        sends = [value for cell, value in cells.items() if cell[0] == name and cell not in bad]
        receives = [value for cell, value in cells.items() if cell[1] == name and cell not in bad]
        told = [f"{verb} {span(values, unit)}" for verb, values in (("sends", sends), ("receives", receives)) if values]
        if name not in named and told:
            links = len(sends) + len(receives)
            yield name, f"{', '.join(told)} ({links} link{'s' if links > 1 else ''})"
