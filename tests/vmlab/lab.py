"""The VM lab as a whole: up, down, and the faults in between.

node01 serves /mnt/shared over NFS 4.2, node02 mounts it at the same place; rxe0 lies over eth0 on both; the cable between the
two eth0 is a socket of this machine. Both are loaded from a snapshot taken when all of that was ready.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.lab.wiring import ENVIRONMENT, locked
from tests.vmlab import image, machine, store
from tests.vmlab.machine import Machine
from tests.vmlab.store import VmLabError, tell

__all__ = ["VmLab", "VmLabError", "take_down", "why_not"]

REPOSITORY = Path(__file__).resolve().parents[2]

NUMBERS = (1, 2)
SHARED = "/mnt/shared"
PYTHON = "/usr/bin/python3"

BOOT_S = 240.0
"""est.: a boot takes 15 to 20 s on two quiet cores; this is for eight times the load."""
ANSWER_S = 90.0
"""est.: how long ssh of a loaded snapshot may take (1 s on a quiet machine)."""

SSH_BROKE = 255
"""ssh's own exit code."""

WARM_UP = (
    "python3 -c 'import json, zlib, ctypes, select, resource, pwd, base64' && ib_write_bw --version && ib_send_lat --version; "
    "ibv_devinfo; ping -c 1 node01; iperf3 --version; ethtool eth0; lspci; nfsstat -m; true"
)
"""Run before the snapshot is taken: what tests use is then in the nodes' page cache, which an emulated disk would fill slowly."""


def why_not() -> str | None:
    """Return why no VM lab can be had here, or None when one can (after a build, should there be no image yet)."""
    missing = {"qemu-system-x86": machine.QEMU, "qemu-utils": "qemu-img", "openssh-client": "ssh"}
    lacking = [package for package, program in missing.items() if shutil.which(program, path=ENVIRONMENT["PATH"]) is None]
    if lacking:
        return f"the VM lab needs: apt-get install {' '.join(lacking)}"
    return None if store.found("image", image.key()) else image.why_not()


def is_built() -> bool:
    """Return whether a lab comes up in seconds: image and snapshot are there."""
    return store.found("image", image.key()) is not None and store.found("snapshot", _snapshot_key()) is not None


def build() -> tuple[Path, Path]:
    """Return the folders of image and snapshot, built where they are missing. Raises VmLabError."""
    reason = why_not()
    if reason:
        raise VmLabError(reason)
    disk = image.take()
    return disk, store.take("snapshot", _snapshot_key(), lambda folder, lock: _take_snapshot(folder, disk))


def _snapshot_key() -> str:
    words = [*machine.machine_argv(1), machine.KERNEL_ARGUMENTS, WARM_UP]
    return store.key_of(image.key(), machine.qemu_version(), words, inspect.getsource(_take_snapshot))


def _take_snapshot(folder: Path, disk: Path) -> None:
    """Boot both nodes in `folder` and leave there what a lab is loaded from: per node its disk so far and its state."""
    started = time.monotonic()
    tell("booting both nodes to take the snapshot (under a minute on two quiet cores)")
    lab = VmLab._new(folder, disk)
    try:
        lab._start(None, master=False)  # no session is to be saved with the nodes
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: lab.sh(name, f"{WARM_UP}; sync", timeout_s=BOOT_S), lab.machines))
        for each in lab.machines.values():
            each.monitor("stop")
        for each in lab.machines.values():
            each.save_state(folder / f"{each.name}.state")
            shutil.copyfile(each.disk, folder / f"{each.name}.disk")
    finally:
        lab.down()
    for path in folder.iterdir():
        if path.suffix in (".state", ".disk"):
            path.chmod(0o444)
        elif path.suffix != ".console":
            path.unlink()
    tell(f"snapshot taken after {time.monotonic() - started:.0f} s")


