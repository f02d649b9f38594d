"""Facts of 4, 16 and 32 nodes: `r4090c facts` against OpenSSH, Fabric and ansible with the same probe: python -m bench.fanout."""

from __future__ import annotations

import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import peertools, processes
from bench.processes import CpuAccount, Done
from bench.record import (
    REPOSITORY,
    BenchError,
    Goal,
    Record,
    arguments_parser,
    child_environment,
    package_versions,
    positive,
    ratios,
    said_version,
    spread,
    table,
)
from netcheck.facts import FACTS, questions
from netcheck.gather import PROBE_SOURCE
from r4090c.inventory import load_cluster
from tests.lab import Lab, LabError

OURS, OPENSSH, FABRIC, ANSIBLE = "r4090c facts", "OpenSSH, xargs -P32", "Fabric ThreadingGroup", "ansible -m script"
PARALLEL = 32
TIMEOUT_S = 180.0
PAUSE_S = 0.3
"""Between two runs: sshd's of the run before are gone by then."""
OPENSSH_RATIO, ANSIBLE_RATIO, CPU_MS_A_NODE = 1.15, 0.25, 25.0
"""The goals at the largest number of nodes."""


@dataclass(frozen=True)
class Contender:
    """One way to ask the nodes: its command line for some addresses, and what it makes of the output: address -> answer."""

    name: str
    argv: Callable[[list[str]], list[str]]
    answers: Callable[[Done], dict[str, Any]]
    after: Callable[[], None] = lambda: None
    environment: dict[str, str] | None = None


# --------------------------------------------------------------------------- what all of them do: log in, verify, run the probe


def write_probe(lab: Lab, folder: Path) -> Path:
    """Write our probe as one script that asks what `r4090c facts` asks the first node and prints the answer; return it."""
    cluster = load_cluster(lab.cluster_file)
    asked = {name: question.to_json() for name, question in questions(cluster.nodes[0], cluster).items()}
    probe = folder / "probe.py"
    request = json.dumps({"questions": asked})
    probe.write_text(f"{PROBE_SOURCE}\nimport sys\nsys.stdout.write(json.dumps(main(json.loads({request!r}))))\n")
    return probe


def write_ssh_config(lab: Lab, folder: Path) -> Path:
    """Write the ssh_config of OpenSSH and ansible: the lab's key, strict host keys, nothing of the user's or the system's."""
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
    }
    config.write_text("Host *\n" + "".join(f"  {name} {value}\n" for name, value in lines.items()))
    return config


def whole(answer: object) -> bool:
    """Return whether the probe's answer has every fact, each really asked."""
    if not isinstance(answer, dict):
        return False
    answers = answer.get("answers")
    return (
        isinstance(answers, dict)
        and set(answers) == set(FACTS)
        and not any("probe" in fact["errors"] for fact in answers.values())
    )


# --------------------------------------------------------------------------- contenders


def ours(lab: Lab, _: Path) -> Contender:
    """Return the real command in a fresh process, as a user types it."""
    program = Path(sys.executable).with_name("r4090c")
    if not program.exists():
        raise BenchError(f"{program} is not there; run: make setup")
    by_name = {node.name: node.address for node in lab.nodes.values()}

    def argv(addresses: list[str]) -> list[str]:
        return [str(program), "facts", "--json", "--nodes", str(len(addresses)), "--cluster", str(lab.cluster_file)]

    def answers(done: Done) -> dict[str, Any]:
        nodes = json.loads(done.stdout)["nodes"]
        kept = {}
        for name, node in nodes.items():
            complete = node["reach"]["verdict"] == "ok" and set(node["facts"]) == set(FACTS)
            # In the shape of the probe's own answer, so that one rule judges all contenders.
            errors = {fact: {"probe": "not read"} if found["error"] else {} for fact, found in node["facts"].items()}
            kept[by_name[name]] = {"answers": {fact: {"errors": error} for fact, error in errors.items()}} if complete else None
        return kept

    return Contender(OURS, argv, answers)


def openssh(lab: Lab, folder: Path) -> Contender:
    """Return 32 `ssh` at a time, the probe on stdin; kex and cipher as fast as OpenSSH has them."""
    config, probe = write_ssh_config(lab, folder), write_probe(lab, folder)
    fast = "-o KexAlgorithms=curve25519-sha256 -o Ciphers=aes128-gcm@openssh.com"
    one = f"exec ssh -F {config} {fast} NODE 'python3 -I -S -' < {probe} > {folder}/answer-NODE"

    def argv(addresses: list[str]) -> list[str]:
        for old in folder.glob("answer-*"):
            old.unlink()
        return ["sh", "-c", f"printf '%s\\n' {' '.join(addresses)} | xargs -P{PARALLEL} -INODE sh -c {shlex.quote(one)}"]

    def answers(done: Done) -> dict[str, Any]:
        return {path.name.removeprefix("answer-"): json.loads(path.read_text()) for path in folder.glob("answer-*")}

    return Contender(OPENSSH, argv, answers)


