"""Whether the resource limits of a non-interactive shell are wide enough."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import on, origin, size, sudo
from r4090c.model import Cluster, Finding, LimitsFact, Node, Status

ID, GROUP, NEEDS = "limits", "os", ("limits",)

RULE = (
    "in a non-interactive shell: open files (nofile) at least {nofile_min} (warn), stack at least {stack_min_mib:g} MiB (warn);"
    " with RDMA locked memory (memlock) unlimited or at least {memlock_min_gib:g} GiB (fail)"
)
SOURCE = "ibv_reg_mr(3); NCCL issue 1518; est."

GIB = 1024**3
MIB = 1024**2


def check(node: Node, limits: LimitsFact, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per limit that is too low, else one pass. memlock counts with RDMA only.

    A node without GPUs runs no NCCL: its nofile and stack are judged only against a threshold stated in cluster.yaml.
    """
    expect, faults = cluster.expect, 0
    judged = node.gpus > 0 or "stack_min_mib" in cluster.expect_origin
    if judged and limits.stack_bytes is not None and limits.stack_bytes < expect.stack_min_mib * MIB:
        faults += 1
        yield Finding(
            ID,
            node.name,
            Status.WARN,
            f"stack {size(limits.stack_bytes / GIB)}",
            f"at least {expect.stack_min_mib:g} MiB{origin(cluster, 'stack_min_mib')}",
            "threads of NCCL and of data workers get a stack of this size, and die without a word when it overflows",
            _raised(node, "stack", str(round(expect.stack_min_mib * 1024))),
        )
    judged = node.gpus > 0 or "nofile_min" in cluster.expect_origin
    if judged and limits.nofile is not None and limits.nofile < expect.nofile_min:
        faults += 1
        yield Finding(
            ID,
            node.name,
            Status.WARN,
            f"nofile {limits.nofile}",
            f"at least {expect.nofile_min}{origin(cluster, 'nofile_min')}",
            "NCCL opens descriptors per connection and channel, data workers many more",
            _raised(node, "nofile", "1048576"),
        )
    if cluster.network.rdma and limits.memlock_bytes is not None and limits.memlock_bytes < expect.memlock_min_gib * GIB:
        faults += 1
        yield Finding(
            ID,
            node.name,
            Status.FAIL,
            f"memlock {size(limits.memlock_bytes / GIB)}",
            f"unlimited, or at least {expect.memlock_min_gib:g} GiB{origin(cluster, 'memlock_min_gib')}",
            "RDMA pins its buffers: ibv_reg_mr fails with 'Cannot allocate memory' beyond the limit",
            _raised(node, "memlock", "unlimited"),
        )
    if not faults:
        yield Finding(ID, node.name, Status.PASS, f"nofile {limits.nofile or 'unlimited'}", "limits of a non-interactive shell")


def _raised(node: Node, limit: str, value: str) -> str:
    """Return the command that raises a limit for every later login (pam_limits); `*` leaves root out (limits.conf(5))."""
    lines = "".join(f"{who} - {limit} {value}\\n" for who in ("*", "root"))
    return on(node, f'printf "{lines}" | {sudo(node)}tee /etc/security/limits.d/90-r4090c-{limit}.conf')
