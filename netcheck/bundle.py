"""Keep everything that was judged in one file, and read it back to judge it again offline.

A bundle is a .tar.gz of JSON: bundle.json (schema), cluster.json (the wish), reach.json, answers/<node>.json (every raw answer),
measurements/<name>.json. What must never be in one: values of environment variables, key paths and what else tells how this
person logs in, tokens that a login shell or a tool printed.
Reading treats the file as hostile: sizes are bounded, only plain members with expected names count, nothing touches the disk.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from netcheck.raw import Raw, Reach
from r4090c.errors import UsageError
from r4090c.files import write_whole
from r4090c.model import Cluster, Node

SCHEMA = "r4090c.bundle/1"
NOT_STORED = "<not stored>"
"""Stands for every value of an environment variable and for every secret found."""
MAX_BUNDLE_BYTES = 256 << 20
"""est.: unpacked; 16 nodes with every measurement stay below 20 MiB. Bounds what a forged file may take of the memory."""
MAX_MEMBERS = 10_000
"""est."""
SECRET_NAME = r"[A-Za-z0-9_.-]*(?:key|token|secret|passw(?:or)?d|passphrase|credential|auth)[A-Za-z0-9_.-]*"
_SECRET = re.compile(
    rf"(?i)\b(?!(?:ethernet|rdma)_read_keys:)({SECRET_NAME}[\"']?\s*[=:]\s*)"
    r"((?:Bearer|Basic)\s+\S+|\"[^\"]*\"|'[^']*'|\S+)"
)
"""`ethernet_read_keys: Couldn't read remote address` and the like are perftest's words about its own functions."""
_TOKEN = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{12,}|\bBearer\s+[A-Za-z0-9._~+/=-]{12,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)",
    re.DOTALL,
)
"""A secret by its shape: tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack and AWS; JWT (RFC 7519); PEM (RFC 7468)."""
_ENV_OF_JSON = re.compile(r"[\"']env[\"']\s*:\s*(?:\{|\Z)")
"""nccl-tests -J prints its whole environment below "env"."""
_KNOBS = re.compile(r"(?:NCCL|GLOO|UCX|OMP|OMPI|KMP|CUDA|TORCH|PYTORCH|TRITON|MLX5|RDMAV)_\w+")
"""Variables of libraries: their values (an interface, a card) stand in every log, and the readers need them there."""
JSON_TRIES_MAX = 64
"""est.: places of one text where a JSON document may begin; bounds the work on hostile ones."""
_MEMBER = re.compile(r"(bundle|cluster|reach)\.json|(answers|measurements)/[A-Za-z0-9_.~%-]{1,300}\.json")
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)[^\s/@]+@")


