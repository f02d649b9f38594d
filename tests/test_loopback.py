"""The loopback cluster: it answers real ssh, says clearly why it cannot be, and leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.loopback import LoopbackCluster
from r4090c.errors import Exit, UsageError

REPOSITORY = Path(__file__).resolve().parents[1]
SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin:/bin")

needs_sshd = pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="openssh-server is not installed")


def read(cluster_file: Path) -> Any:
    return yaml.safe_load(cluster_file.read_text())


def ssh(wish: Any, index: int, command: str) -> subprocess.CompletedProcess[str]:
    node = wish["nodes"][index]
    options = [
        "StrictHostKeyChecking=yes",
        f"UserKnownHostsFile={wish['ssh']['known_hosts'][0]}",
        "GlobalKnownHostsFile=/dev/null",
    ]
    words = [word for option in (*options, "BatchMode=yes", "IdentitiesOnly=yes") for word in ("-o", option)]
    argv = ["ssh", "-F", "/dev/null", "-i", wish["ssh"]["key"], *words, "-p", str(node["ssh"]["port"])]
    return subprocess.run(
        [*argv, f"{wish['ssh']['user']}@{node['address']}", command],
        capture_output=True,
        text=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
    )


def processes_with(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if text in line:
                    found.append(f"{entry.name}: {line}")
    return found


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@needs_sshd
def test_both_nodes_answer_ssh_and_can_be_told_apart() -> None:
    with LoopbackCluster(nodes=2) as cluster_file:
        wish = read(cluster_file)
        assert [node["name"] for node in wish["nodes"]] == ["demo01", "demo02"]
        for index, node in enumerate(wish["nodes"]):
            done = ssh(wish, index, "echo $R4090C_DEMO_NODE; cd " + wish["paths"]["shared"] + " && touch from_$R4090C_DEMO_NODE")
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip().splitlines()[-1] == node["name"]
        assert sorted(path.name for path in Path(wish["paths"]["shared"]).iterdir()) == ["from_demo01", "from_demo02"]
        assert subprocess.run([wish["paths"]["python"], "-c", "import yaml"]).returncode == 0
        assert cluster_file.parent.stat().st_mode & 0o777 == 0o700
        swapped = {**wish, "nodes": [{**wish["nodes"][0], "ssh": wish["nodes"][1]["ssh"]}]}
        Path(wish["ssh"]["known_hosts"][0]).write_text(f"[127.0.0.1]:{wish['nodes'][1]['ssh']['port']} ssh-ed25519 {'A' * 68}\n")
        assert ssh(swapped, 0, "true").returncode == 255  # host keys are really compared
    assert not cluster_file.parent.exists()


@needs_sshd
def test_the_callers_environment_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R4090C_LEAK", "1")
    monkeypatch.setenv("TZ", "Leak/City")  # an sshd hands its own TZ on to every login
    with LoopbackCluster(nodes=1) as cluster_file:
        environment = ssh(read(cluster_file), 0, "env").stdout
    names = {line.partition("=")[0] for line in environment.splitlines()}
    assert "SSH_CONNECTION" in names
    assert names.isdisjoint({"R4090C_LEAK", "TZ"})


@needs_sshd
def test_nothing_is_left_after_the_block_not_even_detached_processes() -> None:
    sleep = f"sleep 5432.{os.getpid()}"
    stubborn = f"setsid sh -c 'trap : TERM; {sleep}; {sleep}' >/dev/null 2>&1 &"
    with LoopbackCluster(nodes=2) as cluster_file:
        ssh(read(cluster_file), 1, f"setsid {sleep} >/dev/null 2>&1 & {stubborn}")
        assert until(lambda: len(processes_with(sleep)) >= 3)
    assert processes_with(sleep) == []
    assert processes_with(str(cluster_file.parent)) == []
    assert not cluster_file.parent.exists()


@needs_sshd
def test_orphans_are_reaped_while_the_cluster_runs() -> None:
    with LoopbackCluster(nodes=1) as cluster_file:
        pid = ssh(read(cluster_file), 0, "setsid sleep 0.2 >/dev/null 2>&1 & echo $!").stdout.strip()
        assert pid.isdigit()
        assert until(lambda: not Path("/proc", pid).exists())


@needs_sshd
def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), LoopbackCluster() as cluster_file:
        raise ZeroDivisionError
    assert processes_with(str(cluster_file.parent)) == []
    assert not cluster_file.parent.exists()


@needs_sshd
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_owner_is_killed(signal_number: signal.Signals) -> None:
    script = (
        "import time\nfrom provision.loopback import LoopbackCluster\n"
        "with LoopbackCluster() as cluster_file:\n    print(cluster_file, flush=True)\n    time.sleep(60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    cluster_file = Path(owner.stdout.readline().strip())
    detached = f"sleep 5434.{owner.pid}"
    ssh(read(cluster_file), 0, f"setsid {detached} >/dev/null 2>&1 &")
    assert until(lambda: len(processes_with(detached)) >= 1)
    os.killpg(owner.pid, signal_number)
    owner.communicate(timeout=20)
    assert owner.returncode != 0
    assert until(lambda: not processes_with(str(cluster_file.parent))), processes_with(str(cluster_file.parent))
    assert until(lambda: not processes_with(detached))
    assert until(lambda: not cluster_file.parent.exists())


@needs_sshd
def test_a_given_folder_keeps_the_shared_one_and_nothing_else(tmp_path: Path) -> None:
    with LoopbackCluster(nodes=1, folder=tmp_path / "demo") as cluster_file:
        shared = Path(read(cluster_file)["paths"]["shared"])
        assert shared == tmp_path / "demo" / "shared"
        (shared / "result").write_text("kept")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["shared"]
    assert (shared / "result").read_text() == "kept"
    with LoopbackCluster(nodes=1, shared=tmp_path / "elsewhere") as cluster_file:
        assert read(cluster_file)["paths"]["shared"] == str(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere").is_dir()


def test_a_senseless_number_of_nodes_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        LoopbackCluster(nodes=0)


# ------------------------------------------------------------------------------------------ where it cannot be
#
# Each in a mount namespace of its own, where a file of the system is overlaid: a real sshd, passwd or shadow as the
# machine in question would have it.

SCRIPT = """
import sys
import provision.loopback
from provision.loopback import LoopbackCluster
from r4090c.errors import R4090cError
import subprocess, yaml
provision.loopback.START_S = float(sys.argv[1])
try:
    with LoopbackCluster(nodes=2) as cluster_file:
        print(cluster_file.parent, flush=True)
        wish = yaml.safe_load(cluster_file.read_text())
        login = ["ssh", "-F", "/dev/null", "-i", wish["ssh"]["key"], "-o", "BatchMode=yes"]
        login += ["-o", "UserKnownHostsFile=" + wish["ssh"]["known_hosts"][0], wish["ssh"]["user"] + "@127.0.0.1"]
        for node in wish["nodes"]:
            subprocess.run([*login, "-p", str(node["ssh"]["port"]), "id -un; echo $R4090C_DEMO_NODE"])
