"""`r4090c recipes`: the list, one recipe as it stands in its file, and a recipe that is not there."""

from __future__ import annotations

from pathlib import Path

from launch.recipe import FOLDER, recipe_names
from r4090c.errors import Exit
from tests import cli


def test_the_list_names_all_and_says_which_train(tmp_path: Path) -> None:
    code, output, _ = cli.run("recipes", state=tmp_path)
    rows = {
        line.split()[0]: line.split()[2]
        for line in output.splitlines()
        if line[:1].isalpha() and line.split()[0] in recipe_names()
    }
    assert code == Exit.OK
    assert set(rows) == set(recipe_names())
    assert rows["tiny"] == "yes" and rows["llama13b"] == "no"


def test_one_recipe_is_its_file_and_can_be_the_start_of_ones_own(tmp_path: Path) -> None:
    code, output, _ = cli.run("recipes", "llama7b", state=tmp_path)
    assert (code, output) == (Exit.OK, (FOLDER / "llama7b.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(output.replace("name: llama7b", "name: mine"))
    told = cli.run_json("recipes", "mine.yaml", "--json", state=tmp_path)
    assert [one["name"] for one in told["recipes"]] == ["mine"]
    assert {one["name"] for one in cli.run_json("recipes", "--json", state=tmp_path)["recipes"]} == set(recipe_names())


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    code, output, errors = cli.run("recipes", "llama14b", state=tmp_path)
    assert (code, output) == (Exit.USAGE, "")
    assert "did you mean llama13b?" in errors
