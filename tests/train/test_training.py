"""Real training: DeepSpeed ZeRO-2 over gloo, two ranks. Few runs, each proving much; about a minute together."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from train.data import folder_name
from train.recipe import Data

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "train" / "main.py"
GOLDEN = ROOT / "tests" / "golden"
TINY: dict[str, Any] = json.loads((GOLDEN / "recipe-tiny.json").read_text())

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the extra `train`", allow_module_level=True)
pytestmark = [pytest.mark.train, pytest.mark.slow]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
LEFT_OUT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "R4090C_PLAIN_IMPORTS")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in LEFT_OUT} | {
    "R4090C_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
}


def small_recipe(**changes: Any) -> dict[str, Any]:
    """Return `tiny` with a model of 0.1 M parameters, 8 steps, a checkpoint every 3."""
    recipe = copy.deepcopy(TINY)
    recipe["model"]["config"] |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    recipe["model"]["config"]["num_key_value_heads"] = 2
    recipe["data"] |= {"sequence_length": 64, "max_mib": 1}
    return recipe | {"steps": 8, "checkpoint": {"every_steps": 3, "keep": 2}} | changes


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


def arguments(workshop: Path, run: str, recipe: dict[str, Any]) -> list[str]:
    """Return the command line of one rank; the recipe is written beside the run folder."""
    file = workshop / f"{run}.json"
    file.write_text(json.dumps(recipe))
    return [str(MAIN), "--recipe", str(file), "--run-dir", str(workshop / run), "--data-dir", str(workshop / "data")]


def finish(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=240)


def metrics(workshop: Path, run: str) -> list[dict[str, Any]]:
    file = workshop / run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses(workshop: Path, run: str) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(workshop, run)]


def wait_for(condition: Callable[[], bool], timeout_s: float = 300) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted(workshop: Path) -> list[tuple[int, float, float]]:
    """Return the losses of the small recipe, run in one go by torchrun."""
    ran = finish(TORCHRUN + arguments(workshop, "uninterrupted", small_recipe()))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return losses(workshop, "uninterrupted")


def test_tiny_learns_and_tells_everything(workshop: Path) -> None:
    """24 of the 40 steps: enough to see the loss fall."""
    command = [*TORCHRUN, *arguments(workshop, "tiny", TINY), "--steps", "24"]
    ran = finish(command)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = metrics(workshop, "tiny")
    golden = json.loads((GOLDEN / "metrics.jsonl").read_text().splitlines()[0])
    assert all(list(line) == list(golden) for line in lines)
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert [line["tokens"] for line in lines] == [step * 2 * 2 * 2 * 128 for step in range(1, 25)]
    assert lines[0]["loss"] > 5.3  # ln 256 = 5.55: it knows nothing yet
    assert sum(line["loss"] for line in lines[-5:]) / 5 < 3.3
    for rank in (0, 1):
        beat = json.loads((workshop / "tiny" / "heartbeats" / f"{rank}.json").read_text())
        assert (beat["rank"], beat["phase"], beat["step"]) == (rank, "done", 24)
    checkpoints = workshop / "tiny" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000020", "step_00000024"]
    assert (checkpoints / "latest").read_text() == "step_00000024\n"
    for told in ("5,122,880 parameters, fp32", "ranks    2 x CPU", "gloo, ZeRO stage 2", "step     1,024 tokens", "sha256 "):
        assert told in ran.stdout
    assert re.search(r"^data     [\d,]+ sequences of 128 tokens; 24 steps = [\d.e-]+ epochs$", ran.stdout, re.MULTILINE)
    looked = f"no checkpoint in {workshop / 'tiny' / 'checkpoints'}"
    notices = re.findall("^notice   (?!tensorboard is not installed).*", ran.stdout, re.MULTILINE)
    assert notices == [f"notice   the run begins anew at step 1: {looked}"]  # the recipe says resume: true
    assert re.search(r"^lr       2\.00e-03 at a global batch of 8: as the recipe says", ran.stdout, re.MULTILINE)
    assert "step 24/24 loss" in ran.stdout
    assert "Traceback" not in ran.stderr

    again = finish(command)
    assert again.returncode == 0 and "begins anew" not in again.stdout
    assert metrics(workshop, "tiny") == lines  # nothing left to do: nothing done


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    workshop: Path, uninterrupted: list[tuple[int, float, float]]
) -> None:
    assert [step for step, *_ in uninterrupted] == list(range(1, 9))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *arguments(workshop, "stopped", small_recipe())]
    common = ENVIRONMENT | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "R4090C_COLLECTIVE_TIMEOUT_S": "20",
    }
    ranks = [
        subprocess.Popen(
            command, env=common | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for rank in ("0", "1")
    ]
    try:
        wait_for(lambda: len(metrics(workshop, "stopped")) >= 4 or ranks[0].poll() is not None)
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        assert ranks[0].poll() is None
        ranks[0].terminate()  # it waits for a peer that does not answer, deep in C++
        _, told = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 143
        assert told.decode().splitlines()[-1] == "train: stopped by SIGTERM"
        assert b"Traceback" not in told
        ranks[1].send_signal(signal.SIGCONT)
        _, told = ranks[1].communicate(timeout=60)  # its peer is gone: gloo nearly always sees that at once, else times out
        assert ranks[1].returncode == 1
        assert b"Traceback" in told
    finally:
        for rank in ranks:
            rank.kill()
    reached = len(metrics(workshop, "stopped"))
    assert 4 <= reached < 8
    half = workshop / "stopped" / "checkpoints" / "step_00000006.partial"
    half.mkdir(exist_ok=True)
    (half / "state").mkdir(exist_ok=True)
    (half / "state" / "mp_rank_00_model_states.pt").write_bytes(b"torn")

    resumed = finish(TORCHRUN + arguments(workshop, "stopped", small_recipe()))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert re.search(r"resume +after step (3|6); changed in the recipe since: nothing", resumed.stdout)
    assert "removed step_00000006.partial" in resumed.stdout
    assert losses(workshop, "stopped") == uninterrupted


@pytest.mark.long
def test_plain_imports_train_to_the_same_digits(workshop: Path, uninterrupted: list[tuple[int, float, float]]) -> None:
    ran = finish(TORCHRUN + arguments(workshop, "plain", small_recipe()), R4090C_PLAIN_IMPORTS="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert losses(workshop, "plain") == uninterrupted


@pytest.mark.long
def test_the_hand_written_peer_trains_to_the_same_digits(workshop: Path, uninterrupted: list[tuple[int, float, float]]) -> None:
    script = ROOT / "bench" / "peers" / "plain_zero2.py"
    if not script.exists():
        pytest.skip("bench/ is not here")
    tokens = workshop / "data" / folder_name(Data.model_validate(small_recipe()["data"])) / "tokens.bin"
    options = ["--recipe", str(workshop / "uninterrupted.json"), "--tokens", str(tokens)]
    ran = finish([*TORCHRUN, str(script), *options])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = re.findall(r"^STEP (\d+) loss (\S+)$", ran.stdout, re.MULTILINE)
    assert [(int(step), float(loss)) for step, loss in told] == [(step, loss) for step, loss, _ in uninterrupted]


@pytest.mark.usefixtures("uninterrupted")
def test_another_world_size_data_or_model_is_refused_at_once(workshop: Path) -> None:
    def refused(recipe: dict[str, Any], environment: dict[str, str] | None = None) -> str:
        command = [sys.executable, "-X", "importtime", *arguments(workshop, "uninterrupted", recipe)]
        ran = finish(command, **(environment or {}))
        assert ran.returncode == 2
        assert " pydantic\n" in ran.stderr and " torch\n" not in ran.stderr  # told before torch is imported
        (told,) = [line for line in ran.stderr.splitlines(keepends=True) if not line.startswith("import time:")]
        return told

    two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    before = metrics(workshop, "uninterrupted")
    manifest = workshop / "uninterrupted" / "checkpoints" / "step_00000008" / "complete"
    fixed = small_recipe(elastic=False)
    assert refused(fixed).startswith(f"train: {manifest}: saved by 2 ranks, this run has 1; expected 2 ranks")
    other_data = small_recipe(data=small_recipe()["data"] | {"max_mib": 0.5})
    assert "expected the same data" in refused(other_data, two)
    other_model = small_recipe()
    other_model["model"]["config"]["num_hidden_layers"] = 3
    assert "num_hidden_layers was 2, is 3" in refused(other_model, two)
    assert metrics(workshop, "uninterrupted") == before


def test_failures_are_told_and_end_at_once(workshop: Path) -> None:
    wild = small_recipe(optimizer=TINY["optimizer"] | {"lr": 1e30}, schedule=TINY["schedule"] | {"warmup_steps": 0})
    ran = finish([sys.executable, *arguments(workshop, "wild", wild)])
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert re.match(r"train: step \d: (loss|gradient norm) is (nan|inf) at learning rate .*look at .* lower optimizer.lr", last)
    assert re.search(r"worst at positions \d+ to \d+ of the data's order \(rank 0; sequences \d+, \d+\)", last)
    assert "Traceback" not in ran.stderr
    assert len(metrics(workshop, "wild")) < 8

    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    config["zero_optimization"]["stage"] = 7
    (workshop / "stage7.json").write_text(json.dumps(config))
    ran = finish([sys.executable, *arguments(workshop, "wrong", small_recipe(ds_config=str(workshop / "stage7.json")))])
    assert ran.returncode == 2
    assert re.match(rf"train: {workshop}/stage7.json: .*stage: Input should be .*; correct the file", ran.stderr.splitlines()[-1])


LEAN = """
import sys
from train import startup
with startup.diet():
    import torch
    with startup.muon_without_compiler():
        import deepspeed
    from train import loop
