"""One node: a QEMU process, its monitor, its ssh.

Its folder D (that of the lab) holds   nodeNN.qcow2    what it wrote to its disk, over the image
                                       nodeNN.console  its console, and QEMU's own complaints in nodeNN.log
                                       nodeNN.qmp      the monitor's socket, nodeNN.pid the mark of its process
                                       wire            the socket that is the cable between node01 and node02
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.lab import processes
from tests.lab.processes import Process
from tests.lab.wiring import ENVIRONMENT
from tests.vmlab.store import VmLabError

QEMU = "qemu-system-x86_64"
PROCESS_NAMES = (QEMU[:15],)
"""The kernel keeps 15 characters of a process's name."""

MEMORY_MIB = 512
"""Of one node. What it does not touch costs nothing."""

KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet mitigations=off nokaslr audit=0 net.ifnames=0 random.trust_cpu=on cryptomgr.notests "
    "rcupdate.rcu_expedited=1 no_timer_check panic=-1"
)
"""What makes an emulated boot short. `panic=-1` with -no-reboot: a panic ends the process."""

MONITOR_S = 30.0
"""est.: QEMU answers in milliseconds, on a machine that swaps less soon."""
MIGRATE_S = 120.0
"""est.: saving or loading half a gigabyte at most; 1 s on a quiet disk."""


@cache
def qemu_version() -> str:
    """Return the first line of what QEMU says about itself: a snapshot is only loaded by the QEMU that made it."""
    done = subprocess.run([QEMU, "--version"], capture_output=True, text=True, env=ENVIRONMENT)
    return (done.stdout or done.stderr).partition("\n")[0]


