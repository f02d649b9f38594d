"""Plan the SSH trust: every node logs in to every node, itself included, without a password and with verified host keys.

Pure: what was seen on the nodes + what is wished -> Steps. Four things a node: a key pair, `authorized_keys`, `known_hosts`,
and what `config` must say so that a node's name is enough. All nodes get the same lines: they may share a home.

A node that could not be looked at this time, or was left out by --nodes, keeps the lines it has in the others' files.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import ndiff
from typing import Literal, NamedTuple

from provision.steps import (
    CONTROLLER,
    FOLDER_MADE,
    BlockError,
    MakeKey,
    Problem,
    RemoveFile,
    RemoveFolder,
    RemoveKey,
    Step,
    WriteFile,
    drop_block,
    find_blocks,
    other_titles,
    put_block,
    sha256_of,
    without_any_block,
)

ABOUT = """\
Let every node log in to every node, itself included, over SSH without a password, and let this machine know their host keys.

On each node it makes a key pair where there is none (the private key never leaves the node) and keeps a marked block in
~/.ssh/authorized_keys, ~/.ssh/known_hosts and, where a name alone does not do, ~/.ssh/config. Nothing else in these files
changes. Host keys that this machine does not know yet are shown and accepted only here; a changed one never is. At the end
every login is tried.
"""
"""Help of the command."""

AUTHORIZED_KEYS, KNOWN_HOSTS, CONFIG = "authorized_keys", "known_hosts", "config"
FILES = (CONFIG, KNOWN_HOSTS, AUTHORIZED_KEYS)
"""What we write in ~/.ssh; the one that needs the keys of all nodes comes last."""
KEY = "id_ed25519"
"""ssh tries it without being told."""
MARK = "r4090c@"
"""Before a node's name in a comment: the key we made there, the line we wrote for it."""
SSH_PORT = 22

Endpoint = tuple[str, int]


# --------------------------------------------------------------------------- wish and observation


@dataclass(frozen=True, slots=True)
class Peer:
    """One node of the cluster: where the controller reaches it (after its ssh_config), and its address for the other nodes."""

    name: str
    reached_at: Endpoint
    data_address: str

    @property
    def own_endpoints(self) -> tuple[Endpoint, ...]:
        """Return where its sshd listens as far as the inventory tells."""
        return tuple(dict.fromkeys((self.reached_at, (self.data_address, self.reached_at[1]))))

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return where its peers may find it, the likeliest first.

        Port 22 of the data address is a guess, for a node behind a port that is forwarded for the controller only.
        """
        return tuple(dict.fromkeys((*self.own_endpoints, (self.data_address, SSH_PORT))))


@dataclass(frozen=True, slots=True)
class TrustWish:
    """All nodes of the cluster, in its order."""

    cluster: str
    peers: tuple[Peer, ...]

    @property
    def title(self) -> str:
        """Title of the managed block in the nodes' files."""
        return f"ssh-trust (cluster {self.cluster})"


@dataclass(frozen=True, slots=True)
class FileSeen:
    """One file: its content (None: no file), or why it must not be touched."""

    path: str
    content: bytes | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class KeySeen:
    """The key pair of the node's account. `public`: the line of id_ed25519.pub, "" = none; `refused`: why it is of no use."""

    path: str
    exists: bool = False
    public: str = ""
    refused: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What was seen on one node. `host_keys`: what the controller trusts as this node's, (type, base64).

    `reach`: endpoint -> whether an SSH server answers there, seen from this node. `loose`: what others may write to.
    """

    node: str
    home: str
    user: str
    folder: str
    files: Mapping[str, FileSeen]
    key: KeySeen
    host_keys: tuple[tuple[str, str], ...]
    folder_exists: bool = True
    folder_refused: str = ""
    reach: Mapping[Endpoint, bool] = field(default_factory=dict)
    loose: tuple[str, ...] = ()
    tools: Mapping[str, str] = field(default_factory=dict)

    def short(self, path: str) -> str:
        """Return `path` as people write it: ~/… in the node's home."""
        return f"~{path[len(self.home) :]}" if path.startswith(f"{self.home}/") else path


