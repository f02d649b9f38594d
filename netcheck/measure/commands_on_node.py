"""Runs on a node: many short commands, some at a time. Python >= 3.8, standard library only.

    python3 commands_on_node.py request.json       request: {"commands": [{"argv", "timeout_s", "retry_on"}], "at_once": n}

Prints a JSON list in the order of the commands: {"rc", "stdout", "stderr", "error"}; rc null: it did not run to its end, `error`
says why. A command whose output holds one of `retry_on` is tried once more after a moment. Whoever started us ends what we leave.
"""

# pathlib costs more to import than all this does.
# ruff: noqa: PTH123

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from typing import Any

NOT_INSTALLED = "not installed"
KEPT_CHARACTERS = 2000
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
    error = ""
    try:
        output = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        error = f"no end within {limit_s:g} s"
        process.kill()
        try:
            output = process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired:  # something it started keeps its output open
            output = (b"", b"")
    out, err = (data.decode("utf-8", "replace")[:KEPT_CHARACTERS] for data in output)
    return {"rc": None if error else process.returncode, "stdout": out, "stderr": err, "error": error}


if __name__ == "__main__":
    main()