def save_bundle(path: Path, cluster: Cluster, raw: Raw) -> None:
    """Write `cluster` and `raw` to `path` without secrets, whole or not at all. Raises UsageError when it cannot be written."""
    clean = cleaner(cluster)
    members: dict[str, Any] = {
        "bundle.json": {"schema": SCHEMA, "started_at": raw.started_at},
        "cluster.json": asdict(strip_cluster(cluster)),
        "reach.json": raw.reach,
        **{f"answers/{quote(node, safe='')}.json": answer for node, answer in raw.answers.items()},
        **{f"measurements/{quote(name, safe='')}.json": value for name, value in raw.measurements.items()},
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for name, value in members.items():
            free_text = name == "reach.json" or name.startswith("measurements/")
            data = json.dumps(clean(value, free_text), ensure_ascii=False, indent=1).encode("utf-8", "replace")
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = 0o600
            tar.addfile(info, io.BytesIO(data))
    write_whole(path, packed.getvalue())


def strip_cluster(cluster: Cluster) -> Cluster:
    """Return `cluster` without what a bundle must not hold: environment values, keys, ssh configuration, jump host, file name."""

    def strip(node: Node) -> Node:
        ssh = replace(node.ssh, key="", jump="", config="", known_hosts=())
        return replace(node, ssh=ssh, env=dict.fromkeys(node.env, NOT_STORED))

    return replace(cluster, nodes=tuple(map(strip, cluster.nodes)), env=dict.fromkeys(cluster.env, NOT_STORED), file="")


def without_stand_ins(cluster: Cluster) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster of a bundle without the variables whose values it does not hold, and their names, sorted."""

    def kept(env: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in env.items() if value != NOT_STORED}

    envs = (cluster.env, *(node.env for node in cluster.nodes))
    names = sorted({name for env in envs for name, value in env.items() if value == NOT_STORED})
    nodes = tuple(replace(node, env=kept(node.env)) for node in cluster.nodes)
    return replace(cluster, env=kept(cluster.env), nodes=nodes), tuple(names)


def cleaner(cluster: Cluster) -> Callable[[Any, bool], Any]:
    """Return a function that replaces secrets in a JSON value.

    Everywhere: paths of keys and ssh files (also in their ~ form), and environment values whose name tells that they are secret.
    In free text (what shells, tools and people wrote): any environment value of at least 6 characters but those of libraries'
    own variables, any `…token=…`, what has the shape of a token, and passwords in URLs. A JSON document in a text stays one, so
    that it is read as before; an environment in it is dropped.
    """
    home = str(Path.home())
    private: set[str] = set()
    values: set[str] = set()
    for node in cluster.nodes:
        for file in (node.ssh.key, node.ssh.config, *node.ssh.known_hosts, node.ssh.jump):
            private.update((file, file.replace(home, "~", 1) if file.startswith(home + "/") else file))
    for env in (cluster.env, *(node.env for node in cluster.nodes)):
        for name, value in env.items():
            if len(value) < 6:
                continue  # "1", "WARN", "false": no secret, and part of too many other texts
            if re.fullmatch(SECRET_NAME, name, re.IGNORECASE):
                private.add(value)
            elif not _KNOBS.fullmatch(name):
                values.add(value)
    for node in cluster.nodes:  # the readers of measurements need these
        values -= {node.name, node.data_address, node.ssh.address, node.paths.shared, node.paths.runs, node.paths.python}
    everywhere = _any_of(text for text in private if len(text) >= 3)
    in_free_text = _any_of((*(text for text in private if len(text) >= 3), *values))

    def clean_text(text: str, free_text: bool) -> str:
        return _by_documents(text, in_document, clean_words) if free_text else everywhere.sub(NOT_STORED, text)

    def clean_words(text: str) -> str:
        text = in_free_text.sub(NOT_STORED, text)
        text = _SECRET.sub(rf"\1{NOT_STORED}", text)
        text = _TOKEN.sub(NOT_STORED, text)
        text = _URL_PASSWORD.sub(rf"\1{NOT_STORED}@", text)
        environment = _ENV_OF_JSON.search(text)  # of a document that was cut: nobody knows where it ends
        return text if environment is None or environment.end() == len(text) else text[: environment.end()] + NOT_STORED

    def in_document(value: Any) -> Any:
        if isinstance(value, str):
            return clean_words(value)
        if isinstance(value, dict):
            return {
                everywhere.sub(NOT_STORED, key): NOT_STORED
                if isinstance(item, str) and re.fullmatch(SECRET_NAME, key, re.IGNORECASE)
                else ({} if key == "env" and isinstance(item, dict) else in_document(item))
                for key, item in value.items()
            }
        return [in_document(item) for item in value] if isinstance(value, list) else value

    def clean(value: Any, free_text: bool) -> Any:
        if isinstance(value, str):
            return clean_text(value, free_text)
        if isinstance(value, dict):
            return {clean_text(str(key), False): clean(item, free_text or key == "stderr") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item, free_text) for item in value]
        return value

    return clean


def _by_documents(text: str, in_document: Callable[[Any], Any], in_words: Callable[[str], str]) -> str:
    """Return `text` with the JSON objects in it changed by `in_document` and written anew, and the rest by `in_words`."""
    decoder = json.JSONDecoder()
    pieces: list[str] = []
    told = 0
    start = text.find("{")
    for _ in range(JSON_TRIES_MAX):
        if start < 0:
            break
        try:
            document, end = decoder.raw_decode(text, start)
            if _ENV_OF_JSON.search(text, max(told, start - 40), start):  # of a document that was cut further out
                document = {}
            pieces += [in_words(text[told:start]), json.dumps(in_document(document), ensure_ascii=False, separators=(",", ":"))]
            told = end
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return "".join([*pieces, in_words(text[told:])])


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of `texts`, longest first; one that never matches when there are none."""
    return re.compile("|".join(re.escape(text) for text in sorted(set(texts), key=len, reverse=True)) or r"(?!)")


# --------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Reach:
    """Shape of one entry of reach.json (as gather.Reach; pydantic wants a dataclass before Python 3.12)."""

    verdict: str
    observed: str
    next_command: str
    connect_s: float | None
    noise: str


def load_bundle(path: Path) -> tuple[Cluster, Raw]:
    """Return the cluster and the raw answers kept in `path`. Raises UsageError for anything that is not a whole bundle."""
    from pydantic import TypeAdapter, ValidationError

    from r4090c.inventory import mistake_in

    members = _read_members(path)
    texts = {name: _decode(path, name, data) for name, data in members.items()}
    head = _json(path, "bundle.json", texts.pop("bundle.json", None))
    if not isinstance(head, dict) or head.get("schema") != SCHEMA:
        schema = head.get("schema") if isinstance(head, dict) else None
        raise _refuse(path, f"its schema is {schema!r:.80}", f"{SCHEMA!r}, as this version writes")
    for name in ("cluster.json", "reach.json"):
        if name not in texts:
            raise _refuse(path, f"has no {name}")
    try:
        cluster = TypeAdapter(Cluster).validate_json(texts["cluster.json"], strict=True)
        reach = TypeAdapter(dict[str, _Reach]).validate_json(texts["reach.json"], strict=True)
    except (ValidationError, RecursionError) as error:
        raise _refuse(path, f"cluster.json or reach.json: {str(error)[:300]}") from error
    mistake = mistake_in(cluster)
    if mistake:
        raise _refuse(path, f"cluster.json: {mistake}", "what cluster.yaml may hold")
    answers, measurements = {}, {}
    for name, text in texts.items():
        folder, _, file = name.partition("/")
        if folder == "answers":
            answers[unquote(file.removesuffix(".json"))] = _json(path, name, text)
        elif folder == "measurements":
            measurements[unquote(file.removesuffix(".json"))] = _json(path, name, text)
    for node, how in reach.items():
        if how.verdict == "ok" and node not in answers:
            raise _refuse(path, f"has no answer of {node}, which was reached")
    raw = Raw(
        started_at=str(head.get("started_at", "")),
        reach={node: Reach(**asdict(how)) for node, how in reach.items()},  # type: ignore[typeddict-item]
        answers=answers,
        measurements=measurements,
    )
    return cluster, raw


def _refuse(path: Path, observed: str, expected: str = "a bundle written by --save") -> UsageError:
    return UsageError(str(path), observed, expected, "r4090c preflight --save bundle.tar.gz")


def _read_members(path: Path) -> dict[str, bytes]:
    """Return name -> content of the archive, wholly in memory and within bounds. Raises UsageError."""
    try:
        with gzip.open(path) as packed:
            data = packed.read(MAX_BUNDLE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _refuse(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BUNDLE_BYTES:
        raise _refuse(path, f"unpacks to more than {MAX_BUNDLE_BYTES >> 20} MiB")
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for count, member in enumerate(tar, 1):
                if count > MAX_MEMBERS:
                    raise _refuse(path, f"has more than {MAX_MEMBERS} members")
                if not member.isreg() or member.issparse():
                    raise _refuse(path, f"{member.name[:80]!r} is not a plain file")
                if not _MEMBER.fullmatch(member.name):
                    raise _refuse(path, f"has an unexpected member {member.name[:80]!r}")
                if member.name in members:
                    raise _refuse(path, f"has {member.name[:80]!r} twice")
                file = tar.extractfile(member)
                content = file.read() if file is not None else b""
                if file is None or len(content) != member.size:
                    raise _refuse(path, f"{member.name[:80]!r} is cut")
                members[member.name] = content
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise _refuse(path, f"is not a tar archive: {error}") from error
    return members


def _decode(path: Path, name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refuse(path, f"{name} is not UTF-8: {error}") from error


def _json(path: Path, name: str, text: str | None) -> Any:
    if text is None:
        raise _refuse(path, f"has no {name}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refuse(path, f"{name} is not JSON: {error}") from error
