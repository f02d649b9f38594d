"""What both diagnoses need: the words a rank says when its peer went, the names of signals, and what a new attempt can mend.

`diagnose` reads the events of our agents, `diagnose_log` the text of any log; kinds of causes are shared and are API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

CONSEQUENCE = re.compile(
    r"Connection closed by (remote )?peer|Connection reset by peer|Broken pipe|Socket Timeout|recvValue failed|sendBytes failed"
    r"|recvBytes failed|Timed out waiting \d+ms for (recv|send)|Connection refused|DistNetworkError|ncclRemoteError"
    r"|remote process exited|NCCL watchdog|Watchdog caught|failed to recv, got 0 bytes|SIGTERM|exit code 143"
    r"|connectFullMesh failed",
    re.IGNORECASE,
)
"""Texts a rank prints when its *peer* went: from torch's gloo, TCPStore and NCCL sources as seen in killed runs."""
OTHER_SERVICE = re.compile(r"HTTPS?ConnectionPool|\brequests\.|ProtocolError|urllib3|\bhttpx\b|BrokenPipeError")
"""Texts on a connection that no peer is at the other end of: a web server's, or the pipe into `head`."""
NOISE = re.compile(r"\[c10d\] The hostname of the client socket cannot be retrieved")
"""torch's remark on every address without a reverse name; it explains nothing."""


def blames_peer(line: str) -> bool:
    """True when a line says that a peer went, and not the server of something else."""
    return CONSEQUENCE.search(line) is not None and OTHER_SERVICE.search(line) is None


SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
}

Mends = Literal["again", "other-node", "never"]

MENDS: Mapping[str, tuple[Mends, str]] = {
    # what agents and the supervisor tell
    "stopped": ("never", "somebody ended it"),
    "slurm-ended": ("never", "the nodes are no longer ours"),
    "unknown": ("again", "nobody knows that it cannot"),
    "rank-failed": ("again", "an exception of the program: it may depend on the moment"),
    "rank-killed": ("again", "a signal from outside comes once"),
    "torchrun-failed": ("again", "torchrun named no reason that stays"),
    "torchrun-killed": ("again", "a signal from outside comes once"),
    "agent-error": ("again", "a fault of the agent's, not of the run's"),
    "agent-killed": ("again", "somebody ended the agent; the node answers"),
    "node-lost": ("again", "it may have come back; while it does not answer another is taken or it is waited for"),
    "start-failed": ("other-node", "the node could not start its ranks"),
    "lease-taken": ("other-node", "another run holds GPUs of the node"),
    "rank-frozen": ("again", "a process that somebody stopped is started anew"),
    "rank-stuck": ("again", "a rank that stood still is started anew"),
    "storage-hung": ("again", "storage that hung may answer again"),
    "collective-hung": ("again", "ranks that wait for each other meet anew"),
    # hardware and what is wrong with one node
    "gpu-fallen-off-bus": ("other-node", "only a reboot or a hand brings the card back"),
    "gpu-hardware-fault": ("other-node", "the card is faulty until it is reset or replaced"),
    "gpu-not-found": ("other-node", "the node lacks a GPU that was planned"),
    "cuda-launch-failure": ("other-node", "a GPU that stopped working mostly stays so until a reboot"),
    "driver-mismatch": ("other-node", "the node needs a reboot"),
    "storage-failed": ("other-node", "the node's mount is broken until it is mounted anew"),
    "rdma-no-route": ("other-node", "the node's RoCE interface has no route"),
    "hca-missing": ("other-node", "the node lacks an RDMA device"),
    # what another attempt meets as well
    "wrong-input": ("never", "recipe, data or checkpoint stay as they are"),
    "script-missing": ("never", "the file stays missing"),
    "module-missing": ("never", "the library stays missing"),
    "library-mismatch": ("never", "the library stays built for another one"),
    "model-missing": ("never", "the files of the model stay missing or damaged"),
    "cuda-out-of-memory": ("never", "the same model and batch need the same memory"),
    "cuda-assert": ("never", "the same data have the same index out of range"),
    "nan-loss": ("never", "the same steps from the same checkpoint lose the numbers again"),
    "disk-full": ("never", "the disk stays full until somebody makes room"),
    "dev-shm-too-small": ("never", "/dev/shm stays as small"),
    "no-permission": ("never", "the permission stays missing"),
    "no-file-locks": ("never", "the file system has no locks"),
    "memlock-too-low": ("never", "the limit stays"),
    "too-many-open-files": ("never", "the limit stays"),
    "wrong-network-interface": ("never", "the interface is a setting"),
    "roce-wrong-gid": ("never", "the GID index is a setting"),
    "false-p2p-grant": ("never", "the driver grants it again"),
    "collective-wrong-data": ("never", "numbers that were wrong once are not to be trusted"),
    "p2p-mapping-failed": ("never", "the BAR1 stays too small"),
    "rtx40-refused": ("never", "driver and environment stay"),
    "duplicate-gpu": ("never", "the ranks choose the same GPU again"),
    "driver-too-old": ("never", "the driver stays too old"),
    "torch-without-this-gpu": ("never", "the build of torch stays"),
    "nccl-version-mismatch": ("never", "the versions stay"),
    "batch-size-mismatch": ("never", "the configuration stays"),
    "checkpoint-other-world-size": ("never", "the checkpoint stays of so many ranks"),
    "cuda-toolkit-mismatch": ("never", "the toolkit stays"),
    "compiler-missing": ("never", "the compiler stays missing"),
    "launcher-missing": ("never", "the launcher stays missing"),
    "numactl-conflict": ("never", "the variable stays set"),
    "ssh-refused": ("never", "the key or the host's entry stays missing"),
    "ranks-out-of-step": ("never", "the ranks part at the same place again"),
    # what may have passed
    "host-out-of-memory": ("again", "another program may have taken the memory; without progress the budget ends it"),
    "checkpoint-not-written": ("again", "storage may have been at fault for a moment"),
    "checkpoint-folder-race": ("again", "ranks that ran into each other seldom do so twice"),
    "storage-silent": ("again", "the server may answer again"),
    "port-taken": ("again", "a new attempt takes another port"),
    "name-not-resolved": ("again", "name servers answer again"),
    "firewall-blocks-ports": ("again", "a link that was down looks the same"),
    "master-unreachable": ("again", "a link that was down looks the same"),
    "peers-did-not-join": ("again", "a node that was late may come"),
    "rdma-path-broken": ("again", "a link that was down looks the same"),
    "cuda-illegal-access": ("again", "a race in a kernel does not come each time"),
    "nccl-error": ("again", "the network may have recovered"),
    "collective-timeout": ("again", "the network may have recovered"),
    "peer-gone": ("again", "why the peer went is not known"),
}
"""Kind -> whether starting again can help, and why. A kind that is not here: again; the budget by progress ends what does not."""
