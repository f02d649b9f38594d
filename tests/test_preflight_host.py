"""The preflight against what is wrong with a host, over real SSH to the lab's nodes: each fault is made, found and mended."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from r4090c.errors import Exit
from tests.lab import Lab
from tests.test_preflight import ask, bad, changed, inside, r4090c

pytestmark = pytest.mark.lab


def findings(answer: dict[str, Any], check: str) -> dict[str, dict[str, str]]:
    """Return subject -> finding of one check."""
    return {finding["subject"]: finding for finding in answer["findings"] if finding["check"] == check}


@contextlib.contextmanager
def written(path: Path, text: str) -> Iterator[Path]:
    """A file of a node's, written from outside and removed again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def mend(lab: Lab, finding: dict[str, str]) -> None:
    """Run what the finding proposes, on the node it is about."""
    words = shlex.split(finding["remedy"])
    assert words[0] == "ssh"
    inside(lab, finding["subject"].split("/")[0], words[-1])


def cluster_like(lab: Lab, folder: Path, **changes: Any) -> Path:
    """Return a cluster.yaml for the lab with other wishes: section -> keys that replace its own; gpus for all nodes."""
    wish = yaml.safe_load(lab.cluster_file.read_text())
    gpus = changes.pop("gpus", None)
    for node in wish["nodes"]:
        node["gpus"] = node["gpus"] if gpus is None else gpus
    for section, keys in changes.items():
        wish.setdefault(section, {}).update(keys)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(wish))
    return folder / "cluster.yaml"


def ask_as(cluster_file: Path, *words: str) -> dict[str, Any]:
    done = r4090c("--cluster", str(cluster_file), "preflight", "--json", "--quick", *words)
    assert done.returncode in (Exit.OK, Exit.FAILED, Exit.UNKNOWN), done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


# --------------------------------------------------------------------------- access


def test_a_node_without_python3(lab4: Lab) -> None:
    with written(lab4.home("node03") / ".bashrc", "PATH=/nowhere\n"):
        code, answer = ask(lab4, "--quick", "--only", "access")
    assert code == Exit.FAILED
    assert ("remote-shell", "node03", "fail") in bad(answer)
    assert {subject for _, subject, _ in bad(answer)} == {"node03"}
    finding = findings(answer, "remote-shell")["node03"]
    assert "python3" in finding["observed"] and "python3 >= 3.8" in finding["expected"] and "python3" in finding["remedy"]


# --------------------------------------------------------------------------- time


def python3_that(lab: Lab, node: str, says_first: str) -> contextlib.AbstractContextManager[Path]:
    """A python3 of the node that runs a line before any program given with -c: a stand-in for what is true of that machine."""
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    script = f"""#!/bin/sh
for word; do
  shift
  [ "$before" != -c ] || word={shlex.quote(says_first)}"
$word"
  set -- "$@" "$word"
  before=$word
done
exec {shlex.quote(python)} "$@"
"""
    return written(lab.bin(node) / "python3", script)


def test_a_clock_that_is_ahead(lab4: Lab) -> None:
    """No namespace shifts the time of day; so the node's Python, at the other end of the wire, tells another one."""
    ahead = (
        "import time; _ns, _s = time.time_ns, time.time; time.time_ns = lambda: _ns() + 20 * 10**9; time.time = lambda: _s() + 20"
    )
    own = lab4.bin("node02") / "python3"
    kept = own.read_bytes() if own.exists() else None
    try:
        with python3_that(lab4, "node02", ahead):
            code, answer = ask(lab4, "--quick")
    finally:
        if kept is not None:
            own.write_bytes(kept)
            own.chmod(0o755)
    assert code == Exit.FAILED
    # that nothing keeps the clock right is a warning there alone: the other nodes' clocks agree
    assert bad(answer) == {("clock-skew", "node02", "fail"), ("time-daemon", "node02", "warn")}
    assert findings(answer, "clock-skew")["node02"]["observed"].startswith(("20.", "19."))


def test_a_time_daemon_on_one_node_only(lab4: Lab) -> None:
    with written(lab4.bin("node01") / "chronyd", "#!/bin/sh\ntrap 'kill $!; exit' TERM\nsleep 60 &\nwait\n"):
        inside(lab4, "node01", "chronyd > /dev/null 2>&1 & echo $! > /run/chronyd.pid; sleep 0.1")
        try:
            code, answer = ask(lab4, "--quick", "--only", "time")
        finally:
            inside(lab4, "node01", "kill $(cat /run/chronyd.pid)")
    assert code == Exit.FAILED
    assert bad(answer) == {("time-daemon", node, "fail") for node in ("node02", "node03", "node04")}


