"""pytest fixtures of the lab. Use them with `pytest_plugins = ["tests.lab.fixtures"]`.

`lab4` (session): one lab of four nodes, shared by all tests. `mended_lab4`: the same, with every fault undone after the
test. `lab`: a function that brings up a lab of its own for one test.

Where there is no lab to be had they skip and say why; with R4090C_REQUIRE_LAB=1 in the environment they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.lab.lab import Lab, why_not


@pytest.fixture(scope="session")
def needs_lab() -> None:
    """Skip with the reason when no lab can be had."""
    why = why_not()
    if why and os.environ.get("R4090C_REQUIRE_LAB"):
        pytest.fail(why)
    if why:
        pytest.skip(why)


@pytest.fixture(scope="session")
def lab4(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Yield one lab of four nodes for all tests of the session."""
    with Lab.up(tmp_path_factory.mktemp("lab4"), nodes=4) as running:
        yield running


@pytest.fixture
def mended_lab4(lab4: Lab) -> Iterator[Lab]:
    """Yield the lab of the session; every fault is undone after the test."""
    yield lab4
    lab4.mend()


@pytest.fixture
def lab(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Lab]]:
    """Yield a function (nodes=2, **options of Lab.up) -> Lab; the labs go down after the test."""
    with ExitStack() as stack:

        def bring_up(nodes: int = 2, **options: Any) -> Lab:
            return stack.enter_context(Lab.up(tmp_path_factory.mktemp("lab"), nodes, **options))

        yield bring_up
