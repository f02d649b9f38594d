"""Train one recipe on the ranks torchrun started: `main.py --recipe FILE --run-dir FOLDER --data-dir FOLDER`.

Exit codes: 0 done · 1 failed · 2 the recipe, the data or a checkpoint is wrong, or a library is missing · 143 stopped
by SIGTERM, 130 by SIGINT. One line on stderr says why, or a traceback where the error is ours.

    files and recipe (no libraries yet: mistakes are told at once) -> imports -> ranks join -> engine -> steps -> exit
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

TREE = Path(__file__).resolve().parent.parent
sys.path[0] = str(TREE)  # was train/: its data.py, model.py would hide other packages' modules of that name

from train import checkpoint, copies, feed, startup, storage  # noqa: E402
from train.errors import Stop, counted  # noqa: E402
from train.metrics import Heartbeat, replace_file  # noqa: E402
from train.recipe import deepspeed_config, read_recipe  # noqa: E402
from train.weights import find_weights  # noqa: E402

if TYPE_CHECKING:
    from types import ModuleType

    from train.device import Device

COLLECTIVE_TIMEOUT = "R4090C_COLLECTIVE_TIMEOUT_S"
"""Environment: seconds after which a collective that does not end is an error. Default 600, as torch has for NCCL."""

DS_CONFIGS = TREE / "ds_configs"


def main() -> NoReturn:
    """Run and leave at once: interpreter teardown takes seconds, and destroying a broken process group can hang."""
    leave_on_signals()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1 PID` prints where every thread stands
    try:
        run(parse_arguments())
        code = 0
    except Stop as stop:
        print(f"train: {stop}", file=sys.stderr)
        code = stop.exit_code
    except OSError as error:
        if error.errno in storage.FULL_OR_GONE:
            print(f"train: {storage.refused(error, Path('--run-dir'))}", file=sys.stderr)
        else:
            traceback.print_exc()
            tell_torchrun(error)
        code = 1
    except SystemExit as leave:  # argparse
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException as error:  # noqa: BLE001  (the edge of the process)
        traceback.print_exc()
        tell_torchrun(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(arguments: argparse.Namespace) -> None:
    """Do everything, in the order of the docstring above."""
    watch = Stopwatch()
    rank, local_rank, world_size = place_from_environment()
    timeout_s = float(os.environ.get(COLLECTIVE_TIMEOUT, "600"))
    run_dir, checkpoints = arguments.run_dir, arguments.run_dir / "checkpoints"
    heartbeat = Heartbeat(run_dir, rank)
    heartbeat.beat("import", 0)

    recipe, recipe_text = read_recipe(arguments.recipe), arguments.recipe.read_text(encoding="utf-8")
    if arguments.steps:
        recipe = recipe.model_copy(update={"steps": arguments.steps})
    if rank == 0 and recipe.checkpoint.copy_to:
        copies.check_url(recipe.checkpoint.copy_to)
    weights = find_weights(recipe.model, arguments.data_dir.parent / "models")
    data_dir = arguments.data_dir
    prepared = feed.find_data(recipe.data, recipe.model, data_dir, prepares=rank == 0, timeout_s=timeout_s)
    notice, held_out = feed.require_same_tokenizer(prepared, weights), None
    if recipe.eval.every_steps and recipe.eval.data:
        named = "eval.data.path in the recipe"
        held_out = feed.find_data(recipe.eval.data, recipe.model, data_dir, prepares=rank == 0, timeout_s=timeout_s, named=named)
        feed.require_same_tokenizer(held_out, weights)
        feed.require_tokenizer_of_training(held_out, prepared)
    if rank == 0:
        if notice:
            print(f"notice   {notice}", flush=True)
        if held_out and held_out.sha256 == prepared.sha256:
            print("notice   eval.data is the data that is trained on: eval_loss says nothing about new text", flush=True)
        for name in checkpoint.remove_half_ones(checkpoints):
            print(f"removed {name}: a checkpoint that was not finished", flush=True)
        for name, why in checkpoint.all_damaged(checkpoints).items():
            print(f"left {name} alone, it is damaged: {why}", flush=True)
    start = checkpoint.find_start(checkpoints, recipe, world_size, prepared.sha256)
    checkpoint.divided(recipe, start, world_size)  # what cannot be divided is told before the imports
    copy_to = recipe.checkpoint.copy_to
    if rank == 0 and copy_to and (not start or copies.is_local(copy_to)):
        notice = copies.require_storage(copy_to, run_dir, begun=bool(start))
        if notice:
            print(f"notice   {notice}", flush=True)

    watch.lap("files")
    loop, device = import_libraries(local_rank)
    watch.lap("imports")
    precision = loop.choose_precision(recipe.precision, device)
    heartbeat.beat("init")
    place = loop.Place(rank, local_rank, world_size)
    loop.join_ranks(device, timeout_s)
    watch.lap("ranks")
    ranks = loop.all_ranks(place)
    url = copies.url_of(copy_to, run_dir.name) if copy_to else ""
    if recipe.resume and url and not ranks.gather(start)[0]:
        start = copies.restore_together(url, checkpoints, ranks, lambda: heartbeat.beat("init"))
    start = checkpoint.agree_on_start(
        start, checkpoints, lambda saved: checkpoint.require_same(saved, recipe, world_size, prepared.sha256), ranks
    )
    if rank == 0 and recipe.resume and not start:
        looked = f"no checkpoint in {checkpoints}" + (f", no copy in {url}" if url else "")
        print(f"notice   the run begins anew at step 1: {looked}", flush=True)
    recipe = checkpoint.divided(recipe, start, world_size)
    config = deepspeed_config(recipe, DS_CONFIGS / recipe.ds_config, world_size, precision)
    if rank == 0:  # from here on it is the recipe of this run: one that does not fit it has been refused
        replace_file(run_dir / "recipe.json", recipe_text)
    watch.lap("checkpoint")
    engine, recipe = loop.build_engine(recipe, config, weights, place, device, precision)
    watch.lap("engine")
    if rank == 0:
        print(loop.describe(recipe, engine, place, device, precision, prepared))
        print(f"ready    {watch}", flush=True)
        if start:
            changed = ", ".join(checkpoint.changed_keys(start, recipe)) or "nothing"
            saved_by = int(start.manifest["world_size"])
            others = "" if saved_by == world_size else f", saved by {counted(saved_by, 'rank')}, now {world_size}"
            print(f"resume   after step {start.step}{others}; changed in the recipe since: {changed}", flush=True)
    loop.train(recipe, engine, run_dir, prepared, place, device, start, heartbeat, held_out=held_out, profiled=arguments.profile)
    loop.leave_ranks(device)


def import_libraries(local_rank: int) -> tuple[ModuleType, Device]:
    """Return train.loop, with torch, DeepSpeed and transformers loaded, and this rank's device, which DeepSpeed asks for first.

    Lean unless PLAIN_IMPORTS is set. When a lean import fails this process starts over with plain ones; when those fail,
    Stop says what is missing.
    """
    plain = os.environ.get(startup.PLAIN_IMPORTS) == "1"
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's use, not the user's
    try:
        with contextlib.nullcontext() if plain else startup.diet():
            from train.device import choose_device

            device = choose_device(local_rank)
            with contextlib.nullcontext() if plain else startup.muon_without_compiler():
                import deepspeed  # noqa: F401
            from train import loop
    except Stop:
        raise
    except (Exception, SystemExit) as error:
        if not plain:
            reason = f"{type(error).__name__}: {error}"
            print(f"train: lean imports failed ({reason}); starting over with plain ones", file=sys.stderr, flush=True)
            os.environ[startup.PLAIN_IMPORTS] = "1"
            os.execv(sys.executable, sys.orig_argv)
        library = getattr(error, "name", None) or "torch, deepspeed or transformers"
        remedy = f"{sys.executable} -m pip install 'r4090c[train]'"
        raise Stop(sys.executable, f"cannot import {library}: {error}", "torch, deepspeed and transformers", remedy) from error
    return loop, device


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, required=True, metavar="FILE", help="recipe, JSON or YAML")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="FOLDER", help="what the run writes goes here; shared")
    parser.add_argument("--data-dir", type=Path, required=True, metavar="FOLDER", help="prepared data is kept here; shared")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="train so many steps instead of the recipe's")
    parser.add_argument("--profile", action="store_true", help="trace some steps into the run folder's profile/")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # some launchers add it
    return parser.parse_args()


def place_from_environment() -> tuple[int, int, int]:
    """Return rank, local rank and world size as torchrun set them. Without a launcher: one rank that meets itself."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in alone.items()})
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than cores make every rank slower
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    except (KeyError, ValueError) as error:
        raise Stop("environment", f"{error}", "RANK, LOCAL_RANK and WORLD_SIZE", "start with torchrun") from None
    return rank, local_rank, world_size


