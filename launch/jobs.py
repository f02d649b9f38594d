"""What runs there are and how they stand, read from the run folders through any node that answers."""

from __future__ import annotations

import calendar
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from launch.diagnose import first_cause
from launch.plan import SCHEMA
from r4090c.errors import CouldNotTell, UsageError
from r4090c.model import Cluster
from r4090c.paths import RunPaths
from r4090c.remote import Fleet, NodeError, Shell

STALE_S = 30.0
"""est.: an agent writes every 2 s; NFS may show that up to some seconds late. So long, too, may a start take."""

HOLD_S = 30.0
"""est.: who waits between two attempts says so every ten seconds (launch/attempts.py); so long after its death others wait."""
SETTLES_S = 0.3
"""est.: two that find nobody's note at the same moment have both written theirs so long after."""

LIST = r"""
import glob, json, os, time

def load(path):
    try:
        with open(path) as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return None

def last_line(path):
    try:
        with open(path, "rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - 4096))
            lines = handle.read().split(b"\n")
        return json.loads(lines[-2].decode())
    except (OSError, ValueError, IndexError):
        return None

def started(folder):
    try:  # each attempt writes plan.json anew
        return os.stat(os.path.join(folder, "plan.json")).st_mtime
    except OSError:
        return 0.0

def node_names(plan):
    nodes = plan.get("nodes")
    named = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
    return [node["name"] for node in named if isinstance(node.get("name"), str)]

def checkpoints(folder):
    try:
        steps = sorted(int(name[5:]) for name in os.listdir(folder) if name[:5] == "step_" and name[5:].isdigit())
        names = ["step_%08d" % step for step in steps]  # neither .partial nor .old
        return [name for name in names if os.path.exists(os.path.join(folder, name, "complete"))]
    except OSError:
        return []

def main(request):
    runs, top = [], request["runs"]
    if request["only"]:
        folders = [os.path.join(top, request["only"])]
    else:
        try:
            folders = sorted((os.path.join(top, name) for name in os.listdir(top)), key=started, reverse=True)
        except OSError:
            folders = []
    for folder in folders:
        plan = load(os.path.join(folder, "plan.json"))
        if not isinstance(plan, dict) or plan.get("schema") != request["schema"]:
            continue
        agents = {}
        for name in node_names(plan):
            found = load(os.path.join(folder, "agents", name + ".json"))
            if isinstance(found, dict) and found.get("attempt") == plan.get("attempt"):
                agents[name] = found
        one = {"folder": folder, "plan": plan, "agents": agents, "last": last_line(os.path.join(folder, "metrics.jsonl"))}
        one["diagnosis"] = load(os.path.join(folder, "diagnosis.json"))
        one["between"] = load(os.path.join(folder, "between.json"))
        if request["only"]:
            attempted = os.path.join(folder, "attempt_%s" % plan.get("attempt"), "recipe.json")
            one["attempted"] = load(attempted)
            earlier = [load(path) for path in glob.glob(os.path.join(glob.escape(folder), "attempt_*", "plan.json"))]
            one["earlier"] = sorted({name for found in earlier if isinstance(found, dict) for name in node_names(found)})
            one["recipe"] = load(os.path.join(folder, "recipe.json")) or one["attempted"]
        one["checkpoints"] = checkpoints(os.path.join(folder, "checkpoints")) if request["only"] else []
        one["stop"] = load(os.path.join(folder, "stop.json")) if request["only"] else None
        runs.append(one)
        if len(runs) >= request["limit"]:
            break
    return {"now": time.time(), "runs": runs}
"""

READ = r"""
import os

def main(request):
    try:
        with open(request["path"], "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            offset = request["offset"] if request["offset"] <= size else 0
            handle.seek(offset)
            data = handle.read(1 << 20)
    except OSError as error:
        return {"error": error.strerror, "text": "", "offset": request["offset"]}
    for length in range(1, min(3, len(data)) + 1):  # a letter whose bytes have not all come yet is left for the next time
        first = data[-length]
        if first >= 0xC0 and (2 if first < 0xE0 else 3 if first < 0xF0 else 4) > length:
            data = data[:-length]
        if not 0x80 <= first < 0xC0:
            break
    return {"error": None, "text": data.decode(errors="replace"), "offset": offset + len(data)}
"""


