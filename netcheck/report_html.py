"""A preflight as one HTML page that needs nothing else: to be read, printed, mailed, kept beside a run. Pure.

Whatever a node said is hostile: every text goes through `e`, nothing of it ever stands in a script, a style or an attribute that
acts. The page forbids itself everything but its own style and script by a Content-Security-Policy with their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from netcheck.checks import REGISTRY
from netcheck.checks._majority import majority
from netcheck.checks._reach import verdict_of
from netcheck.data_network import data_iface, peers_of
from netcheck.diff import Diff
from netcheck.diff import told as told_diff
from netcheck.figures import matrices, nodes_of, number, summaries
from netcheck.judge import verdict
from netcheck.report import Outcome, Row, drawn_together, in_words
from netcheck.report_drawing import cut, e, heat_map, topology, worst_of
from r4090c import __version__
from r4090c.model import Fact, Finding, Gpu, Node, NodeFacts, Status

STYLE = files("netcheck").joinpath("report.css").read_text(encoding="utf-8")
SCRIPT = files("netcheck").joinpath("report.js").read_text(encoding="utf-8")
ORDER = (Status.FAIL, Status.UNKNOWN, Status.WARN)
SYMBOLS = {Status.FAIL: "✕", Status.UNKNOWN: "?", Status.WARN: "!", Status.PASS: "✓", Status.SKIP: "–"}
"""Beside every colour a sign: statuses are told apart without colours, and in print."""
VERDICTS = {"fit": "pass", "not fit": "fail", "could not tell": "unknown"}
PROGRAMS = ("ssh", "r4090c", "sudo", "ssh-keygen", "ssh-keyscan", "ssh-copy-id", "ping", "mv", "ls", "timeout", "export")
"""What a remedy to paste begins with; anything else is something to be done by hand."""
SUBJECTS_SHOWN = 6
GRID_WIDTH, GRID_NAMES, GRID_COLUMN = 1190, 305, 30
"""Pixels: of the page, of the two columns with names, and of a node's column (report.css)."""
MATRICES_MAX = 8
"""est.: heat maps on a page; there are four kinds (TCP with one and several streams, RDMA bandwidth and latency)."""


