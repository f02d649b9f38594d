"""How findings speak: where a threshold came from, and the command line that runs a remedy on a node.

Pure. The ssh line is built from the inventory alone, so that a bundle can be judged far away from the cluster.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from r4090c.model import Cluster, Node

DRIVER_BRANCH = "570"
"""Of the NVIDIA driver: a production branch that Ubuntu packages, above gpu-driver's minimum."""

PACKAGES = {"ibv_devinfo": "ibverbs-utils"}
"""Program -> the Debian and Ubuntu package that brings it, where it is not called like it."""


def origin(cluster: Cluster, threshold: str) -> str:
    """Return " (cluster.yaml)" when the inventory overrode this field of Expect, else nothing."""
    source = cluster.expect_origin.get(threshold, "")
    return f" ({source}: expect.{threshold})" if source else ""


def on(node: Node, command: str) -> str:
    """Return the line to type here that runs `command` on `node` over ssh.

    A key and a configuration in the default place (~/.ssh/) are left out: ssh finds them by itself. With a terminal where sudo
    may ask for a password.
    """
    ssh = node.ssh
    words = ["ssh", "-t"] if "sudo " in command else ["ssh"]
    if ssh.config and not ssh.config.endswith("/.ssh/config"):
        words += ["-F", ssh.config]
    if ssh.port != 22:
        words += ["-p", str(ssh.port)]
    if ssh.key and "/.ssh/id_" not in ssh.key:
        words += ["-i", ssh.key]
    if ssh.jump:
        words += ["-J", ssh.jump]
    words.append(f"{ssh.user}@{ssh.address}" if ssh.user else ssh.address)
    return f"{shlex.join(words)} {shlex.quote(command)}"


def sudo(node: Node) -> str:
    """Return what goes in front of one command that takes root, "" where the login is root's: a container may have no sudo."""
    return "" if node.ssh.user == "root" else "sudo "


def as_root(node: Node, *commands: str) -> str:
    """Return `on(node, …)` for the commands one after the other, each as root. Of a pipe only the first program is."""
    return on(node, " && ".join(f"{sudo(node)}{command}" for command in commands))


def account(node: Node) -> str:
    """Return the account the tool logs in as, for a command on the node; where it is not stated the node's shell knows it."""
    return shlex.quote(node.ssh.user) if node.ssh.user else '"$(id -un)"'


def driver_package(distribution: str | None, branch: str = DRIVER_BRANCH) -> str:
    """Return the package of the NVIDIA driver: Ubuntu has one per branch, Debian a single one. None = not known: Ubuntu's."""
    return "nvidia-driver" if (distribution or "").split(" ")[0] == "debian" else shlex.quote(f"nvidia-driver-{branch}")


def size(gib: float) -> str:
    """Return a size with three digits, in MiB below one GiB."""
    return f"{gib:.3g} GiB" if gib >= 1 else f"{gib * 1024:.3g} MiB"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return "1 error" or "3 errors"; `plural` where it takes more than an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(words: Iterable[str], at_most: int = 4) -> str:
    """Return the words joined by commas; what exceeds `at_most` is counted, so that a line stays a line."""
    words = list(words)
    if len(words) <= at_most:
        return ", ".join(words)
    return ", ".join(words[:at_most]) + f" and {len(words) - at_most} more"