PUT = r"""
import json, os, time

def put(path, told):
    aside = "%s.%s-%d.tmp" % (path, os.uname()[1], os.getpid())
    try:
        with open(aside, "w") as handle:
            json.dump(told, handle)
        os.replace(aside, path)
    except OSError as error:
        try:
            os.unlink(aside)
        except OSError:
            pass
        return error.strerror
    return None
"""
NOTE = (
    PUT
    + r"""
def main(request):
    return put(request["path"], request["told"])
"""
)
HOLD = (
    PUT
    + r"""
def holder(path):
    try:
        with open(path) as handle:
            told = json.load(handle)
        return told if told["id"] and told["until"] > time.time() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None

def main(request):
    path, me = request["path"], request["me"]
    found = holder(path)
    if not found or found["id"] == me["id"]:
        failed = put(path, dict(me, until=time.time() + request["for_s"]))
        if failed is None and not found:  # two that ask at the same moment come here: one's note stays, and the other sees it
            time.sleep(request["settles_s"])
            found = holder(path)
    return found if found and found["id"] != me["id"] else None
"""
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run as its folder tells.

    `state`: running, waiting (failed, and about to be started again), done, failed, stopped, lost (agents silent, no end told),
    unreadable. `placement`: how many ranks were read back and are as planned, None = none was read yet. `resolved` (the recipe)
    and `checkpoints` (names of the complete ones) are told by `find_run` only.
    """

    id: str
    state: str
    recipe: str
    nodes: tuple[str, ...]
    run_dir: str
    attempt: int
    step: int | None
    steps: int | None
    started_at: str
    cause: str | None
    plan: Mapping[str, Any]
    resolved: Mapping[str, Any] | None
    checkpoints: tuple[str, ...]
    placement: str | None = None
    attempted: Mapping[str, Any] | None = None
    """The recipe of the last attempt, whether or not the ranks took it; told by `find_run` only."""
    earlier_nodes: tuple[str, ...] = ()
    """Nodes of its attempts that the last one does not have; told by `find_run` only."""
    between: Mapping[str, Any] | None = None
    """Who is about to start its next attempt ("id", "who")."""
    given_up: str | None = None
    """Why nobody starts it again, where its supervisor said so."""
    stopped_by: str | None = None
    """Who ended it by `r4090c stop`, since its last start; told by `find_run` only."""


def run_state(plan: Mapping[str, Any], agents: Mapping[str, Mapping[str, Any]], now: float) -> tuple[str, str | None]:
    """Return (state, first cause or None) of a run's last attempt, from its agents' files. `now`: the reading node's clock.

    A run whose agents have not written anything yet is running while its plan is young.
    """
    ends = [agent.get("end") for agent in agents.values()]
    names = [node["name"] for node in plan["nodes"]]
    badly = any(end is not None and end.get("outcome") != "done" for end in ends)  # the gang ends it everywhere in seconds
    fresh = [agent for agent in agents.values() if agent.get("end") is None and now - float(agent.get("heartbeat", 0)) < STALE_S]
    if fresh and not badly:
        return "running", None
    if any(end is not None and end.get("outcome") == "done" for end in ends):  # only where the ranks of all nodes have ended well
        return "done", None
    if any(end is not None for end in ends):
        events = [event for agent in agents.values() for event in agent.get("events", [])]
        silent = {name: "its agent told no end" for name in names if name not in agents or agents[name].get("end") is None}
        cause = first_cause(events, silent, plan["run_id"], recipe=plan["recipe"] if plan.get("steps") else None)
        return ("stopped" if cause.kind == "stopped" else "failed"), cause.summary
    if not agents and now - _seconds(plan["created_at"]) < STALE_S:
        return "running", None
    return "lost", "no agent has been heard and none told an end"


def _seconds(created_at: str) -> float:
    """Return the time of a plan in seconds; 0 when it is not one."""
    try:
        return float(calendar.timegm(time.strptime(created_at, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0


def list_runs(fleet: Fleet, cluster: Cluster, only: str | None = None, limit: int = 50) -> list[Run]:
    """Return the runs in the run folder, the last started first. Raises CouldNotTell when no node answers."""
    answer = ask_any(fleet, LIST, {"runs": cluster.nodes[0].paths.runs, "only": only, "limit": limit, "schema": SCHEMA})
    return runs_of(answer)


def runs_of(answer: Mapping[str, Any]) -> list[Run]:
    """Return the runs that LIST told. A folder that is not what a run writes becomes one of state "unreadable"."""
    runs = []
    for one in answer["runs"]:
        try:
            runs.append(_run(one, float(answer["now"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # One odd folder, half written or somebody else's, must not hide the others.
            name = str(one["folder"]).rpartition("/")[2]
            why = f"its files are not what a run writes ({type(error).__name__}: {error})"
            runs.append(Run(name, "unreadable", "?", (), str(one["folder"]), 0, None, None, "", why, {}, None, ()))
    return runs


def _run(one: Mapping[str, Any], now: float) -> Run:
    """Return the run that a folder tells. Raises KeyError, TypeError, ValueError or AttributeError for what is none."""
    plan, told = one["plan"], one["diagnosis"]
    state, cause = run_state(plan, one["agents"], now)
    if state == "failed" and isinstance(told, dict) and told.get("attempt") == plan["attempt"]:
        cause = str(told["summary"])  # by a supervisor, which also knew whom it could not reach
    between = _between(one.get("between"), now)
    if between is not None and state in ("failed", "stopped", "lost"):
        state, cause = "waiting", f"{between.get('who')} starts it again" + (f"; {cause}" if cause else "")
    last = one["last"]
    nodes = tuple(str(node["name"]) for node in plan["nodes"])
    return Run(
        id=str(plan["run_id"]),
        state=state,
        recipe=str(plan["recipe"]),
        nodes=nodes,
        run_dir=str(one["folder"]),
        attempt=int(plan["attempt"]),
        step=last.get("step") if isinstance(last, dict) else None,
        steps=plan.get("steps"),
        started_at=str(plan["created_at"]),
        cause=cause,
        plan=plan,
        resolved=one.get("recipe"),
        attempted=one.get("attempted"),
        checkpoints=tuple(one["checkpoints"]),
        placement=placement_of(one["agents"]),
        earlier_nodes=tuple(name for name in one.get("earlier", ()) if name not in nodes),
        between=between,
        given_up=str(one["between"]["given_up"]) if "given_up" in (one.get("between") or {}) else None,
        stopped_by=str(one["stop"].get("by")) if isinstance(one.get("stop"), dict) else None,
    )


def _between(told: object, now: float) -> Mapping[str, Any] | None:
    """Return who is about to start the next attempt, None when nobody is any more."""
    if not isinstance(told, dict) or not isinstance(told.get("until"), (int, float)) or told["until"] < now:
        return None
    return told


def placement_of(agents: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return how the ranks of a run are placed, as their agents read it back; None where none was read."""
    read = {int(rank): seen["differs"] for agent in agents.values() for rank, seen in agent.get("placement", {}).items()}
    if not read:
        return None
    differ = sorted(rank for rank, differs in read.items() if differs)
    told = f"{len(read) - len(differ)} of {len(read)} ranks read back are as planned"
    return told + (f"; ranks {', '.join(map(str, differ))} differ" if differ else "")


def find_run(fleet: Fleet, cluster: Cluster, run_id: str) -> Run:
    """Return the run called `run_id`. Raises UsageError when there is none."""
    if "/" in run_id or run_id in ("", ".", ".."):
        raise UsageError(f"run {run_id!r}", "not a run id", "an id as `r4090c jobs` shows it", "r4090c jobs")
    found = list_runs(fleet, cluster, only=run_id)
    if not found:
        raise UsageError(
            f"run {run_id}", f"there is none in {cluster.nodes[0].paths.runs}", "an id as `r4090c jobs` shows it", "r4090c jobs"
        )
    if found[0].state == "unreadable":
        raise UsageError(f"run {run_id}", str(found[0].cause), f"a whole plan.json in {found[0].run_dir}", "r4090c jobs")
    return found[0]


def note_stop(fleet: Fleet, run: Run, by: str) -> str | None:
    """Note in the run's folder that it is to end, for a supervisor that is about to start it again. Raises CouldNotTell.

    Return why the folder cannot be written, which is no reason not to stop: then only what runs now is ended.
    """
    told = {"by": by, "time": time.time()}
    failed = ask_any(fleet, NOTE, {"path": str(RunPaths(PurePosixPath(run.run_dir)).stop), "told": told})
    return None if failed is None else str(failed)


def hold_between(fleet: Fleet, run_dir: str, me: Mapping[str, str]) -> str | None:
    """Note for HOLD_S that `me` is about to start the next attempt; return who else is, or None.

    A folder that cannot be written keeps nobody from going on. Raises CouldNotTell when no node answers.
    """
    request = {"path": str(RunPaths(PurePosixPath(run_dir)).between), "me": dict(me), "for_s": HOLD_S, "settles_s": SETTLES_S}
    other = ask_any(fleet, HOLD, request)
    return None if other is None else str(other.get("who"))


def give_up(fleet: Fleet, run_dir: str, why: str) -> None:
    """Note why nobody starts the run again, for those who look on. Raises CouldNotTell when no node answers."""
    ask_any(fleet, NOTE, {"path": str(RunPaths(PurePosixPath(run_dir)).between), "told": {"given_up": why}})


def ask_any(fleet: Fleet, source: str, request: object, nodes: Sequence[str] | None = None) -> Any:
    """Return the answer of the first node that gives one, asked in turn, those that are connected first.

    Raises CouldNotTell when none does.
    """
    last: NodeError | None = None
    connected = set(fleet.connected())
    for name in sorted(nodes or list(fleet.nodes), key=lambda name: name not in connected):
        try:
            shell: Shell = fleet.shell(name)
            return shell.ask(source, request).value
        except NodeError as error:
            last = error
    assert last is not None
    raise CouldNotTell(
        "every node", f"none answers; the last, {last}", "at least one reachable node", "r4090c preflight --quick"
    ) from last