# --------------------------------------------------------------------------- the plan

_Lines = dict[str, tuple[str, ...]]
"""Node -> its lines of a block."""


def plan_trust(observed: Mapping[str, NodeSeen], wish: TrustWish) -> tuple[Step, ...]:
    """Return the Steps that make every observed node trust all of them; () when nothing is to be done."""
    peers = [peer for peer in wish.peers if peer.name in observed]
    seen = [observed[peer.name] for peer in peers]
    reached = {peer.name: reachable_endpoint(peer, seen) for peer in peers}
    new: dict[str, _Lines] = {
        CONFIG: {peer.name: _config_lines(peer, reached[peer.name], seen) for peer in peers},
        KNOWN_HOSTS: {peer.name: _known_hosts_lines(peer, reached[peer.name], observed[peer.name]) for peer in peers},
        AUTHORIZED_KEYS: {node.node: _authorized_lines(node) for node in seen},
    }
    awaited = tuple(f"{node.node}:{KEY}" for node in seen if _key_is_to_be_made(node))
    steps: list[Step] = []
    for node in seen:
        if node.folder_refused:
            steps.append(
                _blocked(
                    node.node, "folder", f"use {node.short(node.folder)}", f"{node.folder} {node.folder_refused}", node.folder
                )
            )
            continue
        steps += _file_steps(node, CONFIG, new[CONFIG], wish)
        steps += _file_steps(node, KNOWN_HOSTS, new[KNOWN_HOSTS], wish)
        steps += _key_steps(node)
        steps += _file_steps(node, AUTHORIZED_KEYS, new[AUTHORIZED_KEYS], wish, awaited)
    return tuple(steps)


def reachable_endpoint(peer: Peer, seen: Sequence[NodeSeen]) -> Endpoint:
    """Return where most of the nodes find an SSH server of `peer`; the first candidate wins a tie."""
    return max(peer.endpoints, key=lambda endpoint: sum(node.reach.get(endpoint, False) for node in seen))


def _key_is_to_be_made(node: NodeSeen) -> bool:
    return not (node.key.exists or node.key.refused or node.folder_refused) and bool(node.tools.get("ssh-keygen"))


def _key_steps(node: NodeSeen) -> list[Step]:
    """Return what is to be done, or cannot be, for the node's own logins: its ssh client and its key."""
    steps: list[Step] = []
    what, why = (
        f"make the key pair {node.short(node.key.path)}",
        "it shows this node to the others; it is made there and stays there",
    )
    if not node.tools.get("ssh"):
        problem = Problem("ssh is not installed", "the OpenSSH client", "sudo apt install -y openssh-client")
        steps.append(Step(node.node, "ssh", "log in to the others", "launchers do so by ssh", problem=problem))
    if node.key.refused:
        problem = Problem(node.key.refused, "a key without a passphrase that only its owner can read", node.key.command)
        steps.append(
            Step(node.node, KEY, f"use the key {node.short(node.key.path)}", "it shows this node to the others", problem=problem)
        )
    elif _key_is_to_be_made(node):
        steps.append(Step(node.node, KEY, what, why, MakeKey(node.key.path, f"{MARK}{node.node}")))
    elif not node.key.exists and node.tools.get("ssh"):
        problem = Problem("ssh-keygen is not installed", "the OpenSSH client", "sudo apt install -y openssh-client")
        steps.append(Step(node.node, KEY, what, why, problem=problem))
    return steps


