"""`r4090c recipes`: the recipes that come with r4090c, and one of them whole."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import click

from r4090c.cli.common import json_option, out, print_json
from r4090c.errors import R4090cError, UsageError

SCHEMA = "r4090c.recipes/1"
WIDTH_MAX = 120
"""Columns of the table where the output is wider, or no terminal."""


@click.command("recipes")
@click.argument("words", metavar="[show] [RECIPE]", nargs=-1)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of a recipe, for editors that complete and check.")
@json_option
def command(words: tuple[str, ...], schema: bool, as_json: bool) -> None:
    """List the recipes, or print one (`show` may be left out): to read it, or as the start of your own.

    A recipe of your own is a .yaml file: `plan` and `launch` take its path in place of a name. Every key can be changed for one
    run by `--set KEY=VALUE`, those inside others with a dot: `--set optimizer.lr=1e-4`.

    \b
    Examples:
      r4090c recipes
      r4090c recipes show llama7b > mine.yaml
      r4090c plan mine.yaml --assume 1x8x4090
      r4090c recipes --schema > recipe.schema.json
    and as the first line of mine.yaml:
      # yaml-language-server: $schema=recipe.schema.json
    """
    from launch.recipe import FOLDER, load_recipe, recipe_names, untrainable

    if schema:
        print_json(_schema())
        return
    names = words[1:] if words[:1] == ("show",) else words
    if len(names) > 1 or (words and not names):
        known = ", ".join(recipe_names())
        raise UsageError(" ".join(words), f"{len(names) or 'no'} recipes", f"one of {known}, or a .yaml file", "r4090c recipes")
    target = names[0] if names else None
    if target is not None:
        recipe = load_recipe(target)
        if as_json:
            print_json({"schema": SCHEMA, "recipes": [recipe]})
        else:
            own = target.endswith((".yaml", ".yml"))
            click.echo((click.open_file(target) if own else (FOLDER / f"{target}.yaml").open()).read(), nl=False)
        return
    recipes = [load_recipe(name) for name in recipe_names()]
    if as_json:
        print_json({"schema": SCHEMA, "recipes": recipes})
        return
    _show([(recipe, untrainable(recipe)) for recipe in recipes])


def _schema() -> Any:
    """Return the schema, of which train/ alone knows: it is asked in a process of its own."""
    from launch.recipe import FOLDER

    asked = FOLDER.parent / "recipe.py"
    done = subprocess.run([sys.executable, str(asked)], capture_output=True, text=True)
    if done.returncode != 0:
        raise R4090cError(str(asked), f"ended with {done.returncode}: {done.stderr.strip()[-300:]}", "the schema")
    return json.loads(done.stdout)


def _show(found: list[tuple[dict[str, Any], tuple[str, ...]]]) -> None:
    from rich.table import Table

    console = out()
    console.width = min(console.width, WIDTH_MAX)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("recipe", "method", "trains", "what it is"):
        table.add_column(head, no_wrap=head != "what it is")
    for recipe, blocked in found:
        table.add_row(recipe["name"], recipe["method"], "no" if blocked else "yes", recipe["description"])
    console.print(table)
    if any(blocked for _, blocked in found):
        console.print(
            "\ntrains no: this version plans it; `r4090c launch RECIPE` says what is missing", style="dim", markup=False
        )
