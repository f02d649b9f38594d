"""metrics.jsonl and heartbeats: what is written, what survives a kill, what the golden files pin."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from train.metrics import Heartbeat, Metrics, keep_until, metrics_line
from train.recipe import Recipe

PARTS = ("data", "forward", "backward", "comm", "optimizer")

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def test_lines_have_the_golden_keys_in_the_golden_order() -> None:
    for name, unit in (("metrics.jsonl", "tokens"), ("metrics-gpu.jsonl", "tokens"), ("metrics-images.jsonl", "images")):
        for line in (GOLDEN / name).read_text().splitlines():
            golden = json.loads(line)
            made = metrics_line(
                golden["step"],
                unit,
                golden[unit] // golden["step"],
                golden["loss"],
                golden["grad_norm"],
                golden["lr"],
                golden["step_time_s"],
                {part: golden[f"{part}_time_s"] for part in (*PARTS, "comm_overlap") if f"{part}_time_s" in golden},
                {key: golden[key] for key in ("gpu_mem_gib", "gpu_reserved_gib") if key in golden},
                golden.get("mfu"),
                golden.get("power_w", math.nan),
            )
            assert list(made) == list(golden)
            parts_s = sum(golden[f"{part}_time_s"] for part in PARTS)
            assert abs(parts_s - golden["step_time_s"]) < 0.001 * golden["step_time_s"]
            assert {key: made[key] for key in made if key != "time"} == {key: golden[key] for key in golden if key != "time"}
            assert abs(type(golden["time"])(made["time"]) - made["time"]) < 1e-6


def test_heartbeat_has_the_golden_keys_and_phases(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, rank=3)
    golden = json.loads((GOLDEN / "heartbeat.json").read_text())
    heartbeat.beat(golden["phase"], golden["step"])
    written = json.loads((tmp_path / "heartbeats" / "3.json").read_text())
    assert list(written) == list(golden)
    assert {**written, "time": 0} == {**golden, "time": 0}
    assert [path.name for path in (tmp_path / "heartbeats").iterdir()] == ["3.json"]


def test_heartbeat_goes_to_the_nodes_own_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setenv("R4090C_LOCAL", str(local))
    heartbeat = Heartbeat(tmp_path / "run", rank=3)
    heartbeat.beat("train", 7)
    assert [path.name for path in local.iterdir()] == ["beat-3.json"]
    assert (local / "beat-3.json").read_text() == heartbeat.file.read_text()
    heartbeat.file.parent.rename(tmp_path / "away")  # the shared folder fails
    with pytest.raises(OSError, match="heartbeats"):
        heartbeat.beat("checkpoint")
    assert json.loads((local / "beat-3.json").read_text())["phase"] == "checkpoint"
    (tmp_path / "away").rename(heartbeat.file.parent)
    (local / "beat-3.json").unlink()
    local.rmdir()  # the node's own folder fails, as a full /tmp does: the training goes on
    heartbeat.beat("train", 8)
    assert json.loads(heartbeat.file.read_text())["step"] == 8


def test_heartbeat_is_written_on_a_new_phase_and_else_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.time", lambda: now_s)
    heartbeat = Heartbeat(tmp_path, rank=0)

    def told() -> tuple[str, int]:
        beat = json.loads(heartbeat.file.read_text())
        return beat["phase"], beat["step"]

    heartbeat.beat("train", 1)
    now_s += 0.5
    heartbeat.beat("train", 2)
    assert told() == ("train", 1)
    heartbeat.beat("checkpoint")
    assert told() == ("checkpoint", 2)
    now_s += 0.1
    heartbeat.beat("train", 3)
    now_s += 1.0
    heartbeat.beat("train", 4)
    assert told() == ("train", 4)
    now_s -= 3600  # a clock that was set back must not silence it
    heartbeat.beat("train", 5)
    assert told() == ("train", 5)


def test_a_resumed_run_drops_later_and_torn_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, 6)]
    file.write_text("".join(lines) + '{"step": 3, "lo')
    Metrics(tmp_path, resumed_at=3).write({"step": 4, "again": True})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3},
        {"step": 4, "again": True},
    ]


@pytest.mark.parametrize("text", ["", "\n", "null\n", "[]\n", "{}\n", '{"step": "x"}\n', '{"step": 1}', "\x00\x00\n"])
def test_nothing_that_is_no_line_is_kept(text: str) -> None:
    assert keep_until(text, 100) == ""


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    written = Metrics(tmp_path, resumed_at=0)
    written.write({"step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_number_that_is_none_is_null_in_json_and_whoever_reads_takes_it(tmp_path: Path) -> None:
    """A step that fp16 skips has an infinite gradient norm."""
    from launch.live import _progress
    from r4090c.cli.follow import number_in, told_in

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    golden = json.loads((GOLDEN / "metrics.jsonl").read_text().splitlines()[0])
    written = Metrics(tmp_path, resumed_at=0)
    written.write({**golden, "grad_norm": math.inf, "eval_loss": math.nan})
    written.write({**golden, "step": 2, "loss": math.nan, "grad_norm": -math.inf, "tokens_per_s": math.nan})
    text = (tmp_path / "metrics.jsonl").read_text()
    first, second = (json.loads(line, parse_constant=refuse) for line in text.splitlines())
    assert (first["grad_norm"], first["eval_loss"], second["loss"]) == (None, None, None)
    assert list(first) == [*golden, "eval_loss"] and first["loss"] == golden["loss"]
    assert keep_until(text, 2) == text
    assert told_in(first).startswith(f"loss {golden['loss']:.4f}  ")
    assert (told_in(second), number_in(second, "loss")) == ("", None)
    progress = _progress([first, second], None)
    assert (progress["step"], progress["loss"], progress["rate"]) == (2, None, golden["tokens_per_s"])


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra `train`")


class Backend:
    """Collectives that take a while, as deepspeed.comm's backend has them."""

    def all_reduce(self, seconds: float, async_op: bool = False) -> Any:
        if async_op:
            return Work(seconds)
        time.sleep(seconds)
        return None

    def all_gather(self, seconds: float) -> None:
        self.all_reduce(seconds)

    def get_rank(self) -> int:
        return 0


