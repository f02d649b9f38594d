"""pytest fixtures of the VM lab. An ordinary run leaves its tests out (`pytestmark = pytest.mark.vm`, tests/left_out.py).

`vmlab` (session): one lab for all tests that leave the nodes as they were. `fresh_vmlab` (test): a lab of its own, for tests
that break something; it costs seconds.

Where there is no VM lab to be had they skip and say why; with R4090C_REQUIRE_VMLAB=1 in the environment they fail instead.
They never build one, as that takes longer than a test may: `make vmtest` and `python -m tests.vmlab build` do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.vmlab.lab import VmLab, is_built, why_not


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