# --------------------------------------------------------------------------- os


def leave(lab: Lab, node: str, *names: str) -> None:
    """Make files in the node's /dev/shm as a run does, two hours ago."""
    make = "cd /dev/shm && for f do head -c 1000000 /dev/zero > $f; touch -d '2 hours ago' $f; done"
    done = lab.exec(node, "sh", "-c", make, "sh", *names)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def mapped(lab: Lab, node: str, *names: str) -> Iterator[None]:
    """A process of the node that maps those files of /dev/shm."""
    program = (
        "import mmap, sys, time\n"
        "files = [open('/dev/shm/' + name, 'r+b') for name in sys.argv[1:]]\n"
        "maps = [mmap.mmap(file.fileno(), 0) for file in files]\n"
        "print('on', flush=True)\n"
        "time.sleep(60)\n"
    )
    argv = lab.exec_argv(node, sys.executable, "-c", program, *names)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # nsenter's child shares its process group
        process.communicate()


def test_many_leftovers_go_by_one_command_and_what_is_in_use_stays(lab4: Lab) -> None:
    leave(lab4, "node03", *(f"nccl-{number}" for number in range(20)))
    try:
        with mapped(lab4, "node03", "nccl-7"):
            _, answer = ask(lab4, "--quick", "--only", "shm-stale")
            assert bad(answer) == {("shm-stale", "node03", "warn")}
            mend(lab4, findings(answer, "shm-stale")["node03"])
            assert lab4.exec("node03", "ls", "/dev/shm").stdout.split() == ["nccl-7"]
    finally:
        inside(lab4, "node03", "rm -f /dev/shm/nccl-*")


# --------------------------------------------------------------------------- several nodes at once, and their remedies


def test_warnings_of_four_nodes_are_found_at_once_and_mended_by_their_remedies(lab4: Lab) -> None:
    """node01 has files of a killed run; on node02 the same files are in use; and so on."""
    names = ("nccl-Ab3dEf", "torch_4194304_7_0")
    for node in ("node01", "node02"):
        leave(lab4, node, *names)
    prefix, _, length = lab4.subnet.partition("/")
    second = f"ip address add {prefix.rsplit('.', 1)[0]}.200/{length} dev eth9"
    cable = "ip link add eth9 type veth peer name peer9 && ip link set eth9 up && ip link set peer9 up"
    lock = lab4.home("node04") / ".cache" / "torch_extensions" / "py312_cu124" / "cpu_adam" / "lock"
    try:
        with (
            mapped(lab4, "node02", *names),
            written(lock, ""),
            changed(lab4, "node03", f"{cable} && {second}", "ip link delete eth9"),
        ):
            os.utime(lock, (time.time() - 7200, time.time() - 7200))
            code, answer = ask(lab4, "--quick")
            warned = {("shm-stale", "node01", "warn"), ("subnet-twice", "node03", "warn"), ("caches", "node04", "warn")}
            assert (code, bad(answer)) == (Exit.OK, warned)
            assert "2 hours old" in findings(answer, "shm-stale")["node01"]["observed"]
            assert "2 files in use" in findings(answer, "shm-stale")["node02"]["observed"]
            assert "eth0 and eth9" in findings(answer, "subnet-twice")["node03"]["observed"]
            assert "2.0 hours old" in findings(answer, "caches")["node04"]["observed"]
            mend(lab4, findings(answer, "shm-stale")["node01"])
            mend(lab4, findings(answer, "caches")["node04"])
            assert bad(ask(lab4, "--quick", "--only", "os,storage")[1]) == set()
            assert lab4.exec("node01", "ls", "/dev/shm").stdout == ""
            assert lab4.exec("node02", "ls", "/dev/shm").stdout.split() == sorted(names)
    finally:
        for node in ("node01", "node02"):
            inside(lab4, node, "rm -f /dev/shm/nccl-* /dev/shm/torch_*")


