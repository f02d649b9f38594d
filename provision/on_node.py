"""Runs on a node: look at ~/.ssh, carry out steps, log in to the peers. Python >= 3.8, standard library only.

No judgement here: what is seen goes back, what is asked for is done or refused. The controller uses `carry_out` for its own
known_hosts as well. No private key is ever read by this program (ssh-keygen does), printed, or put on a command line.
"""

# One file sent over SSH: pathlib costs more to import than all this does.
# ruff: noqa: PTH101, PTH103, PTH104, PTH105, PTH106, PTH108, PTH112, PTH115, PTH116, PTH118, PTH120

from __future__ import annotations

import base64
import errno
import hashlib
import os
import pwd
import queue
import random
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from typing import Any

MAX_FILE_BYTES = 8 * 1024 * 1024
"""est.: a known_hosts of 10,000 hosts has 4 MiB."""
TOOL_S = 20.0
"""est.: ssh-keygen makes an ed25519 key in milliseconds; a loaded machine may take seconds."""
REACH_S = 3.0
"""A lost first SYN is sent again after 1 s (Linux)."""
DROPPED = ("kex_exchange_identification", "Connection reset", "Connection closed by")
"""What a connection says that sshd dropped before the login, as it does beyond MaxStartups (10 by default): try again."""
KEPT_CHARACTERS = 2000
"""Of what one login printed."""


def main(request: dict[str, Any]) -> Any:
    """Return the answer to {"do": "look" | "act" | "log-in", …}; see the three functions."""
    if request["do"] == "look":
        return look(request)
    if request["do"] == "act":
        return carry_out(request["actions"])
    return log_in(request)


