"""Images: found, read, cut and trained on; a ResNet-18 at 32 × 32 pixels stands for the ResNet-50."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from train.errors import Stop
from train.images import SYNTHETIC_IMAGES, Images, centre_box, open_images, random_box
from train.recipe import Data, Recipe

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "recipe-tiny.json").read_text())

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the extra `train`", allow_module_level=True)


def images_of(path: str, size: int = 32) -> Data:
    return Data(kind="images", path=path, image_size=size)


def resnet_recipe(**changes: Any) -> dict[str, Any]:
    recipe = TINY | {"name": "toy", "description": "", "method": "full", "micro_batch": 8, "gradient_accumulation": 1, "steps": 6}
    recipe |= {"model": {"family": "resnet", "weights": None, "config": {"depth": 18, "num_classes": 4}}}
    recipe |= {"data": {"kind": "images", "path": "synthetic", "image_size": 32}, "ds_config": "zero0.json"}
    return recipe | {"checkpoint": {"every_steps": 3, "keep": 5}} | changes


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Return a folder of 3 classes, 4 pictures each, of one colour a class, wide and high ones."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "pictures"
    for kind, colour in (("cats", (255, 0, 0)), ("dogs", (0, 255, 0)), ("mice", (0, 0, 255))):
        (folder / kind).mkdir(parents=True)
        for number in range(4):
            image.new("RGB", (64 + number, 48), colour).save(folder / kind / f"{number}.png")
    (folder / "cats" / "README.txt").write_text("no picture")
    return folder


def test_a_folder_of_pictures_is_read_in_the_order_of_the_seed(pictures: Path) -> None:
    found = open_images(images_of(str(pictures)), Path(), classes=3)
    assert (len(found.names), found.names[0], sorted(set(found.labels))) == (12, "cats/0.png", [0, 1, 2])
    assert str(found).startswith("12 images, sha256 ")
    samples = Images(found, 32, seed=7)
    batch = samples.batch(0, 12)
    assert batch["pixel_values"].shape == (12, 3, 32, 32) and str(batch["pixel_values"].dtype) == "torch.uint8"
    brightest = batch["pixel_values"].float().mean(dim=(2, 3)).argmax(dim=1)
    assert brightest.tolist() == batch["labels"].tolist()
    assert sorted(samples.sequence_at(position) for position in range(12)) == list(range(12))
    one, other = samples.batch(0, 8)["labels"].tolist(), samples.batch(8, 4)["labels"].tolist()
    assert one + other == batch["labels"].tolist()
    assert samples.batch(12, 12)["labels"].tolist() != batch["labels"].tolist()  # the next epoch has another order
    again = Images(found, 32, seed=7).batch(0, 12)
    assert (again["pixel_values"] == batch["pixel_values"]).all()
    assert (Images(found, 32, seed=8).batch(0, 12)["labels"] != batch["labels"]).any()
    (pictures / "dogs" / "1.png").write_bytes(b"another size")
    assert open_images(images_of(str(pictures)), Path(), classes=3).sha256 != found.sha256


def test_what_is_wrong_with_pictures_is_told(pictures: Path) -> None:
    with pytest.raises(Stop, match=r"nowhere: No such file .* correct data.path"):
        open_images(images_of("nowhere"), pictures, classes=3)
    with pytest.raises(Stop, match=r"3 classes; expected at most 2, the model's; set model.config.num_classes to 3"):
        open_images(images_of(str(pictures)), Path(), classes=2)
    (pictures / "empty").mkdir()
    with pytest.raises(Stop, match="0 folders, no image"):
        open_images(images_of("empty"), pictures, classes=3)
    (pictures / "empty").rmdir()
    (pictures / "dogs" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    samples = Images(open_images(images_of(str(pictures)), Path(), classes=3), 32, seed=7)
    with pytest.raises(Stop, match=r"dogs/2.png: .*; expected a picture; remove it") as caught:
        samples.batch(0, 12)
    assert caught.value.exit_code == 1


def test_crops_lie_in_the_picture_and_differ() -> None:
    boxes = {random_box(640, 360, random.Random(seed)) for seed in range(200)}
    assert len(boxes) == 200
    for left, upper, right, lower in boxes:
        assert 0 <= left < right <= 640 and 0 <= upper < lower <= 360
    assert random_box(10_000, 1, random.Random(0)) == centre_box(10_000, 1)  # nothing of the wanted ratio fits
    assert centre_box(640, 400) == (145.0, 25.0, 495.0, 375.0)


def test_synthetic_images_are_the_same_everywhere_and_can_be_learned() -> None:
    found = open_images(images_of("synthetic"), Path("/nowhere"), classes=5)
    assert found == open_images(images_of("synthetic"), Path("/elsewhere"), classes=5)
    assert len(found.labels) == SYNTHETIC_IMAGES and set(found.labels) == set(range(5))
    pixels = Images(found, 32, seed=1).take(list(range(10)), [])["pixel_values"].float()
    alike, unlike = (pixels[0] - pixels[5]).abs().mean(), (pixels[0] - pixels[1]).abs().mean()
    assert alike < 0.8 * unlike
    assert Images(found, 50, seed=1).batch(3, 2)["pixel_values"].shape == (2, 3, 50, 50)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": TINY["data"]}, "data.kind: text is not what model.family resnet learns from"),
        ({"model": TINY["model"]}, "data.kind: images is not what model.family llama learns from"),
        ({"method": "lora"}, "method: not for a resnet"),
        (
            {"micro_batch": "auto", "global_batch": 8, "loss_chunk_tokens": 9},
            "micro_batch auto, loss_chunk_tokens: not for a resnet",
        ),
        ({"data": {"kind": "images", "path": ""}}, "kind images needs path"),
        ({"data": {"kind": "images", "path": "x", "image_size": 8}}, "greater than or equal to 32"),
        ({"eval": {"every_steps": 2}}, "every_steps needs data"),
        ({"eval": {"every_steps": 2, "data": TINY["data"]}}, "eval.data.kind: text is not like data.kind images"),
    ],
)
def test_mistakes_in_a_recipe_of_images_are_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Recipe.model_validate(resnet_recipe(**changes))


@pytest.mark.train
@pytest.mark.long
def test_a_resnet_learns_is_resumed_and_evaluated(tmp_path: Path) -> None:
    """Two ranks. The running means of its norms differ from rank to rank; what counts is rank 0's, which is saved."""
    pytest.importorskip("deepspeed")
    from tests.train.test_training import TORCHRUN, finish, metrics

    held_out = {"kind": "images", "path": "synthetic", "image_size": 32}
    recipe = resnet_recipe(eval={"every_steps": 3, "sequences": 20, "data": held_out})
    file = tmp_path / "recipe.json"

    def train(run: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        file.write_text(json.dumps(recipe | changes))
        places = ["--run-dir", str(tmp_path / "runs" / run), "--data-dir", str(tmp_path / "data")]
        ran = finish([*TORCHRUN, str(ROOT / "train" / "main.py"), "--recipe", str(file), *places])
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran

    told = train("whole").stdout
    assert "step     16 images = 8 images x 1 accumulated x 2 ranks; 6 steps" in told
    assert "data     256 images, sha256 " in told and "eval.data is the data that is trained on" in told
    lines = metrics(tmp_path / "runs", "whole")
    golden = json.loads((ROOT / "tests" / "golden" / "metrics-images.jsonl").read_text())
    assert [list(line) for line in lines[:2]] == [list(golden)] * 2
    assert [line["images"] for line in lines] == [16 * step for step in range(1, 7)]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert "eval_perplexity" not in lines[-1]

    for folder in (tmp_path / "runs" / "whole" / "checkpoints").glob("step_*6"):  # as if it had been killed after step 3
        folder.rename(tmp_path / folder.name)
    assert "resume   after step 3" in train("whole").stdout
    again = metrics(tmp_path / "runs", "whole")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]

    run = [str(tmp_path / "runs" / "whole"), "--data-dir", str(tmp_path / "data"), "--json", "--step", "3"]
    ran = finish([sys.executable, str(ROOT / "train" / "evaluate.py"), *run])
    result = json.loads(ran.stdout.splitlines()[-1])["result"]
    assert (result["step"], result["samples"]) == (3, 20)
    assert result["eval_loss"] == pytest.approx(lines[2]["eval_loss"], rel=1e-9)
