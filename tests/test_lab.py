"""The lab itself: what a node sees, what the faults do, and that nothing is left behind however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, LabError
from tests.lab.streams import stream_gbit_s

pytestmark = pytest.mark.lab

REPOSITORY = Path(__file__).resolve().parents[1]


def ssh(lab: Lab, node: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*lab.ssh_argv(node, *options), command], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )


def ask(lab: Lab, node: str, command: str) -> str:
    done = ssh(lab, node, command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def leftovers(directory: Path, token: str) -> list[str]:
    """Whatever this machine still has of one lab, found without the lab's own code."""
    found = []
    for pid, line in command_lines():
        if f"{directory}/" in line:
            found.append(f"process {pid}: {line}")
    namespaces = Path("/run/netns")
    found += [f"namespace {path.name}" for path in namespaces.glob(f"*{token}*")] if namespaces.is_dir() else []
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, text=True, check=True).stdout)
    found += [f"link {link['ifname']}" for link in links if token in link["ifname"]]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    found += [f"mount {line}" for line in mounts if str(directory) in line or token in line]
    return found


def command_lines() -> Iterator[tuple[str, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield entry.name, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def token_of(directory: Path) -> str:
    return str(json.loads((directory / "lab.json").read_text())["token"])


def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def command_line(*words: str) -> list[str]:
    return [sys.executable, "-m", "tests.lab", *words]


# ------------------------------------------------------------------------------------------ what a node is


def test_each_node_answers_plain_ssh_with_strict_host_keys(lab4: Lab) -> None:
    assert {name: ask(lab4, name, "hostname") for name in lab4.nodes} == {name: name for name in lab4.nodes}
    assert len({(node.folder / "host_key.pub").read_text() for node in lab4.nodes.values()}) == 4


def test_a_wrong_host_key_is_refused(lab4: Lab, tmp_path: Path) -> None:
    lines = lab4.known_hosts.read_text().splitlines()
    swapped = tmp_path / "known_hosts"
    swapped.write_text(f"{lab4.address('node01')} {lines[1].split(' ', 1)[1]}\n")  # node02's key under node01's address
    argv = [str(word).replace(str(lab4.known_hosts), str(swapped)) for word in lab4.ssh_argv("node01")]
    done = subprocess.run([*argv, "true"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 255
    assert "IDENTIFICATION HAS CHANGED" in done.stderr


def test_names_resolve_on_every_node(lab4: Lab) -> None:
    for name in lab4.nodes:
        answer = ask(lab4, name, f"getent hosts {' '.join(lab4.nodes)}")
        assert {line.split()[1]: line.split()[0] for line in answer.splitlines()} == {
            other: lab4.address(other) for other in lab4.nodes
        }


def test_a_node_sees_only_its_own_interfaces_and_yet_the_hardware(lab4: Lab) -> None:
    assert ask(lab4, "node02", "ls /sys/class/net").split() == ["eth0", "lo"]
    assert ask(lab4, "node02", "cat /sys/class/net/eth0/operstate /sys/class/net/eth0/mtu").split() == ["up", "1500"]
    assert "node0" in ask(lab4, "node02", "ls /sys/devices/system/node").split()
    assert ask(lab4, "node02", "cat /sys/devices/system/cpu/online") == Path("/sys/devices/system/cpu/online").read_text().strip()
    assert ask(lab4, "node02", "ls /sys/fs/cgroup").split() == sorted(path.name for path in Path("/sys/fs/cgroup").iterdir())


def test_the_shared_folder_is_one_and_the_same_inside_and_outside(lab4: Lab) -> None:
    (lab4.shared / "from_outside").write_text("hello")
    for name in lab4.nodes:
        assert ask(lab4, name, f"cat {lab4.shared}/from_outside; echo {name} > {lab4.shared}/from_{name}") == "hello"
    assert sorted(path.read_text().strip() for path in lab4.shared.glob("from_node*")) == sorted(lab4.nodes)


def test_tmp_shm_run_and_home_are_each_nodes_own(lab4: Lab) -> None:
    ask(lab4, "node01", "touch /tmp/mark /dev/shm/mark /run/mark ~/mark")
    try:
        assert ask(lab4, "node02", "ls /tmp/mark /dev/shm/mark /run/mark ~/mark 2>/dev/null || true") == ""
        assert not any(Path(folder, "mark").exists() for folder in ("/tmp", "/dev/shm", "/run", Path.home()))
        assert (lab4.home("node01") / "mark").exists()
    finally:  # the lab is other tests' too
        ask(lab4, "node01", "rm -f /tmp/mark /dev/shm/mark /run/mark ~/mark")
    shm_free_gib = int(ask(lab4, "node01", "stat -f -c '%a %S' /dev/shm | awk '{print int($1 * $2 / 2^30)}'"))
    assert shm_free_gib >= 8


def test_the_python_of_the_cluster_file_runs_on_a_node(lab4: Lab) -> None:
    import yaml

    wish = yaml.safe_load(lab4.cluster_file.read_text())
    assert ask(lab4, "node03", f"{wish['paths']['python']} -c 'import yaml, sys; print(sys.executable)'") == sys.executable
    assert [node["address"] for node in wish["nodes"]] == [lab4.address(name) for name in lab4.nodes]
    assert wish["paths"]["shared"] == str(lab4.shared)


def test_the_callers_environment_does_not_leak_into_a_node(lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("R4090C_LEAK", "1")
    monkeypatch.setenv("TZ", "Leak/City")  # an sshd hands its own TZ on to every login
    running = lab(nodes=1)
    names = {line.partition("=")[0] for line in ask(running, "node01", "env").splitlines()}
    names |= {line.partition("=")[0] for line in running.exec("node01", "env").stdout.splitlines()}
    assert names <= {
        "HOME",
        "LOGNAME",
        "MAIL",
        "OLDPWD",
        "PATH",
        "PWD",
        "SHELL",
        "SHLVL",
        "SSH_CLIENT",
        "SSH_CONNECTION",
        "USER",
        "_",
    }


def test_stand_ins_can_be_dropped_from_outside_while_the_node_runs(lab4: Lab) -> None:
    assert ssh(lab4, "node01", "nvidia-smi").returncode == 127
    lab4.stand_in("node01", "nvidia-smi", "#!/bin/sh\necho recorded\n")
    try:
        assert ask(lab4, "node01", "nvidia-smi") == "recorded"
        assert ssh(lab4, "node02", "nvidia-smi").returncode == 127
    finally:
        (lab4.bin("node01") / "nvidia-smi").unlink()


def test_nodes_reach_each_other_and_the_controller(lab4: Lab) -> None:
    inner = f"ssh -i {lab4.key} -o BatchMode=yes -o UserKnownHostsFile={lab4.known_hosts} node03 hostname"
    assert ask(lab4, "node02", inner) == "node03"
    script = f"import socket; socket.create_server(('{lab4.controller_address}', 0))"  # our address: binding works only outside
    subprocess.run([sys.executable, "-c", script], check=True)
    assert lab4.exec("node01", sys.executable, "-c", script).returncode != 0


def test_exec_gives_back_exit_code_and_output(lab4: Lab) -> None:
    done = lab4.exec("node04", "sh", "-c", "hostname; cat; echo no >&2; exit 7", stdin="typed")
    assert (done.returncode, done.stdout, done.stderr) == (7, "node04\ntyped", "no\n")
    with pytest.raises(LabError, match=r"longer than 0\.5 s"):
        lab4.exec("node04", "sleep", "300", timeout_s=0.5)
    assert not [line for _, line in lab4.processes("node04") if "sleep" in line]


def test_processes_shows_what_an_ssh_command_left_running(mended_lab4: Lab) -> None:
    lab = mended_lab4
    assert until(lambda: lab.processes("node01") == [])
    assert ask(lab, "node01", "setsid sleep 4321 >/dev/null 2>&1 & echo $!").isdigit()
    assert until(lambda: [line for _, line in lab.processes("node01")] == ["sleep 4321"])
    assert lab.processes("node02") == []
    lab.kill("node01", lab.processes("node01")[0][0])
    assert until(lambda: lab.processes("node01") == [])
    assert until(lambda: " Z" not in lab.exec("node01", "ps", "-e", "-o", "args,stat").stdout)  # its init reaped the orphan


# ------------------------------------------------------------------------------------------ faults


def test_cut_and_heal(mended_lab4: Lab) -> None:
    lab = mended_lab4
    lab.cut("node02")
    assert ssh(lab, "node02", "true", "ConnectTimeout=1").returncode == 255
    assert ask(lab, "node01", "hostname") == "node01"
    assert lab.exec("node02", "cat", "/sys/class/net/eth0/operstate").stdout.strip() != "up"
    lab.heal("node02")
    assert ask(lab, "node02", "hostname") == "node02"


def test_sshd_stopped_frozen_and_back(mended_lab4: Lab) -> None:
    lab = mended_lab4
    lab.stop_sshd("node03")
    refused = ssh(lab, "node03", "true")
    assert "Connection refused" in refused.stderr
    lab.start_sshd("node03")
    assert ask(lab, "node03", "hostname") == "node03"
    lab.freeze_sshd("node03")
    assert ssh(lab, "node03", "true", "ConnectTimeout=1").returncode == 255
    lab.thaw_sshd("node03")
    assert ask(lab, "node03", "hostname") == "node03"


def test_power_off_says_nothing_and_power_on_boots_anew(mended_lab4: Lab) -> None:
    lab = mended_lab4
    boot_id = ask(lab, "node04", "touch /tmp/mark ~/mark; cat /proc/sys/kernel/random/boot_id")
    lab.power_off("node04")
    off = ssh(lab, "node04", "true", "ConnectTimeout=1")
    assert off.returncode == 255
    assert "refused" not in off.stderr
    with pytest.raises(LabError, match="node04 is off"):
        lab.exec("node04", "true")
    lab.power_on("node04")
    assert ask(lab, "node04", "cat /proc/sys/kernel/random/boot_id") != boot_id
    assert ask(lab, "node04", "ls ~/mark /tmp/mark 2>/dev/null || true").endswith("home/mark")


@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed")
def test_shape_limits_both_directions(mended_lab4: Lab) -> None:
    lab = mended_lab4
    lab.shape("node02", "100mbit")
    assert any(0.07 < stream_gbit_s(lab, "node02", "node01") < 0.105 for _ in range(3))  # a busy machine slows a stream as well
    assert any(0.07 < stream_gbit_s(lab, "node02", "node01", "-R") < 0.105 for _ in range(3))
    lab.shape("node02", "off")
    assert stream_gbit_s(lab, "node02", "node01") > 0.2


def test_a_senseless_rate_or_node_is_told(lab4: Lab) -> None:
    for rate in ("fast", "0mbit", "10 mbit", "-5mbit", "100"):
        with pytest.raises(LabError, match="is not like 100mbit"):
            lab4.shape("node01", rate)
    with pytest.raises(LabError, match="it has node01, node02, node03, node04"):
        lab4.cut("node05")


# ------------------------------------------------------------------------------------------ up and down


@pytest.mark.usefixtures("needs_lab")
def test_down_leaves_nothing_and_can_be_said_twice(tmp_path: Path) -> None:
    sleep = f"sleep 4322.{os.getpid()}"
    with Lab.up(tmp_path, nodes=3) as lab:
        kinds = {item.split()[0] for item in leftovers(tmp_path, lab.token)}
        assert kinds == {"process", "namespace", "link", "mount"}  # the search finds what is there
        subprocess.run([*lab.ssh_argv("node01"), f"setsid {sleep} >/dev/null 2>&1 &"], check=True, timeout=30)
        assert until(lambda: [line for _, line in lab.processes("node01")] == [sleep])
        (lab.shared / "result").write_text("kept")
        assert lab.cluster_file.exists()
    assert leftovers(tmp_path, lab.token) == []
    assert sleep not in dict(command_lines()).values()
    assert not lab.cluster_file.exists()
    assert (tmp_path / "shared" / "result").read_text() == "kept"
    lab.down()
    assert leftovers(tmp_path, lab.token) == []


@pytest.mark.usefixtures("needs_lab")
def test_the_command_line_brings_a_lab_up_and_down(tmp_path: Path) -> None:
    environment = {**os.environ, "R4090C_LAB": str(tmp_path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command_line(*words), capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=60)

    try:
        up = run("up", "--nodes", "2")
        assert up.returncode == 0, up.stderr
        assert up.stdout.splitlines()[-1] == str(tmp_path / "cluster.yaml")
        token = token_of(tmp_path)
        assert until(lambda: not [item for item in leftovers(tmp_path, token) if " guard " in item])  # it outlives its caller
        assert run("exec", "node02", "sh", "-c", "hostname; exit 5").stdout == "node02\n"
        assert run("exec", "node02", "sh", "-c", "exit 5").returncode == 5
        assert run("shape", "node01", "100mbit").returncode == 0
        assert run("cut", "node01").returncode == 0
        assert "no node 'node09'" in run("heal", "node09").stderr
        sleeper = subprocess.Popen(command_line("exec", "node02", "sleep", "4323"), cwd=REPOSITORY, env=environment)
        assert until(lambda: run("processes", "node02").stdout.endswith(" sleep 4323\n"))
    finally:
        down = run("down")
    assert down.returncode == 0, down.stderr
    assert sleeper.wait(timeout=10) != 0
    assert leftovers(tmp_path, token) == []
    assert run("down").returncode == 0
    assert run("processes", "node01").returncode == 1
    assert run("up", "--nodes", "0").returncode == 1


def test_several_labs_run_at_once(lab: Callable[..., Lab]) -> None:
    first, second = lab(nodes=2), lab(nodes=2)
    assert first.subnet != second.subnet
    assert ask(first, "node01", "hostname -I").split()[0] == first.address("node01")
    assert ask(second, "node01", "hostname -I").split()[0] == second.address("node01")
    first.down()
    assert ask(second, "node02", "hostname") == "node02"


@pytest.mark.usefixtures("needs_lab")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3])
def test_an_interrupted_up_leaves_nothing(tmp_path: Path, signal_number: signal.Signals, delay_s: float) -> None:
    """`delay_s` after lab.json appeared: before the wiring, while keys are made, while nodes start, while sshd's are awaited."""
    up = subprocess.Popen(command_line("up", "--nodes", "40", "--dir", str(tmp_path)), cwd=REPOSITORY, start_new_session=True)
    assert until((tmp_path / "lab.json").exists)
    token = token_of(tmp_path)
    time.sleep(delay_s)
    assert up.poll() is None, "it was up before it could be interrupted"
    os.killpg(up.pid, signal_number)
    assert up.wait(timeout=180) != 0
    assert until(lambda: not (tmp_path / "lab.json").exists() and leftovers(tmp_path, token) == []), leftovers(tmp_path, token)


@pytest.mark.usefixtures("needs_lab")
def test_a_lab_dies_with_the_process_that_owns_it(tmp_path: Path) -> None:
    script = f"import time; from tests.lab import Lab; lab = Lab.up({str(tmp_path)!r}, 2); print(lab.token, flush=True)"
    script += "; time.sleep(60)"
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    token = owner.stdout.readline().strip()
    assert [item for item in leftovers(tmp_path, token) if item.startswith("link")]
    owner.kill()
    owner.communicate()
    assert until(lambda: leftovers(tmp_path, token) == []), leftovers(tmp_path, token)


@pytest.mark.usefixtures("needs_lab")
def test_up_replaces_a_lab_that_crashed_in_the_same_folder(tmp_path: Path) -> None:
    crashed = Lab.up(tmp_path, nodes=2, outlive_me=True)
    with Lab.up(tmp_path, nodes=2) as lab:
        assert lab.token != crashed.token
        assert not [item for item in leftovers(tmp_path, crashed.token) if crashed.token in item]
        assert ask(lab, "node01", "hostname") == "node01"
    assert leftovers(tmp_path, lab.token) == []


@pytest.mark.usefixtures("needs_lab")
def test_down_cleans_a_lab_whose_record_was_deleted(tmp_path: Path) -> None:
    with Lab.up(tmp_path, nodes=2) as lab:
        (tmp_path / "lab.json").unlink()
    assert leftovers(tmp_path, lab.token) == []


@pytest.mark.usefixtures("needs_lab")
def test_a_folder_that_nodes_could_not_see_is_refused() -> None:
    with pytest.raises(LabError, match="each has a /dev/shm of its own"):
        Lab.up("/dev/shm", nodes=2)
