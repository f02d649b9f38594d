"""The probe's look-up of programs: on the PATH, in the folders given, and whether a file holds a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from netcheck import probe


def program(path: Path, content: bytes = b"#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755)
    return path


def test_the_path_comes_first_then_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = program(tmp_path / "bin" / "mpirun")
    built = program(tmp_path / "openmpi-4.1" / "bin" / "mpirun")
    perf = program(tmp_path / "build" / "perf")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    pattern = f"{tmp_path}/openmpi*/bin/mpirun"
    found = probe.native_tools({"mpirun": [[pattern], ""], "perf": [[str(perf)], ""], "absent": [[str(tmp_path / "x")], ""]})
    assert found == {"mpirun": [str(on_path), str(on_path), None], "perf": [str(perf), str(perf), None]}
    monkeypatch.setenv("PATH", "")
    assert probe.native_tools({"mpirun": [[pattern], ""]})["mpirun"][0] == str(built)


def test_links_are_told_by_where_they_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = program(tmp_path / "usr" / "mpiexec.hydra")
    link = tmp_path / "bin" / "mpirun"
    link.parent.mkdir()
    link.symlink_to(real)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert probe.native_tools({"mpirun": [[], ""]}) == {"mpirun": [str(link), str(real), None]}


def test_what_cannot_be_started_is_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvcc").mkdir()
    (tmp_path / "mpirun").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.native_tools({"nvcc": [[], ""], "mpirun": [[], ""]}) == {}


@pytest.mark.parametrize("before", [0, (1 << 20) - 5, (1 << 20) - 1, 1 << 20, 3 << 20])
def test_a_text_is_found_wherever_it_stands(tmp_path: Path, before: int) -> None:
    path = program(tmp_path / "perf", b"l" * before + b"libmpi.so.40")
    assert probe.holds(str(path), b"libmpi.so")
    path.write_bytes(path.read_bytes().replace(b"libmpi.so", b"libmpx.so"))
    assert not probe.holds(str(path), b"libmpi.so")


def test_home_is_the_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    perf = program(tmp_path / "nccl-tests" / "build" / "perf")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert probe.native_tools({"perf": [["~/nccl-tests/build/perf"], "libmpi"]}) == {"perf": [str(perf), str(perf), False]}
