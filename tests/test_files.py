"""Files are written whole or not at all, and nothing but files is replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from r4090c.errors import UsageError
from r4090c.files import write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "f", b"one")
    write_whole(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_what_a_link_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", b"one")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"one"


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_whole(tmp_path / "pipe", b"one")
    reader.join(10)
    assert heard == [b"one"] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no /dev/full")
def test_a_full_disk_is_told_and_a_device_stays_one() -> None:
    with pytest.raises(UsageError, match="No space left on device"):
        write_whole(Path("/dev/full"), b"x" * 100_000)
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


@pytest.mark.parametrize("name", ["no/such/folder/f", ".", "loop", "a\0b"])
def test_a_place_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="cannot be written"):
        write_whole(tmp_path / name, b"x")
    assert sorted(tmp_path.iterdir()) == before
