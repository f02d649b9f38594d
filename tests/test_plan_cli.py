"""`r4090c plan` in a process of its own: verdicts, exit codes, JSON, and what it must not import.

After a wanted change `python -m tests.test_plan_cli` writes the golden keys; read the diff.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.recipe import load_ds_config, load_recipe
from launch.training import training_of
from netcheck.bundle import save_bundle
from netcheck.gather import gather
from netcheck.raw import Raw
from r4090c.model import Cluster, Network
from tests.cli import PROGRAM, environment, run, start
from tests.facts.local import LocalShell
from tests.facts.samples import cluster_of
from tests.lab import Lab
from tests.lab.gpus import GpuBox
from tests.launch.facts_of import node_of
from tests.terminal import on_terminal
from tests.test_gather import ScriptedFleet

GOLDEN = Path(__file__).parent / "golden" / "plan-answer-keys.json"
ROCE = ("--assume", "2x8x4090@100gbe-roce")
MEMINFO = "MemTotal: {total} kB\nMemFree: {total} kB\nMemAvailable: {total} kB\nSwapTotal: 0 kB\n"


def plan_json(*words: str, state: Path) -> tuple[int, dict[str, Any], str]:
    code, output, errors = run("plan", *words, "--json", state=state)
    return code, json.loads(output) if output else {}, errors


# --------------------------------------------------------------------------- verdicts


def test_qlora_of_13b_fits_two_nodes(tmp_path: Path) -> None:
    code, told, errors = plan_json("llama13b", *ROCE, state=tmp_path)
    assert (code, errors) == (0, "")
    assert (told["fits"], told["pointless"], told["site"]["name"]) == (True, None, "2x8x4090@100gbe-roce")
    assert told["per_gpu_total_gib"] == pytest.approx(sum(told["per_gpu_gib"].values()))
    assert told["per_gpu_total_gib"] < told["card_gib"] == pytest.approx(24_092 / 1024)
    assert told["per_gpu_gib"]["weights"] == pytest.approx(6.7, abs=0.7)  # 13.02e9 × about 0.55 bytes (HARDWARE.md)
    assert told["largest_micro_batch"] >= 4
    assert [point["nodes"] for point in told["scaling"]] == [1, 2]
    assert told["nodes"] is None


@pytest.mark.parametrize("method", ["lora", "full"])
def test_13b_in_16_bits_does_not_fit(method: str, tmp_path: Path) -> None:
    """26.0 GB: 13.02e9 parameters (Llama 2's paper) of 2 bytes, on every card under ZeRO-2."""
    code, told, errors = plan_json("llama13b", *ROCE, "--set", f"method={method}", state=tmp_path)
    assert (code, told["fits"]) == (1, False)
    assert "26.0 GB" in errors and "26.0 GB" in " ".join(told["reasons"]) and "does not fit" in errors
    assert told["largest_micro_batch"] is None
    assert told["per_gpu_gib"]["weights"] == pytest.approx(26.0e9 / 2**30, rel=0.01)
    assert len([one for one in told["alternatives"] if one["fits"]]) >= 3
    assert f"next:     {told['alternatives'][0]['command']}" in errors
    for one in told["alternatives"]:
        words = one["command"].split()
        assert words[:5] == ["r4090c", "plan", "llama13b", *ROCE]
        sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        recipe = load_recipe("llama13b", sets)
        expected = training_of(recipe, load_ds_config(recipe))
        assert (one["predicted"]["tokens_per_s"] or 0) > 0 and expected.micro_batch * expected.accumulation == 8


def test_a_family_that_is_not_known_here_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text", "vocab_size": 300}))
    code, told, errors = plan_json("llama7b", *ROCE, "--set", f"model={tmp_path}", state=tmp_path)
    assert (code, told) == (2, {})
    assert "memory and speed of 'gemma3_text' are not known here" in errors and "`launch` trains other language models" in errors


def test_an_offered_command_does_what_it_says(tmp_path: Path) -> None:
    _, told, _ = plan_json("llama13b", *ROCE, "--set", "method=full", state=tmp_path)
    first = told["alternatives"][0]
    code, again, _ = plan_json(*first["command"].split()[2:], state=tmp_path)
    assert (code, again["fits"]) == (0, True)
    assert again["predicted"] == first["predicted"]
    assert again["per_gpu_total_gib"] == first["per_gpu_total_gib"]


@pytest.mark.parametrize("network", ["10gbe", "10gbe-tcp"])
def test_full_7b_over_10_gbe_is_pointless(network: str, tmp_path: Path) -> None:
    """23 s for the gradients of one micro-step (HARDWARE.md: 2 (P - P/k) / B, 16 GPUs, 13.5 GB at 1.1 GB/s), twice a step, and
    half as much again for the new weights: 57.5 s; the computation takes less than 10."""
    code, told, errors = plan_json("llama7b-full", "--assume", f"2x8x4090@{network}", state=tmp_path)
    assert (code, told["fits"]) == (1, True)
    assert "s of traffic per step" in told["pointless"] and "pointless over 10 Gbit/s" in errors
    assert told["predicted"]["traffic_s"] == pytest.approx(57.5, rel=0.02)
    assert "--nodes 1" in errors  # the same training is faster on one node
    code, alone, _ = plan_json("llama7b-full", "--assume", f"2x8x4090@{network}", "--nodes", "1", state=tmp_path)
    assert (code, alone["pointless"]) == (0, None)
    assert alone["predicted"]["tokens_per_s"] > told["predicted"]["tokens_per_s"]


def test_images_are_counted_as_images(tmp_path: Path) -> None:
    _, told, _ = plan_json("resnet50", *ROCE, state=tmp_path)
    assert told["predicted"]["images_per_s"] > 0 and "tokens_per_s" not in told["predicted"]


def test_nodes_and_ranks_of_an_assumed_site(tmp_path: Path) -> None:
    _, told, _ = plan_json("llama13b", *ROCE, "--nodes", "16", "--nproc-per-node", "4", state=tmp_path)
    assert len(told["site"]["node_names"]) == 16 and told["site"]["ranks_per_node"] == 4
    assert [point["nodes"] for point in told["scaling"]] == [1, 2, 4, 8, 16]


# --------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("llama13b", "--assume", "8x4090"), "--assume 8x4090: not understood"),
        (("llama13b", "--assume", "2x8x4090"), "2 nodes and no network"),
        (("llama31b", *ROCE), "did you mean llama13b?"),
        (("llama13b", *ROCE, "--set", "methd=lora"), "did you mean method?"),
        (("llama13b", *ROCE, "--set", "method=dora"), "method"),
        (("llama13b", *ROCE, "--nodes", "node01"), "nodes have no names"),
        (("llama13b", *ROCE, "--nodes", "0"), "0 × 8 = 0 GPUs"),
        (("llama13b", "--assume", "1x8x4090", "--nodes", "2"), "2 nodes and no network"),
        (("llama13b", *ROCE, "--nproc-per-node", "9"), "at most 8"),
        (("llama13b", *ROCE, "--ranks"), "--ranks: means nothing with --assume"),
        (("llama13b", *ROCE, "--env", "A=b"), "--env: means nothing with --assume"),
        (("llama13b", *ROCE, "--cluster", "c.yaml"), "given together"),
        (("mine.py", *ROCE), "r4090c launch mine.py --dry-run"),
        (("llama13b",), "cluster.yaml: not found"),
        (("llama13b", "--from", "nothing.tar.gz"), "nothing.tar.gz"),
    ],
)
def test_usage(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    code, output, errors = run("plan", *words, state=tmp_path)
    assert (code, output) == (2, "")
    assert told in errors and "bug" not in errors


def test_ranks_on_cpus_without_a_word_about_memory_cannot_be_told(tmp_path: Path) -> None:
    code, output, errors = run("plan", "tiny", "--assume", "2x1xcpu@10gbe", state=tmp_path)
    assert (code, output) == (3, "") and "next:     r4090c plan tiny --assume 2x1xcpu@10gbe,ram=64gib\n" in errors
    assert run("plan", "tiny", "--assume", "2x1xcpu@10gbe,ram=16", state=tmp_path)[0] == 0


# --------------------------------------------------------------------------- without what it does not need


def test_an_assumed_plan_needs_neither_torch_nor_ssh_nor_pydantic(tmp_path: Path) -> None:
    blocked = ("torch", "deepspeed", "transformers", "paramiko", "fabric", "pydantic", "numpy")
    program = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "from r4090c.cli import main\n"
        "sys.argv = ['r4090c', 'plan', 'llama13b', '--assume', '16x8x4090@100gbe-roce', *sys.argv[1:]]\n"
        "main()\n"
    )
    for more in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *more],
            capture_output=True,
            text=True,
            env={**environment(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
            cwd=tmp_path,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "fits" in done.stdout


# --------------------------------------------------------------------------- from a bundle


def boxes(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: int = 8) -> tuple[Cluster, Raw]:
    """Return two nodes that answer as this machine does, but have a box's eight cards and 512 GiB."""
    programs = folder / "bin"
    programs.mkdir()
    smi = programs / "nvidia-smi"
    smi.write_text(GpuBox().smi())
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    nodes = tuple(node_of(f"node0{n}", f"10.10.0.1{n}", gpus, {"HF_HOME": "/data/hf"}) for n in (1, 2))
    cluster = replace(cluster_of(("node01", "node02")), nodes=nodes, network=Network("roce", "10.10.0.0/24", 100.0, 9000))
    raw = gather(ScriptedFleet({node.name: LocalShell(node) for node in nodes}), cluster)
    for answer in raw.answers.values():
        answer["answers"]["memory"]["files"]["/proc/meminfo"] = MEMINFO.format(total=512 << 20)
    return cluster, raw


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_bundle(tmp_path / "b.tar.gz", *boxes(tmp_path, monkeypatch))
    return tmp_path / "b.tar.gz"


def test_from_a_bundle_with_environment_and_cpus_of_every_rank(bundle: Path, tmp_path: Path) -> None:
    code, told, errors = plan_json("llama13b", "--from", str(bundle), state=tmp_path)
    assert (code, told["fits"]) == (0, True), errors
    assert (told["site"]["card"]["name"], told["site"]["ranks_per_node"]) == ("RTX 4090", 8)
    assert told["site"]["host_gib"] == 512
    assert [node["name"] for node in told["nodes"]] == ["node01", "node02"]
    assert [rank["rank"] for node in told["nodes"] for rank in node["ranks"]] == list(range(16))
    assert all(var["reason"] for node in told["nodes"] for var in node["env"].values())
    assert "NCCL_P2P_DISABLE" in told["nodes"][0]["env"] and "HF_HOME" not in told["nodes"][0]["env"]
    assert any("HF_HOME" in text for text in told["assumptions"])


def test_a_bundle_of_one_node_and_a_refusal_name_the_place(bundle: Path, tmp_path: Path) -> None:
    code, told, errors = plan_json("llama13b", "--from", str(bundle), "--nodes", "node02", "--set", "method=full", state=tmp_path)
    assert (code, told["fits"]) == (1, False)
    assert [node["name"] for node in told["nodes"]] == ["node02"]
    assert f"r4090c plan llama13b --from {bundle} --nodes node02 --set" in errors


def test_what_a_terminal_takes_for_orders_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, raw = boxes(tmp_path, monkeypatch)
    for answer in raw.answers.values():
        smi = answer["answers"]["gpus"]["command"]
        smi["stdout"] = smi["stdout"].replace("NVIDIA GeForce RTX 4090", "NVIDIA \x1b[31mRTX [bold]5090")
    save_bundle(tmp_path / "b.tar.gz", cluster, raw)
    words = ("plan", "llama13b", "--from", "b.tar.gz", "--ranks", "--env", "NOTE=\x1b]0;title\x07")
    code, output, _ = run(*words, state=tmp_path)
    assert code == 0 and "RTX [bold]5090" in output and "]0;title" in output
    assert not {sign for sign in output if not sign.isprintable()} - {"\n"}


def test_an_offered_command_keeps_the_variables(bundle: Path, tmp_path: Path) -> None:
    env = ("--env", "CUDA_VISIBLE_DEVICES=0,2", "--env", "HF_TOKEN=hf_secret")
    _, told, errors = plan_json("llama13b", "--from", str(bundle), *env, "--set", "method=lora", state=tmp_path)
    assert told["site"]["ranks_per_node"] == 2 and "hf_secret" not in errors + json.dumps(told)
    first = told["alternatives"][0]
    assert "--env CUDA_VISIBLE_DEVICES=0,2 " in first["command"]
    code, again, _ = plan_json(*first["command"].split()[2:], state=tmp_path)
    assert (code, again["predicted"]) == (0, first["predicted"])


def test_variables_of_the_user_and_their_warnings(bundle: Path, tmp_path: Path) -> None:
    _, told, _ = plan_json("llama13b", "--from", str(bundle), "--env", "NCCL_SHM_DISABLE=1", state=tmp_path)
    assert told["nodes"][1]["env"]["NCCL_SHM_DISABLE"]["value"] == "1"
    assert any("NCCL_SHM_DISABLE" in text for text in told["environment_warnings"])


def test_a_node_that_did_not_answer_cannot_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, raw = boxes(tmp_path, monkeypatch)
    lost: Any = {"verdict": "timeout", "observed": "no answer", "next_command": "", "connect_s": None, "noise": ""}
    save_bundle(tmp_path / "b.tar.gz", cluster, replace(raw, reach={**raw.reach, "node02": lost}))
    code, output, errors = run("plan", "llama13b", "--from", "b.tar.gz", state=tmp_path)
    assert (code, output) == (3, "") and "holds no answer of node02" in errors
    assert plan_json("llama13b", "--from", "b.tar.gz", "--nodes", "node01", state=tmp_path)[0] == 0


def test_nodes_that_tell_no_gpu_are_taken_for_stock_cards_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, raw = boxes(tmp_path, monkeypatch)
    for answer in raw.answers.values():
        answer["answers"]["gpus"]["command"] = {"rc": 9, "stdout": "", "stderr": "NVIDIA-SMI has failed", "error": None}
    save_bundle(tmp_path / "b.tar.gz", cluster, raw)
    code, told, _ = plan_json("llama13b", "--from", "b.tar.gz", state=tmp_path)
    assert code == 0 and told["card_gib"] == pytest.approx(24_092 / 1024)
    assert any("node01, node02" in text and "taken for granted" in text for text in told["assumptions"])


# --------------------------------------------------------------------------- on nodes; the plan as the gate of launch


@pytest.mark.lab
def test_plan_and_the_gate_of_launch_on_real_nodes(mended_lab4: Lab, tmp_path: Path) -> None:
    """20,000 sequences of 128 tokens need 300 GiB a rank: nothing is started, and the files of the recipe are not written."""
    cluster = ("--cluster", str(mended_lab4.cluster_file))
    two = ("--nodes", "node01,node03")
    code, told, errors = plan_json("tiny", *cluster, *two, state=tmp_path)
    assert (code, told["fits"]) == (0, True), errors
    assert [node["name"] for node in told["nodes"]] == ["node01", "node03"]
    assert told["host_available_gib"] > 0 and told["card_gib"] == pytest.approx(told["host_available_gib"])
    large = (*cluster, *two, "--set", "micro_batch=20000")
    before = sorted(mended_lab4.directory.rglob("plan.json"))
    code, output, errors = run("launch", "tiny", *large, state=tmp_path)
    assert (code, output) == (1, "")
    assert "tiny on lab: does not fit" in errors and "GiB too much" in errors and "launch with --anyway" in errors
    assert f"r4090c {' '.join(cluster)} plan tiny --nodes node01,node03 --set micro_batch=20000" in errors
    assert sorted(mended_lab4.directory.rglob("plan.json")) == before
    code, output, errors = run("launch", "tiny", *large, "--dry-run", state=tmp_path)
    assert code == 1 and "tiny on lab: does not fit" in output and "rank 1: CPUs" in output and "does not fit" in errors
    code, output, errors = run("launch", "tiny", *large, "--dry-run", "--anyway", "--json", state=tmp_path)
    assert (code, errors) == (0, "")
    assert json.loads(output)["forecast"]["fits"] is False


def test_a_node_that_cannot_be_reached_cannot_be_told(tmp_path: Path) -> None:
    with socket.socket() as probe:  # a port nobody listens on
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "cluster.yaml").write_text(
        f'name: one\nssh: {{port: {port}, config: ""}}\nnodes:\n  - {{name: n1, address: 127.0.0.1, gpus: 8}}\n'
        f"network: {{kind: loopback}}\nstorage: {{kind: local}}\npaths: {{shared: {tmp_path}, python: {sys.executable}}}\n"
    )
    code, output, errors = run("plan", "llama13b", state=tmp_path)
    assert (code, output) == (3, "") and "n1: did not answer (refused)" in errors and "next:" in errors


# --------------------------------------------------------------------------- the answer's keys, the screen


def keys_of(value: Any) -> Any:
    """Return the keys of a JSON value, sorted, without its values; of a list those of its first item."""
    if isinstance(value, dict):
        return {key: keys_of(item) for key, item in sorted(value.items())}
    return [keys_of(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def answer_keys(state: Path) -> dict[str, Any]:
    """Return the keys of an answer that has everything but nodes, which plan.json pins."""
    _, told, _ = plan_json("llama7b-full", "--assume", "2x8x4090@10gbe", state=state)
    _, small, _ = plan_json("llama13b", *ROCE, "--set", "method=full", state=state)
    for part in ("per_gpu_gib", "host_gib", "arithmetic"):
        told[part] = {**small[part], **told[part]}
    told["predicted"]["time_goes_to_s"] = {}
    for one in told["alternatives"]:
        one["predicted"]["time_goes_to_s"] = {}
    found = keys_of(told)
    assert isinstance(found, dict)
    return {"schema": told["schema"], "keys": found}


def test_the_keys_are_api(tmp_path: Path) -> None:
    assert answer_keys(tmp_path) == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", [(), ("--set", "method=lora")])
def test_the_screen_fits_the_terminal(columns: int, words: tuple[str, ...], tmp_path: Path) -> None:
    code, text = on_terminal("plan", "llama13b", *ROCE, *words, columns=columns, state=tmp_path)
    assert code == (1 if words else 0)
    lines = [line.rstrip() for line in text.splitlines()]
    commands = [line for line in lines if "r4090c plan" in line]
    assert max(len(line) for line in lines if line not in commands) <= columns
    assert len(lines) <= (60 if columns == 120 else 90)
    for heading in ("memory a GPU", "measured and assumed") + (() if words else ("speed:", "traffic of a step", "scaling")):
        assert any(line.startswith(heading) for line in lines), heading


def test_numbers_stay_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    """Words fold, headings and figures do not: half a number is a wrong one. 13B's adapters: 62.6e6 parameters."""
    _, text = on_terminal("plan", "llama13b", *ROCE, columns=60, state=tmp_path)
    lines = [line.rstrip() for line in text.splitlines()]
    assert any(line.endswith("GB a rank  times  seconds  hidden") for line in lines)
    (gradients,) = [line.split() for line in lines if line.startswith("  gradients ")]
    assert gradients[-4:-2] == ["0.235", "2"]  # 2 × 15/16 × 62.6e6 × 2 bytes = 0.235 GB
    assert max(len(line) for line in lines if "speed" not in line) <= 60


@pytest.mark.parametrize(("sets", "code"), [((), 0), (("--set", "method=full"), 1)])
def test_a_reader_that_goes_away_changes_no_verdict(sets: tuple[str, ...], code: int, tmp_path: Path) -> None:
    process = start("plan", "llama13b", *ROCE, *sets, state=tmp_path)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == code
    assert ("does not fit" in errors) is bool(code) and "bug" not in errors


def test_a_terminal_that_knows_no_times_sign(tmp_path: Path) -> None:
    words = [*PROGRAM, "plan", "llama13b", *ROCE, "--set", "method=full"]
    env = {**environment(tmp_path), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, env=env, cwd=tmp_path, timeout=60)
    assert done.returncode == 1 and b"bug" not in done.stderr
    assert b"13.02e9 parameters ? 2 bytes = 26.0 GB" in done.stdout


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(answer_keys(Path(folder)), indent=1) + "\n")