_WHY = {
    CONFIG: "a node's name is enough to reach it, whatever its address, port and user are",
    KNOWN_HOSTS: "no login stops at a question about a host key, and a false node is noticed",
    AUTHORIZED_KEYS: "the others log in with their keys",
}
_NOUN = {
    CONFIG: "addresses, ports and users of the nodes",
    KNOWN_HOSTS: "the nodes' host keys",
    AUTHORIZED_KEYS: "the nodes' keys",
}


def _file_steps(node: NodeSeen, name: str, new: _Lines, wish: TrustWish, needs: tuple[str, ...] = ()) -> list[Step]:
    """Return the step that gives one file its block, [] when the file is right as it is."""
    file = node.files[name]
    what, why = f"put {_NOUN[name]} into {node.short(file.path)}", _WHY[name]
    if file.refused:
        return [_blocked(node.node, name, what, f"{file.path} {file.refused}", file.path)]
    try:
        old = [line for block in find_blocks(file.content or b"", wish.title) for line in block.body]
        body = _merge(_parse(name, old), new, wish)
        if name == AUTHORIZED_KEYS:
            body = _each_key_once(body, file.content)
        if name == CONFIG and body:
            body = [*body, "Host *"]  # else what follows the block would be part of its last Host
        content = _with_block(file.content, wish.title, body, top=name == CONFIG, folder_made=not node.folder_exists)
    except BlockError as error:
        return [_blocked(node.node, name, what, f"{file.path}: {error}", file.path)]
    waits = tuple(f"+ the key that is made on {each.partition(':')[0]}" for each in needs)
    if content != file.content:
        lines = (*_difference(old, body), *waits)
        return [Step(node.node, name, what, why, _write_or_remove(file, content), lines=lines, needs=needs)]
    return [Step(node.node, name, what, why, lines=waits, needs=needs)] if needs else []


def _with_block(
    content: bytes | None, title: str, body: Sequence[str], *, top: bool = False, folder_made: bool = False
) -> bytes | None:
    """Return `content` with the block holding `body`, or without the block when there is nothing to hold."""
    if body:
        return put_block(content, title, body, top=top, folder_made=folder_made)
    return None if content is None else drop_block(content, title)


def _write_or_remove(file: FileSeen, content: bytes | None) -> WriteFile | RemoveFile:
    before = sha256_of(file.content)
    return RemoveFile(file.path, before) if content is None else WriteFile(file.path, content, before)


