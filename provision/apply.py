"""The I/O of provision: connect, look, plan, carry out, verify. One runner a procedure; what they decide is in the planners.

Nothing is asked of a person here: whoever calls passes a Talk.
"""

from __future__ import annotations

import base64
import inspect
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from provision import on_node
from provision.ssh_trust import (
    FILES,
    KEY,
    Cause,
    Endpoint,
    FileSeen,
    KeySeen,
    NodeSeen,
    Peer,
    TrustWish,
    explain,
    fingerprint,
    plan_forget_host_keys,
    plan_host_keys,
    plan_trust,
    plan_undo,
)
from provision.steps import CONTROLLER, MakeKey, Step
from r4090c.errors import CheckFailed, Exit, UsageError
from r4090c.inventory import config_folder
from r4090c.model import Cluster, Node
from r4090c.remote import (
    Fleet,
    NodeError,
    Shell,
    Verdict,
    fetch_host_keys,
    known_host_keys,
    known_host_name,
    reached_at,
    ssh_command,
)

ON_NODE = inspect.getsource(on_node)
"""The program a node runs."""
LOOK_S, ACT_S = 60.0, 120.0
"""est.: both take a second; a home on NFS and a slow resolver take longer."""
LOGIN_S = 15.0
"""est.: ssh gives up connecting after 5 s; PAM and LDAP may take as long again."""
LOGINS_AT_ONCE = 4
"""A node starts this many logins at a time, each node beginning with another peer: sshd drops some beyond 10 (MaxStartups)."""
ROUNDS = 3
"""Steps that need others are planned again after them; two rounds do, a third one is for what changed meanwhile."""
CERTAIN = (Verdict.HOST_KEY_CHANGED, Verdict.AUTH_FAILED, Verdict.NO_PYTHON3)
"""Verdicts by which a node itself says no; with the others nobody can tell."""

# --------------------------------------------------------------------------- what goes in and what comes out


@dataclass(frozen=True, slots=True)
class Options:
    """How a procedure runs. `dry_run`: nothing is changed anywhere."""

    dry_run: bool = False
    undo: bool = False


class Talk(Protocol):
    """The person at the other end."""

    def tell(self, text: str) -> None:
        """Say what is going on."""
        ...

    def confirm(self, lines: Sequence[str], question: str) -> bool:
        """Show `lines` and return whether the answer to `question` is yes. Raises UsageError when there is nobody to ask."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one step. `unknown`: the connection broke before the node told."""

    step: Step
    state: Literal["planned", "done", "unchanged", "failed", "unknown"]
    observed: str = ""
    expected: str = ""
    next_command: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A node that could not take part. `certain`: it said no; else it could not be told."""

    node: str
    verdict: str
    observed: str
    expected: str
    next_command: str
    certain: bool


@dataclass(frozen=True, slots=True)
class Login:
    """One login from node to node; `cause` None = it works."""

    source: str
    peer: str
    cause: Cause | None
    next_command: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a procedure did. `waiting`: nodes that a dry run cannot look at, since their host keys are not accepted yet."""

    steps: tuple[Done, ...]
    troubles: tuple[Trouble, ...]
    logins: tuple[Login, ...]
    waiting: tuple[str, ...] = ()

    @property
    def exit_code(self) -> Exit:
        """Return the exit code of the command: a certain failure before "could not tell"."""
        if any(done.state == "failed" for done in self.steps) or any(login.cause for login in self.logins):
            return Exit.FAILED
        if any(trouble.certain for trouble in self.troubles):
            return Exit.FAILED
        if self.troubles or any(done.state == "unknown" for done in self.steps):
            return Exit.UNKNOWN
        return Exit.OK


# --------------------------------------------------------------------------- carrying out steps, for any procedure


def carry_out(fleet: Fleet, steps: Sequence[Step]) -> list[Done]:
    """Carry out the steps on their nodes, each node's in order and all nodes in parallel; return what became of them.

    Steps with a problem fail with it; steps that need others are left out.
    """
    by_node: dict[str, list[Step]] = {}
    for step in steps:
        if _is_ready(step):
            by_node.setdefault(step.node, []).append(step)

    def act(shell: Shell) -> Any:
        actions = [to_json(step) for step in by_node[shell.node.name]]
        return shell.ask(ON_NODE, {"do": "act", "actions": actions}, timeout_s=ACT_S).value

    done = [_failed(fleet.nodes, step, *_problem_of(step)) for step in steps if step.problem]
    for name, answer in fleet.map(act, list(by_node)).items() if by_node else ():
        if isinstance(answer, NodeError):
            done += [Done(step, "unknown", answer.observed, answer.expected, answer.next_command) for step in by_node[name]]
        else:
            done += _told(fleet.nodes, by_node[name], answer)
    place = {id(step): number for number, step in enumerate(steps)}
    return sorted(done, key=lambda each: place[id(each.step)])


