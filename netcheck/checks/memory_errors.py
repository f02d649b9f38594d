"""Whether the memory modules have made errors since they were last counted from zero."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import as_root, counted, listed, origin
from r4090c.model import Cluster, Finding, MemoryController, Node, OsFact, Status

ID, GROUP, NEEDS, OPTIONAL = "memory-errors", "memory", ("edac",), ("os",)
RULE = "no uncorrected memory error (fail), fewer than {memory_corrected_per_day_warn:g} corrected ones a day (warn)"
SOURCE = "RAS of the Linux kernel's documentation; mcelog.conf"

DAY_S = 86_400.0


def check(node: Node, controllers: tuple[MemoryController, ...], system: OsFact | None, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding: pass, uncorrected errors (fail), many corrected ones (warn), or skip where nobody counts them."""
    limit = cluster.expect.memory_corrected_per_day_warn
    expected = f"no uncorrected errors, fewer than {limit:g} corrected a day{origin(cluster, 'memory_corrected_per_day_warn')}"
    if not controllers:
        observed = "nothing counts memory errors: no ECC memory, or no EDAC driver for it"
        yield Finding(ID, node.name, Status.SKIP, observed, expected)
        return
    remedy = as_root(node, 'dmidecode -t memory | grep -E "Locator|Part Number"')
    uncorrected = sum(controller.uncorrected for controller in controllers)
    corrected = sum(controller.corrected for controller in controllers)
    a_day = sum(controller.corrected / _days(controller, system) for controller in controllers)
    if uncorrected:
        why = "wrong values were read: a run that used them is wrong or was killed; the module is to be replaced"
        observed = f"{counted(uncorrected, 'uncorrected error')}{_where(controllers, 'uncorrected')}"
        yield Finding(ID, node.name, Status.FAIL, observed, expected, why, remedy)
    elif a_day >= limit:
        why = "a module that is corrected all the time fails for good sooner or later: reseat it, then replace it"
        observed = f"{counted(round(a_day), 'corrected error')} a day{_where(controllers, 'corrected')}"
        yield Finding(ID, node.name, Status.WARN, observed, expected, why, remedy)
    else:
        yield Finding(ID, node.name, Status.PASS, counted(corrected, "corrected error"), expected)


def _days(controller: MemoryController, system: OsFact | None) -> float:
    """Return for how many days the controller has counted, at least one: a burst at boot is no rate."""
    age_s = controller.age_s if controller.age_s is not None else system.uptime_s if system is not None else None
    return max(1.0, (age_s or 0.0) / DAY_S)


def _where(controllers: tuple[MemoryController, ...], kind: str) -> str:
    """Return " in P0_DIMM_A1" for the modules that made them, "" where the board does not tell."""
    modules = {dimm.label: getattr(dimm, kind) for controller in controllers for dimm in controller.dimms}
    worst = sorted((label for label, count in modules.items() if count), key=lambda label: -modules[label])
    return f" in {listed(worst, 3)}" if worst else ""
