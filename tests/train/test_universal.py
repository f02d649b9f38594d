"""A run goes on with another number of ranks: the same weights and moments bit for bit, the same losses."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from train import checkpoint
from train.checkpoint import Saved
from train.errors import Stop
from train.recipe import Recipe

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the extra `train`", allow_module_level=True)
pytestmark = pytest.mark.train

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "train" / "main.py"
TINY: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "recipe-tiny.json").read_text())
LEFT_OUT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in LEFT_OUT} | {
    "R4090C_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


def small(**changes: Any) -> dict[str, Any]:
    """Return `tiny` with a model of 0.1 M parameters and 12 sequences a step on two ranks: 1 and 3 divide them too."""
    recipe = copy.deepcopy(TINY)
    recipe["model"]["config"] |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    recipe["model"]["config"]["num_key_value_heads"] = 2
    recipe["data"] |= {"sequence_length": 64, "max_mib": 1}
    recipe["lora"] = {"rank": 8, "alpha": 32, "dropout": 0.0, "targets": ["q_proj", "v_proj", "down_proj"]}
    recipe |= {"gradient_accumulation": 3, "steps": 6, "checkpoint": {"every_steps": 3, "keep": 0}}
    return recipe | changes


# --------------------------------------------------------------------------- the global batch


def saved(tmp_path: Path, **manifest: Any) -> Saved:
    return Saved(tmp_path / "step_00000003", {"step": 3, "world_size": 2, "data_sha256": "d1", **manifest})


def test_the_global_batch_stays_and_the_micro_batch_never_grows(tmp_path: Path) -> None:
    def divided(ranks: int, **changes: Any) -> tuple[int, int, int]:
        recipe = checkpoint.divided(Recipe.model_validate(small(**changes)), start, ranks)
        assert recipe.samples_per_step(ranks) == (recipe.micro_batch * recipe.gradient_accumulation * ranks)
        return recipe.micro_batch, recipe.gradient_accumulation, recipe.samples_per_step(ranks)

    start = saved(tmp_path)
    assert divided(2) == (2, 3, 12)
    assert divided(1) == (2, 6, 12)
    assert divided(3) == (2, 2, 12)
    assert divided(4) == (1, 3, 12)  # a micro-batch of 2 does not divide it
    assert divided(12) == (1, 1, 12)
    assert divided(1, global_batch=24, gradient_accumulation=1) == (2, 12, 24)
    with pytest.raises(
        Stop, match="recipe global_batch: 12 sequences a step cannot be divided into micro-batches of 1 on 5 ranks"
    ):
        divided(5)
    start = saved(tmp_path, world_size=1, first_world_size=2)  # two began, one went on: the recipe still means two
    assert divided(1) == (2, 6, 12)
    assert divided(3) == (2, 2, 12)
    assert divided(2) == (2, 3, 12)
    assert checkpoint.divided(Recipe.model_validate(small()), None, 1).samples_per_step(1) == 6  # nothing to go on from
    auto = small(micro_batch="auto", global_batch=12)
    assert checkpoint.divided(Recipe.model_validate(auto), start, 4).global_batch == 12


def test_what_may_not_go_on_is_told(tmp_path: Path) -> None:
    recipe = small()
    start = saved(tmp_path, recipe=recipe)
    for ranks in (1, 2, 3):
        checkpoint.require_same(start, Recipe.model_validate(recipe), ranks, "d1")
    fixed = Recipe.model_validate(recipe | {"elastic": False})
    checkpoint.require_same(start, fixed, 2, "d1")
    with pytest.raises(
        Stop, match="saved by 2 ranks, this run has 1; expected 2 ranks: the recipe says elastic: false; start 2 "
    ):
        checkpoint.require_same(start, fixed, 1, "d1")
    recipe["optimizer"] |= {"name": "adamw8bit"}
    start = saved(tmp_path, recipe=recipe)
    checkpoint.require_same(start, Recipe.model_validate(recipe), 2, "d1")
    with pytest.raises(Stop, match="expected 2 ranks: moments of 8 bits cannot be divided anew"):
        checkpoint.require_same(start, Recipe.model_validate(recipe), 1, "d1")


# --------------------------------------------------------------------------- shards


NAMES = {"a": 7, "b": 1, "c": 12, "d": 3}
GROUPS = (("a", "c"), ("b", "d"))


def zero_two(ranks: int) -> list[list[Any]]:
    """Return what each rank notes under ZeRO 2: the numbers of a group in a row, padded to a multiple of twice the ranks."""
    import torch
    from deepspeed.utils.tensor_fragment import fragment_address

    shards: list[list[Any]] = [[] for _ in range(ranks)]
    for names in GROUPS:
        row = torch.cat([numbers(name) for name in names])
        size = -(-len(row) // (2 * ranks)) * 2
        row = torch.nn.functional.pad(row, (0, size * ranks - len(row)))
        for rank in range(ranks):
            begin, places, at = rank * size, {}, 0
            for name in names:
                first, end = max(at, begin), min(at + NAMES[name], begin + size)
                if first < end:
                    places[name] = fragment_address(start=first - begin, numel=end - first)
                at += NAMES[name]
            shards[rank].append((row[begin : begin + size], places))
    return shards


def numbers(name: str) -> Any:
    import torch

    return torch.arange(NAMES[name]) + 100.0 * (1 + list(NAMES).index(name))


@pytest.mark.parametrize("then", [1, 2, 3, 5])
@pytest.mark.parametrize("now", [1, 2, 4, 7])
def test_every_number_arrives_whatever_the_numbers_of_ranks(then: int, now: int, tmp_path: Path) -> None:
    import torch

    from train import universal

    def shard(groups: list[Any]) -> dict[str, Any]:
        state = {at: {"exp_avg": flat + 0.5, "step": torch.tensor(9.0)} for at, (flat, _) in enumerate(groups)}
        return {
            "single_partition_of_fp32_groups": [flat for flat, _ in groups],
            "group_paddings": [0, 0],
            "base_optimizer_state": {"state": state, "param_groups": [{"lr": 3.0, "params": [at]} for at in (0, 1)]},
        }

    there = universal.pieces_of([[places for _, places in groups] for groups in zero_two(then)])
    wanted = zero_two(now)
    here = universal.pieces_of([[places for _, places in groups] for groups in wanted])
    for rank in range(now):
        flats = [torch.empty_like(flat) for flat, _ in wanted[rank]]
        fresh = {"base_optimizer_state": {"param_groups": [{"lr": 0.0, "params": [at]} for at in (0, 1)]}}
        optimizer = SimpleNamespace(single_partition_of_fp32_groups=flats, state_dict=lambda fresh=fresh: fresh)
        made = universal.divide([shard(groups) for groups in zero_two(then)], there, here[rank], optimizer, tmp_path)
        for at, (flat, _) in enumerate(wanted[rank]):
            state = made["base_optimizer_state"]["state"][at]
            assert torch.equal(made["single_partition_of_fp32_groups"][at], flat)
            inside = flat != 0  # the padding of moments is not looked at
            assert torch.equal(state["exp_avg"][inside], flat[inside] + 0.5)
            assert state["step"] == 9.0
        assert made["base_optimizer_state"]["param_groups"][1] == {"lr": 3.0, "params": [1]}
        steps = [state["step"] for state in made["base_optimizer_state"]["state"].values()]
        steps[0] += 1
        assert steps[1] == 9.0  # each counts by itself


def test_zero_three_divides_every_weight_rounded_up() -> None:
    import torch

    from train import universal

    shapes = [{name: torch.Size([NAMES[name]]) for name in names} for names in GROUPS]
    for ranks in (1, 2, 3, 5):
        for name, count in NAMES.items():
            pieces = [piece for rank in range(ranks) for piece in universal.share_of(shapes, rank, ranks) if piece.name == name]
            covered = [number for piece in pieces for number in range(piece.first, piece.first + piece.count)]
            assert covered == list(range(count))
    assert [(one.at, one.count) for one in universal.share_of(shapes, 2, 3) if one.group == 0] == [(0, 1), (3, 4)]


def test_shards_that_lack_numbers_or_keep_something_else_are_told(tmp_path: Path) -> None:
    import torch

    from train import universal

    def divide(state: Any, pieces: list[universal.Piece]) -> None:
        shards = [{"single_partition_of_fp32_groups": [torch.zeros(4)], "base_optimizer_state": state}]
        optimizer = SimpleNamespace(
            single_partition_of_fp32_groups=[torch.zeros(4)],
            state_dict=lambda: {"base_optimizer_state": {"param_groups": [{"params": [0]}]}},
        )
        universal.divide(shards, [pieces], [universal.Piece("w", 0, 4, 0, 0)], optimizer, tmp_path)

    def state(**tensors: Any) -> dict[str, Any]:
        return {"state": {0: tensors}, "param_groups": [{"params": [0]}]}

    whole = [universal.Piece("w", 0, 4, 0, 0)]
    divide(state(exp_avg=torch.zeros(4)), whole)
    with pytest.raises(Stop, match=r"its shards lack 1 of 4 numbers of w"):
        divide(state(exp_avg=torch.zeros(4)), [universal.Piece("w", 0, 3, 0, 0)])
    with pytest.raises(Stop, match=r"its optimizer keeps absmax1; expected one number for each weight"):
        divide(state(state1=torch.zeros(4), absmax1=torch.zeros(1)), whole)
    with pytest.raises(Stop, match=r"its optimizer keeps state1; expected one number"):
        divide(state(state1=torch.zeros(4, dtype=torch.uint8)), whole)
    with pytest.raises(Stop, match=r"saved with elastic_checkpoint"):
        divide([{}], whole)


# --------------------------------------------------------------------------- training goes on


CASES = {
    "zero0": small(ds_config="zero0.json"),
    "zero2": small(),
    "zero3": small(ds_config="zero3.json"),
    "offload": small(ds_config="zero2_offload.json"),
    "bf16": small(precision="bf16"),
}
if importlib.util.find_spec("peft"):
    CASES |= {"lora": small(method="lora"), "lora-zero3": small(method="lora", ds_config="zero3.json")}
    if importlib.util.find_spec("bitsandbytes"):
        CASES |= {"qlora": small(method="qlora")}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which two ranks trained every case, and 2, 1 and 3 went on from their checkpoints."""
    folder = tmp_path_factory.mktemp("universal")
    (folder / "cases.json").write_text(json.dumps(CASES))
    for ranks in ("2", "1", "3"):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
        session = [str(Path(__file__).with_name("universal_session.py")), str(folder / "cases.json"), str(folder)]
        ran = subprocess.run([*launcher, *session], env=ENVIRONMENT, capture_output=True, text=True, timeout=800)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return folder


