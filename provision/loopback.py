"""The cluster that `r4090c demo` runs on: real sshd's on 127.0.0.1, started as the current user; root is not needed.

    with LoopbackCluster(nodes=2) as cluster_file:
        ...                      # demo01 and demo02 answer ssh with the key and the host keys that cluster_file names

Keys, configuration and logs lie in one temporary folder of mode 0700. Between us and the sshd's stands a keeper process: it
is told through a pipe when to end, and a pipe closes however we end, by Ctrl-C, an exception or SIGKILL. As a child
subreaper (prctl(2)) it inherits every process that a login started and left behind, detached ones too, so it can end all.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from r4090c.errors import CouldNotTell, UsageError

ADDRESS = "127.0.0.1"

START_S = 30.0
"""How long the sshd's may take until they listen (0.1 s measured for two; est. for a busy machine)."""

STOP_S = 10.0
"""How long the keeper may take to end everything; SIGKILL ends a process at once unless it hangs in the kernel (est.)."""

GRACE_S = 1.0
"""est.: what a process gets between TERM and KILL."""

PORT_TRIES = 3
"""A free port may be taken by another program before sshd binds it; then all start again with other ports."""

LOG_LINES = 6
"""How many last lines of a log an error shows."""

SSHD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The whole environment of an sshd, so nothing of ours (PYTHONDONTWRITEBYTECODE, PYTHONPATH …) leaks into the nodes."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h"""

PACKAGES = Path(__file__).resolve().parents[1]
"""Where `provision` and `r4090c` lie; the keeper starts there."""


@dataclass(frozen=True, slots=True)
class _DemoNode:
    name: str
    folder: Path
    port: int

    @property
    def log(self) -> Path:
        return self.folder / "sshd.log"


