"""Bring the code to the nodes: one content-addressed tree on the shared folder, verified on every node.

The tree's name is the hash of its content, so an unchanged tree is never sent again and a running job never sees its code
change. It holds what the nodes need (`launch/agent.py`, `launch/rank.py`, `train/`, `ds_configs/`) and, for a script of the
user's own, the script's folder below `user/`. What a script writes beside its code does not count as content.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath

from launch.plan import USER_FOLDER, Code, Ports
from r4090c.errors import CouldNotTell, UsageError
from r4090c.paths import SharedPaths
from r4090c.remote import Fleet, NodeError, Shell

PROJECT = Path(__file__).resolve().parent.parent
OURS = ("launch/agent.py", "launch/hang.py", "launch/leases.py", "launch/rank.py", "train", "ds_configs")
SKIPPED_FOLDERS = {
    "__pycache__",
    ".git",
    ".venv",
    "venv",
    "node_modules",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "runs",
    "wandb",
}
USER_LIMIT_FILES = 20_000
"""est.: a project's code is a tenth of it; more means that a home folder or a data set would be searched."""
USER_LIMIT_MIB = 64
"""est.: a project's code is far below; more means that data would be sent."""

AGENT = (PROJECT / "launch" / "agent.py").read_text(encoding="utf-8")
LEASES = (PROJECT / "launch" / "leases.py").read_text(encoding="utf-8")
"""Sources whose main() `Shell.ask` runs on a node without needing any file there."""

