"""Launch: wish and facts -> gate -> code on every node -> plan -> agents -> followed to the end."""

from __future__ import annotations

import json
import logging
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from launch.forecast import Forecast, fewer_nodes, forecast_json, refusal
from launch.holders import GpusTaken, holders, wait_until_free
from launch.jobs import HOLD_S, Run, find_run, hold_between, list_runs
from launch.measured import Known, remembered
from launch.plan import HANG, Code, Hang, Job, Plan, Ports, make_plan
from launch.planning import command_of, foresee, other_ways, told_options
from launch.recipe import (
    accumulation_of,
    at_world_size,
    is_script,
    load_recipe,
    require_trainable,
    untrainable,
    world_sizes_allowed,
)
from launch.site import Measured, Site, between_nodes, site_of
from launch.supervise import NOBODY_S, Supervisor
from launch.sync import AGENT, PROJECT, digest_of, our_files, sync, user_files
from netcheck.judge import exit_code
from netcheck.measure.job import Level
from netcheck.p2p import fingerprint
from netcheck.preflight import run_preflight
from r4090c.errors import CheckFailed, CouldNotTell, Exit, R4090cError, TrainingFailed, UsageError
from r4090c.model import Cluster, Finding, Node, NodeFacts, P2pProof, PortTest, Status
from r4090c.paths import RunPaths, SharedPaths, new_run_id
from r4090c.remote import Fleet, Shell
from r4090c.store import p2p_proofs, port_tests, preflight_records

HOLD_JOIN_S = 2.0
"""est.: a note that is under way arrives within this, or was sent to a node that does not answer."""
MASTER_PORT_DRY, GANG_PORT_DRY = 29500, 29501
"""What a dry run shows; a real one takes ports that are free on the lead."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asked for."""

    target: str
    sets: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()
    nodes_chosen: bool = True
    """False = `nodes` is all there are, because nobody said; then a resumed run takes its own."""
    nproc: int | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    code: Path | None = None
    resume: str | None = None
    """None = a new run; "" = the recipe's last run; else a run id."""
    gate: bool = True
    label: str = ""
    """What the run is called in ids and in `jobs`, when that is not the recipe's name."""
    affinity: bool = True
    """False = no rank is bound to CPUs or memory, and GPUs stay in PCI order."""
    anyway: bool = False
    """True = start also what does not fit or is pointless."""
    again: bool = False
    """True = the next attempt of run `resume`, by its supervisor: as it was, from its last complete checkpoint if it has one."""
    queue: bool = False
    """True = wait for GPUs that another run holds."""
    hang: Hang | None = HANG
    """When a rank that makes no progress ends the attempt; None = never."""
    policy: tuple[str, ...] = ()
    """What follows an attempt that fails, as options of `launch`: for whoever takes over from its supervisor."""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of `launch` that hold for every attempt of the run."""
        return (*(() if self.gate else ("--no-gate",)), *(("--anyway",) if self.anyway else ()), *self.policy)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is decided before the nodes are touched: the job, the run folder, what is written and sent."""

    job: Job
    run: RunPaths
    attempt: int
    recipe: dict[str, Any] | None
    files: Mapping[str, bytes]
    nodes: tuple[Node, ...]
    warnings: tuple[str, ...] = ()


