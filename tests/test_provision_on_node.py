"""What runs on a node: it touches nothing that is not the account's own plain file, and never leaves half a file."""

from __future__ import annotations

import ast
import base64
import hashlib
import inspect
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from provision import on_node

needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen (package openssh-client)")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to somebody else")
not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def write(path: Path, content: bytes, before: bytes | None) -> dict[str, Any]:
    digest = "" if before is None else hashlib.sha256(before).hexdigest()
    action = {"kind": "WriteFile", "path": str(path), "content": base64.b64encode(content).decode(), "before": digest}
    result: dict[str, Any] = on_node.carry_out([action])[0]
    return result


def test_it_is_python_3_8_and_imports_only_the_standard_library() -> None:
    tree = ast.parse(inspect.getsource(on_node), feature_version=(3, 8))
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert set(modules) <= sys.stdlib_module_names


def test_a_new_file_and_its_new_folder_are_the_accounts_alone(tmp_path: Path) -> None:
    path = tmp_path / ".ssh" / "config"
    before = os.umask(0o000)
    try:
        assert write(path, b"x", None)["state"] == "done"
    finally:
        os.umask(before)
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_an_existing_file_keeps_its_mode_and_gets_a_new_inode(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_bytes(b"old")
    path.chmod(0o644)
    inode = path.stat().st_ino
    assert write(path, b"new", b"old")["state"] == "done"
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o644)
    assert path.stat().st_ino != inode  # renamed into place: a reader sees the old file or the new one
    assert [each.name for each in tmp_path.iterdir()] == ["config"]


def test_the_same_content_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_bytes(b"new")
    before = path.stat()
    assert write(path, b"new", b"old")["state"] == "unchanged"
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_file_that_changed_meanwhile_is_left_alone(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "config"
    path.write_bytes(b"somebody was faster")
    result = write(path, b"new", before)
    assert result["state"] == "failed"
    assert "at the same time" in result["observed"]
    assert path.read_bytes() == b"somebody was faster"


def test_symbolic_links_folders_and_pipes_are_refused_and_the_next_action_is_done(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, told in (("link", "symbolic link"), ("folder", "not a regular file"), ("pipe", "not a regular file")):
        result = write(tmp_path / name, b"new", b"old")
        assert (result["state"], told in result["observed"]) == ("failed", True)
        assert str(tmp_path / name) in result["command"]
    assert target.read_bytes() == b"old"
    (tmp_path / ".ssh").symlink_to(tmp_path / "folder")
    assert "symbolic link" in write(tmp_path / ".ssh" / "config", b"new", None)["observed"]
    actions = [{"kind": "WriteFile", "path": str(tmp_path / name), "content": "", "before": ""} for name in ("link", "fine")]
    assert [result["state"] for result in on_node.carry_out(actions)] == ["failed", "done"]


@needs_root
def test_files_and_folders_of_somebody_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_bytes(b"old")
    os.chown(path, 65_534, -1)
    assert "belongs to nobody, not to root" in write(path, b"new", b"old")["observed"]
    assert "belongs to nobody" in on_node.look_at_file(str(path))["refused"]
    folder = tmp_path / ".ssh"
    folder.mkdir()
    os.chown(folder, 4_242_424, -1)
    assert on_node.why_not_folder(str(folder)) == "belongs to uid 4242424, not to root"


@not_root
def test_a_folder_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir(mode=0o500)
    assert "is not writable" in write(tmp_path / ".ssh" / "config", b"new", None)["observed"]


def test_only_what_is_still_ours_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_bytes(b"somebody wrote on")
    action = {"kind": "RemoveFile", "path": str(path), "before": hashlib.sha256(b"ours").hexdigest()}
    assert on_node.carry_out([action])[0]["state"] == "failed"
    action["before"] = hashlib.sha256(b"somebody wrote on").hexdigest()
    assert [on_node.carry_out([action])[0]["state"] for _ in range(2)] == ["done", "unchanged"]
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    folder = {"kind": "RemoveFolder", "path": str(full)}
    assert on_node.carry_out([folder])[0]["state"] == "unchanged"
    (full / "x").unlink()
    assert [on_node.carry_out([folder])[0]["state"] for _ in range(2)] == ["done", "unchanged"]


@needs_ssh_keygen
def test_nodes_that_share_a_home_and_make_a_key_at_once_end_with_one_whole_pair(tmp_path: Path) -> None:
    path = tmp_path / ".ssh" / "id_ed25519"
    results: list[dict[str, Any]] = []

    def make(name: str) -> None:
        results.extend(on_node.carry_out([{"kind": "MakeKey", "path": str(path), "comment": f"r4090c@{name}"}]))

    threads = [threading.Thread(target=make, args=(f"node{place}",)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result["state"] for result in results) == ["done", *["unchanged"] * 7]
    assert sorted(each.name for each in path.parent.iterdir()) == ["id_ed25519", "id_ed25519.pub"]
    assert path.stat().st_mode & 0o777 == 0o600
    key = on_node.look_at_key(str(path))
    assert (key["exists"], key["refused"]) == (True, "")
    assert key["public"].split()[:2] == path.with_suffix(".pub").read_text().split()[:2]


@needs_ssh_keygen
def test_what_is_wrong_with_a_key_is_told_with_the_command_that_mends_it(tmp_path: Path) -> None:
    path = tmp_path / "id_ed25519"
    public = tmp_path / "id_ed25519.pub"

    def make(passphrase: str) -> None:
        path.unlink(missing_ok=True)
        public.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "me", "-f", str(path)], check=True)

    def told() -> tuple[str, str]:
        record = on_node.look_at_key(str(path))
        return record["refused"], record["command"]

    make("secret words")
    assert "has a passphrase" in told()[0]
    assert told()[1] == f"ssh-keygen -p -f {path}"
    make("")
    assert told() == ("", "")
    path.chmod(0o644)
    assert "others may read" in told()[0]
    assert subprocess.run(["sh", "-c", told()[1]]).returncode == 0
    assert told() == ("", "")
    good = public.read_text()
    public.write_text("ssh-ed25519 AAAA somebody else's\n")
    assert "does not belong to" in told()[0]
    assert subprocess.run(["sh", "-c", told()[1]]).returncode == 0
    assert (told(), public.read_text()) == (("", ""), good)
    public.unlink()
    assert on_node.look_at_key(str(path))["public"] == good.strip()  # ssh-keygen tells it from the private key
    path.unlink()
    public.write_text(good)
    assert "but no" in told()[0]
    make("")
    path.write_text("not a key\n")
    assert "ssh-keygen does not read" in told()[0]


@needs_ssh_keygen
def test_a_key_that_was_replaced_since_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "id_ed25519"
    for comment in ("r4090c@node01", "me"):
        path.unlink(missing_ok=True)
        path.with_suffix(".pub").unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)], check=True)
        result = on_node.carry_out([{"kind": "RemoveKey", "path": str(path), "comment": "r4090c@node01"}])[0]
        assert (result["state"], path.exists()) == (("done", False) if comment != "me" else ("failed", True))


