"""Time to the first step and to the end: `r4090c launch tiny` against the same job by other launchers: python -m bench.launch."""

from __future__ import annotations

import json
import os
import random
import re
import selectors
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from bench import peertools, processes
from bench.record import (
    REPOSITORY,
    BenchError,
    Goal,
    Record,
    arguments_parser,
    child_environment,
    package_versions,
    ratios,
    said_version,
    spread,
    table,
)
from r4090c.paths import RunPaths, SharedPaths
from tests.lab import Lab, LabError

OURS, TORCHRUN, DEEPSPEED, ACCELERATE = "r4090c launch", "ssh + torchrun", "deepspeed (pdsh)", "accelerate launch"
PEER = REPOSITORY / "bench" / "peers" / "plain_zero2.py"
NODES = 2
TIMEOUT_S = 240.0
END_S = 10.0
"""How long a node may still have processes of a job whose launcher has ended."""
FIRST_STEP_RATIO, END_RATIO = 0.75, 0.6
"""The goals against hand-written ssh + torchrun."""

STEP = re.compile(r"\bSTEP (\d+) loss ([\d.]+)|^step (\d+)/\d+ ")
ENGINE = {"engine": "DeepSpeedEngine", "zero_stage": 2, "world_size": NODES, "backend": "gloo"}
"""What every contender must have run as. accelerate is known to fall back to something else without a word."""


@dataclass
class Watched:
    """One finished run: when step 1 was told here, when all was over, and all lines."""

    first_step_s: float | None
    end_s: float
    exit_codes: list[int | None]
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Contender:
    """One launcher: its command lines (started together), and what it ran, read when it is over."""

    name: str
    commands: Callable[[], Sequence[Sequence[str]]]
    proof: Callable[[Watched], tuple[dict[str, Any], dict[int, float]]]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)


# --------------------------------------------------------------------------- the job


@dataclass(frozen=True)
class Job:
    """What all contenders train: the resolved recipe, the prepared tokens, where to save, and how to reach the nodes."""

    lab: Lab
    recipe: Path
    tokens: Path
    save: Path
    ssh_config: Path

    @property
    def addresses(self) -> list[str]:
        """The nodes; the first is the master."""
        return [node.address for node in self.lab.nodes.values()]

    @property
    def script(self) -> list[str]:
        """The peers' program with its arguments."""
        return [str(PEER), "--recipe", str(self.recipe), "--tokens", str(self.tokens), "--save-dir", str(self.save)]

    @property
    def variables(self) -> dict[str, str]:
        """What a user sets by hand on such nodes; r4090c works it out."""
        return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu"}

    def on_each_node(self, command: Callable[[int], Sequence[str]]) -> list[list[str]]:
        """Return one `ssh` a node that runs `command(node rank)` with the variables."""
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return [
            ["ssh", "-F", str(self.ssh_config), address, shlex.join(["env", *variables, *command(rank)])]
            for rank, address in enumerate(self.addresses)
        ]


class Ports:
    """A port of its own for every run, so that none waits for the last one's to be free."""

    def __init__(self) -> None:
        self.last = 29600

    def next(self) -> str:
        """Return the next port."""
        self.last += 1
        return str(self.last)


def write_ssh_config(lab: Lab, folder: Path) -> Path:
    """Write the ssh_config of all peers: the lab's key, strict host keys, the fast key exchange for all of them."""
    config = folder / "ssh_config"
    lines = {
        "User": "root",
        "IdentityFile": str(lab.key),
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": str(lab.known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "LogLevel": "ERROR",
        "KexAlgorithms": "curve25519-sha256",
    }
    config.write_text("Host *\n" + "".join(f"  {name} {value}\n" for name, value in lines.items()))
    return config


MODELS: dict[str, tuple[str, ...]] = {
    "tiny": (),
    "small": (
        "model.config.hidden_size=64",
        "model.config.intermediate_size=128",
        "model.config.num_hidden_layers=2",
        "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=4",
        "data.sequence_length=64",
        "gradient_accumulation=1",
    ),
}
"""What is trained: the recipe as it is (0.3 s a step), or a model whose steps take no time (0.03 s)."""

# --------------------------------------------------------------------------- contenders


