"""`r4090c parse` as a user meets it: stdout, stderr, exit code."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from r4090c.cli.parse import MAX_BYTES, tool_module, tool_names
from tests.cli import PROGRAM, environment, run
from tests.tools.samples import FIXTURES

NUMACTL = FIXTURES / "numactl" / "memoryless-and-cpuless-node.txt"


def piped(*words: str, data: bytes, state: Path) -> tuple[int, str, str]:
    """Run `r4090c parse WORDS` with `data` on its standard input."""
    done = subprocess.run(
        [*PROGRAM, "parse", *words], input=data, capture_output=True, env=environment(state), cwd=state, timeout=60
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("how", ["FILE", "stdin", "-"])
def test_json_of_a_file_or_of_standard_input(how: str, tmp_path: Path) -> None:
    if how == "FILE":
        code, output, errors = run("parse", "numactl", str(NUMACTL), state=tmp_path)
    else:
        code, output, errors = piped("numactl", *(["-"] if how == "-" else []), data=NUMACTL.read_bytes(), state=tmp_path)
    assert (code, errors) == (0, "")
    value = json.loads(output)
    assert (value["memoryless"], value["cpuless"], value["nodes"][0]["size_mib"]) == ([1], [2], 128717)
    assert len(output.splitlines()) == 1


def test_nothing_is_asked_of_a_cluster(tmp_path: Path) -> None:
    """It works where there is no cluster.yaml, and where there is a broken one."""
    (tmp_path / "cluster.yaml").write_text("nodes: [\n")
    assert run("parse", "numactl", str(NUMACTL), state=tmp_path)[0] == 0


def test_several_values_are_a_list(tmp_path: Path) -> None:
    code, output, _ = run(
        "parse", "nvidia-smi-query", str(FIXTURES / "nvidia-smi-query" / "8x4090-load-gpu6-x8.csv"), state=tmp_path
    )
    assert code == 0
    assert [gpu["pcie_width"] for gpu in json.loads(output)] == [16] * 6 + [8, 16]


def test_what_is_refused_ends_with_1_and_says_what_was_expected(tmp_path: Path) -> None:
    file = FIXTURES / "nvidia-smi-topo" / "8gpu-cut-after-gpu4.txt"
    code, output, errors = run("parse", "nvidia-smi-topo", str(file), state=tmp_path)
    assert (code, output) == (1, "")
    first, expected, next_command = errors.splitlines()
    assert first.startswith(f"error: {file}: incomplete matrix")
    assert expected.split(": ", 1)[1] == "the whole output of: nvidia-smi topo -m"
    assert next_command.split(":", 1)[1].strip().startswith("r4090c parse nvidia-smi-topo FILE")


def test_escape_sequences_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    code, _, errors = piped("numactl", data=b"\x1b]0;owned\x07bad \x9b31m\x08 output\x0bof \x02 something\n", state=tmp_path)
    assert code == 1
    assert all(letter.isprintable() or letter == "\n" for letter in errors)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00\x80 \xc3", b"\x00" * 1000, os.urandom(2000)])
def test_bytes_that_are_no_text(data: bytes, tmp_path: Path) -> None:
    code, output, errors = piped("lspci", data=data, state=tmp_path)
    assert (code, output) == (1, "")
    assert "standard input: " in errors and "Traceback" not in errors


def test_a_name_that_is_no_utf8_is_replaced(tmp_path: Path) -> None:
    data = FIXTURES.joinpath("lspci", "rtx4090-idle-2.5GT-downgraded.txt").read_bytes().replace(b"Gigabyte", b"Gig\xe4byte", 1)
    code, output, _ = piped("lspci", data=data.replace(b"GeForce", b"Ge\xffForce", 1), state=tmp_path)
    assert code == 0
    assert "Ge�Force" in json.loads(output)["devices"][0]["title"]


@pytest.mark.parametrize(
    ("tool", "near"),
    [("nvidia-smi-top", "nvidia-smi-topo"), ("lscpi", "lspci"), ("nccl_tests", "nccl-tests"), ("zzzz", "--list")],
)
def test_unknown_tool_is_answered_with_the_nearest(tool: str, near: str, tmp_path: Path) -> None:
    code, output, errors = run("parse", tool, state=tmp_path)
    assert (code, output) == (2, "")
    assert f"error: {tool}: no parser is called so" in errors
    assert errors.rstrip().endswith(f"r4090c parse {near}")


def test_without_a_tool(tmp_path: Path) -> None:
    code, output, errors = run("parse", state=tmp_path)
    assert (code, output) == (2, "")
    assert "r4090c parse --list" in errors


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for file, why in ((tmp_path / "nowhere", "No such file"), (tmp_path, "directory")):
        code, output, errors = run("parse", "lspci", str(file), state=tmp_path)
        assert (code, output) == (2, "")
        assert str(file) in errors and why in errors


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    code, output, errors = run("parse", "lspci", str(file), state=tmp_path)
    assert (code, output) == (2, "")
    assert "larger than 32 MiB" in errors
    code, _, errors = run("parse", "lspci", "/dev/zero", state=tmp_path)
    assert code == 2


def test_list(tmp_path: Path) -> None:
    code, output, errors = run("parse", "--list", state=tmp_path)
    assert (code, errors) == (0, "")
    listed = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert listed == {tool: tool_module(tool).COMMAND for tool in tool_names()}
    assert listed["nvidia-smi-topo"] == "nvidia-smi topo -m"
    assert json.loads(run("parse", "--list", "--json", state=tmp_path)[1]) == listed
    assert run("parse", "--list", "lspci", state=tmp_path)[0] == 2


def test_help_and_command_list(tmp_path: Path) -> None:
    code, output, _ = run("parse", "--help", state=tmp_path)
    assert code == 0
    assert "Exit codes" in output and "--list" in output
    assert "parse " in run("--help", state=tmp_path)[1]


@pytest.mark.parametrize(
    ("words", "complete", "wanted"),
    [("r4090c parse nvidia-smi-", "2", {"nvidia-smi-topo", "nvidia-smi-q"}), ("r4090c parse ", "2", set(tool_names()))],
)
def test_shell_completion(words: str, complete: str, wanted: set[str], tmp_path: Path) -> None:
    variables = {"_R4090C_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": complete}
    program = "from r4090c.cli import cli; cli(prog_name='r4090c')"
    done = subprocess.run(
        [PROGRAM[0], "-c", program], capture_output=True, text=True, env={**environment(tmp_path), **variables}, timeout=60
    )
    offered = {line.partition(",")[2] for line in done.stdout.splitlines()}
    assert wanted <= offered
    assert all(name in tool_names() for name in offered)


def test_the_log_of_a_run_is_read_too(tmp_path: Path) -> None:
    fixtures = FIXTURES.parent.parent / "launch" / "fixtures" / "diagnose"
    code, output, _ = run("parse", "training-log", str(fixtures / "xid79-fallen-off-the-bus.log"), state=tmp_path)
    assert code == 0
    assert json.loads(output)["kind"] == "gpu-fallen-off-bus"
    healthy = piped("training-log", data=b"step 1 loss 2.0\nstep 2 loss 1.9\n", state=tmp_path)
    assert healthy == (0, "null\n", "")
    assert piped("training-log", data=b"", state=tmp_path)[0] == 1
