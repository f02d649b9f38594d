"""pytest fixtures of the VM lab, and why its tests (`pytestmark = pytest.mark.vm`) are left out of an ordinary run.

`vmlab` (session): one lab for all tests that leave the nodes as they were. `fresh_vmlab` (test): a lab of its own, for tests
that break something; it costs seconds.

Where there is no VM lab to be had they skip and say why; with R4090C_REQUIRE_VMLAB=1 in the environment they fail instead.
They never build one, as that takes longer than a test may: `make vmtest` and `python -m tests.vmlab build` do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vmlab.lab import VmLab, is_built, why_not

HERE = Path(__file__).resolve().parent
LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the vm tests out unless they are asked for: by `-m` naming vm, or by a path below tests/vmlab."""
    asked = re.search(r"\bvm\b", config.option.markexpr or "")
    named = any(Path(word.partition("::")[0]).resolve().is_relative_to(HERE) for word in config.args)
    if asked or named:
        return
    vm = [item for item in items if item.get_closest_marker("vm")]
    if vm:
        config.hook.pytest_deselected(items=vm)
        items[:] = [item for item in items if item not in vm]
        config.stash[LEFT_OUT] = len(vm)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and how to run it."""
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{count} tests left out, as they need two virtual machines: run them with `make vmtest`")


@pytest.fixture(scope="session")
def needs_vmlab() -> None:
    """Skip with the reason when no VM lab can be had."""
    why = why_not()
    if why is None and not is_built():
        why = "no image yet; make it with: python -m tests.vmlab build"
    if why and os.environ.get("R4090C_REQUIRE_VMLAB"):
        pytest.fail(why)
    if why:
        pytest.skip(why)


@pytest.fixture(scope="session")
def vmlab(needs_vmlab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VmLab]:
    """Yield one VM lab for all tests of the session."""
    with VmLab.up(tmp_path_factory.mktemp("vmlab")) as running:
        yield running


@pytest.fixture
def fresh_vmlab(needs_vmlab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VmLab]:
    """Yield a VM lab of the test's own."""
    with VmLab.up(tmp_path_factory.mktemp("vmlab")) as running:
        yield running