def ours(lab: Lab, steps: int, sets: Sequence[str], folder: Path) -> Contender:
    """Return the real command; what it ran is read from the run folder."""
    program = Path(sys.executable).with_name("r4090c")
    if not program.exists():
        raise BenchError(f"{program} is not there; run: make setup")
    command = [
        str(program),
        "launch",
        "tiny",
        "--nodes",
        str(NODES),
        "--set",
        f"steps={steps}",
        *(word for key in sets for word in ("--set", key)),
        "--cluster",
        str(lab.cluster_file),
    ]

    def proof(watched: Watched) -> tuple[dict[str, Any], dict[int, float]]:
        run = newest_run(lab)
        losses = [json.loads(line) for line in Path(run.metrics).read_text().splitlines()]
        told = re.search(r"^ranks +(\d+) x .*, (\w+), ZeRO stage (\d)", Path(run.rank_log(1, 0)).read_text(), re.MULTILINE)
        if told is None:
            raise ValueError(f"{run.rank_log(1, 0)} does not say what ran")
        # train/loop.py ends a run whose engine is not a DeepSpeedEngine
        ran = {"engine": "DeepSpeedEngine", "zero_stage": int(told[3]), "world_size": int(told[1]), "backend": told[2]}
        return ran, {line["step"]: line["loss"] for line in losses}

    return Contender(OURS, lambda: [command], proof, folder)


def torchrun(job: Job, ports: Ports, folder: Path) -> Contender:
    """Return what a person types: on each node, over ssh, one torchrun with a static rendezvous."""

    def commands() -> list[list[str]]:
        port = ports.next()
        shape = ["--nnodes", str(NODES), "--nproc_per_node", "1", "--master_addr", job.addresses[0], "--master_port", port]
        return job.on_each_node(
            lambda rank: [sys.executable, "-m", "torch.distributed.run", *shape, "--node_rank", str(rank), *job.script]
        )

    return Contender(TORCHRUN, commands, peers_proof, folder)


def deepspeed(job: Job, ports: Ports, folder: Path) -> Contender:
    """Return DeepSpeed's own launcher: a hostfile, pdsh, and variables for the ranks from .deepspeed_env.

    It calls `ssh` and pdsh without options of ours, so our ssh_config lies over the system's in a mount namespace of its own.
    """
    peertools.system_program("pdsh", "pdsh")
    program = Path(sys.executable).with_name("deepspeed")
    if not program.exists():
        raise BenchError(f"{program} is not there; run: make setup")
    home = job.lab.shared / "deepspeed"  # it changes to the same folder on the nodes
    home.mkdir(exist_ok=True)
    (home / "hostfile").write_text("".join(f"{address} slots=1\n" for address in job.addresses))
    (home / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in job.variables.items()))
    inside = ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" /etc/ssh/ssh_config && cd "$2" && shift 2 && exec "$@"', "sh"]

    def commands() -> list[list[str]]:
        where = ["--hostfile", "hostfile", "--master_addr", job.addresses[0], "--master_port", ports.next()]
        return [[*inside, str(job.ssh_config), str(home), str(program), *where, *job.script]]

    path = f"{program.parent}:{os.environ['PATH']}"
    return Contender(DEEPSPEED, commands, peers_proof, folder, {"PATH": path, "DS_ACCELERATOR": "cpu"})


def accelerate(job: Job, ports: Ports, folder: Path, python: Path) -> Contender:
    """Return `accelerate launch` over ssh on each node, with its DeepSpeed launcher `standard`."""

    def commands() -> list[list[str]]:
        port = ports.next()
        shape = ["--num_machines", str(NODES), "--num_processes", str(NODES), "--main_process_ip", job.addresses[0]]
        how = ["--use_deepspeed", "--deepspeed_multinode_launcher", "standard", "--zero_stage", "2"]
        rest = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port]
        launch = [str(python), "-m", "accelerate.commands.accelerate_cli", "launch", *shape, *how, *rest]
        return job.on_each_node(lambda rank: [*launch, "--machine_rank", str(rank), *job.script])

    return Contender(ACCELERATE, commands, peers_proof, folder)


def peers_proof(watched: Watched) -> tuple[dict[str, Any], dict[int, float]]:
    """Return what the peers' program says it ran, and its losses."""
    told = [re.search(r"\bENGINE (\w+) zero (\d) world (\d+) backend (\w+)", line) for line in watched.lines]
    found = next((match for match in told if match), None)
    if found is None:
        raise ValueError(f"{PEER.name} did not say what it ran as")
    ran = {"engine": found[1], "zero_stage": int(found[2]), "world_size": int(found[3]), "backend": found[4]}
    steps = [match for match in map(STEP.search, watched.lines) if match and match[1]]
    return ran, {int(match[1]): float(match[2]) for match in steps}