def test_faults_of_three_nodes_are_found_at_once_and_mended_by_their_remedies(lab4: Lab) -> None:
    """A login banner, a name at 127.0.1.1, an MTU that differs. The banner is for its owner to remove."""
    trap = 'cat /etc/hosts > $HOME/before && sed "s/^.*[[:space:]]node02$/127.0.1.1 node02/" $HOME/before > /etc/hosts'
    with (
        changed(lab4, "node02", trap, "cat $HOME/before > /etc/hosts; rm $HOME/before"),
        changed(lab4, "node03", "ip link set eth0 mtu 1400", "ip link set eth0 mtu 1500"),
    ):
        with written(lab4.home("node04") / ".bashrc", "echo '*** Property of the institute ***'\n"):
            code, answer = ask(lab4, "--quick")
        failed = {("name-resolution", "node02", "fail"), ("data-interface", "node03", "fail"), ("remote-shell", "node04", "fail")}
        assert (code, bad(answer)) == (Exit.FAILED, failed)
        assert "*** Property of the institute ***" in findings(answer, "remote-shell")["node04"]["observed"]
        finding = findings(answer, "name-resolution")["node02"]
        assert finding["observed"] == "node02 -> 127.0.1.1"
        # sed -i cannot replace a file that is a mount point, as /etc/hosts is here and in a container
        command = shlex.split(finding["remedy"])[-1].replace("/etc/hosts", "$HOME/hosts")
        inside(
            lab4, "node02", f"cp /etc/hosts $HOME/hosts && {command} > /dev/null && cat $HOME/hosts > /etc/hosts; rm $HOME/hosts"
        )
        mend(lab4, findings(answer, "data-interface")["node03"])
        assert bad(ask(lab4, "--quick", "--only", "access,nic")[1]) == set()


def test_settings_of_this_machine_are_judged_as_they_are(lab4: Lab, tmp_path: Path) -> None:
    """The nodes show the machine's own kernel: what is expected of it is read here in another way."""
    governors = {path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpufreq").glob("policy*/scaling_governor")}
    clock = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    balancing = Path("/proc/sys/kernel/numa_balancing")
    numa_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    slow = bool(governors - {"performance"})
    slow |= clock.exists() and clock.read_text().strip() in ("hpet", "acpi_pm", "jiffies")
    slow |= balancing.exists() and balancing.read_text().strip() != "0" and numa_nodes > 1
    answer = ask_as(cluster_like(lab4, tmp_path, gpus=2), "--only", "cpu-settings,cpu-topology,remove-ipc")
    statuses = {(finding["check"], finding["status"]) for finding in answer["findings"]}
    assert ("cpu-settings", "warn" if slow else "pass") in statuses
    offline = Path("/sys/devices/system/cpu/offline").read_text().strip()
    assert (
        "cpu-topology",
        "warn" if offline and Path("/sys/devices/system/cpu/present").read_text() != _online() else "pass",
    ) in statuses
    # a node's /run is its own, so no logind is seen; and root would be spared
    assert {status for check, status in statuses if check == "remove-ipc"} <= {"skip", "pass"}
    assert {finding["status"] for finding in findings(ask(lab4, "--quick")[1], "cpu-settings").values()} == {"skip"}


def _online() -> str:
    return Path("/sys/devices/system/cpu/online").read_text()


# --------------------------------------------------------------------------- what a cluster.yaml wishes


@pytest.mark.skipif(any(Path("/sys/class").glob("infiniband/*")), reason="this machine has RDMA devices")
def test_rdma_is_wished_and_there_is_none(lab4: Lab, tmp_path: Path) -> None:
    answer = ask_as(cluster_like(lab4, tmp_path, network={"kind": "roce"}), "--only", "rdma")
    assert bad(answer) == {("rdma-port", node, "fail") for node in lab4.nodes}
    assert {finding["observed"] for finding in findings(answer, "rdma-port").values()} == {"no RDMA device"}
    for finding in findings(answer, "rdma-mtu").values():
        assert finding["status"] == "skip"
        if finding["observed"] == "ibv_devinfo is not installed":
            assert finding["remedy"].endswith("'apt-get install -y ibverbs-utils'")
    assert all("not told" in finding["observed"] for finding in findings(answer, "roce-qos").values())


def test_a_compiler_is_demanded_and_found_or_not(lab4: Lab, tmp_path: Path) -> None:
    path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    missing = [
        program for program in ("ninja", "c++") if not any(Path(folder, program).exists() for folder in path.split(":")[1:])
    ]
    answer = ask_as(cluster_like(lab4, tmp_path, expect={"compiler": True}), "--only", "compiler")
    assert bad(answer) == ({("compiler", node, "fail") for node in lab4.nodes} if missing else set())
