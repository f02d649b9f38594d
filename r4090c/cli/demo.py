"""`r4090c demo`: the whole path for real on one machine: sshd, preflight, ZeRO-2 training on two nodes."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r4090c.cli.common import err, json_option, print_json
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from launch.supervise import Supervisor


@click.command("demo")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where runs and data are kept [default: below ~/.local/state/r4090c].",
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe, e.g. --set steps=100.")
@json_option
def command(folder: Path | None, sets: tuple[str, ...], as_json: bool) -> int:
    """Train `tiny` with DeepSpeed ZeRO-2 on two nodes made of this machine: two sshd on loopback. No root, no GPU.

    Everything it starts is ended again, also after Ctrl-C; the run folder stays.

    \b
    Examples:
      r4090c demo
      r4090c demo --set steps=100
    """
    missing = [name for name in ("torch", "deepspeed", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            "the demo", f"{', '.join(missing)} not installed in {sys.prefix}", "the extra `train`", "pip install 'r4090c[train]'"
        )
    from launch.run import Wish, gate, start
    from netcheck.preflight import run_preflight
    from netcheck.report import screen
    from provision.loopback import LoopbackCluster
    from r4090c.cli.follow import follow_attempt
    from r4090c.inventory import load_cluster
    from r4090c.remote import Fleet
    from r4090c.store import state_folder

    console = err()
    shared = (folder or state_folder() / "demo").expanduser().absolute()
    shared.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with LoopbackCluster(nodes=2, python=sys.executable, shared=shared) as cluster_file:
        console.print("[bold]1. two nodes[/bold]: demo01 and demo02, each a real sshd on 127.0.0.1 with its own host key")
        cluster = load_cluster(cluster_file)
        with Fleet(cluster.nodes) as fleet:
            console.print("[bold]2. preflight[/bold]")
            asked = time.monotonic()
            _, _, findings = run_preflight(fleet, cluster, cluster.nodes)
            names = [node.name for node in cluster.nodes]
            for line in screen(cluster.name, names, time.monotonic() - asked, findings, width=console.width):
                console.print(line.text, style=line.style or None, markup=False, soft_wrap=True)
            gate(findings)
            console.print("[bold]3. launch tiny[/bold]: DeepSpeed ZeRO-2 over SSH, one rank a node")
            wish = Wish("tiny", sets, cluster.nodes)

            def begin() -> Supervisor:
                return start(fleet, cluster, wish, lambda text: console.print(text, style="dim", markup=False))

            followed = follow_attempt(begin, began, as_json, resumable=False)
            result, code = followed.told, followed.code
    if as_json:
        print_json(result)
    if code != Exit.OK:
        return code
    where = result["run_dir"]
    console.print(
        f"\n[bold]What happened[/bold]: {result['last_step']} optimizer steps of a small Llama on {len(result['nodes'])} nodes, "
        f"loss {result['first_loss']:.3f} → {result['last_loss']:.3f}, {result['tokens_per_s']:,.0f} tokens/s; "
        f"{time.time() - began:.0f} s in all.",
        soft_wrap=True,
    )
    console.print(f"The run folder is {where}", soft_wrap=True)
    console.print(
        "  plan.json what was run   metrics.jsonl every step   attempt_1/0.log rank 0's log   checkpoints/ to resume from"
    )
    console.print("Everything that was started has been taken down.\n")
    console.print("[bold]Next[/bold], with nodes of your own:")
    console.print("  r4090c nodes --import HOSTFILE > cluster.yaml     or edit the commented example cluster.yaml")
    console.print("  r4090c provision ssh-trust                        make the nodes trust each other")
    console.print("  r4090c preflight                                  are they fit?")
    console.print("  r4090c launch tiny                                the same training there")
    return Exit.OK