def counted(number: int, noun: str) -> str:
    """Return "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def prepare(fleet: Fleet | None, cluster: Cluster, wish: Wish) -> Prepared:
    """Return what is to be run. Asks the nodes only to resume; without that `fleet` may be None. Raises UsageError."""
    runs_folder = PurePosixPath(wish.nodes[0].paths.runs)
    if is_script(wish.target):
        return _prepare_script(fleet, cluster, wish, runs_folder)
    previous: Run | None = None
    nodes, nproc = wish.nodes, wish.nproc
    if wish.again:
        assert fleet is not None and wish.resume
        previous = find_run(fleet, cluster, wish.resume)
        tried = previous.attempted or previous.resolved
        if tried is None:
            raise UsageError(f"run {previous.id}", "its recipe cannot be read", "the file it was started with", "r4090c jobs")
        recipe = at_world_size(tried, len(nodes) * _nproc_of(previous, wish), previous.plan["world_size"])
    elif wish.resume is not None:
        assert fleet is not None
        recipe_name = load_recipe(wish.target)["name"] if wish.target else None
        previous = find_run(fleet, cluster, wish.resume) if wish.resume else _last_run(fleet, cluster, str(recipe_name))
        _require_ended(fleet, previous)
        recipe = _resumed_recipe(previous, recipe_name, wish)
        nodes, nproc = _resumed_place(cluster, previous, recipe, wish)
        recipe = at_world_size(recipe, len(nodes) * nproc, previous.plan["world_size"])
    else:
        recipe = load_recipe(wish.target, wish.sets)
    run = RunPaths(runs_folder / (previous.id if previous else new_run_id(wish.label or recipe["name"])))
    recipe["resume"] = previous is not None
    shared = SharedPaths(PurePosixPath(nodes[0].paths.shared))
    attempt = previous.attempt + 1 if previous else 1
    places = ("--recipe", str(run.attempt_recipe(attempt)), "--run-dir", str(run.root), "--data-dir", str(shared.data))
    script = f"train/{recipe['script']}"
    name = previous.recipe if previous and wish.again else wish.label or recipe["name"]
    job = Job(name, script, (*places, *wish.args), nproc, recipe["steps"], wish.env, wish.affinity, wish.hang, wish.options)
    return Prepared(job, run, attempt, recipe, our_files(), nodes, _not_taken(previous, wish))


def extra_arguments(plan: Plan) -> tuple[str, ...]:
    """Return the arguments that a recipe's launch was given after `--`: they follow the script and its three places."""
    return plan.script[1 + 2 * 3 :]


def _prepare_script(fleet: Fleet | None, cluster: Cluster, wish: Wish, runs_folder: PurePosixPath) -> Prepared:
    script = Path(wish.target)
    if not script.is_file():
        raise UsageError(wish.target, "no such file", "a Python script, or a recipe's name", "r4090c launch --help")
    if wish.sets or (wish.resume is not None and not wish.again):
        raise UsageError(
            wish.target,
            "--set and --resume are for recipes",
            "arguments of your script after --",
            f"r4090c launch {wish.target} -- --resume",
        )
    root = (wish.code or script.parent).resolve()
    files = {**our_files(), **user_files(script, wish.code)}
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in script.stem).strip("-") or "script"
    own = f"user/{script.resolve().relative_to(root).as_posix()}"
    job = Job(name, own, wish.args, wish.nproc, None, wish.env, wish.affinity, wish.hang, wish.options)
    if not wish.again:
        return Prepared(job, RunPaths(runs_folder / new_run_id(name)), 1, None, files, wish.nodes)
    assert fleet is not None and wish.resume
    previous = find_run(fleet, cluster, wish.resume)
    return Prepared(job, RunPaths(runs_folder / previous.id), previous.attempt + 1, None, files, wish.nodes)


def _last_run(fleet: Fleet, cluster: Cluster, recipe: str) -> Run:
    for run in list_runs(fleet, cluster):
        if run.recipe == recipe:
            return find_run(fleet, cluster, run.id)
    raise UsageError(
        "--resume", f"recipe {recipe} has no run in {cluster.nodes[0].paths.runs}", "an earlier run", f"r4090c launch {recipe}"
    )


def _require_ended(fleet: Fleet, previous: Run) -> None:
    """Raise UsageError where an agent of the run lives: on any node it ever had, whatever clocks and the run folder say."""
    nodes = [name for name in (*previous.nodes, *previous.earlier_nodes) if name in fleet.nodes]

    def alive(shell: Shell) -> bool:
        found = shell.ask(AGENT, {"do": "state", "run_id": previous.id, "node": shell.node.name}).value
        return isinstance(found, dict) and bool(found["alive"])

    living = [name for name, answer in fleet.map(alive, nodes).items() if answer is True]
    if living:
        told = f"goes on on {', '.join(living)}"
        raise UsageError(f"run {previous.id}", told, "a run that has ended", f"r4090c stop {previous.id}")


