"""Recipes: what comes with r4090c loads, `--set` changes what is there, and every mistake names the nearest right thing."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch.measured import Known
from launch.recipe import (
    FOLDER,
    OPTIONAL,
    REQUIRED,
    accumulation_of,
    is_script,
    load_ds_config,
    load_recipe,
    recipe_names,
    require_trainable,
    untrainable,
)
from launch.run import Wish, _foreseen, paper_plan, prepare, require_valid
from launch.training import training_of
from r4090c.errors import InputErrors, UsageError
from tests.launch.test_plan import gpu_nodes


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_is_json(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe["name"] == name
    assert json.loads(json.dumps(recipe)) == recipe
    assert (FOLDER.parent / recipe["script"]).is_file()


def test_set_changes_values_of_every_kind() -> None:
    recipe = load_recipe(
        "tiny",
        [
            "steps=20",
            "optimizer.lr=1e-3",
            "optimizer.weight_decay=1",
            "optimizer.betas=[0.8, 0.9]",
            "model.config.hidden_size=64",
            "model.config.use_cache=true",
            "description=",
            "ds_config=/etc/ds/my.json",
            "seed=-1",
        ],
    )
    assert (recipe["steps"], recipe["seed"], recipe["description"]) == (20, -1, "")
    assert (recipe["optimizer"]["lr"], recipe["optimizer"]["weight_decay"]) == (0.001, 1.0)
    assert isinstance(recipe["optimizer"]["weight_decay"], float)
    assert recipe["optimizer"]["betas"] == [0.8, 0.9]
    assert (recipe["model"]["config"]["hidden_size"], recipe["model"]["config"]["use_cache"]) == (64, True)
    assert recipe["ds_config"] == "/etc/ds/my.json"
    assert load_recipe("tiny")["steps"] != 20  # nothing is remembered


def test_the_micro_batch_is_a_number_or_auto() -> None:
    auto = load_recipe("tiny", ["micro_batch=auto", "global_batch=16"])
    assert (auto["micro_batch"], auto["global_batch"]) == ("auto", 16)
    assert load_recipe("tiny", ["micro_batch=8"], base=auto)["micro_batch"] == 8
    for wrong in ("many", "0", "2.5", "[1]"):
        for base in (None, auto):
            with pytest.raises(UsageError, match="micro_batch"):
                load_recipe("tiny", [f"micro_batch={wrong}"], base=base)


@pytest.mark.parametrize(
    ("text", "observed", "expected"),
    [
        ("stpes=20", "the recipe has no key 'stpes'; did you mean steps?", "one of name, "),
        ("optimizer.lrr=1", "optimizer has no key 'lrr'; did you mean optimizer.lr?", "one of name, lr, betas"),
        ("modle.config.hidden_size=1", "did you mean model?", ""),
        ("steps.more=1", "steps has no keys of its own", "--set steps=VALUE"),
        ("a..b=1", "the recipe has no key 'a'", ""),
        ("steps", "no `=`", "key=value"),
        ("=3", "no key", "key=value"),
        ("steps=many", "'many' is text", "a whole number like "),
        ("steps=2.5", "2.5 is a number", "a whole number like "),
        ("steps=true", "True is true or false", "a whole number like "),
        ("steps=", "'' is text", "a whole number like "),
        ("steps=null", "None is nothing (null)", "a whole number like "),
        ("optimizer.lr=null", "None is nothing (null)", "a number like "),
        ("optimizer.lr=nan", "'nan' is no finite number", "a number like "),
        ("optimizer.lr=-.inf", "'-.inf' is no finite number", "a number like "),
        ("optimizer.lr=fast", "'fast' is text", "a number like "),
        ("description=7", "7 is a whole number", "text like "),
        ("optimizer=adam", "'adam' is text", "a mapping like "),
        ("steps=[1", "the value is not YAML", ""),
        ("steps=0", "0", "at least 1"),
        ("micro_batch=-4", "-4", "at least 1"),
    ],
)
def test_mistakes_of_set(text: str, observed: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe("tiny", [text])
    assert observed in caught.value.observed
    assert caught.value.expected.startswith(expected)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(InputErrors) as caught:
        load_recipe("tiny", ["stpes=1", "seed=x", "steps=0"])
    assert len(caught.value.errors) == 3


@pytest.mark.parametrize("target", ["tinny", "", "../recipes/tiny", "/etc/passwd", "tiny\n", "nothing.yaml", "tiny.yaml"])
def test_a_recipe_that_is_not_there(target: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(target)
    assert "tiny" in caught.value.expected
    if target == "tinny":
        assert caught.value.observed == "there is none (did you mean tiny?)"


def own(tmp_path: Path, **changes: Any) -> str:
    """Write a recipe of the user's own; a value of None drops the key."""
    recipe = {key: value for key, value in {**load_recipe("tiny"), **changes}.items() if value is not None}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def test_a_recipe_of_the_users_own(tmp_path: Path) -> None:
    assert load_recipe(own(tmp_path, name="mine", steps=7), ["seed=5"])["steps"] == 7


