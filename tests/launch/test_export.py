"""Exporting from the controller: what the program on the other side tells becomes our result or our error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.export import EXPORT, _follow, run_here
from launch.jobs import Run
from launch.recipe import load_recipe
from launch.run import Wish, _resumed_recipe
from r4090c.cli.export import _notes
from r4090c.errors import Exit, R4090cError, UsageError
from tests.cli import run


def test_a_mistake_of_the_user_is_told_as_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no checkpoints"):
        run_here(EXPORT, tmp_path, [], print)
    (tmp_path / "checkpoints").mkdir()
    said: list[str] = []
    with pytest.raises(UsageError) as caught:  # by train/export.py, before it imports any library
        run_here(EXPORT, tmp_path, ["--merged"], said.append)
    assert (caught.value.culprit, caught.value.observed) == (str(tmp_path / "checkpoints"), "no checkpoint yet")
    assert caught.value.exit_code == Exit.USAGE


def test_a_relative_folder_on_a_node_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    code, _, errors = run("export", "tiny-1", "--out", "out1", state=tmp_path)
    assert (code, "--out out1: a relative path" in errors) == (Exit.USAGE, True), errors
    assert "r4090c export tiny-1 --out /mnt/shared/out1" in errors


def test_what_a_person_should_know_of_an_export_is_told() -> None:
    result = {"node": "node02", "load": "load(OUT)", "tokenizer": "/models/toy", "chat_template": "of the data (default)"}
    assert [note.split()[:2] for note in _notes({**result, "notices": ["no effect"]})] == [
        *(["node:", "node02"], ["load:", "load(OUT)"], ["chat:", "template"], ["notice:", "no"])
    ]
    assert "tokenizer: none" in _notes({**result, "tokenizer": None})[-1]


def test_what_the_program_says_is_followed() -> None:
    said: list[str] = []
    lines = ['{"doing": "reading"}', "a library's warning", "[1, 2]", '{"result": {"out": "/x"}}']
    assert _follow(lines, lambda: 0, said.append, "here") == {"out": "/x"}
    assert said == ["reading"]
    with pytest.raises(R4090cError, match="disk: full") as caught:
        _follow([json.dumps({"error": ["disk", "full", "room", "df -h"], "exit_code": 1})], lambda: 1, print, "here")
    assert caught.value.exit_code == Exit.FAILED
    with pytest.raises(R4090cError, match=r"ended with -9: last words"):
        _follow(["last words"], lambda: -9, print, "here")


def test_a_run_without_a_checkpoint_here_is_resumed_from_its_copy() -> None:
    def ended(recipe: dict[str, Any]) -> Run:
        plan: dict[str, Any] = {}
        return Run("tiny-1", "lost", "tiny", ("node01",), "/runs/tiny-1", 1, 3, 40, "", None, plan, recipe, ())

    with pytest.raises(UsageError, match="has no complete checkpoint"):
        _resumed_recipe(ended(load_recipe("tiny")), "tiny", Wish("tiny"))
    copied = load_recipe("tiny", ["checkpoint.copy_to=s3://bucket/prefix"])
    assert _resumed_recipe(ended(copied), "tiny", Wish("tiny"))["checkpoint"]["copy_to"] == "s3://bucket/prefix"