class Work:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self) -> bool:
        time.sleep(self.seconds)
        return True

    def is_completed(self) -> bool:
        return True


@needs_torch
def test_the_parts_of_a_step_add_up_and_communication_is_taken_out_of_them() -> None:
    from train.device import Device
    from train.timing import StepTimes

    times, backend = StepTimes(Device("cpu", "cpu", "gloo")), Backend()
    times.watch(backend)
    times.watch(backend)  # the next run of the same process takes over, and nothing counts twice
    backend.all_reduce(0.001)  # of the start: no step runs
    began_s = time.perf_counter()
    times.begin("data")
    time.sleep(0.01)
    times.begin("forward")
    time.sleep(0.02)
    times.begin("backward")
    time.sleep(0.03)
    backend.all_gather(0.05)  # calls another collective
    work = backend.all_reduce(0.04, async_op=True)
    assert work.is_completed()
    time.sleep(0.01)  # computes meanwhile
    work.wait()
    times.begin("optimizer")
    time.sleep(0.02)
    parts = times.split()
    assert sum(parts.values()) <= time.perf_counter() - began_s
    assert list(parts) == list(PARTS)
    for part, least in (("data", 0.01), ("forward", 0.02), ("backward", 0.04), ("comm", 0.09), ("optimizer", 0.02)):
        assert least <= parts[part], part
    assert times.split() == dict.fromkeys(PARTS, 0.0)
    assert backend.get_rank() == 0


