"""Reach the nodes over SSH: the only module that imports fabric and paramiko.

A `Shell` is one authenticated connection to one node; a `Fleet` keeps one Shell a node and maps a function over them in
parallel. Host keys are always verified: Fabric's own default (trust whatever key comes) is replaced. Every word that
reaches a remote shell is quoted here. Whatever goes wrong becomes a `NodeError` with one of the verdicts below.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import getpass
import json
import os
import shlex
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import paramiko
from fabric import Config, Connection

from r4090c.errors import CouldNotTell, UsageError
from r4090c.model import Node, Ssh

R = TypeVar("R")

BANNER_TIMEOUT_S = 10.0
"""est.: a loaded sshd answers within seconds; a frozen one never does."""
AUTH_TIMEOUT_S = 15.0
"""est.: PAM and LDAP may be slow."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 2, 2, 3
"""Keepalive 2/2/3 with TCP_USER_TIMEOUT notices a cut link in about 4 s (measured in a namespace lab)."""
TCP_USER_TIMEOUT_MS = 6000
MAX_COMMAND_BYTES = 120_000
"""Linux takes 128 KiB for one argument (MAX_ARG_STRLEN), and sshd hands the whole command to the shell as one."""

MAX_OUTPUT_BYTES = 256 << 20
"""est.: what one program on a node may answer: 64 steps of 1 MiB of anything, written as JSON. Sixteen nodes talk at once."""
FITS_WINDOW_BYTES = 32_768
"""Far below the window that OpenSSH and paramiko grant a new channel (2 MiB)."""

MARKER = "R4090C-ANSWER "
EVENT_MARKER = "R4090C-EVENT "
"""Begins a line that a program tells while it still works (`Shell.converse`)."""
_BOOTSTRAP = (
    "import sys,json,zlib,base64,signal;signal.alarm(int(sys.argv[1]));g={'__name__':'r4090c_node'};"
    "exec(compile(zlib.decompress(base64.b64decode(sys.argv[2])),'r4090c','exec'),g);"
    "a=g['main'](json.load(sys.stdin));"
    f"sys.stdout.write('\\n{MARKER}'+json.dumps(a)+'\\n')"
)
"""Runs on the node: the program travels in argv, the request on stdin, and the node ends itself at its own alarm."""
_BOOTSTRAP_CONVERSE = _BOOTSTRAP.replace("json.load(sys.stdin)", "json.loads(sys.stdin.buffer.raw.readline())")
"""The same for `Shell.converse`: one line is the request, the end of standard input tells the program to stop.

Unbuffered: what the program itself polls must not lie in a buffer of Python's.
"""


class Verdict(str, Enum):
    """What became of an attempt to reach one node."""

    OK = "ok"
    DNS = "dns"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    NO_ROUTE = "no-route"
    BANNER_TIMEOUT = "banner-timeout"
    HOST_KEY_CHANGED = "host-key-changed"
    UNKNOWN_HOST_KEY = "unknown-host-key"
    AUTH_FAILED = "auth-failed"
    NOISY_SHELL = "noisy-shell"
    NO_PYTHON3 = "no-python3"
    LOST = "lost"


class NodeError(CouldNotTell):
    """One node could not be reached or did not answer; `verdict` says how."""

    def __init__(self, node: str, verdict: Verdict, observed: str, expected: str = "", next_command: str = "") -> None:
        super().__init__(node, observed, expected, next_command)
        self.node = node
        self.verdict = verdict


