"""`r4090c nodes` and `r4090c schema` as a user meets them: stdout, stderr, exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from r4090c.cli import main
from r4090c.cli.nodes import ssh_text
from r4090c.inventory import FILL_IN, json_schema, load_cluster_text
from r4090c.model import Ssh
from r4090c.store import rest_node

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "inventory"
EXAMPLE = str(ROOT / "cluster.yaml")


class Run:
    """Call the command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["r4090c", *words])
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as stop:
            main()
        output = self.capsys.readouterr()
        assert stop.value.code is None or isinstance(stop.value.code, int)
        return int(stop.value.code or 0), output.out, output.err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("R4090C_CLUSTER", raising=False)
    return Run(monkeypatch, capsys)


def test_table_holds_every_node_and_is_not_cut(run: Run) -> None:
    code, out, err = run("nodes", "--cluster", EXAMPLE)
    assert (code, err) == (0, "")
    assert "atelier: 4 nodes, 32 GPUs" in out
    for i in range(1, 5):
        (row,) = [line for line in out.splitlines() if f"node0{i}" in line]
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        assert cells == [f"node0{i}", f"train@192.0.2.1{i}", f"10.10.0.1{i}", "8", "/opt/r4090c/venv/bin/python"]


def test_table_keeps_long_and_odd_values(run: Run, tmp_path: Path) -> None:
    python = "/" + "long/" * 60 + "[bold]x[/bold]/python"
    (tmp_path / "cluster.yaml").write_text(f"name: a\nnodes: [{{name: n, gpus: 1}}]\npaths: {{shared: /s, python: '{python}'}}\n")
    code, out, _ = run("nodes")
    assert code == 0
    assert python in out
    assert "a: 1 node, 1 GPU\n" in out.replace(" \n", "\n").replace("  ", "").replace(" \n", "\n")


def test_json_is_api_and_holds_no_environment_values(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "name: a\nnodes:\n"
        "  - {name: b, address: c, gpus: 1, ssh: {user: d, port: 2222, jump: 'e@f:22', key: /secret/key}, env: {TOKEN: hidden}}\n"
        "paths: {shared: /s, python: /p}\nenv: {WANDB_API_KEY: hidden}\n"
    )
    code, out, _ = run("nodes", "--json")
    assert code == 0
    assert json.loads(out) == {
        "schema": "r4090c.nodes/1",
        "cluster": "a",
        "file": "cluster.yaml",
        "env": ["WANDB_API_KEY"],
        "nodes": [
            {
                "name": "b",
                "ssh": {"address": "c", "port": 2222, "user": "d", "jump": "e@f:22"},
                "data_address": "c",
                "gpus": 1,
                "spare": False,
                "resting": None,
                "paths": {"shared": "/s", "runs": "/s/r4090c/runs", "python": "/p"},
                "env": ["TOKEN"],
            }
        ],
    }


def test_nodes_option(run: Run) -> None:
    code, out, _ = run("nodes", "--cluster", EXAMPLE, "--nodes", "node[03-04]", "--json")
    assert (code, [node["name"] for node in json.loads(out)["nodes"]]) == (0, ["node03", "node04"])
    code, out, err = run("nodes", "--cluster", EXAMPLE, "--nodes", "5")
    assert (code, out) == (2, "")
    assert "a count from 1 to 4" in err
    code, out, err = run("--cluster", EXAMPLE, "nodes", "--nodes", "node05,nod01")
    assert (code, out) == (2, "")
    assert "no node is called 'node05'" in err
    assert "did you mean 'node01'?" in err


@pytest.mark.parametrize("words", [("nodes",), ("nodes", "--json")])
def test_mistakes_end_with_code_2_and_nothing_on_stdout(run: Run, words: tuple[str, ...]) -> None:
    code, out, err = run(*words, "--cluster", str(GOLDEN / "mistakes.yaml"))
    assert (code, out) == (2, "")
    assert err.replace(str(GOLDEN) + "/", "") == "error: " + (GOLDEN / "mistakes.txt").read_text()


def test_without_an_inventory(run: Run) -> None:
    code, out, err = run("nodes")
    assert (code, out) == (2, "")
    assert "r4090c nodes --import HOSTFILE > cluster.yaml" in err
    code, _, err = run("nodes", "--cluster", "no-such-file.yaml")
    assert code == 2
    assert "no-such-file.yaml: no such file" in err


