"""Whether logind deletes the shared memory of a detached run when its account logs out.

It spares system accounts (user id below 1000, so root), and accounts with lingering on, which it never takes for logged out.
Nodes with `gpus: 0` are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import on, sudo
from r4090c.model import Cluster, Finding, KernelFact, Node, OsFact, Status, UserFact

ID, GROUP, NEEDS, OPTIONAL = "remove-ipc", "os", ("kernel",), ("user", "os")
RULE = "RemoveIPC=no in logind.conf, or lingering on, for an account that is no system account (warn)"
SOURCE = "logind.conf(5); PostgreSQL manual, 'systemd RemoveIPC'"

SYSTEM_UIDS = range(1000)
"""SYS_UID_MAX of login.defs(5) is 999: what logind takes for a system account unless the distribution was built otherwise."""
OFF_BY_DEFAULT = ("rhel", "centos", "rocky", "almalinux", "ol")
"""Distributions of Red Hat's line build systemd with RemoveIPC=no; the others keep its default, yes."""


def check(node: Node, kernel: KernelFact, user: UserFact | None, system: OsFact | None, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding: pass, warn, or skip where there is no logind or no GPU."""
    expected = "RemoveIPC=no"
    if node.gpus == 0 or not kernel.logind:
        reason = "no GPUs, so no NCCL" if node.gpus == 0 else "no systemd-logind"
        yield Finding(ID, node.name, Status.SKIP, f"not applicable: {reason}", expected)
        return
    stated = kernel.remove_ipc
    family = (system.distribution if system is not None else "").split(" ")[0]
    told = "not set, and off by default here" if family in OFF_BY_DEFAULT else "not set, and systemd's default is yes"
    if stated is False or (stated is None and family in OFF_BY_DEFAULT):
        yield Finding(ID, node.name, Status.PASS, "RemoveIPC=no" if stated is False else f"RemoveIPC {told}", expected)
    elif user is not None and user.uid in SYSTEM_UIDS:
        yield Finding(ID, node.name, Status.PASS, f"not for {user.name}: logind spares system accounts", expected)
    elif user is not None and user.name in (kernel.lingering or ()):
        yield Finding(ID, node.name, Status.PASS, f"not for {user.name}: lingering is on", expected)
    elif user is None or kernel.lingering is None:
        missing = "the account" if user is None else "who lingers"
        remedy = on(node, "loginctl show-user --property=Linger")
        yield Finding(ID, node.name, Status.UNKNOWN, f"not read: {missing}", expected, "", remedy)
    else:
        root = sudo(node)
        file = "/etc/systemd/logind.conf.d/90-r4090c.conf"
        remedy = on(
            node,
            f'{root}mkdir -p /etc/systemd/logind.conf.d && printf "[Login]\\nRemoveIPC=no\\n" | {root}tee {file}'
            f" && {root}systemctl kill -s HUP systemd-logind",  # it reads its files again; a restart can end a desktop session
        )
        observed = "RemoveIPC=yes" if stated else f"RemoveIPC {told}"
        why = f"when the last session of {user.name} ends, logind deletes its shared memory, also that of a run that was detached"
        yield Finding(ID, node.name, Status.WARN, observed, expected, why, remedy)
