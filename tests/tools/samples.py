"""The fixtures of one tool with what is expected of each: recorded shapes of its output (see .expect.json: origin)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"


def files(tool: str) -> list[Path]:
    return sorted(path for path in (FIXTURES / tool).iterdir() if not path.name.endswith(".expect.json"))


def text(tool: str, name: str) -> str:
    return (FIXTURES / tool / name).read_text()


def expected(file: Path) -> dict[str, Any]:
    expect: dict[str, Any] = json.loads((file.parent / f"{file.stem}.expect.json").read_text())
    return expect
