"""What a GPU's link, its throttling and its heat are worth: the same judgement for facts read at rest and samples under load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from netcheck.checks._wording import origin
from r4090c.model import Cluster, Gpu, Node, PciDevice, Status

GT_S_OF_GEN = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""PCI Express Base Specification 6.0, 8.3."""
REASON_BITS = {
    0x001: "Idle",
    0x002: "Applications Clocks Setting",
    0x004: "SW Power Cap",
    0x008: "HW Slowdown",
    0x010: "Sync Boost",
    0x020: "SW Thermal Slowdown",
    0x040: "HW Thermal Slowdown",
    0x080: "HW Power Brake Slowdown",
    0x100: "Display Clocks Setting",
}
"""nvmlClocksEventReason… of nvml.h, in the words of `nvidia-smi -q`; what clocks_event_reasons.active is made of."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with a GPU; the check adds subject and remedy."""

    status: Status
    observed: str
    expected: str
    why: str


def subject(node: Node, gpu: Gpu) -> str:
    """Return the subject of a finding about a GPU: node/gpu3, or node/<address> for one that the driver could not open."""
    return f"{node.name}/gpu{gpu.index}" if gpu.index >= 0 else f"{node.name}/{gpu.pci}"


def p2p_demanded(node: Node, cluster: Cluster) -> str | None:
    """Return where cluster.yaml turns P2P on for `node`, None when it does not: it is then off unless proved."""
    for env, where in ((node.env, f"nodes.{node.name}.env"), (cluster.env, "env")):
        if "NCCL_P2P_DISABLE" in env:
            return f"NCCL_P2P_DISABLE=0 (cluster.yaml {where})" if env["NCCL_P2P_DISABLE"].strip() == "0" else None
    return None


def reasons_of(bits: int) -> tuple[str, ...]:
    """Return the words for the bits of clocks_event_reasons.active."""
    return tuple(word for bit, word in REASON_BITS.items() if bits & bit)


def throttling(reasons: Iterable[str]) -> Trouble | None:
    """Return the worst that the active throttle reasons tell, None when nothing is wrong: at rest, at the power cap, as set."""
    active = set(reasons)
    hardware = [one for one in ("HW Power Brake Slowdown", "HW Thermal Slowdown", "HW Slowdown") if one in active]
    if hardware:
        why = {
            "HW Power Brake Slowdown": "the power supply tells the card to slow down: a cable, a connector or the supply itself",
            "HW Thermal Slowdown": "the card is at its limit of heat and halves its clocks: fans, dust, airflow",
            "HW Slowdown": "the card slows itself down, for heat or for power",
        }[hardware[0]]
        return Trouble(Status.FAIL, ", ".join(hardware), "no slowdown by the hardware", f"{why}; all ranks wait for the slowest")
    if "SW Thermal Slowdown" in active:
        why = "the driver lowers the clocks to keep the card within its limit of heat: all ranks wait for the slowest"
        return Trouble(Status.WARN, "SW Thermal Slowdown", "no slowdown", why)
    return None


def heat(temperature_c: int | None, slowdown_c: int | None, headroom_c: int | None, cluster: Cluster) -> Trouble | None:
    """Return what the distance to the temperature at which the card slows down is worth; None when far, or not told.

    Older drivers tell that temperature, newer ones the degrees left (T.Limit).
    """
    left = slowdown_c - temperature_c if temperature_c is not None and slowdown_c is not None else headroom_c
    expect = cluster.expect
    if left is None or left > expect.gpu_heat_warn_c:
        return None
    fails = left <= expect.gpu_heat_fail_c
    field = "gpu_heat_fail_c" if fails else "gpu_heat_warn_c"
    limit = expect.gpu_heat_fail_c if fails else expect.gpu_heat_warn_c
    at = f"{temperature_c} °C, " if temperature_c is not None else ""
    observed = f"{at}{left} °C below slowing down" if left >= 0 else f"{at}{-left} °C above the slowdown temperature"
    why = "at its limit the card halves its clocks, and all ranks wait for it: fans, dust, airflow between the cards"
    return Trouble(Status.FAIL if fails else Status.WARN, observed, f"more than {limit} °C below it{origin(cluster, field)}", why)


def device_of(gpu: Gpu, devices: Sequence[PciDevice] | None) -> PciDevice | None:
    """Return the GPU's entry on the PCI bus."""
    return next((device for device in devices or () if device.pci == gpu.pci), None)