def _difference(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """Return what goes ("- …") and what comes ("+ …"); never empty, since the block differs at least in its form."""
    return tuple(line for line in ndiff(old, new) if line[0] in "+-") or ("(the block in another form)",)


def _blocked(node: str, step_id: str, what: str, observed: str, path: str) -> Step:
    problem = Problem(
        observed, "a regular file or folder of the account, which only it can change", f"ls -ld {shlex.quote(path)}"
    )
    return Step(node, step_id, what, "nothing of somebody else's is touched", problem=problem)


# --------------------------------------------------------------------------- the lines


def _authorized_lines(node: NodeSeen) -> tuple[str, ...]:
    words = node.key.public.split()
    return (f"{words[0]} {words[1]} {MARK}{node.node}",) if len(words) >= 2 and _is_key(words[0], words[1]) else ()


def _known_hosts_lines(peer: Peer, reached: Endpoint, seen: NodeSeen) -> tuple[str, ...]:
    endpoints = ((peer.name, reached[1]), reached, *peer.own_endpoints)
    names = ",".join(dict.fromkeys(known_name(endpoint) for endpoint in endpoints))
    return tuple(f"{names} {kind} {key} {MARK}{peer.name}" for kind, key in seen.host_keys)


def known_name(endpoint: Endpoint) -> str:
    """Return how known_hosts spells an endpoint: `host`, or `[host]:port` off port 22."""
    host, port = endpoint
    return host if port == SSH_PORT else f"[{host}]:{port}"


def _config_lines(peer: Peer, reached: Endpoint, seen: Sequence[NodeSeen]) -> tuple[str, ...]:
    """Return the Host section of one peer, () where ssh's defaults are right.

    A section states all three: what the account's own `Host *` says about ports and users is not meant for these nodes.
    """
    host, port = reached
    users = {node.node: node.user for node in seen}
    if (host, port) == (peer.name, SSH_PORT) and len(set(users.values())) == 1:
        return ()
    return (f"Host {peer.name}", f"    HostName {host}", f"    Port {port}", f"    User {users[peer.name]}")


def _parse(name: str, lines: Iterable[str]) -> _Lines:
    """Return which lines of an old block belong to which node."""
    found: dict[str, list[str]] = {}
    owner = ""
    for line in lines:
        if name == CONFIG:
            owner = line.split()[1] if line.startswith("Host ") else owner
        else:
            owner = line.rpartition(MARK)[2] if MARK in line else ""
        found.setdefault(owner, []).append(line)
    return {node: tuple(own) for node, own in found.items()}


def _merge(old: _Lines, new: _Lines, wish: TrustWish) -> list[str]:
    """Return the new body: fresh lines where there are, old ones of nodes that were not asked, none of nodes that are gone."""
    return [line for peer in wish.peers for line in new.get(peer.name, old.get(peer.name, ()))]


def _each_key_once(body: Iterable[str], content: bytes | None) -> list[str]:
    """Return the lines of authorized_keys whose key is not listed before, by us (a shared home) or by people themselves."""
    once: dict[str, str] = {}
    for line in body:
        once.setdefault(line.split()[1], line)
    theirs = _theirs(content)
    return [line for key, line in once.items() if key not in theirs]


def _theirs(content: bytes | None) -> set[str]:
    """Return the keys (base64) of authorized_keys that stand outside of our blocks and without options."""
    lines = [line.split() for line in without_any_block(content or b"").decode("utf-8", "replace").splitlines()]
    return {words[1] for words in lines if len(words) >= 2 and _is_key(words[0], words[1])}


def _is_key(kind: str, blob: str) -> bool:
    """Say whether these are the two words of a public key; the blob begins with its own type (RFC 4253, 6.6)."""
    try:
        data = base64.b64decode(blob, validate=True)
    except (binascii.Error, ValueError):
        return False
    return data[4 : 4 + int.from_bytes(data[:4], "big")] == kind.encode()


# --------------------------------------------------------------------------- undo


def plan_undo(observed: Mapping[str, NodeSeen], wish: TrustWish) -> tuple[Step, ...]:
    """Return the Steps that take away what `plan_trust` gave to the observed nodes; () when nothing of it is left."""
    steps: list[Step] = []
    for peer in wish.peers:
        if peer.name in observed:
            steps += _undo_node(observed[peer.name], wish)
    return tuple(steps)


def _undo_node(node: NodeSeen, wish: TrustWish) -> list[Step]:
    why = "r4090c put it there"
    steps: list[Step] = []
    folder_made, others = False, False
    for name in reversed(FILES):
        file = node.files[name]
        what = f"take our block out of {node.short(file.path)}"
        if file.refused:
            if not node.folder_refused:
                steps.append(_blocked(node.node, name, what, f"{file.path} {file.refused}", file.path))
            continue
        if file.content is None:
            continue
        others = others or bool(other_titles(file.content, wish.title))
        try:
            blocks = find_blocks(file.content, wish.title)
            content = drop_block(file.content, wish.title)
        except BlockError as error:
            steps.append(_blocked(node.node, name, what, f"{file.path}: {error}", file.path))
            continue
        if not blocks:
            continue
        folder_made = folder_made or any(FOLDER_MADE in block.notes for block in blocks)
        before = sha256_of(file.content)
        lines = tuple(f"- {line}" for block in blocks for line in block.body)
        if content is None:
            steps.append(
                Step(node.node, name, f"remove {node.short(file.path)}", why, RemoveFile(file.path, before), lines=lines)
            )
        else:
            steps.append(Step(node.node, name, what, why, WriteFile(file.path, content, before), lines=lines))
    comment = node.key.public.split(None, 2)[2] if node.key.public.count(" ") >= 2 else ""
    ours = comment in {f"{MARK}{peer.name}" for peer in wish.peers}
    if ours and not node.key.refused and not others:  # another cluster's trust may stand on the key
        what = f"remove the key pair {node.short(node.key.path)}"
        steps.append(Step(node.node, KEY, what, f"r4090c made it: its comment is {comment}", RemoveKey(node.key.path, comment)))
    if folder_made and steps:
        steps.append(
            Step(
                node.node, "folder", f"remove {node.short(node.folder)} if nothing is left in it", why, RemoveFolder(node.folder)
            )
        )
    return steps


# --------------------------------------------------------------------------- the controller's known_hosts


def controller_title(cluster: str) -> str:
    """Return the title of the block in this machine's known_hosts; not the nodes', as this machine may be one of them."""
    return f"host-keys (cluster {cluster})"


def plan_host_keys(
    file: FileSeen, cluster: str, names: Sequence[str], new: Mapping[str, tuple[str, Sequence[tuple[str, str]]]]
) -> Step:
    """Return the step that writes new host keys into this machine's known_hosts file.

    `names`: all nodes of the cluster; `new`: node -> (its name in known_hosts, its host keys).
    """
    lines = {node: tuple(f"{name} {kind} {key} {MARK}{node}" for kind, key in keys) for node, (name, keys) in new.items()}
    return _controller_step(file, cluster, lambda old: {**old, **lines}, names, f"add the host keys of {', '.join(new)} to")


def plan_forget_host_keys(file: FileSeen, cluster: str, names: Sequence[str], forgotten: Iterable[str]) -> Step | None:
    """Return the step that takes the host keys of the nodes `forgotten` out again; None when none is there."""
    gone = set(forgotten)
    step = _controller_step(
        file,
        cluster,
        lambda old: {node: lines for node, lines in old.items() if node not in gone},
        names,
        f"take the host keys of {', '.join(sorted(gone))} out of",
    )
    return step if step.lines or step.problem else None


def _controller_step(file: FileSeen, cluster: str, change: Callable[[_Lines], _Lines], names: Sequence[str], verb: str) -> Step:
    what, why = f"{verb} {file.path}", "this machine refuses nodes whose host keys it does not know"
    if file.refused:
        return _blocked(CONTROLLER, KNOWN_HOSTS, what, f"{file.path} {file.refused}", file.path)
    title = controller_title(cluster)
    try:
        old = [line for block in find_blocks(file.content or b"", title) for line in block.body]
        lines = change(_parse(KNOWN_HOSTS, old))
        body = [line for name in names for line in lines.get(name, ())]
        content = _with_block(file.content, title, body)
    except BlockError as error:
        return _blocked(CONTROLLER, KNOWN_HOSTS, what, f"{file.path}: {error}", file.path)
    lines_told = _difference(old, body) if content != file.content else ()
    return Step(CONTROLLER, KNOWN_HOSTS, what, why, _write_or_remove(file, content), lines=lines_told)


def fingerprint(key: str) -> str:
    """Return the fingerprint of a public key (base64) in the form of `ssh-keygen -l`, SHA256:…."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(base64.b64decode(key)).digest()).decode().rstrip("=")


# --------------------------------------------------------------------------- what a login from one node to another said


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a login failed: one word for the table, a sentence, one command and the node to run it on."""

    word: str
    observed: str
    command: str
    where: str


class _Said(NamedTuple):
    """What ssh prints, and what that means. `on`: the side where `command` tells or mends more."""

    pattern: str
    word: str
    observed: str
    on: Literal["source", "peer"]
    command: str


_SAID = (
    _Said("ssh is not installed", "no ssh", "{source} has no ssh client", "source", "sudo apt install -y openssh-client"),
    _Said(
        "IDENTIFICATION HAS CHANGED", "host key", "{source} knows another host key of {peer}", "source", "ssh-keygen -F {peer}"
    ),
    _Said(
        "Host key verification failed|host key is known",
        "host key",
        "{source} does not know the host key of {peer}",
        "source",
        'ssh -G {peer} | grep -i -E "hostname|knownhosts"',
    ),
    _Said(
        "UNPROTECTED PRIVATE KEY|bad permissions",
        "key mode",
        "others may read the private key of {source}, so ssh does not use it",
        "source",
        "chmod 600 ~/.ssh/id_ed25519",
    ),
    _Said(
        r"Bad owner or permissions on (?P<path>\S+)",
        "config",
        "others may write to {path} of {source}, so ssh does not start",
        "source",
        "chmod go-w {path}",
    ),
    _Said("onfiguration option", "config", "ssh on {source} does not understand its config", "source", "ssh -G {peer}"),
    _Said(
        "Could not resolve", "dns", "{source} cannot resolve the address of {peer}", "source", "ssh -G {peer} | grep -i ^hostname"
    ),
    _Said("Connection refused", "refused", "nothing listens where {source} looks for {peer}", "source", "ssh -v {peer} true"),
    _Said("No route|Network is unreach", "no route", "{source} has no route to {peer}", "source", "ip route"),
    _Said(
        "timed out|no end within",
        "timeout",
        "{peer} does not answer {source}: a firewall, or another network",
        "source",
        "ssh -v {peer} true",
    ),
    _Said("Too many authentication", "keys", "{source} offers too many keys", "source", "ssh -G {peer} | grep -i identity"),
    _Said(
        "Permission denied",
        "auth",
        "{peer} refuses the key of {source}",
        "peer",
        'sudo sshd -T | grep -i -E "authorizedkeysfile|strictmodes|pubkeyauth|permitroot|allowusers|allowgroups"',
    ),
    _Said(
        "kex_exchange_identification|Connection (reset|closed) by",
        "dropped",
        "the sshd of {peer} drops the connection of {source}",
        "peer",
        "sudo sshd -T | grep -i maxstartups",
    ),
)
"""The first that fits is told. The sentences are OpenSSH's own (ssh.c, sshconnect.c, readconf.c)."""


def explain(source: str, peer: str, rc: int | None, stdout: str, stderr: str, loose: Sequence[str] = ()) -> Cause | None:
    """Return why `ssh PEER true` on `source` is not a clean login, None when it is one: rc 0 and nothing on stdout.

    `loose`: paths on `peer` that others than the account may write to; sshd then ignores authorized_keys.
    """
    if rc == 0 and not stdout:
        return None
    if rc == 0:
        first = next((line.strip() for line in stdout.splitlines() if line.strip()), "blank lines")
        observed = (
            f"the login shell of {peer} prints {first[:80]!r}, which launchers take for an answer; only terminals may see it"
        )
        return Cause("noise", observed, "grep -n -e echo -e printf -e cat ~/.bashrc ~/.profile /etc/profile.d/*.sh", peer)
    for said in _SAID:
        match = re.search(said.pattern, stderr)
        if match is None:
            continue
        path = match.groupdict().get("path", "")
        observed = said.observed.format(source=source, peer=peer, path=path)
        command = said.command.format(peer=shlex.quote(peer), path=shlex.quote(path))
        if said.word == "auth" and loose:
            observed += f"; others may write to {', '.join(loose)}, so its sshd ignores authorized_keys (StrictModes)"
            command = f"chmod go-w {shlex.join(loose)}"
        return Cause(said.word, observed, command, source if said.on == "source" else peer)
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), f"exit status {rc}")
    return Cause("other", f"ssh from {source} to {peer}: {last[:200]}", f"ssh -v {shlex.quote(peer)} true", source)