UNPACK = (
    "import os,shutil,sys,tarfile;root=sys.argv[1];aside='%s.tmp%d'%(root,os.getpid());os.makedirs(aside);"
    "t=tarfile.open(fileobj=sys.stdin.buffer,mode='r|gz');"
    "t.extractall(aside,**({'filter':'data'} if hasattr(tarfile,'data_filter') else {}));t.close();"
    "old='%s.old%d'%(root,os.getpid());\n"
    "if os.path.isdir(root): os.rename(root,old)\n"
    "try: os.rename(aside,root)\n"
    "except OSError: shutil.rmtree(aside)\n"
    "shutil.rmtree(old,ignore_errors=True)"
)
"""Where another launch has put the same tree meanwhile, ours is dropped; the digest is looked at afterwards anyway."""


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the sha256 over names and contents (hex). The agent computes the same over the tree it finds."""
    total = hashlib.sha256()
    for name, content in sorted((name.encode(errors="surrogateescape"), content) for name, content in files.items()):
        total.update(name + b"\0" + hashlib.sha256(content).hexdigest().encode() + b"\n")
    return total.hexdigest()


def our_files() -> dict[str, bytes]:
    """Return the part of this project that runs on the nodes: path in the tree -> content."""
    files: dict[str, bytes] = {}
    for part in OURS:
        path = PROJECT / part
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                files[file.relative_to(PROJECT).as_posix()] = file.read_bytes()
    return files


def user_files(script: Path, root: Path | None = None) -> dict[str, bytes]:
    """Return the folder of the user's script as `user/…` paths -> content: what git tracks or would, else all but caches.

    A link to a file of the folder is sent as that file; links out of the folder are not followed. Raises UsageError when the
    script is not below `root`, a file cannot be read, or the folder is larger than 64 MiB.
    """
    folder = (root or script.parent).resolve()
    if not script.resolve().is_relative_to(folder):
        raise UsageError(str(script), f"not below --code {folder}", "a script inside the folder that is synced")
    files: dict[str, bytes] = {}
    size = 0
    for file in _listed(folder, script.resolve()):
        try:
            size += file.stat().st_size
            content = file.read_bytes() if size <= USER_LIMIT_MIB << 20 else b""
        except OSError as error:
            raise UsageError(str(file), f"cannot be read: {error.strerror}", "readable code") from error
        if size > USER_LIMIT_MIB << 20:
            raise UsageError(
                str(folder),
                f"more than {USER_LIMIT_MIB} MiB of files would be sent to the nodes",
                "a folder of code; data belongs on the shared storage",
                f"r4090c launch {script} --code {script.parent}/SMALLER_FOLDER   (or list the data in .gitignore)",
            )
        files[f"{USER_FOLDER}/{file.relative_to(folder).as_posix()}"] = content
    return files


def _listed(folder: Path, script: Path) -> Sequence[Path]:
    """Return the files of `folder` that make up its code, the script always included."""
    found = set(_listed_by_git(folder))
    if not found:  # no repository, or one that ignores the folder
        found = set(_walked(folder))
    return sorted(file for file in found | {script} if file.is_file() and file.resolve().is_relative_to(folder))


def _walked(folder: Path) -> Iterator[Path]:
    """Yield the files below `folder` that may be code; caches are not entered, what cannot be listed is not code.

    Raises UsageError when there are far too many: then it is no folder of code.
    """
    count = 0
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if _may_be_code(PurePath(name, "x"))]
        count += len(names)
        if count > USER_LIMIT_FILES:
            expected = "a folder of code; say which with --code"
            raise UsageError(
                str(folder), f"holds more than {USER_LIMIT_FILES} files", expected, "r4090c launch SCRIPT --code FOLDER"
            )
        yield from (Path(here, name) for name in names)


def _listed_by_git(folder: Path) -> Iterator[Path]:
    """Yield what git tracks, and what it would take that does not lie in a cache."""
    command = ["git", "-C", str(folder), "ls-files", "-t", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    for entry in done.stdout.decode(errors="surrogateescape").split("\0") if done.returncode == 0 else ():
        tag, _, name = entry.partition(" ")
        if name and (tag != "?" or _may_be_code(PurePosixPath(name))):
            yield folder / name


def _may_be_code(path: PurePath) -> bool:
    return not any(part in SKIPPED_FOLDERS or part.startswith(".") for part in path.parts[:-1])


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return the files as a tar.gz. A file that begins with `#!` can be executed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=3, format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            entry.mode = 0o755 if files[name].startswith(b"#!") else 0o644
            tar.addfile(entry, io.BytesIO(files[name]))
    return packed.getvalue()


def sync(fleet: Fleet, nodes: Sequence[str], shared: str, files: Mapping[str, bytes]) -> tuple[Code, Ports]:
    """Make the tree of `files` present on every node and return it, with two free ports of the lead (`nodes[0]`).

    Raises NodeError when a node does not answer, CouldNotTell when a node sees other content than what was sent.
    """
    digest = digest_of(files)
    tree = str(SharedPaths(PurePosixPath(shared)).code_tree(digest))
    names = sorted(files)

    def look(shell: Shell) -> dict[str, object]:
        request = {"do": "prepare", "tree": tree, "names": names, "ports": 2 if shell.node.name == nodes[0] else 0}
        value = shell.ask(AGENT, request, timeout_s=30).value
        assert isinstance(value, dict)
        return value

    # The lead first: a node that looked before the tree is there may believe for a minute that it is not (NFS caches absence).
    lead = nodes[0]
    seen = _answers(fleet.map(look, [lead]))
    ports = seen[lead]["ports"]
    assert isinstance(ports, list)
    if seen[lead]["digest"] != digest:
        _write(fleet.shell(lead), tree, files)
    seen = _answers(fleet.map(look, [name for name in nodes if name != lead or seen[lead]["digest"] != digest]))
    for name, answer in seen.items():
        if answer["digest"] != digest:
            what = "is not there" if answer["digest"] is None else "has other content"
            raise CouldNotTell(
                name,
                f"the code written by {nodes[0]} to {tree} {what} on {name}",
                f"{shared} to be the same folder on every node",
                f"r4090c preflight --nodes {nodes[0]},{name}",
            )
    return Code(tree, digest), Ports(master=int(ports[0]), gang=int(ports[1]))


def _write(shell: Shell, tree: str, files: Mapping[str, bytes]) -> None:
    """Write the tree on one node. Raises CouldNotTell."""
    done = shell.run(["mkdir", "-p", "--", str(PurePosixPath(tree).parent)])
    if done.rc == 0:
        done = shell.run(["python3", "-I", "-c", UNPACK, tree], stdin=pack(files), timeout_s=120)
    if done.rc != 0:
        name = shell.node.name
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CouldNotTell(
            name, f"cannot write the code to {tree}: {last}", "a writable shared folder", f"r4090c preflight --nodes {name}"
        )


def _answers(results: Mapping[str, dict[str, object] | NodeError]) -> dict[str, dict[str, object]]:
    """Return the answers; raise the first NodeError."""
    answers: dict[str, dict[str, object]] = {}
    for name, result in results.items():
        if isinstance(result, NodeError):
            raise result
        answers[name] = result
    return answers