def newest_run(lab: Lab) -> RunPaths:
    """Return the youngest run folder. Raises ValueError when there is none."""
    runs = sorted(Path(SharedPaths(PurePosixPath(lab.shared)).runs).glob("tiny-*"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ValueError("there is no run folder")
    return RunPaths(PurePosixPath(runs[-1]))


# --------------------------------------------------------------------------- one run


def watch(commands: Sequence[Sequence[str]], contender: Contender) -> Watched:
    """Start the commands together and read their lines until all have ended; kill what has not after TIMEOUT_S."""
    began = time.perf_counter()
    started: list[subprocess.Popen[bytes]] = []
    watched = Watched(None, 0.0, [])
    try:
        for command in commands:
            started.append(
                subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=contender.folder,
                    env=child_environment(**contender.environment),
                    start_new_session=True,
                )
            )
        if read_lines(started, watched, began):
            watched.exit_codes = [process.wait() for process in started]
            watched.end_s = time.perf_counter() - began
        else:
            watched.exit_codes = [process.returncode for process in started]  # not reaped yet: its session is killed below
    finally:
        for process in started:
            processes.kill_group(process)
            if process.stdout:
                process.stdout.close()
    return watched


def read_lines(started: Sequence[subprocess.Popen[bytes]], watched: Watched, began: float) -> bool:
    """Read until every pipe is closed, noting when step 1 was told; False when that takes more than TIMEOUT_S."""
    rest: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for process in started:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ)
            rest[process.stdout.fileno()] = b""
        while selector.get_map():
            left_s = began + TIMEOUT_S - time.perf_counter()
            ready = selector.select(left_s) if left_s > 0 else []
            if not ready:
                return False
            for key, _ in ready:
                chunk = os.read(key.fd, 65_536)
                now_s = time.perf_counter() - began
                if not chunk:
                    selector.unregister(key.fileobj)
                    continue
                *lines, rest[key.fd] = (rest[key.fd] + chunk).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace").rstrip("\r")
                    watched.lines.append(text)
                    match = STEP.search(text)
                    if match and (match[1] or match[3]) == "1" and watched.first_step_s is None:
                        watched.first_step_s = now_s
    return True


def problem_of(contender: Contender, watched: Watched, steps: int, expected: dict[int, float]) -> str:
    """Return why a run does not count ("" = it does): it failed, ran as something else, or its losses are not ours.

    `expected` are the losses of the first run of ours, filled in by it.
    """
    tail = " / ".join(line for line in watched.lines[-8:] if line.strip())[-600:]
    if not watched.exit_codes or any(watched.exit_codes) or None in watched.exit_codes:
        return f"exit codes {watched.exit_codes}: {tail}"
    if watched.first_step_s is None:
        return f"no line for step 1: {tail}"
    try:
        ran, losses = contender.proof(watched)
    except (OSError, ValueError, KeyError) as error:
        return f"{error}: {tail}"
    if ran != ENGINE:
        return f"it ran as {ran}, not as {ENGINE}"
    if sorted(losses) != list(range(1, steps + 1)):
        return f"steps {sorted(losses)} instead of 1 to {steps}"
    if not expected:
        expected.update(losses)
    different = [step for step in losses if f"{losses[step]:.6f}" != f"{expected[step]:.6f}"]
    if different:
        step = different[0]
        return f"loss {losses[step]:.6f} at step {step}, ours is {expected[step]:.6f}"
    return ""