def fabric(lab: Lab, folder: Path) -> Contender:
    """Return Fabric's own way to ask a group."""
    probe, script = write_probe(lab, folder), REPOSITORY / "bench" / "fabric_client.py"

    def argv(addresses: list[str]) -> list[str]:
        return [sys.executable, str(script), str(probe), str(lab.key), str(lab.known_hosts), *addresses]

    def answers(done: Done) -> dict[str, Any]:
        return {address: json.loads(text) for address, text in json.loads(done.stdout).items()}

    return Contender(FABRIC, argv, answers)


def ansible(lab: Lab, folder: Path, cache: Path) -> Contender:
    """Return ansible's `script` module, 32 forks, pipelining, each time without a connection kept from before."""
    program, config, probe = peertools.ansible(cache), write_ssh_config(lab, folder), write_probe(lab, folder)
    masters = folder / "cp"
    (folder / "ansible.cfg").write_text(
        "[defaults]\nhost_key_checking = True\nremote_user = root\ninterpreter_python = /usr/bin/python3\n"
        f"forks = {PARALLEL}\nlocal_tmp = {folder}/tmp\nnocolor = True\n"
        "[ssh_connection]\npipelining = True\n"
        f"ssh_args = -F {config} -o ControlMaster=auto -o ControlPersist=60s\n"
        f"control_path_dir = {masters}\ncontrol_path = {masters}/%%C\n"
    )

    def argv(addresses: list[str]) -> list[str]:
        inventory = folder / "inventory"
        inventory.write_text("\n".join(["[all]", *addresses]) + "\n")
        return [str(program), "-i", str(inventory), "all", "-m", "script", "-a", f"{probe} executable='python3 -I -S'"]

    def answers(done: Done) -> dict[str, Any]:
        found, text = {}, done.stdout
        while " | CHANGED => " in text:
            address, _, text = text.partition(" | CHANGED => ")
            result, end = json.JSONDecoder().raw_decode(text)
            found[address.split()[-1]] = json.loads(result["stdout"])
            text = text[end:]
        return found

    def close_masters() -> None:
        for socket in masters.glob("*") if masters.is_dir() else ():
            leave = ["ssh", "-F", str(config), "-O", "exit", "-o", f"ControlPath={socket}", "any"]
            subprocess.run(leave, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    environment = {
        "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
        "ANSIBLE_HOME": str(folder / "home"),
        "ANSIBLE_DEPRECATION_WARNINGS": "0",
    }
    return Contender(ANSIBLE, argv, answers, close_masters, environment)


# --------------------------------------------------------------------------- one run


def measure(
    contender: Contender, addresses: list[str], client: CpuAccount, nodes: CpuAccount, folder: Path
) -> tuple[dict[str, Any], str]:
    """Return one run's figures and what is wrong with it ("" = it counts)."""
    argv = contender.argv(addresses)
    before_s = nodes.used_s()
    try:
        done = processes.run(
            argv, client, folder=folder, environment=child_environment(**(contender.environment or {})), timeout_s=TIMEOUT_S
        )
        nodes_cpu_s = nodes.used_s() - before_s
    finally:
        contender.after()
        client.kill_left()
    run = {
        "contender": contender.name,
        "nodes": len(addresses),
        "wall_s": round(done.wall_s, 4),
        "client_cpu_s": round(done.cpu_s, 4),
        "nodes_cpu_s": round(nodes_cpu_s, 4) if nodes.group else None,
    }
    return run, problem_of(contender, done, addresses)


def problem_of(contender: Contender, done: Done, addresses: list[str]) -> str:
    """Return why a run does not count: it failed, or a node's answer is missing or not whole."""
    problems = [] if done.rc == 0 else [f"rc {done.rc}"]
    try:
        answers = contender.answers(done)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        answers = {}
        problems.append(f"its output cannot be read ({type(error).__name__})")
    lacking = [address for address in addresses if not whole(answers.get(address))]
    if lacking:
        problems.append(f"{len(lacking)} of {len(addresses)} answers are not whole: {', '.join(lacking[:4])}")
    if problems and done.stderr.strip():
        problems.append(done.stderr.strip().splitlines()[-1][-200:])
    return "; ".join(problems)


def main() -> int:
    """Entry point."""
    parser = arguments_parser(__doc__ or "", rounds=5)
    parser.add_argument("--nodes", default="4,16,32", metavar="N,…", help="how many nodes to ask (default: 4,16,32)")
    parser.add_argument(
        "--cache", type=Path, default=peertools.default_cache(), metavar="FOLDER", help="where ansible is installed"
    )
    parser.add_argument("--only", default="", metavar="WORD,…", help="only contenders whose name has one of these words")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    processes.end_on_sigterm()
    try:
        counts = sorted({positive(word) for word in options.nodes.split(",")})
        bench(counts, options.rounds, options.out, options.cache, [word for word in options.only.split(",") if word])
    except (BenchError, LabError) as error:
        print(f"bench.fanout: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the lab is down", file=sys.stderr)
        return 130
    return 0


def bench(counts: list[int], rounds: int, out: Path, cache: Path, only: list[str]) -> None:
    """Bring the lab up, run everything in a shuffled order, take the lab down, and write the results."""
    with (
        tempfile.TemporaryDirectory(prefix="r4090c-bench-") as name,
        CpuAccount("client") as client,
        CpuAccount("nodes") as nodes,
    ):
        folder = Path(name)
        nodes.join()  # so that all of the lab's processes are born into it
        with Lab.up(folder / "lab", max(counts)) as lab:
            nodes.leave()
            all_contenders = [ours(lab, folder), openssh(lab, folder), fabric(lab, folder), ansible(lab, folder, cache)]
            contenders = [one for one in all_contenders if not only or any(word in one.name for word in only)]
            versions = {
                **package_versions("r4090c", "fabric", "paramiko"),
                "ansible-core": peertools.ANSIBLE.partition("==")[2],
                "ssh": said_version("ssh", "-V"),
            }
            record = Record(out, "fanout", versions=versions, rounds=rounds, nodes=counts, cpu_accounting=client.how)
            addresses = [node.address for node in lab.nodes.values()]
            for contender in contenders:  # .pyc files, page cache, ansible's own caches
                _, problem = measure(contender, addresses[: counts[0]], client, nodes, folder)
                if problem:
                    print(f"warm-up of {contender.name}: {problem}", file=sys.stderr)
            for number in range(rounds):
                order = [(contender, count) for contender in contenders for count in counts]
                random.Random(number).shuffle(order)
                for contender, count in order:
                    time.sleep(PAUSE_S)
                    run, problem = measure(contender, addresses[:count], client, nodes, folder)
                    record.add({"round": number, **run}, problem)
    report(record, [contender.name for contender in contenders], counts)


def report(record: Record, names: list[str], counts: list[int]) -> None:
    """Write the tables."""
    rows, largest = [], max(counts)
    for count in counts:
        runs = [run for run in record.runs if run["nodes"] == count]
        for name in names:
            mine = [run for run in runs if run["contender"] == name]
            rows.append(
                [
                    str(count),
                    name,
                    str(len(mine)),
                    spread([run["wall_s"] for run in mine]),
                    spread(ratios(runs, "wall_s", name, OPENSSH)),
                    spread(ratios(runs, "wall_s", name, ANSIBLE)),
                    spread([run["client_cpu_s"] for run in mine]),
                    spread([run["client_cpu_s"] * 1000 / count for run in mine], 1),
                    spread([run["nodes_cpu_s"] for run in mine if run["nodes_cpu_s"] is not None]),
                ]
            )
    heading = [
        "nodes",
        "contender",
        "runs",
        "wall s",
        "/ OpenSSH",
        "/ ansible",
        "client CPU s",
        "client CPU ms a node",
        "nodes' CPU s",
    ]
    at_largest = [run for run in record.runs if run["nodes"] == largest]
    cpu = [run["client_cpu_s"] * 1000 / largest for run in at_largest if run["contender"] == OURS]
    goals = [
        Goal(f"wall / OpenSSH, {largest} nodes", OPENSSH_RATIO, middle(ratios(at_largest, "wall_s", OURS, OPENSSH))),
        Goal(f"wall / ansible, {largest} nodes", ANSIBLE_RATIO, middle(ratios(at_largest, "wall_s", OURS, ANSIBLE))),
        Goal(f"client CPU ms a node, {largest} nodes", CPU_MS_A_NODE, middle(cpu)),
    ]
    body = f"CPU by {record.about['cpu_accounting']}. Client and nodes share the cores.\n\n"
    record.finish("Facts of many nodes", body + table(heading, rows), goals)


def middle(values: list[float]) -> float | None:
    """Return the median, None of nothing."""
    return statistics.median(values) if values else None


if __name__ == "__main__":
    sys.exit(main())
