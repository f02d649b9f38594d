"""Copies of whole checkpoints on other storage: made in the background, verified, rotated like the ones here, and restored.

    URL/RUN/
      step_00000020/
        state/…          written first, then read back and compared with the hashes in the manifest
        complete         the manifest, written last: without it nothing is a copy, and it is removed first

URL is what fsspec knows (s3://bucket/prefix, file:///mnt/backup, …). Whoever may write there is told by the environment or the
machine (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, an instance's role), never by the recipe, the command line or a log.

`copies.py FOLDER URL/RUN KEEP KEEP_HOURS` copies one checkpoint: a process of its own, so that no step waits for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

TREE = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(TREE)  # was train/

from train.checkpoint import COMPLETE, PARTIAL, Ranks, Saved, fault_of, folder_of, outdated, publish, read  # noqa: E402
from train.errors import FAILED, Stop  # noqa: E402
from train.recipe import Checkpoint  # noqa: E402
from train.storage import CHUNK_BYTES, HashedFile, limited, refused, told_bytes  # noqa: E402

WAITS_S = (2.0, 10.0, 30.0)
"""est.: between the tries; a server that restarts is back by then. Clients such as s3fs retry single requests themselves."""
ASK_S = 1.0
"""How often the other ranks ask whether rank 0 is done."""
TELL_S = 10.0
"""How often a restore says how far it is."""
_SECRET = re.compile("SECRET|TOKEN|PASSWORD|ACCESS_KEY|CREDENTIAL")


def check_url(url: str) -> None:
    """Raise Stop unless `url` is one that can be copied to from here. Without repeating it: it may hold a secret."""
    culprit = "recipe checkpoint.copy_to"
    protocol, separator, rest = url.partition("://")
    if not separator or not rest.strip("/"):
        raise Stop(culprit, "not a URL of a folder", "s3://BUCKET/PREFIX, file:///FOLDER, …", "correct the recipe")
    if "@" in rest.partition("/")[0] or "?" in rest:
        remedy = "take them out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of the ranks"
        raise Stop(culprit, "holds credentials or options", "a plain URL", remedy)
    if importlib.util.find_spec("fsspec") is None:
        raise Stop(culprit, "cannot import fsspec", "fsspec", f"{sys.executable} -m pip install 'r4090c[s3]'")
    from fsspec.registry import known_implementations, registry

    known = known_implementations.get(protocol)
    if known is None and protocol not in registry:
        raise Stop(culprit, f"fsspec knows no {protocol}://", "s3://, file://, gs://, sftp:// …", "correct the recipe")
    package = known["class"].partition(".")[0] if known else "fsspec"
    if importlib.util.find_spec(package) is None:
        remedy = f"{sys.executable} -m pip install {'r4090c[s3]' if package == 's3fs' else package}"
        raise Stop(culprit, f"{protocol}:// needs {package}, which is not installed", package, remedy)


def is_local(url: str) -> bool:
    """Return whether `url` is of this machine's file systems."""
    return url.startswith(("file:", "local:"))


def require_storage(copy_to: str, run: Path, *, begun: bool) -> str:
    """Raise Stop unless what `copy_to` lies on is there; return a notice where it is the disk of the run's own folder, else "".

    Storage that does not answer now is left to the copies, which are tried again; so is missing storage of a run that has
    `begun`: it goes on from its own checkpoint, and a backup that is away at night is no reason to stop.
    """
    try:
        store = Store(url_of(copy_to, run.name))
        store.require_storage()
    except Stop as missing:
        if not begun:
            raise
        return f"nothing is copied for now: {missing}"
    except Exception as error:  # noqa: BLE001  (every file system has errors of its own)
        return f"checkpoint.copy_to: {copy_to} cannot be looked at now: {explain(error)}"
    if store.local and Path(store.root).parent.stat().st_dev == run.stat().st_dev:
        return f"checkpoint.copy_to: {copy_to} lies on the disk of the run folder itself: is its storage mounted?"
    return ""


def url_of(copy_to: str, run: str) -> str:
    """Return where the copies of `run` (its folder's name) are."""
    return f"{copy_to.rstrip('/')}/{run}"


