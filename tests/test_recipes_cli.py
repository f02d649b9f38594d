"""`r4090c recipes`: the list, one recipe as it stands in its file, and a recipe that is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from launch.recipe import FOLDER, load_recipe, recipe_names
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
    assert set(rows.values()) == {"yes"}


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


def test_show_is_the_same_and_takes_one(tmp_path: Path) -> None:
    assert cli.run("recipes", "show", "tiny", state=tmp_path) == cli.run("recipes", "tiny", state=tmp_path)
    for words in (("show",), ("show", "tiny", "llama7b"), ("tiny", "llama7b")):
        code, output, errors = cli.run("recipes", *words, state=tmp_path)
        assert (code, output) == (Exit.USAGE, "")
        assert "expected: one of llama13b, " in errors


def test_the_schema_takes_every_recipe_and_refuses_what_the_training_refuses(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    code, output, errors = cli.run("recipes", "--schema", state=tmp_path)
    assert code == Exit.OK, errors
    schema = json.loads(output)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for name in recipe_names():
        written = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        assert [f"{name}: {error.message}" for error in validator.iter_errors(written)] == []
        assert list(validator.iter_errors(load_recipe(name))) == []  # as the nodes read it
    tiny = yaml.safe_load((FOLDER / "tiny.yaml").read_text())
    assert validator.is_valid(tiny | {"micro_batch": "auto"})
    for wrong in ({"micro_batch": "all"}, {"micro_batch": 0}, {"setps": 3}, {"method": "qlora8"}, {"seed": "x"}):
        assert not validator.is_valid(tiny | wrong), wrong
