"""The RDMA ports out of a dump of /sys/class/infiniband: `grep -r . …` ("path:text"), or cat's ("path: text", "gid0=… type=…").

The reading of the files is that of the fact `rdma`; here they are only put together. All-zero GIDs are empty entries, whose type
cannot be read: "Invalid argument" is normal there.
"""

from __future__ import annotations

import re

from netcheck.facts.question import Reply
from netcheck.facts.rdma import INFINIBAND
from netcheck.facts.rdma import parse as parse_fact
from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError
from r4090c.model import RdmaPort

TOOL = "sysfs-gid"
COMMAND = "grep -r . /sys/class/infiniband/*/ports/*/{state,phys_state,rate,link_layer,gids,gid_attrs}"

FILE = re.compile(
    r"(?:[^\s:]{0,200}/infiniband/(?P<hca>[\w.\-]{1,64})/)?(?P<path>ports/\d{1,3}/(?:state|phys_state|rate|link_layer|gids/\d{1,5}"
    r"|gid_attrs/(?:types|ndevs)/\d{1,5})|fw_ver|parent): ?(?P<text>.{0,120}?)\s*$"
)
DEVICE = re.compile(r"/infiniband/([A-Za-z][\w.\-]{0,63})(?:[/:\s]|$)")
GID = re.compile(r"gid(?P<index>\d{1,5})=(?P<gid>[0-9a-fA-F:]{39})(?: type=(?P<type>.{1,40}?))?(?: ndev=(?P<ndev>\S{1,64}).*)?$")
NOT_READ = ("cat: ", "grep: ")


def parse(text: str) -> tuple[RdmaPort, ...]:
    """Return the ports by device and number. Raises ParseError when the dump holds no port's state, or no name of a device."""
    lines = lines_of(text)
    names = [match.group(1) for line in lines if (match := DEVICE.search(line))]
    files: dict[str, str] = {}
    gids: dict[str, str] = {}
    port = "ports/1"
    for line in lines:
        if line.startswith(NOT_READ):
            continue
        if match := FILE.match(line.removeprefix("./")):
            hca = match["hca"] or (names[0] if names else None)
            if hca is None:
                raise ParseError("sysfs dump: no name of an RDMA device in it")
            path, told = match["path"], match["text"]
            if told.startswith(NOT_READ):
                continue
            if path.startswith("ports/"):
                port = "/".join(path.split("/")[:2])
            (gids if "/gid" in path else files)[f"{INFINIBAND}/{hca}/{path}"] = told
        elif names and (match := GID.match(line.strip())):
            here = f"{INFINIBAND}/{names[0]}/{port}"
            gids[f"{here}/gids/{match['index']}"] = match["gid"]
            for attribute, told in (("types", match["type"]), ("ndevs", match["ndev"])):
                if told and not told.startswith("cat:"):
                    gids[f"{here}/gid_attrs/{attribute}/{match['index']}"] = told
    ports = parse_fact(Reply(files=files, natives={"gids": gids, "readlink": {}}))
    if not ports:
        raise ParseError("sysfs dump: no state of an RDMA port in it")
    return ports
