"""The nonce measurement: real files, read and written as a node does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from netcheck.measure import nonce
from r4090c.model import Expect, Node, Paths, Ssh
from tests.facts.local import BOOTSTRAP

EXPECT = Expect(storage_visible_warn_s=0.0)
GIVE_UP_S = 0.3
"""How long a reader looks for what does not show; the real limit is ten times that."""


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run one action as a node of its own; subprocess waits for the end of its standard output, as an SSH channel does."""
    argv = [sys.executable, "-I", "-S", "-c", BOOTSTRAP, nonce.SOURCE]
    done = subprocess.run(argv, input=json.dumps(request), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def nodes(*folders: Path) -> list[Node]:
    return [Node(f"n{i}", Ssh("127.0.0.1"), "127.0.0.1", 0, Paths(str(folder), "", "")) for i, folder in enumerate(folders)]


def measured(*folders: Path) -> dict[str, dict[str, Any]]:
    """The three rounds over nodes whose shared folders are `folders`."""
    there = nodes(*folders)
    found: dict[str, dict[str, Any]] = {"write": {}, "read": {}, "remove": {}}
    for name, request in nonce.requests("write", there, "token", EXPECT).items():
        found["write"][name] = run(request)
    written = [name for name, answer in found["write"].items() if "error" not in answer]
    for action in ("read", "remove"):
        for name, request in nonce.requests(
            action, [node for node in there if node.name in written], "token", EXPECT, written
        ).items():
            found[action][name] = run({**request, "limit_s": GIVE_UP_S})
    return found


def test_one_folder_is_seen_by_all_and_left_empty(tmp_path: Path) -> None:
    answers = nonce.read(measured(tmp_path, tmp_path, tmp_path))
    for answer in answers.values():
        assert set(answer.waited_s) == {"n0", "n1", "n2"}
        assert max(answer.waited_s.values()) < 1
        assert (answer.write_error, answer.read_error, answer.remove_error, answer.faults) == ("", "", "", {})
    assert list(tmp_path.iterdir()) == []


def test_two_folders_are_told_apart(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    here.mkdir()
    there.mkdir()
    answers = nonce.read(measured(here, there))
    assert set(answers["n0"].waited_s) == {"n0"}
    assert answers["n0"].faults == {"n1": "No such file or directory"}
    assert list(here.iterdir()) == list(there.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    answers = nonce.read(measured(tmp_path, tmp_path / "missing"))
    assert answers["n1"].write_error == "No such file or directory"
    assert set(answers["n0"].waited_s) == {"n0"}


def test_a_file_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    (request,) = nonce.requests("read", nodes(tmp_path), "token", Expect(), ["n0"]).values()
    name, content = request["files"]["n0"]
    writer = subprocess.Popen(["sh", "-c", f"sleep 3; printf '%s\\n' '{content.strip()}' > {tmp_path}/{name}"])
    started = time.monotonic()
    answer = run({**request, "limit_s": 60, "answer_within_s": 90})
    assert writer.wait() == 0
    assert 0.2 < answer["seen"]["n0"]["waited_s"] <= time.monotonic() - started


def test_other_content_is_not_taken_for_the_file(tmp_path: Path) -> None:
    (request,) = nonce.requests("read", nodes(tmp_path), "token", EXPECT, ["n0"]).values()
    (tmp_path / request["files"]["n0"][0]).write_text("from yesterday")
    answer = run({**request, "limit_s": 0.1})
    assert answer["seen"]["n0"] == {"error": "other content: 'from yesterday'"}


def test_a_folder_that_hangs_is_given_up_and_holds_nothing(tmp_path: Path) -> None:
    """A FIFO stands in for a hung mount: opening it for reading blocks for ever, until the child is killed."""
    (request,) = nonce.requests("read", nodes(tmp_path), "token", EXPECT, ["n0"]).values()
    os.mkfifo(tmp_path / request["files"]["n0"][0])
    started = time.monotonic()
    answer = run({**request, "answer_within_s": 0.5})
    assert answer == {"error": "no answer in 0.5 s"}
    assert time.monotonic() - started < 30


def test_the_child_is_killed_when_nobody_reads_the_answer(tmp_path: Path) -> None:
    (request,) = nonce.requests("read", nodes(tmp_path), "token", EXPECT, ["n0"]).values()
    os.mkfifo(tmp_path / request["files"]["n0"][0])
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BOOTSTRAP, nonce.SOURCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what it says about the closed pipe
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({**request, "answer_within_s": 60}))
    process.stdin.close()
    time.sleep(0.3)
    process.stdout.close()
    process.wait(timeout=60)


def test_what_a_killed_controller_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, young, foreign = (tmp_path / name for name in (".r4090c-nonce-1-n0", ".r4090c-nonce-2-n0", "checkpoint"))
    for file in (old, young, foreign):
        file.write_text("x")
    for file in (old, foreign):
        os.utime(file, (time.time() - 7200,) * 2)
    measured(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([young, foreign])


def test_a_read_only_folder_says_so(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    assert nonce.read(measured(tmp_path))["n0"].write_error == "Permission denied"
