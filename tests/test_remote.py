"""The remote layer against real sshd's: every verdict, every word byte for byte, and nothing left on the nodes."""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r4090c import remote
from r4090c.errors import UsageError
from r4090c.inventory import load_cluster
from r4090c.model import Cluster, Node, Ssh
from r4090c.remote import Fleet, NodeError, Shell, Verdict, ssh_command
from tests.lab import Lab

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def cluster(lab4: Lab) -> Cluster:
    lab4.mend()
    return load_cluster(lab4.cluster_file)


@pytest.fixture(scope="module")
def shell(cluster: Cluster) -> Iterator[Shell]:
    """Yield one connection to node01."""
    one = Shell(cluster.nodes[0])
    yield one
    one.close()


def changed(node: Node, **ssh: Any) -> Node:
    return replace(node, ssh=replace(node.ssh, **ssh))


def refused(node: Node) -> NodeError:
    """Return how connecting to `node` fails; it must."""
    with pytest.raises(NodeError) as caught:
        Shell(node).close()
    assert caught.value.node == node.name
    assert caught.value.observed and caught.value.next_command
    return caught.value


def until_empty(lab: Lab, node: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while lab.processes(node):
        assert time.monotonic() < deadline, lab.processes(node)
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------ verdicts


def test_a_name_that_does_not_resolve(cluster: Cluster) -> None:
    error = refused(changed(cluster.nodes[0], address="no-such-node.invalid"))
    assert error.verdict is Verdict.DNS
    assert error.next_command == "getent hosts no-such-node.invalid"


def test_an_sshd_that_is_not_there(mended_lab4: Lab, cluster: Cluster) -> None:
    mended_lab4.stop_sshd("node01")
    assert refused(cluster.nodes[0]).verdict is Verdict.REFUSED


def test_a_link_that_is_cut(mended_lab4: Lab, cluster: Cluster) -> None:
    mended_lab4.cut("node02")
    error = refused(changed(cluster.nodes[1], connect_timeout_s=1.0))
    assert error.verdict is Verdict.TIMEOUT
    assert "no answer from" in error.observed and "in 1 s" in error.observed


def test_an_address_that_nobody_has(cluster: Cluster) -> None:
    nobody = cluster.nodes[0].ssh.address.rpartition(".")[0] + ".250"
    error = refused(changed(cluster.nodes[0], address=nobody, connect_timeout_s=10.0))  # the kernel gives up after 3 s
    assert error.verdict is Verdict.NO_ROUTE


def test_an_sshd_that_is_frozen(mended_lab4: Lab, cluster: Cluster) -> None:
    mended_lab4.freeze_sshd("node03")
    assert refused(cluster.nodes[2]).verdict is Verdict.BANNER_TIMEOUT


def test_a_host_key_that_changed(lab4: Lab, cluster: Cluster, tmp_path: Path) -> None:
    lines = lab4.known_hosts.read_text().splitlines()
    wrong = tmp_path / "known hosts"
    wrong.write_text(f"{lab4.address('node01')} {lines[1].split(' ', 1)[1]}\n")  # node02's key
    error = refused(changed(cluster.nodes[0], known_hosts=(str(wrong),)))
    assert error.verdict is Verdict.HOST_KEY_CHANGED
    assert "now ssh-ed25519 SHA256:" in error.observed
    forget = subprocess.run(shlex.split(error.next_command), capture_output=True, text=True)
    assert forget.returncode == 0, forget.stderr
    assert wrong.read_text() == ""


def test_a_host_key_that_is_not_known(cluster: Cluster, tmp_path: Path) -> None:
    error = refused(changed(cluster.nodes[0], known_hosts=(str(tmp_path / "none"),)))
    assert error.verdict is Verdict.UNKNOWN_HOST_KEY
    assert error.next_command == "r4090c provision ssh-trust --nodes node01"
    assert not (tmp_path / "none").exists()  # nothing is trusted by looking at it


def test_a_login_that_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    error = refused(changed(cluster.nodes[0], key=str(key)))
    assert error.verdict is Verdict.AUTH_FAILED
    assert error.next_command.startswith("ssh-copy-id ")


def test_a_key_that_is_encrypted_and_no_agent(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(key)], check=True)
    error = refused(changed(cluster.nodes[0], key=str(key)))
    assert error.verdict is Verdict.AUTH_FAILED
    assert f"the key {key} is encrypted" in error.observed