heavy = [name for name in ("sympy", "torch._inductor", "torch._dynamo.config", "torch.distributed.tensor") if name in sys.modules]
print("loaded:", heavy)

from transformers import AutoConfig, LlamaForCausalLM
from transformers.models.gpt2 import GPT2Config
import transformers
assert LlamaForCausalLM is sys.modules["train.model"].LlamaForCausalLM and transformers.models.gpt2.GPT2Config is GPT2Config
from deepspeed.runtime.zero.muon.original_muon import muon_update
from torch.distributed.tensor import DTensor, Shard
assert not isinstance(torch.ones(1), DTensor) and Shard(0) == Shard(0) and callable(torch.export.export)
assert torch.equal(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))
from transformers.processing_utils import ProcessorMixin
assert isinstance(ProcessorMixin, type)
print("all real")
"""


def test_lean_imports_load_nothing_heavy_and_hand_over_the_real_thing(workshop: Path) -> None:
    ran = finish([sys.executable, "-c", LEAN], PYTHONPATH=str(ROOT), DS_ACCELERATOR="cpu")
    assert ran.returncode == 0, ran.stderr
    loaded, real = ran.stdout.splitlines()[-2:]
    assert real == "all real"
    for pinned in re.findall(r"^(torch|deepspeed|transformers)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        try:
            if version(pinned[0]).split("+")[0] != pinned[1]:
                pytest.skip(f"other versions than tested ({pinned[0]}) may load more")
        except PackageNotFoundError:
            pytest.skip("not installed as a package")
    assert loaded == "loaded: []"
