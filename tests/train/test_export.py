"""Exports: what transformers and peft load from them answers as the trained model did."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_training import ENVIRONMENT, TORCHRUN, small_recipe
from train.export import _bring_tokenizer
from train.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
SESSION = Path(__file__).with_name("export_session.py")

for package in ("deepspeed", "peft", "bitsandbytes"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)
pytestmark = [pytest.mark.train, pytest.mark.long]

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MODEL = {"family": "llama", "weights": "toy", "config": {**CONFIG, "use_cache": False}}
LORA = {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj", "down_proj"]}
RANDOM = {**MODEL, "weights": None}

MAKE_WEIGHTS = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(7)
LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[1]))).save_pretrained(sys.argv[2])
"""


def cases() -> dict[str, dict[str, Any]]:
    return {
        "full": small_recipe(model=RANDOM),
        "full-bf16-zero3": small_recipe(model=MODEL, ds_config="zero3.json", precision="bf16"),
        "lora": small_recipe(model=MODEL, method="lora", lora=LORA, activation_checkpointing=True),
        "lora-zero3": small_recipe(model=MODEL, method="lora", lora=LORA, ds_config="zero3.json"),
        "qlora": small_recipe(model=MODEL, method="qlora", lora=LORA),
        "int8": small_recipe(model=MODEL, method="int8", lora=LORA),
        "lora-random": small_recipe(model=RANDOM, method="lora", lora=LORA),
    }


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of each case, trained by two ranks."""
    folder = tmp_path_factory.mktemp("export")
    weights = folder / "models" / "toy"
    run(
        [
            "-c",
            MAKE_WEIGHTS,
            json.dumps(CONFIG),
            str(weights),
        ]
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (weights / name).write_text("{}")
    resnet = {"family": "resnet", "weights": None, "config": {"depth": 18, "num_classes": 10}}
    images = {"kind": "images", "path": "synthetic", "image_size": 32}
    (folder / "resnet.json").write_text(json.dumps(small_recipe(model=resnet, data=images)))
    (folder / "cases.json").write_text(json.dumps(cases()))
    ran = subprocess.run(
        [*TORCHRUN, str(SESSION), str(folder / "cases.json"), str(folder)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


def run(arguments: list[str], expected: int = 0) -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == expected, ran.stdout + ran.stderr
    return ran


EXPORT_ALL = """
import json, sys, warnings
from pathlib import Path
warnings.filterwarnings("ignore")
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from train.export import export

folder = Path(sys.argv[1])

def distance(model, name):
    with torch.no_grad():
        found = model.eval()(input_ids=torch.arange(32).unsqueeze(0)).logits.float()
    wanted = torch.load(folder / name / "logits.pt")
    return float((found - wanted).abs().max() / wanted.std())

results = {}
for name in sys.argv[2:]:
    for merged in ((False,) if name.startswith("full") else (False, True)):
        out = folder / name / ("merged" if merged else "plain")
        said = []
        told = export(folder / name, folder / "models", folder / "data", out, merged=merged, step=None, say=said.append)
        if told["kind"] != "adapters":
            model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
            told["wrong"] = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]))
            told["distance"], told["dtype"], told["use_cache"] = distance(model, name), str(model.dtype), model.config.use_cache
        elif not told["base"].startswith("random"):
            base = AutoModelForCausalLM.from_pretrained(told["base"])
            told["untrained"] = distance(base, name)
            told["distance"] = distance(PeftModel.from_pretrained(base, out), name)
        results[f"{name} {out.name}"] = {**told, "said": said, "files": sorted(path.name for path in out.iterdir())}

