"""Runs on a node: many short commands, some at a time. Python >= 3.8, standard library only.

    python3 commands_on_node.py request.json       request: {"commands": [{"argv", "timeout_s", "retry_on"}], "at_once": n}

Prints a JSON list in the order of the commands: {"rc", "stdout", "stderr", "error"}; rc null: it did not run to its end, `error`
says why. A command whose output holds one of `retry_on` is tried once more after a moment. Whoever started us ends what we leave.
"""

# pathlib costs more to import than all this does.
# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

NOT_INSTALLED = "not installed"
KEPT_BYTES = 2000
"""Of each stream."""
HIDDEN = ("SSH_AUTH_SOCK", "SSH_ASKPASS", "DISPLAY")
"""Variables a command does not get: with an agent at hand nobody sees that a key is missing."""


def main() -> None:
    """Run what the request file says and print what came of it."""
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    results = run_all(request["commands"], int(request["at_once"]))
    sys.stdout.write(json.dumps(results) + "\n")


def run_all(commands: list[dict[str, Any]], at_once: int) -> list[dict[str, Any]]:
    """Return the results of the commands, `at_once` running at the same time."""
    results = [{} for _ in commands]  # type: list[dict[str, Any]]
    waiting = list(range(len(commands)))[::-1]

    def work() -> None:
        while True:
            try:
                place = waiting.pop()
            except IndexError:
                return
            results[place] = run(commands[place])
            said = results[place]["stdout"] + results[place]["stderr"]
            if results[place]["rc"] != 0 and any(text in said for text in commands[place]["retry_on"]):
                time.sleep(random.uniform(0.5, 1.5))
                results[place] = run(commands[place])

    workers = [threading.Thread(target=work) for _ in range(min(at_once, len(commands)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def run(command: dict[str, Any]) -> dict[str, Any]:
    """Run one command to its end or its timeout."""
    environment = {key: value for key, value in os.environ.items() if key not in HIDDEN}
    environment["LC_ALL"] = "C"
    limit_s = float(command["timeout_s"])
    try:
        process = subprocess.Popen(
            command["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except FileNotFoundError:
        return {"rc": None, "stdout": "", "stderr": "", "error": NOT_INSTALLED}
    except OSError as problem:
        return {"rc": None, "stdout": "", "stderr": "", "error": problem.strerror or str(problem)}
    assert process.stdout is not None and process.stderr is not None
    texts = [Reader(process.stdout), Reader(process.stderr)]
    error = ""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        error = f"no end within {limit_s:g} s"
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    for text in texts:
        text.thread.join(1.0)  # what it left behind may hold its output open: whoever started us ends that
    out, err = (bytes(text.kept).decode("utf-8", "replace") for text in texts)
    return {"rc": None if error else process.returncode, "stdout": out, "stderr": err, "error": error}


class Reader:
    """Reads a stream to its end in a thread of its own, and keeps the beginning: it may be endless."""

    def __init__(self, stream: Any) -> None:
        self.kept = bytearray()
        self.stream = stream
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        """Be the thread."""
        while True:
            data = os.read(self.stream.fileno(), 65536)
            if not data:
                return
            self.kept += data[: max(0, KEPT_BYTES - len(self.kept))]


if __name__ == "__main__":
    main()