class VmLab:
    """A running VM lab in the folder `directory`. As a context manager it goes down at the end of the block.

    A lab belongs to the process that brought it up: should that end in any way, even by SIGKILL, a guard process takes
    the lab down. `outlive_me` (what `python -m tests.vmlab up` uses) ends the guard once the lab is up.
    """

    def __init__(self, directory: Path, state: Mapping[str, Any]) -> None:
        self.directory = directory
        self.token: str = state["token"]
        self.ports: dict[str, int] = dict(state["ports"])
        self.disk = Path(state["image"])
        self.machines = {each.name: each for each in _machines(directory)}
        self._guard: subprocess.Popen[bytes] | None = None
        self._children: list[subprocess.Popen[bytes]] = []

    # ------------------------------------------------------------------------------------------ up and down

    @classmethod
    def up(cls, directory: Path | str, *, outlive_me: bool = False) -> VmLab:
        """Bring up both nodes and return the lab once they answer. An earlier lab in `directory` goes down first.

        The first time on a machine this builds (see `is_built`). Raises VmLabError when it cannot be; no process is left then.
        """
        directory = Path(directory).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        disk, snapshot = build()
        try:
            return cls._up(directory, disk, snapshot, outlive_me)
        except VmLabError as error:
            broken = [entry for entry in (disk, snapshot) if store.damaged(entry)]
            if not broken:
                raise
            tell(f"{', '.join(entry.name for entry in broken)} is not what was built: {str(error).splitlines()[0]}")
        for entry in broken:
            store.forget(entry)
        return cls._up(directory, *build(), outlive_me)

    @classmethod
    def _up(cls, directory: Path, disk: Path, snapshot: Path, outlive_me: bool) -> VmLab:
        lab = cls._new(directory, disk)
        try:
            with locked(directory / "lock"):
                _tear_down(directory)
                lab._start(snapshot, master=not outlive_me)
        except BaseException:
            lab.down()
            raise
        if outlive_me:
            lab._dismiss_guard()
        return lab

    @classmethod
    def _new(cls, directory: Path, disk: Path) -> VmLab:
        """Return a lab of which nothing is started but its guard."""
        lab = cls(directory, {"token": secrets.token_hex(3), "image": str(disk), "ports": {}})
        lab._guard = _start_guard(directory, lab.token)
        return lab

    def _start(self, snapshot: Path | None, *, master: bool) -> None:
        """Start both nodes, from a snapshot or by booting; return once they answer and have the right time."""
        self._write_state()  # before anything is made
        for each in self.machines.values():
            if snapshot is None:
                each.make_disk(
                    f"../{self.disk.name}/root.ext4", "raw"
                )  # the folder lies beside the image's, and is to be renamed
                self._children.append(each.start(self.disk))
            else:
                each.make_disk(str(snapshot / f"{each.name}.disk"), "qcow2")
                self._children.append(each.start(self.disk, snapshot / f"{each.name}.state"))
            # node02 dials node01 at once, and only once.
            self._until((self.directory / "wire").exists, f"{each.name} did not start", each)
        for each in self.machines.values():
            self._until((self.directory / f"{each.name}.qmp").exists, f"{each.name} has no monitor", each)
            self.ports[each.name] = each.ssh_port()
            if snapshot is not None:
                each.wait_loaded()
        if snapshot is not None:
            for each in self.machines.values():
                each.monitor("cont")
        self._write_state()
        self._write_known_hosts()
        if snapshot is None:
            for each in self.machines.values():
                self._wait_for_boot(each)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self._wait_for_ssh(name, master), self.machines))
        self.set_clocks()
        self.write_cluster(self.cluster_file)

    def _wait_for_boot(self, each: Machine) -> None:
        self._until(lambda: "VMLAB ready" in self.console(each.name), f"{each.name} did not boot", each, BOOT_S)
        failures = [line for line in self.console(each.name).splitlines() if line.startswith("VMLAB failed")]
        if failures:
            raise VmLabError(f"{each.name}: {'; '.join(failures)}")

    def _wait_for_ssh(self, name: str, master: bool) -> None:
        """Return once the node's ssh answers. `master`: keep a connection open that `sh` goes through: logins are slow."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                done = self.sh(name, "test -e /run/vmlab-ready", timeout_s=20, check=False)
                if done.returncode == 0:
                    break
                problem = done.stderr.strip() or f"code {done.returncode}"
            except VmLabError as error:
                problem = str(error)
            if time.monotonic() > deadline or self.machines[name].process() is None:
                raise VmLabError(f"{name} does not answer: {problem}\n{self.machines[name].log_tail()}")
            time.sleep(0.2)
        if master:
            argv = self.ssh_argv(name, "ControlMaster=yes")
            with (self.directory / f"{name}.ssh").open("ab") as log:
                process = subprocess.Popen(
                    ["ssh", "-N", *argv[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=ENVIRONMENT,
                    cwd=self.directory,
                    start_new_session=True,
                )
            self._children.append(process)
            self._until((self.directory / f"{name}.mux").exists, f"no lasting ssh to {name}", self.machines[name], ANSWER_S)

    def _until(self, condition: Callable[[], bool], otherwise: str, each: Machine, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or any(child.poll() is not None for child in self._children):
                raise VmLabError(f"{otherwise}:\n{each.log_tail()}")
            time.sleep(0.02)

    @classmethod
    def attach(cls, directory: Path | str) -> VmLab:
        """Return the lab that is up in `directory`; raises VmLabError when there is none. It is not taken down at exit."""
        directory = Path(directory).resolve()
        state = _read_state(directory)
        if state is None or len(state["ports"]) != len(NUMBERS):
            raise VmLabError(f"no VM lab is up in {directory}; start one with: python -m tests.vmlab up --dir {directory}")
        return cls(directory, state)

    def down(self) -> None:
        """End both nodes and what belongs to them. Idempotent. Consoles and logs stay, disks go."""
        take_down(self.directory)
        for child in self._children:  # the ssh ones among them lost their node and end by themselves; this is sooner
            child.terminate()
            child.wait()
        self._children.clear()
        self._dismiss_guard()

    def _dismiss_guard(self) -> None:
        """Tell the guard that there is nothing left to guard."""
        if self._guard is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.communicate(b"dismissed")
            self._guard.wait()
            self._guard = None

    def __enter__(self) -> VmLab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    # ------------------------------------------------------------------------------------------ where things are

    @property
    def cluster_file(self) -> Path:
        """The cluster.yaml of this lab."""
        return self.directory / "cluster.yaml"

    @property
    def known_hosts(self) -> Path:
        """The host keys of both nodes, by forwarded port."""
        return self.directory / "known_hosts"

    def machine(self, name: str) -> Machine:
        """Return one node, by name or number; raises VmLabError with the names there are."""
        name = f"node0{name}" if name.isdigit() else name
        try:
            return self.machines[name]
        except KeyError:
            raise VmLabError(f"no node {name!r} in this lab; it has {', '.join(self.machines)}") from None

    def write_cluster(
        self,
        file: Path,
        *,
        shared: str = SHARED,
        source: str = f"node01:{SHARED}",
        mount: str | None = None,
        expect: Mapping[str, float] | None = None,
    ) -> Path:
        """Write a cluster.yaml of this lab whose shared folder is `source` mounted at `mount` (default: `shared`); return `file`.

        Thresholds that an emulated processor and a small disk cannot meet are overridden; `expect` overrides more.
        """
        import yaml

        wish: dict[str, Any] = {
            "name": "vmlab",
            "ssh": {
                "user": "root",
                "key": str(self.disk / image.PRIVATE_KEY),
                "known_hosts": [str(self.known_hosts)],
                "config": "",
                "connect_timeout_s": 30,
            },
            "nodes": [
                {"name": name, "address": "127.0.0.1", "data_address": each.address, "gpus": 0, "ssh": {"port": self.ports[name]}}
                for name, each in self.machines.items()
            ],
            "network": {"kind": "roce", "subnet": "10.77.0.0/24", "mtu": 9000},
            "storage": {"kind": "nfs4", "source": source, "mount": mount or shared},
            "paths": {"shared": shared, "python": PYTHON},
            "expect": {**EXPECT, **(expect or {})},
        }
        file.write_text(yaml.safe_dump(wish, sort_keys=False))
        return file

    def _write_state(self) -> None:
        """Write what `attach` and `take_down` need, so that a reader sees all of it or nothing."""
        aside = self.directory / "vmlab.new"
        aside.write_text(json.dumps({"token": self.token, "image": str(self.disk), "ports": self.ports}, indent=2))
        aside.replace(self.directory / "vmlab.json")

    def _write_known_hosts(self) -> None:
        public = " ".join((self.disk / image.HOST_KEY).read_text().split()[:2])
        self.known_hosts.write_text("".join(f"[127.0.0.1]:{port} {public}\n" for port in self.ports.values()))

    def ssh_argv(self, name: str, *options: str) -> list[str]:
        """Return the plain `ssh` command line that reaches a node, with strict host keys; the lab's folder is to be its cwd.

        A control socket's path is short, so it is relative; where nothing listens there ssh connects by itself.
        """
        each = self.machine(name)
        strict = ["StrictHostKeyChecking=yes", f"UserKnownHostsFile={self.known_hosts}", "GlobalKnownHostsFile=/dev/null"]
        strict += ["BatchMode=yes", "ConnectTimeout=15", f"ControlPath={each.name}.mux", "LogLevel=ERROR"]
        words = [word for option in (*options, *strict) for word in ("-o", option)]
        key = str(self.disk / image.PRIVATE_KEY)
        return ["ssh", "-F", "/dev/null", "-i", key, "-p", str(self.ports[each.name]), *words, "root@127.0.0.1"]

    # ------------------------------------------------------------------------------------------ inside a node

    def sh(
        self, name: str, script: str, *, stdin: str = "", timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell script on the node and return how it ended.

        Raises VmLabError when it takes longer than `timeout_s` (what it started then goes on: use timeout(1) in the script) and,
        with `check`, when its exit code is not 0.
        """
        try:
            done = subprocess.run(
                [*self.ssh_argv(name), script],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=ENVIRONMENT,
                cwd=self.directory,
            )
        except subprocess.TimeoutExpired:
            raise VmLabError(f"`{script}` on {name} took longer than {timeout_s:g} s") from None
        if done.returncode == SSH_BROKE and self.machine(name).process() is None:
            raise VmLabError(f"{name} went off during `{script}`:\n{self.machine(name).log_tail(40)}")
        if check and done.returncode != 0:
            raise VmLabError(f"`{script}` on {name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def start(self, name: str, script: str) -> subprocess.Popen[str]:
        """Start a shell script on the node and return the ssh that carries it; the caller ends it."""
        return subprocess.Popen(
            [*self.ssh_argv(name), script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
            cwd=self.directory,
        )

    def set_clocks(self) -> None:
        """Set the nodes' clocks to this machine's: after a snapshot or a pause they are as late as it lasted."""
        for name in self.machines:
            self.set_clock(name)

    def set_clock(self, name: str) -> None:
        """Set one node's clock. The time is read when the node waits for it, so what it took to get there does not count."""
        argv = [*self.ssh_argv(name), 'echo ready; read now; date --utc --set "@$now" > /dev/null']
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=self.directory
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            process.stdin.write(f"{time.time():.6f}\n")
            process.stdin.close()
            if process.wait(ANSWER_S) != 0:
                raise VmLabError(f"the clock of {name} could not be set")

    def console(self, name: str) -> str:
        """Return what the node's console showed."""
        path = self.directory / f"{self.machine(name).name}.console"
        return path.read_text(errors="replace") if path.exists() else ""

    # ------------------------------------------------------------------------------------------ faults

    def pause(self, name: str) -> None:
        """Stop the node's processor: it answers nothing, and its peers hear no end of a connection."""
        self.machine(name).monitor("stop")

    def resume(self, name: str) -> None:
        """Let it go on, with the right time."""
        self.machine(name).monitor("cont")
        self.set_clock(self.machine(name).name)

    def cut(self, name: str) -> None:
        """Pull the data cable at the node's end: its eth0 loses the carrier, ssh goes on."""
        self.machine(name).monitor("set_link", {"name": "wire", "up": False})

    def heal(self, name: str) -> None:
        """Plug it in again."""
        self.machine(name).monitor("set_link", {"name": "wire", "up": True})


EXPECT: Mapping[str, float] = {
    "ssh_slow_warn_s": 30,
    "clock_skew_warn_s": 2,
    "disk_free_min_gib": 0.1,
    "tmp_free_min_gib": 0.1,
    "inodes_free_min": 1000,
    "rdma_iterations": 20,
    "rdma_latency_iterations": 50,
    "rdma_latency_warn_us": 1e6,
    "rdma_latency_fail_us": 2e6,
    "link_median_warn": 0.02,
    "link_median_fail": 0.01,
    "tcp_streams_warn": 0.02,
    "tcp_sent_again_warn": 0.5,
}
"""Thresholds that two small machines with emulated processors cannot meet, and whose figures mean nothing there."""


def take_down(directory: Path | str, only_token: str | None = None) -> None:
    """End whatever a lab in `directory` started, also one that crashed or was half up. Idempotent.

    `only_token`: do nothing when a younger lab has taken over the folder.
    """
    directory = Path(directory).resolve()
    if not directory.is_dir():
        return
    with locked(directory / "lock"):
        state = _read_state(directory)
        if only_token is None or state is None or state["token"] == only_token:
            _tear_down(directory)


def _tear_down(directory: Path) -> None:
    """End the nodes of `directory`; the caller holds its lock. Raises VmLabError naming what would not go."""
    machines = _machines(directory)
    left = machine.kill(machines)
    if left:
        raise VmLabError(f"the VM lab in {directory} left behind: {', '.join(left)}")
    for name in ("cluster.yaml", "vmlab.json", "wire"):
        (directory / name).unlink(missing_ok=True)
    for each in machines:
        for suffix in ("qcow2", "qmp", "pid", "mux"):
            (directory / f"{each.name}.{suffix}").unlink(missing_ok=True)


def _machines(directory: Path) -> list[Machine]:
    return [Machine(number, directory) for number in NUMBERS]


def _start_guard(directory: Path, token: str) -> subprocess.Popen[bytes]:
    """Start the process that takes the lab down once our end of its pipe closes without a word: that is, when we are gone."""
    with (directory / "guard.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.vmlab", "guard", "--dir", str(directory), "--token", token],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=REPOSITORY,
            start_new_session=True,  # Ctrl-C in our terminal is not for it
        )


def _read_state(directory: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads((directory / "vmlab.json").read_text())
    except FileNotFoundError:
        return None
    return state