def test_reach_tells_an_ssh_server_from_another_one_and_from_nobody() -> None:
    def serve(listener: socket.socket, words: bytes) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(words)

    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in listeners]
    listeners[2].close()
    threads = [
        threading.Thread(target=serve, args=(listener, words), daemon=True)
        for listener, words in zip(listeners, (b"SSH-2.0-x\r\n", b"220 mail\r\n"), strict=False)
    ]
    for thread in threads:
        thread.start()
    assert on_node.reach([["127.0.0.1", port] for port in ports]) == [True, False, False]
    for listener in listeners:
        listener.close()


def test_a_login_that_never_ends_is_killed_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "ssh"
    stand_in.write_text(f"#!/bin/sh\nsleep 77 & echo $! > {tmp_path}/pid\nwait\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = on_node.log_in({"peers": ["node01"], "at_once": 4, "limit_s": 3})["node01"]
    assert result == {"rc": None, "stdout": "", "stderr": "no end within 3 s"}
    pid = int((tmp_path / "pid").read_text())
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_connection_that_sshd_dropped_is_tried_once_more_and_no_agent_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "ssh"
    stand_in.write_text(
        f'#!/bin/sh\n[ -n "$SSH_AUTH_SOCK" ] && exit 9\necho x >> {tmp_path}/tries\n'
        f"[ $(wc -l < {tmp_path}/tries) -ge 2 ] && exit 0\n"
        "echo kex_exchange_identification: Connection closed by remote host >&2; exit 255\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    assert on_node.log_in({"peers": ["node01"], "at_once": 4, "limit_s": 60})["node01"]["rc"] == 0
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert on_node.log_in({"peers": ["node01"], "at_once": 4, "limit_s": 60})["node01"]["rc"] == 127
