"""`r4090c eval`: the loss of a run's checkpoint on data that it was not trained on."""

from __future__ import annotations

import os
from pathlib import Path

import click

from r4090c.cli.common import cluster_option, err, json_option, load, print_json
from r4090c.errors import Exit


@click.command("eval")
@click.argument("run", metavar="RUN")
@click.option(
    "--data",
    metavar="PATH",
    help="A folder of `r4090c data prepare` (or of images), absolute or below the shared data folder [the recipe's eval.data].",
)
@click.option(
    "--sequences", type=click.IntRange(0), metavar="N", help="So many of it, 0 = all [default: the recipe's eval.sequences]."
)
@click.option("--step", type=click.IntRange(1), help="The checkpoint after this step [default: the newest whole one].")
@cluster_option
@json_option
def command(run: str, data: str | None, sequences: int | None, step: int | None, cluster_file: str | None, as_json: bool) -> int:
    """Tell RUN's loss and perplexity on held-out data. One GPU of one node does it (or its CPU).

    RUN is an id as `r4090c jobs` shows it, and the work is done on a node of the run; or the path of a run's folder on this
    machine, which then needs torch and transformers itself.

    \b
    Examples:
      r4090c data prepare held-out.jsonl --tokenizer MODEL --out /mnt/shared/r4090c/data/chat-held-out
      r4090c eval llama7b-20260131-120000-a1b2 --data chat-held-out
      r4090c eval llama7b-20260131-120000-a1b2 --data chat-held-out --step 200 --sequences 0 --json
      r4090c eval ./runs/tiny-20260131-120000-a1b2 --data /data/bytes-held-out
    """
    from launch.export import EVALUATE, run_here, run_on_node
    from launch.jobs import find_run
    from r4090c.remote import Fleet

    options = [f"--data={data}"] if data else []
    options += [f"--sequences={sequences}"] if sequences is not None else []
    options += [f"--step={step}"] if step else []
    console = err()

    def say(text: str) -> None:
        console.print(text, style="dim", markup=False)

    if os.sep in run:
        result = run_here(EVALUATE, Path(run), options, say)
    else:
        cluster = load(cluster_file)
        with Fleet(cluster.nodes) as fleet:
            result = run_on_node(EVALUATE, fleet, cluster, find_run(fleet, cluster, run), options, say)
    if as_json:
        print_json(result)
        return Exit.OK
    perplexity = f"  perplexity {result['eval_perplexity']:.3f}" if "eval_perplexity" in result else ""
    if "notice" in result:
        console.print(f"notice: {result['notice']}", style="yellow", markup=False, soft_wrap=True)
    click.echo(f"step {result['step']}  loss {result['eval_loss']:.6f}{perplexity}  over {result['samples']:,} samples")
    return Exit.OK