def test_environment_variable_and_order_of_places(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("R4090C_CLUSTER", EXAMPLE)
    assert json.loads(run("nodes", "--json")[1])["cluster"] == "atelier"
    (tmp_path / "cluster.yaml").write_text("name: here\nnodes: [{name: b, gpus: 0}]\npaths: {shared: /s, python: /p}\n")
    assert json.loads(run("nodes", "--json")[1])["cluster"] == "here"
    assert json.loads(run("--cluster", EXAMPLE, "nodes", "--json")[1])["cluster"] == "atelier"


def test_import_of_a_file(run: Run) -> None:
    assert run("nodes", "--import", str(GOLDEN / "hostfile")) == (0, (GOLDEN / "hostfile.yaml").read_text(), "")


def test_import_from_stdin_makes_the_next_inventory(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("nodes", "--import", "-", stdin=b"a slots=2\nb slots=2\n")
    assert code == 0
    (tmp_path / "cluster.yaml").write_text(out)
    code, _, err = run("nodes")
    assert code == 2
    assert f"paths.shared: '{FILL_IN}'" in err
    assert f"paths.python: '{FILL_IN}'" in err
    assert [node.name for node in load_cluster_text(out.replace(FILL_IN, "/x"), "").nodes] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (("--import", "-"), b"", "standard input: no hosts"),
        (("--import", "-"), b"a slots=2\n-x slots=2\n", "standard input:2: the host '-x'"),
        (("--import", "-"), b"a slots=2\n\xff\n", "standard input:2: the byte 0xff is not UTF-8"),
        (("--import", "-"), b"\0", "standard input: a binary file"),
        (("--import", "nowhere"), b"", "nowhere: no such file"),
        (("--import", "-", "--json"), b"a slots=2\n", "--import: used with --json or --nodes"),
        (("--import", "-", "--nodes", "1"), b"a slots=2\n", "--import: used with --json or --nodes"),
    ],
)
def test_import_refuses(run: Run, words: tuple[str, ...], stdin: bytes, message: str) -> None:
    code, out, err = run("nodes", *words, stdin=stdin)
    assert (code, out) == (2, "")
    assert message in err


def test_schema_needs_no_inventory(run: Run) -> None:
    code, out, err = run("schema")
    assert (code, json.loads(out), err) == (0, json_schema(), "")


@pytest.mark.parametrize("command", ["nodes", "schema"])
def test_help_shows_examples_line_by_line(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"\n    r4090c {command}" in out


@pytest.mark.parametrize(
    ("ssh", "text"),
    [
        (Ssh("a"), "a"),
        (Ssh("a", 2222, "u", jump="j"), "u@a:2222 via j"),
        (Ssh("fe80::1", 22), "fe80::1"),
        (Ssh("fe80::1", 2222, "u"), "u@[fe80::1]:2222"),
    ],
)
def test_ssh_text(ssh: Ssh, text: str) -> None:
    assert ssh_text(ssh) == text


def test_process_reads_no_network_library(tmp_path: Path) -> None:
    """`nodes` contacts nothing, so it must not even load what could."""
    code = (
        "import sys; sys.argv = ['r4090c', 'nodes', '--json']\nfrom r4090c.cli import main\n"
        "try: main()\nfinally: print(sorted(sys.modules), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "R4090C_CLUSTER": EXAMPLE}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(json.loads(done.stdout)["nodes"])) == (0, 4)
    for module in ("fabric", "paramiko", "torch"):
        assert f"'{module}'" not in done.stderr
    assert "'pydantic'" in done.stderr


def test_a_node_that_failed_a_run_is_told_until_it_is_woken(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R4090C_STATE", str(tmp_path / "state"))
    (tmp_path / "cluster.yaml").write_text(
        "name: a\nnodes: [{name: n, gpus: 1}, {name: m, gpus: 1}]\npaths: {shared: /s, python: /p}\n"
    )
    rest_node("a", "n", time.time() + 100, "GPU 3 fell off the bus")
    rest_node("a", "m", time.time() - 1, "long ago")
    rest_node("another", "m", time.time() + 100, "elsewhere")
    assert run("nodes")[2] == "n failed a run lately: GPU 3 fell off the bus\n  forget it: r4090c nodes --wake n\n"
    told = json.loads(run("nodes", "--json")[1])["nodes"]
    assert [(one["name"], one["resting"]) for one in told] == [("n", "GPU 3 fell off the bus"), ("m", None)]
    assert run("nodes", "--wake", "x")[0] == 2
    assert run("nodes", "--wake", "n")[:2] == (0, "n: forgotten\n")
    assert run("nodes")[2] == ""
    assert run("nodes", "--wake", "n")[:2] == (0, "n: nothing was remembered of it\n")