class Event:
    """A CUDA event on a card that is never late. `made` counts them: they are to be used again."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1
        self.at_s = math.nan

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at_s <= time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        return (later.at_s - self.at_s) * 1000


@needs_torch
def test_on_a_gpu_collectives_on_a_stream_of_their_own_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from train.device import Device
    from train.timing import StepTimes

    stream = "computes"
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    times, backend = StepTimes(Device("cuda", "cuda:0", "nccl")), Backend()
    times.watch(backend)
    for _ in range(3):
        began_s = time.perf_counter()
        times.begin("data")
        times.begin("forward")
        times.begin("backward")
        time.sleep(0.01)
        stream = "reduces"
        backend.all_reduce(0.03)
        stream = "computes"
        backend.all_reduce(0.02)
        times.begin("optimizer")
        parts = times.split()
        assert list(parts) == [*PARTS, "comm_overlap"]
        assert parts["comm_overlap"] >= 0.03 and parts["comm"] >= 0.02
        assert parts["backward"] >= 0.04  # what runs beside it is part of it
        whole_s = sum(parts[part] for part in PARTS)
        assert whole_s <= time.perf_counter() - began_s
    assert Event.made == 4 + 2 + 2 + 1  # of the first step; the others made none


@needs_torch
def test_taking_the_times_costs_next_to_nothing() -> None:
    from train.device import Device
    from train.timing import StepTimes

    times, backend = StepTimes(Device("cpu", "cpu", "gloo")), Backend()
    times.watch(backend)
    began_s = time.thread_time()  # of this thread alone, however busy the machine is
    for _ in range(20):
        for part in PARTS:
            times.begin(part)  # type: ignore[arg-type]
            for _ in range(10):
                backend.all_reduce(0, async_op=True).wait()
        times.split()
    each_s = (time.thread_time() - began_s) / 20
    assert each_s < 0.02 * 0.25  # 50 collectives; of a step of a quarter of a second


def tiny_llama(method: str) -> Any:
    """Return a Llama of two layers with its recipe, as build_model makes it."""
    from train.device import Device
    from train.model import Chosen, build_model

    recipe = json.loads((GOLDEN / "recipe-tiny.json").read_text()) | {"method": method}
    recipe["model"]["config"] |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    recipe["model"]["config"] |= {"num_key_value_heads": 2}
    recipe["lora"] |= {"rank": 3, "targets": ["q_proj", "down_proj"]}
    kernels = Chosen("sdpa", liger=False, compile=False)
    cpu = Device("cpu", "cpu", "gloo")
    return build_model(Recipe.model_validate(recipe), None, cpu, "fp32", kernels=kernels, sharded=False)


@needs_torch
def test_arithmetic_is_counted_by_hand() -> None:
    from train.flops import flop_per_token, peak_flop_per_s

    matrices = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)  # q, k and v of half the heads, o, and the MLP; two layers
    head, attention = 32 * 256, 2 * 2 * 128 * 32  # one direction of attention over 128 tokens, causal
    assert flop_per_token(tiny_llama("full"), 128) == 6 * (matrices + head) + 3 * attention
    adapters = 2 * 3 * ((32 + 32) + (48 + 32))
    for method in ("lora", "qlora", "int8") if importlib.util.find_spec("bitsandbytes") else ():
        assert flop_per_token(tiny_llama(method), 128) == 4 * (matrices + head) + 6 * adapters + 3 * attention, method
    assert peak_flop_per_s("NVIDIA GeForce RTX 4090", "bf16") == 165.2e12
    assert peak_flop_per_s("NVIDIA A100-SXM4-80GB", "fp16") == 312e12
    for card, precision in (("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"), ("NVIDIA GeForce RTX 4090", "fp32"), ("", "bf16")):
        assert peak_flop_per_s(card, precision) is None


@needs_torch
def test_the_planner_and_the_training_count_the_same_arithmetic_and_peaks() -> None:
    compute = pytest.importorskip("launch.compute")
    from launch.recipe import load_ds_config, load_recipe
    from launch.site import CARDS
    from launch.training import training_of
    from train.flops import PEAK_TFLOPS, flop_per_image, flop_per_token
    from train.resnet import build_resnet

    recipe = load_recipe("tiny")
    training = training_of(recipe, load_ds_config(recipe), on_gpu=False)
    config = {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 4, "num_attention_heads": 5}
    assert recipe["model"]["config"].items() >= config.items()
    from train.device import Device
    from train.model import Chosen, build_model

    cpu = Device("cpu", "cpu", "gloo")
    made = Recipe.model_validate({**recipe, "resume": True})
    model = build_model(made, None, cpu, "fp32", kernels=Chosen("sdpa", liger=False, compile=False), sharded=False)
    assert flop_per_token(model, 128) == compute.necessary_flop_per_unit(training)
    for name, card in (
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 D", "4090d"),
        ("NVIDIA GeForce RTX 3090", "3090"),
    ):
        assert PEAK_TFLOPS[name] == CARDS[card].bf16_tflops
    import torch

    recipe = load_recipe("resnet50")
    resnet = build_resnet(Recipe.model_validate({**recipe, "resume": True}), cpu, torch.float32)
    assert sum(one.numel() for one in resnet.parameters()) == 25_557_032
    planned = compute.necessary_flop_per_unit(training_of(recipe, load_ds_config(recipe)))
    assert flop_per_image(resnet, 224) == pytest.approx(planned, rel=0.01)


@needs_torch
def test_curves_are_drawn_and_a_missing_library_costs_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from train.board import Boards

    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("WANDB_MODE", "offline")
    golden = [json.loads(line) for line in (GOLDEN / "metrics.jsonl").read_text().splitlines()]
    recipe = Recipe.model_validate(json.loads((GOLDEN / "recipe-tiny.json").read_text()))
    with monkeypatch.context() as without:
        without.setitem(__import__("sys").modules, "wandb", None)
        boards = Boards(tmp_path, recipe.model_copy(update={"wandb": "mine"}), resumed_at=0)
        for line in golden:
            boards.write(line)
        boards.write({**golden[-1], "step": 99, "loss": None, "grad_norm": math.inf})
        boards.close()
    assert not boards.thread.is_alive()
    drawn = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(drawn.Tags()["scalars"]) == set(golden[0]) - {"step", "time"}
    assert [(point.step, point.value) for point in drawn.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in golden
    ]
    assert drawn.Scalars("grad_norm")[-1].value == math.inf
    told = capsys.readouterr().out
    assert told == "notice   wandb is not installed: none of its curves; pip install wandb\n"
    assert not any(secret.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
