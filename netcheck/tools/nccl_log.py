"""The log of NCCL_DEBUG=INFO (or WARN): which network and transports NCCL really used, and its first warning.

A line is "host:pid:tid [gpu] NCCL INFO text", with the source ("misc/socket.cc:484") before NCCL on a WARN, a time in brackets
in front since 2.26, and whatever prefix a launcher puts there. The first WARN is the cause; what follows it is the fall.
"GDR 1" in the ring line is no proof of GPUDirect RDMA: only a channel's suffix /GDRDMA is.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from netcheck.data_network import unfit
from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError

TOOL = "nccl-log"
COMMAND = "NCCL_DEBUG=INFO (what a rank prints)"

DEBUG_LINE = re.compile(
    r"(?:\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]{0,8}\] )?"
    r"(?<![\w.\-])(?P<host>[A-Za-z0-9][\w.\-]{0,250}):(?P<pid>\d{1,9}):(?P<tid>\d{1,9}) \[(?P<gpu>\d{1,3})\] "
    r"(?:(?P<where>[\w./\-]{1,120}:\d{1,6}) )?NCCL (?P<level>INFO|WARN|TRACE|ABORT|ERROR) ?(?P<text>.*)"
)
VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
FOUND = re.compile(r"\[\d{1,3}\]([^\s:\[\]]{1,64}):(\S{1,100}?)<\d{1,5}>")
"""One interface of "NET/Socket : Using [0]eno1:10.0.0.11<0> [1]wg0:10.200.0.3<0>"."""
HCA = re.compile(r"\[\d{1,3}\]([\w.\-]{1,64}:\d{1,3}(?:/[\w.\-]{1,20})*)")
"""One port of "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eno1:10.0.0.11<0>"."""
CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : (\d{1,6})\[\w+\] -> (\d{1,6})\[\w+\].*? via (\S+(?: pointer\S*| Libfabric\S*)?)")
MODIFY_QP = re.compile(r"(?:Call to )?ibv_modify_qp failed with (?:error )?(?:(\d{1,4}) )?([^,\n]{0,80})(.*)")
MOST_WARNINGS = 50
"""A broken run repeats them by the thousand; the first ones tell."""


@dataclass(frozen=True, slots=True)
class Warn:
    """One NCCL WARN line. `gpu`: CUDA index on `host`; `where`: NCCL's source line."""

    host: str
    pid: int
    gpu: int
    where: str | None
    text: str


@dataclass(frozen=True, slots=True)
class QpError:
    """A queue pair that could not be connected. `link_local`: the local GID is fe80::…, good for one wire only."""

    errno: int | None
    error: str
    hca: str | None
    gid_index: int | None
    local_gid: str | None
    remote_gid: str | None
    link_local: bool


@dataclass(frozen=True, slots=True)
class NcclLog:
    """What a NCCL log tells; None = it does not tell.

    `network`: "IB" (RoCE as well), "Socket" or a plugin's name. `interfaces`: name -> address of NET/Socket; `hcas` like
    "mlx5_0:1/RoCE". `bootstrap`: interface -> address of the first contact. `unfit_interfaces`: those of both that carry no
    training (lo, docker, VPN), with what they are. `transports`: P2P, SHM, NET/IB, NET/Socket -> channels; `channels`: the
    same by full name ("P2P/direct pointer", "NET/IB/GDRDMA"). `gdrdma` None: no network channel was seen.
    `ranks_seen`: from the channels; `nranks`: from ncclCommInitRank. `env`: NCCL_* variables NCCL says it took.
    """

    version: str | None
    cuda_driver: int | None
    hosts: tuple[str, ...]
    network: str | None
    bootstrap: Mapping[str, str]
    interfaces: Mapping[str, str]
    hcas: tuple[str, ...]
    unfit_interfaces: Mapping[str, str]
    transports: Mapping[str, int]
    channels: Mapping[str, int]
    gdrdma: bool | None
    nranks: int | None
    ranks_seen: int
    init_complete: bool
    env: Mapping[str, str]
    warnings: tuple[Warn, ...]
    qp_error: QpError | None

    @property
    def cause(self) -> Warn | None:
        """The first warning, None when there is none."""
        return self.warnings[0] if self.warnings else None

    @property
    def p2p(self) -> bool:
        """True when GPUs talk by peer access: on a 4090 a grant of a patched driver that only a data check proves."""
        return "P2P" in self.transports


def parse(text: str) -> NcclLog:
    """Return what the log tells. Raises ParseError when no line is NCCL's."""
    return read(lines_of(text))


def debug_lines(lines: Iterable[str]) -> Iterator[re.Match[str]]:
    """Yield a match of DEBUG_LINE for each line of NCCL's."""
    for line in lines:
        if "NCCL" in line and (match := DEBUG_LINE.search(line)) is not None:
            yield match


