"""What the VM lab keeps between runs, and when its tests run. No virtual machine is needed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.vmlab import image, store
from tests.vmlab.store import VmLabError

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R4090C_VMLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make(folder: Path, lock: int) -> None:
    (folder / "disk").write_text("content")


def refuse(folder: Path, lock: int) -> None:
    raise AssertionError("built again")


def test_an_entry_is_built_once(cache: Path) -> None:
    entry = store.take("image", "k1", make)
    assert entry == cache / "image-k1"
    assert store.take("image", "k1", refuse) == entry
    assert store.found("image", "k2") is None
    assert not store.damaged(entry)


def test_a_key_depends_on_every_part_and_on_where_they_end() -> None:
    keys = {
        store.key_of("ab", "c"),
        store.key_of("a", "bc"),
        store.key_of("abc"),
        store.key_of(["ab", "c"]),
        store.key_of(b"abd"),
    }
    assert len(keys) == 5
    assert store.key_of("ab", ["c"]) == store.key_of("ab", ["c"])


def test_a_failed_build_leaves_nothing(cache: Path) -> None:
    def fail(folder: Path, lock: int) -> None:
        make(folder, lock)
        raise VmLabError("no mirror")

    with pytest.raises(VmLabError, match="no mirror"):
        store.take("image", "k1", fail)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_what_a_killed_build_left_is_swept(cache: Path) -> None:
    (cache / "building-image-k1").mkdir(parents=True)
    (cache / "building-image-k1" / "half").write_text("…")
    entry = store.take("image", "k1", make)
    assert sorted(path.name for path in entry.iterdir()) == ["disk", store.MANIFEST]


@pytest.mark.parametrize("fault", ["cut", "gone", "no manifest", "odd manifest"])
def test_a_broken_entry_is_built_again(fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    entry = store.take("image", "k1", make)
    if fault == "cut":
        (entry / "disk").write_text("cont")
    elif fault == "gone":
        (entry / "disk").unlink()
    elif fault == "no manifest":
        (entry / store.MANIFEST).unlink()
    else:
        (entry / store.MANIFEST).write_text(json.dumps(["disk"]))
    assert store.found("image", "k1") is None
    assert store.damaged(entry)
    store.take("image", "k1", make)
    assert (entry / "disk").read_text() == "content"
    assert "image-k1 is broken" in capfd.readouterr().err


def test_damage_of_the_same_size_is_found_by_its_hash() -> None:
    entry = store.take("image", "k1", make)
    (entry / "disk").write_text("c0ntent")
    assert store.found("image", "k1") == entry
    assert store.damaged(entry)
    store.forget(entry)
    assert store.found("image", "k1") is None


def test_of_two_builders_one_waits(cache: Path) -> None:
    began, go = threading.Event(), threading.Event()

    def slowly(folder: Path, lock: int) -> None:
        began.set()
        go.wait(60)
        make(folder, lock)

    first = threading.Thread(target=store.take, args=("image", "k1", slowly))
    first.start()
    began.wait()
    program = "from tests.vmlab import store; store.take('image', 'k1', lambda folder, lock: 1 / 0)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as second:
        assert second.stderr is not None
        told = second.stderr.readline()
        go.set()
        told += second.stderr.read()
    first.join()
    assert second.returncode == 0, told
    assert "waiting for another process that builds image-k1" in told


def test_old_entries_go_and_it_is_said(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for key in ("old", "recent"):
        store.take("image", key, make)
    store.take("snapshot", "old", make)
    long_ago = time.time() - 2 * store.UNUSED_S
    for name in ("image-old", "snapshot-old"):
        os.utime(cache / name, (long_ago, long_ago))
    store.take("image", "new", make)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["image-new", "image-recent", "snapshot-old"]
    assert "removing image-old" in capfd.readouterr().err


def test_modules_come_with_what_they_need_in_the_order_of_insmod() -> None:
    dependencies = {"a/nfs.ko.xz": ["b/lockd.ko.xz", "c/sunrpc.ko.xz"], "b/lockd.ko.xz": ["c/sunrpc.ko.xz"], "c/sunrpc.ko.xz": []}
    assert image.closure(["nfs", "ext4"], dependencies, ["kernel/fs/ext4.ko"]) == [
        "c/sunrpc.ko.xz",
        "b/lockd.ko.xz",
        "a/nfs.ko.xz",
    ]
    with pytest.raises(VmLabError, match="no module rdma_rxe"):
        image.closure(["rdma_rxe"], dependencies, [])


def test_the_recipe_names_no_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R4090C_VMLAB_MIRROR", "http://mirror.example/debian")
    assert image.apt_mirror() == "http://mirror.example/debian"
    texts = [path.read_text() for path in Path(image.__file__).parent.rglob("*") if path.suffix in (".py", ".sh")]
    assert not [text for text in texts if "http://" in text or "https://" in text]


# --------------------------------------------------------------------------- when the tests run


@pytest.mark.parametrize(
    ("words", "runs"), [((), False), (("-m", "not slow"), False), (("-m", "vm"), True), (("-m", "vm or lab"), True)]
)
@pytest.mark.parametrize(("marker", "target"), [("vm", "make vmtest"), ("long", "make traintest")])
def test_long_and_vm_tests_run_only_when_asked_for(
    words: tuple[str, ...], runs: bool, marker: str, target: str, tmp_path: Path
) -> None:
    words = tuple(word.replace("vm", marker) for word in words)
    (tmp_path / "test_sample.py").write_text(f"import pytest\n@pytest.mark.{marker}\ndef test_a(): pass\ndef test_b(): pass\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.left_out", "-p", "no:cacheprovider", *words, "-c"]
    argv += [str(REPOSITORY / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("1 tests left out" in done.stdout) is not runs
    assert (target in done.stdout) is not runs