@dataclass(frozen=True, slots=True)
class Completed:
    """A finished remote command. `rc` -1: it ended without an exit status (killed by a signal)."""

    rc: int
    stdout: str
    stderr: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What `Shell.ask` brought back. Times are the controller's clock; `noise` is what the login shell printed before."""

    value: Any
    noise: str
    sent_at_s: float
    received_at_s: float


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a connection really goes, after ssh_config: the inventory wins, then ssh_config, then the defaults."""

    hostname: str
    port: int
    user: str | None
    keys: tuple[str, ...]
    jump: str
    proxy_command: str


# --------------------------------------------------------------------------- what is parsed once, not per connection


@functools.lru_cache(maxsize=64)
def _ssh_config(path: str) -> paramiko.SSHConfig | None:
    """Return the parsed ssh_config at `path`, None when the path is empty or absent. Raises UsageError when it is malformed."""
    if not path or not Path(path).exists():
        return None
    try:
        return paramiko.SSHConfig.from_path(path)
    except (OSError, paramiko.SSHException, UnicodeDecodeError) as error:
        raise UsageError(path, str(error), "a readable ssh_config", f"ssh -F {shlex.quote(path)} -G any") from error


@functools.lru_cache(maxsize=64)
def _host_keys(path: str, _mtime_ns: int) -> paramiko.HostKeys:
    """Return the parsed known_hosts file; parsing it again for every connection costs 10 ms each."""
    return paramiko.HostKeys(path)


@functools.lru_cache(maxsize=64)
def _private_key(path: str) -> paramiko.PKey | None:
    """Return the private key at `path`; None when it is encrypted (then only an agent can use it)."""
    try:
        return paramiko.PKey.from_path(path)
    except (paramiko.PasswordRequiredException, TypeError):
        return None  # TypeError is what cryptography raises for "password was not given"


@functools.lru_cache(maxsize=16)
def _packed(source: str) -> str:
    """Return `source` as it travels in argv; packing the probe takes 2 ms, and every node gets the same."""
    return base64.b64encode(zlib.compress(source.encode(), 9)).decode()


def _fabric_config() -> Config:
    """Return a Fabric configuration for one connection: reads no files, since paths and precedence are ours.

    It costs 0.2 ms and cannot be shared: a Connection writes into its own while it is made, which builds all of it anew, and
    another thread that reads it meanwhile finds half of it.
    """
    config: Config = Config(overrides={"load_ssh_configs": False})
    return config


class _UnknownHostKeyError(paramiko.SSHException):
    """The server's key is in none of the known_hosts files."""


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Refuse an unknown host key, telling its fingerprint."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise _UnknownHostKeyError(f"{key.get_name()} {key.fingerprint}")


def _target(ssh: Ssh) -> _Target:
    config = _ssh_config(ssh.config)
    try:
        found: Mapping[str, Any] = config.lookup(ssh.address) if config else {}
        if not ssh.user:
            getpass.getuser()  # what everybody falls back to in the end
    except (KeyError, OSError) as error:  # a uid without an entry, as in a container
        observed = f"uid {os.getuid()} has no name on this machine"
        raise UsageError(
            "ssh.user", observed, "the account to log in with", "state ssh.user in cluster.yaml, or export USER"
        ) from error
    keys = (ssh.key,) if ssh.key else tuple(str(Path(key).expanduser()) for key in found.get("identityfile", ()))
    return _Target(
        hostname=str(found.get("hostname", ssh.address)),
        port=ssh.port if ssh.port != 22 else int(found.get("port", 22)),
        user=ssh.user or found.get("user"),
        keys=keys,
        jump=ssh.jump or ("" if found.get("proxyjump", "none") == "none" else str(found["proxyjump"])),
        proxy_command="" if found.get("proxycommand", "none") == "none" else str(found["proxycommand"]),
    )


def _known_name(target: _Target) -> str:
    """Return the name under which known_hosts holds the key: `host`, or `[host]:port` off port 22."""
    return target.hostname if target.port == 22 else f"[{target.hostname}]:{target.port}"


def reached_at(node: Node) -> tuple[str, int]:
    """Return (host, port) that a connection to `node` really goes to, after the ssh_config of this machine."""
    target = _target(node.ssh)
    return target.hostname, target.port


def known_host_name(node: Node) -> str:
    """Return the name under which known_hosts of this machine holds the host key of `node`."""
    return _known_name(_target(node.ssh))


def known_host_keys(node: Node) -> list[tuple[str, str]]:
    """Return the host keys of `node` that this machine trusts, as (type, base64): the known_hosts files of the inventory."""
    name = known_host_name(node)
    found: dict[tuple[str, str], None] = {}
    for path in node.ssh.known_hosts:
        file = Path(path)
        if file.is_file():
            keys: Mapping[str, paramiko.PKey] = _host_keys(path, file.stat().st_mtime_ns).lookup(name) or {}
            found.update(dict.fromkeys((key_type, str(key.get_base64())) for key_type, key in keys.items()))
    return list(found)


