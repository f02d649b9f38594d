"""`r4090c data prepare`: text -> the token files that recipes with `data.kind: prepared` train on."""

from __future__ import annotations

import os
import shutil
import sys
from typing import NoReturn

import click

from r4090c.cli.common import json_option
from r4090c.errors import UsageError


@click.group("data")
def command() -> None:
    """Prepare text for training, on this machine; put the result where the nodes' data folder is."""


@command.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT…", type=click.Path())
@click.option(
    "--tokenizer", required=True, metavar="PATH|bytes", help="The model's folder on this machine, a tokenizer.json, or bytes."
)
@click.option(
    "--out", required=True, metavar="DIR", type=click.Path(file_okay=False), help="The folder to write; it appears whole."
)
@click.option(
    "--template",
    default="auto",
    metavar="auto|default|FILE",
    help="How a chat becomes text: the tokenizer's own template where it has one [auto], ours, or a Jinja file.",
)
@click.option(
    "--packing",
    type=click.Choice(["auto", "stream", "whole"]),
    default="auto",
    help="Documents run on across sequences (stream), or none that fits is cut (whole) [auto: whole when there are prompts].",
)
@click.option("--eos", metavar="TOKEN", help="The token that ends a document, where the tokenizer does not tell.")
@click.option("--max-bad", type=click.IntRange(0), default=0, metavar="N", help="So many bad records may be left out [0].")
@click.option(
    "--max-record-mib",
    type=click.FloatRange(0, 1024, min_open=True),
    default=16.0,
    metavar="MIB",
    help="A longer line of JSON is a bad record [16].",
)
@click.option(
    "--workers", type=click.IntRange(1), metavar="N", help="Processes [a core each, at most 4: less than 1 GiB together]."
)
@click.option("--python", metavar="PYTHON", help="The Python that has numpy and tokenizers [this one].")
@click.option("--dry-run", is_flag=True, help="Count the records and show the first ones as the model will see them.")
@json_option
def prepare(
    inputs: tuple[str, ...],
    tokenizer: str,
    out: str,
    template: str,
    packing: str,
    eos: str | None,
    max_bad: int,
    max_record_mib: float,
    workers: int | None,
    python: str | None,
    dry_run: bool,
    as_json: bool,
) -> NoReturn:
    """Tokenize INPUT (files or folders) into DIR: token files, an index and a manifest with hashes.

    .jsonl files hold a record a line: {"text": …}, {"instruction": …, "input": …, "output": …} or
    {"messages": [{"role": …, "content": …}, …]}; other files are plain text. Only responses count toward the loss of a chat.
    The text of a special token inside the data stays text. Bad records are told by reason with their places, and with more than
    --max-bad nothing is written. When the same command is started again after it was ended, it goes on where it was. At the end
    it tells how long the documents are, in tokens, and the lines for a recipe.

    \b
    Examples:
      r4090c data prepare chats.jsonl --tokenizer models/llama-2-7b --out data/chat --dry-run
      r4090c data prepare chats.jsonl --tokenizer models/llama-2-7b --out data/chat
      r4090c data prepare books/ --tokenizer bytes --out data/text

    \b
    Exit codes: 0 done; 1 more bad records than --max-bad, or it failed; 2 wrong input; 130 and 143 stopped.
    """
    from launch.recipe import FOLDER

    program = shutil.which(python or sys.executable)
    if program is None:
        raise UsageError(f"--python {python}", "no such program", "the Python that has numpy and tokenizers")
    options = {"--tokenizer": tokenizer, "--out": out, "--template": template, "--packing": packing, "--max-bad": max_bad}
    options |= (
        {"--max-record-mib": max_record_mib} | ({"--eos": eos} if eos else {}) | ({"--workers": workers} if workers else {})
    )
    flags = [name for name, given in (("--dry-run", dry_run), ("--json", as_json)) if given]
    words = [f"{name}={value}" for name, value in options.items()]
    sys.stdout.flush()
    os.execv(program, [program, str(FOLDER.parent / "prepare.py"), *words, *flags, "--", *inputs])
