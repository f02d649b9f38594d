"""The lab as a whole: up, down, and the faults in between."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.lab import node as node_files
from tests.lab import processes, wiring
from tests.lab.node import LabNode
from tests.lab.processes import Process
from tests.lab.wiring import ENVIRONMENT, LabError, tool

__all__ = ["Lab", "LabError", "take_down", "why_not"]

REPOSITORY = Path(__file__).resolve().parents[2]

READY_S = 60.0
"""How long the sshd's of a lab may take to answer (32 nodes take about 2 s on two cores)."""

NODE_PROCESSES = ("nsenter", "unshare", "bash")
"""Names of the processes that carry a node's init script as an argument: the node itself, from start to pid 1."""


def why_not() -> str | None:
    """Return why no lab can be had here, or None when one can."""
    if os.geteuid() != 0:
        return "the lab needs root"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(program, path=ENVIRONMENT["PATH"]) is None:
            return f"the lab needs `{program}` (package {package})"
    if node_files.sshd_path() is None or shutil.which("ssh-keygen", path=ENVIRONMENT["PATH"]) is None:
        return "the lab needs sshd and ssh-keygen (package openssh-server)"
    unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    links = "ip link add name v0 type veth peer name v1 && ip link add name br0 type bridge"
    attempt = f"{links} && mount -t sysfs sysfs /sys && mount -t tmpfs t /tmp"
    done = subprocess.run([*unshare, "sh", "-c", attempt], capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode != 0:
        return f"namespaces, veth, bridge or mounts are not permitted here: {done.stderr.strip()}"
    return None


class Lab:
    """A running lab in the folder `directory`. As a context manager it goes down at the end of the block.

    A lab belongs to the process that brought it up: should that end in any way, even by SIGKILL, a guard process takes
    the lab down. `outlive_me` (what `python -m tests.lab up` uses) ends the guard once the lab is up.
    """

    def __init__(self, directory: Path, state: Mapping[str, Any]) -> None:
        self.directory = directory
        self.subnet: str = state["subnet"]
        self.controller_address: str = state["controller"]
        self.switch: str = state["switch"]
        self.link: str = state["link"]
        self.token: str = state["token"]
        self.nodes: dict[str, LabNode] = {
            name: LabNode(name, entry["address"], entry["namespace"], directory / "nodes" / name)
            for name, entry in state["nodes"].items()
        }
        self._guard: subprocess.Popen[bytes] | None = None
        self._started: dict[str, subprocess.Popen[bytes]] = {}  # the nodes that this object turned on

    # ------------------------------------------------------------------------------------------ up and down

    @classmethod
    def up(
        cls,
        directory: Path | str,
        nodes: int = 4,
        *,
        python: str = sys.executable,
        gpus: int = 0,
        trust: bool = True,
        outlive_me: bool = False,
    ) -> Lab:
        """Bring up `nodes` nodes and return the lab once every sshd answers. An earlier lab in `directory` goes down first.

        `trust`: every node logs in to every node by its name, as `provision ssh-trust` leaves them.

        Raises LabError when it cannot be; whatever was made by then is gone again, after Ctrl-C too.
        """
        reason = why_not()
        if reason:
            raise LabError(reason)
        if not 1 <= nodes <= wiring.MOST_NODES:
            raise LabError(f"{nodes} nodes: a lab has 1 to {wiring.MOST_NODES}")
        directory = Path(directory).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        python = str(Path(python).absolute())
        keep = [directory, REPOSITORY, *node_files.python_folders(python)]
        for mount_point, _, _ in node_files.FRESH:
            node_files.kept_below(mount_point, keep)  # says no before anything is made
        token = secrets.token_hex(3)
        guard = _start_guard(directory, token)
        try:
            with wiring.locked(directory / "lock") as lock:
                _tear_down(directory)
                lab = cls._make(directory, token, nodes, keep, python, gpus, trust, lock)
            if outlive_me:
                _dismiss(guard)
            else:
                lab._guard = guard
        except BaseException:
            with wiring.locked(directory / "lock"):
                _tear_down(directory, token)
            _dismiss(guard)
            raise
        return lab

    @classmethod
    def _make(
        cls, directory: Path, token: str, count: int, keep: list[Path], python: str, gpus: int, trust: bool, lock: int
    ) -> Lab:
        prefix = f"r4lab-{token}"
        state: dict[str, Any] = {
            "token": token,
            "prefix": prefix,
            "switch": f"{prefix}-switch",
            "link": f"r4l-{token}",
            "nodes": {},
        }
        with wiring.locked(wiring.allocation_lock()):
            subnet = wiring.free_subnet()
            state["subnet"] = str(subnet)
            state["controller"] = str(subnet[1])
            for index in range(count):
                name = f"node{index + 1:02d}"
                state["nodes"][name] = {"address": str(subnet[wiring.FIRST_HOST + index]), "namespace": f"{prefix}-{name}"}
            lab = cls(directory, state)
            _write_json(directory / "lab.json", state)  # before anything is made: `down` must know what to look for
            lab._wire(subnet.prefixlen, lock)  # from here on the address of our link says that the subnet is taken
        lab._write_files(subnet.prefixlen, keep, python, gpus, trust)
        for node in lab.nodes.values():
            lab._start(node)
        lab._wait_ready(list(lab.nodes.values()))
        return lab

    def _wire(self, prefix_length: int, lock: int) -> None:
        namespaces = [self.switch, *(node.namespace for node in self.nodes.values())]
        links = [f"link add name {self.link} type veth peer name controller netns {self.switch}"]
        links += [
            f"link add name {node.name} netns {self.switch} type veth peer name eth0 netns {node.namespace}"
            for node in self.nodes.values()
        ]
        here = [*(f"netns add {name}" for name in namespaces), *links]
        here += [f"address add {self.controller_address}/{prefix_length} dev {self.link}", f"link set {self.link} up"]
        ports = ["controller", *self.nodes]
        bridge = ["link set lo up", "link add name br0 type bridge stp_state 0", "link set br0 up"]
        tool("ip", "-batch", "-", stdin="\n".join(here) + "\n", keep_open=[lock])
        switch = [*bridge, *(f"link set {port} master br0 up" for port in ports)]
        tool("ip", "-netns", self.switch, "-batch", "-", stdin="\n".join(switch) + "\n", keep_open=[lock])

    def _write_files(self, prefix_length: int, keep: list[Path], python: str, gpus: int, trust: bool) -> None:
        self.shared.mkdir(exist_ok=True)
        shutil.rmtree(self.directory / "nodes", ignore_errors=True)
        hosts = {"controller": self.controller_address, **{node.name: node.address for node in self.nodes.values()}}
        for node in self.nodes.values():
            for folder in ("bin", "home", "etc", "stage"):
                (node.folder / folder).mkdir(parents=True)
            (node.folder / "home").chmod(0o700)
            os.mkfifo(node.folder / "init.fifo", 0o600)
            node_files.write_etc(node, hosts)
            node_files.write_sshd(node, self.directory / "authorized_keys")
            node_files.write_init_script(node, prefix_length, keep, python)
            node_files.write_python3(node, python)
        for old in (self.key, self.key.with_suffix(".pub")):
            old.unlink(missing_ok=True)
        with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2)) as pool:
            lines = list(pool.map(node_files.make_host_key, self.nodes.values()))
        tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(self.key))
        self.known_hosts.write_text("".join(lines))
        shutil.copyfile(self.key.with_suffix(".pub"), self.directory / "authorized_keys")
        if trust:
            for node in self.nodes.values():
                node_files.write_trust(node, self.key, self.known_hosts)
        self._write_cluster_file(python, gpus)

    def _write_cluster_file(self, python: str, gpus: int) -> None:
        import yaml

        wish: dict[str, Any] = {
            "name": "lab",
            "ssh": {"user": "root", "key": str(self.key), "known_hosts": [str(self.known_hosts)], "config": ""},
            "nodes": [{"name": node.name, "address": node.address, "gpus": gpus} for node in self.nodes.values()],
            "network": {"kind": "tcp", "subnet": self.subnet, "mtu": 1500},
            "storage": {"kind": "local"},
            "paths": {"shared": str(self.shared), "python": python},
            # The nodes share this machine with whatever tests run beside: a slow answer says nothing about a node here.
            "expect": {"ssh_slow_warn_s": 30, "clock_skew_warn_s": 2},
        }
        nofile = node_files.limits()[1]
        if gpus and nofile < 65_536:  # the preflight's default; here even root may not raise the limit
            wish["expect"]["nofile_min"] = nofile
        self.cluster_file.write_text(yaml.safe_dump(wish, sort_keys=False))

    @classmethod
    def attach(cls, directory: Path | str) -> Lab:
        """Return the lab that is up in `directory`; raises LabError when there is none. It is not taken down at exit."""
        directory = Path(directory).resolve()
        state = _read_state(directory)
        if state is None:
            raise LabError(f"no lab is up in {directory}; start one with: python -m tests.lab up --nodes 4 --dir {directory}")
        return cls(directory, state)

    def down(self) -> None:
        """Take the lab down: processes, links, namespaces and with them all mounts. Idempotent. `shared` and the logs stay."""
        take_down(self.directory)
        for process in self._started.values():
            process.wait()
        self._started.clear()
        if self._guard is not None:
            _dismiss(self._guard)
            self._guard = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    # ------------------------------------------------------------------------------------------ where things are

    @property
    def cluster_file(self) -> Path:
        """The cluster.yaml of this lab."""
        return self.directory / "cluster.yaml"

    @property
    def shared(self) -> Path:
        """The shared folder: the same path on every node and outside."""
        return self.directory / "shared"

    @property
    def key(self) -> Path:
        """The client's private key."""
        return self.directory / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The right host keys of all nodes, by name and by address."""
        return self.directory / "known_hosts"

    def node(self, name: str) -> LabNode:
        """Return one node; raises LabError with the names there are."""
        try:
            return self.nodes[name]
        except KeyError:
            raise LabError(f"no node {name!r} in this lab; it has {', '.join(self.nodes)}") from None

    def address(self, name: str) -> str:
        """Return a node's address."""
        return self.node(name).address

    def bin(self, name: str) -> Path:
        """Return the folder that the node sees as /usr/local/bin."""
        return self.node(name).folder / "bin"

    def home(self, name: str) -> Path:
        """Return root's home on the node; the same path inside and outside."""
        return self.node(name).folder / "home"

    def stand_in(self, name: str, program: str, text: str) -> Path:
        """Put an executable script `program` into the node's /usr/local/bin and return its path outside."""
        path = self.bin(name) / program
        path.write_text(text)
        path.chmod(0o755)
        return path

    def ssh_argv(self, name: str, *options: str) -> list[str]:
        """Return the plain `ssh` command line that reaches a node from this machine, with strict host keys."""
        strict = ["StrictHostKeyChecking=yes", f"UserKnownHostsFile={self.known_hosts}", "GlobalKnownHostsFile=/dev/null"]
        words = [word for option in (*options, *strict, "BatchMode=yes", "ConnectTimeout=20") for word in ("-o", option)]
        return ["ssh", "-F", "/dev/null", "-i", str(self.key), *words, f"root@{self.address(name)}"]

    # ------------------------------------------------------------------------------------------ inside a node

    def exec_argv(self, name: str, *command: str) -> list[str]:
        """Return the command line that runs `command` inside all of the node's namespaces, with a login's environment."""
        outer = self._outer(self.node(name)).pid
        home = str(self.home(name))
        login = {**ENVIRONMENT, "HOME": home, "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash"}
        enter = ["nsenter", f"--target={outer}", "--net", "--mount", "--uts", "--ipc", f"--pid=/proc/{outer}/ns/pid_for_children"]
        return [
            *enter,
            "env",
            "-i",
            *(f"{key}={value}" for key, value in login.items()),
            "/bin/sh",
            "-c",
            'cd && exec "$@"',
            "sh",
            *command,
        ]

    def exec(self, name: str, *command: str, stdin: str = "", timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run `command` inside the node and return how it ended. Raises LabError when it takes longer; it is killed then."""
        process = subprocess.Popen(
            self.exec_argv(name, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # nsenter's child shares its process group
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise LabError(f"`{' '.join(command)}` on {name} took longer than {timeout_s:g} s") from None
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, stdout, stderr)

    def processes(self, name: str) -> list[tuple[int, str]]:
        """Return (pid, command line) of what lives on the node besides its init and its sshd's.

        The pid is the one the node itself sees: use it with `kill`, never with os.kill.
        """
        living = [
            process for process in self.node_processes(name) if process.node_pid != 1 and not process.name.startswith("sshd")
        ]
        return sorted((process.node_pid, " ".join(process.argv) or f"[{process.name}]") for process in living)

    def kill(self, name: str, pid: int, signal_name: str = "KILL") -> None:
        """Send a signal to a pid of the node, from inside the node."""
        done = self.exec(name, "/bin/sh", "-c", f"kill -{signal_name} {pid}")
        if done.returncode != 0:
            raise LabError(f"kill -{signal_name} {pid} on {name}: {done.stderr.strip()}")

    # ------------------------------------------------------------------------------------------ faults

    def shape(self, name: str, rate: str) -> None:
        """Limit what the node sends and what it receives to a rate like 100mbit each; "off" takes the limits away."""
        node = self.node(name)
        for namespace, device in ((node.namespace, "eth0"), (self.switch, node.name)):
            if rate == "off":
                shaped = "tbf" in tool("tc", "-netns", namespace, "qdisc", "show", "dev", device)
                if shaped:
                    tool("tc", "-netns", namespace, "qdisc", "delete", "dev", device, "root")
            else:
                tool("tc", "-netns", namespace, "qdisc", "replace", "dev", device, "root", *wiring.shaping(rate))

    def cut(self, name: str) -> None:
        """Pull the node's cable: its port on the switch goes down, its eth0 loses the carrier."""
        tool("ip", "-netns", self.switch, "link", "set", self.node(name).name, "down")

    def heal(self, name: str) -> None:
        """Plug the node's cable in again."""
        tool("ip", "-netns", self.switch, "link", "set", self.node(name).name, "up")

    def stop_sshd(self, name: str) -> None:
        """End the node's sshd: new connections are refused, sessions live on."""
        for process in self._listeners(name):
            self.kill(name, process.node_pid, "TERM")
        self._until(lambda: not self._listeners(name), f"the sshd of {name} did not end")

    def start_sshd(self, name: str) -> None:
        """Start the node's sshd again and wait for its answer."""
        if not self._listeners(name):
            done = self.exec(name, "/bin/bash", self.node(name).start_sshd_script)
            if done.returncode != 0:
                raise LabError(f"the sshd of {name} did not start: {done.stderr.strip()}\n{self.node(name).log_tail()}")
        self._wait_ready([self.node(name)])

    def freeze_sshd(self, name: str) -> None:
        """Stop the node's sshd with SIGSTOP: connections are accepted by the kernel, the banner never comes."""
        for process in self._listeners(name):
            self.kill(name, process.node_pid, "STOP")

    def thaw_sshd(self, name: str) -> None:
        """Let a frozen sshd go on."""
        for process in self._listeners(name):
            self.kill(name, process.node_pid, "CONT")

    def power_off(self, name: str) -> None:
        """Turn the node off at once: first its cable, so that no FIN of a dying process is seen, then all of its processes."""
        self.cut(name)
        alive = _kill_node(self.node(name))
        if alive:
            raise LabError(f"{name} did not go off; still alive: {alive}")

    def power_on(self, name: str) -> None:
        """Turn a node on again: empty /tmp, /dev/shm and /run, a new boot id, the same home, address and host key."""
        node = self.node(name)
        if _outer_of(node) is None:
            self._start(node)
        self.heal(name)
        self._wait_ready([node])

    def reboot(self, name: str) -> None:
        """Turn the node off and on."""
        self.power_off(name)
        self.power_on(name)

    def mend(self) -> None:
        """Undo every fault: power, cables, shapes and sshd's of all nodes, as after `up`."""
        for name, node in self.nodes.items():
            if _outer_of(node) is None:
                self.power_on(name)
            self.heal(name)
            self.shape(name, "off")
            self.thaw_sshd(name)
            self.start_sshd(name)

    # ------------------------------------------------------------------------------------------ inner workings

    def _start(self, node: LabNode) -> None:
        before = self._started.get(node.name)
        if before is not None:
            before.wait()  # it went off: reap it
        self._started[node.name] = node.start(self.token)

    def _outer(self, node: LabNode) -> Process:
        outer = _outer_of(node)
        if outer is None:
            raise LabError(f"{node.name} is off")
        return outer

    def node_processes(self, name: str) -> list[Process]:
        """Return all live processes of the node; none when it is off."""
        outer = _outer_of(self.node(name))
        identity = processes.namespace_of(outer.pid, "pid_for_children") if outer else None
        return processes.in_pid_namespace(identity) if identity else []

    def _listeners(self, name: str) -> list[Process]:
        config = self.node(name).sshd_config
        return [
            process
            for process in self.node_processes(name)
            if process.name.startswith("sshd") and "[listener]" in " ".join(process.argv) and config in " ".join(process.argv)
        ]

    @staticmethod
    def _until(condition: Callable[[], bool], otherwise: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise LabError(otherwise)
            time.sleep(0.02)

    def _wait_ready(self, nodes: list[LabNode]) -> None:
        """Return when the sshd of every node has shown its banner; raises LabError with the node's log."""
        deadline = time.monotonic() + READY_S
        with ThreadPoolExecutor(max_workers=16) as pool:
            answers = pool.map(lambda node: _answers(node, deadline, self._started.get(node.name)), nodes)
            for node, answered in zip(nodes, answers, strict=True):
                if not answered:
                    raise LabError(f"the sshd of {node.name} ({node.address}) does not answer:\n{node.log_tail()}")


def take_down(directory: Path | str, only_token: str | None = None) -> None:
    """Remove whatever a lab in `directory` made, also one that crashed or was half up. Idempotent.

    `only_token`: do nothing when a younger lab has taken over the folder.
    """
    directory = Path(directory).resolve()
    if not directory.is_dir():
        return
    with wiring.locked(directory / "lock"):
        state = _read_state(directory)
        if only_token is None or state is None or state["token"] == only_token:
            _tear_down(directory, only_token)


def _tear_down(directory: Path, token: str | None = None) -> None:
    """Remove the lab in `directory`; the caller holds its lock. Raises LabError naming what would not go."""
    state = _read_state(directory)
    tokens = {state["token"]} if state else set()
    tokens |= {token} if token else set()
    scripts = f"{directory}/nodes/"
    # Not only the nodes that lab.json lists: this finds them by their script even where lab.json was deleted.
    found = [process for process in processes.all_processes() if _is_node_process(process, scripts)]
    tokens |= {process.argv[-1] for process in found if re.fullmatch(r"[0-9a-f]{6}", process.argv[-1])}
    left = [f"process {process.pid}" for process in processes.kill_all(found, lambda now: _is_node_process(now, scripts))]
    for each in sorted(tokens):
        if wiring.link_exists(f"r4l-{each}"):
            tool("ip", "link", "delete", f"r4l-{each}")
        names = wiring.existing_namespaces(f"r4lab-{each}-")
        if names:
            tool("ip", "-batch", "-", stdin="".join(f"netns delete {name}\n" for name in names))
        left += wiring.existing_namespaces(f"r4lab-{each}-")
    if left:
        raise LabError(f"the lab in {directory} left behind: {', '.join(left)}")
    for stale in ("cluster.yaml", "lab.json"):
        (directory / stale).unlink(missing_ok=True)


def _is_node_process(process: Process, scripts: str) -> bool:
    return process.name in NODE_PROCESSES and any(word.startswith(scripts) and word.endswith("/init.sh") for word in process.argv)


def _kill_node(node: LabNode) -> list[int]:
    found = processes.with_argument(node.init_script, NODE_PROCESSES)
    left = processes.kill_all(found, lambda now: now.name in NODE_PROCESSES and node.init_script in now.argv)
    return [process.pid for process in left]


def _outer_of(node: LabNode) -> Process | None:
    """Return the `unshare` that stands for the node, or None when it is off."""
    found = [process for process in processes.with_argument(node.init_script, ("unshare",)) if process.state not in "ZX"]
    return found[0] if found else None


def _answers(node: LabNode, deadline: float, running: subprocess.Popen[bytes] | None) -> bool:
    """Return whether the node's sshd shows its banner before `deadline` (monotonic) and before the node ends.

    Connecting before the node's eth0 is up would cost a whole second: ARP asks again only then.
    """
    while time.monotonic() < deadline and (running is None or running.poll() is None):
        if node.ready_file.exists():
            try:
                with socket.create_connection((node.address, 22), timeout=1.0) as connection:
                    if connection.recv(4) == b"SSH-":
                        return True
            except OSError:
                pass
        time.sleep(0.01)
    return False


def _start_guard(directory: Path, token: str) -> subprocess.Popen[bytes]:
    """Start the process that takes the lab down once our end of its pipe closes without a word: that is, when we are gone."""
    with (directory / "guard.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.lab", "guard", "--dir", str(directory), "--token", token],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=REPOSITORY,
            start_new_session=True,  # Ctrl-C in our terminal is not for it
        )


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    """Tell the guard that there is nothing left to guard."""
    try:
        guard.communicate(b"dismissed")
    except (BrokenPipeError, ValueError):
        guard.wait()


def _read_state(directory: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads((directory / "lab.json").read_text())
    except FileNotFoundError:
        return None
    return state


def _write_json(path: Path, value: object) -> None:
    """Write `value` so that a reader sees all of it or nothing."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(value, indent=2))
    aside.replace(path)