def _resumed_recipe(previous: Run, name: str | None, wish: Wish) -> dict[str, Any]:
    """Return the recipe of the run that is resumed, with this launch's --set applied; `name`: of the recipe asked for."""
    if previous.state == "running":
        raise UsageError(f"run {previous.id}", "still runs", "a run that has ended", f"r4090c stop {previous.id}")
    if previous.between is not None:
        told = f"{previous.between.get('who')} is about to start its next attempt"
        raise UsageError(f"run {previous.id}", told, "a run that nobody supervises", f"r4090c stop {previous.id}   (ends that)")
    copied = ((previous.resolved or {}).get("checkpoint") or {}).get("copy_to")
    if not previous.checkpoints and not copied:
        observed = "has no complete checkpoint to continue from"
        raise UsageError(
            f"run {previous.id}",
            observed,
            "a run that has saved one",
            f"r4090c launch {wish.target or previous.recipe}   (starts anew)",
        )
    if previous.resolved is None or (name is not None and previous.recipe != name):
        raise UsageError(
            f"run {previous.id}",
            f"is of {previous.recipe}" + (f", not of recipe {name}" if name else ", and not of a recipe"),
            f"a run of {name or 'a recipe'}",
            "r4090c jobs",
        )
    recipe = load_recipe(wish.target, wish.sets, base=dict(previous.resolved))
    if previous.state == "done" and previous.step is not None and previous.step >= recipe["steps"]:
        observed = f"is done: step {previous.step} of {recipe['steps']}"
        more = f"r4090c launch --resume {previous.id} --set steps={2 * recipe['steps']}"
        raise UsageError(f"run {previous.id}", observed, "a run with steps left", more)
    return recipe


def _not_taken(previous: Run | None, wish: Wish) -> tuple[str, ...]:
    """Return a warning where a run that is resumed was given a recipe file that says something else than the run's own."""
    if previous is None or previous.resolved is None or wish.again or not wish.target.endswith((".yaml", ".yml")):
        return ()
    told = load_recipe(wish.target)
    differ = sorted(key for key in told if key != "resume" and told[key] != previous.resolved.get(key))
    if not differ:
        return ()
    what = "; ".join(f"{key} ({_short(told[key])} there, {_short(previous.resolved.get(key))} in the run)" for key in differ[:5])
    return (f"a run goes on by its own recipe: not taken from {wish.target}: {what}; use --set",)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _nproc_of(previous: Run, wish: Wish) -> int:
    """Return the ranks of a node: as many as asked for, else as the run had."""
    return wish.nproc or len(previous.plan["nodes"][0]["ranks"])


def _resumed_place(cluster: Cluster, previous: Run, recipe: Mapping[str, Any], wish: Wish) -> tuple[tuple[Node, ...], int]:
    """Return the nodes and ranks a node on which `previous` can go on. Raises UsageError where its checkpoint does not load."""
    world, nproc = previous.plan["world_size"], _nproc_of(previous, wish)
    nodes = wish.nodes
    if not wish.nodes_chosen:
        known = {node.name: node for node in cluster.nodes}
        missing = [name for name in previous.nodes if name not in known]
        if missing:
            told = f"{', '.join(missing)} is no longer in the inventory"
            raise UsageError(f"run {previous.id}", told, f"--nodes with {len(previous.nodes)} nodes", "r4090c nodes")
        nodes = tuple(known[name] for name in previous.nodes)
    refused = world_sizes_allowed(recipe, len(nodes) * nproc, world)
    if refused is not None:
        observed = f"{len(nodes)} nodes × {nproc} ranks: {refused}"
        how = " or ".join(f"{n} × {world // n}" for n in range(1, world + 1) if world % n == 0)
        raise UsageError(
            f"run {previous.id}",
            observed,
            f"the same world size, {world} (nodes × ranks: {how})",
            f"r4090c launch --resume {previous.id}",
        )
    return nodes, nproc


