"""Read cluster.yaml into a Cluster, and tell every mistake in it at once.

Three steps, each of which may add mistakes: the YAML text becomes plain values with line marks (`_Document`), the entries of
`nodes` are expanded to one per node (`node[01-04]`), and pydantic models check keys, types and values. What concerns several
places (duplicates, addresses outside the subnet) is checked last, on whatever is sound. A mistake names file, line, path, value,
what is allowed and the nearest valid name.

The file system is looked at for two defaults only (`~/.ssh/config`, `~/.ssh/known_hosts`); no name is resolved here.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import ipaddress
import itertools
import os
import posixpath
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import annotated_types
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails, PydanticCustomError

from r4090c.errors import InputErrors, UsageError
from r4090c.model import Cluster, Expect, Network, Node, Paths, Ssh, Storage
from r4090c.paths import SharedPaths

P = TypeVar("P", bound=BaseModel)
F = TypeVar("F", int, float)

Loc = tuple[int | str, ...]
"""A place in the file, as pydantic spells it: ("nodes", 2, "ssh", "port")."""

MAX_FILE_BYTES = 1_048_576
"""Far above any real inventory (1,000 spelled-out nodes are about 150 KiB)."""
MAX_VALUES = 50_000
"""Values after aliases are followed; est.: 1,000 nodes × 20 keys, doubled. Stops alias bombs."""
MAX_DEPTH = 16
"""Levels of nesting; a real file has 5. Stops aliases that contain themselves."""
MAX_NODES = 1_024
"""Nodes after ranges are expanded; est. Stops `node[0-999999999]`."""
MAX_NAME = 200
"""Characters of a node's name: file names such as `torchrun-<node>.log` must stay below 255 bytes."""
MAX_GPUS = 32
"""est.: no board takes more; a larger number is a typing mistake."""
MAX_MISTAKES = 100
"""Mistakes told at once; the rest is counted."""

# --------------------------------------------------------------------------- what a value must look like

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ZONE = re.compile(r"[A-Za-z0-9._-]+")
_NFS_SOURCE = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):/.*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_NAME_ALLOWED = f"letters, digits, '.', '_', '-', with a letter or digit at both ends, at most {MAX_NAME} characters"
_ADDRESS_ALLOWED = "a host name, an IPv4 or an IPv6 address (no brackets, no port)"
_USER_ALLOWED = "a user name: letters, digits, '_', '.', '@', '-', not starting with '-', '.' or '@'"
_JUMP_ALLOWED = "one jump host as [user@]host[:port], host being a name or an IPv4 address"
_REMOTE_PATH_ALLOWED = "an absolute path (it starts with '/'), without '..' and control characters"
_LOCAL_PATH_ALLOWED = "an absolute path or one below '~/', without '..' and control characters"


def _wrong(expected: str, hint: str = "") -> PydanticCustomError:
    """Return the error by which a validator tells what is allowed here."""
    return PydanticCustomError("cluster_yaml", "wrong value", {"expected": expected, "hint": hint})


def _name(value: str) -> str:
    if len(value) > MAX_NAME or not _NAME.fullmatch(value):
        raise _wrong(_NAME_ALLOWED)
    return value


def _is_address(value: str) -> bool:
    """Say whether `value` is an IP address or a host name; a name of digits and dots only must be an IPv4 address."""
    if ":" in value or re.fullmatch(r"[0-9.]+", value):
        address, percent, zone = value.partition("%")
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        if percent and not (_ZONE.fullmatch(zone) and parsed.version == 6):
            return False
        return not (parsed.is_unspecified or parsed.is_multicast or value == "255.255.255.255")
    return len(value) <= 253 and all(_LABEL.fullmatch(label) for label in value.split("."))


def _address(value: str) -> str:
    if not _is_address(value):
        raise _wrong(_ADDRESS_ALLOWED)
    return value


def _user(value: str) -> str:
    if value and not _USER.fullmatch(value):
        raise _wrong(_USER_ALLOWED)
    return value


def _jump(value: str) -> str:
    user, at, rest = value.rpartition("@")
    host, colon, port = rest.partition(":")
    sound = (
        (not at or _USER.fullmatch(user))
        and _is_address(host)
        and (not colon or (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65_535))
    )
    if value and not sound:
        raise _wrong(_JUMP_ALLOWED)
    return value


