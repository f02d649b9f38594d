"""RDMA ports and their GID tables from sysfs (Documentation/ABI/stable/sysfs-class-infiniband).

Normal and no fault: an all-zero GID (an empty entry; reading its type fails with EINVAL), and soft devices (rxe, siw) without
`device/`, hca_type, board_id and firmware, whose rate is a dummy.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from netcheck.facts.question import Question, Reply, as_int, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import Cluster, Node, RdmaGid, RdmaPort

NAME = "rdma"
INFINIBAND = "/sys/class/infiniband"


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`."""
    ports = f"{INFINIBAND}/*/ports/*"
    return Question(
        files=(
            *(f"{ports}/{attribute}" for attribute in ("state", "phys_state", "rate", "link_layer", "sm_lid")),
            f"{INFINIBAND}/*/fw_ver",
            f"{INFINIBAND}/*/board_id",
            f"{INFINIBAND}/*/parent",
            f"{INFINIBAND}/*/device/numa_node",
            f"{INFINIBAND}/*/device/net/*/dev_port",
        ),
        natives={"gids": [ports], "readlink": [f"{INFINIBAND}/*"]},
    )


def parse(reply: Reply) -> tuple[RdmaPort, ...]:
    """Return the ports by device and number; none at all when the node has no RDMA device. Raises ParseError."""
    texts = dict(reply.files)
    texts.update({path: as_str(text, path) for path, text in as_mapping(reply.native("gids"), "gids").items()})
    links = as_mapping(reply.native("readlink"), "readlink")
    found = sorted(
        (match.group(1), int(match.group(2)))
        for match in (re.fullmatch(rf"{INFINIBAND}/([^/]+)/ports/(\d{{1,3}})/state", path) for path in texts)
        if match
    )
    return tuple(_port(texts, hca, port, as_str(links.get(f"{INFINIBAND}/{hca}", ""), "readlink")) for hca, port in found)


def roce_v2_ipv4(port: RdmaPort) -> tuple[tuple[RdmaGid, str], ...]:
    """Return the GIDs usable for RoCE over IPv4, each with its IPv4 address; several when there are VLANs."""
    return tuple((gid, address) for gid in port.gids if gid.kind == "v2" and (address := ipv4_of(gid)) is not None)


def ipv4_of(gid: RdmaGid) -> str | None:
    """Return the IPv4 address inside a GID like ::ffff:10.10.0.11, None when it holds none."""
    try:
        mapped = ipaddress.IPv6Address(gid.address).ipv4_mapped
    except ValueError:
        return None
    return None if mapped is None else str(mapped)


def _port(texts: Mapping[str, str], hca: str, port: int, link: str) -> RdmaPort:
    device, here = f"{INFINIBAND}/{hca}", f"{INFINIBAND}/{hca}/ports/{port}"

    def line(path: str) -> str | None:
        return texts[path].strip() or None if path in texts else None

    soft = "/virtual/" in link or f"{device}/parent" in texts
    link_layer = line(f"{here}/link_layer") or ""
    gids = _gids(texts, here, link_layer)
    numa = line(f"{device}/device/numa_node")
    return RdmaPort(
        hca=hca,
        port=port,
        state=_enum(line(f"{here}/state"), f"state of {hca}:{port}"),
        phys_state=_enum(line(f"{here}/phys_state") or "", f"phys_state of {hca}:{port}"),
        link_layer=link_layer,
        rate_gbit_s=None if soft else _rate(line(f"{here}/rate"), f"rate of {hca}:{port}"),
        netdev=next((gid.netdev for gid in gids if gid.netdev), None) or _netdev(texts, device, port) or line(f"{device}/parent"),
        firmware=line(f"{device}/fw_ver"),
        numa=None if numa is None else as_int(numa, f"numa_node of {hca}"),
        gids=gids,
        board=line(f"{device}/board_id"),
        sm_lid=_lid(line(f"{here}/sm_lid"), f"sm_lid of {hca}:{port}"),
    )


def _lid(text: str | None, what: str) -> int | None:
    """Return a local identifier, which the kernel prints as 0x1; None when it is not told."""
    if text is None:
        return None
    match = re.fullmatch(r"0x([0-9a-fA-F]{1,8})", text)
    if not match:
        raise ParseError(f"{what}: {text[:80]!r}")
    return int(match.group(1), 16)


def _enum(text: str | None, what: str) -> str:
    """Return the word of "4: ACTIVE"; "" stays "". Raises ParseError on anything else."""
    if text == "":
        return ""
    match = re.fullmatch(r"\d+: *(\S.*)", text or "")
    if not match:
        raise ParseError(f"{what}: {text!r:.80}")
    return match.group(1)


def _rate(text: str | None, what: str) -> float | None:
    """Return Gbit/s from "100 Gb/sec (4X EDR)"; None when it is not told."""
    if text is None:
        return None
    match = re.match(r"(\d{1,6}(?:\.\d{1,6})?) Gb/sec", text)
    if not match:
        raise ParseError(f"{what}: {text[:80]!r}")
    return float(match.group(1))


def _gids(texts: Mapping[str, str], here: str, link_layer: str) -> tuple[RdmaGid, ...]:
    gids = []
    for path, text in texts.items():
        match = re.fullmatch(rf"{re.escape(here)}/gids/(\d{{1,5}})", path)
        if not match:
            continue
        try:
            address = ipaddress.IPv6Address(text.strip())
        except ValueError as error:
            raise ParseError(f"{path}: {error}") from error
        if int(address) == 0:
            continue
        mapped = address.ipv4_mapped
        kind = texts.get(f"{here}/gid_attrs/types/{match.group(1)}", "").strip()
        gids.append(
            RdmaGid(
                index=int(match.group(1)),
                address=str(address) if mapped is None else f"::ffff:{mapped}",  # str() differs between Python 3.12 and 3.13
                kind="ib" if link_layer == "InfiniBand" else "v2" if kind == "RoCE v2" else "v1",
                netdev=texts.get(f"{here}/gid_attrs/ndevs/{match.group(1)}", "").strip() or None,
            )
        )
    return tuple(sorted(gids, key=lambda gid: gid.index))


def _netdev(texts: Mapping[str, str], device: str, port: int) -> str | None:
    """Return the net device of an InfiniBand port: the one whose dev_port is the port's number less one."""
    for path in sorted(texts):
        match = re.fullmatch(rf"{re.escape(device)}/device/net/([^/]+)/dev_port", path)
        if match and texts[path].strip() == str(port - 1):
            return match.group(1)
    return None