def test_a_login_shell_that_talks_is_heard_apart(lab4: Lab, cluster: Cluster) -> None:
    profile = lab4.home("node04") / ".bashrc"
    profile.write_text("echo 'Welcome!'; echo 'R4090C-ANSWER {'\n")
    try:
        one = Shell(cluster.nodes[3])
        answer = one.ask("def main(request):\n    return [request, 'ü']", {"n": 1})
        one.close()
    finally:
        profile.unlink()
    assert answer.value == [{"n": 1}, "ü"]
    assert answer.noise == "Welcome!\nR4090C-ANSWER {\n"
    assert answer.sent_at_s < answer.received_at_s


def test_a_login_shell_that_runs_nothing(lab4: Lab, cluster: Cluster) -> None:
    profile = lab4.home("node04") / ".bashrc"
    profile.write_text("echo 'This account is for dancing only.'; exit 1\n")
    try:
        one = Shell(cluster.nodes[3])
        with pytest.raises(NodeError, match="it says: This account is for dancing only") as caught:
            one.ask("def main(request):\n    return 1", None)
        one.close()
    finally:
        profile.unlink()
    assert caught.value.verdict is Verdict.NOISY_SHELL


def test_no_python(shell: Shell) -> None:
    with pytest.raises(NodeError) as caught:
        shell.ask("def main(request):\n    return 1", None, python="python9")
    assert caught.value.verdict is Verdict.NO_PYTHON3
    assert "apt install -y python3" in caught.value.next_command


def test_a_connection_that_breaks_in_the_middle(cluster: Cluster) -> None:
    one = Shell(cluster.nodes[0])
    with pytest.raises(NodeError) as caught:
        one.run(["sh", "-c", "kill -9 $PPID; sleep 5"])  # the sshd of this session
    assert caught.value.verdict is Verdict.LOST
    assert not one.alive
    with pytest.raises(NodeError) as again:
        one.run(["true"])
    assert again.value.verdict is Verdict.LOST


def test_a_link_that_is_cut_in_the_middle_is_noticed_in_seconds(mended_lab4: Lab, cluster: Cluster) -> None:
    one = Shell(cluster.nodes[1])
    cutting = threading.Timer(0.3, mended_lab4.cut, ("node02",))
    cutting.start()
    began = time.monotonic()
    with pytest.raises(NodeError) as caught:
        one.run(["sleep", "30"], timeout_s=25)
    assert caught.value.verdict is Verdict.LOST
    assert time.monotonic() - began < 12
    cutting.join()
    mended_lab4.heal("node02")
    for pid, line in mended_lab4.processes("node02"):
        assert line == "sleep 30"
        mended_lab4.kill("node02", pid)


# ------------------------------------------------------------------------------------------ words


HOSTILE = (
    "",
    " ",
    "$(reboot)",
    "`id`",
    "a;b",
    "&&",
    "'",
    '"',
    "\\",
    "\n",
    "~",
    "*",
    "-n",
    "--",
    "#",
    "!x",
    "$HOME",
    "grüß ✓",
    "%s",
)
CONTROL = ("\t", "\r", "\x01", "\x1b[31m", "\x7f")
text = st.text(max_size=8).map(lambda drawn: drawn.replace("\0", "").encode(errors="ignore").decode())
word = st.one_of(st.sampled_from(HOSTILE + CONTROL), text)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(word, max_size=6))
def test_every_word_arrives_byte_for_byte(shell: Shell, words: list[str]) -> None:
    done = shell.run(["printf", "%s\\0", "start", *words])
    assert (done.rc, done.stderr) == (0, "")
    assert done.stdout.split("\0")[:-1] == ["start", *words]


def test_the_hostile_words_as_environment_and_as_program(shell: Shell) -> None:
    for value in HOSTILE + CONTROL:
        done = shell.run(["printenv", "A_WORD"], env={"A_WORD": value, "B": "x"})
        assert done.stdout == value + "\n"
    assert shell.run(["$(echo true)"]).rc == 127


def test_stdin_arrives_whole_and_is_closed(shell: Shell) -> None:
    data = bytes(range(256)) * 40_000  # 10 MB, while the same comes back: neither side may wait for the other
    assert shell.run(["sha256sum"], stdin=data).stdout.split()[0] == hashlib.sha256(data).hexdigest()
    letters = b"0123456789abcdef" * 400_000
    assert shell.run(["cat"], stdin=letters, timeout_s=30).stdout.encode() == letters
    assert shell.run(["cat"]).stdout == ""
    assert shell.run(["true"], stdin=letters).rc == 0  # it reads nothing of it


