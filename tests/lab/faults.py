"""What a run must survive, or be ended by: what each fault does to a launch in a lab, how it is undone, and the right answer.

`FAULTS` is the table. A fault is made `ready` before the launch (it may ask for another cluster.yaml and for options), or it
`strike`s the running attempt; the scene undoes whatever either did. Processes are found by their command line
on their own node, and signals are sent from inside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.lab import memory
from tests.lab.lab import Lab, LabError
from tests.lab.mounts import small_disk
from tests.lab.processes import Process
from tests.lab.toy import changed_cluster

Role = Literal["agent", "follower", "torchrun", "rank"]
Then = Literal["goes-on", "again", "elsewhere", "given-up", "refused"]

RANK_WITHIN_S, NODE_WITHIN_S = 5.0, 20.0
"""The contract of issue 6: so soon the ranks of the other nodes have stopped, after a rank was killed or a node was cut off."""
WITHIN_S = 30.0
"""Against hanging, where the contract says nothing."""
HANG_AFTER_S = 6
"""`--hang-after` of the launch whose rank is frozen; by default it would take two minutes."""
SMALL_DISK_MIB, TOY_DISK_MIB = 400, 8
"""Room for more checkpoints than are kept: of recipe tiny (78 MiB), of the stand-in (0.5 MiB)."""
LOGS_BYTES = 256 << 10
"""Less than a checkpoint of either."""
MEMORY_MIB = 96
BLINK_S = 2.0
"""Less than the gang's lease of 5 s, retransmissions included."""
PAUSE_S = 7.0
"""More than the lease: on waking, no agent has heard of the other for too long."""
STRAY = "stray0"
"""An interface that leads nowhere; as a bridge it needs no hardware."""


def role_of(command_line: str) -> Role | None:
    """Return what a process of a run is, None for one of no run."""
    for text, role in (("agent.py daemon", "agent"), ("agent.py follow", "follower"), ("torch.distributed.run", "torchrun")):
        if text in command_line:
            return role  # type: ignore[return-value]
    return "rank" if any(text in command_line for text in ("/rank.py", "/train/main.py", "/user/")) else None


@dataclass
class Scene:
    """One launch in a lab: the lead and one other node, and the process of `r4090c launch`, once there is one."""

    lab: Lab
    cluster: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    """How that differs from the lab's own: arguments of changed_cluster."""
    lead: str = "node01"
    member: str = "node02"
    launcher: subprocess.Popen[str] | None = None
    run_id: str = ""
    undoing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Undoes what struck."""
    unreadying: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Undoes what was made ready."""

    def find(self, node: str, *roles: Role) -> list[Process]:
        """Return the processes of these roles on a node."""
        return [one for one in self.lab.node_processes(node) if role_of(" ".join(one.argv)) in roles]

    def signal(self, node: str, found: list[Process], name: str) -> None:
        """Send a signal to processes of a node that may be gone meanwhile."""
        self.lab.exec(node, "/bin/sh", "-c", f"kill -{name} {' '.join(str(one.node_pid) for one in found)}")

    def hit(self, node: str, *roles: Role, name: str = "KILL") -> list[Process]:
        """Send a signal to all processes of these roles on a node, and return them. Raises LabError when there is none."""
        found = self.find(node, *roles)
        if not found:
            raise LabError(f"no {' or '.join(roles)} on {node} to hit; it has {self.lab.processes(node)}")
        self.signal(node, found, name)
        return found

    def sshd(self, node: str) -> list[Process]:
        """Return the node's sshd: the listener and who serves the connections."""
        return [one for one in self.lab.node_processes(node) if one.name.startswith("sshd") and one.node_pid != 1]

    def change(self, name: str, **changes: Any) -> None:
        """Launch by a changed cluster.yaml."""
        self.cluster = changed_cluster(self.lab, name, **{**self.changes, **changes})


Do = Callable[[Scene], None]


@dataclass(frozen=True)
class Answer:
    """What r4090c must make of it. `kinds`: of the cause, any of these; none where nothing is to end.

    `within_s`: so soon the ranks of the other nodes have stopped. `then`: the attempt goes on; or it ends, and the run goes on
    on the same nodes, or elsewhere or once the node is back, or is given up; or the launch is refused before any rank starts.
    """

    then: Then
    kinds: tuple[str, ...] = ()
    node: str | None = None
    rank: int | None = None
    within_s: float = WITHIN_S


