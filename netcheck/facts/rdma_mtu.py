"""The MTU every RDMA port agreed on with its net, from `ibv_devinfo`: sysfs does not tell. Only asked where RDMA is wished."""

from __future__ import annotations

from netcheck.facts.question import Question, Reply
from netcheck.tools import ibv_devinfo
from r4090c.model import Cluster, Node, RdmaMtu

NAME = "rdma_mtu"


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`; nothing unless the data network is to be RDMA."""
    return Question(command=(ibv_devinfo.COMMAND,), timeout_s=10) if cluster.network.rdma else Question()


def parse(reply: Reply) -> tuple[RdmaMtu, ...]:
    """Return the ports by device and number; none without RDMA devices, or where nothing was asked. Raises ParseError."""
    if reply.command is None and "probe" not in reply.errors:
        return ()
    output = reply.output()
    ports = [
        RdmaMtu(device.hca, port.port, port.active_mtu_bytes, port.max_mtu_bytes)
        for device in ibv_devinfo.parse(f"{output.stdout}\n{output.stderr}").devices
        for port in device.ports
    ]
    return tuple(sorted(ports, key=lambda port: (port.hca, port.port)))