class Stopwatch:
    """How long each part of the start took; str() gives "2.1 s: files 0.1, imports 1.6, …"."""

    def __init__(self) -> None:
        self.last_s, self.laps_s = time.perf_counter(), dict[str, float]()

    def lap(self, name: str) -> None:
        """End the part called `name`."""
        now_s = time.perf_counter()
        self.laps_s[name], self.last_s = now_s - self.last_s, now_s

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {duration_s:.2f}" for name, duration_s in self.laps_s.items())
        return f"in {sum(self.laps_s.values()):.2f} s: {parts}"


def leave_on_signals() -> None:
    """From now on SIGTERM and SIGINT end this process at once, also while it waits in a collective for peers that are gone.

    Python runs signal handlers only between its own instructions, so a thread waits for the byte that the
    interpreter's C handler writes. Nothing needs cleaning up: all our files are replaced as a whole.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        number = 0
        while number not in (signal.SIGTERM, signal.SIGINT):
            number = os.read(reader, 1)[0]
        with contextlib.suppress(OSError):
            os.write(2, f"train: stopped by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def tell_torchrun(error: BaseException) -> None:
    """Leave the error where torchrun looks for the first one of all ranks (its @record would do the same)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        message = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(message), encoding="utf-8")


if __name__ == "__main__":
    main()
