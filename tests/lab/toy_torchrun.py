"""A stand-in for torchrun without torch: it starts the ranks with torchrun's environment and logs their end as torchrun does.

Its words: torch/distributed/elastic/multiprocessing/api.py and TCPStore.cpp of torch 2.13.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

FAILED = "failed (exitcode: {code}) local_rank: {local_rank} (pid: {pid}) of binary: {binary}"
TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: {port}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


def main() -> int:
    """Run the ranks to their end; return 1 as soon as one fails, when all others are ended."""
    words = sys.argv[1:]
    options = dict(word[2:].split("=", 1) for word in words[2 : words.index("--no-python")] if "=" in word)
    command = words[words.index("--no-python") + 1 :]
    nodes, nproc, node_rank = (int(options[name]) for name in ("nnodes", "nproc-per-node", "node-rank"))
    address, port = options["master-addr"], options["master-port"]
    if node_rank == 0:
        try:
            socket.create_server((address, int(port))).close()
        except OSError:
            print(TAKEN.format(port=port), flush=True)
            return 1
    place = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(nodes * nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    ranks = []
    for local_rank in range(nproc):
        own = {"RANK": str(node_rank * nproc + local_rank), "LOCAL_RANK": str(local_rank)}
        ranks.append(subprocess.Popen(command, env={**os.environ, **place, **own}))
    codes: list[int | None] = [None]
    while None in codes:
        codes = [rank.poll() for rank in ranks]
        for local_rank, (rank, code) in enumerate(zip(ranks, codes, strict=True)):
            if code:
                for other in ranks:
                    other.kill()
                print(FAILED.format(code=code, local_rank=local_rank, pid=rank.pid, binary=command[0]), flush=True)
                return 1
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