HOSTILE = ["../main.py", "/etc/passwd", "/main.py", "", ".", "recipes/../../launch/agent.py", "main.py\0", "..\\main.py"]


@pytest.mark.parametrize("script", [*HOSTILE, "none.py", "recipes/tiny.yaml"])
def test_a_hostile_or_missing_script_is_refused(tmp_path: Path, script: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(own(tmp_path, script=script))
    assert caught.value.expected == "a Python file below train/, like main.py"


@pytest.mark.parametrize("name", ["../../x", "a/b", "", "-x", "x" * 65, "a b", "ü", "."])
def test_a_name_that_cannot_be_part_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="letters, digits"):
        load_recipe(own(tmp_path, name=name))


@pytest.mark.parametrize(
    ("changes", "observed"),
    [({"optimizer": "adamw"}, "'adamw'"), ({"steps": True}, "True"), ({"seed": None}, "missing"), ({"model": [1]}, "[1]")],
)
def test_a_missing_or_mistyped_key(tmp_path: Path, changes: dict[str, Any], observed: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(own(tmp_path, **changes))
    assert caught.value.observed == observed
    assert next(iter(changes)) in caught.value.culprit


@pytest.mark.parametrize(
    "text",
    [
        *("- a\n- b\n", "", "just text", "a: [1\n", "\x00", "name: 2026-13-45", f"steps: {'9' * 5000}"),
        "a: " + "[" * 3000,
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"description": date(2026, 11, 30)}, "description"),
        ({"gradient_clipping": math.nan}, "gradient_clipping"),
        ({"schedule": {"name": "cosine", 1: 2}}, "schedule.1"),
        ({"optimizer": {"name": "adamw", "betas": [0.9, math.inf]}}, "optimizer.betas[1]"),
    ],
)
def test_what_json_cannot_hold_is_refused_here_and_not_on_the_nodes(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UsageError, match="JSON") as caught:
        load_recipe(own(tmp_path, **changes))
    assert caught.value.culprit.endswith(f": {key}")


def test_an_alias_that_contains_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="more than 32 deep"):
        load_recipe("tiny", ["lora.targets=&a [*a]"])


@pytest.mark.parametrize("value", ["2026-13-45", "9" * 5000, "[" * 3000])
def test_a_value_of_set_that_yaml_chokes_on(value: str) -> None:
    with pytest.raises(UsageError, match="the value is not YAML"):
        load_recipe("tiny", [f"description={value}"])


def test_a_configuration_that_json_chokes_on(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="ds_config"):
        load_ds_config({"ds_config": str(path)})


def test_a_resumed_recipe_is_changed_without_changing_the_old_one() -> None:
    before = load_recipe("tiny", ["steps=9"])
    after = load_recipe("tiny", ["optimizer.lr=0.5"], base=before)
    assert (after["steps"], after["optimizer"]["lr"]) == (9, 0.5)
    assert before["optimizer"]["lr"] != 0.5


@given(st.text(max_size=30))
def test_any_text_of_set_is_a_recipe_or_a_usage_error(text: str) -> None:
    try:
        recipe = load_recipe("tiny", [text])
    except UsageError as error:
        assert error.culprit
    else:
        json.dumps(recipe, allow_nan=False)


@given(st.sampled_from(["steps", "optimizer.lr", "description", "model", "resume", "optimizer.betas"]), st.text(max_size=30))
def test_any_value_of_set_keeps_the_kind(key: str, value: str) -> None:
    before = load_recipe("tiny")
    try:
        after = load_recipe("tiny", [f"{key}={value}"])
    except UsageError:
        return
    first, _, second = key.partition(".")
    assert type(after[first]) is type(before[first])
    if second:
        assert type(after[first][second]) is type(before[first][second])


def test_what_is_a_script() -> None:
    assert is_script("./train.py") and not is_script("tiny") and not is_script("tiny.yaml")