@dataclass(frozen=True)
class Fault:
    """One fault. `does`, `undone`: in words."""

    id: str
    does: str
    undone: str
    answer: Answer
    strike: Do | None = None
    ready: Do | None = None
    options: tuple[str, ...] = ()
    """More words for `r4090c launch`."""
    torch_has_a_say: bool = False
    """What becomes of it depends on torch, too: who notices, what a rank that waits looks like, what a checkpoint is."""


# ------------------------------------------------------------------------------------------ what is done


def kill(node: str, *roles: Role) -> Do:
    """SIGKILL every process of these roles on the node that the scene calls `node`."""

    def strike(scene: Scene) -> None:
        scene.hit(getattr(scene, node), *roles)

    return strike


def kill_supervisor(scene: Scene) -> None:
    """SIGKILL `r4090c launch` itself."""
    assert scene.launcher is not None
    scene.launcher.kill()


def stop_sshd(scene: Scene) -> None:
    """End the member's sshd together with who serves its connections, as systemd does with KillMode=control-group."""
    serving = scene.sshd(scene.member)
    scene.undoing.callback(scene.lab.start_sshd, scene.member)
    scene.lab.stop_sshd(scene.member)
    scene.signal(scene.member, serving, "KILL")


def freeze_sshd(scene: Scene) -> None:
    """Stop the member's sshd and who serves its connections with SIGSTOP: everything is accepted and nothing answered."""
    scene.undoing.callback(lambda: scene.signal(scene.member, scene.sshd(scene.member), "CONT"))
    scene.signal(scene.member, scene.sshd(scene.member), "STOP")


def cut(node: str) -> Do:
    """Pull the cable of a node."""

    def strike(scene: Scene) -> None:
        scene.undoing.callback(scene.lab.heal, getattr(scene, node))
        scene.lab.cut(getattr(scene, node))

    return strike


def blink(scene: Scene) -> None:
    """Pull the member's cable for BLINK_S."""
    scene.lab.cut(scene.member)
    scene.undoing.callback(scene.lab.heal, scene.member)
    time.sleep(BLINK_S)
    scene.lab.heal(scene.member)


def pause(scene: Scene) -> None:
    """Let all of the run on both nodes, and their sshd, stand still for PAUSE_S: virtual machines that are saved, or moved."""
    still = {
        node: [*scene.find(node, "agent", "follower", "torchrun", "rank"), *scene.sshd(node)]
        for node in (scene.lead, scene.member)
    }
    for node, found in still.items():
        scene.undoing.callback(scene.signal, node, found, "CONT")
        scene.signal(node, found, "STOP")
    time.sleep(PAUSE_S)
    for node, found in still.items():
        scene.signal(node, found, "CONT")


def power_off(scene: Scene) -> None:
    """Turn the member off."""
    scene.undoing.callback(scene.lab.power_on, scene.member)
    scene.lab.power_off(scene.member)


def freeze_rank(scene: Scene) -> None:
    """SIGSTOP the member's rank between two steps: while it saves it may be silent for half an hour (launch/plan.py)."""
    deadline = time.monotonic() + WITHIN_S
    beat = scene.lab.shared / "r4090c" / "runs" / scene.run_id / "heartbeats" / "1.json"
    while True:
        frozen = scene.hit(scene.member, "rank", name="STOP")
        if json.loads(beat.read_text())["phase"] == "train":
            break
        scene.signal(scene.member, frozen, "CONT")
        if time.monotonic() > deadline:
            raise LabError(f"{beat} never says that the rank trains")
        time.sleep(0.2)
    scene.undoing.callback(scene.signal, scene.member, frozen, "CONT")


def small_runs(scene: Scene) -> None:
    """Have the run folder on a small file system of its own."""
    mib = TOY_DISK_MIB if "python" in scene.changes else SMALL_DISK_MIB
    runs = scene.unreadying.enter_context(small_disk(scene.lab, scene.lab.directory / "small", mib))
    scene.change("small", runs=runs, expect={"disk_free_min_gib": 0})


