"""Commands of a test that run beside it, and are followed."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import cli
from tests.lab.lab import Lab

QUICK_PYTHON = Path(__file__).resolve().parents[1] / "launch" / "scripts" / "quick_python"


class Process:
    """A command that is followed while it runs."""

    def __init__(self, *words: str, state: Path) -> None:
        self.popen = cli.start(*words, state=state)
        self.lines: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=(pipe,), daemon=True) for pipe in (self.popen.stdout, self.popen.stderr)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe: Iterator[str]) -> None:
        for line in pipe:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.text}"
            assert self.popen.poll() is None or text in self.text, f"ended without {text!r}:\n{self.text}"
            time.sleep(0.05)

    @property
    def run_id(self) -> str:
        self.wait_for("starting ")
        (first, *_) = (line for line in self.lines if line.startswith("run "))
        return first.split()[1].rstrip(",")

    def end(self, timeout_s: float = 600) -> int:
        code = self.popen.wait(timeout_s)
        for thread in self._threads:
            thread.join(10)
        return code


@contextmanager
def starter(state: Path, cluster: Path) -> Iterator[Callable[..., Process]]:
    """Yield a function that starts `r4090c COMMAND --cluster FILE …`; what still runs at the end is ended."""
    began: list[Process] = []

    def begin(command: str, *words: str) -> Process:
        began.append(Process(command, "--cluster", str(cluster), *words, state=state))
        return began[-1]

    try:
        yield begin
    finally:
        for one in began:
            if one.popen.poll() is None:
                one.popen.terminate()
                try:
                    one.popen.wait(60)
                except subprocess.TimeoutExpired:
                    one.popen.kill()


def nothing_runs(lab: Lab) -> bool:
    """True once no node has a process of a run; they are given a minute."""
    deadline = time.monotonic() + 60
    words = ("agent.py", "torch.distributed.run", "rank.py", "user/")
    while any(word in line for node in lab.nodes for _, line in lab.processes(node) for word in words):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
