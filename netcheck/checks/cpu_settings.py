"""Whether the kernel lets the CPUs keep up with the GPUs: frequency governor, clock source, NUMA balancing.

Nodes with `gpus: 0` are not judged: they run tests and services, and a laptop or a virtual machine saves power for good reasons.
What a kernel does not have (no frequency control in a virtual machine, no NUMA) is said and is no fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import as_root, on, sudo
from r4090c.model import Cluster, CpuFact, Finding, KernelFact, Node, Status

ID, GROUP, NEEDS = "cpu-settings", "os", ("cpus", "kernel")
RULE = "governor performance, clock source tsc (or the hypervisor's own), automatic NUMA balancing 0 (all warn)"
SOURCE = "cpufreq and sysctl/kernel of the Linux kernel's documentation; est."

GOOD_CLOCKS = ("tsc", "tsc-early", "kvm-clock", "hyperv_clocksource_tsc_page", "xen", "arch_sys_counter", "timebase")
"""Read without leaving user space or the guest. hpet and acpi_pm, what Linux falls back to, take a microsecond a reading."""
GOVERNOR = "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"
CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


def check(node: Node, cpus: CpuFact, kernel: KernelFact, cluster: Cluster) -> Iterator[Finding]:
    """Yield one warning per setting that costs speed, else one pass that names them. Skipped on a node without GPUs."""
    expected = "governor performance, clock source tsc, NUMA balancing off"
    if node.gpus == 0:
        yield Finding(ID, node.name, Status.SKIP, "not applicable: no GPUs to feed", expected)
        return
    faults, told = 0, []
    if cpus.governor is None:
        told.append("no frequency control (virtual machine, or left to the firmware)")
    elif cpus.governor != "performance":
        faults += 1
        why = "a core that has to wake up and speed up first delays every kernel launch and every packet; back after a reboot"
        remedy = on(node, f"printf performance | {sudo(node)}tee {GOVERNOR}")
        yield Finding(ID, node.name, Status.WARN, f"governor {cpus.governor}", "performance on all CPUs", why, remedy)
    else:
        told.append("governor performance")
    if kernel.clocksource is None:
        told.append("clock source not told")
    elif kernel.clocksource not in GOOD_CLOCKS:
        faults += 1
        why = "torch and NCCL read the clock all the time, and each reading of this one is a slow access to a device"
        remedy = on(node, f"printf tsc | {sudo(node)}tee {CLOCK}")
        if "tsc" not in kernel.clocksources:
            why += "; the kernel found the tsc unstable and gave it up: its log says why (firmware, or CPUs out of step)"
            remedy = as_root(node, 'dmesg | grep -iE "tsc|clocksource"')
        yield Finding(ID, node.name, Status.WARN, f"clock source {kernel.clocksource}", "tsc", why, remedy)
    else:
        told.append(f"clock source {kernel.clocksource}")
    if kernel.numa_balancing and len(cpus.numa) > 1:
        faults += 1
        why = (
            "the kernel unmaps pages to see who uses them and moves them: stalls, and pinned memory on the wrong side;"
            " back after a reboot"
        )
        remedy = as_root(node, "sysctl -w kernel.numa_balancing=0")
        yield Finding(ID, node.name, Status.WARN, f"NUMA balancing {kernel.numa_balancing}", "0", why, remedy)
    else:
        told.append("one NUMA node" if len(cpus.numa) <= 1 else "NUMA balancing off")
    if not faults:
        yield Finding(ID, node.name, Status.PASS, ", ".join(told), expected)