def gate(findings: Sequence[Finding]) -> None:
    """Raise CheckFailed or CouldNotTell when the nodes are not fit to launch on."""
    code = exit_code(findings)
    if code == Exit.OK:
        return
    wanted = Status.FAIL if code == Exit.FAILED else Status.UNKNOWN
    bad = [finding for finding in findings if finding.status is wanted]
    if wanted is Status.UNKNOWN:  # of a node that was not reached nothing else is known either: the first tells it
        bad = list({one.subject: one for one in reversed(bad)}.values())[::-1]
    lines = []
    for one in bad[:5]:
        expected = f" (expected {one.expected})" if one.expected else ""
        lines.append(f"{one.subject}: {one.check}: {one.observed}{expected}\n    mend: {one.remedy}")
    more = f"\n  and {len(bad) - 5} more" if len(bad) > 5 else ""
    kind = CheckFailed if code == Exit.FAILED else CouldNotTell
    nodes = {one.subject.partition("/")[0] for one in bad}
    raise kind(
        nodes.pop() if len(nodes) == 1 else "the cluster",
        "not fit to launch on\n  " + "\n  ".join(lines) + more,
        "",
        "r4090c preflight   (or launch with --no-gate)",
    )


def refuse(wish: Wish, recipe: Mapping[str, Any] | None, foreseen: Forecast | None) -> CheckFailed | None:
    """Return the error that tells why the run is not to be started, and what fits instead; None when it is worth it."""
    if foreseen is None or recipe is None or foreseen.worth_it or wish.anyway:
        return None
    options, target = told_options(wish.nproc, wish.env), wish.target or recipe["name"]
    where = (*(("--nodes", ",".join(node.name for node in wish.nodes)) if wish.nodes_chosen else ()), *options)
    everything = command_of("plan", target, wish.sets, where=where)
    if wish.resume is not None:  # what a checkpoint was written by is what it loads into
        return refusal(foreseen, f"{everything}   (or launch with --anyway)")
    unbound = () if wish.affinity else ("--no-affinity",)
    fewer = fewer_nodes(foreseen)
    if fewer is not None:
        names = ",".join(foreseen.site.node_names[: fewer.nodes])
        first = command_of("launch", target, wish.sets, where=("--nodes", names, *options, *unbound))
        return refusal(foreseen, f"{first}   (as much on fewer nodes; or launch with --anyway)")
    found = other_ways(recipe, foreseen)
    if not found:
        return refusal(foreseen, f"{everything}   (or launch with --anyway)")
    rate, unit = found[0].prediction.units_per_s, found[0].prediction.unit
    told = "fits" if rate is None else f"fits, {rate:,.0f} {unit}/s expected"
    first = command_of("launch", target, wish.sets, found[0].sets, (*where, *unbound))
    return refusal(foreseen, f"{first}   ({told}; {everything} shows all that does; or launch with --anyway)")


def require_valid(recipe: Mapping[str, Any]) -> None:
    """Raise UsageError naming every value that the ranks would refuse. Asks train/recipe.py, in a process of its own."""
    program = PROJECT / "train" / "recipe.py"
    asked = [sys.executable, str(program), "--check"]
    done = subprocess.run(asked, input=json.dumps(recipe), capture_output=True, text=True)
    if done.returncode == Exit.USAGE and done.stdout:
        culprit, observed, expected, remedy = json.loads(done.stdout)
        raise UsageError(culprit, observed, expected, remedy if remedy.startswith("--set") else "r4090c recipes --schema")
    if done.returncode != 0:
        raise R4090cError(str(program), f"ended with {done.returncode}: {done.stderr.strip()[-300:]}", "an answer")


