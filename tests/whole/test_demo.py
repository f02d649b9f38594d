"""`r4090c demo` for real: no root needed, nothing left, also after Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests import cli

pytestmark = [
    pytest.mark.train,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None, reason="sshd is not installed"
    ),
]


def processes_naming(text: str) -> list[str]:
    """Return the command lines of all processes here that name `text`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                cmdline = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                marked = (folder / "environ").read_bytes()
            except OSError:
                continue
            if text in cmdline or f"={text}".encode() in marked:
                found.append(cmdline)
    return found


def test_the_demo_trains_and_takes_everything_down(tmp_path: Path) -> None:
    code, output, errors = cli.run(
        "demo", "--dir", str(tmp_path / "d"), "--set", "steps=5", "--json", state=tmp_path, timeout_s=800
    )
    assert code == 0, errors
    told = json.loads(output)
    assert told["outcome"] == "done" and told["nodes"] == ["demo01", "demo02"] and told["last_loss"] < told["first_loss"]
    assert "demo: fit" in errors and "nothing to mend" in errors, "the demo's own cluster gives no warning"
    assert (Path(told["run_dir"]) / "metrics.jsonl").exists() and "tokens/s" in errors and "Next" in errors
    assert processes_naming(str(tmp_path)) == []


def test_ctrl_c_ends_the_demo_and_all_its_processes(tmp_path: Path) -> None:
    process = cli.start("demo", "--dir", str(tmp_path / "d"), "--set", "steps=100000", state=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    assert processes_naming(str(tmp_path)) != []
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert "nothing is left running" in errors
    assert processes_naming(str(tmp_path)) == []
