"""Run the real command line in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = [sys.executable, "-m", "r4090c"]


def environment(state: Path) -> dict[str, str]:
    """Return an environment whose history lies in `state`, and in which .pyc files are written."""
    dropped = ("PYTHONDONTWRITEBYTECODE", "R4090C_CLUSTER", "PYTHONPATH")
    return {
        **{key: value for key, value in os.environ.items() if key not in dropped},
        "R4090C_STATE": str(state),
        "NO_COLOR": "1",
    }


def start(*words: str, state: Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start `r4090c WORDS` in a session of its own; its output is piped. The folder has no cluster.yaml unless `cwd` does."""
    return subprocess.Popen(
        [*PROGRAM, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(state),
        cwd=cwd or state,
        start_new_session=True,
    )


def run(*words: str, state: Path, cwd: Path | None = None, timeout_s: float = 600) -> tuple[int, str, str]:
    """Run `r4090c WORDS` to its end; return (exit code, stdout, stderr)."""
    process = start(*words, state=state, cwd=cwd)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output, errors


def run_json(*words: str, state: Path, timeout_s: float = 600) -> Any:
    """Run `r4090c WORDS --json`, which must end with exit code 0; return what it printed."""
    code, output, errors = run(*words, "--json", state=state, timeout_s=timeout_s)
    assert code == 0, errors
    return json.loads(output)