class LoopbackCluster:
    """A cluster of sshd's on this machine, as long as the `with` block lasts; entering yields the path of its cluster.yaml.

    `nodes`: how many. `python`: the Python of all nodes. `shared`: the shared folder, by default `shared` in `folder`.
    `folder`: where things lie, by default a temporary folder that is removed at the end. A given one stays, and `shared`
    in it; only what runs the cluster (keys, configuration, logs, cluster.yaml) is in a folder below it that is removed.

    Raises UsageError for a senseless `nodes`, CouldNotTell when sshd is missing, refuses this account or does not start.
    """

    def __init__(
        self, nodes: int = 2, python: str = sys.executable, folder: Path | None = None, shared: Path | None = None
    ) -> None:
        if not 1 <= nodes <= 99:
            raise UsageError("nodes of the demo", str(nodes), "1 to 99", "r4090c demo --help")
        self.nodes = nodes
        self.python = str(Path(python).absolute())
        self.folder = folder
        self.shared = shared
        self._keeper: subprocess.Popen[str] | None = None
        self._own_folder: Path | None = None

    def __enter__(self) -> Path:
        sshd, ssh_keygen = _find_programs()
        account = _usable_account()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(
                mode=0o755, exist_ok=True
            )  # root's sshd does not start without it; stays, as any sshd's would
        try:
            if self.folder is not None:
                self.folder = self.folder.absolute()
                self.folder.mkdir(parents=True, exist_ok=True)
            self._own_folder = Path(tempfile.mkdtemp(prefix="r4090c-demo-", dir=self.folder))
            shared = self.shared or (self.folder or self._own_folder) / "shared"
            shared.mkdir(parents=True, exist_ok=True)
            _make_key(ssh_keygen, self._own_folder / "id_ed25519", account.pw_name)
            for attempt in range(PORT_TRIES):
                nodes = self._write_nodes(ssh_keygen)
                if self._start(sshd, nodes, last_try=attempt == PORT_TRIES - 1):
                    break
            return self._write_cluster_file(nodes, account.pw_name, shared.absolute())
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _write_nodes(self, ssh_keygen: str) -> list[_DemoNode]:
        """Write each node's host key, sshd_config and known_hosts line for ports that are free now."""
        own = self._folder_in_use()
        names = [f"demo{index + 1:02d}" for index in range(self.nodes)]
        nodes = [_DemoNode(name, own / name, port) for name, port in zip(names, _free_ports(self.nodes), strict=True)]
        known_hosts = []
        for node in nodes:
            node.folder.mkdir(exist_ok=True)
            key = node.folder / "host_key"
            if not key.exists():
                _make_key(ssh_keygen, key, node.name)
            known_hosts.append(f"[{ADDRESS}]:{node.port} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}\n")
            (node.folder / "sshd_config").write_text(_sshd_config(node, own / "id_ed25519.pub"))
            node.log.unlink(missing_ok=True)
        (own / "known_hosts").write_text("".join(known_hosts))
        return nodes

    def _start(self, sshd: str, nodes: list[_DemoNode], last_try: bool) -> bool:
        """Start the keeper and return True once all sshd's listen, False when a port was taken meanwhile."""
        own = self._folder_in_use()
        with (own / "keeper.log").open("wb") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "provision.loopback", str(os.getpid()), str(own), sshd, *(node.name for node in nodes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=PACKAGES,
                env={**os.environ, "PYTHONPATH": str(PACKAGES)},
                start_new_session=True,  # Ctrl-C in our terminal is for us alone: we tell the keeper
            )
        deadline = time.monotonic() + START_S
        waiting = list(nodes)
        while waiting:
            waiting = [node for node in waiting if f"Server listening on {ADDRESS} port {node.port}." not in _read(node.log)]
            ended = self._ended()
            if ended is not None:
                text = "".join(_read(node.log) for node in nodes)
                self._stop_keeper()
                if "Address already in use" in text and not last_try:
                    return False
                raise self._not_up(own, f"{ended} ended at once", nodes)
            if waiting and time.monotonic() > deadline:
                raise self._not_up(own, f"{waiting[0].name} does not listen after {START_S:g} s", waiting)
            time.sleep(0.01)
        return True

    def _ended(self) -> str | None:
        """Return who has ended, an sshd by the name of its node or the keeper, or None."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        if select.select([self._keeper.stdout], [], [], 0)[0]:
            return f"the sshd of {line}" if (line := self._keeper.stdout.readline().strip()) else "the keeper"
        return None

    @staticmethod
    def _not_up(own: Path, observed: str, nodes: list[_DemoNode]) -> CouldNotTell:
        lines = [line for path in (own / "keeper.log", *(node.log for node in nodes)) for line in _read(path).splitlines()]
        last = "\n    ".join(lines[-LOG_LINES:]) or "(no log)"
        return CouldNotTell(
            "sshd on 127.0.0.1",
            f"{observed}; the last lines of its log:\n    {last}",
            "an sshd that runs as this account",
            f"{shlex.quote(_which('sshd') or 'sshd')} -V    (report its version with the lines above)",
        )

    def _write_cluster_file(self, nodes: list[_DemoNode], user: str, shared: Path) -> Path:
        import yaml

        own = self._folder_in_use()
        wish = {
            "name": "demo",
            "ssh": {"user": user, "key": str(own / "id_ed25519"), "known_hosts": [str(own / "known_hosts")], "config": ""},
            "nodes": [{"name": node.name, "address": ADDRESS, "gpus": 0, "ssh": {"port": node.port}} for node in nodes],
            "network": {"kind": "loopback"},
            "storage": {"kind": "local"},
            "paths": {"shared": str(shared), "python": self.python},
        }
        path = own / "cluster.yaml"
        path.write_text(yaml.safe_dump(wish, sort_keys=False))
        return path

    def _folder_in_use(self) -> Path:
        assert self._own_folder is not None
        return self._own_folder

    def _stop_keeper(self) -> None:
        """Have the keeper end everything below it and wait for its end."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        try:
            keeper.communicate("stop\n", timeout=STOP_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.communicate()

    def _end(self) -> None:
        try:
            self._stop_keeper()
        finally:
            if self._own_folder is not None:
                shutil.rmtree(self._own_folder, ignore_errors=True)
                self._own_folder = None


# ---------------------------------------------------------------------------------------------- what is needed


def _which(program: str) -> str | None:
    """Return the absolute path of a program; sshd is often outside of an ordinary user's PATH."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{SSHD_PATH}")


def _find_programs() -> tuple[str, str]:
    """Return the paths of sshd and ssh-keygen. Raises CouldNotTell when one is not installed."""
    found = {name: _which(name) for name in ("sshd", "ssh-keygen")}
    for name, package in (("sshd", "openssh-server"), ("ssh-keygen", "openssh-client")):
        if found[name] is None:
            raise CouldNotTell(
                name,
                "is not installed",
                "OpenSSH, which the demo starts on 127.0.0.1 as an ordinary program of yours",
                f"sudo apt install {package}",
            )
    return str(found["sshd"]), str(found["ssh-keygen"])


def _usable_account() -> pwd.struct_passwd:
    """Return the current account. Raises CouldNotTell when sshd would refuse to log it in."""
    uid = os.geteuid()
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        raise CouldNotTell(
            f"account with uid {uid}",
            "has no entry in the passwd database",
            "an account that sshd can look up",
            "run the demo as an ordinary user of this machine",
        ) from None
    shell = account.pw_shell or "/bin/sh"
    if Path(shell).name in ("nologin", "false") or not os.access(shell, os.X_OK):
        raise CouldNotTell(
            f"account {account.pw_name}",
            f"its shell is {shell}",
            "a shell that runs commands: sshd starts one for each",
            f"sudo chsh -s /bin/sh {account.pw_name}    (or run the demo as another user)",
        )
    if uid == 0 and _is_locked(account.pw_name):
        raise CouldNotTell(
            f"account {account.pw_name}",
            "is locked (`!` in /etc/shadow), so sshd refuses it",
            "an account that may log in",
            "run the demo as an ordinary user, without sudo",
        )
    return account


def _is_locked(name: str) -> bool:
    """Return whether root's sshd would call the account locked: its password field starts with "!" (sshd(8))."""
    for line in _read(Path("/etc/shadow")).splitlines():
        account, _, rest = line.partition(":")
        if account == name:
            return rest.startswith("!")
    return False


def _free_ports(count: int) -> list[int]:
    """Return `count` different ports that were free on 127.0.0.1 a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((ADDRESS, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _make_key(ssh_keygen: str, path: Path, comment: str) -> None:
    done = subprocess.run(
        [ssh_keygen, "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise CouldNotTell("ssh-keygen", done.stderr.strip(), f"a new key {path}", f"df -h {shlex.quote(str(path.parent))}")


def _sshd_config(node: _DemoNode, authorized_keys: Path) -> str:
    config = {
        "ListenAddress": f"{ADDRESS}:{node.port}",
        "HostKey": f'"{node.folder}/host_key"',
        "PidFile": "none",
        "AuthorizedKeysFile": f'"{authorized_keys}" .ssh/authorized_keys',
        "StrictModes": "no",  # the folder is ours alone (0700), its parent /tmp is everybody's
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "no",
        "UseDNS": "no",
        "PrintMotd": "no",
        "PrintLastLog": "no",
        "X11Forwarding": "no",
        "MaxStartups": "100",
        "MaxSessions": "100",
        "LogLevel": "INFO",
        "SetEnv": f"R4090C_DEMO_NODE={node.name}",
        "Subsystem": "sftp internal-sftp",
    }
    return "".join(f"{key} {value}\n" for key, value in config.items())


def _read(path: Path) -> str:
    """Return the text of a file, empty when there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------- the keeper's process


def keep(owner_pid: int, own: Path, sshd: str, names: list[str]) -> None:
    """Run one sshd per name until the owner says so or ends, then end every process that came of them.

    Writes the name of an sshd that ends to stdout. When the owner ends without a word, the folder `own` is removed too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper_pid = os.getpid()

    def die_with_keeper() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper_pid:  # it ended before the line above
            os._exit(1)

    word = ""
    try:
        running: dict[int, str] = {}
        started = []  # keeps the Popen objects: their children are reaped by pid below, together with the inherited ones
        for name in names:
            with (own / name / "sshd.log").open("ab") as log:
                process = subprocess.Popen(
                    [sshd, "-D", "-e", "-f", str(own / name / "sshd_config")],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={"PATH": SSHD_PATH},
                    start_new_session=True,
                    preexec_fn=die_with_keeper,  # noqa: PLW1509  (this process has one thread)
                )
            running[process.pid] = name
            started.append(process)
        while os.getppid() == owner_pid:
            for pid in _reap():
                if pid in running:
                    with suppress(BrokenPipeError):
                        print(running.pop(pid), flush=True)  # noqa: T201  (the protocol with the owner)
            if select.select([sys.stdin], [], [], 0.05)[0]:
                word = sys.stdin.readline()
                break
    finally:
        _end_children()
        if not word:
            shutil.rmtree(own, ignore_errors=True)


def _reap() -> list[int]:
    """Reap every ended child, own and inherited, and return their pids."""
    ended = []
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended.append(pid)
    return ended


def _end_children() -> None:
    """End this process's children until there are none: TERM, a grace, KILL. Those of a killed child come to us, the subreaper.

    The grace is for login shells: one that is killed in the midst of the user's own rc files may leave their locks behind.
    Only direct children are signalled. Nobody but us can reap them, so none of these pids can mean another process.
    """
    told: set[int] = set()
    kill_from = time.monotonic() + GRACE_S
    while children := _children():
        late = time.monotonic() > kill_from
        for pid in children:
            if late or pid not in told:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                told.add(pid)
        _reap()
        time.sleep(0.005)


def _children() -> list[int]:
    """Return the pids of this process's children (/proc/<pid>/stat, field 4; the name in field 2 may hold anything)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _read(entry / "stat").rpartition(")")[2].split()
            if len(fields) > 1 and int(fields[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _terminate)
    keep(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
