"""What tools print, read by pure parsers: one module each, shared by the checks, the measurements and `r4090c parse`.

A tool module, `netcheck/tools/<name with _>.py`, has
    TOOL        its name for `r4090c parse` (API): "nccl-tests"
    COMMAND     the command line whose output it takes, as a person would type it: "nvidia-smi topo -m"
    parse       parse(text) -> a frozen dataclass, or a tuple of them; raises ParseError, and nothing else, on any text

Adding a tool: one file here, its name in _NAMES below, its fixtures in tests/tools/fixtures/<tool>/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Protocol, cast


class ToolModule(Protocol):
    """What every module of this package offers."""

    TOOL: str
    COMMAND: str

    def parse(self, text: str) -> object:
        """Return what `text` says. Raises ParseError, and nothing else, whatever it holds."""
        ...


_NAMES = (
    "chronyc",
    "ethtool",
    "findmnt",
    "gids",
    "ibv_devinfo",
    "iperf3",
    "kernel-log",
    "lscpu",
    "lspci",
    "lspci-tree",
    "nccl-log",
    "nccl-tests",
    "numactl",
    "nvidia-smi-compute-apps",
    "nvidia-smi-dmon",
    "nvidia-smi-p2p",
    "nvidia-smi-q",
    "nvidia-smi-query",
    "nvidia-smi-topo",
    "perftest",
    "proc-mounts",
    "sysfs-gid",
    "timedatectl",
)


class _Tools(Mapping[str, ToolModule]):
    """Imports a module when it is asked for: all of them take 40 ms, and the facts need four."""

    def __getitem__(self, name: str) -> ToolModule:
        if name not in _NAMES:
            raise KeyError(name)
        return cast(ToolModule, import_module(f"netcheck.tools.{name.replace('-', '_')}"))

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


TOOLS: Mapping[str, ToolModule] = _Tools()
"""Name of the tool -> its module."""
