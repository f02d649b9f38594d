"""Runs on a node: listen on some ports, connect to every peer's, tell what worked. Python >= 3.8, standard library only.

All nodes run it at the same time. A node ends as soon as it has reached everybody and everybody has reached it, at the
latest after `window_s`, and at once when the controller is gone. Listeners and connections close with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import socket
import time
from typing import Any

RETRY_S = 0.1
"""A refused connection may only mean that the peer has not started yet."""
LINE_BYTES = 512
"""Longer than any greeting (token, node name, a few ports). One segment holds it, so one recv gives it whole."""


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"bound", "busy", "reached", "heard", "duration_s"}.

    request: {"node", "token", "address": own data address, "listen": [port], "peers": {name: {"address", "ports"}}, "window_s"}.
    reached: peer -> port -> null, or why it could not be reached. heard: peer -> ports on which that peer has reached us.
    """
    started = time.monotonic()
    poll = selectors.DefaultSelector()
    bound, busy = listen(request, poll)
    targets = [
        Target(request, peer, there["address"], port)
        for peer, there in sorted(request["peers"].items())
        for port in there["ports"]
    ]
    heard: dict[str, list[int]] = {peer: [] for peer in request["peers"]}
    deadline = started + float(request["window_s"])
    while time.monotonic() < deadline and not abandoned():
        for target in targets:
            target.start_if_due(poll)
        if all(target.done for target in targets) and all(len(ports) >= len(bound) for ports in heard.values()):
            break
        for key, _ in poll.select(RETRY_S):
            if isinstance(key.data, Target):
                key.data.advance(poll)
                for other in targets:
                    if key.data.done and other.peer == key.data.peer and other.port not in key.data.open_there:
                        other.give_up(poll)
            elif key.data[0] == "listener":
                accept(key.fileobj, key.data[1], poll)
            else:
                answer(key.fileobj, key.data[1], request, bound, heard, poll)
    reached: dict[str, dict[str, str | None]] = {peer: {} for peer in request["peers"]}
    for target in targets:
        reached[target.peer][str(target.port)] = target.error if target.given_up or not target.done else None
    return {"bound": bound, "busy": busy, "reached": reached, "heard": heard, "duration_s": time.monotonic() - started}


def abandoned() -> bool:
    """Return whether nobody reads our answer any more: the controller was interrupted, or the connection broke.

    Asked for no event, poll(2) tells only of a hang-up; the end of standard input, which always comes, is none.
    """
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))


def listen(request: dict[str, Any], poll: selectors.BaseSelector) -> tuple[list[int], dict[str, str]]:
    """Listen on every address of the machine, as torchrun's store does; return (bound ports, port -> why not)."""
    bound: list[int] = []
    busy: dict[str, str] = {}
    family = socket.AF_INET6 if ":" in request["address"] else socket.AF_INET
    for port in request["listen"]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("::" if family == socket.AF_INET6 else "", port))
            listener.listen(128)
        except OSError as error:
            busy[str(port)] = error.strerror or str(error)
            listener.close()
            continue
        listener.setblocking(False)
        poll.register(listener, selectors.EVENT_READ, ("listener", port))
        bound.append(port)
    return bound, busy


def accept(listener: Any, port: int, poll: selectors.BaseSelector) -> None:
    """Take one caller in; what it says is read when it comes."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return
    connection.setblocking(False)
    poll.register(connection, selectors.EVENT_READ, ("caller", port))


def answer(
    connection: Any,
    port: int,
    request: dict[str, Any],
    bound: list[int],
    heard: dict[str, list[int]],
    poll: selectors.BaseSelector,
) -> None:
    """Read "token name"; when the caller is one of us, answer "token name" and the ports that are worth a try."""
    poll.unregister(connection)
    try:
        words = connection.recv(LINE_BYTES).decode("utf-8", "replace").split()
        if len(words) == 2 and words[0] == request["token"] and words[1] in heard:
            connection.sendall(greeting(request, *bound))
            if port not in heard[words[1]]:
                heard[words[1]].append(port)
    except OSError:
        pass
    connection.close()


def greeting(request: dict[str, Any], *ports: int) -> bytes:
    """Return how this node introduces itself."""
    return (" ".join([request["token"], request["node"], *map(str, ports)]) + "\n").encode()


class Target:
    """One port of one peer, until it was reached. `error` says what became of the last try."""

    def __init__(self, request: dict[str, Any], peer: str, address: str, port: int) -> None:
        self.request, self.peer, self.address, self.port = request, peer, address, port
        self.done, self.given_up, self.sent = False, False, False
        self.open_there: set[int] = set()  # told by the peer when it was reached
        self.error, self.next_try = "timed out", 0.0
        self.connection: socket.socket | None = None

    def start_if_due(self, poll: selectors.BaseSelector) -> None:
        """Begin to connect, when not done and not under way."""
        if self.done or self.connection is not None or time.monotonic() < self.next_try:
            return
        try:
            family, _, _, _, where = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)[0]
            self.connection = socket.socket(family, socket.SOCK_STREAM)
            self.connection.setblocking(False)
            code = self.connection.connect_ex(where)
        except OSError as error:
            self.try_again(poll, error.strerror or str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self.try_again(poll, os.strerror(code))
            return
        self.sent, self.error = False, "timed out"
        poll.register(self.connection, selectors.EVENT_WRITE, self)

    def advance(self, poll: selectors.BaseSelector) -> None:
        """Connected: say who we are. Answered: done when the peer is who it should be."""
        connection = self.connection
        if connection is None:
            return
        try:
            if not self.sent:
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    self.try_again(poll, os.strerror(code))
                    return
                connection.sendall(greeting(self.request))
                self.sent, self.error = True, "connected, but nothing answered"
                poll.modify(connection, selectors.EVENT_READ, self)
                return
            words = connection.recv(LINE_BYTES).decode("utf-8", "replace").split()
        except OSError as error:
            self.try_again(poll, error.strerror or str(error))
            return
        if words[:2] == [self.request["token"], self.peer]:
            self.done, self.open_there = True, {int(word) for word in words[2:] if word.isdigit()}
            self.close(poll)
        else:
            self.try_again(poll, "another program answered" if words else "connected, then closed by the other side")

    def give_up(self, poll: selectors.BaseSelector) -> None:
        """Stop trying: the peer says that it does not listen on this port."""
        if not self.done:
            self.done, self.given_up, self.error = True, True, "not opened there"
            self.close(poll)

    def try_again(self, poll: selectors.BaseSelector, error: str) -> None:
        """Note what went wrong, and that the next try is not due at once."""
        self.error, self.next_try = error, time.monotonic() + RETRY_S
        self.close(poll)

    def close(self, poll: selectors.BaseSelector) -> None:
        """Let go of the connection."""
        if self.connection is not None:
            with contextlib.suppress(KeyError):
                poll.unregister(self.connection)
            self.connection.close()
            self.connection = None
