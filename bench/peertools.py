"""The peers' own programs: pinned versions, fetched on demand into a cache folder outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from bench.record import REPOSITORY, BenchError

ANSIBLE = "ansible-core==2.19.14"
ACCELERATE = "accelerate==1.15.0"
DATASETS = "datasets==5.2.0"


def default_cache() -> Path:
    """Return where environments are kept unless --cache says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "r4090c-bench"


def ansible(cache: Path) -> Path:
    """Return the `ansible` program, in an environment of its own."""
    return _environment(cache / "ansible", ANSIBLE, ours=False) / "ansible"


def accelerate(cache: Path) -> Path:
    """Return a `python` that has accelerate and sees the packages of this one: the same torch and DeepSpeed as the others."""
    return _environment(cache / "accelerate", ACCELERATE, ours=True) / "python"


def datasets(cache: Path) -> Path:
    """Return a `python` that has datasets, and sees the packages of this one."""
    return _environment(cache / "datasets", DATASETS, ours=True, dependencies=True) / "python"


def system_program(program: str, package: str) -> str:
    """Return the path of a system program, installing its package where that is allowed. Raises BenchError."""
    if shutil.which(program) is None:
        subprocess.run([str(REPOSITORY / ".ci" / "system-packages"), f"{program}:{package}"], check=False)
    path = shutil.which(program)
    if path is None:
        raise BenchError(f"`{program}` is not there; install {package}")
    return path


def _environment(folder: Path, requirement: str, *, ours: bool, dependencies: bool = False) -> Path:
    """Return the bin folder of a virtual environment that holds `requirement`, made when it is not there yet.

    `ours`: packages of this Python are visible in it, and the requirement's own dependencies are taken from there, unless
    `dependencies`: then those that are missing there are installed as well.
    """
    ready = folder / "ready"
    wanted = f"{requirement} {sys.executable}\n"
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing {requirement} into {folder}", file=sys.stderr, flush=True)
        try:
            venv.create(folder, with_pip=True)
            python = folder / "bin" / "python"
            if ours:
                here = sysconfig.get_path("purelib")
                there = subprocess.run(
                    [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                (Path(there.stdout.strip()) / "ours.pth").write_text(f"{here}\n")
            install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", requirement]
            subprocess.run([*install, *(["--no-deps"] if ours and not dependencies else [])], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise BenchError(f"{requirement} could not be installed into {folder}: {error}") from error
        ready.write_text(wanted)
    return folder / "bin"
