"""The VM lab: two virtual machines with a real RDMA stack (soft-RoCE) and a real kernel NFS server and client.

    python -m tests.vmlab build           # once: minutes; later starts take seconds
    python -m tests.vmlab up --dir D      # the last line printed is the path of a ready cluster.yaml
    python -m tests.vmlab ssh --dir D 1 ibv_devinfo
    python -m tests.vmlab down --dir D

QEMU emulates the processors in software, so it runs where there is no KVM: what the nodes do is real, how fast they do it
means nothing. docs/vmlab.md tells how it works and what it costs.
"""

from tests.vmlab.lab import VmLab, why_not
from tests.vmlab.store import VmLabError

__all__ = ["VmLab", "VmLabError", "why_not"]
