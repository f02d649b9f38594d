"""What one TCP stream of iperf3 gets between two nodes of the lab."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.lab import Lab, LabError

PORT = 5299
"""Not iperf3's default 5201, which preflight's own measurements may use."""
READY_WITHIN_S = 20.0
TRIES = 3
"""A stream over a machine that is busy with other tests may lose its control connection; a broken link fails each time."""


@contextmanager
def iperf3_server(lab: Lab, node: str) -> Iterator[None]:
    """Let an iperf3 server listen on the node until the end of the block.

    It serves every client: with `--one-off` a first connection that came to nothing would end it.

    Raises:
        LabError: it does not listen within `READY_WITHIN_S`.
    """
    argv = lab.exec_argv(node, "iperf3", "--server", "--port", str(PORT))
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_WITHIN_S
        while f":{PORT} " not in lab.exec(node, "ss", "-Hlnt").stdout:
            if server.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"the iperf3 server on {node} does not listen: it ended with {server.poll()}")
            time.sleep(0.05)
        yield
    finally:
        for pid, line in lab.processes(node):
            if line.startswith("iperf3 --server"):
                lab.kill(node, pid)
        server.wait(timeout=10)


def stream_gbit_s(lab: Lab, sender: str, receiver: str, *options: str) -> float:
    """Return Gbit/s of one stream from `sender` to `receiver` (`-R` among the options turns it round).

    Raises:
        LabError: no try ended well; with iperf3's own words.
    """
    why = ""
    client = ("iperf3", "--client", lab.address(receiver), "--port", str(PORT), "--time", "3", "--omit", "1", "--json", *options)
    with iperf3_server(lab, receiver):
        for _ in range(TRIES):
            done = lab.exec(sender, *client)
            told = json.loads(done.stdout or "{}")
            if done.returncode == 0 and "end" in told and "error" not in told:
                return float(told["end"]["sum_received"]["bits_per_second"]) / 1e9
            why = told.get("error") or done.stderr.strip()
            time.sleep(2)  # the server ends what is left of the try
    raise LabError(f"no stream from {sender} to {receiver} in {TRIES} tries: {why}")
