"""`r4090c recipes`: the recipes that come with r4090c, and one of them whole."""

from __future__ import annotations

from typing import Any

import click

from r4090c.cli.common import json_option, out, print_json

SCHEMA = "r4090c.recipes/1"
WIDTH_MAX = 120
"""Columns of the table where the output is wider, or no terminal."""


@click.command("recipes")
@click.argument("target", metavar="[RECIPE]", required=False)
@json_option
def command(target: str | None, as_json: bool) -> None:
    """List the recipes, or print one: to read it, or as the start of your own.

    A recipe of your own is a .yaml file: `plan` and `launch` take its path in place of a name. Every key can be changed for one
    run by `--set KEY=VALUE`, those inside others with a dot: `--set optimizer.lr=1e-4`.

    \b
    Examples:
      r4090c recipes
      r4090c recipes llama7b > mine.yaml
      r4090c plan mine.yaml --assume 1x8x4090
    """
    from launch.recipe import FOLDER, load_recipe, recipe_names, untrainable

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
