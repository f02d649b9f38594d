"""The lab: N machines on one machine, out of network, mount, pid, uts and ipc namespaces, each with its own sshd.

    python -m tests.lab up --nodes 4 --dir D        # the last line printed is the path of a ready cluster.yaml
    python -m tests.lab shape node02 100mbit --dir D
    python -m tests.lab down --dir D

Needs root, iproute2, util-linux and openssh-server. Nothing of the machine itself is changed: every mount is made in a
node's own mount namespace, and the only link added to the machine's own network is one veth end, `r4l-<token>`.
"""

from tests.lab.lab import Lab, LabError, why_not

__all__ = ["Lab", "LabError", "why_not"]
