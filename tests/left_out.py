"""Tests that an ordinary run leaves out: what they are, and how to run them.

They run when `-m` names their marker, or when their file (or a folder in LEFT_OUT) is named on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LEFT_OUT: Mapping[str, tuple[str, Path | None]] = {
    "vm": ("they need two virtual machines: run them with `make vmtest`", HERE / "vmlab"),
    "long": ("they train for minutes: run them with `make traintest`", None),
}
"""Marker -> why, and how to run them; the folder whose name asks for them all."""
COUNTS = pytest.StashKey[dict[str, int]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for."""
    named = [Path(word.partition("::")[0]).resolve() for word in config.args]
    counts: dict[str, int] = {}
    for marker, (_, folder) in LEFT_OUT.items():
        if re.search(rf"\b{marker}\b", config.option.markexpr or ""):
            continue
        asked = folder is not None and any(path.is_relative_to(folder) for path in named)
        left = [item for item in items if item.get_closest_marker(marker) and not asked and item.path not in named]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item not in left]
            counts[marker] = len(left)
    config.stash[COUNTS] = counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and how to run it."""
    for marker, count in config.stash.get(COUNTS, {}).items():
        terminalreporter.write_line(f"{count} tests left out, as {LEFT_OUT[marker][0]}")
