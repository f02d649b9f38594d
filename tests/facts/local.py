"""Run the probe on this machine as a node would: `python -I -S -c <bootstrap>`, the request on stdin, JSON on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from netcheck.gather import PROBE_SOURCE
from r4090c.model import Node
from r4090c.remote import EVENT_MARKER, Answer

BOOTSTRAP = (
    "import json,sys;g={'__name__':'node'};exec(compile(sys.argv[1],'probe','exec'),g);"
    "print(json.dumps(g['main'](json.load(sys.stdin))))"
)
CONVERSE = BOOTSTRAP.replace("json.load(sys.stdin)", "json.loads(sys.stdin.buffer.raw.readline())")


def run_probe(
    questions: Mapping[str, Any],
    *,
    python: str = sys.executable,
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    limit_s: float = 20.0,
) -> dict[str, Any]:
    """Return the probe's result. subprocess waits for the end of stdout and stderr, as an SSH channel does."""
    argv = [*prefix, python, "-I", "-S", "-c", BOOTSTRAP, PROBE_SOURCE]
    done = subprocess.run(
        argv, input=json.dumps({"questions": questions}), capture_output=True, text=True, timeout=limit_s, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class LocalShell:
    """A remote.Shell to this machine: the same contract, with a local process in the place of SSH."""

    def __init__(self, node: Node, noise: str = "", clock_s: float = 0.0) -> None:
        self.node = node
        self.connect_s = 0.01
        self.noise = noise
        self.clock_s = clock_s

    def ask(self, source: str, request: object, *, timeout_s: float = 30.0, python: str = "python3") -> Answer:
        """Run `source` here; `clock_s` shifts this side's clock, so that the node seems to be off by as much the other way."""
        sent = time.time()
        done = subprocess.run(
            [python, "-I", "-S", "-c", BOOTSTRAP, source],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
            cwd=Path("/"),
        )
        return Answer(json.loads(done.stdout), self.noise, sent + self.clock_s, time.time() + self.clock_s)

    def converse(self, source: str, request: object, *, timeout_s: float) -> LocalConversation:
        """Start `source` here as a conversation."""
        argv = ["timeout", str(timeout_s), sys.executable, "-I", "-S", "-c", CONVERSE, source]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return LocalConversation(process)


class LocalConversation:
    """A remote.Conversation with a local process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def stop(self) -> None:
        """End its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def answer(self, told: Callable[[Any], None] = lambda event: None) -> Any:
        """Return the answer, telling events before it."""
        assert self.process.stdout is not None
        with self.process:
            for line in filter(str.strip, self.process.stdout):
                if not line.startswith(EVENT_MARKER):
                    return json.loads(line)
                told(json.loads(line.removeprefix(EVENT_MARKER)))
        raise AssertionError("no answer")