def page(outcome: Outcome) -> str:
    """Return the page."""
    title = f"{outcome.cluster.name}: {verdict(outcome.findings)}"
    sections = [
        ("mend", "To mend", _mend(outcome)),
        ("since", "Since the last fit preflight", _since(outcome.diff)),
        ("checks", "Checks and nodes", _grid(outcome)),
        ("network", "Bandwidth and latency between nodes", _maps(outcome)),
        ("nodes", "Nodes", _nodes(outcome)),
        ("topology", "Topology", topology(outcome.cluster, outcome.facts, _worst(outcome.findings))),
        ("figures", "Measured figures", _figures(outcome)),
        ("all", "All findings", _all(outcome)),
    ]
    shown = [(anchor, heading, body) for anchor, heading, body in sections if body]
    nav = "".join(f'<a href="#{anchor}">{e(heading)}</a>' for anchor, heading, _ in shown)
    body = "".join(
        f'<section id="{anchor}"><h2>{e(heading)}</h2><div class="wide">{text}</div></section>' for anchor, heading, text in shown
    )
    policy = f"default-src 'none'; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" content="no-referrer">'
        f"<title>{e(title)}</title><style>{STYLE}</style></head><body>\n"
        f"{_head(outcome)}<nav>{nav}</nav></header>\n<main>{body}</main>\n"
        f'<footer>r4090c {e(__version__)}. What each check expects: <span class="mono">r4090c checks</span>. '
        "“unknown” is never a pass: it could not be told.</footer>\n"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    """Return `text` as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _head(outcome: Outcome) -> str:
    word = verdict(outcome.findings)
    nodes = len(outcome.raw.reach)
    meta = [
        f"{nodes} node{'s' if nodes != 1 else ''}",
        f"{len(outcome.findings)} findings",
        f"level {outcome.level}",
        f"took {outcome.duration_s:.1f} s",
        f"started {outcome.raw.started_at.replace('T', ' ')}",
    ]
    return (
        f'<header><h1><span class="badge verdict {VERDICTS[word]}">{e(word)}</span>{e(outcome.cluster.name)}</h1>'
        f'<p class="lead">{e(in_words(outcome.findings))}</p>'
        f'<div class="meta">{"".join(f"<span>{e(text)}</span>" for text in meta)}</div>'
    )


def _sign(status: Status) -> str:
    return f'<b class="{status.value}">{SYMBOLS[status]}</b>'


def _badge(status: Status) -> str:
    return f'<span class="badge {status.value}">{SYMBOLS[status]} {status.value}</span>'


# --------------------------------------------------------------------------- what is not a pass


def _mend(outcome: Outcome) -> str:
    counts = Counter(finding.status for finding in outcome.findings)
    rows = [row for status in ORDER for row in drawn_together([one for one in outcome.findings if one.status is status])]
    rest = ", ".join(f"{counts[status]} {status.value}" for status in (Status.PASS, Status.SKIP) if counts[status])
    if not rows:
        return f'<p class="pass">Nothing: {e(rest)}.</p>'
    buttons = "".join(_button(status, counts[status]) for status in ORDER if counts[status])
    buttons = f'<button type="button" data-show="all" aria-pressed="true">all {len(rows)}</button>{buttons}'
    search = '<input type="search" placeholder="node, check or word" aria-label="show only findings with these words">'
    body = "".join(map(_mend_row, rows))
    return (
        f'<div class="bar" hidden>{buttons}{search}</div>'
        '<table class="findings"><thead><tr><th>status</th><th>where</th><th>check</th><th>what was seen, and what mends it</th>'
        f'</tr></thead><tbody>{body}</tbody></table><p class="none" hidden>Nothing matches.</p>'
        f'<p class="soft">{e(rest)}</p>'
    )


def _button(status: Status, count: int) -> str:
    word = status.value
    return f'<button type="button" data-show="{word}" aria-pressed="false">{_sign(status)} {word} {count}</button>'


def _mend_row(row: Row) -> str:
    finding = row.finding
    expected = f"<div>expected: {e(finding.expected)}</div>" if finding.expected and len(row.checks) == 1 else ""
    why = f'<div class="why">{e(finding.why)}</div>' if finding.why else ""
    others = ""
    if finding.remedy and len(row.subjects) > 1:
        others = f'<div class="soft">likewise: {e(_listed(row.subjects[1:]))}</div>'
    return (
        f'<tr data-status="{row.status.value}"><td>{_badge(row.status)}</td>'
        f'<td class="mono">{e(_listed(row.subjects))}</td><td class="mono">{_listed_checks(row.checks)}</td>'
        f'<td><div class="observed">{e(finding.observed)}</div>{expected}{why}{_fix(finding.remedy)}{others}</td></tr>'
    )


def _fix(remedy: str) -> str:
    """Return a remedy: a command with a button that copies it, or words."""
    if not remedy:
        return ""
    if remedy.split(" ", 1)[0] in PROGRAMS:
        return f'<div class="fix"><code>{e(remedy)}</code><button type="button" data-copy hidden>copy</button></div>'
    return f'<div class="fix"><span>→ {e(remedy)}</span></div>'


def _listed(names: Sequence[str]) -> str:
    if len(names) <= SUBJECTS_SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: SUBJECTS_SHOWN - 1])} +{len(names) - SUBJECTS_SHOWN + 1} more"


WHAT: Mapping[str, str] = {check.id: check.what for check in REGISTRY}
GROUP_OF: Mapping[str, str] = {check.id: check.group for check in REGISTRY}


def _listed_checks(checks: Sequence[str]) -> str:
    shown = [f'<span title="{e(WHAT.get(check, ""))}">{e(check)}</span>' for check in checks[:SUBJECTS_SHOWN]]
    more = f" +{len(checks) - SUBJECTS_SHOWN} more" if len(checks) > SUBJECTS_SHOWN else ""
    return ", ".join(shown) + more


def _since(diff: Diff | None) -> str:
    if diff is None:
        return ""
    colours = {"yellow": "warn", "green": "pass", "": ""}
    return "".join(f'<div class="{colours[colour]}">{e(text)}</div>' for colour, text in told_diff(diff))


# --------------------------------------------------------------------------- checks × nodes


def _worst(findings: Iterable[Finding]) -> dict[str, str]:
    """Return node, and node/gpuN, -> status of the worst finding about it."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        for name in {*nodes_of(finding.subject), finding.subject}:
            found.setdefault(name, []).append(finding.status.value)
    return {name: worst_of(statuses) for name, statuses in found.items()}