def machine_argv(number: int) -> list[str]:
    """Return the words that make the machine: what a snapshot holds the state of.

    Software emulation only (TCG), also where there is KVM: one path, the same on every machine.
    """
    argv = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    argv += ["-machine", "q35,usb=off,vmport=off", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max"]
    argv += ["-smp", "1", "-m", str(MEMORY_MIB)]
    argv += ["-device", "virtio-blk-pci,drive=disk"]
    argv += ["-device", f"virtio-net-pci,netdev=wire,mac=52:54:00:77:00:0{number},host_mtu=9000"]
    argv += ["-device", f"virtio-net-pci,netdev=ssh,mac=52:54:00:88:00:0{number}"]
    argv += ["-object", "rng-builtin,id=random", "-device", "virtio-rng-pci,rng=random"]
    return argv


@dataclass(frozen=True, slots=True)
class Machine:
    """Where one node is. `number` is 1 or 2."""

    number: int
    folder: Path

    @property
    def name(self) -> str:
        """Its host name."""
        return f"node0{self.number}"

    @property
    def address(self) -> str:
        """Its address on the data network."""
        return f"10.77.0.{self.number}"

    @property
    def mark(self) -> str:
        """The argument by which its process is known."""
        return str(self.folder / f"{self.name}.pid")

    @property
    def disk(self) -> Path:
        """Its overlay."""
        return self.folder / f"{self.name}.qcow2"

    def make_disk(self, backing: str, kind: str) -> None:
        """Make an empty overlay over `backing` ("raw" or "qcow2"; a relative path counts from the overlay's folder)."""
        argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", backing, "-F", kind, str(self.disk)]
        done = subprocess.run(argv, capture_output=True, text=True, env=ENVIRONMENT)
        if done.returncode != 0:
            raise VmLabError(f"{self.name}: {done.stderr.strip()}")

    def start(self, image: Path, state: Path | None = None) -> subprocess.Popen[bytes]:
        """Start the process: it boots, or with `state` waits, loaded and paused. node01 first: it owns the wire's socket.

        Host port 0: the kernel chooses a free one; `ssh_port` tells which.
        """
        wire = f"stream,id=wire,server={'on' if self.number == 1 else 'off'},addr.type=unix,addr.path=wire"
        argv = machine_argv(self.number)
        argv += ["-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd.gz")]
        argv += ["-append", f"{KERNEL_ARGUMENTS} vmlab.node={self.number}"]
        argv += ["-blockdev", f"qcow2,node-name=disk,file.driver=file,file.filename={self.disk.name},file.cache.no-flush=on"]
        argv += ["-netdev", wire, "-netdev", "user,id=ssh,restrict=on,ipv6=off,hostfwd=tcp:127.0.0.1:0-10.0.2.15:22"]
        argv += ["-serial", f"file:{self.name}.console", "-qmp", f"unix:{self.name}.qmp,server=on,wait=off"]
        argv += ["-pidfile", self.mark]
        if state is not None:
            argv += ["-S", "-incoming", f"exec:cat {shlex.quote(str(state))}"]
        # Paths relative to the folder: a socket's path holds 107 bytes, and QEMU takes commas in a path for its own.
        with (self.folder / f"{self.name}.log").open("ab") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=ENVIRONMENT,
                cwd=self.folder,
                start_new_session=True,
            )

    def process(self) -> Process | None:
        """Return its live process, or None."""
        found = [process for process in processes.with_argument(self.mark, PROCESS_NAMES) if process.state not in "ZX"]
        return found[0] if found else None

    # ------------------------------------------------------------------------------------------ monitor

    @contextmanager
    def _monitor(self, timeout_s: float) -> Iterator[Any]:
        """Yield a function (command, arguments) -> answer of the QMP monitor."""
        folder = os.open(self.folder, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX) as channel:
                channel.settimeout(timeout_s)
                channel.connect(f"/proc/self/fd/{folder}/{self.name}.qmp")
                with channel.makefile("rw") as lines:

                    def ask(command: str, arguments: Mapping[str, Any]) -> Any:
                        json.dump({"execute": command, "arguments": arguments}, lines)
                        lines.write("\n")
                        lines.flush()
                        for line in lines:
                            answer = json.loads(line)
                            if "error" in answer:
                                raise VmLabError(f"{self.name}: {command}: {answer['error']['desc']}")
                            if "return" in answer:
                                return answer["return"]
                        raise VmLabError(f"{self.name}: QEMU ended during {command}:\n{self.log_tail()}")

                    lines.readline()  # the greeting
                    ask("qmp_capabilities", {})
                    yield ask
        except OSError as error:
            raise VmLabError(f"{self.name}: its monitor does not answer ({error}):\n{self.log_tail()}") from None
        finally:
            os.close(folder)

    def monitor(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Return the answer to one QMP command. Raises VmLabError."""
        with self._monitor(MONITOR_S) as ask:
            return ask(command, arguments or {})

    def ssh_port(self) -> int:
        """Return the port of 127.0.0.1 that leads to the node's sshd."""
        text = self.monitor("human-monitor-command", {"command-line": "info usernet"})
        match = re.search(r"HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s", text)
        if not match:
            raise VmLabError(f"{self.name}: no forwarded port in {text!r}")
        return int(match[1])

    def status(self) -> str:
        """Return QEMU's run state: running, paused, inmigrate, postmigrate …"""
        return str(self.monitor("query-status")["status"])

    def save_state(self, target: Path) -> None:
        """Write memory and devices of the paused node to `target`; the disk stays what it is."""
        with self._monitor(MIGRATE_S) as ask:
            ask("migrate-set-parameters", {"max-bandwidth": 1 << 36})
            ask("migrate", {"uri": f"exec:cat > {shlex.quote(str(target))}"})
            self._until(lambda: ask("query-migrate", {}).get("status"), "completed")

    def wait_loaded(self) -> None:
        """Return once the state given to `start` is loaded. Raises VmLabError."""
        with self._monitor(MIGRATE_S) as ask:
            self._until(lambda: ask("query-status", {})["status"], "paused")

    def _until(self, status: Callable[[], str], wanted: str) -> None:
        deadline = time.monotonic() + MIGRATE_S
        while (now := status()) != wanted:
            if now == "failed" or time.monotonic() > deadline:
                raise VmLabError(f"{self.name}: {now}, not {wanted}:\n{self.log_tail()}")
            time.sleep(0.05)

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines of its console and of what QEMU said."""
        files = [self.folder / f"{self.name}.{suffix}" for suffix in ("console", "log")]
        text = "\n".join(path.read_text(errors="replace") for path in files if path.exists())
        return "\n".join(text.splitlines()[-lines:]) or "(it said nothing)"


def kill(machines: Sequence[Machine]) -> list[str]:
    """End the processes of `machines`; return the names of those that would not go."""
    return [machine.name for machine in machines if not _killed(machine)]


def _killed(machine: Machine) -> bool:
    found = processes.with_argument(machine.mark, PROCESS_NAMES)
    return not processes.kill_all(found, lambda now: now.name in PROCESS_NAMES and machine.mark in now.argv)