def _cidr(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError:
        try:
            wide = ipaddress.ip_network(value, strict=False)
        except ValueError:
            raise _wrong("a network in CIDR notation, like 10.10.0.0/24") from None
        raise _wrong("a network in CIDR notation, with no host bits set", f"write {wide}") from None
    if "/" not in value:
        raise _wrong("a network in CIDR notation, like 10.10.0.0/24", "add the prefix length, like /24")
    return value


def _remote_path(value: str) -> str:
    if value.startswith("~"):
        raise _wrong(_REMOTE_PATH_ALLOWED, "'~' may be another folder on each node: write the path in full")
    if not value.startswith("/") or ".." in value.split("/") or _CONTROL.search(value):
        raise _wrong(_REMOTE_PATH_ALLOWED)
    return "/" + posixpath.normpath(value).lstrip("/")  # normpath keeps two leading slashes


def _local_path(value: str) -> str:
    if ".." in value.split("/") or _CONTROL.search(value):
        raise _wrong(_LOCAL_PATH_ALLOWED)
    expanded = _expand_home(value)
    if value and not expanded.startswith("/"):
        raise _wrong(_LOCAL_PATH_ALLOWED)
    return expanded


def _expand_home(path: str) -> str:
    """Return `path` with a leading `~` expanded; unchanged when that home is not known."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        return path


def _line(value: str) -> str:
    if not value or value.startswith("-") or _CONTROL.search(value):
        raise _wrong("one line of text, not starting with '-'")
    return value


def _possible(value: F) -> F:
    if value > 1e12:  # far above any threshold, and yet nothing computed from it overflows
        raise _wrong("a number from 0 up, and below 1e12")
    return value


def _env_name(value: str) -> str:
    if not _ENV_NAME.fullmatch(value):
        raise _wrong("a variable name: letters, digits and '_', not starting with a digit")
    return value


def _env_value(value: str) -> str:
    if _CONTROL.search(value.replace("\t", "")):
        raise _wrong("one line of text, in quotes")
    return value


def _integers(value: object) -> object:
    """Turn the list YAML gives into the tuple the model holds."""
    return tuple(value) if isinstance(value, list) else value


Name = Annotated[str, AfterValidator(_name)]
Address = Annotated[str, AfterValidator(_address)]
User = Annotated[str, AfterValidator(_user)]
Jump = Annotated[str, AfterValidator(_jump)]
Cidr = Annotated[str, AfterValidator(_cidr)]
RemotePath = Annotated[str, AfterValidator(_remote_path)]
LocalPath = Annotated[str, AfterValidator(_local_path)]
Line = Annotated[str, AfterValidator(_line)]
EnvName = Annotated[str, AfterValidator(_env_name)]
EnvValue = Annotated[str, AfterValidator(_env_value)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[Number, AfterValidator(_possible)]
Env = Annotated[dict[EnvName, EnvValue], Field(json_schema_extra={"propertyNames": {"pattern": f"^{_ENV_NAME.pattern}$"}})]

# --------------------------------------------------------------------------- the file schema


def _drop_default(schema: dict[str, Any]) -> None:
    """Hide the default that stands for "not stated"."""
    schema.pop("default", None)


class _Part(BaseModel):
    """One mapping of the file: unknown keys are mistakes, nothing is converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SshPart(_Part):
    """How the controller reaches the nodes: defaults at the top level, overrides in an entry of `nodes`."""

    user: User = Field("", description="Login name. Default: what the ssh_config says, then the current user.")
    port: int = Field(22, ge=1, le=65_535, description="Port of sshd. 22 leaves it to the ssh_config.")
    key: LocalPath = Field("", description="Private key on this machine. Default: ssh_config, agent, then ~/.ssh/id_*.")
    jump: Jump = Field("", description="Jump host, like user@bastion:22. Default: what the ssh_config says.")
    config: LocalPath = Field(
        "",
        json_schema_extra=_drop_default,
        description='The ssh_config to read; "" = none. Default: ~/.ssh/config when it exists.',
    )
    known_hosts: list[LocalPath] = Field(
        [],
        json_schema_extra=_drop_default,
        description="Host keys to trust. Default: ~/.ssh/known_hosts when it exists, and ~/.config/r4090c/known_hosts.",
    )
    connect_timeout_s: Number = Field(5.0, gt=0, le=600, description="Seconds to wait for the TCP connection.")


class NodePaths(_Part):
    """Paths that may differ on a node."""

    python: RemotePath = Field(
        "",
        json_schema_extra=_drop_default,
        description="Python with torch and deepspeed on this node. Default: the top-level one.",
    )


class NodeEntry(_Part):
    """One node, or several alike: any text may carry one range such as [01-04], all ranges being equally long."""

    name: Name = Field(description="Name of the node; node[01-04] makes four of this entry.")
    address: Address = Field(
        "", json_schema_extra=_drop_default, description="Where SSH reaches it: a host name or an IP address. Default: the name."
    )
    data_address: Address = Field(
        "", json_schema_extra=_drop_default, description="Where its peers reach it, on the data network. Default: the address."
    )
    gpus: int = Field(ge=0, le=MAX_GPUS, description="How many GPUs it should have; 0 = a CPU node.")
    ssh: SshPart = Field(SshPart(), json_schema_extra=_drop_default, description="What differs from the top-level `ssh`.")
    paths: NodePaths = Field(NodePaths(), json_schema_extra=_drop_default, description="What differs from the top-level `paths`.")
    env: Env = Field({}, description="Environment of this node's ranks, over the common `env`. Values in quotes.")
    spare: bool = Field(False, description="true = runs use it only in the place of a node that fails, or when --nodes names it.")


class NetworkPart(_Part):
    """The data network. What is not stated is not demanded."""

    kind: Literal["roce", "infiniband", "tcp", "loopback"] = Field(
        "tcp", description="What carries the gradients; loopback is for a demo on one machine."
    )
    subnet: Cidr = Field(
        "", json_schema_extra=_drop_default, description="Network that all data addresses lie in, like 10.10.0.0/24."
    )
    rate_gbit_s: Rate = Field(0.0, gt=0, json_schema_extra=_drop_default, description="Line rate of a node's port, Gbit/s.")
    mtu: int = Field(
        0, ge=576, le=65_536, json_schema_extra=_drop_default, description="MTU every data interface should have, bytes."
    )


class StoragePart(_Part):
    """The storage behind `paths.shared`. What is not stated is not demanded."""

    kind: Literal["nfs4", "nfs", "local", "other"] = Field(
        "nfs4", description="File system behind the shared folder; local = one machine, or a test."
    )
    source: Line = Field("", json_schema_extra=_drop_default, description="What is mounted, like nas:/export/shared.")
    mount: RemotePath = Field("", json_schema_extra=_drop_default, description="Mount point on every node.")


class PathsPart(_Part):
    """Absolute paths on the nodes."""

    shared: RemotePath = Field(description="The shared folder, at the same path on every node.")
    runs: RemotePath = Field(
        "", json_schema_extra=_drop_default, description="Folder for runs, on shared storage. Default: <shared>/r4090c/runs."
    )
    python: RemotePath = Field(
        "",
        json_schema_extra=_drop_default,
        description="Python with torch and deepspeed on every node. Required unless each node states its own.",
    )


_BOUNDS: dict[str, tuple[int, int | None]] = {
    "tcp_streams": (1, 128),
    "rdma_iterations": (5, 100_000),
    "rdma_latency_iterations": (5, 100_000),
    "storage_visible_warn_s": (0, 600),
}
"""Thresholds that are options of tools (iperf3(1): at most 128 streams; perftest(1): at least 5 iterations), or time to wait."""


def _threshold(name: str, kind: Any, default: Any) -> tuple[Any, Any]:
    """Return the pydantic field for one field of model.Expect."""
    if kind is bool:
        return bool, default
    least, most = _BOUNDS.get(name, (0, None))
    if kind is int:
        return Annotated[int, Field(ge=least, le=most), AfterValidator(_possible)], default
    if kind is float:
        # A tolerance is a share: 0.05, not 5.
        bounds = Field(ge=least, le=1 if name.endswith("_tolerance") else most)
        return Annotated[Number, bounds, AfterValidator(_possible)], default
    return Annotated[kind, BeforeValidator(_integers)], default


if TYPE_CHECKING:

    class ExpectPart(_Part):
        """Thresholds of the checks."""
else:
    ExpectPart = create_model(
        "ExpectPart",
        __base__=_Part,
        __doc__="Thresholds of the checks; each one stated here replaces its default.",
        **{
            threshold.name: _threshold(threshold.name, get_type_hints(Expect)[threshold.name], threshold.default)
            for threshold in dataclasses.fields(Expect)
        },
    )


class ClusterFile(_Part):
    """The whole file."""

    name: Name = Field(description="Name of the cluster, for reports and histories.")
    ssh: SshPart = Field(SshPart(), json_schema_extra=_drop_default, description="SSH defaults for all nodes.")
    nodes: list[NodeEntry] = Field(min_length=1, description="The nodes, in the order of their ranks.")
    network: NetworkPart = Field(NetworkPart(), json_schema_extra=_drop_default, description="The data network.")
    storage: StoragePart = Field(StoragePart(), json_schema_extra=_drop_default, description="The storage behind `paths.shared`.")
    paths: PathsPart = Field(description="Absolute paths on the nodes.")
    expect: ExpectPart = Field(ExpectPart(), json_schema_extra=_drop_default, description="Thresholds of the checks.")
    env: Env = Field({}, description="Environment of all ranks. Values in quotes.")


_SECTIONS: dict[tuple[str, ...], type[_Part]] = {
    (): ClusterFile,
    ("ssh",): SshPart,
    ("nodes",): NodeEntry,
    ("nodes", "ssh"): SshPart,
    ("nodes", "paths"): NodePaths,
    ("network",): NetworkPart,
    ("storage",): StoragePart,
    ("paths",): PathsPart,
    ("expect",): ExpectPart,
}
"""Where each mapping stands, list positions left out."""

_OTHER_NAMES = {
    "environment": "env",
    "gpu": "gpus",
    "gpu_count": "gpus",
    "host": "address",
    "hostname": "address",
    "hosts": "nodes",
    "identity_file": "key",
    "ip": "address",
    "mount_point": "mount",
    "private_key": "key",
    "proxy_jump": "jump",
    "slots": "gpus",
    "username": "user",
}
"""What other tools call our keys."""

# --------------------------------------------------------------------------- YAML text -> plain values with line marks


class _Nothing:
    """The value of a key without a value; no type accepts it."""


_NOTHING = _Nothing()

_YAML = "tag:yaml.org,2002:"
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF|nan|NaN|NAN)")