def fill(scene: Scene) -> None:
    """Fill the file system of the run folder, but for what lines of logs and metrics take."""
    filler = scene.lab.directory / "small" / "filler"
    scene.undoing.callback(filler.unlink)
    free = shutil.disk_usage(filler.parent).free - LOGS_BYTES
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free)


def fill_while_saving(scene: Scene) -> None:
    """Fill the file system to the last byte while the ranks write the next checkpoint."""
    filler = scene.lab.directory / "small" / "filler"
    scene.undoing.callback(filler.unlink)
    saving = filler.parent / scene.run_id / "checkpoints"
    deadline = time.monotonic() + WITHIN_S
    while not any(saving.glob("*.partial/state/*")):
        if time.monotonic() > deadline:
            raise LabError(f"no checkpoint is begun in {saving}")
        time.sleep(0.005)
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def starve(scene: Scene) -> None:
    """Leave the member's processes of the run MEMORY_MIB MiB, and have its ranks take more and more."""
    group = scene.undoing.enter_context(memory.limited_to(MEMORY_MIB))
    memory.join(group, [one.pid for one in scene.find(scene.member, "agent", "torchrun", "rank")])
    greedy = f"/tmp/r4090c-*/{scene.run_id}/{scene.member}"
    scene.lab.exec(scene.member, "/bin/sh", "-c", f'for folder in {greedy}; do touch "$folder/grow"; done')


def stray_address(node: str) -> Do:
    """Give a node an interface that leads to no peer, and name its address as the one on the data network."""

    def ready(scene: Scene) -> None:
        name = getattr(scene, node)
        words = f"link add {STRAY} type bridge; address add 172.31.250.12/24 dev {STRAY}; link set {STRAY} up"
        scene.unreadying.callback(scene.lab.exec, name, "ip", "link", "delete", STRAY)
        for one in words.split(";"):
            scene.lab.exec(name, "ip", *one.split())
        scene.change("stray", network={"subnet": None}, **{name: {"data_address": "172.31.250.12"}})

    return ready


def nobodys_address(node: str) -> Do:
    """Name an address of the right subnet that nobody has as a node's on the data network."""

    def ready(scene: Scene) -> None:
        address = scene.lab.controller_address.rpartition(".")[0] + ".250"
        scene.change("nobody", **{getattr(scene, node): {"data_address": address}})

    return ready


THIEF = r"""
import glob, json, os, socket, sys, time
runs, which = sys.argv[1], sys.argv[2]
known = set(glob.glob(runs + "/*"))
print("waiting", flush=True)
while True:
    for run in set(glob.glob(runs + "/*")) - known:
        try:
            with open(run + "/plan.json") as file:
                plan = json.load(file)
        except (OSError, ValueError):
            continue
        words = plan["nodes"][0]["torchrun"]
        master = next(int(word.partition("=")[2]) for word in words if word.startswith("--master-port="))
        taken = socket.create_server(("", plan["gang"]["port"] if which == "gang" else master))
        time.sleep(600)
    time.sleep(0.002)
"""


def thief(which: str) -> Do:
    """Have another process on the lead take the `gang` or the `master` port as soon as a plan names it."""

    def ready(scene: Scene) -> None:
        runs = str(scene.lab.shared / "r4090c" / "runs")
        argv = scene.lab.exec_argv(scene.lead, "python3", "-I", "-S", "-c", THIEF, runs, which)
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

        def end() -> None:
            found = [one for one in scene.lab.node_processes(scene.lead) if THIEF in one.argv]
            scene.signal(scene.lead, found, "KILL")
            process.communicate(timeout=10)

        scene.undoing.callback(end)
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"

    return ready


# ------------------------------------------------------------------------------------------ the table

LEAD, MEMBER = "node01", "node02"
HANG = ("--hang-after", str(HANG_AFTER_S))