def carry_out_here(steps: Sequence[Step]) -> list[Done]:
    """Carry out steps on this machine."""
    ready = [step for step in steps if _is_ready(step)]
    for step in ready:
        assert step.action is not None
        Path(step.action.path).parent.parent.mkdir(parents=True, exist_ok=True)  # ~/.config may be missing
    done = _told({}, ready, on_node.carry_out([to_json(step) for step in ready]))
    return done + [_failed({}, step, *_problem_of(step)) for step in steps if step.problem]


def _is_ready(step: Step) -> bool:
    return step.action is not None and not step.needs and not step.problem


def _told(nodes: Mapping[str, Node], steps: Sequence[Step], answers: Sequence[Mapping[str, str]]) -> list[Done]:
    """Return what the program on the node (or here) told about each of its actions."""
    return [
        _failed(nodes, step, answer["observed"], "", answer["command"])
        if answer["state"] == "failed"
        else Done(step, "done" if answer["state"] == "done" else "unchanged")
        for step, answer in zip(steps, answers, strict=True)
    ]


def _planned(nodes: Mapping[str, Node], steps: Iterable[Step]) -> list[Done]:
    """Return the steps as a dry run tells them; one with a problem would fail."""
    return [_failed(nodes, step, *_problem_of(step)) if step.problem else Done(step, "planned") for step in steps]


def _problem_of(step: Step) -> tuple[str, str, str]:
    assert step.problem is not None
    return step.problem.observed, step.problem.expected, step.problem.command


def _failed(nodes: Mapping[str, Node], step: Step, observed: str, expected: str, command: str) -> Done:
    return Done(step, "failed", observed, expected, command_on(nodes, step.node, command))


def command_on(nodes: Mapping[str, Node], name: str, command: str) -> str:
    """Return the line to type here that runs `command` on the node (or on this machine); root needs no sudo."""
    if not command or name == CONTROLLER:
        return command
    if nodes[name].ssh.user == "root":
        command = command.replace("sudo ", "")
    return f"{ssh_command(nodes[name])} {shlex.quote(command)}"


def to_json(step: Step) -> dict[str, Any]:
    """Return the step's action as the program on the node takes it."""
    assert step.action is not None
    action = {field.name: getattr(step.action, field.name) for field in fields(step.action)}
    return {
        "kind": type(step.action).__name__,
        **{name: base64.b64encode(value).decode() if isinstance(value, bytes) else value for name, value in action.items()},
    }


def _trouble(error: NodeError) -> Trouble:
    return Trouble(error.node, error.verdict.value, error.observed, error.expected, error.next_command, error.verdict in CERTAIN)


def _split(answers: Mapping[str, Any]) -> tuple[dict[str, Any], list[Trouble]]:
    """Return the answers of the nodes that gave one, and the troubles of the others."""
    told = {name: answer for name, answer in answers.items() if not isinstance(answer, NodeError)}
    return told, [_trouble(answer) for answer in answers.values() if isinstance(answer, NodeError)]


# --------------------------------------------------------------------------- ssh-trust


def trust_nodes(cluster: Cluster, nodes: Sequence[Node], options: Options, talk: Talk) -> Outcome:
    """Make `nodes` trust each other and this machine know them; or take that away again (`options.undo`).

    Raises UsageError when unknown host keys have to be accepted and nobody can be asked, CheckFailed when they are declined.
    """
    wish = TrustWish(cluster.name, tuple(Peer(node.name, reached_at(node), node.data_address) for node in cluster.nodes))
    if options.undo:
        return _undo(cluster, nodes, wish, options, talk)
    steps, troubles, waiting = _learn_host_keys(cluster, nodes, options, talk)
    out = {trouble.node for trouble in troubles} | set(waiting)
    able = [node for node in nodes if node.name not in out]
    if not able:
        return Outcome(tuple(steps), tuple(troubles), (), tuple(waiting))
    with Fleet(able) as fleet:
        observed, unreached = _look(fleet, wish, able, talk)
        troubles += unreached
        if options.dry_run:
            steps += _planned(fleet.nodes, plan_trust(observed, wish))
            return Outcome(tuple(steps), tuple(troubles), (), tuple(waiting))
        for _ in range(ROUNDS):
            known = {(done.step.node, done.step.id) for done in steps}
            plan = [step for step in plan_trust(observed, wish) if (step.node, step.id) not in known]
            steps += carry_out(fleet, plan)
            if not any(step.needs for step in plan):
                break
            observed, unreached = _look(fleet, wish, [fleet.nodes[name] for name in observed], talk)
            troubles += unreached
            observed = _without_hopeless_keys(observed, steps)
        logins, lost = _log_in(fleet, observed, talk)
    return Outcome(tuple(steps), (*troubles, *lost), tuple(logins), tuple(waiting))