def dry_plan(fleet: Fleet, cluster: Cluster, wish: Wish) -> tuple[Plan, Forecast | None, CheckFailed | None]:
    """Return the plan a launch would use, its forecast, and why it would be refused; changes nothing on the nodes."""
    prepared = prepare(fleet, cluster, wish)
    blocked = untrainable(prepared.recipe) if prepared.recipe is not None else ()
    if prepared.recipe is not None and not blocked:
        require_valid(prepared.recipe)
    _, facts, findings = run_preflight(fleet, cluster, prepared.nodes, level=Level.QUICK)
    if wish.gate:
        gate(findings)
    plan, site = paper_plan(cluster, prepared, facts, what_is_known(cluster, prepared.nodes, facts))
    plan, foreseen = _foreseen(plan, prepared, site)
    if blocked:
        plan = replace(plan, warnings=(*plan.warnings, f"launch refuses it: this version does not train {'; '.join(blocked)}"))
    return plan, foreseen, refuse(wish, prepared.recipe, foreseen)


def paper_plan(cluster: Cluster, prepared: Prepared, facts: Mapping[str, NodeFacts], known: Known) -> tuple[Plan, Site]:
    """Return the plan of a run that nobody starts, with example ports, and the site it is for. Raises UsageError."""
    digest = digest_of(prepared.files)
    code = Code(str(SharedPaths(PurePosixPath(prepared.nodes[0].paths.shared)).code_tree(digest)), digest)
    return _plan(cluster, prepared, facts, known, code, Ports(MASTER_PORT_DRY, GANG_PORT_DRY))


def _plan(
    cluster: Cluster, prepared: Prepared, facts: Mapping[str, NodeFacts], known: Known, code: Code, ports: Ports
) -> tuple[Plan, Site]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    plan = make_plan(
        cluster,
        prepared.nodes,
        facts,
        prepared.job,
        run=prepared.run,
        attempt=prepared.attempt,
        code=code,
        ports=ports,
        created_at=created,
        p2p=known.p2p,
        port_tests=known.port_tests,
    )
    plan = replace(plan, warnings=(*plan.warnings, *prepared.warnings))
    if prepared.recipe is not None:
        accumulation_of(prepared.recipe, plan.world_size)  # its ranks would refuse it too, but later
    ranks = plan.world_size // len(plan.nodes)
    p2p_off = {node.name for node in plan.nodes if "NCCL_P2P_DISABLE" in node.env and node.env["NCCL_P2P_DISABLE"].value != "0"}
    used = {name: proof for name, proof in known.p2p.items() if name not in p2p_off}  # what people set goes before any proof
    site = site_of(cluster, prepared.nodes, facts, ranks, known.measured, used)
    ib_off = plan.nodes[0].env.get("NCCL_IB_DISABLE")
    if site.between is not None and cluster.network.rdma and ib_off is not None and ib_off.value == "1":
        # RDMA is stated and cannot be used: the run goes over sockets, whatever was measured over RDMA before.
        sockets = between_nodes("tcp", site.between.rate_gbit_s)
        site = replace(site, between=replace(sockets, origin=f"{sockets.origin}; {ib_off.reason}"))
    return plan, site


def _foreseen(plan: Plan, prepared: Prepared, site: Site) -> tuple[Plan, Forecast | None]:
    """Return the plan with the forecast in it, and the forecast; None where nobody can tell, as of a script of the user's own."""
    if prepared.recipe is None:
        return plan, None
    try:
        foreseen = foresee(prepared.recipe, site)
    except UsageError as error:  # as a DeepSpeed configuration that lies on the nodes only: nothing is wrong with running it
        logging.getLogger(__name__).warning("memory and speed are not planned: %s", error)
        return plan, None
    return replace(plan, forecast=forecast_json(foreseen)), foreseen


