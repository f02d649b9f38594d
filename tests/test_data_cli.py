"""`r4090c data prepare`: a process of the Python that has the libraries, its exit codes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli import run as run_cli
from tests.cli import start

np = pytest.importorskip("numpy")
RECORDS = [
    {"text": "plain"},
    {"instruction": "Add", "input": "1 2", "output": "3"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
]


def records_file(folder: Path, *more: str) -> Path:
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS) + "".join(line + "\n" for line in more))
    return file


def run(*words: str, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(words, *run_cli(*words, state=state))


def prepare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(
        "data",
        "prepare",
        str(folder / "records.jsonl"),
        "--tokenizer",
        "bytes",
        "--out",
        str(folder / "out"),
        *words,
        state=folder,
    )


def test_a_dry_run_counts_and_shows_where_the_loss_counts(tmp_path: Path) -> None:
    records_file(tmp_path)
    done = prepare(tmp_path, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "records  1 chat, 1 instruction, 1 text; bad: 0" in done.stdout
    assert "--- text, 6 tokens, 6 count toward the loss: between ⟦ and ⟧\n⟦plain\0⟧\n" in done.stdout
    assert "### Instruction:\nAdd\n\n1 2\n\n### Response:\n⟦3\0⟧\n" in done.stdout
    told: dict[str, Any] = json.loads(prepare(tmp_path, "--dry-run", "--json").stdout)
    assert told["records"] == {"text": 1, "instruction": 1, "chat": 1}
    assert (told["bad_records"], told["template"], told["tokenizer"]) == (0, "default", "bytes")
    first = told["examples"][0]
    assert (bytes(first["ids"]), first["loss"]) == (b"plain\0", [1] * 6)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_what_is_written_is_told_in_json_and_for_people(tmp_path: Path) -> None:
    records_file(tmp_path)
    done = prepare(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {key: told[key] for key in ("sha256", "tokens", "documents", "packing")} == {
        key: manifest[key] for key in ("sha256", "tokens", "documents", "packing")
    }
    assert (told["documents"], told["packing"], told["folder"]) == (3, "whole", str(tmp_path / "out"))
    starts = np.fromfile(tmp_path / "out" / "documents.bin", "<u8")
    short, middle, longest = sorted(np.diff(starts).tolist())
    assert told["document_tokens"] == {"p50": middle, "p90": longest, "p99": longest, "longest": longest} and short < middle
    again = prepare(tmp_path)
    assert again.returncode == 0
    assert f"{manifest['tokens']} tokens in 3 documents (1 chat, 1 instruction, 1 text; 0 bad)" in again.stdout
    assert f"50 % have at most {middle}, 90 % have at most {longest}, 99 % have at most {longest}, the longest" in again.stdout
    (pasted,) = (line for line in again.stdout.splitlines() if line.startswith("  data: "))
    assert yaml.safe_load(pasted) == {"data": {"kind": "prepared", "path": "out", "sequence_length": 64}}


def test_bad_records_and_wrong_words_end_with_their_exit_codes(tmp_path: Path) -> None:
    file = records_file(tmp_path, "nonsense")
    done = prepare(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{file}:4: not JSON")
    assert prepare(tmp_path, "--dry-run").returncode == 1
    assert prepare(tmp_path, "--max-bad", "1").returncode == 0
    for words, told in (
        (["--python", "no-such-python"], "no such program"),
        (["--packing", "tight"], "is not one of"),
        (["--max-bad", "-1"], "--max-bad"),
    ):
        done = prepare(tmp_path, *words)
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    done = run("data", "prepare", "-x.jsonl", "--tokenizer", "bytes", "--out", "o", state=tmp_path)
    assert done.returncode == 2
    (tmp_path / "-x.jsonl").write_text('{"text": "a"}\n')  # a name like an option
    done = run("data", "prepare", "--tokenizer", "bytes", "--out", "o", "--", "-x.jsonl", state=tmp_path)
    assert (done.returncode, (tmp_path / "o" / "tokens.bin").read_bytes()) == (0, b"a\0")


def test_a_python_without_the_libraries_is_told(tmp_path: Path) -> None:
    records_file(tmp_path)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # -S: no site-packages
    bare.chmod(0o755)
    done = prepare(tmp_path, "--python", str(bare))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No module named" in done.stderr
    assert "pip install 'r4090c[train]'" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_it_and_it_goes_on(tmp_path: Path, number: signal.Signals, code: int) -> None:
    file = tmp_path / "records.jsonl"
    line = json.dumps({"text": "x" * 1000}) + "\n"
    file.write_text(line * 200_000)  # 200 MB: seconds
    words = ("data", "prepare", str(file), "--tokenizer", "bytes", "--out", str(tmp_path / "out"))
    process = start(*words, state=tmp_path)
    tokens = tmp_path / ".out.partial" / "tokens.bin"
    deadline_s = time.monotonic() + 60
    while not (tokens.exists() and tokens.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == code
    assert told.splitlines()[-1] == "data prepare: stopped; the same command goes on from here"
    assert "Traceback" not in told
    file.unlink()  # too large to be kept with the other tests' files
    assert workers
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert not (tmp_path / "out").exists()