class Store:
    """The copies of one run. Raises whatever the file system behind it raises; what it does not answer ends the process."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url, self.local = url, is_local(url)
        options = {"auto_mkdir": True} if self.local else {}
        self.files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        self.root = str(root).rstrip("/")

    def _do(self, action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return what `action` does, which is one request or one chunk."""
        with limited(Path(self.root), "a request to it"):
            return action(*arguments, **options)

    def require_storage(self) -> None:
        """Raise Stop unless what the copies lie on is there. The folder of all runs' copies is made, but nothing above it.

        Otherwise a storage that is not mounted would be a folder on the machine's own disk, and one without any copies.
        """
        if self.local:
            folder = Path(self.root).parent
            with limited(folder, "making it"):
                try:
                    if folder.parent.is_dir():
                        folder.mkdir(exist_ok=True)
                    there = folder.is_dir()
                except OSError as error:
                    raise refused(error, folder) from None
            missing = "" if there else f"there is no folder {folder.parent}"
        else:
            missing = self._missing_bucket()
        if missing:
            remedy = "mount or make it, or correct checkpoint.copy_to"
            raise Stop(f"recipe checkpoint.copy_to, {self.url.rpartition('/')[0]}", missing, "storage that is there", remedy)

    def _missing_bucket(self) -> str:
        """Return what is not there, else "": a prefix that holds nothing is no mistake, a bucket that does not exist is one."""
        try:
            self._do(self.files.ls, self.root, detail=False)
        except FileNotFoundError as error:
            bucket = re.match("/?[^/]*", self.root)
            assert bucket is not None
            # s3fs also says that there is none where one may not look; what the server itself said is the cause of its error
            of_s3 = self.url.startswith("s3")
            gone = error.__cause__ is not None if of_s3 else not self._do(self.files.exists, bucket[0])
            return f"there is no {bucket[0]}" if gone else ""
        return ""

    def _names(self) -> list[str]:
        """Return the names of copies, whole or not, oldest first."""
        try:
            found = self._do(self.files.ls, self.root, detail=False)
        except FileNotFoundError:
            return []
        names = sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)
        return [name for name in names if re.fullmatch(r"step_\d{8}", name)]

    def manifests(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return those of whole copies, oldest first, and what is wrong with copies that were finished and have none of ours."""
        told = [self._manifest(name) for name in self._names()]
        return [one for one in told if isinstance(one, dict)], [one for one in told if isinstance(one, str) and one]

    def _manifest(self, name: str) -> dict[str, Any] | str:
        """Return the manifest of a copy, or what is wrong with it: "" where there is none, so that it was never finished."""
        try:
            manifest: dict[str, Any] = json.loads(self._do(self.files.cat_file, f"{self.root}/{name}/{COMPLETE}"))
            wrong = fault_of(manifest, name)
        except FileNotFoundError:
            return ""
        except ValueError as error:
            wrong = f"no JSON: {error}"
        return f"{name}: {COMPLETE} is not a manifest of ours: {wrong}" if wrong else manifest

    def put(self, saved: Saved) -> bool:
        """Copy a checkpoint; False when it is there already. Raises Stop when a file here is not what was written."""
        name = saved.folder.name
        if self._manifest(name) == saved.manifest:
            return False
        self._remove(name)
        for file, written in saved.manifest["files"].items():
            if self._send(saved.folder / file, f"{self.root}/{name}/{file}") != written["sha256"]:
                remedy = "move it away: the next checkpoint is copied"
                raise Stop(saved.folder / file, "was changed since it was saved", "the sha256 in its manifest", remedy, FAILED)
        for file, written in saved.manifest["files"].items():
            read_back = hashlib.sha256()
            for chunk in self._chunks(f"{self.root}/{name}/{file}"):
                read_back.update(chunk)
            if read_back.hexdigest() != written["sha256"]:
                raise OSError(f"{file} reads back as other content than was sent")
        self._do(self.files.pipe_file, f"{self.root}/{name}/{COMPLETE}", json.dumps(saved.manifest, indent=1).encode())
        return True

    def _send(self, here: Path, there: str) -> str:
        """Copy a file and return the sha256 of what was sent."""
        sent = hashlib.sha256()
        with here.open("rb", buffering=0) as source:
            target = self._do(self.files.open, there, "wb")
            while chunk := source.read(CHUNK_BYTES):
                sent.update(chunk)
                self._do(target.write, chunk)
            self._do(target.close)
        return sent.hexdigest()

    def _chunks(self, there: str) -> Iterator[bytes]:
        """Yield the content of a file there."""
        source = self._do(self.files.open, there, "rb")
        while chunk := self._do(source.read, CHUNK_BYTES):
            yield chunk
        source.close()

    def rotate(self, rotation: Checkpoint, step: int) -> None:
        """Remove what is too many or too old of the copies before `step`, and what was never finished."""
        older = [name for name in self._names() if name < folder_of(Path(), step).name]
        manifests = {name: self._manifest(name) for name in older}
        whole = [(name, float(manifest["saved_at"])) for name, manifest in manifests.items() if isinstance(manifest, dict)]
        half = [name for name, manifest in manifests.items() if isinstance(manifest, str)]
        for name in [*half, *outdated(whole, rotation, time.time())]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove a copy, or a part of one; it stops being whole first."""
        for path in (f"{self.root}/{name}/{COMPLETE}", f"{self.root}/{name}"):
            with contextlib.suppress(FileNotFoundError):
                self._do(self.files.rm, path, recursive=not path.endswith(COMPLETE))

    def get(self, manifest: dict[str, Any], checkpoints: Path, tell: Progress) -> Saved:
        """Return the copy as a checkpoint here. Raises Stop when this disk refuses it, OSError when the copy is damaged."""
        folder = folder_of(checkpoints, manifest["step"])
        partial = folder.with_suffix(PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        for name, written in manifest["files"].items():
            try:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                here = HashedFile(partial / name)
            except OSError as error:
                raise refused(error, partial) from None
            for chunk in self._chunks(f"{self.root}/{folder.name}/{name}"):
                try:
                    here.write(chunk)
                except OSError as error:
                    raise refused(error, partial) from None
                tell.add(len(chunk))
            if here.close() != written:
                raise OSError(f"{name} has other content than was copied")
        publish(partial, manifest)
        saved = read(folder)
        assert isinstance(saved, Saved)
        return saved


class Progress:
    """Says how far a restore is."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.told_at_s = total, 0, time.monotonic()

    def add(self, count: int) -> None:
        """Count `count` more bytes."""
        self.done += count
        if time.monotonic() - self.told_at_s > TELL_S:
            self.told_at_s = time.monotonic()
            print(f"restore  {told_bytes(self.done)} of {told_bytes(self.total)}", flush=True)


def restore(url: str, checkpoints: Path) -> Saved | None:
    """Return the newest whole copy of a run, as a checkpoint in `checkpoints`; None without one. Raises Stop. Rank 0 alone."""
    began_s = time.monotonic()
    try:
        store = Store(url)
        store.require_storage()
        found, damaged = store.manifests()
    except Stop:
        raise
    except Exception as error:  # noqa: BLE001  (every file system has errors of its own)
        remedy = "see that it is there and that the environment holds the credentials; or set checkpoint.copy_to to null"
        raise Stop(url, explain(error), "storage that can be listed", remedy, FAILED) from None
    for told in damaged:
        print(f"restore  left {told}", flush=True)
    for manifest in reversed(found):
        size = sum(int(file["bytes"]) for file in manifest["files"].values())
        name = folder_of(checkpoints, manifest["step"]).name
        try:
            free = shutil.disk_usage(checkpoints.parent).free
            if free < size:
                observed = f"{told_bytes(free)} free, {name} takes {told_bytes(size)}"
                raise Stop(checkpoints, observed, "room on the disk", "make some (df -h)", FAILED)
            saved = store.get(manifest, checkpoints, Progress(size))
        except Stop:
            raise
        except Exception as error:  # noqa: BLE001  (every file system has errors of its own)
            damaged.append(f"{name}: {explain(error)}")
            print(f"restore  left {damaged[-1]}", flush=True)
            continue
        took_s = time.monotonic() - began_s
        print(f"restore  {name} from {url}: {told_bytes(size)} in {took_s:.1f} s, hashes compared", flush=True)
        return saved
    if damaged:
        remedy = "try again, or set checkpoint.copy_to to null to start anew"
        raise Stop(url, f"no copy could be restored ({'; '.join(damaged)})", "a whole one", remedy, FAILED)
    return None


def restore_together(url: str, checkpoints: Path, ranks: Ranks, beat: Callable[[], None]) -> Saved | None:
    """Return what rank 0 restores; every rank calls this and stays alive meanwhile, however long. Raises the same Stop on all."""
    came: list[tuple[str, Any]] = []

    def work() -> None:
        try:
            came.append(("restored", restore(url, checkpoints)))
        except Stop as stop:
            came.append(("stop", stop.told))
        except OSError as error:
            came.append(("stop", refused(error, checkpoints).told))
        except BaseException as error:  # noqa: BLE001  (whatever ends this thread has to reach the ranks that wait for it)
            traceback.print_exc()
            told = ("restoring a copy", explain(error), "a copy that is restored", "report the lines above", FAILED)
            came.append(("stop", Stop(*told).told))

    if ranks.rank == 0:
        threading.Thread(target=work, daemon=True).start()
    while True:
        what, came_of_it = ranks.gather(came[0] if came else ("working", None))[0]
        if what == "stop":
            culprit, observed, expected, remedy = came_of_it
            raise Stop(culprit, observed, expected, remedy, FAILED)
        if what == "restored":
            return came_of_it
        beat()
        time.sleep(ASK_S)


def explain(error: BaseException) -> str:
    """Return an error on one line, without the values of variables whose names say that they are secret."""
    told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name.upper()):
            told = told.replace(value, "***")
    return told


class Copies:
    """The background copies of a run: one at a time, and of those that wait only the newest. Rank 0 alone; never raises."""

    def __init__(self, checkpoint: Checkpoint, run: str) -> None:
        assert checkpoint.copy_to
        self.url, self.rotation = url_of(checkpoint.copy_to, run), checkpoint
        self.running: subprocess.Popen[bytes] | None = None
        self.folder, self.waiting, self.last_said = Path(), Path(), ""
        self.status: dict[str, Any] = {}
        """For metrics.jsonl: `copied_step`, the last one that is whole there; `copy_error`, while the last try failed."""

    def offer(self, folder: Path) -> None:
        """Copy the checkpoint in `folder`, now or when the one in flight has ended."""
        self.waiting = folder
        self.poll()

    def in_use(self) -> set[str]:
        """Return the name of the checkpoint that may not be removed now. One that waits may be: the next one takes its place."""
        return {self.folder.name} if self.running else set()

    def poll(self) -> bool:
        """Start and end processes as need be, and tell what they said; return whether anything is still to be done."""
        if self.running:
            code = self.running.poll()
            assert self.running.stdout is not None
            for line in (self.running.stdout.read() or b"").decode(errors="replace").splitlines():  # None: nothing now
                print(line, flush=True)
                self.last_said = line
            if code is None:
                return True
            if code == 0:
                self.status = {"copied_step": int(self.folder.name.removeprefix("step_"))}
            else:
                self.status = {**self.status, "copy_error": self.last_said or f"the copying process ended with {code}"}
            self.running, self.folder = None, Path()
        if self.waiting != Path():
            self.folder, self.waiting = self.waiting, Path()
            self._start()
        return self.running is not None

    def _start(self) -> None:
        limits = [str(self.rotation.keep), str(self.rotation.keep_hours)]
        command = [sys.executable, "-u", str(Path(__file__).resolve()), str(self.folder), self.url, *limits]
        try:
            self.last_said = ""
            pipe = subprocess.PIPE
            self.running = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
            assert self.running.stdout is not None
            os.set_blocking(self.running.stdout.fileno(), False)
        except OSError as error:
            self.status = {**self.status, "copy_error": f"no process for it: {error.strerror}"}
            self.running, self.folder = None, Path()
            print(f"warning  {self.status['copy_error']}", flush=True)


def main(folder: Path, url: str, rotation: Checkpoint) -> int:
    """Copy one checkpoint, trying again where that may help; return the exit code. The last line says what came of it."""
    saved = read(folder)
    if isinstance(saved, str):
        print(f"warning  {folder.name} is not copied: {saved}")
        return FAILED
    for number, wait_s in enumerate((*WAITS_S, None), 1):
        began_s = time.monotonic()
        try:
            store = Store(url)
            store.require_storage()
            fresh = store.put(saved)
            store.rotate(rotation, saved.step)
        except Exception as error:  # noqa: BLE001  (every file system has errors of its own)
            again = f"try {number}, the next in {wait_s:g} s" if wait_s and not isinstance(error, Stop) else "given up"
            print(f"warning  {folder.name} is not copied to {url}: {explain(error)} ({again})")
            if wait_s is None or isinstance(error, Stop):
                return FAILED
            time.sleep(wait_s)
            continue
        took_s = time.monotonic() - began_s
        told = f"{told_bytes(saved.bytes)} in {took_s:.1f} s, read back and compared" if fresh else "was there already"
        print(f"copied   {folder.name} to {url}: {told}")
        return 0
    return FAILED


def run_as_program() -> NoReturn:
    """Be the copying process: gentle, deaf to Ctrl-C, and gone when the rank that started it is."""

    def leave_with_parent() -> None:
        sys.stdin.read()
        os._exit(FAILED)

    os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    folder, url, keep, keep_hours = sys.argv[1:]
    code = main(Path(folder), url, Checkpoint(every_steps=1, keep=int(keep), keep_hours=float(keep_hours)))
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    run_as_program()