def _look(fleet: Fleet, wish: TrustWish, nodes: Sequence[Node], talk: Talk) -> tuple[dict[str, NodeSeen], list[Trouble]]:
    """Return what there is on each node, and the nodes that could not be looked at."""
    talk.tell(f"looking at {_count(len(nodes), 'node')}")
    names = {node.name for node in nodes}
    endpoints = [endpoint for peer in wish.peers if peer.name in names for endpoint in peer.endpoints]
    request = {"do": "look", "files": list(FILES), "key": KEY, "endpoints": [list(endpoint) for endpoint in endpoints]}
    answers = fleet.map(lambda shell: shell.ask(ON_NODE, request, timeout_s=LOOK_S).value, [node.name for node in nodes])
    told, troubles = _split(answers)
    return {name: _node_seen(fleet.nodes[name], endpoints, answer) for name, answer in told.items()}, troubles


def _node_seen(node: Node, endpoints: Sequence[Endpoint], answer: Mapping[str, Any]) -> NodeSeen:
    key = answer["key"]
    return NodeSeen(
        node=node.name,
        home=answer["home"],
        user=answer["user"],
        folder=answer["folder"],
        files={name: file_seen(file["path"], file) for name, file in answer["files"].items()},
        key=KeySeen(
            path=f"{answer['folder']}/{KEY}",
            exists=key.get("exists", False),
            public=key.get("public", ""),
            refused=key.get("refused", ""),
            command=key.get("command", ""),
        ),
        host_keys=tuple(known_host_keys(node)),
        folder_exists=answer["folder_exists"],
        folder_refused=answer["folder_refused"],
        reach=dict(zip(endpoints, answer["reach"], strict=True)),
        loose=tuple(answer["loose"]),
        tools=answer["tools"],
    )


def file_seen(path: str, record: Mapping[str, Any]) -> FileSeen:
    """Return what the program on the node told about one file."""
    content = record["content"]
    return FileSeen(path, None if content is None else base64.b64decode(content), record["refused"])


def _without_hopeless_keys(observed: Mapping[str, NodeSeen], steps: Iterable[Done]) -> dict[str, NodeSeen]:
    """Return `observed` with the keys that could not be made marked as of no use, so that nobody waits for them."""
    failed = {
        done.step.node: done
        for done in steps
        if isinstance(done.step.action, MakeKey) and done.state not in ("done", "unchanged")
    }
    return {
        name: replace(seen, key=replace(seen.key, refused=failed[name].observed))
        if name in failed and not seen.key.exists
        else seen
        for name, seen in observed.items()
    }


