"""Preparing text and the order of samples."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train import data
from train.errors import Stop
from train.feed import told_of
from train.recipe import Data, Recipe, read_recipe

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "train" / "recipes" / "tiny.yaml"


def text_data(*sources: str, max_mib: float = 1.0, sequence_length: int = 4) -> Data:
    return Data(kind="text", sources=list(sources), sequence_length=sequence_length, max_mib=max_mib)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "b.txt").write_text("second")
    (folder / "a.txt").write_text("first")
    (folder / "image.txt").write_bytes(b"\x89PNG\0\0")
    (folder / "folder.txt").mkdir()
    (folder / "dangling.txt").symlink_to(folder / "none")
    return folder


def test_prepared_data_is_sorted_text_with_a_truthful_manifest(sources: Path, tmp_path: Path) -> None:
    prepared = data.prepare(text_data(f"{sources}/*.txt"), tmp_path / "data")
    assert (prepared.folder / "tokens.bin").read_bytes() == b"first\0second\0"
    manifest = json.loads((prepared.folder / "manifest.json").read_text())
    assert manifest["files"] == [f"{sources}/a.txt", f"{sources}/b.txt"]
    assert manifest["tokens"] == prepared.tokens == 13
    assert manifest["sha256"] == prepared.sha256 == hashlib.sha256(b"first\0second\0").hexdigest()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [prepared.folder.name]


def test_the_same_files_give_the_same_tokens_and_a_second_call_keeps_them(sources: Path, tmp_path: Path) -> None:
    wanted = text_data(f"{sources}/*.txt")
    one, two = data.prepare(wanted, tmp_path / "one"), data.prepare(wanted, tmp_path / "two")
    assert one.sha256 == two.sha256
    (sources / "a.txt").write_text("changed")
    assert data.prepare(wanted, tmp_path / "one") == one
    assert data.prepare(wanted, tmp_path / "three").sha256 != one.sha256


def test_the_byte_budget_cuts(sources: Path, tmp_path: Path) -> None:
    prepared = data.prepare(text_data(f"{sources}/*.txt", max_mib=8 / 2**20), tmp_path)
    assert (prepared.folder / "tokens.bin").read_bytes() == b"first\0se"


def test_stdlib_is_a_source_everywhere() -> None:
    files, content = data.collect(text_data("{stdlib}/a*.py"))
    assert f"{sysconfig.get_path('stdlib')}/ast.py" in files
    assert b"class NodeVisitor" in content


def test_folder_name_does_not_depend_on_where_python_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = text_data("{stdlib}/*.py")
    name = data.folder_name(wanted)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/elsewhere")
    assert data.folder_name(wanted) == name
    assert data.folder_name(text_data("{stdlib}/*.py", max_mib=2)) != name


def test_what_cannot_be_used_is_told(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop, match="no text file matches"):
        data.prepare(text_data(f"{sources}/*.md"), tmp_path / "data")
    with pytest.raises(Stop, match="13 tokens; expected at least one sequence of 14"):
        data.prepare(text_data(f"{sources}/*.txt", sequence_length=14), tmp_path / "data")
    with pytest.raises(Stop, match="storage that all nodes share"):
        data.wait_until_prepared(text_data("never"), tmp_path / "data", timeout_s=0.1)
    prepared = data.prepare(text_data(f"{sources}/*.txt"), tmp_path / "data")
    (prepared.folder / "tokens.bin").write_bytes(b"short")
    with pytest.raises(Stop, match=r"tokens.bin: 5 bytes; expected 13"):
        data.wait_until_prepared(text_data(f"{sources}/*.txt"), tmp_path / "data", timeout_s=0.1)


@pytest.fixture
def samples(tmp_path: Path) -> data.Samples:
    pytest.importorskip("torch")
    (tmp_path / "text").write_bytes(bytes(range(1, 201)))
    return data.Samples(data.prepare(text_data(str(tmp_path / "text")), tmp_path / "data"), sequence_length=4, seed=7)


def test_every_epoch_visits_every_sequence_once_in_another_order(samples: data.Samples) -> None:
    many = samples.count
    epochs = [[samples.sequence_at(epoch * many + index) for index in range(many)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(many)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [samples.sequence_at(index) for index in range(many)] == epochs[0]  # back again after a resume


def recipe_of(micro_batch: int, accumulation: int) -> Recipe:
    return read_recipe(TINY).model_copy(update={"micro_batch": micro_batch, "gradient_accumulation": accumulation})


@pytest.mark.parametrize(("world_size", "micro_batch", "accumulation"), [(1, 4, 4), (2, 4, 2), (4, 1, 4), (16, 1, 1), (8, 2, 1)])
def test_a_step_takes_the_same_samples_for_any_number_of_ranks(
    samples: data.Samples, world_size: int, micro_batch: int, accumulation: int
) -> None:
    recipe = recipe_of(micro_batch, accumulation)
    for step in (1, 2, 9):
        taken = []
        for micro_step in range(accumulation):
            for rank in range(world_size):
                first = data.first_position(recipe, step, micro_step, rank, world_size)
                taken += [samples.sequence_at(first + index) for index in range(micro_batch)]
        assert taken == [samples.sequence_at((step - 1) * 16 + index) for index in range(16)]


def test_a_batch_holds_the_bytes_of_its_sequences(samples: data.Samples) -> None:
    first = samples.count - 1  # the batch lies across two epochs
    batch = samples.batch(first, 3)
    assert {str(tensor.dtype) for tensor in batch.values()} == {"torch.int64"}
    starts = [samples.sequence_at(first + index) * 4 for index in range(3)]
    assert batch["input_ids"].tolist() == [[start + 1, start + 2, start + 3, start + 4] for start in starts]
    assert batch["labels"].equal(batch["input_ids"])
    assert "position_ids" not in batch  # one document a row: as the model counts by itself


# ---- prepared folders


TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
"""Under `bytes`: a prompt of 35 tokens, then "yes" and the end."""
PROMPT, RESPONSE = b"### Instruction:\nhi\n\n### Response:\n", b"yes\0"


def prepared_folder(tmp_path: Path, records: list[dict[str, Any]], *words: str) -> Path:
    """Return the folder that train/prepare.py makes of `records` under the tokenizer `bytes`."""
    tmp_path.mkdir(exist_ok=True)
    file, out = tmp_path / "records.jsonl", tmp_path / "prepared"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, str(ROOT / "train" / "prepare.py"), str(file), "--tokenizer", "bytes", "--out", str(out), *words]
    subprocess.run([*command, "--workers", "1"], check=True, capture_output=True)
    return out


def samples_of(folder: Path, sequence_length: int, seed: int = 7) -> data.Samples:
    return data.Samples(data.open_prepared(folder, sequence_length, verify=True), sequence_length, seed)


def rows(samples: data.Samples) -> list[tuple[list[int], list[int], list[int]]]:
    """Return (ids, labels, positions) of every sequence, sorted."""
    batch = samples.batch(0, samples.count)
    names = ("input_ids", "labels", "position_ids")
    return sorted(zip(*(batch[name].tolist() for name in names), strict=True))


def test_stream_cuts_anywhere_and_tells_the_documents_apart(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = prepared_folder(tmp_path, [{"text": "abc"}, {"text": "defghi"}, {"text": "k"}])
    assert (folder / "tokens.bin").read_bytes() == b"abc\0defghi\0k\0"

    def ids(text: str) -> list[int]:
        return list(text.encode())

    no = data.IGNORED
    assert rows(samples_of(folder, 5)) == [
        (ids("abc\0d"), [no, *ids("bc\0"), no], [0, 1, 2, 3, 0]),
        (ids("efghi"), [no, *ids("fghi")], [0, 1, 2, 3, 4]),
    ]
    assert rows(samples_of(folder, 13)) == [
        (ids("abc\0defghi\0k\0"), [no, *ids("bc\0"), no, *ids("efghi\0"), no, 0], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1])
    ]


def test_whole_cuts_no_document_that_fits(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = prepared_folder(tmp_path, [TALK, {"text": "ab"}, TALK, {"text": "x" * 70}])
    no = data.IGNORED
    talk, masked = [*PROMPT, *RESPONSE], [no] * len(PROMPT) + [*RESPONSE]
    found = rows(samples_of(folder, 42))
    padded = [0] * 3, [no] * 3, [0, 1, 2]
    long = 71 - 42
    assert found == sorted(
        [
            ([*b"ab\0", *talk], [no, *b"b\0", *masked], [0, 1, 2, *range(39)]),
            ([*talk, *padded[0]], [*masked, *padded[1]], [*range(39), *padded[2]]),
            ([*b"x" * 42], [no, *b"x" * 41], [*range(42)]),
            ([*b"x" * (long - 1), 0, *[0] * 13], [no, *b"x" * (long - 2), 0, *[no] * 13], [*range(long), *range(13)]),
        ]
    )


def test_what_has_nothing_to_learn_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for packing in ("whole", "stream"):
        folder = prepared_folder(tmp_path / packing, [TALK] * 10, "--packing", packing)
        samples = samples_of(folder, 20)  # cuts every prompt
        assert 0 < samples.count < 20
        labels = samples.batch(0, samples.count)["labels"]
        assert (labels[:, 1:] != data.IGNORED).any(dim=1).all()
        assert (labels[:, 1:] != data.IGNORED).sum() >= 10 * (len(RESPONSE) - 1)
    with pytest.raises(Stop, match="no sequence has a token that counts"):
        only_prompt = prepared_folder(tmp_path / "long", [{"instruction": "long " * 30, "output": "n"}], "--packing=stream")
        samples_of(only_prompt, 150)  # the response lies behind the last whole sequence


def test_what_became_of_the_data_is_told_with_a_notice_where_most_is_lost(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = prepared_folder(tmp_path / "chats", [TALK] * 9 + [{"text": "x" * 69}])
    fits, cut = samples_of(folder, 70), samples_of(folder, 30)
    assert told_of(fits, 5, 4) == ["data     10 documents in 10 sequences of 70 tokens; 5 steps = 2 epochs"]
    line, *notices = told_of(cut, 1, 3)  # a piece of 30 that is all prompt and one of 9 of each talk; two of 30 and one of 10
    assert line.startswith("data     10 documents in ")
    assert ", 10 cut, 9 pieces left out: nothing counts toward the loss; 1 step = 0." in line
    assert [notice.partition(":")[0] for notice in notices] == [
        "notice   10 of 10 documents are longer than data.sequence_length 30 and cut"
    ]
    (_, notice) = told_of(samples_of(prepared_folder(tmp_path / "s", [TALK] * 9, "--packing", "stream"), 4), 8, 2)
    assert "of 87 pieces have no token that counts toward the loss and are left out: raise data.sequence_length" in notice
    few = samples_of(prepared_folder(tmp_path / "few", [TALK] * 5 + [{"text": "x" * 90}] * 5), 90)
    assert [line.split()[0] for line in told_of(few, 1, 3)] == ["data"]  # just half of them are cut
    text = data.prepare(text_data(str(tmp_path / "few" / "records.jsonl")), tmp_path / "text")  # with no documents to be told
    assert told_of(data.Samples(text, 4, 1), text.tokens // 4, 2) == [
        f"data     {text.tokens // 4:,} sequences of 4 tokens; {text.tokens // 4:,} steps = 2 epochs"
    ]


@given(st.lists(st.integers(1, 50), max_size=200))
def test_packing_takes_each_piece_once_and_overfills_nothing(lengths: list[int]) -> None:
    chosen = data.pack(lengths, 50)
    filled: dict[int, int] = {}
    for length, sequence in zip(lengths, chosen, strict=True):
        filled[sequence] = filled.get(sequence, 0) + length
    assert sorted(filled) == list(range(len(filled)))
    assert max(filled.values(), default=0) <= 50
    assert len(filled) <= 11 / 9 * -(-sum(lengths) // 50) + 50 / 9 or min(filled.values()) > 25


@given(st.lists(st.integers(1, 30), min_size=1, max_size=50), st.integers(2, 12))
def test_long_documents_are_cut_without_loss(lengths: list[int], length: int) -> None:
    np = pytest.importorskip("numpy")
    documents = np.concatenate(([0], np.cumsum(lengths)))
    begins, ends = data.cut_long(documents, length)
    assert begins[0] == 0 and ends[-1] == sum(lengths) and (begins[1:] == ends[:-1]).all()
    assert (ends - begins <= length).all()
    assert set(documents[:-1].tolist()) <= set(begins.tolist())
    assert len(begins) == sum(-(-one // length) for one in lengths)


def test_the_order_of_prepared_data_is_one_for_any_world_size_and_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = prepared_folder(
        tmp_path, [{"text": f"document {number} " * (number % 7 + 1)} for number in range(60)], "--packing=whole"
    )
    first, again = samples_of(folder, 64), samples_of(folder, 64)
    steps = 2 * first.count // 8 + 1
    everything = first.batch(0, steps * 8)
    for world_size, micro_batch, accumulation in ((1, 8, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1)):
        recipe = recipe_of(micro_batch, accumulation)
        for step in range(3, steps + 1):  # resumed after step 2
            taken = [
                again.batch(data.first_position(recipe, step, micro, rank, world_size), micro_batch)
                for micro in range(accumulation)
                for rank in range(world_size)
            ]
            plain = [list(range(64))] * micro_batch  # positions of rows that are one document each
            for name, tensor in everything.items():
                rows_taken = [row for batch in taken for row in (batch[name].tolist() if name in batch else plain)]
                assert rows_taken == tensor[(step - 1) * 8 : step * 8].tolist()


def test_no_document_sees_another(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    texts = ["first document", "the second", "and a third one"]
    folder = prepared_folder(tmp_path, [{"text": text} for text in texts], "--packing=whole")
    batch = samples_of(folder, 48).batch(0, 1)
    config = dict(read_recipe(TINY).model.config) | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    for attention in ("sdpa", "eager"):
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, attn_implementation=attention)).eval()
        with torch.no_grad():
            packed = model(**batch)
            losses, targets = 0.0, 0
            for text in texts:
                alone = torch.tensor([[*text.encode(), 0]])
                start = bytes(batch["input_ids"][0].tolist()).index(text.encode())
                here = packed.logits[:, start : start + alone.shape[1]]
                expected = model(input_ids=alone, labels=alone)
                torch.testing.assert_close(here, expected.logits, atol=1e-5, rtol=1e-5)
                losses += float(expected.loss) * (alone.shape[1] - 1)
                targets += alone.shape[1] - 1
            assert float(packed.loss) == pytest.approx(losses / targets, rel=1e-5)
            leaking = model(input_ids=batch["input_ids"]).logits  # the comparison can fail
            assert not torch.allclose(leaking, packed.logits, atol=1e-3)


def test_damage_is_told_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, [TALK] * 3)
    again = f"prepare it again: r4090c data prepare … --out {folder}"

    def told(sequence_length: int = 16) -> str:
        with pytest.raises(Stop) as caught:
            data.open_prepared(folder, sequence_length, verify=True)
        assert caught.value.exit_code == 2
        return str(caught.value)

    intact = {path.name: path.read_bytes() for path in folder.iterdir()}

    def restore() -> None:
        for name, content in intact.items():
            (folder / name).write_bytes(content)

    for name in ("tokens.bin", "documents.bin", "loss.bin"):
        size = len(intact[name])
        (folder / name).write_bytes(intact[name][:-1])
        assert told() == f"{folder / name}: {size - 1} bytes; expected {size}, as its manifest says; {again}"
        (folder / name).write_bytes(intact[name][:-1] + b"\x07")
        assert told().startswith(f"{folder / name}: its bytes are not those that were written; expected sha256 ")
        (folder / name).unlink()
        assert told() == f"{folder / name}: 0 bytes; expected {size}, as its manifest says; {again}"
        restore()
    manifest, sha256 = folder / "manifest.json", data.open_prepared(folder, 16).sha256
    for before, after, why in (
        ('"tokens": 117', '"tokens": 113', "it contradicts itself"),
        ('"dtype": "uint8"', '"dtype": "uint16"', "it contradicts itself"),
        (f'"sha256": "{sha256}', '"sha256": "0', "it contradicts itself"),
        ('"schema": "r4090c.data/1"', '"schema": "r4090c.data/9"', "schema r4090c.data/9"),
        ('"packing": ', '"packed": ', "no manifest of ours: KeyError('packing')"),
        ("{", "", "no manifest of ours"),
    ):
        assert before.encode() in intact["manifest.json"]
        manifest.write_text(intact["manifest.json"].decode().replace(before, after, 1))
        assert told().startswith(f"{manifest}: {why}")
    manifest.unlink()
    assert told() == (
        f"{manifest}: No such file or directory; expected a folder that `r4090c data prepare` wrote; "
        "correct data.path in the recipe"
    )
    restore()
    prepared = data.open_prepared(folder, 16)
    data.require_vocabulary(prepared, 256)
    with pytest.raises(
        Stop, match=r"manifest.json: it has token 121, the model knows 121; expected tokens below 121; prepare the"
    ):
        data.require_vocabulary(prepared, 121)


def test_a_token_that_cannot_be_is_told_while_reading(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = prepared_folder(tmp_path, [{"text": "abc"}])
    (folder / "tokens.bin").write_bytes(b"ab\xfe\0")
    samples = data.Samples(data.open_prepared(folder, 4), 4, 1)  # too large to be hashed, say
    with pytest.raises(Stop, match=r"tokens.bin: damaged: it has token 254; expected none above 99"):
        samples.batch(0, 1)


def test_a_recipe_names_prepared_data_below_the_data_folder(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, [{"text": "abcdefgh"}])
    wanted = Data(kind="prepared", path="prepared", sequence_length=4)
    prepared = data.prepare(wanted, tmp_path)
    assert prepared == data.wait_until_prepared(wanted, tmp_path, timeout_s=0)
    assert (prepared.folder, prepared.tokens, prepared.documents) == (folder, 9, 1)
    assert data.prepare(Data(kind="prepared", path=str(folder), sequence_length=4), tmp_path / "elsewhere") == prepared
    with pytest.raises(Stop, match=r"tokens.bin: 9 tokens; expected at least one sequence of 10; prepare more"):
        data.prepare(Data(kind="prepared", path="prepared", sequence_length=10), tmp_path)
    for wrong, why in (({"kind": "prepared"}, "needs path"), ({"kind": "text", "sources": ["a"]}, "needs sources and max_mib")):
        with pytest.raises(ValueError, match=why):
            Data(**wrong, sequence_length=4)


def test_prefetch_gives_the_same_batches_passes_errors_on_and_ends(samples: data.Samples) -> None:
    positions = [(first, 3) for first in range(0, 60, 3)]
    ahead = list(data.prefetch(samples, positions))
    assert len(ahead) == 20
    for (first, size), batch in zip(positions, ahead, strict=True):
        assert all(tensor.equal(batch[name]) for name, tensor in samples.batch(first, size).items())

    def failing() -> Iterator[tuple[int, int]]:
        yield 0, 1
        raise Stop("here", "broken", "whole", "mend it")

    with pytest.raises(Stop, match="here: broken"):
        list(data.prefetch(samples, failing()))
    endless = data.prefetch(samples, ((position, 1) for position in count()))
    next(endless)
    before = [thread for thread in threading.enumerate() if thread.name == "prefetch"]
    assert before
    endless.close()
    for thread in before:
        thread.join(5)
        assert not thread.is_alive()
