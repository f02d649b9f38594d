"""`r4090c schema`: the JSON Schema of cluster.yaml."""

from __future__ import annotations

import click

from r4090c.cli.common import print_json


@click.command()
def command() -> None:
    """Print the JSON Schema (draft 2020-12) of cluster.yaml, for editors that complete and check while you type.

    That of a recipe: `r4090c recipes --schema`.

    \b
    Examples:
      r4090c schema > cluster.schema.json
    and as the first line of cluster.yaml:
      # yaml-language-server: $schema=cluster.schema.json
    """
    from r4090c.inventory import json_schema

    print_json(json_schema())