@dataclass
class _Document:
    """The values of one file, where each stands, how it was written, and the mistakes found so far (one a place)."""

    file: str
    value: Any = None
    lines: dict[Loc, int] = field(default_factory=dict)
    written: dict[Loc, str] = field(default_factory=dict)
    mistakes: dict[Loc, tuple[int, UsageError]] = field(default_factory=dict)
    values: int = 0

    def line(self, loc: Loc) -> int:
        """Return the line of `loc`, or of the nearest place around it."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return self.lines.get(loc, 1)

    def tell(self, loc: Loc, observed: str, expected: str, hint: str = "", line: int | None = None) -> None:
        """Note a mistake at `loc`, unless one is known there."""
        line = line or self.line(loc)
        where = f"{self.file}:{line}: {_path_text(loc)}" if loc else f"{self.file}:{line}"
        self.mistakes.setdefault(loc, (line, UsageError(where, observed, expected, hint)))

    def raise_mistakes(self) -> None:
        """Raise what was told, in the order of the lines; return when there is nothing."""
        found = [mistake for _, mistake in sorted(self.mistakes.values(), key=lambda pair: pair[0])]
        if not found:
            return
        if len(found) == 1:
            raise found[0]
        if len(found) > MAX_MISTAKES:
            rest = len(found) - MAX_MISTAKES
            found = [
                *found[:MAX_MISTAKES],
                UsageError(self.file, f"{rest} more mistakes", "a file like cluster.yaml of this project"),
            ]
        raise InputErrors(found)

    def show(self, loc: Loc, value: object) -> str:
        """Return `value` as it stands in the file, shortened and safe to print."""
        if isinstance(value, _Nothing):
            return "nothing (the key has no value)"
        if isinstance(value, dict):
            return "a mapping"
        if isinstance(value, list | tuple):
            return "a list"
        return repr(_shorten(value)) if isinstance(value, str) else _shorten(self.written.get(loc, str(value)))


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def _path_text(loc: Loc) -> str:
    """Return `loc` as people write it: nodes[2].ssh.port."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z0-9_-]+|<<|\?", part):
            text += f".{part}" if text else part
        else:
            text += f"[{_shorten(part)!r}]"
    return text


def _parse_yaml(text: str, file: str) -> _Document:
    """Return the values of `text`. Raises UsageError when it is not YAML, or too large."""
    if len(text) > MAX_FILE_BYTES:
        raise UsageError(file, f"{len(text):,} characters", f"at most {MAX_FILE_BYTES:,}")
    root = _compose(text, file)
    if root is None:
        raise UsageError(file, "empty", "an inventory of your nodes", "r4090c nodes --import HOSTFILE > cluster.yaml")
    document = _Document(file)
    document.value = _construct(document, root, (), 0)
    return document


class _Loader(yaml.SafeLoader):
    """SafeLoader that gives up early: PyYAML takes half a minute for a MiB of `x,x,x,…`."""

    composed = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.composed += 1
        if self.composed > MAX_VALUES:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_VALUES:,} values", mark)
        return super().compose_node(parent, index)


def _compose(text: str, file: str) -> yaml.Node | None:
    """Return the YAML node tree of `text`; nothing is constructed from it. Raises UsageError."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(f"{file}:{line}", f"the character {chr(error.character)!r}", "printable text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        source = text.splitlines()[line - 1] if line <= len(text.splitlines()) else ""
        problem = " ".join(part for part in (error.context and f"{error.context},", error.problem) if part)
        expected = "spaces: YAML takes no tab here" if "'\\t'" in problem else "valid YAML"
        if "flow" in problem and re.search(r"[^\s\"'\[{,:]\[[0-9]", source):
            expected = 'quotes around a range that stands between { }, like "node[01-04]"'
        hint = f"look at line {line}: {_shorten(source.strip())!r}" if source.strip() else ""
        raise UsageError(f"{file}:{line}:{column}", problem, expected, hint) from None
    except RecursionError:
        raise UsageError(file, "nested too deep", f"at most {MAX_DEPTH} levels") from None
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as error:
        # PyYAML lets some of Python's own errors through, for example chr() of the escape \UFFFFFFFF.
        raise UsageError(file, f"not YAML: {error}", "valid YAML") from None
    return node


def _construct(document: _Document, node: yaml.Node, loc: Loc, depth: int) -> Any:
    """Return the plain value of `node`: dict, list, text, whole number, number, truth value or _NOTHING.

    Raises UsageError at once for what may never end (aliases); notes the other mistakes in `document`.
    """
    line = node.start_mark.line + 1
    document.values += 1
    if document.values > MAX_VALUES:
        raise UsageError(
            f"{document.file}:{line}", f"more than {MAX_VALUES:,} values", "an inventory; aliases may multiply values"
        )
    if depth > MAX_DEPTH:
        raise UsageError(f"{document.file}:{line}", f"nested deeper than {MAX_DEPTH} levels", "an alias does not contain itself")
    document.lines.setdefault(loc, line)
    value: Any
    if isinstance(node, yaml.MappingNode):
        value, plain = _mapping(document, node, loc, depth), "map"
    elif isinstance(node, yaml.SequenceNode):
        value, plain = [_construct(document, item, (*loc, i), depth + 1) for i, item in enumerate(node.value)], "seq"
    else:
        value, plain = _scalar(document, node, loc), ""
    if node.tag != _YAML + plain if plain else not _is_scalar_tag(node.tag):
        tag = node.tag.replace(_YAML, "!!")
        document.tell(loc, f"the tag {_shorten(tag)!r}", "a plain value; tags are never followed", "remove the tag", line)
    return value


def _is_scalar_tag(tag: str) -> bool:
    return tag.removeprefix(_YAML) in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge")


def _mapping(document: _Document, node: yaml.MappingNode, loc: Loc, depth: int) -> dict[str, Any]:
    """Return the mapping `node`; `<<` gives way to what is stated. A key stated twice is a mistake."""
    merged: dict[str, Any] = {}
    stated: dict[str, Any] = {}
    first: dict[str, int] = {}
    merges = [value for key, value in node.value if key.tag == f"{_YAML}merge"]
    for source in [item for merge in merges for item in (merge.value if isinstance(merge, yaml.SequenceNode) else [merge])][::-1]:
        value = _construct(document, source, loc, depth + 1)
        if isinstance(value, dict):
            merged.update(value)
        else:
            document.tell((*loc, "<<"), document.show(loc, value), "a mapping to merge")
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == f"{_YAML}merge":
            continue
        if not isinstance(key_node, yaml.ScalarNode) or not _is_scalar_tag(key_node.tag):
            document.tell((*loc, "?"), "a key that is not text", "a plain key", line=line)
            continue
        key = key_node.value
        if not _encodable(key):
            document.tell((*loc, key), repr(_shorten(key)), "text that UTF-8 can hold", line=line)
            continue
        here = (*loc, key)
        if key in stated:
            document.tell(
                here, f"stated twice, in line {first[key]} and in line {line}", "each key once", "remove one of the two", line
            )
            continue
        first[key] = document.lines[here] = line
        stated[key] = _construct(document, value_node, here, depth + 1)
    return {**merged, **stated}


def _encodable(text: str) -> bool:
    """Say whether UTF-8 can hold `text`: the escape for U+D800 makes half a character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _scalar(document: _Document, node: yaml.Node, loc: Loc) -> Any:
    """Return the value of a scalar by YAML 1.1's rules, except that 010, 0x1F, 1_000, 1:30 and dates stay the text they are."""
    text, kind = str(node.value), node.tag.removeprefix(_YAML)
    value: Any = text
    if kind == "null":
        value = _NOTHING
    elif kind == "bool" and text.lower() in (*_TRUE, *_FALSE):
        value = text.lower() in _TRUE
    elif kind == "int" and _INTEGER.fullmatch(text):
        value = int(text)
    elif kind == "float" and (_DECIMAL.fullmatch(text) or _NOT_FINITE.fullmatch(text)):
        value = float(text.replace(".", "", 1) if _NOT_FINITE.fullmatch(text) else text)
    elif not _encodable(text):
        document.tell(loc, repr(_shorten(text)), "text that UTF-8 can hold", line=node.start_mark.line + 1)
        return ""
    if not isinstance(value, str | _Nothing):
        document.written[loc] = text
    return value


