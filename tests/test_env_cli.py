"""`r4090c env` over a bundle: lines that a shell takes back unchanged, secrets hidden, doubts on stderr."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from netcheck.bundle import save_bundle
from netcheck.gather import gather
from netcheck.rank_env import Var
from r4090c.cli.env import _lines, _rank_lines
from r4090c.remote import NodeError, Verdict
from tests.cli import run, run_json
from tests.facts.local import LocalShell
from tests.facts.samples import cluster_of
from tests.lab.lab import Lab
from tests.test_gather import ScriptedFleet


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes that are this machine, and one that does not answer; cluster.yaml sets a secret."""
    cluster = cluster_of(("near", "far", "silent"))
    cluster = replace(cluster, nodes=tuple(replace(node, gpus=0) for node in cluster.nodes), env={"HF_TOKEN": "hf_0123456789"})
    silent = NodeError("silent", Verdict.TIMEOUT, "no answer", "one", "ssh silent")
    shells = {"near": LocalShell(cluster.nodes[0]), "far": LocalShell(cluster.nodes[1]), "silent": silent}
    file = tmp_path_factory.mktemp("bundle") / "b.tar.gz"
    save_bundle(file, cluster, gather(ScriptedFleet(shells), cluster))
    return file


def exported(text: str) -> dict[str, str]:
    """Return what a shell makes of the lines."""
    done = subprocess.run(["env", "-i", "bash", "-c", f"{text}\nenv -0"], capture_output=True, text=True, check=True)
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def test_a_shell_takes_the_lines_as_they_are_meant(bundle: Path, tmp_path: Path) -> None:
    values = {"NCCL_SOCKET_IFNAME": "^docker0", "ODD": "a b$(id)`id`'\"\\ # x", "LINES": "one\ntwo; false", "EMPTY": ""}
    words = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
    code, output, errors = run(
        "env", "--from", str(bundle), "--node", "near", "--nodes", "near,far", "--explain", *words, state=tmp_path
    )
    assert code == 0, errors
    found = exported(output)
    assert {name: found[name] for name in values} == values
    assert (found["PYTHONUNBUFFERED"], found["OMP_NUM_THREADS"]) == ("1", "1")
    assert not {"PYTHONPATH", "R4090C_RUN_DIR"} & {*found}
    assert "ifname-admits-lo" in errors and "warning: NCCL_SOCKET_IFNAME (--env), near, far: ^docker0 admits " in errors
    assert "# set by --env" in output and "[--env]" in output


def test_secrets_are_hidden_and_a_bundle_says_what_it_does_not_hold(bundle: Path, tmp_path: Path) -> None:
    code, output, errors = run(
        "env", "--from", str(bundle), "--nodes", "near,far", "--env", "WANDB_API_KEY=w_secret", state=tmp_path
    )
    assert code == 0
    assert "w_secret" not in output + errors and "# WANDB_API_KEY: a secret, not shown" in output
    assert "left out: HF_TOKEN" in errors
    assert output.startswith("# all of 2 nodes\n") and "# near: nothing of its own" in output


def test_json_has_layers_reasons_and_doubts(bundle: Path, tmp_path: Path) -> None:
    told = run_json("env", "--from", str(bundle), "--nodes", "near,far", "--env", "NCCL_DEBUG=TRACE", state=tmp_path)
    assert told["schema"] == "r4090c.env/1" and told["nodes"] == ["near", "far"]
    assert told["common"]["NCCL_DEBUG"] == {"value": "TRACE", "reason": "set by --env", "origin": "--env"}
    assert [one["rule"] for one in told["warnings"]] == ["debug-level"]
    assert {*told["own"]} == {*told["ranks"]} == {"near", "far"}


def test_a_node_that_did_not_answer(bundle: Path, tmp_path: Path) -> None:
    code, output, errors = run("env", "--from", str(bundle), state=tmp_path)
    assert code == 3 and "# all of 2 nodes" in output
    assert "silent did not answer (timeout): no answer; expected one; told is a run without it" in errors
    code, output, _ = run("env", "--from", str(bundle), "--node", "silent", state=tmp_path)
    assert (code, output) == (3, "")


@pytest.mark.parametrize(
    "words",
    [("--node", "nobody"), ("--env", "=1"), ("--cluster", "x.yaml"), ("--nodes", "near", "--node", "far"), ("--env", "X")],
)
def test_wrong_usage(bundle: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    code, output, errors = run("env", "--from", str(bundle), *words, state=tmp_path)
    assert (code, output) == (2, "")
    assert "expected:" in errors


def test_what_only_one_rank_has_is_a_comment() -> None:
    ranks = [{"OMP_NUM_THREADS": Var("4", "its cores")}, {"OMP_NUM_THREADS": Var("5", "its\ncores")}]
    assert list(_rank_lines(ranks, True)) == [
        "# local rank 0: export OMP_NUM_THREADS=4   # its cores [computed]",
        "# local rank 1: export OMP_NUM_THREADS=5   # its cores [computed]",
    ]
    assert list(_lines({"B": Var("2", "x"), "A": Var("1", "y\nrm -rf /")}, True)) == [
        "export A=1   # y rm -rf / [computed]",
        "export B=2   # x [computed]",
    ]


@pytest.mark.parametrize("value", ["a\nb", "\x1b[31mred\x1b[0m it's \\n", "ü\u2028\u0085", "\t'\\'"])
def test_what_a_terminal_might_take_for_orders_is_spelt_out(value: str) -> None:
    (line,) = _lines({"ODD": Var(value, "x")}, True)
    assert line.isprintable()
    assert exported(line)["ODD"] == value


def test_json_is_one_document(bundle: Path, tmp_path: Path) -> None:
    _, output, _ = run("env", "--from", str(bundle), "--node", "near", "--json", state=tmp_path)
    assert {*json.loads(output)["own"]} == {"near"}


def test_nodes_that_are_asked_and_a_launch_warn_alike(lab: Callable[..., Lab], tmp_path: Path) -> None:
    """The environment of a dry run is the one that `env` tells, and both warn; neither refuses."""
    cluster = str(lab(2).cluster_file)
    words = ("--env", "GLOO_SOCKET_IFNAME=lo")
    told = run_json("env", "--cluster", cluster, *words, state=tmp_path)
    code, output, errors = run("launch", "tiny", "--dry-run", "--json", "--cluster", cluster, *words, state=tmp_path)
    assert code == 0, errors
    assert "warning: GLOO_SOCKET_IFNAME (--env), node01, node02: lo is loopback" in errors
    plan = json.loads(output)
    plan = plan.get("plan", plan)
    assert len(plan["warnings"]) == len(told["warnings"]) == 1
    for node in plan["nodes"]:
        env = {**node["env"], **node["ranks"][0]["env"]}
        expected = {**told["common"], **told["own"][node["name"]]}
        assert {name: var["value"] for name, var in env.items() if name not in ("PYTHONPATH", "R4090C_RUN_DIR")} == {
            name: var["value"] for name, var in expected.items()
        }