# ---------------------------------------------------------------------------------------------- look


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Return what there is: request {"files": [name], "key": name, "endpoints": [[host, port]]}, all names in ~/.ssh.

    ~ is the home of the passwd database: ssh and sshd do not look at $HOME.
    """
    account = pwd.getpwuid(os.getuid())
    folder = os.path.join(account.pw_dir, ".ssh")
    why = why_not_folder(folder)
    paths = {name: os.path.join(folder, name) for name in request["files"]}
    return {
        "home": account.pw_dir,
        "user": account.pw_name,
        "folder": folder,
        "folder_exists": os.path.lexists(folder),
        "folder_refused": why,
        "files": {name: {"path": path, **look_at_file(path)} for name, path in paths.items()},
        "key": look_at_key(os.path.join(folder, request["key"])) if not why else {},
        "reach": reach(request["endpoints"]),
        "loose": [path for path in (account.pw_dir, folder, *paths.values()) if is_loose(path)],
        "tools": {name: shutil.which(name) or "" for name in ("ssh", "ssh-keygen")},
    }


def why_not_folder(folder: str) -> str:
    """Return why nothing may be written in `folder`, "" when something may; a missing folder is fine if it can be made."""
    try:
        there = os.lstat(folder)
    except FileNotFoundError:
        parent = os.path.dirname(folder)
        if not os.path.isdir(parent):
            return f"there is no folder {parent}"
        return "" if os.access(parent, os.W_OK | os.X_OK) else f"{parent} is not writable"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if stat.S_ISLNK(there.st_mode):
        return f"is a symbolic link to {os.readlink(folder)}"
    if not stat.S_ISDIR(there.st_mode):
        return "is not a folder"
    if there.st_uid != os.getuid():
        return f"belongs to {owner(there.st_uid)}, not to {owner(os.getuid())}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "is not writable"


def look_at_file(path: str) -> dict[str, Any]:
    """Return {"content": base64 or null (no file), "refused": why it must not be touched or ""}."""
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"content": None, "refused": ""}
    except OSError as error:
        return {"content": None, "refused": f"cannot be looked at: {error.strerror}"}
    refused = ""
    if stat.S_ISLNK(there.st_mode):
        refused = f"is a symbolic link to {os.readlink(path)}"
    elif not stat.S_ISREG(there.st_mode):
        refused = "is not a regular file"
    elif there.st_uid != os.getuid():
        refused = f"belongs to {owner(there.st_uid)}, not to {owner(os.getuid())}"
    elif there.st_size > MAX_FILE_BYTES:
        refused = f"has {there.st_size} bytes, more than {MAX_FILE_BYTES}"
    if refused:
        return {"content": None, "refused": refused}
    try:
        return {"content": base64.b64encode(read_bytes(path)).decode(), "refused": ""}
    except FileNotFoundError:  # a node that shares the home has just removed it
        return {"content": None, "refused": ""}
    except OSError as error:
        return {"content": None, "refused": f"cannot be read: {error.strerror}"}


def look_at_key(path: str) -> dict[str, Any]:
    """Return {"exists", "public": the line of the public key or "", "refused": why it is of no use or "", "command"}."""
    quoted = shlex.quote(path)
    pair = {name: look_at_file(name) for name in (path, path + ".pub")}
    there = os.path.lexists(path)
    for name, record in pair.items():
        if record["refused"]:
            return {
                "exists": there,
                "public": "",
                "refused": "{} {}".format(name, record["refused"]),
                "command": "ls -l " + shlex.quote(name),
            }
    written = base64.b64decode(pair[path + ".pub"]["content"] or "").decode("utf-8", "replace").strip()
    if not there:
        if written:
            observed = f"there is {path}.pub but no {path}"
            return {"exists": False, "public": "", "refused": observed, "command": f"mv {quoted}.pub {quoted}.pub.old"}
        return {"exists": False, "public": "", "refused": "", "command": ""}
    done = run(["ssh-keygen", "-y", "-P", "", "-f", path])
    if done is None:
        return {"exists": True, "public": written, "refused": "", "command": ""}
    rc, stdout, stderr = done
    if rc != 0:
        if "UNPROTECTED" in stderr or "bad permissions" in stderr:
            observed, command = f"others may read {path}, so ssh does not use it", "chmod 600 " + shlex.quote(path)
        elif "passphrase" in stderr:
            observed, command = (
                f"{path} has a passphrase, and nobody is there to type it",
                "ssh-keygen -p -f " + shlex.quote(path),
            )
        else:
            observed, command = f"ssh-keygen does not read {path}: {last_line(stderr)}", "ssh-keygen -y -f " + shlex.quote(path)
        return {"exists": True, "public": written, "refused": observed, "command": command}
    public = stdout.strip()
    if written and written.split()[:2] != public.split()[:2]:
        observed = f"{path}.pub does not belong to {path}"
        return {"exists": True, "public": public, "refused": observed, "command": f"ssh-keygen -y -f {quoted} > {quoted}.pub"}
    return {"exists": True, "public": written or public, "refused": "", "command": ""}


def reach(endpoints: Any) -> list[Any]:
    """Return for each [host, port] whether an SSH server answers there."""
    answers = [False] * len(endpoints)

    def try_one(place: int, host: str, port: int) -> None:
        try:
            with socket.create_connection((host, port), timeout=REACH_S) as connection:
                answers[place] = connection.recv(4) == b"SSH-"
        except OSError:
            pass

    threads = [
        threading.Thread(target=try_one, args=(place, host, port), daemon=True) for place, (host, port) in enumerate(endpoints)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 3 * REACH_S  # a name may take long to resolve
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(answers)


def is_loose(path: str) -> bool:
    """Say whether sshd would call `path` unsafe (StrictModes): writable by others than its owner."""
    try:
        return bool(os.stat(path).st_mode & 0o022)
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------- carry out


class Refused(Exception):
    """An action that was not carried out: what was seen, and a command that tells more."""

    def __init__(self, observed: str, command: str = "") -> None:
        super().__init__(observed)
        self.observed = observed
        self.command = command


def carry_out(actions: Any) -> list[Any]:
    """Return for each action {"state": "done" | "unchanged" | "failed", "observed", "command"}. One's failure stops no other."""
    results = []
    for action in actions:
        try:
            changed = ACTIONS[action["kind"]](action)
            results.append({"state": "done" if changed else "unchanged", "observed": "", "command": ""})
        except Refused as refused:
            results.append({"state": "failed", "observed": refused.observed, "command": refused.command})
        except OSError as error:
            path = action["path"]
            folder, quoted = shlex.quote(os.path.dirname(path)), shlex.quote(path)
            observed = f"{error.filename or path}: {error.strerror or error}"
            results.append({"state": "failed", "observed": observed, "command": f"ls -la {folder}; lsattr -d {folder} {quoted}"})
    return results