def warnings_of(lines: Iterable[str]) -> Iterator[Warn]:
    """Yield the WARN lines in the order of the log."""
    for line in debug_lines(lines):
        if line["level"] in ("WARN", "ERROR") and line["text"].strip():
            yield Warn(line["host"], int(line["pid"]), int(line["gpu"]), line["where"], line["text"].strip())


def qp_error(text: str) -> QpError | None:
    """Return the queue pair error a line tells, None when it tells none."""
    match = MODIFY_QP.search(text)
    if match is None:
        return None
    errno, error, rest = match.groups()

    def told(pattern: str) -> str | None:
        found = re.search(pattern, rest)
        return found.group(1) if found else None

    index = told(r"GID index (\d{1,5})\b")
    local = told(r"local GID ([0-9A-Fa-f:.]{2,45})")
    return QpError(
        errno=int(errno) if errno else None,
        error=error.strip(),
        hca=told(r"on dev ([\w.\-]{1,64}(?::\d{1,3})?)"),
        gid_index=int(index) if index else None,
        local_gid=local,
        remote_gid=told(r"remote GIDs? ([0-9A-Fa-f:.]{2,45})"),
        link_local=_is_link_local(local),
    )


def read(lines: Iterable[str]) -> NcclLog:
    """Return what the lines tell. Raises ParseError when none is NCCL's."""
    lines = list(lines)
    texts = []
    hosts: dict[str, None] = {}
    for line in debug_lines(lines):
        texts.append(line["text"].strip())
        hosts[line["host"]] = None
    version = next((told.group(1) for text in lines if "NCCL version" in text and (told := VERSION.search(text))), None)
    if not texts and version is None:
        raise ParseError("no line of NCCL's debug log: run with NCCL_DEBUG=INFO")
    cuda_driver = nranks = network = None
    bootstrap: dict[str, str] = {}
    interfaces: dict[str, str] = {}
    hcas: dict[str, None] = {}
    env: dict[str, str] = {}
    channels: Counter[str] = Counter()
    ranks: set[int] = set()
    complete = False
    for text in texts:
        if match := re.match(r"cudaDriverVersion (\d{1,9})$", text):
            cuda_driver = int(match.group(1))
        elif match := re.match(r"Bootstrap ?: Using (?:\[\d+\])?([^\s:]{1,64}):(\S{1,100}?)<\d{1,5}>", text):
            bootstrap.setdefault(match.group(1), match.group(2))
        elif re.match(r"NET/Socket ?: Using", text):
            for name, address in FOUND.findall(text):
                interfaces.setdefault(name, address)
        elif re.match(r"NET/IB ?: Using", text):
            hcas.update(dict.fromkeys(HCA.findall(text.partition("; OOB")[0])))
        elif match := re.match(r"Using network (\S.{0,60})", text):
            network = match.group(1).strip()
        elif match := re.match(r"(NCCL_\w{1,60}) set by environment to (.{0,200}?)\.?$", text):
            env[match.group(1)] = match.group(2)
        elif match := CHANNEL.match(text):
            ranks.update((int(match.group(1)), int(match.group(2))))
            channels[_channel(match.group(3))] += 1
        elif match := re.match(r"ncclCommInit\w* .*\bnranks (\d{1,6})\b", text):
            nranks = int(match.group(1))
            complete |= "Init COMPLETE" in text
    if network is None and (hcas or interfaces):
        network = "IB" if hcas else "Socket"
    warnings = tuple(found for found, _ in zip(warnings_of(lines), range(MOST_WARNINGS), strict=False))
    net = [name for name in channels if name.startswith("NET/")]
    return NcclLog(
        version=version,
        cuda_driver=cuda_driver,
        hosts=tuple(hosts),
        network=network,
        bootstrap=bootstrap,
        interfaces=interfaces,
        hcas=tuple(hcas),
        unfit_interfaces={name: kind for name in (*bootstrap, *interfaces) if (kind := unfit(name)) is not None},
        transports=dict(_totals(channels)),
        channels=dict(channels),
        gdrdma=any("GDRDMA" in name for name in net) if net else None,
        nranks=nranks,
        ranks_seen=max(ranks) + 1 if ranks else 0,
        init_complete=complete,
        env=env,
        warnings=warnings,
        qp_error=next((error for warning in warnings if (error := qp_error(warning.text)) is not None), None),
    )


def _channel(via: str) -> str:
    """Return the channel's kind without the number of its device: "NET/IB/0/GDRDMA" -> "NET/IB/GDRDMA"."""
    return "/".join(part for part in via.split("/")[:6] if not re.fullmatch(r"\d+(?:\(\d+\))?", part))[:80]


def _totals(channels: Mapping[str, int]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for name, count in channels.items():
        parts = name.split("/")
        totals["/".join(parts[:2]) if parts[0] == "NET" else parts[0]] += count
    return totals


def _is_link_local(gid: str | None) -> bool:
    try:
        return gid is not None and ipaddress.IPv6Address(gid).is_link_local
    except ValueError:
        return False