def wait_until_idle(lab: Lab) -> list[str]:
    """Return once no node runs anything; what is still there after END_S is killed and returned."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        if not any(lab.processes(name) for name in lab.nodes):
            return []
        time.sleep(0.1)
    left = [(name, pid, command) for name in lab.nodes for pid, command in lab.processes(name)]
    for name, pid, _ in left:
        try:
            lab.kill(name, pid)
        except LabError:  # it went by itself
            continue
    return [f"{name}: {command[:80]}" for name, _, command in left]


def main() -> int:
    """Entry point."""
    parser = arguments_parser(__doc__ or "", rounds=5)
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="optimizer steps of the job (default: 10)")
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="small", help="small: stepping takes no time, so launching is all that counts"
    )
    parser.add_argument(
        "--cache", type=Path, default=peertools.default_cache(), metavar="FOLDER", help="where accelerate is installed"
    )
    parser.add_argument(
        "--only", default="", metavar="WORD,…", help="only contenders whose name has one of these words (ours always)"
    )
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    processes.end_on_sigterm()
    try:
        only = [word for word in options.only.split(",") if word]
        bench(options.rounds, options.steps, options.model, options.out, options.cache, only)
    except (BenchError, LabError) as error:
        print(f"bench.launch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the lab is down", file=sys.stderr)
        return 130
    return 0


def bench(rounds: int, steps: int, model: str, out: Path, cache: Path, only: list[str]) -> None:
    """Bring two nodes up, prepare the data with an uncounted run of ours, run all in a shuffled order, write the results."""
    with tempfile.TemporaryDirectory(prefix="r4090c-bench-") as name, Lab.up(Path(name) / "lab", NODES) as lab:
        folder = Path(name)
        first, expected = ours(lab, steps, MODELS[model], folder), dict[int, float]()
        problem = problem_of(first, watch(first.commands(), first), steps, expected)
        if problem:
            raise BenchError(f"our own first run does not count: {problem}")
        job = job_of(lab, folder)
        ports = Ports()
        peers = [torchrun(job, ports, folder), deepspeed(job, ports, folder)]
        peers.append(accelerate(job, ports, folder, peertools.accelerate(cache)))
        contenders = [first, *(peer for peer in peers if not only or any(word in peer.name for word in only))]
        versions = {
            **package_versions("r4090c", "torch", "deepspeed", "transformers", "fabric", "paramiko"),
            "accelerate": peertools.ACCELERATE.partition("==")[2],
            "pdsh": said_version("pdsh", "-V"),
            "ssh": said_version("ssh", "-V"),
        }
        record = Record(out, f"launch-{model}", versions=versions, rounds=rounds, nodes=NODES, steps=steps, model=model)
        for number in range(-1, rounds):  # round -1 writes .pyc files and warms the page cache; it is not kept
            order = contenders[1:] if number < 0 else contenders[:]
            random.Random(number).shuffle(order)
            for contender in order:
                left = wait_until_idle(lab)
                if left:
                    print(f"killed what a launcher left running: {'; '.join(left)}", file=sys.stderr)
                shutil.rmtree(job.save, ignore_errors=True)
                watched = watch(contender.commands(), contender)
                problem = problem_of(contender, watched, steps, expected)
                if number >= 0:
                    run = {"first_step_s": rounded(watched.first_step_s), "end_s": round(watched.end_s, 3)}
                    record.add({"round": number, "contender": contender.name, **run}, problem)
                elif problem:
                    print(f"warm-up of {contender.name}: {problem}", file=sys.stderr)
    report(record, [contender.name for contender in contenders])


def job_of(lab: Lab, folder: Path) -> Job:
    """Return the job of the run that ours just made: its resolved recipe and the data it prepared."""
    tokens = list(Path(SharedPaths(PurePosixPath(lab.shared)).data).glob("*/tokens.bin"))
    if len(tokens) != 1:
        raise BenchError(f"expected one prepared data set below {lab.shared}, found {len(tokens)}")
    recipe = lab.shared / "recipe.json"
    shutil.copyfile(newest_run(lab).recipe, recipe)
    return Job(lab, recipe, tokens[0], lab.shared / "peers-checkpoints", write_ssh_config(lab, folder))


def rounded(value: float | None) -> float | None:
    """Return milliseconds' worth of digits."""
    return None if value is None else round(value, 3)


def report(record: Record, names: list[str]) -> None:
    """Write the tables."""
    rows = []
    for name in names:
        mine = [run for run in record.runs if run["contender"] == name]
        rows.append(
            [
                name,
                str(len(mine)),
                spread([run["first_step_s"] for run in mine]),
                spread(ratios(record.runs, "first_step_s", name, TORCHRUN)),
                spread([run["end_s"] for run in mine]),
                spread(ratios(record.runs, "end_s", name, TORCHRUN)),
            ]
        )
    first, end = (ratios(record.runs, key, OURS, TORCHRUN) for key in ("first_step_s", "end_s"))
    goals = [
        Goal(f"to the first step / {TORCHRUN}", FIRST_STEP_RATIO, statistics.median(first) if first else None),
        Goal(f"to the end / {TORCHRUN}", END_RATIO, statistics.median(end) if end else None),
    ]
    heading = ["launcher", "runs", "to the first step s", f"/ {TORCHRUN}", "to the end s", f"/ {TORCHRUN}"]
    sets = MODELS[str(record.about["model"])]
    changed = f" with `{' '.join(sets)}`" if sets else ""
    job = f"Recipe `tiny`{changed}, {record.about['steps']} steps, {NODES} nodes, a rank each, on the CPU (gloo), one checkpoint."
    record.finish("Launch", f"{job}\n\n{table(heading, rows)}", goals)


if __name__ == "__main__":
    sys.exit(main())
