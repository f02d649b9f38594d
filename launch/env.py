"""The environment of every rank, each variable with its reason and origin; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from netcheck.rank_env import Var
from r4090c.model import Cluster, Node

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


def environments(
    cluster: Cluster, nodes: Sequence[Node], computed: Mapping[str, Mapping[str, Var]], user: Mapping[str, str]
) -> dict[str, dict[str, Var]]:
    """Return node name -> the environment of its ranks: computed, then cluster.yaml's layers, then the user's; later ones win.

    `computed`: what netcheck.rank_env.computed_environment returns for a run on `nodes`.
    """
    found = {}
    for node in nodes:
        env = dict(computed[node.name])
        env["PYTHONUNBUFFERED"] = Var("1", "rank logs show lines when they are written")
        for layer, origin in (
            (cluster.env, "cluster.yaml env"),
            (node.env, f"cluster.yaml nodes.{node.name}.env"),
            (user, "--env"),
        ):
            for name, value in layer.items():
                before = env.get(name)
                over = f"; replaces {shown(name, before.value)} ({before.origin})" if before is not None else ""
                env[name] = Var(value, f"set by {origin}{over}", origin)
        found[node.name] = env
    return found


def layers(envs: Mapping[str, Mapping[str, Var]]) -> tuple[dict[str, Var], dict[str, dict[str, Var]]]:
    """Return (common, own): the variables that all nodes have with one value from one origin, and node name -> its others."""
    every = list(envs.values())
    first = every[0] if every else {}
    common = {
        name: var
        for name, var in first.items()
        if all(name in env and (env[name].value, env[name].origin) == (var.value, var.origin) for env in every)
    }
    return common, {node: {name: var for name, var in env.items() if name not in common} for node, env in envs.items()}


def visible_devices(env: Mapping[str, Var]) -> tuple[str, ...] | None:
    """Return what CUDA_VISIBLE_DEVICES lists (indices, UUIDs), None when it is not set: then all GPUs are visible."""
    var = env.get("CUDA_VISIBLE_DEVICES")
    return None if var is None else tuple(part.strip() for part in var.value.split(",") if part.strip())