def ssh_command(node: Node) -> str:
    """Return the `ssh` command line a person would type to reach `node`; for remedies."""
    target = _target(node.ssh)
    words = ["ssh"]
    if node.ssh.config:
        words += ["-F", node.ssh.config]
    if target.port != 22:
        words += ["-p", str(target.port)]
    for key in target.keys[:1]:
        words += ["-i", key]
    if target.jump:
        words += ["-J", target.jump]
    words.append(f"{target.user}@{target.hostname}" if target.user else target.hostname)
    return shlex.join(words)


# --------------------------------------------------------------------------- one connection


def _tcp_socket(hostname: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connected socket that notices a cut link within seconds. Raises OSError, socket.gaierror, TimeoutError."""
    connection = socket.create_connection((hostname, port), timeout=timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", TCP_USER_TIMEOUT_MS),
    ):
        if hasattr(socket, option):  # the controller may be a Mac, which lacks some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def _fabric_connection(ssh: Ssh, target: _Target, gateway: Connection | None) -> Connection:
    """Return an unopened Fabric connection that verifies host keys against the known_hosts files of `ssh`."""
    keys = [key for key in (_private_key(path) for path in target.keys if Path(path).is_file()) if key is not None]
    kwargs: dict[str, Any] = {
        "banner_timeout": BANNER_TIMEOUT_S,
        "auth_timeout": AUTH_TIMEOUT_S,
        "allow_agent": "SSH_AUTH_SOCK" in os.environ,
        "look_for_keys": not target.keys,
    }
    if len(keys) == 1:
        kwargs["pkey"] = keys[0]
    elif keys:
        kwargs["key_filename"] = list(target.keys)
    connection = Connection(
        target.hostname,
        user=target.user,
        port=target.port,
        config=_fabric_config(),
        gateway=gateway,
        connect_timeout=ssh.connect_timeout_s,
        connect_kwargs=kwargs,
    )
    name = _known_name(target)
    for path in ssh.known_hosts:
        file = Path(path)
        if not file.is_file():
            continue
        found = _host_keys(path, file.stat().st_mtime_ns).lookup(name)
        for key_type, key in (found or {}).items():
            connection.client.get_host_keys().add(name, key_type, key)
    connection.client.set_missing_host_key_policy(_Refuse())
    return connection


def _open_gateway(node: Node, target: _Target) -> Connection | None:
    """Open and return the connection to the node's jump host, None when it has none. Raises NodeError, saying so."""
    if not target.jump:
        return None
    user, _, rest = target.jump.rpartition("@")
    host, _, port = rest.partition(":")
    jump = Ssh(
        address=host,
        port=int(port or 22),
        user=user,
        key=node.ssh.key,
        config=node.ssh.config,
        known_hosts=node.ssh.known_hosts,
    )
    jump_target = _target(jump)
    gateway = _fabric_connection(jump, jump_target, None)
    try:
        gateway.connect_kwargs["sock"] = _tcp_socket(jump_target.hostname, jump_target.port, node.ssh.connect_timeout_s)
        gateway.open()
    except (OSError, EOFError, paramiko.SSHException) as error:
        told = _verdict(replace(node, ssh=replace(jump, connect_timeout_s=node.ssh.connect_timeout_s)), error)
        observed = f"its jump host {target.jump} could not be used: {told.observed}"
        raise NodeError(node.name, told.verdict, observed, told.expected, told.next_command) from error
    return gateway


def _direct_socket(node: Node, target: _Target) -> socket.socket | paramiko.ProxyCommand:
    """Return a socket to the node's sshd where there is no jump host. Raises OSError."""
    if target.proxy_command:
        return paramiko.ProxyCommand(target.proxy_command)
    return _tcp_socket(target.hostname, target.port, node.ssh.connect_timeout_s)


def _open(node: Node) -> tuple[Connection, Connection | None]:
    """Open and return (connection to the node, connection to its jump host or None). Raises whatever the stack raises."""
    target = _target(node.ssh)
    gateway = _open_gateway(node, target)
    connection = _fabric_connection(node.ssh, target, gateway)
    if gateway is None:
        connection.connect_kwargs["sock"] = _direct_socket(node, target)
    try:
        connection.open()
    except BaseException:
        if gateway is not None:
            gateway.close()
        raise
    return connection, gateway


KEY_FAMILIES = (
    ("ssh-ed25519",),
    ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    ("rsa-sha2-512", "rsa-sha2-256"),
)
"""Host key algorithms of which an sshd shows one key each; a connection shows only one family."""


def fetch_host_keys(node: Node) -> list[tuple[str, str]]:
    """Return the host keys that the sshd of `node` shows now, as (type, base64). Nobody logs in; nothing is verified.

    One key exchange for each family. The server proves that it holds the private key, not that it is the right machine.
    Raises NodeError.
    """
    target = _target(node.ssh)
    found: list[tuple[str, str]] = []
    gateway: Connection | None = None
    try:
        gateway = _open_gateway(node, target)
        for family in KEY_FAMILIES:
            key = _fetch_host_key(node, target, gateway, family)
            if key is not None:
                found.append((key.get_name(), str(key.get_base64())))
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise _verdict(node, error) from error
    finally:
        if gateway is not None:
            gateway.close()
    if not found:
        raise NodeError(node.name, Verdict.LOST, "its sshd shows no host key of a known type", "", f"{ssh_command(node)} -v")
    return found


def _fetch_host_key(node: Node, target: _Target, gateway: Connection | None, family: tuple[str, ...]) -> paramiko.PKey | None:
    """Return the host key of one family after one key exchange, None when the server has none."""
    if gateway is None:
        sock: Any = _direct_socket(node, target)
    else:
        sock = gateway.transport.open_channel("direct-tcpip", (target.hostname, target.port), ("", 0))
    transport = paramiko.Transport(sock)
    try:
        transport.banner_timeout = BANNER_TIMEOUT_S
        offered = transport.get_security_options()
        offered.key_types = tuple(name for name in family if name in offered.key_types)
        transport.start_client(timeout=AUTH_TIMEOUT_S)
        return transport.get_remote_server_key()
    except paramiko.ssh_exception.IncompatiblePeer:
        return None
    finally:
        transport.close()


def _forget_command(node: Node) -> str:
    """Return the command that drops the known host keys of `node` from the file that holds them."""
    name = known_host_name(node)
    for path in node.ssh.known_hosts:
        file = Path(path)
        if file.is_file() and _host_keys(path, file.stat().st_mtime_ns).lookup(name):
            return f"ssh-keygen -f {shlex.quote(path)} -R {shlex.quote(name)}"
    return f"ssh-keygen -R {shlex.quote(name)}"


def _verdict(node: Node, error: BaseException) -> NodeError:
    """Return the NodeError for what connecting to `node` raised; the order matters, the classes overlap."""
    target = _target(node.ssh)
    where = f"{target.hostname}:{target.port}"
    try_it = ssh_command(node)

    def verdict(kind: Verdict, observed: str, expected: str, next_command: str = try_it) -> NodeError:
        return NodeError(node.name, kind, observed, expected, next_command)

    if isinstance(error, socket.gaierror):
        return verdict(
            Verdict.DNS,
            f"the name {target.hostname!r} does not resolve here",
            "an address or a known name",
            f"getent hosts {shlex.quote(target.hostname)}",
        )
    if isinstance(error, paramiko.BadHostKeyException):
        observed = f"the host key of {where} changed: now {error.key.get_name()} {error.key.fingerprint}"
        return verdict(
            Verdict.HOST_KEY_CHANGED,
            observed,
            "the key in known_hosts; if the node was really reinstalled, drop the old key",
            _forget_command(node),
        )
    if isinstance(error, _UnknownHostKeyError):
        return verdict(
            Verdict.UNKNOWN_HOST_KEY,
            f"the host key of {where} is not known: {error}",
            "a key listed in known_hosts",
            f"r4090c provision ssh-trust --nodes {node.name}",
        )
    no_key = isinstance(error, paramiko.SSHException) and "no authentication methods" in str(error).lower()
    if no_key or isinstance(error, paramiko.AuthenticationException):
        encrypted = [key for key in target.keys if Path(key).is_file() and _private_key(key) is None]
        observed = f"login as {target.user or 'the current user'} refused by {where}"
        if encrypted:
            observed += f"; the key {encrypted[0]} is encrypted and no agent offers it"
        return verdict(
            Verdict.AUTH_FAILED,
            observed,
            "a key in the node's authorized_keys",
            f"ssh-copy-id {try_it.removeprefix('ssh ').replace('-J ', '-o ProxyJump=')}",
        )
    said = str(error).lower()
    # "No existing session": paramiko waited for no longer than for the connection itself, and went on without the banner.
    if isinstance(error, paramiko.SSHException) and ("banner" in said or "no existing session" in said):
        return verdict(
            Verdict.BANNER_TIMEOUT,
            f"{where} took the connection but sent no SSH banner",
            "an sshd that answers; is it frozen or out of memory?",
        )
    if isinstance(error, (TimeoutError, socket.timeout)):
        return verdict(
            Verdict.TIMEOUT,
            f"no answer from {where} in {node.ssh.connect_timeout_s:g} s",
            "a node that is up and a path that is not filtered",
        )
    if isinstance(error, ConnectionRefusedError):
        return verdict(Verdict.REFUSED, f"{where} refused the connection", "an sshd listening there")
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return verdict(
            Verdict.NO_ROUTE,
            f"no route to {where}: {error.strerror}",
            "a route to the node",
            f"ip route get {shlex.quote(target.hostname)}",
        )
    return verdict(Verdict.LOST, f"the connection to {where} failed: {error or type(error).__name__}", "a working SSH connection")


class Stream:
    """A running remote command whose standard output is read line by line while it runs."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def set_timeout(self, silent_s: float) -> None:
        """End `lines` when nothing has come for `silent_s`."""
        self._channel.settimeout(silent_s)

    def lines(self) -> Iterator[str]:
        """Yield lines until the command ends, the connection is lost or silent; a last line without newline counts."""
        buffer = b""
        while True:
            try:
                chunk = self._channel.recv(65_536)
            except OSError:
                chunk = b""
            if not chunk:
                break
            *whole, buffer = (buffer + chunk).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
        if buffer:
            yield buffer.decode(errors="replace")

    def send(self, line: str) -> None:
        """Send a line to the command's standard input; one that has gone takes none."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.sendall(line.encode() + b"\n")

    @property
    def rc(self) -> int | None:
        """Exit status once the command ended by itself; None while it runs and when the connection was lost."""
        return self._channel.recv_exit_status() if self._channel.exit_status_ready() and self._channel.exit_status >= 0 else None

    def close(self) -> None:
        """Stop reading; the remote side sees its standard streams close."""
        with contextlib.suppress(OSError, EOFError):  # the connection may just have been closed by another thread
            self._channel.close()


class Conversation:
    """A program of ours at work on a node (`Shell.converse`)."""

    def __init__(self, shell: Shell, channel: paramiko.Channel, timeout_s: float) -> None:
        self._shell, self._channel, self._timeout_s = shell, channel, timeout_s
        self._deadline = time.monotonic() + timeout_s

    def stop(self) -> None:
        """Tell the program to end what it does and to answer."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # it may have ended by itself
            self._channel.shutdown_write()

    def answer(self, told: Callable[[Any], None] = lambda event: None) -> Any:
        """Return the JSON answer; `told` is called for each event before it. Raises NodeError. The channel is closed."""
        node, retry = self._shell.node.name, ssh_command(self._shell.node)
        begun: list[bytes] = []  # of a line that has not ended: one may hold many MiB
        noise = ""
        try:
            for chunk in _received(self._channel.recv, self._deadline, self._channel):
                first, newline, rest = chunk.partition(b"\n")
                begun.append(first)
                if not newline:
                    continue
                *lines, begins = rest.split(b"\n")
                lines.insert(0, b"".join(begun))
                begun = [begins]
                for line in lines:
                    text = line.decode(errors="replace")
                    with contextlib.suppress(ValueError):
                        if text.startswith(EVENT_MARKER):
                            told(json.loads(text.removeprefix(EVENT_MARKER)))
                            continue
                        if text.startswith(MARKER):
                            return json.loads(text.removeprefix(MARKER))
                    noise = text.strip() or noise
            stderr = b"".join(_received(self._channel.recv_stderr, self._deadline, self._channel)).decode(errors="replace")
        except TimeoutError as error:
            raise NodeError(node, Verdict.TIMEOUT, f"no answer within {self._timeout_s:g} s", "", retry) from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._shell._lost(error) from error
        finally:
            with contextlib.suppress(OSError, EOFError):
                self._channel.close()
        if not self._shell.alive:
            raise self._shell._lost("")
        last = (stderr.strip().splitlines() or [noise or "nothing was printed"])[-1]
        raise NodeError(node, Verdict.LOST, f"no whole answer: {last[-300:]}", "one JSON answer", retry)


class Shell:
    """One connection to one node, opened by the constructor. Raises NodeError with its verdict."""

    def __init__(self, node: Node) -> None:
        self.node = node
        started = time.monotonic()
        try:
            self._connection, self._gateway = _open(node)
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise _verdict(node, error) from error
        self.connect_s = time.monotonic() - started

    @property
    def alive(self) -> bool:
        """True while the transport believes in the connection."""
        return bool(self._connection.is_connected)

    def close(self) -> None:
        """Close the connection and its jump host."""
        with contextlib.suppress(OSError, EOFError):
            self._connection.close()
        if self._gateway is not None:
            with contextlib.suppress(OSError, EOFError):
                self._gateway.close()

    def _lost(self, error: BaseException | str) -> NodeError:
        observed = f"the connection broke: {str(error) or 'closed by the node'}"
        return NodeError(self.node.name, Verdict.LOST, observed, "", ssh_command(self.node))

    def _exec(self, argv: Sequence[str], env: Mapping[str, str] | None) -> paramiko.Channel:
        """Start `argv` on the node; every word is quoted."""
        words = [*(["env", *(f"{key}={value}" for key, value in env.items())] if env else []), *argv]
        command = shlex.join(words)
        if len(command) > MAX_COMMAND_BYTES:
            raise UsageError(
                self.node.name,
                f"a command of {len(command)} bytes",
                f"at most {MAX_COMMAND_BYTES} bytes; send long data on stdin",
            )
        started = time.monotonic()
        try:
            channel: paramiko.Channel = self._connection.transport.open_session(timeout=AUTH_TIMEOUT_S)
            # paramiko awaits the answer to this without a limit; a session that froze meanwhile never gives one.
            limit = threading.Timer(AUTH_TIMEOUT_S, Stream(channel).close)
            limit.daemon = True
            limit.start()
            try:
                channel.exec_command(command)
            finally:
                limit.cancel()
        except (OSError, EOFError, AttributeError, paramiko.SSHException) as error:
            if not self.alive or time.monotonic() - started < AUTH_TIMEOUT_S:
                raise self._lost(error) from error
            self.close()  # frozen, out of memory: whether a new connection fares better is for the next who asks
            observed = f"it is connected, but starts nothing within {AUTH_TIMEOUT_S:g} s"
            raise NodeError(self.node.name, Verdict.TIMEOUT, observed, "", ssh_command(self.node)) from error
        return channel

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30.0, env: Mapping[str, str] | None = None
    ) -> Completed:
        """Run `argv` and return what it printed.

        After `timeout_s` NodeError is raised, and the remote process is NOT ended by that: what runs on a node owns its own
        timeout. Output is decoded as UTF-8 with replacement.
        """
        started = time.monotonic()
        channel = self._exec(argv, env)
        deadline = started + timeout_s
        errors: list[bytes] = []

        def drain() -> None:
            with contextlib.suppress(OSError):  # the main thread tells a timeout
                errors.extend(_received(channel.recv_stderr, deadline, channel))

        def feed() -> None:
            with contextlib.suppress(OSError, EOFError):  # a program may well end before it has read all
                channel.sendall(stdin)
                channel.shutdown_write()

        # Each way has a thread of its own: a program that answers while it is still being fed would block for ever else.
        # What surely fits into the channel's first window needs none.
        threads = [threading.Thread(target=drain, daemon=True)]
        try:
            channel.settimeout(timeout_s)
            if len(stdin) <= FITS_WINDOW_BYTES:
                feed()
            else:
                threads.append(threading.Thread(target=feed, daemon=True))
            for thread in threads:
                thread.start()
            output = b"".join(_received(channel.recv, deadline, channel))
            threads[0].join(max(0.0, deadline - time.monotonic()))
            if not channel.status_event.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
        except TimeoutError as error:
            observed = f"no answer to {argv[0]!r} within {timeout_s:g} s"
            raise NodeError(self.node.name, Verdict.TIMEOUT, observed, "", ssh_command(self.node)) from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._lost(error) from error
        finally:
            channel.close()
        if channel.exit_status == -1 and not self.alive:
            raise self._lost("")
        text = b"".join(errors).decode(errors="replace")
        return Completed(channel.exit_status, output.decode(errors="replace"), text, time.monotonic() - started)

    def ask(self, source: str, request: object, *, timeout_s: float = 30.0, python: str = "python3") -> Answer:
        """Run `source` (Python >= 3.8, standard library, defines `main(request)`) on the node; return main's JSON answer.

        The node's process ends itself after `timeout_s`. Raises NodeError: no answer in time, no python3, no whole answer, a
        login shell that does not run commands, lost connection.
        """
        argv = [python, "-I", "-S", "-c", _BOOTSTRAP, str(max(1, int(timeout_s))), _packed(source)]
        sent = time.time()
        done = self.run(argv, stdin=json.dumps(request).encode(), timeout_s=timeout_s + 2.0)
        received = time.time()
        noise, marker, rest = done.stdout.rpartition("\n" + MARKER)
        if marker:
            with contextlib.suppress(ValueError):
                return Answer(json.loads(rest.partition("\n")[0]), noise, sent, received)
        if done.rc in (-1, 128 + signal.SIGALRM) and done.duration_s >= max(1, int(timeout_s)):
            observed = f"no answer within {timeout_s:g} s"
            raise NodeError(self.node.name, Verdict.TIMEOUT, observed, "", ssh_command(self.node))
        if done.rc == 127 or (done.rc == 126 and "python" in done.stderr):
            remedy = f"{ssh_command(self.node)} sudo apt install -y python3"
            raise NodeError(
                self.node.name,
                Verdict.NO_PYTHON3,
                f"{python} does not run: {done.stderr.strip()[-200:]}",
                "Python >= 3.8",
                remedy,
            )
        said = done.stdout.strip().splitlines()
        if said and not marker and not done.stderr.strip():
            raise NodeError(
                self.node.name,
                Verdict.NOISY_SHELL,
                f"the login shell does not run commands, it says: {said[-1][-300:]}",
                "a login shell that runs `sh -c COMMAND` and prints nothing else",
                f"{ssh_command(self.node)} true",
            )
        last = (done.stderr.strip().splitlines() or [f"exit status {done.rc}"])[-1]
        raise NodeError(
            self.node.name,
            Verdict.LOST,
            f"no whole answer (rc {done.rc}): {last[-300:]}",
            "one JSON answer",
            ssh_command(self.node),
        )

    def converse(self, source: str, request: object, *, timeout_s: float) -> Conversation:
        """Start `source` as `ask` does and return while it works: it tells events, and can be asked to stop. Raises NodeError.

        `main(request)` is to end soon after its standard input has ended, and to answer all the same.
        """
        argv = ["python3", "-I", "-S", "-c", _BOOTSTRAP_CONVERSE, str(max(1, int(timeout_s))), _packed(source)]
        channel = self._exec(argv, None)
        try:
            channel.settimeout(timeout_s)
            channel.sendall(json.dumps(request).encode() + b"\n")
        except (OSError, EOFError, paramiko.SSHException) as error:
            channel.close()
            raise self._lost(error) from error
        return Conversation(self, channel, timeout_s + 2.0)

    def stream(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Stream:
        """Start `argv` and return a Stream over its output. Raises NodeError when it cannot be started."""
        return Stream(self._exec(argv, env))

    def put(self, path: str, data: bytes, *, mode: int = 0o644, timeout_s: float = 120.0) -> None:
        """Write `data` to `path` on the node: aside first, then renamed; parent folders are made. Raises NodeError."""
        script = (
            "import os,sys;p=sys.argv[1];os.makedirs(os.path.dirname(p),exist_ok=True);t=p+'.tmp%d'%os.getpid();"
            "f=os.fdopen(os.open(t,os.O_WRONLY|os.O_CREAT|os.O_TRUNC,int(sys.argv[2],8)),'wb');"
            "f.write(sys.stdin.buffer.read());f.flush();os.fsync(f.fileno());f.close();os.replace(t,p)"
        )
        done = self.run(["python3", "-I", "-S", "-c", script, path, oct(mode)], stdin=data, timeout_s=timeout_s)
        if done.rc != 0:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.rc}"])[-1]
            raise NodeError(
                self.node.name,
                Verdict.LOST,
                f"cannot write {path}: {last}",
                "a writable folder with space",
                f"{ssh_command(self.node)} df -h",
            )


def _received(receive: Callable[[int], bytes], deadline: float, channel: paramiko.Channel) -> Iterator[bytes]:
    """Yield chunks until end of file. Raises TimeoutError at `deadline` (monotonic seconds), OSError beyond MAX_OUTPUT_BYTES."""
    room = MAX_OUTPUT_BYTES
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:  # what comes without a pause never times out by itself
            raise TimeoutError
        channel.settimeout(max(0.001, left_s))
        chunk = receive(1 << 18)
        if not chunk:
            return
        room -= len(chunk)
        if room < 0:
            raise OSError(errno.EMSGSIZE, f"more than {MAX_OUTPUT_BYTES >> 20} MiB came from the node")
        yield chunk


# --------------------------------------------------------------------------- all connections


class Fleet:
    """One Shell a node, opened when first needed and reused; a context manager that closes them all."""

    def __init__(self, nodes: Sequence[Node], pool: int = 32) -> None:
        self.nodes = {node.name: node for node in nodes}
        self._pool = pool
        self._shells: dict[str, Shell] = {}
        self._locks = {node.name: threading.Lock() for node in nodes}
        self._closed = False

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shell(self, name: str) -> Shell:
        """Return the node's live connection, opening or reopening it. Raises NodeError."""
        with self._locks[name]:
            shell = self._shells.get(name)
            if shell is None or not shell.alive:
                if shell is not None:
                    shell.close()
                self._shells.pop(name, None)
                if self._closed:
                    raise NodeError(name, Verdict.LOST, "the fleet is closed")
                shell = self._shells[name] = Shell(self.nodes[name])
            return shell

    def connected(self) -> list[str]:
        """Return the nodes with a connection that is believed in."""
        return [name for name, shell in list(self._shells.items()) if shell.alive]

    def map(self, function: Callable[[Shell], R], nodes: Iterable[str] | None = None) -> dict[str, R | NodeError]:
        """Return `function(shell)` or the NodeError for each node, all in parallel (at most `pool` at once).

        The order is the inventory's. Any other exception of `function` is raised. On Ctrl-C the connections are closed, which
        ends the waiting threads; the fleet itself stays usable, so that what was begun can be stopped.
        """
        wanted = set(self.nodes if nodes is None else nodes)
        names = [name for name in self.nodes if name in wanted] + sorted(wanted - set(self.nodes))

        def one(name: str) -> R | NodeError:
            try:
                return function(self.shell(name))
            except NodeError as error:
                return error

        if len(names) == 1:
            return {names[0]: one(names[0])}
        executor = ThreadPoolExecutor(max_workers=max(1, min(self._pool, len(names))))
        try:
            futures = {name: executor.submit(one, name) for name in names}
            pending = set(futures.values())
            while pending:
                _, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
            return {name: future.result() for name, future in futures.items()}
        except KeyboardInterrupt:
            for name in names:
                self.drop(name)
            raise
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def drop(self, name: str) -> None:
        """Forget the node's connection, so that the next use opens a new one."""
        shell = self._shells.pop(name, None)
        if shell is not None:
            shell.close()

    def close(self) -> None:
        """Close every connection."""
        self._closed = True
        for shell in list(self._shells.values()):
            shell.close()
