"""What a fact asks of a node (Question) and what comes back (Reply), with accessors that fail as ParseError only.

The shapes are those of netcheck/probe.py. A Reply may come from an old or a damaged bundle: nothing in it is trusted.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from r4090c.errors import ParseError

NOT_INSTALLED = "not installed"
"""`command.error` of the probe for a program that is not there (probe.NOT_INSTALLED; a test compares them)."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the probe is to do for one fact.

    `files`: paths with at most one `*` a component. `natives`: name of a built-in of the probe -> its arguments.
    `timeout_s` bounds the command, and everything that may hang.
    """

    files: tuple[str, ...] = ()
    natives: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    timeout_s: float = 10.0

    def to_json(self) -> dict[str, Any]:
        """Return the question as the probe takes it."""
        command = None if self.command is None else list(self.command)
        return {"files": list(self.files), "natives": dict(self.natives), "command": command, "timeout_s": self.timeout_s}


@dataclass(frozen=True, slots=True)
class Stamps:
    """Times of one round trip: the controller's clock outside, the node's inside."""

    sent_at_s: float
    node_received_s: float
    node_sent_s: float
    received_at_s: float


@dataclass(frozen=True, slots=True)
class Output:
    """What a command printed. `rc` None: it did not start or did not end in time, then `error` says so."""

    rc: int | None
    stdout: str
    stderr: str
    error: str | None


@dataclass(frozen=True, slots=True)
class Reply:
    """One node's answer to one Question. `errors` holds what could not be read, by path or by native."""

    files: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    natives: Mapping[str, Any] = field(default_factory=dict)
    command: Output | None = None
    stamps: Stamps | None = None

    def text(self, path: str) -> str:
        """Return the text of `path`. Raises ParseError when it could not be read whole."""
        if path in self.errors:
            raise ParseError(f"{path}: {self.errors[path]}")
        if path not in self.files:
            raise ParseError(f"{path}: not in the answer")
        return self.files[path]

    def line(self, path: str) -> str | None:
        """Return the stripped text of `path`, None when it could not be read: many sysfs attributes refuse at times."""
        return None if path in self.errors else self.files[path].strip() if path in self.files else None

    def native(self, name: str) -> Any:
        """Return what the native said. Raises ParseError when it failed."""
        if name in self.errors:
            raise ParseError(f"{name}: {self.errors[name]}")
        if name not in self.natives:
            raise ParseError(f"{name}: {self.errors.get('probe', 'not in the answer')}")
        return self.natives[name]

    def output(self) -> Output:
        """Return what the command printed. Raises ParseError when it did not run or did not end in time."""
        if self.command is None:
            raise ParseError(f"the command was not run: {self.errors.get('probe', 'not in the answer')}")
        if self.command.error:
            raise ParseError(self.command.error)
        return self.command


def reply_of(result: object, name: str) -> Reply:
    """Return the Reply to fact `name` from one node's probe result (with the controller's stamps). Raises ParseError."""
    whole = as_mapping(result, "answer of the node")
    answer = as_mapping(as_mapping(whole.get("answers"), "answers").get(name), f"answer to {name!r}")
    command = answer.get("command")
    output = None
    if command is not None:
        fields = as_mapping(command, "command")
        rc, error = fields.get("rc"), fields.get("error")
        output = Output(
            rc=None if rc is None else as_int(rc, "rc"),
            stdout=as_str(fields.get("stdout"), "stdout"),
            stderr=as_str(fields.get("stderr"), "stderr"),
            error=None if error is None else as_str(error, "error"),
        )
    return Reply(
        files={path: as_str(text, path) for path, text in as_mapping(answer.get("files"), "files").items()},
        errors={path: as_str(text, path) for path, text in as_mapping(answer.get("errors"), "errors").items()},
        natives=as_mapping(answer.get("natives"), "natives"),
        command=output,
        stamps=Stamps(
            sent_at_s=as_float(whole.get("sent_at_s"), "sent_at_s"),
            node_received_s=as_float(whole.get("time_ns_received"), "time_ns_received") / 1e9,
            node_sent_s=as_float(whole.get("time_ns_sent"), "time_ns_sent") / 1e9,
            received_at_s=as_float(whole.get("received_at_s"), "received_at_s"),
        ),
    )


# --------------------------------------------------------------------------- JSON and text to types, ParseError otherwise


def as_mapping(value: object, what: str) -> Mapping[str, Any]:
    """Return `value` when it is a JSON object. Raises ParseError."""
    if not isinstance(value, Mapping):
        raise ParseError(f"{what}: expected an object, got {_short(value)}")
    return value


def as_list(value: object, what: str) -> list[Any]:
    """Return `value` when it is a JSON array. Raises ParseError."""
    if not isinstance(value, list):
        raise ParseError(f"{what}: expected a list, got {_short(value)}")
    return value


def as_str(value: object, what: str) -> str:
    """Return `value` when it is a string. Raises ParseError."""
    if not isinstance(value, str):
        raise ParseError(f"{what}: expected text, got {_short(value)}")
    return value


def as_int(value: object, what: str) -> int:
    """Return `value` as an integer, also from decimal text. Raises ParseError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = value.strip()
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) <= 20:
            return int(text)
    raise ParseError(f"{what}: expected a whole number, got {_short(value)}")


def as_float(value: object, what: str) -> float:
    """Return `value` as a finite number, also from text. Raises ParseError."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ParseError(f"{what}: expected a number, got {_short(value)}")


_repr = reprlib.Repr()  # bounded in depth as well: a forged answer may be nested to the limit of recursion
_repr.maxstring = _repr.maxother = 80
_short = _repr.repr