except R4090cError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def become_account(uid: int) -> list[str]:
    """The words that run a command as an ordinary account: setpriv alone keeps root's capabilities for its own exec."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "/bin/sh", "-c", 'exec "$@"', "sh"]


def in_another_machine(
    overlays: dict[str, Path], uid: int | None = None, python: str = sys.executable, start_s: float = 30.0
) -> subprocess.CompletedProcess[str]:
    """Run SCRIPT where the files of `overlays` lie over those of this machine."""
    mounts = "".join(f"mount --bind {source} {target} && " for target, source in overlays.items())
    become = [] if uid is None else become_account(uid)
    return subprocess.run(
        ["unshare", "--mount", "/bin/sh", "-c", f'{mounts} exec "$@"', "sh", *become, python, "-c", SCRIPT, str(start_s)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},  # no sbin, as for ordinary users
    )


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def account(tmp_path: Path, name: str, uid: int, shell: str) -> Path:
    return write(
        tmp_path / "passwd",
        f"root:x:0:0:root:/root:/bin/sh\n{name}:x:{uid}:{uid}::/:{shell}\nsshd:x:105:65534::/run/sshd:/bin/false\n",
    )


def public_python() -> str:
    """A Python with PyYAML that any account may run."""
    for python in (sys.executable, "/usr/bin/python3"):
        argv = [*become_account(54321), python, "-c", "import yaml, provision.loopback"]
        if subprocess.run(argv, cwd=REPOSITORY, capture_output=True, env={}).returncode == 0:
            return python
    pytest.skip("no Python with PyYAML that an ordinary account may run")


@needs_sshd
@pytest.mark.lab
@pytest.mark.usefixtures("needs_lab")
def test_it_works_for_an_ordinary_account(tmp_path: Path) -> None:
    done = in_another_machine({"/etc/passwd": account(tmp_path, "ada", 54321, "/bin/sh")}, 54321, public_python())
    assert done.returncode == 0, done.stdout + done.stderr
    folder, *answers = done.stdout.split()
    assert answers == ["ada", "demo01", "ada", "demo02"], done.stderr
    assert not Path(folder).exists()
    assert processes_with(folder) == []


@needs_sshd
@pytest.mark.lab
@pytest.mark.usefixtures("needs_lab")
@pytest.mark.parametrize("shell", ["/usr/sbin/nologin", "/bin/false", "/bin/of-nobody"])
def test_an_account_without_a_shell_is_told(tmp_path: Path, shell: str) -> None:
    done = in_another_machine({"/etc/passwd": account(tmp_path, "ada", 54321, shell)}, 54321, public_python())
    assert done.returncode == Exit.UNKNOWN
    assert f"account ada: its shell is {shell}" in done.stdout
    assert "sudo chsh -s /bin/sh ada" in done.stdout


@needs_sshd
@pytest.mark.lab
@pytest.mark.usefixtures("needs_lab")
def test_a_locked_root_and_an_unknown_uid_are_told(tmp_path: Path) -> None:
    done = in_another_machine({"/etc/shadow": write(tmp_path / "shadow", "root:!:19000:0:99999:7:::\n")})
    assert done.returncode == Exit.UNKNOWN
    assert "account root: is locked" in done.stdout
    done = in_another_machine({"/etc/passwd": account(tmp_path, "ada", 54321, "/bin/sh")}, 54322, public_python())
    assert done.returncode == Exit.UNKNOWN
    assert "account with uid 54322: has no entry" in done.stdout


@needs_sshd
@pytest.mark.lab
@pytest.mark.usefixtures("needs_lab")
def test_a_missing_sshd_is_told(tmp_path: Path) -> None:
    done = in_another_machine({str(SSHD): write(tmp_path / "none", "")})
    assert done.returncode == Exit.UNKNOWN
    assert "sshd: is not installed" in done.stdout
    assert "sudo apt install openssh-server" in done.stdout


@needs_sshd
@pytest.mark.lab
@pytest.mark.usefixtures("needs_lab")
def test_an_sshd_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    fails = write(tmp_path / "sshd", "#!/bin/sh\necho 'fatal: the disk has gone home' >&2\nexit 1\n", 0o755)
    done = in_another_machine({str(SSHD): fails})
    assert done.returncode == Exit.UNKNOWN
    assert "ended at once" in done.stdout
    assert "fatal: the disk has gone home" in done.stdout
    sleep = f"sleep 5435.{os.getpid()}"
    hangs = write(tmp_path / "sshd", f"#!/bin/sh\necho 'debug: thinking' >&2\nexec {sleep}\n", 0o755)
    started_at = time.monotonic()
    done = in_another_machine({str(SSHD): hangs}, start_s=5.0)
    assert done.returncode == Exit.UNKNOWN
    assert "demo01 does not listen after 5 s" in done.stdout
    assert "debug: thinking" in done.stdout
    assert time.monotonic() - started_at < 50
    assert processes_with(sleep) == []


@needs_sshd
@pytest.mark.lab
@pytest.mark.usefixtures("needs_lab")
def test_a_port_that_was_taken_meanwhile_is_replaced(tmp_path: Path) -> None:
    assert SSHD is not None
    real = tmp_path / "sshd-real"
    shutil.copy(SSHD, real)
    taken = "echo 'error: Bind to port 1 on 127.0.0.1 failed: Address already in use.' >&2; exit 255"
    text = f'#!/bin/sh\nmkdir {tmp_path}/first 2>/dev/null && {{ {taken}; }}\nexec {real} "$@"\n'
    done = in_another_machine({SSHD: write(tmp_path / "sshd", text, 0o755)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[2::2] == ["demo01", "demo02"]
    assert (tmp_path / "first").exists()
    always = f"#!/bin/sh\n{taken}\n"
    done = in_another_machine({SSHD: write(tmp_path / "sshd", always, 0o755)})
    assert done.returncode == Exit.UNKNOWN
    assert "Address already in use" in done.stdout
