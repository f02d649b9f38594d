"""`r4090c export`: turn a run's checkpoint into a folder that transformers or peft loads."""

from __future__ import annotations

import os
from pathlib import Path

import click

from r4090c.cli.common import cluster_option, err, json_option, load, print_json
from r4090c.errors import Exit, UsageError


@click.command("export")
@click.argument("run", metavar="RUN")
@click.option(
    "--out",
    metavar="FOLDER",
    help="Folder to make, on the node: an absolute path [default: export, or export-merged, in the run's folder].",
)
@click.option(
    "--merged", is_flag=True, help="Adapters: add them to the weights they were trained beside, to be loaded without peft."
)
@click.option("--step", type=click.IntRange(1), help="The checkpoint after this step [default: the newest whole one].")
@cluster_option
@json_option
def command(run: str, out: str | None, merged: bool, step: int | None, cluster_file: str | None, as_json: bool) -> int:
    """Write the weights that RUN trained, for transformers; of LoRA and QLoRA the adapters, for peft.

    RUN is an id as `r4090c jobs` shows it, and the work is done on a node of the run; or the path of a run's folder on this
    machine, which then needs torch and transformers itself.

    \b
    Examples:
      r4090c export llama7b-20260131-120000-a1b2
      r4090c export llama7b-20260131-120000-a1b2 --merged --out /shared/models/mine
      r4090c export ./runs/tiny-20260131-120000-a1b2
    """
    from launch.export import EXPORT, run_here, run_on_node
    from launch.jobs import find_run
    from r4090c.remote import Fleet

    options = [*(["--merged"] if merged else []), *(["--step", str(step)] if step else [])]
    console = err()

    def say(text: str) -> None:
        console.print(text, style="dim", markup=False)

    if os.sep in run:
        result = run_here(EXPORT, Path(run), [*options, *(["--out", str(Path(out).absolute())] if out else [])], say)
    else:
        if out and not out.startswith("/"):
            expected = "a path that begins with /: it is a folder of the node's, where a relative one would lie in the home"
            raise UsageError(f"--out {out}", "a relative path", expected, f"r4090c export {run} --out /mnt/shared/{out}")
        cluster = load(cluster_file)
        with Fleet(cluster.nodes) as fleet:
            found = find_run(fleet, cluster, run)
            result = run_on_node(EXPORT, fleet, cluster, found, [*options, *(["--out", out] if out else [])], say)
    if as_json:
        print_json(result)
        return Exit.OK
    console.print(f"{result['kind']} of step {result['step']}, {result['bytes'] / 1e6:,.1f} MB", style="green", markup=False)
    for note in _notes(result):
        console.print(note, soft_wrap=True, markup=False)
    click.echo(result["out"])
    return Exit.OK


def _notes(result: dict[str, object]) -> list[str]:
    """Return what a person should know of an export."""
    notes = [f"  node:      {result['node']}"] if "node" in result else []
    notes.append(f"  load:      {result['load']}")
    if "base" in result:
        notes.append(f"  base:      {result['base']}")
    if "merged_into" in result:
        notes.append(f"  merged:    into {result['merged_into']}")
    if result["tokenizer"] is None:
        notes.append("  tokenizer: none: neither the weights' folder nor the data names one")
    elif result.get("chat_template"):
        notes.append(f"  chat:      template {result['chat_template']}")
    told = result.get("notices")
    return [*notes, *(f"  notice:    {notice}" for notice in (told if isinstance(told, list) else []))]
