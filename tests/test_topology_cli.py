"""`r4090c topology`: live over real SSH, from a bundle, as text, as JSON and as SVG."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from netcheck import probe
from netcheck.bundle import save_bundle
from netcheck.facts import questions
from netcheck.raw import Raw
from r4090c.errors import Exit
from tests.cli import run
from tests.facts.samples import HERE, cluster_of, csv_answer, probe_result
from tests.lab import Lab
from tests.lab.gpus import GpuBox, installed
from tests.terminal import on_terminal

BOX = GpuBox()
NAMES = ("node01", "node02", "node03", "node04", "node05")


def golden(fact: str, case: str) -> Any:
    return json.loads((HERE / fact / f"{case}.json").read_text())["answer"]


def processors() -> Any:
    """The CPUs that the recorded matrix speaks of: two sockets, four NUMA nodes each, 12 cores with two threads in each."""
    cpu, numa = "/sys/devices/system/cpu", "/sys/devices/system/node"
    files = {f"{cpu}/present": "0-191\n", f"{cpu}/online": "0-191\n"}
    for number in range(192):
        files[f"{cpu}/cpu{number}/topology/thread_siblings_list"] = f"{number % 96},{number % 96 + 96}\n"
        files[f"{cpu}/cpu{number}/topology/physical_package_id"] = f"{number % 96 // 48}\n"
    for node in range(8):
        first = 12 * node
        files[f"{numa}/node{node}/cpulist"] = f"{first}-{first + 11},{first + 96}-{first + 107}\n"
        files[f"{numa}/node{node}/meminfo"] = f"Node {node} MemTotal:       65900000 kB\n"
    return {"files": files, "natives": {"affinity": list(range(192)), "head": {"/proc/cpuinfo": "model name\t: AMD EPYC 7K62\n"}}}


def network(name: str) -> Any:
    """The recorded network of one node, whose data interface is the first of the box."""
    answer = json.loads(json.dumps(golden("net", "data-and-management")).replace("ens5f0np0", "eth0"))
    addresses = [node.data_address for node in cluster_of(NAMES).nodes if node.name != name]
    answer["natives"]["route"] = {peer: {"address": peer, "iface": "eth0", "source": None} for peer in addresses}
    return answer


def answers(box: GpuBox, folder: Path, name: str) -> dict[str, Any]:
    """What the probe of a node answers on which the box is."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(box.smi())
    cluster = cluster_of(NAMES)
    asked = questions(cluster.node(name), cluster)

    def said(fact: str) -> Any:
        argv = asked[fact].to_json()["command"]
        done = subprocess.run([sys.executable, str(program), *argv[1:]], capture_output=True, text=True, timeout=20)
        return csv_answer(done.stdout, rc=done.returncode)

    known = {
        "cpus": processors(),
        "net": network(name),
        "pci": {"natives": {"pci": probe.native_pci(str(box.write_pci(folder)))}},
        "gpus": said("gpus"),
        "gpu_topology": said("gpu_topology"),
    }
    whole = {fact: {"files": {}, "errors": {}, "natives": {}, "command": None, **answer} for fact, answer in known.items()}
    return {**probe_result("cpus", {}), "answers": whole}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three nodes alike, a fourth whose GPU 3 lost lanes, a fifth that refused."""
    folder = tmp_path_factory.mktemp("bundle")
    ok: Any = {"verdict": "ok", "observed": "answered in 0.1 s", "next_command": "", "connect_s": 0.1, "noise": ""}
    refused = {**ok, "verdict": "refused", "observed": "refused", "next_command": "ssh node05", "connect_s": None}
    said = {name: answers(BOX, folder / name, name) for name in NAMES[:3]}
    said["node04"] = answers(BOX.with_card(3, width=8), folder / "node04", "node04")
    reach: Any = {**dict.fromkeys(NAMES[:4], ok), "node05": refused}
    save_bundle(folder / "b.tar.gz", cluster_of(NAMES), Raw("2026-11-30T00:00:00+00:00", reach, said))
    return folder / "b.tar.gz"


def test_nodes_that_are_alike_are_drawn_once(bundle: Path, tmp_path: Path) -> None:
    code, output, errors = run("topology", "--from", str(bundle), state=tmp_path)
    assert code == Exit.OK, errors
    assert "node[01-03] (3 nodes alike)\n" in output
    assert output.count("── GPU0  ") == 2
    assert "unlike node[01-03]: GPU3: NUMA 1" in output
    assert output.count("LANES LOST") == 2, "in what differs and in the drawing"
    assert "node05 could not be read: refused: refused\n  next: ssh node05\n" in errors
    assert max(map(len, output.splitlines())) <= 80
    assert "\x1b" not in output


def test_on_a_terminal_of_80_columns_nothing_is_folded_by_the_terminal(bundle: Path, tmp_path: Path) -> None:
    code, output = on_terminal("topology", "--from", str(bundle), "--nodes", "1", columns=80, state=tmp_path)
    assert code == Exit.OK
    assert {len(line) for line in output.splitlines() if line.startswith(("┌", "│", "└"))} == {80}
    _, wide = on_terminal("topology", "--from", str(bundle), "--nodes", "1", columns=200, state=tmp_path)
    assert {len(line) for line in wide.splitlines() if line.startswith(("┌", "│", "└"))} == {120}


def test_json_says_it_for_programs(bundle: Path, tmp_path: Path) -> None:
    code, output, _ = run("topology", "--from", str(bundle), "--json", state=tmp_path)
    assert code == Exit.OK
    document = json.loads(output)
    assert document["schema"] == "r4090c.topology/1"
    assert document["not_read"] == {"node05": "refused: refused"}
    common, other = document["kinds"]
    assert (common["nodes"], other["nodes"]) == (["node01", "node02", "node03"], ["node04"])
    assert common["links"]["gpu5-mlx5_0"] == "PHB"
    assert common["links"]["gpu0-gpu7"] == "SYS"
    assert common["ring"] == list(range(8))
    assert common["disagreements"] == []
    gpus = {gpu["index"]: (numa["index"], gpu) for numa in other["numa"] for gpu in numa["gpus"]}
    assert {index: numa for index, (numa, _) in gpus.items()} == {0: 3, 1: 2, 2: 0, 3: 1, 4: 7, 5: 6, 6: 4, 7: 5}
    narrow = gpus[3][1]
    assert (narrow["pci"], narrow["host_bridge"], narrow["bridges"]) == ("0000:5b:00.0", "0000:5a", ["0000:5a:01.1"])
    assert (narrow["pcie_gen_max"], narrow["pcie_width"], narrow["pcie_width_max"]) == (4, 8, 16)
    assert narrow["pcie_gbyte_s"] == pytest.approx(8 * 16 * 128 / 130 / 8 * 0.8)


def test_svg_is_one_whole_file_and_never_a_device(bundle: Path, tmp_path: Path) -> None:
    code, output, errors = run("topology", "--from", str(bundle), "--svg", "t.svg", state=tmp_path)
    assert code == Exit.OK
    assert output.startswith("node[01-03]")
    assert "drawn in t.svg" in errors
    words = {element.text for element in ET.parse(tmp_path / "t.svg").iter("{http://www.w3.org/2000/svg}text")}
    assert {"node[01-03] (3 nodes alike)", "node04", "NUMA 7", "GPU0", "mlx5_0+mlx5_1", "LANES LOST"} <= words
    code, output, errors = run("topology", "--from", str(bundle), "--svg", "/dev/null", state=tmp_path)
    assert (code, output) == (Exit.USAGE, "")
    assert "/dev/null is no file" in errors
    code, output, errors = run("topology", "--from", str(bundle), "--svg", "none/t.svg", state=tmp_path)
    assert code == Exit.USAGE
    assert output.startswith("node[01-03]")
    assert "none/t.svg cannot be written" in errors.replace(": ", " ")


def test_nothing_read_is_could_not_tell(bundle: Path, tmp_path: Path) -> None:
    code, output, errors = run("topology", "--from", str(bundle), "--nodes", "node05", "--svg", "t.svg", state=tmp_path)
    assert (code, output) == (Exit.UNKNOWN, "")
    assert "node05 could not be read" in errors
    assert not (tmp_path / "t.svg").exists()
    code, _, errors = run("topology", "--from", str(bundle), "--cluster", "c.yaml", state=tmp_path)
    assert code == Exit.USAGE
    assert "--from" in errors


@pytest.mark.lab
def test_live_and_from_its_own_bundle(mended_lab4: Lab, tmp_path: Path) -> None:
    """Two nodes with GPUs and two without, over real SSH."""
    wish = yaml.safe_load(mended_lab4.cluster_file.read_text())
    for node in wish["nodes"][:2]:
        node["gpus"] = 8
    file = tmp_path / "gpus.yaml"
    file.write_text(yaml.safe_dump(wish))
    state = tmp_path / "state"
    state.mkdir()
    with ExitStack() as stack:
        for name in ("node01", "node02"):
            stack.enter_context(installed(mended_lab4, name, BOX))
        code, live, errors = run("topology", "--cluster", str(file), state=state)
        assert code == Exit.OK, errors
        code, _, errors = run("facts", "--cluster", str(file), "--save", "f.tar.gz", state=state)
        assert code == Exit.OK, errors
    assert "node01, node02 (2 nodes alike)\n" in live
    assert "host bridge 0000:02 ── GPU0  RTX 4090 24 GiB, 0000:03:00.0, gen 4 x16" in live
    assert "mlx5_0+mlx5_1  eth0+enp160s0f1" in live
    assert "data network" in live
    assert "LANES LOST" not in live, "an idle link of generation 1 is no fault"
    alarms = [line for line in live.splitlines() if line.startswith("!") and "CPUs" not in line]  # the CPUs are this machine's
    assert alarms == []
    code, replayed, errors = run("topology", "--from", "f.tar.gz", state=state)
    assert (code, replayed) == (Exit.OK, live), errors
    shutil.rmtree(state)
