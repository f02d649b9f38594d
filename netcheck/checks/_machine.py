"""What kind of machine a node is, where healthy ones differ: a container shows the devices of its host. Pure."""

from __future__ import annotations

from r4090c.model import KernelFact, Mount


def in_container(kernel: KernelFact | None, mounts: tuple[Mount, ...] | None = None) -> bool:
    """Return whether the node is known to be a container: its systemd says so, or its root is the layers of an image."""
    root = next((mount.fstype for mount in reversed(mounts or ()) if mount.target == "/"), "")
    return (kernel is not None and kernel.container is not None) or root in ("overlay", "fuse.fuse-overlayfs")
