"""Whether the cluster still is what it was when it was locked: versions, topology, speeds, and what was measured."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck import lock as locks
from netcheck.checks._wording import as_root, driver_package, listed, on, origin
from netcheck.figures import ARROW, figures_of, number
from netcheck.lock import Change, Lock, label
from netcheck.measure.figure import Figure
from r4090c.errors import ParseError
from r4090c.model import Cluster, Finding, Node, OsFact, Status

ID, GROUP, SCOPE, NEEDS = "drift", "software", "cluster", ("os",)
OPTIONAL = (*(name for name in locks.READERS if name != "os"), "measurements")
RULE = "what `r4090c lock` recorded: the same versions, models and speeds; no figure worse by {figure_tolerance:.0%} (warn)"
SOURCE = "the cluster itself, when it was known to be good"
EACH_MAX = 4
"""est.: figures of one kind that are told one by one; when more are worse, they are told together."""
LOCKED = "as it was locked"
MEANT = "if the change is meant: r4090c lock"


def applies(node: Node, cluster: Cluster) -> bool:
    """Without a lock there is nothing to compare with."""
    return cluster.lock is not None


def check(systems: Mapping[str, OsFact], *rest: Any) -> Iterator[Finding]:
    """Yield one Finding per item or figure that drifted (subject node/item), else one pass per node."""
    *facts, measured, cluster = rest
    if not systems:
        return
    try:
        lock = locks.read(cluster.lock)
    except ParseError as error:
        observed, expected = f"the lock is not understood: {error}", f"a lock of schema {locks.SCHEMA}"
        yield Finding(ID, cluster.name, Status.UNKNOWN, observed, expected, "", "r4090c lock")
        return
    known = dict(zip(locks.READERS, (systems, *facts), strict=True))
    figures = figures_of(next(iter(measured.values())) or {}, systems)
    for name, system in systems.items():
        node = cluster.node(name)
        values = {fact: column.get(name) for fact, column in known.items()}
        found = list(_items(node, system, values, lock, cluster))
        if found:
            yield from found
        else:
            yield Finding(ID, name, Status.PASS, f"as locked ({len(lock.items[name])} items)", LOCKED)
    yield from _figures(figures, lock, cluster)


def _items(node: Node, system: OsFact, values: Mapping[str, Any], lock: Lock, cluster: Cluster) -> Iterator[Finding]:
    locked = lock.items.get(node.name)
    if locked is None:
        why = "its versions and speeds are compared with nothing"
        yield Finding(ID, node.name, Status.WARN, "not in the lock", "every node locked", why, "r4090c lock")
        return
    unread = [fact for fact, value in values.items() if value is None and any(item.startswith(f"{fact}.") for item in locked)]
    if unread:
        remedy = f"r4090c facts --nodes {node.name}"
        yield Finding(ID, node.name, Status.UNKNOWN, f"not read: {', '.join(unread)}", LOCKED, "", remedy)
    here = {item: value for item, value in locked.items() if item.partition(".")[0] not in unread}
    now = locks.items_from(node, cluster, values)
    for change in locks.changes(here, now, cluster.expect):
        if change.was is None:
            continue  # newer versions look at more than was locked; what is too much is told by the checks
        what = label(change.item)
        yield Finding(
            ID,
            f"{node.name}/{what}",
            Status.WARN,
            f"{what}: {locks.told(change.now)}",
            f"{locks.told(change.was)} (locked)",
            f"the cluster was known to be good with it; {MEANT}",
            _remedy(node, system, change),
        )


def _remedy(node: Node, system: OsFact, change: Change) -> str:
    """Return the command that brings an item back, or the one that shows more of it."""
    fact, _, rest = change.item.partition(".")
    was = locks.told(change.was)
    part, _, what = rest.rpartition(".") if change.was != locks.THERE else (rest, "", "")
    apt = system.distribution.partition(" ")[0] in ("debian", "ubuntu")
    if fact == "python" and rest != "python":
        return on(node, f"{shlex.quote(node.paths.python)} -m pip install {shlex.quote(f'{rest}=={was}')}")
    if fact == "python":
        return on(node, f"{shlex.quote(node.paths.python)} --version")
    if fact == "os":
        kernel = as_root(node, f"apt-get install -y {shlex.quote(f'linux-image-{was}')}")
        return kernel if rest == "kernel" and apt else on(node, "uname -a; cat /etc/os-release")
    if rest == "driver":
        package = driver_package(system.distribution, was.partition(".")[0])
        return as_root(node, f"apt-get install -y {package}") if apt else on(node, "nvidia-smi")
    if what == "mtu":
        return as_root(node, f"ip link set {shlex.quote(part)} mtu {shlex.quote(was)}")
    if what == "power_limit_w":
        return as_root(node, f"nvidia-smi -i {shlex.quote(part)} -pl {shlex.quote(was)}")
    if fact in ("gpus", "gpu_topology"):
        return on(node, "nvidia-smi -L; nvidia-smi topo -m")
    if fact == "net":
        return on(node, f"ethtool {shlex.quote(part)}" if part else "ip route; ip -br address")
    if fact == "rdma":
        return on(node, "rdma link; ibstat")
    if fact == "memory":
        return as_root(node, "dmidecode -t memory")
    if fact == "toolchain":
        return on(node, "ls -ld /usr/local/cuda*")
    return on(node, "grep -m1 'model name' /proc/cpuinfo; ls -d /sys/devices/system/node/node*")


def _figures(figures: Sequence[Figure], lock: Lock, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per figure that is worse than the locked one; where many are, one for all; else one pass for the kind."""
    locked = {(one.measurement, one.name, one.subject): one for one in lock.figures}
    kinds: dict[tuple[str, str], list[tuple[Figure, Figure]]] = {}
    for one in figures:
        was = locked.get((one.measurement, one.name, one.subject))
        if was is not None and was.unit == one.unit and was.value > 0:
            kinds.setdefault((one.measurement, one.name), []).append((was, one))
    for (measurement, name), pairs in kinds.items():
        what = f"{measurement} {name}".strip()
        tolerance = max(cluster.expect.figure_tolerance, *(was.noise for was, _ in pairs))
        worse = [(was, now) for was, now in pairs if loss(was, now) > tolerance]
        expected = f"no worse by more than {tolerance:.0%}{origin(cluster, 'figure_tolerance')}"
        why = f"it was better when the cluster was known to be good; {MEANT}"
        if not worse:
            told = f"{what}: {len(pairs)} figure{'s' if len(pairs) > 1 else ''} as locked"
            yield Finding(ID, f"{cluster.name}/{_slug(what)}", Status.PASS, told, expected)
        elif len(worse) > EACH_MAX:
            lost = statistics.median(loss(was, now) for was, now in worse)
            ends = listed((now.subject for _, now in sorted(worse, key=lambda pair: -loss(*pair))), 3)
            observed = f"{what}: {len(worse)} of {len(pairs)} worse, by {lost:.0%} (median); most: {ends}"
            remedy = _again(measurement, [now.subject for _, now in worse], cluster)
            yield Finding(ID, f"{cluster.name}/{_slug(what)}", Status.WARN, observed, expected, why, remedy)
        else:
            for was, now in worse:
                observed = f"{what}: {number(now.value)} {now.unit}"
                told = f"{number(was.value)} {was.unit} (locked), {expected}"
                remedy = _again(measurement, [now.subject], cluster)
                yield Finding(ID, f"{now.subject}/{_slug(what)}", Status.WARN, observed, told, why, remedy)


def loss(was: Figure, now: Figure) -> float:
    """Return by which share a figure is worse than it was; negative when it is better."""
    if was.higher_is_better:
        return 1 - now.value / was.value
    return now.value / was.value - 1


def _again(measurement: str, subjects: Sequence[str], cluster: Cluster) -> str:
    """Return the command that measures once more: the nodes concerned, or all when it is most of them."""
    names = {end.partition("/")[0] for subject in subjects for end in subject.split(ARROW)}
    chosen = [node.name for node in cluster.nodes if node.name in names]
    only = f" --nodes {','.join(chosen)}" if len(chosen) * 2 <= len(cluster.nodes) and len(chosen) > 1 else ""
    return f"r4090c preflight --full --diff{only}"


def _slug(what: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", what).strip("-")