def what_is_known(cluster: Cluster, nodes: Sequence[Node], facts: Mapping[str, NodeFacts]) -> Known:
    """Return what is remembered here of the nodes."""
    return Known(known_proofs(cluster, nodes, facts), known_port_tests(cluster), known_measurements(cluster, nodes))


def known_measurements(cluster: Cluster, nodes: Sequence[Node]) -> Measured:
    """Return what the last preflight that measured links of these nodes found."""
    try:
        return remembered(preflight_records(cluster.name), [node.name for node in nodes])
    except UsageError as error:
        logging.getLogger(__name__).warning("what was measured cannot be read: %s", error)
        return Measured()


def known_proofs(cluster: Cluster, nodes: Sequence[Node], facts: Mapping[str, NodeFacts]) -> dict[str, P2pProof]:
    """Return node -> what the last two-arm test of P2P showed, of the nodes that are still what they were then."""
    if not any(node.gpus for node in nodes):
        return {}
    try:
        kept = p2p_proofs(cluster.name)
    except UsageError as error:  # no history is no reason not to train: P2P stays off
        logging.getLogger(__name__).warning("what is known of P2P cannot be read: %s", error)
        return {}
    return {
        node.name: kept[node.name]
        for node in nodes
        if node.name in kept and kept[node.name].fingerprint == fingerprint(facts[node.name])
    }


def known_port_tests(cluster: Cluster) -> dict[str, dict[str, PortTest]]:
    """Return node -> RDMA port -> what its last bandwidth test showed, as far as it is remembered here."""
    if not cluster.network.rdma:
        return {}
    try:
        return port_tests(cluster.name)
    except UsageError as error:  # no history is no reason not to train
        logging.getLogger(__name__).warning("what is known of RDMA ports cannot be read: %s", error)
        return {}


def start(
    fleet: Fleet,
    cluster: Cluster,
    wish: Wish,
    say: Callable[[str], None],
    announce: Callable[[Plan], None] = lambda plan: None,
    me: Mapping[str, str] | None = None,
    nobody_s: float = NOBODY_S,
) -> Supervisor:
    """Check, sync, plan and start; return the supervisor of the running attempt. Raises R4090cError; nothing is left then.

    `announce(plan)` is called before anything runs: from then on the run has an id that can be stopped.
    Facts are gathered and the code is synced at the same time; the gate judges before any rank starts. Raises GpusTaken where
    another run holds the GPUs, or waits for them (`wish.queue`). `me`: of the supervisor of the attempts before; `nobody_s`: see
    Supervisor.
    """

    def require_wanted() -> None:
        if wish.again and wish.resume:
            require_next(fleet, find_run(fleet, cluster, wish.resume), me)

    while True:
        try:
            return _start(fleet, cluster, wish, say, announce, me, nobody_s)
        except GpusTaken as taken:
            if not wish.queue:
                raise
            wait_until_free(fleet, taken, say, require_wanted)


def require_next(fleet: Fleet, run: Run, me: Mapping[str, str] | None) -> None:
    """Raise TrainingFailed unless supervisor `me` is the one to start the next attempt of `run`; note for others that it is."""
    if run.stopped_by:
        raise TrainingFailed(f"run {run.id}", f"stopped by {run.stopped_by}", "", f"r4090c launch --resume {run.id}")
    other = hold_between(fleet, run.run_dir, me) if me is not None else None
    if other is not None:
        raise TrainingFailed(f"run {run.id}", f"{other} starts its next attempt", "", f"r4090c attach {run.id}")


@contextmanager
def held(fleet: Fleet, run_dir: str, me: Mapping[str, str] | None) -> Iterator[None]:
    """Have others know all through the block that `me` is about to start the next attempt: a check or a sync may take minutes."""
    over = threading.Event()

    def hold() -> None:
        while me is not None and not over.wait(HOLD_S / 3):
            with suppress(R4090cError):  # who cannot be reached now is asked again
                hold_between(fleet, run_dir, me)

    thread = threading.Thread(target=hold, daemon=True, name="hold")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(HOLD_JOIN_S)