# --------------------------------------------------------------------------- ranges

_RANGE_ALLOWED = "one range a text, such as node[01-04] or node[1,3,5-7]"


def expand_range(text: str) -> list[str]:
    """Return the texts that `text` stands for: `node[08-10]` -> node08, node09, node10; without a bracket, `text` itself.

    Zeros that pad the first number are kept. Raises UsageError for more than one bracket, and for a bracket that holds
    anything but numbers, `a-b` and commas, counts down, or makes more than 1,024 texts.
    """

    def refuse(observed: str) -> UsageError:
        return UsageError(repr(_shorten(text)), observed, _RANGE_ALLOWED)

    if "[" not in text and "]" not in text:
        return [text]
    before, _, rest = text.partition("[")
    inside, closed, after = rest.partition("]")
    if not closed or "]" in before or "[" in inside or "]" in after.partition("[")[0]:
        raise refuse("'[' and ']' do not match")
    if "[" in after:
        raise refuse("more than one range")
    found: list[str] = []
    for item in inside.split(","):
        bounds = re.fullmatch(r"\s*([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?\s*", item)
        if not bounds:
            raise refuse(f"{_shorten(item)!r} is neither a number nor two numbers with '-' between them")
        low, high = bounds[1], bounds[2] or bounds[1]
        if int(low) > int(high):
            raise refuse(f"{low}-{high} counts down")
        if high.startswith("0") and len(high) > len(low):
            raise refuse(f"{low}-{high} has more zeros in front at its end than at its start")
        if len(found) + int(high) - int(low) >= MAX_NODES:
            raise refuse(f"more than {MAX_NODES:,} names")
        width = len(low) if low.startswith("0") else 0
        found += [f"{before}{number:0{width}d}{after}" for number in range(int(low), int(high) + 1)]
    return found


