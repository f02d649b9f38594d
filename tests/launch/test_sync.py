"""What is sent to the nodes, and that both ends compute the same digest over it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.agent import prepare, tree_digest
from launch.sync import OURS, UNPACK, USER_LIMIT_MIB, digest_of, our_files, pack, user_files
from r4090c.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]


def unpack(files: dict[str, bytes], tree: Path) -> None:
    done = subprocess.run([sys.executable, "-I", "-c", UNPACK, str(tree)], input=pack(files), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def git(folder: Path, *words: str) -> None:
    identity = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, env={**os.environ, **identity})


# ------------------------------------------------------------------------------------------ the digest


def test_both_ends_agree_on_our_own_files(tmp_path: Path) -> None:
    files = our_files()
    assert {name.partition("/")[0] for name in files} == {part.partition("/")[0] for part in OURS}
    assert not any("__pycache__" in name for name in files)
    unpack(files, tmp_path / "tree")
    assert tree_digest(str(tmp_path / "tree")) == digest_of(files) == tree_digest(str(tmp_path / "tree"), sorted(files))


def test_odd_names_and_contents(tmp_path: Path) -> None:
    names = [
        "grüß.py",
        "a b.txt",
        "-rf",
        "x\ny",
        "deep/er/file",
        "\udcff\udcfe.bin",
        "\ue000z",
        "~",
        "Z",
        "a" * 120 + "/" + "b" * 120,
    ]
    files = {name: name.encode(errors="surrogateescape") * 3 for name in names} | {"empty": b""}
    unpack(files, tmp_path / "tree")
    assert tree_digest(str(tmp_path / "tree")) == digest_of(files) == tree_digest(str(tmp_path / "tree"), list(files))


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(st.text("ab/", min_size=1, max_size=5), st.binary(max_size=5), max_size=6))
def test_the_digest_knows_names_from_contents(files: dict[str, bytes]) -> None:
    for name in files:
        assert digest_of({**files, name: files[name] + b"x"}) != digest_of(files)
        assert digest_of({key: value for key, value in files.items() if key != name}) != digest_of(files)
    assert digest_of(dict(reversed(files.items()))) == digest_of(files)


def test_what_the_node_sees(tmp_path: Path) -> None:
    files = {"a.py": b"1", "sub/b.py": b"2"}
    tree = tmp_path / "tree"
    assert tree_digest(str(tree), list(files)) is None
    unpack(files, tree)
    digest = digest_of(files)
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__" / "a.pyc").write_bytes(b"compiled")
    assert tree_digest(str(tree)) == digest
    (tree / "output.txt").write_text("what a script wrote")  # a script may leave something beside its code
    assert tree_digest(str(tree), list(files)) == digest != tree_digest(str(tree))
    (tree / "a.py").write_bytes(b"changed")
    assert tree_digest(str(tree), list(files)) not in (digest, None)
    (tree / "a.py").unlink()
    assert tree_digest(str(tree), list(files)) is None


def test_unpacking_replaces_a_broken_tree_and_leaves_nothing_aside(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    unpack({"a": b"1", "b": b"2"}, tree)
    (tree / "a").write_bytes(b"broken")
    unpack({"a": b"1", "b": b"2"}, tree)
    assert tree_digest(str(tree)) == digest_of({"a": b"1", "b": b"2"})
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_something_in_the_way_is_left_to_the_look_that_follows(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.write_text("a file")
    unpack({"a": b"1"}, tree)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
    assert tree_digest(str(tree)) is None


def test_two_launches_that_write_the_same_tree_at_once(tmp_path: Path) -> None:
    files = {f"f{index}": b"x" * 10_000 for index in range(50)}
    argv = [sys.executable, "-I", "-c", UNPACK, str(tmp_path / "tree")]
    writers = [subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    packed = pack(files)
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(packed)
        writer.stdin.flush()
    for writer in writers:
        _, said = writer.communicate(timeout=60)
        assert writer.returncode == 0, said.decode()
    assert tree_digest(str(tmp_path / "tree")) == digest_of(files)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_free_ports_are_free_and_different() -> None:
    found = prepare("/nonexistent", None, 5)
    assert found["digest"] is None
    assert len(set(found["ports"])) == 5


# ------------------------------------------------------------------------------------------ the user's code


def names(files: dict[str, bytes]) -> list[str]:
    return sorted(name.removeprefix("user/") for name in files)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with code, data, caches and links."""
    folder = tmp_path / "project"
    for name in (
        "train.py",
        "lib/model.py",
        "lib/__pycache__/model.pyc",
        ".venv/bin/python",
        "wandb/run",
        ".env",
        "data/big.bin",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    outside = tmp_path / "secret.txt"
    outside.write_text("not for the cluster")
    (folder / "leak.txt").symlink_to(outside)
    (folder / "same.py").symlink_to("lib/model.py")
    (folder / "gone.py").symlink_to("nowhere")
    (folder / "elsewhere").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    return folder


def test_a_folder_without_git(project: Path) -> None:
    files = user_files(project / "train.py")
    assert names(files) == [".env", "data/big.bin", "lib/model.py", "same.py", "train.py"]
    assert files["user/same.py"] == b"lib/model.py"
    assert b"not for the cluster" not in files.values()


def test_a_git_folder_sends_what_git_would_take(project: Path) -> None:
    git(project, "init", "-q")
    (project / ".gitignore").write_text("data/\n.venv/\nwandb/\n__pycache__/\n.env\n")
    git(project, "add", "train.py", "same.py", "leak.txt", "gone.py")
    git(project, "commit", "-qm", "x")
    assert names(user_files(project / "train.py")) == [".gitignore", "lib/model.py", "same.py", "train.py"]
    (project / "train.py").write_text("edited, not committed")
    assert user_files(project / "train.py")["user/train.py"] == b"edited, not committed"
    (project / "lib" / "model.py").unlink()  # a file git knows and that is gone
    git(project, "add", "-A")
    assert "lib/model.py" not in names(user_files(project / "train.py"))


def test_a_subfolder_of_a_repository_sends_only_itself(project: Path) -> None:
    git(project, "init", "-q")
    (project / "lib" / "start.py").write_text("start")
    assert names(user_files(project / "lib" / "start.py")) == ["model.py", "start.py"]
    assert "lib/start.py" in names(user_files(project / "lib" / "start.py", project))


def test_a_folder_that_its_repository_ignores_is_sent_as_one_without_git(project: Path) -> None:
    git(project, "init", "-q")
    (project / ".gitignore").write_text("*\n")
    assert "model.py" in names(user_files(project / "lib" / "model.py"))


def test_a_script_outside_the_folder_is_refused(project: Path, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("x")
    with pytest.raises(UsageError, match="not below --code"):
        user_files(tmp_path / "other.py", project)


def test_an_ignored_script_is_sent_all_the_same(project: Path) -> None:
    git(project, "init", "-q")
    (project / ".gitignore").write_text("train.py\n")
    assert "train.py" in names(user_files(project / "train.py"))


def test_too_much_is_refused_with_the_way_out(project: Path) -> None:
    with (project / "data" / "big.bin").open("wb") as handle:
        handle.truncate((USER_LIMIT_MIB << 20) + 1)
    with pytest.raises(UsageError, match=f"more than {USER_LIMIT_MIB} MiB") as caught:
        user_files(project / "train.py")
    assert ".gitignore" in caught.value.next_command


def test_an_executable_stays_one(project: Path, tmp_path: Path) -> None:
    (project / "tool.sh").write_text("#!/bin/sh\necho ran\n")
    unpack(user_files(project / "train.py"), tmp_path / "tree")
    assert subprocess.run([tmp_path / "tree" / "user" / "tool.sh"], capture_output=True, text=True).stdout == "ran\n"
    assert not os.access(tmp_path / "tree" / "user" / "train.py", os.X_OK)