def _start(
    fleet: Fleet,
    cluster: Cluster,
    wish: Wish,
    say: Callable[[str], None],
    announce: Callable[[Plan], None],
    me: Mapping[str, str] | None,
    nobody_s: float,
) -> Supervisor:
    prepared = prepare(fleet, cluster, wish)
    with held(fleet, str(prepared.run.root), me) if wish.again else nullcontext():
        plan, files = _checked(fleet, cluster, wish, prepared, say)
    supervisor = Supervisor(fleet, plan, secrets.token_hex(16), me=me, nobody_s=nobody_s)
    if wish.again:
        run = find_run(fleet, cluster, plan.run_id)
        if run.attempt >= plan.attempt:
            told = f"somebody else has started attempt {run.attempt}"
            raise TrainingFailed(f"run {run.id}", told, "", f"r4090c attach {run.id}")
        require_next(fleet, run, me)
    announce(plan)
    say(f"starting {counted(plan.world_size, 'rank')} on {', '.join(node.name for node in plan.nodes)}")
    supervisor.start(files, again=wish.again)
    return supervisor


def _checked(
    fleet: Fleet, cluster: Cluster, wish: Wish, prepared: Prepared, say: Callable[[str], None]
) -> tuple[Plan, dict[str, str]]:
    """Return the plan of an attempt that may start, and the files (path -> text) it is to find; its code is on the nodes then."""
    if prepared.recipe is not None:
        require_trainable(prepared.recipe)
    names = [node.name for node in prepared.nodes]
    synced: list[tuple[Code, Ports] | BaseException] = []

    def bring_code() -> None:
        try:
            if prepared.recipe is not None:
                require_valid(prepared.recipe)  # here, as it takes a quarter of a second
            synced.append(sync(fleet, names, prepared.nodes[0].paths.shared, prepared.files))
        except BaseException as error:  # noqa: BLE001 -- carried to the caller's thread
            synced.append(error)

    say(f"checking {counted(len(names), 'node')}, syncing the code")
    thread = threading.Thread(target=bring_code, daemon=True)
    thread.start()
    _, facts, findings = run_preflight(fleet, cluster, prepared.nodes, level=Level.QUICK)
    if synced and isinstance(synced[0], UsageError):
        raise synced[0]  # a wrong recipe: first, as it is mended before any node is
    if wish.gate:
        try:
            gate(findings)
        except R4090cError:  # a GPU in use may be all there is to it: then who uses it is worth more than that it is used
            _require_free(fleet, {node.name: _all_gpus(node, facts[node.name]) for node in prepared.nodes})
            raise
    thread.join()
    if isinstance(synced[0], BaseException):
        raise synced[0]
    code, ports = synced[0]
    plan, site = _plan(cluster, prepared, facts, what_is_known(cluster, prepared.nodes, facts), code, ports)
    plan, foreseen = _foreseen(plan, prepared, site)
    hopeless = refuse(wish, prepared.recipe, foreseen)
    if hopeless is not None:
        raise hopeless
    _require_free(fleet, {node.name: node.leases for node in plan.nodes})
    files = {str(prepared.run.facts): json.dumps({name: asdict(fact) for name, fact in facts.items()}, default=str)}
    if prepared.recipe is not None:
        files[str(prepared.run.attempt_recipe(prepared.attempt))] = json.dumps(prepared.recipe, indent=1)
    return plan, files


def _all_gpus(node: Node, facts: NodeFacts) -> list[str]:
    return [gpu.pci for gpu in facts.gpus.value or ()] if node.gpus else []


def _require_free(fleet: Fleet, wanted: Mapping[str, Sequence[str]]) -> None:
    """Raise GpusTaken where another run holds any of the `wanted` GPUs (node -> PCI addresses)."""
    held = holders(fleet, wanted)
    if held:
        raise GpusTaken(held)
