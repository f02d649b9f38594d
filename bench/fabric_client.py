"""Fabric's ThreadingGroup in its plain use, but with host keys verified: one contender of bench.fanout.

python fabric_client.py PROBE KEY KNOWN_HOSTS ADDRESS … prints {address: what the probe printed} as JSON.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import paramiko
from fabric import Connection, ThreadingGroup


def main(probe: str, key: str, known_hosts: str, *addresses: str) -> None:
    """Run the probe on all addresses in parallel and print the answers."""
    connections = []
    for address in addresses:
        connection = Connection(address, user="root", connect_kwargs={"key_filename": key})
        connection.client.load_host_keys(known_hosts)
        connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
        connections.append(connection)
    group = ThreadingGroup.from_connections(connections)
    command = f"python3 -I -S -c {shlex.quote(Path(probe).read_text())}"
    results = group.run(command, hide=True, in_stream=False)
    json.dump({connection.host: result.stdout for connection, result in results.items()}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
