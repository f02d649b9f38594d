"""The registry of tools."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import netcheck.tools
from netcheck.tools import TOOLS
from tests.tools.samples import FIXTURES, files

ANY_FIRST = """
import pkgutil, sys
from importlib import import_module
import netcheck.facts, netcheck.tools
packages = (netcheck.facts, netcheck.tools)
names = [f"{package.__name__}.{module.name}" for package in packages for module in pkgutil.iter_modules(package.__path__)]
for name in names:
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("netcheck")]:
        del sys.modules[loaded]
    import_module(name)
print(len(names))
"""


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool(tool: str) -> None:
    module = TOOLS[tool]
    assert tool == module.TOOL
    assert module.COMMAND.strip() == module.COMMAND != ""
    for path in files(tool):
        expect = json.loads((path.parent / f"{path.stem}.expect.json").read_text())
        assert expect["must"] and expect["origin"]
    assert files(tool)


def test_no_module_and_no_fixture_is_left_out() -> None:
    modules = {module.name for module in pkgutil.iter_modules(netcheck.tools.__path__) if not module.name.startswith("_")}
    assert modules == {tool.replace("-", "_") for tool in TOOLS}
    assert {path.name for path in FIXTURES.iterdir() if path.is_dir()} == set(TOOLS)
    assert list(TOOLS) == sorted(TOOLS)
    assert len(TOOLS) == len(set(TOOLS))


def test_unknown_tool() -> None:
    assert "nvidia-smi" not in TOOLS
    with pytest.raises(KeyError):
        TOOLS["_reading"]


def test_facts_and_tools_can_be_imported_in_any_order() -> None:
    """Some facts are read with a tool's parser, and some tools with a fact's: no module may need the other one whole."""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", ANY_FIRST], capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(TOOLS)


def test_facts_load_only_the_tools_they_read_with() -> None:
    program = "import sys, netcheck.facts; print([name for name in sys.modules if name.startswith('netcheck.tools.')])"
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=60, check=True)
    assert "perftest" not in done.stdout