def test_output_exit_status_and_errors(shell: Shell) -> None:
    done = shell.run(["sh", "-c", "echo out; echo err >&2; printf '\\377'; exit 7"])
    assert (done.rc, done.stdout, done.stderr) == (7, "out\n\ufffd", "err\n")
    assert done.duration_s < 5
    assert shell.run(["sh", "-c", "kill -9 $$"]).rc == -1
    assert shell.run(["sh", "-c", "yes | head -c 3000000"]).stdout == "y\n" * 1_500_000
    noisy = shell.run(["sh", "-c", "yes | head -c 3000000 >&2; echo done"])
    assert (len(noisy.stderr), noisy.stdout) == (3_000_000, "done\n")


def test_a_command_that_is_too_long_is_refused(shell: Shell) -> None:
    with pytest.raises(UsageError, match="a command of 130"):
        shell.run(["echo", "x" * 130_000])
    assert len(shell.run(["echo", "x" * 110_000]).stdout) == 110_001


# ------------------------------------------------------------------------------------------ time


def test_an_answer_that_does_not_come_ends_the_remote_process(lab4: Lab, cluster: Cluster) -> None:
    one = Shell(cluster.nodes[2])
    began = time.monotonic()
    with pytest.raises(NodeError, match="no answer") as caught:
        one.ask("import time\ndef main(request):\n    time.sleep(60)", None, timeout_s=1)
    assert caught.value.verdict is Verdict.TIMEOUT
    assert time.monotonic() - began < 30
    until_empty(lab4, "node03")
    assert one.ask("def main(request):\n    return 2", None).value == 2
    one.close()


def test_a_command_that_does_not_end_is_told_and_its_output_so_far_is_not_an_answer(lab4: Lab, cluster: Cluster) -> None:
    one = Shell(cluster.nodes[2])
    with pytest.raises(NodeError, match="no answer to 'sh' within") as caught:
        one.run(["sh", "-c", "echo some; sleep 60"], timeout_s=0.5)
    assert caught.value.verdict is Verdict.TIMEOUT
    with pytest.raises(NodeError):  # streams closed, yet not ended
        one.run(["sh", "-c", "exec sleep 60 <&- >&- 2>&-"], timeout_s=0.5)
    one.close()
    deadline = time.monotonic() + 30
    while left := lab4.processes("node03"):  # as documented: what runs on a node owns its own timeout
        assert time.monotonic() < deadline, left
        for pid, line in left:
            assert "sleep 60" in line
            with contextlib.suppress(Exception):  # the shell goes with its sleep
                lab4.kill("node03", pid)
        time.sleep(0.05)


def test_output_without_end_ends_at_the_timeout(lab4: Lab, cluster: Cluster) -> None:
    one = Shell(cluster.nodes[2])
    began = time.monotonic()
    with pytest.raises(NodeError, match="no answer to 'sh' within 1 s") as caught:
        one.run(["sh", "-c", "while :; do echo more; done"], timeout_s=1)  # far below what is given up for its size
    assert caught.value.verdict is Verdict.TIMEOUT
    assert time.monotonic() - began < 60
    one.close()
    until_empty(lab4, "node03")


def test_more_than_any_answer_is_given_up(lab4: Lab, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_OUTPUT_BYTES", 1 << 20)
    one = Shell(cluster.nodes[2])
    with pytest.raises(NodeError, match="more than 1 MiB came"):
        one.run(["cat", "/dev/zero"], timeout_s=30)
    talk = "import sys\ndef main(request):\n    [sys.stdout.write('x' * 65536) for _ in range(999)]"
    with pytest.raises(NodeError, match="more than 1 MiB came"):
        one.converse(talk, None, timeout_s=30).answer()
    one.close()
    until_empty(lab4, "node03")


def test_a_long_line_is_read_in_time(shell: Shell) -> None:
    """Adding each piece to what has come so far would move gigabytes."""
    began = time.process_time()
    answer = shell.converse("def main(request):\n    return 'x' * (64 << 20)", None, timeout_s=240).answer()
    assert len(answer) == 64 << 20
    assert time.process_time() - began < 10


def test_connections_are_made_and_opened_by_several_threads_at_the_same_time() -> None:
    """Making one writes into its configuration, which takes all values away for a moment: they may not share it."""
    ssh = Ssh("127.0.0.1", user="train")

    def make(_: int) -> Any:
        return remote._fabric_connection(ssh, remote._target(ssh), None).authentication.strategy_class

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(make, range(800))) == {None}
    finally:
        sys.setswitchinterval(before)


class Mute(paramiko.ServerInterface):
    """An sshd that lets everybody in, opens a session, and then says no more."""

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        time.sleep(30)
        return False


