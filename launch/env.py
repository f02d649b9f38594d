"""The environment of every rank, each variable with its reason and origin; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from netcheck.rank_env import Var, computed_environment
from r4090c.model import Cluster, Node, NodeFacts, P2pProof

SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|CREDENTIAL|AUTH|COOKIE|(?<![A-Z])PAT)S?(_|\d|$)")
"""A variable with such a word at the end of a part of its name is never written to a plan, a log or a bundle.

At the end: WANDB_API_KEY and HF_TOKEN are secrets, TOKENIZERS_PARALLELISM is not.
"""
PUBLIC = ("PWD", "OLDPWD", "NCCL_IB_PKEY")
URL_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/@]*:[^\s/@]+@")
"""A proxy or a database address that carries its password."""
HIDDEN = "***"


def is_secret(name: str, value: str) -> bool:
    """True when the variable's value must not be shown: by its name, or because it is an address with a password in it."""
    by_name = name.upper() not in PUBLIC and SECRET.search(name.upper()) is not None
    return by_name or URL_PASSWORD.search(value) is not None


def shown(name: str, value: str) -> str:
    """Return the value of variable `name` as a person may see it."""
    return HIDDEN if is_secret(name, value) else value


def node_environment(
    cluster: Cluster,
    node: Node,
    facts: NodeFacts,
    peers: Mapping[str, str],
    user: Mapping[str, str],
    p2p: P2pProof | None = None,
) -> dict[str, Var]:
    """Return the environment of the ranks on `node`: computed, then cluster.yaml's layers, then the user's; later ones win.

    `p2p`: what a two-arm test of this node as it stands showed, None = there was none.
    """
    env = computed_environment(cluster, node, facts, peers, p2p)
    env["PYTHONUNBUFFERED"] = Var("1", "rank logs show lines when they are written")
    for layer, origin in ((cluster.env, "cluster.yaml env"), (node.env, f"cluster.yaml nodes.{node.name}.env"), (user, "--env")):
        for name, value in layer.items():
            before = env.get(name)
            over = f"; replaces {shown(name, before.value)} ({before.origin})" if before is not None else ""
            env[name] = Var(value, f"set by {origin}{over}", origin)
    return env


def visible_devices(env: Mapping[str, Var]) -> tuple[str, ...] | None:
    """Return what CUDA_VISIBLE_DEVICES lists (indices, UUIDs), None when it is not set: then all GPUs are visible."""
    var = env.get("CUDA_VISIBLE_DEVICES")
    return None if var is None else tuple(part.strip() for part in var.value.split(",") if part.strip())