def told(run: Path, key: str) -> list[float]:
    return [json.loads(line)[key] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_keep_every_bit_and_the_losses_go_on(case: str, workshop: Path) -> None:
    import torch

    folder = workshop / case
    before = torch.load(folder / "on-2.pt")
    assert before["steps"] == [3.0]
    if case != "zero0":
        converted = torch.load(folder / "converted.pt")  # by DeepSpeed's own converter
        assert set(converted) == set(before["tensors"]) and len(converted) >= 12
        for name, tensors in converted.items():
            for kind, tensor in enumerate(tensors):
                assert torch.equal(tensor.view(-1), before["tensors"][name][kind].view(-1)), name
    assert any(float(moments.abs().sum()) > 0 for _, *many in before["tensors"].values() for moments in many)
    for ranks in (1, 3):
        after = torch.load(folder / f"on-{ranks}.pt")
        assert after["steps"] == before["steps"] and set(after["tensors"]) == set(before["tensors"])
        for name, tensors in after["tensors"].items():
            for one, other in zip(tensors, before["tensors"][name], strict=True):
                assert torch.equal(one, other), name
        run = folder / f"on-{ranks}"
        assert told(run, "step") == [1, 2, 3, 4, 5, 6]
        assert told(run, "lr") == told(folder / "whole", "lr")
        assert told(run, "tokens") == told(folder / "whole", "tokens")
        within = 2e-3 if case == "bf16" else 1e-4
        assert told(run, "loss") == pytest.approx(told(folder / "whole", "loss"), abs=within)
        newest = checkpoint.all_complete(run / "checkpoints")[-1]
        assert (newest.step, newest.manifest["world_size"], newest.manifest["first_world_size"]) == (6, ranks, 2)


def arguments(folder: Path, run: str, recipe: dict[str, Any]) -> list[str]:
    """Return the command line of one rank; the recipe is written beside the run folder."""
    file = folder / f"{run}.json"
    file.write_text(json.dumps(recipe))
    return [sys.executable, str(MAIN), "--recipe", str(file), "--run-dir", str(folder / run), "--data-dir", str(folder / "data")]


def start_ranks(count: int, command: list[str], log: Path) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = ENVIRONMENT | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with log.open("ab") as file:
        return [
            subprocess.Popen(command, env=place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=file, stderr=file)
            for rank in range(count)
        ]


def run_until(ranks: list[subprocess.Popen[bytes]], reached: Callable[[], bool], log: Path) -> None:
    """Kill all ranks, as a power cut would, as soon as `reached`."""
    deadline_s = time.monotonic() + 120
    try:
        while not reached():
            assert time.monotonic() < deadline_s and all(rank.poll() is None for rank in ranks), log.read_text()[-3000:]
            time.sleep(0.01)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_ranks_are_followed_by_fewer_and_by_more(tmp_path: Path) -> None:
    """2 ranks are killed, 1 goes on and is killed, 2 finish: the losses are those of 2 that were left alone."""
    recipe, log = small(steps=40, checkpoint={"every_steps": 4, "keep": 2}), tmp_path / "log"
    for rank in start_ranks(2, arguments(tmp_path, "whole", recipe), log):
        assert rank.wait(timeout=400) == 0, log.read_text()[-3000:]

    def reached(step: int) -> Callable[[], bool]:
        return lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(told(tmp_path / "run", "step")) >= step

    command = arguments(tmp_path, "run", recipe)
    run_until(start_ranks(2, command, log), reached(6), log)
    run_until(start_ranks(1, command, log), reached(18), log)
    assert len(told(tmp_path / "run", "step")) < 40
    for rank in start_ranks(2, command, log):
        assert rank.wait(timeout=400) == 0, log.read_text()[-3000:]
    text = log.read_text()
    assert "saved by 2 ranks, now 1; changed in the recipe since: global_batch, gradient_accumulation" in text
    assert "saved by 1 rank, now 2" in text
    assert "= 2 sequences x 64 x 6 accumulated x 1 rank" in text
    for key, within in (("step", 0), ("lr", 0), ("tokens", 0), ("loss", 1e-4)):
        assert told(tmp_path / "run", key) == pytest.approx(told(tmp_path / "whole", key), abs=within), key


KILLED_WHILE_LOADING = """
import os, runpy, sys
left = [int(sys.argv[1])]
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("_states.pt"):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
sys.addaudithook(hook)
sys.argv = sys.argv[2:]
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_kill_while_it_is_divided_anew_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    recipe, log = small(steps=3), tmp_path / "log"
    command = arguments(tmp_path, "run", recipe)
    for rank in start_ranks(2, command, log):
        assert rank.wait(timeout=400) == 0, log.read_text()[-3000:]
    arguments(tmp_path, "run", recipe | {"steps": 4})
    checkpoints = tmp_path / "run" / "checkpoints"

    def content() -> dict[str, str]:
        files = [file for file in checkpoints.rglob("*") if file.is_file()]
        return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    before = content()
    alone = [command[0], "-c", KILLED_WHILE_LOADING]
    ended = []
    for opened in (3, 4, 5, 100):  # three are hashed; then shard, shard, weights
        ran = subprocess.run([*alone, str(opened), *command[1:]], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
        ended.append(ran.returncode)
        if ran.returncode:
            assert content() == before
    assert ended == [9, 9, 9, 0], ran.stderr
    assert told(tmp_path / "run", "step") == [1, 2, 3, 4]

    shutil.rmtree(checkpoints / "step_00000004")
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    config["zero_optimization"]["round_robin_gradients"] = True
    (tmp_path / "own.json").write_text(json.dumps(config))
    other = arguments(tmp_path, "run", recipe | {"steps": 4, "ds_config": str(tmp_path / "own.json")})
    ran = subprocess.run(other, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert "its ds_config has round_robin_gradients; expected shards in the order of the weights; start 2 ranks" in ran.stderr

    arguments(tmp_path, "run", recipe | {"steps": 4})
    manifest = json.loads((checkpoints / "step_00000003" / "complete").read_text())
    (checkpoints / "step_00000003" / "complete").write_text(json.dumps(manifest | {"world_size": 3}))
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    missing = checkpoints / "step_00000003" / "state" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith(f"train: {missing}: is missing; expected a shard of each rank that saved; ")