def _grid(outcome: Outcome) -> str:
    """Return one row a check, one column a node; a finding about a link counts for both its ends."""
    nodes = list(outcome.raw.reach)
    cells: dict[tuple[str, str], list[Finding]] = {}
    for finding in outcome.findings:
        about = [node for node in nodes if node in nodes_of(finding.subject)] or [""]
        for node in about:
            cells.setdefault((finding.check, node), []).append(finding)
    columns = [*nodes, *([""] if any(node == "" for _, node in cells) else [])]
    groups: dict[str, list[str]] = {}
    for check in dict.fromkeys(finding.check for finding in outcome.findings):
        groups.setdefault(GROUP_OF.get(check, "other"), []).append(check)
    bodies = []
    for group, checks in groups.items():
        rows = []
        for place, check in enumerate(checks):
            marks = "".join(_mark(cells.get((check, node), [])) for node in columns)
            name = f'<td class="what" title="{e(WHAT.get(check, ""))}">{e(check)}</td>'
            rows.append(f'<tr><td class="group">{e(group) if place == 0 else ""}</td>{name}{marks}</tr>')
        bodies.append((len(rows), f"<tbody>{''.join(rows)}</tbody>"))
    names = "".join(f"<th><span>{e(cut(node)) if node else 'cluster'}</span></th>" for node in columns)
    head = f"<thead><tr><th></th><th></th>{names}</tr></thead>"
    side_by_side = max(1, int(GRID_WIDTH // (GRID_NAMES + GRID_COLUMN * len(columns))))
    tables = "".join(f'<table class="grid">{head}{body}</table>' for body in _halves(bodies, side_by_side))
    key = "".join(f"<span>{_sign(status)} {status.value}</span>" for status in SYMBOLS)
    return f'<div class="grids">{tables}</div><div class="key">{key}</div>'


def _halves(bodies: Sequence[tuple[int, str]], count: int) -> list[str]:
    """Return the (rows, text) pieces in `count` columns of about the same number of rows, their order kept."""
    each = sum(rows for rows, _ in bodies) / count
    columns, taken = [""], 0
    for rows, text in bodies:
        if taken and taken + rows / 2 > each * len(columns) and len(columns) < count:
            columns.append("")
        columns[-1] += text
        taken += rows
    return columns


def _mark(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<td></td>"
    status = Status(worst_of([finding.status.value for finding in findings]))
    told = [finding for finding in findings if finding.status is status]
    tip = "\n".join(f"{finding.subject}: {finding.observed}" for finding in told[:SUBJECTS_SHOWN])
    return f'<td title="{e(tip)}"><i class="{status.value}">{SYMBOLS[status]}</i></td>'


# --------------------------------------------------------------------------- network, nodes, figures


def _maps(outcome: Outcome) -> str:
    shown = [matrix for matrix in matrices(outcome.figures, list(outcome.raw.reach)) if matrix.cells][:MATRICES_MAX]
    drawn = "".join(f"<figure><figcaption>{e(matrix.title)}</figcaption>{heat_map(matrix)}</figure>" for matrix in shown)
    if not drawn:
        return ""
    return f'<p class="soft">Rows send, columns receive; darker is worse.</p><div class="maps">{drawn}</div>'


def _nodes(outcome: Outcome) -> str:
    counts: dict[str, Counter[Status]] = {}
    for finding in outcome.findings:
        for node in nodes_of(finding.subject):
            counts.setdefault(node, Counter())[finding.status] += 1
    shown = [node for node in outcome.cluster.nodes if node.name in outcome.raw.reach]
    cells = {node.name: _cells(node, outcome) for node in shown}
    columns = zip(*(own for own in cells.values() if own), strict=True)
    usual = [majority({str(place): text for place, text in enumerate(column)}).value for column in columns]
    rows = [_node(node, outcome, counts.get(node.name, Counter()), cells[node.name], usual) for node in shown]
    return _table(("node", "findings", "system", "CPUs", "memory", "GPUs", "data network", "software"), rows)


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _node(node: Node, outcome: Outcome, counts: Counter[Status], cells: Sequence[str], usual: Sequence[str | None]) -> str:
    """Return the row of a node; what differs from most nodes is marked."""
    marks = " ".join(f'<span class="badge {one.value}">{SYMBOLS[one]} {counts[one]}</span>' for one in ORDER if counts[one])
    head = f'<td class="name">{e(cut(node.name))}<div class="soft">{e(node.data_address)}</div></td>'
    head += f'<td class="fixed">{marks or _badge(Status.PASS)}</td>'
    if not cells:
        return f'<tr>{head}<td colspan="6" class="soft">not read: {e(outcome.raw.reach[node.name]["observed"])}</td></tr>'
    body = [
        f'<td class="odd">{cell}</td>' if common is not None and cell != common else f"<td>{cell}</td>"
        for cell, common in zip(cells, usual, strict=True)
    ]
    return f"<tr>{head}{''.join(body)}</tr>"


def _cells(node: Node, outcome: Outcome) -> tuple[str, ...]:
    """Return what was read of a node, by column; nothing when it did not answer."""
    if verdict_of(outcome.raw.reach[node.name]) != "ok" or node.name not in outcome.facts:
        return ()
    facts = outcome.facts[node.name]
    return _system(facts), _cpus(facts), _memory(facts), _gpus(facts), _network(node, outcome, facts), _software(facts)


def _unread(fact: Fact[Any]) -> str:
    """Return what stands in a cell whose fact has no value."""
    word = f"{fact.absent} not installed" if fact.absent else "not read"
    return f'<span class="soft" title="{e(fact.error or "")}">{e(word)}</span>'


def _lines(*texts: str) -> str:
    return "<br>".join(e(text) for text in texts if text)


def _system(facts: NodeFacts) -> str:
    system = facts.os.value
    return _unread(facts.os) if system is None else _lines(system.distribution, system.kernel)


def _cpus(facts: NodeFacts) -> str:
    cpus = facts.cpus.value
    if cpus is None:
        return _unread(facts.cpus)
    numa = f", {len(cpus.numa)} NUMA" if len(cpus.numa) > 1 else ""
    sockets = f"{cpus.sockets} × " if cpus.sockets > 1 else ""
    cores = f"{len(cpus.cores)} core{'s' if len(cpus.cores) != 1 else ''}"
    return _lines(f"{sockets}{cpus.model}", f"{cores}{numa}")


def _memory(facts: NodeFacts) -> str:
    memory = facts.memory.value
    return _unread(facts.memory) if memory is None else _lines(f"{memory.total_mib / 1024:,.0f} GiB")


def _gpus(facts: NodeFacts) -> str:
    gpus: tuple[Gpu, ...] | None = facts.gpus.value
    if gpus is None:
        return _unread(facts.gpus)
    models = Counter(gpu.name.removeprefix("NVIDIA ") for gpu in gpus)
    drivers = sorted({gpu.driver for gpu in gpus if gpu.driver})
    return (
        _lines(*(f"{count} × {name}" for name, count in models.items()), f"driver {', '.join(drivers)}" if drivers else "")
        or "none"
    )


def _network(node: Node, outcome: Outcome, facts: NodeFacts) -> str:
    net = facts.net.value
    if net is None:
        return _unread(facts.net)
    loopback = outcome.cluster.network.kind == "loopback"
    name, _ = data_iface(net, node, peers_of(node, outcome.cluster), loopback=loopback)
    iface = next((one for one in net.ifaces if one.name == name), None)
    if iface is None:
        return '<span class="soft">none found</span>'
    speed = f"{iface.speed_mbit_s / 1000:g} Gbit/s, " if iface.speed_mbit_s else ""
    ports = [f"{port.name} {port.state}" for port in facts.rdma.value or ()]
    return _lines(iface.name, f"{speed}MTU {iface.mtu}", ", ".join(ports[:4]))


def _software(facts: NodeFacts) -> str:
    python = facts.python.value
    if python is None:
        return _unread(facts.python)
    have = dict(python.packages)
    have["NCCL"] = ", ".join(version for name, version in have.items() if name.startswith("nvidia-nccl-"))
    pairs = (("torch", "NCCL"), ("deepspeed", "transformers"))
    lines = [", ".join(f"{name} {have[name]}" for name in pair if have.get(name)) for pair in pairs]
    return _lines(*lines, f"Python {python.version}")


def _figures(outcome: Outcome) -> str:
    rows = []
    for one in summaries(outcome.figures):
        worst, best = (f'{number(value)} <span class="soft mono">{e(subject)}</span>' for subject, value in (one.worst, one.best))
        rows.append(
            f'<tr><td class="name">{e(one.measurement)}</td><td>{e(one.name)}</td><td>{one.count}</td>'
            f"<td>{e(number(one.median))}</td><td>{worst}</td><td>{best}</td><td>{e(one.unit)}</td></tr>"
        )
    if not rows:
        return ""
    kinds: dict[str, list[str]] = {}
    for figure in outcome.figures:
        text = f"{figure.subject} {number(figure.value)}"
        kinds.setdefault(f"{figure.measurement} {figure.name}, {figure.unit}", []).append(text)
    every = "".join(
        f'<details><summary>{e(kind)} <span class="soft">{len(texts)}</span></summary>'
        f'<div class="many mono">{"".join(f"<span>{e(text)}</span>" for text in texts)}</div></details>'
        for kind, texts in kinds.items()
    )
    heads = ("measurement", "figure", "count", "median", "worst", "best", "unit")
    return f"{_table(heads, rows)}<h3>Every figure</h3>{every}"


def _all(outcome: Outcome) -> str:
    return "".join(_group(group, members) for group, members in _by_group(outcome.findings).items())


def _by_group(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(GROUP_OF.get(finding.check, "other"), []).append(finding)
    return groups


def _group(group: str, findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    told = ", ".join(f"{counts[status]} {status.value}" for status in (*ORDER, Status.PASS, Status.SKIP) if counts[status])
    checks: dict[str, list[Finding]] = {}
    for finding in findings:
        checks.setdefault(finding.check, []).append(finding)
    body = "".join(map("".join, (_check(check, members) for check, members in checks.items())))
    return f'<details><summary>{e(group)}<span class="soft">{e(told)}</span></summary>{body}</details>'


def _check(check: str, findings: Sequence[Finding]) -> Iterator[str]:
    yield f'<h3 class="mono">{e(check)}</h3><p class="rule">{e(WHAT.get(check, ""))}</p><table><tbody>'
    for finding in findings:
        expected = f'<div class="soft">expected: {e(finding.expected)}</div>' if finding.expected else ""
        yield (
            f'<tr><td class="fixed">{_badge(finding.status)}</td><td class="name">{e(finding.subject)}</td>'
            f"<td>{e(finding.observed)}{expected}</td></tr>"
        )
    yield "</tbody></table>"
