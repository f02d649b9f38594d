"""Leases: which run uses which GPU of a node, between all accounts of that node.

Standard library only, Python >= 3.8; runs on the node. A lease is a kernel lock (flock) on a file of the sticky folder
`/tmp/r4090c-leases`: who holds it has the file open, so whatever ends the holder, SIGKILL too, frees the lease at once, and what
the file says then means nothing. The file tells who holds it: {"user", "run_id", "node", "pid", "since"}. Anybody may write
there, so it is shown to people and decides nothing.

`main(request)` serves `Shell.ask`: {"do": "who", "leases": ["0000:41:00.0", …] | null (all)} -> {"busy": [{"lease", "user",
"run_id", "node", "pid", "since"}]}, None for what is not known.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import re
import stat
import time
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

Json = Dict[str, Any]

FOLDER = "/tmp/r4090c-leases"
"""Gone after a boot, as every lock is then; the same path for every account."""
SUFFIX = ".lock"
NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z:._-]{0,99}")
"""What a lease may be called: a PCI address, or the like where that is not known."""
MOST_TOLD = 4096  # bytes; a holder has about 200
MOST_SHOWN = 100  # letters of a name
PATIENCE_S = 0.5  # est.: who only looks holds a lock for microseconds; a run that has it keeps it
OPEN = os.O_NOFOLLOW | os.O_NONBLOCK  # neither a link nor a pipe that somebody put there leads us astray


class Holder(NamedTuple):
    """Who holds a lease, as its file tells; None = that is not known. `since`: seconds since the epoch."""

    user: Optional[str]
    run_id: Optional[str]
    node: Optional[str]
    pid: Optional[int]
    since: Optional[float]


NOBODY_KNOWN = Holder(None, None, None, None, None)


def parse_holder(text: bytes) -> Holder:
    """Return who holds a lease from what its file says; any bytes in, and only what can be shown out."""
    try:
        told = json.loads(text[:MOST_TOLD].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return NOBODY_KNOWN
    if not isinstance(told, dict):
        return NOBODY_KNOWN
    pid, since = told.get("pid"), told.get("since")
    return Holder(
        _word(told.get("user")),
        _word(told.get("run_id")),
        _word(told.get("node")),
        pid if isinstance(pid, int) and not isinstance(pid, bool) and 0 < pid < 1 << 31 else None,
        float(since) if isinstance(since, (int, float)) and not isinstance(since, bool) and 0 < since < 1 << 40 else None,
    )


def _word(value: object) -> Optional[str]:
    """Return a name without what a terminal would act on, None when there is none."""
    if not isinstance(value, str):
        return None
    return "".join(letter for letter in value[:MOST_SHOWN] if letter.isprintable()).strip() or None


def busy_entry(lease: str, told: Holder) -> Json:
    """Return what is told of a lease that is held."""
    return dict({"lease": lease}, **told._asdict())


def tell(busy: Sequence[Json], now: float) -> str:
    """Return one line for people: which GPUs are used, by whom and since when (in the node's time)."""
    told: Dict[str, List[str]] = {}
    for one in busy:
        run = "run %s" % one["run_id"] if one["run_id"] else "a run that does not tell its name"
        user = " of %s" % one["user"] if one["user"] else ""
        told.setdefault(run + user + _since(one["since"], now), []).append(one["lease"])
    return "; ".join(
        "GPU%s %s %s used by %s" % ("s" * (len(leases) > 1), ", ".join(leases), "are" if len(leases) > 1 else "is", who)
        for who, leases in told.items()
    )


def _since(since: Optional[float], now: float) -> str:
    if since is None:
        return ""
    try:
        there, here = time.localtime(since), time.localtime(now)
    except (OverflowError, OSError, ValueError):
        return ""
    return time.strftime(" since %H:%M" if there[:3] == here[:3] else " since %Y-%m-%d %H:%M", there)


# ----------------------------------------------------------------------------- files and locks


def check_name(lease: str) -> str:
    """Return `lease`. Raises ValueError when it cannot be a file's name."""
    if not NAME.fullmatch(lease):
        raise ValueError("not the name of a lease: %r" % lease)
    return lease


@contextlib.contextmanager
def open_to_all() -> Iterator[None]:
    """Let what is made meanwhile have its mode from the start. For the whole process: `start` has one thread."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def open_folder(folder: str, make: bool) -> int:
    """Return a descriptor of the folder, made when it is missing and `make`. Raises OSError, also when not all may use it."""
    if make:
        with contextlib.suppress(FileExistsError), open_to_all():
            os.mkdir(folder, 0o1777)
    try:
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | OPEN)
    except OSError as error:
        raise OSError(error.errno, error.strerror, folder) from error
    if make and os.fstat(found).st_mode & 0o1777 != 0o1777:
        os.close(found)
        raise OSError(errno.EPERM, "must be open to every account, and sticky: sudo chmod 1777 %s" % folder, folder)
    return found


def open_lock(folder: int, lease: str, make: bool) -> int:
    """Return the opened lock file of `lease`. Raises OSError: FileNotFoundError when there is none and not `make`.

    Never with O_CREAT where it exists: fs.protected_regular denies that on files of other accounts in a sticky folder.
    """
    name = check_name(lease) + SUFFIX
    while True:
        try:
            found = _open_existing(folder, name)
            break
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError), open_to_all():  # somebody else was quicker
            found = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN, 0o666, dir_fd=folder)
            break
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "is not a file", name)
    return found


def _open_existing(folder: int, name: str) -> int:
    """Open for writing where that is allowed: an account whose files are closed to others must not keep them from asking."""
    try:
        return os.open(name, os.O_RDWR | OPEN, dir_fd=folder)
    except PermissionError:
        return os.open(name, os.O_RDONLY | OPEN, dir_fd=folder)


def is_current(folder: int, lease: str, lock: int) -> bool:
    """True when the open file `lock` is still the one that everybody finds: somebody may clear /tmp of old files."""
    try:
        there, ours = os.stat(lease + SUFFIX, dir_fd=folder, follow_symlinks=False), os.fstat(lock)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def try_lock(lock: int, how: int, patience_s: float) -> bool:
    """Lock an open file, True when that succeeded within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                raise
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


def take(leases: Iterable[str], me: Json, folder: str = FOLDER) -> Tuple[List[int], List[Json]]:
    """Take all of `leases`, or none: return (descriptors that hold them, []), or ([], who holds some of them).

    `me`: what the files then tell. In order of the names, so that of two runs that want the same GPUs one gets them. Close the
    descriptors, or die, to give the leases back. Raises OSError that names the path, ValueError.
    """
    wanted = sorted(set(leases))
    where = open_folder(folder, make=True)
    held: List[int] = []
    try:
        for lease in wanted:
            lock = _take_one(where, lease, folder)
            if lock is None:
                busy = look(where, wanted[len(held) :])
                break
            held.append(lock)
        else:
            tell_holder(held, me)
            return held, []
    except BaseException:
        give_back(held)
        raise
    finally:
        os.close(where)
    give_back(held)
    return [], busy or [busy_entry(lease, NOBODY_KNOWN)]  # it was let go meanwhile: to try again is up to the asker


def _take_one(where: int, lease: str, folder: str) -> Optional[int]:
    """Return the descriptor that now holds `lease`, None when another process does."""
    while True:
        try:
            lock = open_lock(where, lease, make=True)
        except OSError as error:
            path = os.path.join(folder, lease + SUFFIX)
            raise OSError(error.errno, error.strerror, path) from error
        if not try_lock(lock, fcntl.LOCK_EX, PATIENCE_S):
            os.close(lock)
            return None
        if is_current(where, lease, lock):
            return lock
        os.close(lock)


def give_back(held: Iterable[int]) -> None:
    """Give leases back."""
    for lock in held:
        os.close(lock)


def holder(run_id: str, node: str) -> Json:
    """Return what the files tell of this process, which holds leases for `run_id` on `node`."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = "account %d" % os.getuid()
    return {"user": user, "run_id": run_id, "node": node, "pid": os.getpid(), "since": time.time()}


def tell_holder(held: Iterable[int], me: Json) -> None:
    """Write who we are into the files that we hold; where that fails (a full disk) the lease holds all the same."""
    text = json.dumps(me).encode()
    for lock in held:
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, text, 0)


def keep_young(held: Iterable[int]) -> None:
    """Make the files look new: what clears /tmp takes files that nobody has touched for days."""
    for lock in held:
        with contextlib.suppress(OSError):
            os.utime(lock)


def look(where: int, leases: Iterable[str]) -> List[Json]:
    """Return who holds which of `leases`, those that are free left out; `where`: the open folder."""
    busy = []
    for lease in leases:
        try:
            lock = open_lock(where, lease, make=False)
        except OSError:
            continue  # nobody has ever had it, or what lies there is no lock
        try:
            # Shared: who looks does not disturb others who look; who wants to take it has PATIENCE_S.
            if not try_lock(lock, fcntl.LOCK_SH, 0.0):
                busy.append(busy_entry(lease, parse_holder(os.pread(lock, MOST_TOLD, 0))))
        except OSError:
            busy.append(busy_entry(lease, NOBODY_KNOWN))
        finally:
            os.close(lock)
    return busy


def who(leases: Optional[Iterable[str]] = None, folder: str = FOLDER) -> List[Json]:
    """Return who holds which of `leases` (None = of all there are); nothing when nobody ever took one here. Raises OSError."""
    try:
        where = open_folder(folder, make=False)
    except FileNotFoundError:
        return []
    try:
        if leases is None:
            names = sorted(name[: -len(SUFFIX)] for name in os.listdir(where) if name.endswith(SUFFIX))
            leases = [name for name in names if NAME.fullmatch(name)]
        return look(where, leases)
    finally:
        os.close(where)


def main(request: Json) -> Json:
    """Serve one question of the controller (through `Shell.ask`)."""
    if request["do"] != "who":
        raise ValueError("unknown request %r" % request["do"])
    return {"busy": who(request.get("leases"))}