FAULTS = (
    Fault(
        "rank",
        "kill -9 of a rank",
        "nothing to undo",
        Answer("again", ("rank-killed",), MEMBER, 1, RANK_WITHIN_S),
        kill("member", "rank"),
        torch_has_a_say=True,
    ),
    Fault(
        "torchrun",
        "kill -9 of torchrun, whose ranks the kernel then ends",
        "nothing to undo",
        Answer("again", ("torchrun-killed",), MEMBER, None, RANK_WITHIN_S),
        kill("member", "torchrun"),
        torch_has_a_say=True,
    ),
    Fault(
        "agent",
        "kill -9 of a node's agent, which takes torchrun and the ranks along",
        "nothing to undo",
        Answer("again", ("agent-killed",), MEMBER, None, RANK_WITHIN_S),
        kill("member", "agent"),
    ),
    Fault(
        "lead-agent",
        "kill -9 of the agent that all others meet at",
        "nothing to undo",
        Answer("again", ("agent-killed",), LEAD, None, RANK_WITHIN_S),
        kill("lead", "agent"),
    ),
    Fault(
        "supervisor",
        "kill -9 of `r4090c launch`",
        "`r4090c attach RUN`",
        Answer("goes-on"),
        kill_supervisor,
        torch_has_a_say=True,
    ),
    Fault("sshd-stopped", "sshd and all its connections end", "sshd is started", Answer("goes-on"), stop_sshd),
    Fault("sshd-frozen", "SIGSTOP of sshd and all its connections", "SIGCONT", Answer("goes-on"), freeze_sshd),
    Fault("link-blinks", f"the cable of a node is out for {BLINK_S:g} s", "it is plugged in again", Answer("goes-on"), blink),
    Fault("nodes-paused", f"both machines stand still for {PAUSE_S:g} s", "they go on", Answer("goes-on"), pause),
    Fault(
        "link",
        "the cable of a node is pulled",
        "it is plugged in again",
        Answer("elsewhere", ("node-lost",), MEMBER, None, NODE_WITHIN_S),
        cut("member"),
        torch_has_a_say=True,
    ),
    Fault(
        "lead-link",
        "the cable of the lead's node is pulled",
        "it is plugged in again",
        Answer("elsewhere", ("node-lost",), LEAD, None, NODE_WITHIN_S),
        cut("lead"),
    ),
    Fault(
        "power",
        "a node is turned off",
        "it is turned on",
        Answer("elsewhere", ("node-lost",), MEMBER, None, NODE_WITHIN_S),
        power_off,
        torch_has_a_say=True,
    ),
    Fault(
        "frozen-rank",
        f"SIGSTOP of a rank, `--hang-after {HANG_AFTER_S}`",
        "the attempt's end kills it",
        Answer("again", ("rank-frozen",), MEMBER, 1),
        freeze_rank,
        options=HANG,
        torch_has_a_say=True,
    ),
    Fault(
        "full-disk",
        "the disk of the run folder fills up before a checkpoint",
        "room is made",
        Answer("given-up", ("disk-full",)),
        fill,
        small_runs,
        options=("--env", "TOY_STEP_S=0.5"),  # the disk is to be full before the next checkpoint
        torch_has_a_say=True,
    ),
    Fault(
        "disk-fills",
        "the disk fills up while a checkpoint is written",
        "room is made",
        Answer("given-up", ("disk-full",)),
        fill_while_saving,
        small_runs,
    ),
    Fault(
        "out-of-memory",
        f"a rank takes more and more memory, its node's processes of the run have {MEMORY_MIB} MiB: the kernel kills one",
        "the limit is gone with them",
        Answer("again", ("host-out-of-memory",), MEMBER, 1),
        starve,
    ),
    Fault(
        "wrong-interface",
        "cluster.yaml names a node's address on an interface that leads to no peer",
        "cluster.yaml is corrected",
        Answer("refused", (), MEMBER),
        ready=stray_address("member"),
    ),
    Fault(
        "no-such-address",
        "cluster.yaml names an address as the lead's that it does not have",
        "cluster.yaml is corrected",
        Answer("refused", (), LEAD),
        ready=nobodys_address("lead"),
    ),
    Fault(
        "master-port",
        "another process takes the port where the ranks meet",
        "nothing: the next attempt takes others",
        Answer("again", ("port-taken",), LEAD),
        ready=thief("master"),
    ),
    Fault(
        "gang-port",
        "another process takes the port where the agents meet",
        "nothing: the next attempt takes others",
        Answer("again", ("port-taken",), LEAD),
        ready=thief("gang"),
    ),
)