def test_unknown_keys_and_configurations_that_do_not_exist_are_refused_here_and_not_on_the_nodes(tmp_path: Path) -> None:
    recipe = load_recipe("tiny")
    recipe["gradient_acumulation"] = 2
    recipe["ds_config"] = "zero9.json"
    del recipe["schedule"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with pytest.raises(InputErrors) as told:
        load_recipe(str(path))
    text = str(told.value)
    assert "schedule: missing" in text
    assert "gradient_acumulation: unknown; did you mean gradient_accumulation?" in text
    assert "ds_config: 'zero9.json'" in text and "zero2.json" in text


def test_the_keys_are_those_of_the_recipe_the_training_side_reads() -> None:
    golden = json.loads((Path(__file__).parent.parent / "golden" / "recipe-tiny.json").read_text())
    assert set(golden) == set(REQUIRED) | set(OPTIONAL)


def test_credentials_do_not_get_into_a_recipe() -> None:
    recipe = load_recipe("tiny", ["checkpoint.copy_to=s3://bucket/prefix", "checkpoint.keep_hours=12"])
    assert recipe["checkpoint"]["copy_to"] == "s3://bucket/prefix"
    assert recipe["checkpoint"]["keep_hours"] == 12.0
    for url in ("s3://someone:hidden@bucket/prefix", "s3://bucket/prefix?key=hidden"):
        with pytest.raises(UsageError, match=r"--set checkpoint\.copy_to: holds credentials or options") as caught:
            load_recipe("tiny", [f"checkpoint.copy_to={url}"])
        assert "hidden" not in str(caught.value)


QWEN = {"model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
QWEN |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def test_a_models_folder_stands_for_what_its_configuration_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN))
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("llama7b", ["model=qwen", "model.config.use_cache=true"])
    assert (recipe["model"]["family"], recipe["model"]["weights"]) == ("qwen3", str(tmp_path / "qwen"))
    expected = {key: value for key, value in QWEN.items() if key not in ("model_type", "torch_dtype")} | {"use_cache": True}
    assert recipe["model"]["config"] == expected
    assert untrainable(recipe) == ()
    training = training_of(recipe, load_ds_config(recipe))
    assert training.shape.parameters == 2 * (2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 32) + 300 * 64 + 64

    own = load_recipe("llama7b") | {"model": "qwen", "name": "mine"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own))
    assert load_recipe("mine.yaml", ["model.config.use_cache=true"])["model"] == recipe["model"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "config.json: No such file or directory"),
        ("[]", "config.json: no JSON with model_type"),
        ("{", "config.json: no JSON with model_type"),
        ('{"vocab_size": 3}', "config.json: no JSON with model_type"),
    ],
)
def test_a_folder_that_is_no_model_is_told(content: str | None, told: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        load_recipe("llama7b", [f"model={tmp_path}"])
    assert told in str(caught.value) and "at this path here and on the nodes" in str(caught.value)


def test_a_family_that_cannot_be_planned_is_launched_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whether it trains, transformers on the nodes says."""
    told = {"model_type": "gemma3_text", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(told))
    sets = (f"model={tmp_path}", "lora.targets=[q_proj]")
    cluster, facts = gpu_nodes()
    prepared = prepare(None, cluster, Wish("llama7b", sets, cluster.nodes))
    assert prepared.recipe is not None
    require_trainable(prepared.recipe)
    require_valid(prepared.recipe)
    assert prepared.recipe["model"]["family"] == "gemma3_text"
    plan, site = paper_plan(cluster, prepared, facts, Known())
    assert _foreseen(plan, prepared, site) == (plan, None)
    assert "memory and speed are not planned: recipe llama7b: model.family: memory and speed of 'gemma3_text'" in caplog.text


@pytest.mark.parametrize("family", ["gem/ma", "../gemma", "gemma 3", "gemma3\n", "", "g" * 65])
def test_a_familys_name_is_a_word(family: str) -> None:
    with pytest.raises(UsageError, match="family"):
        require_valid(load_recipe("llama7b", [f"model.family={json.dumps(family)}"]))


def test_what_the_ranks_would_refuse_is_told_before_they_start() -> None:
    require_valid(load_recipe("resnet50"))
    sets = ["optimizer.lr=-1", "checkpoint.every_steps=0", "kernels.attention=falsh", "eval.every_steps=5"]
    with pytest.raises(UsageError) as told:
        require_valid(load_recipe("tiny", sets))
    assert told.value.culprit == "recipe tiny"
    for key in ("optimizer.lr", "checkpoint.every_steps", "kernels.attention", "eval: every_steps needs data"):
        assert key in told.value.observed
    with pytest.raises(UsageError, match=r"loss_spike: 0\.5 stops every run") as told:
        require_valid(load_recipe("tiny", ["loss_spike=0.5"]))
    assert "hidden_size" not in told.value.observed  # the mistake, not the whole recipe


def test_the_micro_steps_follow_from_the_global_batch() -> None:
    assert accumulation_of(load_recipe("tiny"), 2) == 2
    assert accumulation_of(load_recipe("tiny", ["global_batch=24"]), 4) == 3
    assert accumulation_of(load_recipe("tiny", ["global_batch=24", "micro_batch=auto"]), 4) == 6
    with pytest.raises(UsageError, match="24 sequences a step: 5 ranks of micro_batch 2") as told:
        accumulation_of(load_recipe("tiny", ["global_batch=24"]), 5)
    assert told.value.expected == "a multiple of 10"