def lanes(gpu: Gpu, device: PciDevice | None) -> int | None:
    """Return the width of the link now: the driver tells it, else the bus."""
    return gpu.pcie_width if gpu.pcie_width is not None else device.width if device else None


def narrow_link(gpu: Gpu, device: PciDevice | None, cluster: Cluster, *, loaded: bool) -> Trouble | None:
    """Return what is wrong with the lanes of a GPU's link; None when they are all there, or not told.

    Fewer lanes are a fault when the slot has no more, under load, when the link runs at full speed all the same, or when it
    counts errors. Else the link may be resting: the manual of nvidia-smi says of the width, too, that it may be reduced at rest.
    """
    wanted, expected = cluster.expect.gpu_pcie_width_min, _expected(cluster)
    width, slot = lanes(gpu, device), device.upstream_width_max if device else None
    if slot is not None and slot < wanted:
        port = f" ({device.upstream[-1]})" if device and device.upstream else ""
        why = (
            f"the slot itself{port} has {slot} lanes: move the card to a slot with {wanted},"
            f" or undo the splitting (bifurcation) of this one in the firmware. {_SLOWER}"
        )
        return Trouble(Status.FAIL, f"x{width if width is not None else slot}, the slot has x{slot}", expected, why)
    if width is None or width >= wanted:
        return None
    card = gpu.pcie_width_max
    if card is not None and card < wanted:
        why = f"card and slot together can do x{card}: the slot, a riser or a splitter has no more lanes. {_SLOWER}"
        return Trouble(Status.FAIL, f"x{width} of x{card}", expected, why)
    counted = (*device.aer.items(), *device.port_aer.items()) if device else ()
    errors = sum(count for name, count in counted if "TOTAL" not in name)
    awake = gpu.pcie_gen is not None and gpu.pcie_gen_max is not None and gpu.pcie_gen >= gpu.pcie_gen_max > 1
    observed = f"x{width} of x{card or (device and device.width_max) or wanted}"
    if loaded or awake or errors:
        seen = "under load" if loaded else f"at full speed (generation {gpu.pcie_gen})" if awake else f"with {errors} link errors"
        why = (
            f"lanes are lost {seen}: reseat the card, then try another riser or cable, then another slot;"
            f" dirt on the contacts is as likely as a bent pin of the processor's socket. {_SLOWER}"
        )
        return Trouble(Status.FAIL, observed, expected, why)
    why = (
        "read at rest, where some boards drop lanes; the preflight without --quick reads it under load."
        f" If it stays: reseat the card, then try another riser. {_SLOWER}"
    )
    return Trouble(Status.WARN, f"{observed}, at rest", expected, why)


def slow_link(gpu: Gpu, device: PciDevice | None, cluster: Cluster, *, loaded: bool) -> Trouble | None:
    """Return what is wrong with the generation of a GPU's link; None when it is right, not told, or low for being at rest."""
    wanted = cluster.expect.gpu_pcie_gen_min
    slot = device.upstream_speed_max_gt_s if device else None
    possible = gpu.pcie_gen_max
    if slot is not None:
        of_slot = max((gen for gen, speed in GT_S_OF_GEN.items() if speed <= slot), default=1)
        possible = min(of_slot, possible) if possible is not None else of_slot
    expected = f"generation {wanted}{origin(cluster, 'gpu_pcie_gen_min')}"
    if possible is not None and possible < wanted:
        why = (
            f"this slot is of generation {possible}. {_SLOWER} The firmware may hold it back (a setting for risers);"
            f" where the board has no more, state expect.gpu_pcie_gen_min: {possible}"
        )
        return Trouble(Status.FAIL, f"generation {possible} at most", expected, why)
    if loaded and gpu.pcie_gen is not None and gpu.pcie_gen < wanted:
        why = f"the link does not reach its speed under load: a riser or cable that is too long or not made for it. {_SLOWER}"
        return Trouble(Status.FAIL, f"generation {gpu.pcie_gen} under load", expected, why)
    return None


_SLOWER = "Without P2P all traffic between GPUs crosses these links, and all ranks wait for the slowest."


def _expected(cluster: Cluster) -> str:
    return f"x{cluster.expect.gpu_pcie_width_min}{origin(cluster, 'gpu_pcie_width_min')}"
