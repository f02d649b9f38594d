"""show_gids: the GID table of every RDMA port.

Usable are RoCE v2 entries with an IPv4 address, of several the one in the cluster's subnet: never "always index 3".
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from netcheck.facts.rdma import ipv4_of
from netcheck.tools._reading import lines_of, not_output_of
from r4090c.errors import ParseError
from r4090c.model import RdmaGid

TOOL = "gids"
COMMAND = "show_gids"

ROW = re.compile(
    r"\s*(?P<hca>[A-Za-z][\w.\-]{0,63})\s+(?P<port>\d{1,3})\s+(?P<index>\d{1,5})\s+(?P<gid>(?:[0-9a-fA-F]{4}:){7}[0-9a-fA-F]{4})"
    r"(?:\s+(?P<ipv4>\d{1,3}(?:\.\d{1,3}){3}))?\s+(?P<kind>v1|v2|IB/RoCE v1|RoCE v[12])(?:\s+(?P<netdev>\S{1,64}))?\s*$"
)
FOOTER = re.compile(r"\s*n_gids_found=(\d{1,6})\s*$")
HEADER = re.compile(r"\s*DEV\s+PORT\s+INDEX\s+GID\b")


@dataclass(frozen=True, slots=True)
class PortGids:
    """The GIDs of one port, by index."""

    hca: str
    port: int
    gids: tuple[RdmaGid, ...]

    def usable(self, subnet: str | None = None) -> tuple[tuple[RdmaGid, str], ...]:
        """Return the RoCE v2 GIDs with their IPv4 address, only those in `subnet` if one is given.

        None at all: the port's interface has no address there. NCCL >= 2.21 finds the right one by itself.
        """
        network = ipaddress.ip_network(subnet, strict=False) if subnet else None
        found = ((gid, address) for gid in self.gids if gid.kind == "v2" and (address := ipv4_of(gid)) is not None)
        return tuple((gid, address) for gid, address in found if network is None or ipaddress.ip_address(address) in network)


def parse(text: str) -> tuple[PortGids, ...]:
    """Return the ports with their GIDs; none when show_gids found none.

    Raises ParseError when the text is not show_gids's, or has another number of rows than its last line says.
    """
    found: dict[tuple[str, int], dict[int, RdmaGid]] = {}
    header, told, rows = False, None, 0
    for line in lines_of(text):
        if match := ROW.match(line):
            rows += 1
            gid = _gid(match)
            found.setdefault((match["hca"], int(match["port"])), {})[gid.index] = gid
        elif match := FOOTER.match(line):
            told = int(match.group(1))
        else:
            header |= HEADER.match(line) is not None
    if not header and not rows:
        raise not_output_of(COMMAND, lines_of(text))
    if told != rows and (told is not None or not rows):
        raise ParseError(f"show_gids: {rows} rows, n_gids_found={told}: the text is cut or damaged")
    return tuple(
        PortGids(hca, port, tuple(gid for _, gid in sorted(gids.items()))) for (hca, port), gids in sorted(found.items())
    )


def _gid(match: re.Match[str]) -> RdmaGid:
    address = ipaddress.IPv6Address(match["gid"])
    mapped = address.ipv4_mapped
    return RdmaGid(
        index=int(match["index"]),
        address=str(address) if mapped is None else f"::ffff:{mapped}",
        kind="v2" if match["kind"].endswith("v2") else "v1",
        netdev=match["netdev"],
    )