def _log_in(fleet: Fleet, observed: Mapping[str, NodeSeen], talk: Talk) -> tuple[list[Login], list[Trouble]]:
    """Try every login between the observed nodes for real, and return what came of each."""
    names = list(observed)
    if not names:
        return [], []
    talk.tell(f"trying {_count(len(names) ** 2, 'login')} from node to node")
    waves = -(-len(names) // LOGINS_AT_ONCE)

    def ask(shell: Shell) -> Any:
        first = names.index(shell.node.name)
        request = {"do": "log-in", "peers": names[first:] + names[:first], "at_once": LOGINS_AT_ONCE, "limit_s": LOGIN_S}
        return shell.ask(ON_NODE, request, timeout_s=2 * waves * LOGIN_S + 30.0).value

    told, lost = _split(fleet.map(ask, names))
    logins = []
    for source, results in told.items():
        for peer in names:
            result = results[peer]
            cause = explain(source, peer, result["rc"], result["stdout"], result["stderr"], observed[peer].loose)
            logins.append(Login(source, peer, cause, command_on(fleet.nodes, cause.where, cause.command) if cause else ""))
    return logins, lost


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --------------------------------------------------------------------------- this machine's known_hosts


def known_hosts_file(node: Node) -> str:
    """Return the known_hosts file that new host keys of `node` go to: our own if it is read for the node, else the first.

    Raises UsageError when none is read for it: what is written would not count.
    """
    ours = str(config_folder() / "known_hosts")
    if ours in node.ssh.known_hosts:
        return ours
    if not node.ssh.known_hosts:
        raise UsageError(
            f"ssh.known_hosts of {node.name}", "an empty list", "a file for its host key", "remove the line from cluster.yaml"
        )
    return node.ssh.known_hosts[0]


def _learn_host_keys(
    cluster: Cluster, nodes: Sequence[Node], options: Options, talk: Talk
) -> tuple[list[Done], list[Trouble], list[str]]:
    """Fetch, show and write the host keys that this machine does not know yet.

    Returns the steps on this machine, the nodes whose sshd showed no key, and the nodes whose keys are not accepted (yet).
    """
    unknown = {node.name: node for node in nodes if not known_host_keys(node)}
    if not unknown:
        return [], [], []
    files = {name: known_hosts_file(node) for name, node in unknown.items()}
    talk.tell(f"fetching the host keys of {_count(len(unknown), 'node')}")

    def fetch(node: Node) -> list[tuple[str, str]] | NodeError:
        try:
            return fetch_host_keys(node)
        except NodeError as error:
            return error

    with ThreadPoolExecutor(max_workers=32) as pool:
        fetched, troubles = _split(dict(zip(unknown, pool.map(fetch, unknown.values()), strict=True)))
    if not fetched:
        return [], troubles, []
    if not options.dry_run:
        _accept(fetched, unknown, talk)
    names = [node.name for node in cluster.nodes]
    done: list[Done] = []
    for path in dict.fromkeys(files[name] for name in fetched):
        new = {name: (known_host_name(unknown[name]), keys) for name, keys in fetched.items() if files[name] == path}
        step = plan_host_keys(_look_here(path), cluster.name, names, new)
        done += _planned({}, [step]) if options.dry_run else carry_out_here([step])
    accepted = {"done", "unchanged"}
    waiting = list(fetched) if any(each.state not in accepted for each in done) else []
    return done, troubles, waiting


def _accept(fetched: Mapping[str, list[tuple[str, str]]], nodes: Mapping[str, Node], talk: Talk) -> None:
    """Have the host keys accepted by the person. Raises CheckFailed when they are declined."""
    lines = [
        f"{name}  {known_host_name(nodes[name])}  {kind}  {fingerprint(key)}"
        for name, keys in fetched.items()
        for kind, key in keys
    ]
    question = f"Are these the right keys of {_count(len(fetched), 'node')}?"
    if not talk.confirm(lines, question):
        raise CheckFailed(
            "host keys",
            f"those of {', '.join(fetched)} were not accepted; nothing was changed",
            "keys that you have compared with the nodes' own",
            "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub   (on a node's console)",
        )


def _look_here(path: str) -> FileSeen:
    record = on_node.look_at_file(path)
    if not record["refused"] and Path(path).parent.exists():
        why = on_node.why_not_folder(str(Path(path).parent))
        record["refused"] = f"lies in {Path(path).parent}, which {why}" if why else ""
    return file_seen(path, record)


# --------------------------------------------------------------------------- undo


def _undo(cluster: Cluster, nodes: Sequence[Node], wish: TrustWish, options: Options, talk: Talk) -> Outcome:
    """Take away what trust_nodes gave; this machine forgets the host keys last, and only of nodes that were undone."""
    with Fleet(nodes) as fleet:
        observed, troubles = _look(fleet, wish, nodes, talk)
        plan = plan_undo(observed, wish)
        steps = _planned(fleet.nodes, plan) if options.dry_run else carry_out(fleet, plan)
    failed = {done.step.node for done in steps if done.state in ("failed", "unknown")}
    undone = [node for node in nodes if node.name in observed and node.name not in failed]
    files = {node.name: known_hosts_file(node) for node in undone if node.ssh.known_hosts}
    for path in dict.fromkeys(files.values()):
        gone = [name for name, file in files.items() if file == path]
        step = plan_forget_host_keys(_look_here(path), cluster.name, [node.name for node in cluster.nodes], gone)
        if step is not None:
            steps += _planned({}, [step]) if options.dry_run else carry_out_here([step])
    return Outcome(tuple(steps), tuple(troubles), ())


Runner = Callable[[Cluster, Sequence[Node], Options, Talk], Outcome]
"""What PROCEDURES names."""