def write_file(action: dict[str, Any]) -> bool:
    """Give a file its new content, written aside and renamed; return False when it has it already."""
    path, new = action["path"], base64.b64decode(action["content"])
    make_folder(os.path.dirname(path))
    current = current_content(path)
    if current == new:
        return False  # nodes that share a home see what the first of them wrote
    demand_unchanged(path, current, action["before"])
    there = os.lstat(path) if current is not None else None
    descriptor, aside = tempfile.mkstemp(prefix=".r4090c-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(new)
            os.fchmod(file.fileno(), stat.S_IMODE(there.st_mode) if there else 0o600)
            if there and there.st_gid != os.fstat(file.fileno()).st_gid:
                os.fchown(file.fileno(), -1, there.st_gid)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    return True


def remove_file(action: dict[str, Any]) -> bool:
    """Remove a file that still has the content it was planned for; return False when it is gone already."""
    current = current_content(action["path"])
    if current is None:
        return False
    demand_unchanged(action["path"], current, action["before"])
    return unlink(action["path"])


def remove_folder(action: dict[str, Any]) -> bool:
    """Remove a folder unless something is in it."""
    try:
        os.rmdir(action["path"])
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            return False
        raise
    return True


def make_key(action: dict[str, Any]) -> bool:
    """Make a key pair aside and put it in place; return False when one is there by then (nodes may share a home)."""
    path = action["path"]
    folder = os.path.dirname(path)
    make_folder(folder)
    if os.path.lexists(path):
        return False
    aside = tempfile.mkdtemp(prefix=".r4090c-", dir=folder)
    try:
        new = os.path.join(aside, "key")
        done = run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", action["comment"], "-f", new])
        if done is None:
            raise Refused("ssh-keygen is not installed", "sudo apt install -y openssh-client")
        if done[0] != 0:
            raise Refused(f"ssh-keygen: {last_line(done[2])}", "df -h " + shlex.quote(folder))
        os.chmod(new + ".pub", 0o600)
        if not place(new, path):
            return False
        place(new + ".pub", path + ".pub")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def place(aside: str, path: str) -> bool:
    """Give the file `aside` the name `path` unless that is taken; return whether it was free. Atomic where links work."""
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if os.path.lexists(path):
            return False
        os.rename(aside, path)
    return True


def remove_key(action: dict[str, Any]) -> bool:
    """Remove a key pair that carries our mark; return False when there is none any more."""
    path = action["path"]
    if not os.path.lexists(path):
        return False
    record = look_at_key(path)
    if not os.path.lexists(path):  # a node that shares the home was faster
        return False
    words = record["public"].split(None, 2)
    if record["refused"] or len(words) != 3 or words[2] != action["comment"]:
        observed = "{} is not the key that was made here: {}".format(path, record["refused"] or "another comment")
        raise Refused(observed, "ls -l " + shlex.quote(path))
    gone = unlink(path)
    unlink(path + ".pub")
    return gone


ACTIONS = {
    "WriteFile": write_file,
    "RemoveFile": remove_file,
    "RemoveFolder": remove_folder,
    "MakeKey": make_key,
    "RemoveKey": remove_key,
}


def make_folder(folder: str) -> None:
    """Make `folder` (0700) where there is none. Raises Refused when it is no place to write in."""
    why = why_not_folder(folder)
    if why:
        raise Refused(f"{folder} {why}", "ls -ld " + shlex.quote(folder))
    if not os.path.lexists(folder):
        os.makedirs(folder, 0o700, exist_ok=True)


def current_content(path: str) -> Any:
    """Return the bytes of a file, None when there is none. Raises Refused when it is not to be touched."""
    record = look_at_file(path)
    if record["refused"]:
        raise Refused("{} {}".format(path, record["refused"]), "ls -l " + shlex.quote(path))
    return None if record["content"] is None else base64.b64decode(record["content"])


def demand_unchanged(path: str, content: Any, before: str) -> None:
    """Raise Refused when the file is not the one that the step was planned for."""
    if ("" if content is None else hashlib.sha256(content).hexdigest()) != before:
        raise Refused(f"{path} was changed by somebody else at the same time", "ls -l " + shlex.quote(path))


def unlink(path: str) -> bool:
    """Remove a file; return False when it is gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


# ---------------------------------------------------------------------------------------------- log in to the peers


def log_in(request: dict[str, Any]) -> dict[str, Any]:
    """Return {peer: {"rc", "stdout", "stderr"}} of `ssh PEER true` for request {"peers": [name], "at_once", "limit_s"}.

    rc null: no end within limit_s. No agent: it would hide that a key is missing. UpdateHostKeys=no: else ssh itself writes
    into known_hosts.
    """
    work: Any = queue.Queue()
    for peer in request["peers"]:
        work.put(peer)
    results: dict[str, Any] = {}

    def worker() -> None:
        while True:
            try:
                peer = work.get_nowait()
            except queue.Empty:
                return
            results[peer] = log_in_once(peer, request["limit_s"])
            if results[peer]["rc"] == 255 and any(word in results[peer]["stderr"] for word in DROPPED):
                time.sleep(random.uniform(0.5, 1.5))
                results[peer] = log_in_once(peer, request["limit_s"])

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(request["at_once"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def log_in_once(peer: str, limit_s: float) -> dict[str, Any]:
    """Return {"rc", "stdout", "stderr"} of one login."""
    argv = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "UpdateHostKeys=no", peer, "true"]
    done = run(argv, limit_s)
    if done is None:
        return {"rc": 127, "stdout": "", "stderr": "ssh is not installed"}
    rc, stdout, stderr = done
    return {"rc": rc, "stdout": stdout[:KEPT_CHARACTERS], "stderr": stderr[-KEPT_CHARACTERS:]}


# ---------------------------------------------------------------------------------------------- small things


def run(argv: Any, limit_s: float = TOOL_S) -> Any:
    """Return (rc, stdout, stderr); rc None: killed after `limit_s`. None when there is no such program."""
    environment = {key: value for key, value in os.environ.items() if key not in ("SSH_AUTH_SOCK", "SSH_ASKPASS", "DISPLAY")}
    environment["LC_ALL"] = "C"
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except FileNotFoundError:
        return None
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, "", f"no end within {limit_s:g} s"
    return process.returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")


def read_bytes(path: str) -> bytes:
    """Return the content of a file; never through a symbolic link that was put there meanwhile."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read()


def owner(uid: int) -> str:
    """Return the name of an account, or its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