def test_a_session_that_freezes_when_asked_to_run(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host_key = paramiko.ECDSAKey.generate()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            transport = paramiko.Transport(listener.accept()[0])
            transport.add_server_key(host_key)
            transport.start_server(server=Mute())

        threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        known = tmp_path / "known_hosts"
        known.write_text(f"[127.0.0.1]:{port} {host_key.get_name()} {host_key.get_base64()}\n")
        one = Shell(changed(cluster.nodes[0], address="127.0.0.1", port=port, known_hosts=(str(known),)))
        monkeypatch.setattr(remote, "AUTH_TIMEOUT_S", 1.0)
        began = time.monotonic()
        with pytest.raises(NodeError, match="starts nothing within 1 s") as caught:
            one.run(["true"], timeout_s=5)
        assert caught.value.verdict is Verdict.TIMEOUT
        assert time.monotonic() - began < 25
        assert not one.alive


def test_an_answer_that_is_not_whole(shell: Shell) -> None:
    for source, says in (
        ("def main(request):\n    raise KeyError('x')", "KeyError: 'x'"),
        ("def main(request):\n    return {1, 2}", "not JSON serializable"),
        ("this is no Python", "SyntaxError"),
        ("import os\ndef main(request):\n    os._exit(3)", r"rc 3"),
    ):
        with pytest.raises(NodeError, match=says) as caught:
            shell.ask(source, None)
        assert caught.value.verdict is Verdict.LOST


def test_threads_do_not_print_what_the_caller_is_told_already(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    one = Shell(cluster.nodes[2])
    with pytest.raises(NodeError):
        one.run(["sleep", "1"], timeout_s=0.3)
    one.close()
    time.sleep(1)
    assert "Traceback" not in capfd.readouterr().err


# ------------------------------------------------------------------------------------------ streams and files


def test_a_stream_gives_lines_while_the_command_runs(shell: Shell) -> None:
    stream = shell.stream(["sh", "-c", "echo one; read x; echo $x; printf last; exit 4"])
    lines = stream.lines()
    assert next(lines) == "one"
    assert stream.rc is None
    stream._channel.sendall(b"two\n")
    assert list(lines) == ["two", "last"]
    deadline = time.monotonic() + 30
    while stream.rc is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stream.rc == 4
    stream.close()


def test_a_stream_that_is_silent_ends(lab4: Lab, cluster: Cluster) -> None:
    one = Shell(cluster.nodes[2])
    stream = one.stream(["sh", "-c", "echo one; exec sleep 60"])
    lines = stream.lines()
    assert next(lines) == "one"
    stream.set_timeout(0.5)
    began = time.monotonic()
    assert list(lines) == []
    assert time.monotonic() - began < 30
    assert stream.rc is None
    one.close()
    for pid, _ in lab4.processes("node03"):
        lab4.kill("node03", pid)


def test_put_writes_whole_files(lab4: Lab, shell: Shell) -> None:
    path = lab4.shared / "a new folder" / "it's; here"
    data = os.urandom(300_000)
    shell.put(str(path), data, mode=0o600)
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    shell.put(str(path), b"")
    assert path.read_bytes() == b""
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    with pytest.raises(NodeError, match="cannot write /proc/none/x") as caught:
        shell.put("/proc/none/x", b"x")
    assert caught.value.node == "node01"


# ------------------------------------------------------------------------------------------ all nodes


def test_map_answers_in_the_order_of_the_inventory_and_in_parallel(cluster: Cluster) -> None:
    with Fleet(cluster.nodes) as fleet:
        names = [node.name for node in cluster.nodes]
        delays = dict(zip(names, (0.9, 0.6, 0.3, 0.0), strict=True))
        all_there = threading.Barrier(len(names))  # one after the other, the first would wait for ever

        def late_hostname(one: Shell) -> str:
            all_there.wait(60)
            return one.run(["sh", "-c", f"sleep {delays[one.node.name]}; hostname"]).stdout.strip()

        assert list(fleet.map(late_hostname).items()) == [(name, name) for name in names]
        assert list(fleet.map(lambda one: one.node.name, ["node03", "node01"])) == ["node01", "node03"]
        assert fleet.map(lambda one: one.node.name, ["node03"]) == {"node03": "node03"}
        assert fleet.map(lambda one: one.node.name, []) == {}


def test_map_tells_what_happened_on_each_node(cluster: Cluster) -> None:
    nodes = [changed(node, port=1) if node.name == "node02" else node for node in cluster.nodes[:3]]
    with Fleet(nodes) as fleet:
        found = fleet.map(lambda one: one.run(["hostname"]).stdout.strip())
        assert (found["node01"], found["node03"]) == ("node01", "node03")
        assert isinstance(found["node02"], NodeError) and found["node02"].verdict is Verdict.REFUSED

        def fails(one: Shell) -> None:
            raise ZeroDivisionError(one.node.name)

        with pytest.raises(ZeroDivisionError):
            fleet.map(fails)


def test_connections_are_reused_and_reopened(cluster: Cluster) -> None:
    with Fleet(cluster.nodes[:2]) as fleet:
        first = fleet.shell("node01")
        assert fleet.shell("node01") is first
        with pytest.raises(NodeError):
            first.run(["sh", "-c", "kill -9 $PPID; sleep 5"])
        second = fleet.shell("node01")
        assert second is not first and second.run(["hostname"]).stdout == "node01\n"
        fleet.drop("node01")
        assert not second.alive
        assert fleet.shell("node01").alive
    with pytest.raises(NodeError, match="the fleet is closed"):
        fleet.shell("node02")


def sleepers(lab: Lab, name: str) -> list[int]:
    return [pid for pid, cmdline in lab.processes(name) if cmdline.startswith("sleep 60")]


def test_after_ctrl_c_what_was_begun_can_still_be_stopped(lab4: Lab, cluster: Cluster) -> None:
    with Fleet(cluster.nodes[:2]) as fleet:
        fleet.map(lambda one: one.run(["true"]))

        def when_both_sleep() -> None:
            deadline = time.monotonic() + 30
            while not all(sleepers(lab4, name) for name in ("node01", "node02")) and time.monotonic() < deadline:
                time.sleep(0.05)
            _thread.interrupt_main()

        threading.Thread(target=when_both_sleep, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            fleet.map(lambda one: one.run(["sleep", "60"], timeout_s=70))
        assert time.monotonic() - began < 50
        assert fleet.map(lambda one: one.run(["true"]).rc) == {"node01": 0, "node02": 0}, "the fleet connects again"
    for name in ("node01", "node02"):
        (sleeper,) = sleepers(lab4, name)
        lab4.kill(name, sleeper, "KILL")
        until_empty(lab4, name)


# ------------------------------------------------------------------------------------------ ways to a node


def test_a_jump_host(lab4: Lab, cluster: Cluster) -> None:
    one = Shell(changed(cluster.nodes[1], jump=f"root@{lab4.address('node01')}"))
    done = one.run(["sh", "-c", "hostname; echo $SSH_CONNECTION"])
    assert done.stdout.splitlines()[0] == "node02"
    assert done.stdout.splitlines()[1].startswith(lab4.address("node01"))
    assert one.ask("def main(request):\n    return 3", None).value == 3
    one.close()
    until_empty(lab4, "node01")
    until_empty(lab4, "node02")


def test_a_jump_host_that_fails_is_told_as_such(lab4: Lab, cluster: Cluster) -> None:
    error = refused(changed(cluster.nodes[1], jump=f"root@{lab4.address('node01')}:1"))
    assert error.verdict is Verdict.REFUSED
    where = f"{lab4.address('node01')}:1"
    assert error.observed.startswith(f"its jump host root@{where} could not be used: {where} refused")
    behind = refused(changed(cluster.nodes[1], jump=f"root@{lab4.address('node01')}", port=1))
    assert "jump" not in behind.observed


def test_ssh_config_says_how_and_the_inventory_wins(lab4: Lab, cluster: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host alias\n  HostName {lab4.address('node03')}\n  User root\n  IdentityFile {lab4.key}\n"
        f"Host far\n  HostName {lab4.address('node02')}\n  User nobody\n  ProxyJump root@{lab4.address('node01')}\n"
    )
    known = (str(lab4.known_hosts),)
    alias = replace(cluster.nodes[0], ssh=Ssh("alias", config=str(config), known_hosts=known))
    one = Shell(alias)
    assert one.run(["hostname"]).stdout == "node03\n"
    one.close()
    assert ssh_command(alias).split()[-1] == f"root@{lab4.address('node03')}"
    far = replace(alias, ssh=Ssh("far", user="root", key=str(lab4.key), config=str(config), known_hosts=known))
    one = Shell(far)
    assert one.run(["sh", "-c", "hostname; echo $SSH_CONNECTION"]).stdout.startswith(f"node02\n{lab4.address('node01')}")
    one.close()


def test_the_command_for_a_person_works(lab4: Lab, cluster: Cluster) -> None:
    argv = shlex.split(ssh_command(cluster.nodes[0]))
    options = ["-F", "/dev/null", "-o", f"UserKnownHostsFile={lab4.known_hosts}", "-o", "BatchMode=yes"]
    done = subprocess.run([argv[0], *options, *argv[1:], "hostname"], capture_output=True, text=True, timeout=30)
    assert done.stdout == "node01\n", done.stderr