def _strings(value: object, loc: Loc) -> Iterator[tuple[Loc, str]]:
    """Yield every text below `value` with its place."""
    if isinstance(value, str):
        yield loc, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(item, (*loc, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _strings(item, (*loc, i))


def _replace(value: Any, loc: Loc, texts: Mapping[Loc, list[str]], index: int) -> Any:
    """Return a copy of `value` in which each ranged text is its `index`-th."""
    if loc in texts:
        return texts[loc][index % len(texts[loc])]
    if isinstance(value, dict):
        return {key: _replace(item, (*loc, key), texts, index) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, (*loc, i), texts, index) for i, item in enumerate(value)]
    return value


def _expand_entries(document: _Document) -> tuple[list[Any], list[int]]:
    """Return the entries of `nodes`, one for each node, and the position of each in the file."""
    entries: list[Any] = []
    origin: list[int] = []
    nodes = document.value.get("nodes")
    for position, entry in enumerate(nodes if isinstance(nodes, list) else []):
        texts = _ranged_texts(document, entry, ("nodes", position)) if isinstance(entry, dict) else {}
        count = max((len(values) for values in texts.values()), default=1)
        if len(entries) + count > MAX_NODES:
            line = document.line(("nodes", position))
            raise UsageError(f"{document.file}:{line}: nodes[{position}]", f"more than {MAX_NODES:,} nodes", "a cluster")
        entries += [_replace(entry, ("nodes", position), texts, index) for index in range(count)]
        origin += [position] * count
    return entries, origin


def _ranged_texts(document: _Document, entry: dict[str, Any], loc: Loc) -> dict[Loc, list[str]]:
    """Return every text of `entry` that carries a range, expanded; all as long as the name's range, or a mistake is noted."""
    texts: dict[Loc, list[str]] = {}
    for place, text in _strings(entry, loc):
        if place[2] == "env" and ((*loc, "name") not in texts or not re.search(r"\[[0-9]+\s*[-,][0-9,\s-]*\]", text)):
            continue  # brackets in a variable's value are rarely ours: only a range in an entry of several nodes is one
        try:
            values = expand_range(text)
        except UsageError as error:
            document.tell(place, f"{_shorten(text)!r}: {error.observed}", error.expected)
            continue
        if len(values) > 1 or values != [text]:
            texts[place] = values
    name = (*loc, "name")
    if isinstance(entry.get("name"), str) and name not in document.mistakes:
        count = len(texts.get(name, [""]))
        for place, values in list(texts.items()):
            if len(values) != count:
                document.tell(
                    place,
                    f"{_shorten(str(_at(entry, place[2:])))!r} stands for {len(values)}, the name for {count}",
                    "ranges of one length in one entry",
                )
                texts[place] = values[:1]
    return texts


def _at(value: Any, loc: Loc) -> Any:
    """Return what stands at `loc` below `value`."""
    for part in loc:
        value = value[part]
    return value


# --------------------------------------------------------------------------- mistakes of keys, types and values


def _field_at(loc: Loc) -> tuple[type[_Part] | None, str]:
    """Return the model of the mapping that holds `loc`, and the key there."""
    names = tuple(part for part in loc if isinstance(part, str))
    return _SECTIONS.get(names[:-1]), (names[-1] if names else "")


def _allowed(loc: Loc) -> str:
    """Return what may stand at `loc`, for a value of the wrong type or out of bounds."""
    if isinstance(loc[-1], int):
        return {"nodes": "a mapping with at least `name` and `gpus`", "known_hosts": "the path of a file"}.get(
            str(loc[-2]), "a whole number"
        )
    model, key = _field_at(loc)
    if model is None:  # below env
        return "text, in quotes"
    described = model.model_fields[key]
    kind: Any = described.annotation
    inner = getattr(kind, "__origin__", kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a mapping with any of: {', '.join(kind.model_fields)}"
    if inner is Literal:
        return f"one of: {', '.join(kind.__args__)}"
    if inner is dict:
        return "a mapping from variable names to texts in quotes"
    if inner is list:
        return f"a list of {'nodes, at least one (lines that start with `- name:`)' if key == 'nodes' else 'file names, in [ ]'}"
    if inner is tuple:
        return "a list of two whole numbers, like [3, 8]"
    if kind is bool:
        return "true or false"
    if kind is str:
        return f"text ({described.description})"
    bounds = {type(rule): rule for rule in described.metadata}
    return ("a whole number" if kind is int else "a number") + _bounds_text(bounds)


def _bounds_text(bounds: Mapping[type, Any]) -> str:
    """Return the bounds among a field's metadata as words."""
    low, above, high = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Gt), bounds.get(annotated_types.Le)
    lower = f" from {low.ge}" if low else f" above {above.gt}" if above else ""
    upper = f" to {high.le}" if low and high else f" and at most {high.le}" if high else " up" if low else ""
    return lower + upper


def _note(document: _Document, error: ErrorDetails, loc: Loc) -> None:
    """Note one pydantic error in our own words."""
    value, kind, hint = error["input"], error["type"], ""
    if loc and loc[-1] == "[key]" and loc not in document.lines:
        loc, value = loc[:-1], loc[-2]
    if isinstance(value, _Nothing) and kind != "extra_forbidden":
        return document.tell(loc, document.show(loc, value), _allowed(loc), "write a value, or remove the line")
    if kind == "extra_forbidden":
        return _note_unknown_key(document, loc)
    if kind == "missing" and isinstance(loc[-1], int):  # a list that should have two items
        return document.tell(loc[:-1], document.show(loc[:-1], value), _allowed(loc[:-1]))
    if kind == "missing":
        model, key = _field_at(loc)
        described = (model.model_fields[key].description if model else "") or ""
        return document.tell(loc, "missing", described.rstrip("."), f"add `{key}:`")
    if kind == "cluster_yaml":
        context = error.get("ctx", {})
        return document.tell(loc, document.show(loc, value), context["expected"], context["hint"])
    if kind == "too_short" and loc == ("nodes",):
        return document.tell(loc, "no nodes", "at least one node", "add a line `- name: …`")
    if kind == "literal_error":
        model, key = _field_at(loc)
        choices = model.model_fields[key].annotation.__args__ if model else ()  # type: ignore[union-attr]
        hint = _nearest(str(value), choices)
    elif kind == "string_type" and loc in document.written:
        hint = f'quote it: "{_shorten(document.written[loc])}"'
    elif kind == "list_type" and isinstance(value, str):
        hint = f"write [{_shorten(value)}]"
    elif kind == "model_type" and isinstance(value, str) and isinstance(loc[-1], int):
        hint = "write `- {name: " + _shorten(value) + ", gpus: …}`"
    return document.tell(loc, document.show(loc, value), _allowed(loc), hint)


def _nearest(text: str, names: Any) -> str:
    """Return "did you mean …?" for the nearest of `names`, or nothing."""
    near = get_close_matches(text[:100].lower(), list(names), n=1)
    return f"did you mean '{near[0]}'?" if near else ""


def _note_unknown_key(document: _Document, loc: Loc) -> None:
    """Note a key nobody knows, with the key that was meant or the section it belongs to."""
    model, key = _field_at(loc)
    known = list(model.model_fields) if model else []
    other = _OTHER_NAMES.get(key.lower().replace("-", "_"), "")
    hint = f"did you mean '{other}'?" if other in known else _nearest(key.replace("-", "_"), known)
    above = tuple(part for part in loc[:-1] if isinstance(part, str))
    for place, section in _SECTIONS.items():
        if not hint and place[:-1] == above and place and key in section.model_fields and place != ("nodes",):
            hint = f"it belongs under `{place[-1]}:`"
    if loc[0] == "nodes" and above == ("nodes", "paths") and key in PathsPart.model_fields:
        hint = "it is the same on every node: state it once, in the top-level `paths:`"
    document.tell(loc, "unknown key", f"one of: {', '.join(known)}", hint)


# --------------------------------------------------------------------------- cluster.yaml -> Cluster


def load_cluster(path: Path) -> Cluster:
    """Return the cluster that the file at `path` describes.

    Raises UsageError: one mistake, or InputErrors with all of them.
    """
    return load_cluster_text(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of the file at `path`, at most 1 MiB of UTF-8. Raises UsageError."""
    try:
        with path.open("rb") as stream:  # not read_bytes: /dev/zero has no end
            data = stream.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise UsageError(str(path), "a folder", "a file", f"r4090c --cluster {path}/cluster.yaml nodes") from None
    except FileNotFoundError:
        raise UsageError(str(path), "no such file", "a readable file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UsageError(repr(str(path)), getattr(error, "strerror", None) or str(error), "a readable file") from None
    return decode(data, str(path))


def decode(data: bytes, file: str) -> str:
    """Return `data` as text; `file` names it in messages. Raises UsageError when it is too large or not UTF-8 text."""
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(file, "larger than 1 MiB", "a text file of a few KiB")
    if b"\0" in data:
        raise UsageError(file, f"a binary file (a NUL byte at {data.index(0)})", "UTF-8 text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{file}:{line}", f"the byte 0x{data[error.start]:02x} is not UTF-8", "UTF-8 text") from None


def load_cluster_text(text: str, file: str) -> Cluster:
    """Return the cluster that `text` describes; `file` names it in messages and in the result.

    Raises UsageError: one mistake, or InputErrors with all of them.
    """
    document = _parse_yaml(text, file)
    if not isinstance(document.value, dict):
        hostfile = isinstance(document.value, str) and "slots" in document.value
        hint = f"r4090c nodes --import {file} > cluster.yaml" if hostfile else ""
        observed = "a list" if isinstance(document.value, list) else "plain text"
        raise UsageError(file, observed, "a mapping: lines like `name: …`, `nodes:`, `paths:`", hint)
    entries, origin = _expand_entries(document)
    tree = {**document.value, "nodes": entries} if isinstance(document.value.get("nodes"), list) else document.value
    parsed: ClusterFile | None = None
    try:
        parsed = ClusterFile.model_validate(tree)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            loc = error["loc"]
            _note(document, error, ("nodes", origin[int(loc[1])], *loc[2:]) if loc[0] == "nodes" and len(loc) > 1 else loc)
    _note_across(document, tree, entries, origin)
    document.raise_mistakes()
    assert parsed is not None
    return _resolve(parsed, file)


def _sound(document: _Document, model: type[P], value: Any, loc: Loc, **fallback: object) -> P | None:
    """Return `value` as `model` without the places that have mistakes; None when what is left is not enough."""
    pruned = _prune(document, value, loc)
    try:
        return model.model_validate({**fallback, **pruned} if isinstance(pruned, dict) else pruned)
    except ValidationError:
        return None


def _prune(document: _Document, value: Any, loc: Loc) -> Any:
    """Return a copy of `value` without the places that have mistakes."""
    if isinstance(value, dict):
        return {key: _prune(document, item, (*loc, key)) for key, item in value.items() if (*loc, key) not in document.mistakes}
    if isinstance(value, list):
        return [_prune(document, item, (*loc, i)) for i, item in enumerate(value) if (*loc, i) not in document.mistakes]
    return value


def _note_across(document: _Document, tree: Mapping[str, Any], entries: list[Any], origin: list[int]) -> None:
    """Note the mistakes that concern several places, looking only at what is sound by itself."""
    network = _sound(document, NetworkPart, tree.get("network"), ("network",)) or NetworkPart()
    storage = _sound(document, StoragePart, tree.get("storage"), ("storage",)) or StoragePart()
    ssh = _sound(document, SshPart, tree.get("ssh"), ("ssh",)) or SshPart()
    expect = _sound(document, ExpectPart, tree.get("expect"), ("expect",)) or ExpectPart()
    nodes: list[tuple[Loc, NodeEntry]] = []
    for entry, position in zip(entries, origin, strict=True):
        node = _sound(document, NodeEntry, entry, ("nodes", position), gpus=0)
        # An address with a mistake would fall back to the name, and be judged there.
        if (
            node is not None
            and not {("nodes", position, key) for key in ("name", "address", "data_address")} & document.mistakes.keys()
        ):
            nodes.append((("nodes", position), node))
    _note_duplicates(document, nodes, ssh, network)
    for loc, node in nodes:
        place, data_address = _data_address(loc, node)
        if not node.address and not _is_address(node.name):
            document.tell(
                (*loc, "name"), repr(node.name), f"a name that is also an address: {_ADDRESS_ALLOWED}", "add `address:`"
            )
        else:
            _note_data_address(document, place, data_address, network, alone=len(entries) == 1)
    own_paths = [entry.get("paths") if isinstance(entry, dict) else None for entry in entries]
    python_everywhere = all(isinstance(paths, dict) and "python" in paths for paths in own_paths)
    if isinstance(tree.get("paths"), dict) and "python" not in tree["paths"] and not python_everywhere:
        document.tell(
            ("paths", "python"),
            "missing",
            "Python with torch and deepspeed, here or in the `paths` of each node",
            "add `python:`",
        )
    if storage.source and storage.kind in ("nfs", "nfs4") and not _NFS_SOURCE.fullmatch(storage.source):
        document.tell(("storage", "source"), repr(storage.source), f"server:/path, for kind {storage.kind}")
    _note_thresholds(document, expect)


def _note_thresholds(document: _Document, expect: ExpectPart) -> None:
    """Note a `…_warn_s` above its `…_fail_s`."""
    for warn in ExpectPart.model_fields:
        fail = warn.removesuffix("_warn_s") + "_fail_s"
        if not warn.endswith("_warn_s") or fail not in ExpectPart.model_fields or getattr(expect, warn) <= getattr(expect, fail):
            continue
        stated = warn if warn in expect.model_fields_set else fail
        document.tell(
            ("expect", stated),
            f"warns at {getattr(expect, warn):g} and fails at {getattr(expect, fail):g}",
            "a warning no later than the failure",
        )


def _data_address(loc: Loc, node: NodeEntry) -> tuple[Loc, str]:
    """Return where the data address is stated, and the address: data_address, else address, else name."""
    key = "data_address" if node.data_address else "address" if node.address else "name"
    return (*loc, key), getattr(node, key)


def _parse_ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address, its zone left out; None for a host name."""
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None


def _is_local(address: str) -> bool:
    """Say whether `address` means this machine on every machine."""
    parsed = _parse_ip(address)
    return parsed.is_loopback if parsed is not None else address.lower() == "localhost"


def _note_data_address(document: _Document, place: Loc, address: str, network: NetworkPart, alone: bool) -> None:
    """Note a data address outside network.subnet, or one that only its own node reaches."""
    parsed = _parse_ip(address)
    defaulted = "" if place[-1] == "data_address" else "add `data_address:`; without it the address is also the data address"
    if parsed is not None and network.subnet and parsed not in ipaddress.ip_network(network.subnet):
        document.tell(place, repr(address), f"an address inside network.subnet {network.subnet}", defaulted)
    if _is_local(address) and network.kind != "loopback" and not alone:
        document.tell(
            place, repr(address), "an address that the other nodes reach", "for a demo on one machine: network.kind: loopback"
        )


def _note_duplicates(document: _Document, nodes: list[tuple[Loc, NodeEntry]], ssh: SshPart, network: NetworkPart) -> None:
    """Note names, data addresses and SSH endpoints that two nodes share; on loopback only the names must differ."""

    def note(kind: str, uses: list[tuple[Loc, object, str, str]]) -> None:
        first: dict[object, tuple[str, int]] = {}
        for place, value, text, owner in uses:
            if value in first:
                document.tell(
                    place, f"{text!r} is also the {kind} of {first[value][0]} (line {first[value][1]})", f"one {kind} a node"
                )
            else:
                first[value] = (owner, document.line(place))

    note("name", [((*loc, "name"), node.name, node.name, "another node") for loc, node in nodes])
    if network.kind == "loopback":
        return
    data: list[tuple[Loc, object, str, str]] = []
    endpoints: list[tuple[Loc, object, str, str]] = []
    for loc, node in nodes:
        place, address = _data_address(loc, node)
        data.append((place, _parse_ip(address) or address.lower(), address, node.name))
        stated = {**ssh.model_dump(exclude_unset=True), **node.ssh.model_dump(exclude_unset=True)}
        address = node.address or node.name
        endpoint = (_parse_ip(address) or address.lower(), stated.get("port", 22), stated.get("jump", ""))
        endpoints.append(((*loc, "address" if node.address else "name"), endpoint, address, node.name))
    note("data address", data)
    note("SSH address", endpoints)


def _resolve(parsed: ClusterFile, file: str) -> Cluster:
    """Return the cluster with every default filled in."""
    defaults = parsed.ssh.model_dump(exclude_unset=True)
    defaults.setdefault("config", _default_ssh_config())
    defaults.setdefault("known_hosts", _default_known_hosts())
    runs = parsed.paths.runs or str(SharedPaths(PurePosixPath(parsed.paths.shared)).runs)
    nodes = []
    for entry in parsed.nodes:
        address = entry.address or entry.name
        stated = {**defaults, **entry.ssh.model_dump(exclude_unset=True)}
        stated["known_hosts"] = tuple(stated["known_hosts"])
        nodes.append(
            Node(
                name=entry.name,
                ssh=Ssh(address=address, **stated),
                data_address=entry.data_address or address,
                gpus=entry.gpus,
                paths=Paths(shared=parsed.paths.shared, runs=runs, python=entry.paths.python or parsed.paths.python),
                env=dict(entry.env),
                spare=entry.spare,
            )
        )
    network, storage = parsed.network, parsed.storage
    thresholds = parsed.expect.model_dump(exclude_unset=True)
    return Cluster(
        name=parsed.name,
        nodes=tuple(nodes),
        network=Network(network.kind, network.subnet or None, network.rate_gbit_s or None, network.mtu or None),
        storage=Storage(storage.kind, storage.source or None, storage.mount or None),
        expect=Expect(**thresholds),
        env=dict(parsed.env),
        file=file,
        expect_origin=dict.fromkeys(thresholds, "cluster.yaml"),
    )


def _default_ssh_config() -> str:
    """Return ~/.ssh/config when it exists, else "" (none)."""
    path = _expand_home("~/.ssh/config")
    return path if os.access(path, os.F_OK) else ""


def config_folder() -> Path:
    """Return the folder of what r4090c keeps on this machine: $R4090C_CONFIG, else ~/.config/r4090c."""
    return Path(os.environ.get("R4090C_CONFIG") or _expand_home("~/.config/r4090c"))


def _default_known_hosts() -> list[str]:
    """Return ~/.ssh/known_hosts when it exists, and ours, which `r4090c provision` writes."""
    users, ours = _expand_home("~/.ssh/known_hosts"), str(config_folder() / "known_hosts")
    return [users, ours] if os.access(users, os.F_OK) else [ours]


def mistake_in(cluster: Cluster) -> str:
    """Return what `cluster` holds that no cluster.yaml may, "" when it holds nothing of that kind.

    For clusters that come from elsewhere, as from a bundle: what is judged may rely on what this module checks.
    """
    for node in cluster.nodes:
        network, storage, ssh = cluster.network, cluster.storage, node.ssh
        stated = {"subnet": network.subnet, "rate_gbit_s": network.rate_gbit_s, "mtu": network.mtu}
        login = {"user": ssh.user, "port": ssh.port, "connect_timeout_s": ssh.connect_timeout_s}
        entry = {"name": node.name, "address": ssh.address, "data_address": node.data_address, "gpus": node.gpus}
        document = {
            "name": cluster.name,
            "nodes": [{**entry, "ssh": login, "env": node.env}],
            "network": {"kind": network.kind, **{key: value for key, value in stated.items() if value is not None}},
            "storage": {"kind": storage.kind},
            "paths": {"shared": node.paths.shared, "runs": node.paths.runs, "python": node.paths.python},
            "expect": dataclasses.asdict(cluster.expect),
            "env": cluster.env,
        }
        try:
            ClusterFile.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            return f"{'.'.join(map(str, first['loc']))}: {first['input']!r:.80}"
    names = [node.name for node in cluster.nodes]
    return "" if names and len({*names}) == len(names) else "nodes: none, or two of one name"


# --------------------------------------------------------------------------- --nodes


def select_nodes(cluster: Cluster, wanted: str | None, *, spares: bool = True) -> tuple[Node, ...]:
    """Return the nodes that `wanted` asks for, in its order: None = all, "2" = the first two, else names and ranges.

    "node01,node03" and "node[01-03],gpu7" work; a node whose name is a number is meant before a count. Without `spares`, all
    and a count mean those that are no spare. Raises UsageError (all mistakes at once) for unknown and repeated names and for a
    count that is 0 or more than there are.
    """
    counted = cluster.nodes if spares else tuple(node for node in cluster.nodes if not node.spare)
    if not counted:
        raise UsageError("cluster.yaml: nodes", "all are spares", "at least one that is none", "remove a `spare: true`")
    if wanted is None:
        return counted
    by_name = {node.name: node for node in cluster.nodes}
    text = wanted.strip()
    if re.fullmatch(r"[-+]?[0-9]{1,9}", text) and text not in by_name:
        if not 1 <= int(text) <= len(counted):
            kept = f" and {len(cluster.nodes) - len(counted)} spare" if len(counted) < len(cluster.nodes) else ""
            observed, expected = f"{cluster.name} has {len(counted)} nodes{kept}", f"a count from 1 to {len(counted)}"
            raise UsageError(f"--nodes {text}", observed, expected)
        return counted[: int(text)]
    allowed = f"a count, or names among: {_shorten(', '.join(by_name))}"
    mistakes: list[UsageError] = []
    chosen: dict[str, Node] = {}
    for item in re.split(r",(?![^\[\]]*\])", text):  # commas inside a bracket belong to the range
        try:
            names = expand_range(item.strip())
        except UsageError as error:
            mistakes.append(UsageError(f"--nodes {error.culprit}", error.observed, error.expected))
            continue
        for name in names:
            if name not in by_name:
                mistakes.append(UsageError("--nodes", f"no node is called {_shorten(name)!r}", allowed, _nearest(name, by_name)))
            elif name in chosen:
                mistakes.append(UsageError("--nodes", f"{name} is asked for twice", "each node once"))
            else:
                chosen[name] = by_name[name]
    if len(mistakes) > 1:
        raise InputErrors(mistakes[:MAX_MISTAKES])
    if mistakes:
        raise mistakes[0]
    return tuple(chosen.values())


# --------------------------------------------------------------------------- hostfile -> cluster.yaml

FILL_IN = "FILL-IN"
"""Stands in an imported inventory where a hostfile says nothing; as a relative path it is refused until it is replaced."""

_HOST_OPTIONS = ("slots", "max_slots", "max-slots")
_HOST_ALLOWED = "a line like `node01 slots=8`, `node01:8` or `user@node01 slots=8`"

_IMPORTED = """\
# yaml-language-server: $schema=cluster.schema.json
# Made from a hostfile by `r4090c nodes --import`. Next: fill in the two paths marked {mark}, then run `r4090c nodes`.
# `r4090c schema > cluster.schema.json` gives your editor completion; every key is explained in docs/cluster-yaml.md.
name: cluster

{ssh}
nodes:
{nodes}
network:
  kind: tcp                     # what carries the gradients: roce, infiniband or tcp
  # subnet: 10.10.0.0/24        # what you state here is demanded of every node
  # rate_gbit_s: 100
  # mtu: 9000

storage:
  kind: nfs4                    # behind the shared folder: nfs4, nfs, local or other
  # source: "nas:/export/shared"
  # mount: /mnt/shared

paths:
  shared: {mark}               # absolute path of the shared folder, the same on every node
  python: {mark}               # absolute path of the Python with torch and deepspeed on every node
"""


@dataclass(frozen=True, slots=True)
class _Host:
    """One line of a hostfile."""

    name: str
    user: str
    gpus: int


def parse_hostfile(text: str, file: str = "hostfile") -> str:
    """Return the text of a cluster.yaml for the DeepSpeed or MPI hostfile `text`; it loads once both FILL-IN are replaced.

    `file` names it in messages. Raises UsageError (all bad lines at once, with their numbers).
    """
    hosts: dict[str, _Host] = {}
    lines: dict[str, int] = {}
    mistakes: list[UsageError] = []
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff")), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            host = _parse_host(content)
            key = host.name.lower()
            if key in hosts:
                raise UsageError("", f"{host.name} again (first in line {lines[key]})", "each host once, with all its slots")
        except UsageError as error:
            mistakes.append(UsageError(f"{file}:{number}", error.observed, error.expected, error.next_command))
            continue
        hosts[key], lines[key] = host, number
    for key in [key for key in hosts if _is_local(key) and len(hosts) > 1]:
        mistakes.append(UsageError(f"{file}:{lines[key]}", key, "an address that the other nodes reach"))
    if len(hosts) > MAX_NODES:
        mistakes.append(UsageError(file, f"{len(hosts):,} hosts", f"at most {MAX_NODES:,}"))
    if not hosts and not mistakes:
        raise UsageError(file, "no hosts", _HOST_ALLOWED)
    if len(mistakes) > 1:
        raise InputErrors(mistakes[:MAX_MISTAKES])
    if mistakes:
        raise mistakes[0]
    result = _write_hosts(list(hosts.values()))
    load_cluster_text(result.replace(FILL_IN, "/fill/in"), file)  # what we print must load
    return result


def _parse_host(content: str) -> _Host:
    """Return the host on one line without its comment. Raises UsageError whose culprit is left to the caller."""
    target, *options = re.sub(r"\s*=\s*", "=", content).split()
    user, at, host = target.rpartition("@")
    if host.count(":") > 1:
        hint = "an IPv6 address goes into `address:` of cluster.yaml, beside a name"
        raise UsageError("", f"the host {_shorten(host)!r}", "a host name or an IPv4 address", hint)
    name, colon, slots = host.partition(":")
    counts = {"slots": slots} if colon else {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in _HOST_OPTIONS or key in counts:
            again = "a second " if key in counts else ""
            raise UsageError("", f"{again}{_shorten(option)!r}", _HOST_ALLOWED, _nearest(key, _HOST_OPTIONS))
        counts[key] = value
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME or not _is_address(name):
        raise UsageError("", f"the host {_shorten(host)!r}", "a host name or an IPv4 address")
    if at and not _USER.fullmatch(user):
        raise UsageError("", f"the user {_shorten(user)!r}", _USER_ALLOWED)
    for key, value in counts.items():
        if not re.fullmatch(r"[0-9]{1,4}", value) or int(value) > MAX_GPUS:
            raise UsageError("", f"{key}={_shorten(value)!r}", f"a whole number from 0 to {MAX_GPUS}")
    if "slots" not in counts:
        raise UsageError("", f"{name} has no number of slots", "the number of its GPUs", f"write `{name} slots=8`")
    return _Host(name, user, int(counts["slots"]))


def _write_hosts(hosts: list[_Host]) -> str:
    """Return cluster.yaml text for `hosts`; neighbours that count up share one entry."""
    users = {host.user for host in hosts}
    common = users.pop() if len(users) == 1 else ""
    ssh = (
        _scalar_line("user", common)
        if common
        else "# user: train                 # default: your ssh_config, then the current user"
    )
    entries: list[str] = []
    for group in _group_hosts(hosts):
        names = [host.name for host in group]
        entry = f"  - {_scalar_line('name', _fold_names(names) or names[0])}\n    gpus: {group[0].gpus}\n"
        if group[0].user and not common:
            entry += f"    ssh: {{{_scalar_line('user', group[0].user)}}}\n"
        entries.append(entry)
    entries.append("    # data_address: 10.10.0.[11-14]   # where the peers reach a node, if not at its name\n")
    head = (
        f"ssh:\n  {ssh}\n  # key: ~/.ssh/id_ed25519\n"
        if common
        else f"# ssh:\n#   {ssh.removeprefix('# ')}\n#   key: ~/.ssh/id_ed25519\n"
    )
    return _IMPORTED.format(mark=FILL_IN, ssh=head, nodes="".join(entries))


def _scalar_line(key: str, value: str) -> str:
    """Return `key: value` with the quotes YAML needs (a host may be called `on` or `1e3`)."""
    return str(yaml.safe_dump({key: value}, width=10_000)).strip()


def _group_hosts(hosts: list[_Host]) -> list[list[_Host]]:
    """Return `hosts` cut into runs that one entry can stand for, in the same order."""
    groups: list[list[_Host]] = []
    for host in hosts:
        last = groups[-1] if groups else []
        alike = bool(last) and (last[0].user, last[0].gpus) == (host.user, host.gpus)
        if alike and _fold_names([*(member.name for member in last), host.name]):
            last.append(host)
        else:
            groups.append([host])
    return groups


def _fold_names(names: list[str]) -> str:
    """Return one range text for at least two `names` that count up, like node[01-04]; "" when there is none."""
    first, last = re.split(r"([0-9]+)", names[0]), re.split(r"([0-9]+)", names[-1])
    places = (
        [place for place in range(1, len(first), 2) if first[place] != last[place : place + 1][0]]
        if len(first) == len(last)
        else []
    )
    if len(places) != 1:
        return ""
    before, after = "".join(first[: places[0]]), "".join(first[places[0] + 1 :])
    folded = f"{before}[{first[places[0]]}-{last[places[0]]}]{after}"
    try:
        return folded if expand_range(folded) == names else ""
    except UsageError:
        return ""


# --------------------------------------------------------------------------- JSON Schema


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of cluster.yaml, for editors.

    It knows keys, types, bounds and choices. Addresses, paths, ranges and whatever concerns two places are only checked here.
    """
    schema = ClusterFile.model_json_schema()
    thresholds = schema["$defs"]["ExpectPart"]["properties"]
    for name, text in threshold_descriptions().items():
        thresholds[name]["description"] = text
    schema["title"], schema["description"] = "cluster.yaml", "Inventory of an r4090c cluster."
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def threshold_descriptions() -> dict[str, str]:
    """Return what model.Expect says about each threshold: the text that follows the field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(Expect))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, following in itertools.pairwise(body.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            assert isinstance(statement.target, ast.Name)
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found
