"""Our top-level packages are the ones that are imported, and the command line starts without the heavy ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
OURS = ("r4090c", "netcheck", "provision", "launch", "train", "ds_configs")
HEAVY = ("torch", "deepspeed", "transformers", "numpy", "paramiko", "fabric", "pydantic", "rich", "yaml")


def answer(code: str, folder: Path) -> str:
    """Return what a fresh Python started in `folder` prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", OURS)
def test_a_name_is_ours_beside_torch_and_deepspeed(name: str, tmp_path: Path) -> None:
    for other in ("torch", "deepspeed"):
        assert answer(f"import importlib.util as u; print(u.find_spec({other!r}) is not None)", tmp_path) == "True"
    found = Path(answer(f"import importlib.util as u; print(u.find_spec({name!r}).origin)", tmp_path))
    assert found == PROJECT / name / "__init__.py"


def test_the_command_line_imports_nothing_heavy(tmp_path: Path) -> None:
    code = f"import sys, r4090c.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert answer(code, tmp_path) == "[]"