from transformers import AutoModelForImageClassification
from train.device import choose_device
from train.export import _write_model
from train.recipe import Recipe
from train.resnet import DEVIATION, MEAN, build_resnet
recipe = Recipe.model_validate(json.loads((folder / "resnet.json").read_text()))
resnet = build_resnet(recipe, choose_device(0), torch.float32).eval()
_write_model(folder / "resnet", folder / "resnet", resnet.state_dict(), recipe, None, "fp32")
loaded = AutoModelForImageClassification.from_pretrained(folder / "resnet").eval()
pixels = torch.randint(0, 256, (2, 3, 32, 32)).float()
ready = (pixels / 255 - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(DEVIATION).view(1, 3, 1, 1)
with torch.no_grad():
    results["resnet"] = float((resnet(pixel_values=pixels).logits - loaded(pixel_values=ready).logits).abs().max())
print(json.dumps(results))
"""


def test_every_method_exports_what_it_trained(trained: Path) -> None:
    results = json.loads(run(["-c", EXPORT_ALL, str(trained), *cases()]).stdout.splitlines()[-1])
    assert results.pop("resnet") < 1e-4
    assert [name for name, told in results.items() if told.get("wrong")] == []
    distances = {name: told["distance"] for name, told in results.items() if "distance" in told}
    exact = (
        "full plain",
        "lora plain",
        "lora merged",
        "lora-zero3 plain",
        "lora-zero3 merged",
        "qlora merged",
        "lora-random merged",
    )
    assert {name: told for name, told in distances.items() if name in exact and told > 1e-4} == {}
    assert distances["full-bf16-zero3 plain"] < 1e-2  # bf16 has 8 bits
    assert distances["int8 merged"] < 0.1  # LLM.int8 rounds the activations as well
    for name in ("qlora plain", "int8 plain"):  # beside the weights before they were quantized
        assert distances[name] < results[name]["untrained"] / 2
    assert results["lora plain"]["untrained"] > 0.1  # else nothing was learnt and nothing is proved
    assert results["full-bf16-zero3 plain"]["dtype"] == "torch.bfloat16"
    assert results["full plain"]["use_cache"] is True

    for name in ("lora plain", "qlora plain"):
        files = results[name]["files"]
        assert files == [
            "adapter_config.json",
            "adapter_model.safetensors",
            "r4090c.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    for name in ("full plain", "lora merged", "qlora merged"):
        assert {"config.json", "model.safetensors", "r4090c.json"} <= set(results[name]["files"])
    assert results["qlora merged"]["merged_into"] == "the 4-bit weights it trained beside, brought back to fp32"
    assert results["lora merged"]["merged_into"] == "the weights it trained beside"
    for name, told in results.items():
        kind, _, out = name.partition(" ")
        assert str(trained / kind / out) in told["load"] and "partial" not in told["load"]
        assert "notices" not in told
    assert results["lora plain"]["tokenizer"] == str(trained / "models" / "toy")
    assert results["full plain"]["tokenizer"] is None
    assert results["lora-random plain"]["base"] == "random weights of seed 1234; only --merged gives a model"


def test_the_program_tells_what_it_does_and_what_is_wrong(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    shutil.copytree(trained / "full" / "checkpoints", folder / "checkpoints")
    script = ["train/export.py", str(folder), "--data-dir", str(trained / "data")]
    told = [json.loads(line) for line in run([*script, "--merged", "--json"]).stdout.splitlines()]
    assert told[0]["doing"].startswith("reading step_00000002, ")
    result = told[-1]["result"]
    assert (result["kind"], result["step"]) == ("model", 2)
    assert result["notices"] == ["--merged has no effect: method full has no adapters, all weights are in one place already"]
    assert result["load"] == f"transformers.AutoModelForCausalLM.from_pretrained('{folder / 'export-merged'}')"
    assert json.loads((folder / "export-merged" / "r4090c.json").read_text())["load"] == result["load"]
    assert Path(result["out"]) == folder / "export-merged"
    assert (folder / "export-merged" / "model.safetensors").exists()

    def refused(*more: str) -> str:
        ran = run([*script, *more], expected=2)
        assert ran.stderr.count("\n") == 1
        return ran.stderr

    assert f"{folder / 'export-merged'}: is there already" in refused("--merged")
    assert "no whole checkpoint of step 7; expected one of: 2" in refused("--step", "7")
    complete = folder / "checkpoints" / "step_00000002" / "complete"
    assert "x: cannot be made: Not a directory; expected a folder to be made" in refused("--out", str(complete / "x"))
    manifest = complete.read_text()
    complete.write_text(manifest.replace('"seed":', '"later_key": 1, "seed":'))
    assert "complete: its recipe: later_key: unknown; expected keys of this" in refused()
    complete.write_text(manifest)
    state = folder / "checkpoints" / "step_00000002" / "state" / "mp_rank_00_model_states.pt"
    content = bytearray(state.read_bytes())
    content[-5000] ^= 1
    state.write_bytes(content)
    assert "no checkpoint is whole (step_00000002: state/mp_rank_00_model_states.pt was changed" in refused()
    assert not (folder / "export").exists()
    told = [json.loads(line) for line in run([*script, "--json"], expected=2).stdout.splitlines()]
    assert told[-1]["exit_code"] == 2
    assert told[-1]["error"][0] == str(folder / "checkpoints")


def test_the_tokenizer_of_the_data_is_found_among_the_models_by_its_name(tmp_path: Path) -> None:
    data, models, out = tmp_path / "data", tmp_path / "models", tmp_path / "out"
    for folder in (data / "text", models / "toy", out):
        folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (models / "toy" / name).write_text(name)
    from_data = {"kind": "prepared", "path": "text", "sequence_length": 64}
    recipe = Recipe.model_validate(small_recipe(model=RANDOM, data=from_data))
    for name in ("toy", "toy/tokenizer.json"):
        (data / "text" / "manifest.json").write_text(json.dumps({"tokenizer": {"kind": "hf", "name": name}}))
        assert _bring_tokenizer(out, recipe, None, data) == str(models / "toy")
        assert (out / "tokenizer_config.json").read_text() == "tokenizer_config.json"
        shutil.rmtree(out)
        out.mkdir()
    (data / "text" / "manifest.json").write_text(json.dumps({"tokenizer": {"kind": "bytes", "name": "bytes"}}))
    assert _bring_tokenizer(out, recipe, None, data) is None
