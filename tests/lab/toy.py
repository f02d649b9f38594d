"""A cluster.yaml of a lab whose training Python needs no torch: torchrun and the training script are stand-ins for it.

So a whole `r4090c launch tiny`, from the command line to the last checkpoint, takes two seconds and not thirty, and what is ours
(launch, agents, heartbeats, checkpoints, resume) is as it is. What torch says and how long it takes, only real training tells.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.lab.lab import Lab

TORCHRUN = Path(__file__).with_name("toy_torchrun.py")
SCRIPT = Path(__file__).with_name("toy_train.py")


def toy_python(lab: Lab) -> Path:
    """Put the stand-in where every node sees it, and return its path."""
    path = lab.shared / "toy_python"
    real = sys.executable
    path.write_text(
        "#!/bin/sh\n"
        f'case "$1 $2" in "-m torch.distributed.run") exec {real} {TORCHRUN} "$@";; esac\n'
        f'case "$1" in */train/main.py) exec {real} {SCRIPT} "$@";; esac\n'
        f'exec {real} "$@"\n'
    )
    path.chmod(0o755)
    return path


def changed_cluster(
    lab: Lab,
    name: str,
    *,
    python: Path | None = None,
    runs: Path | None = None,
    network: Mapping[str, Any] | None = None,
    expect: Mapping[str, Any] | None = None,
    **nodes: Mapping[str, Any],
) -> Path:
    """Write a copy of the lab's cluster.yaml and return it.

    `python`, `runs`: other paths. `network`, `expect`, `nodes` (by name): other keys; None takes one of the network away.
    """
    import yaml

    wish: dict[str, Any] = yaml.safe_load(lab.cluster_file.read_text())
    wish["paths"] |= {key: str(value) for key, value in (("python", python), ("runs", runs)) if value is not None}
    wish["network"] = {key: value for key, value in {**wish["network"], **(network or {})}.items() if value is not None}
    wish["expect"] = {**wish.get("expect", {}), **(expect or {})}
    for node in wish["nodes"]:
        node |= nodes.get(node["name"], {})
    path = lab.directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(wish, sort_keys=False))
    return path
