"""A stand-in for train/main.py that needs no torch and so starts in half a second: a program, run by the training Python.

The ranks meet over TCP at the master's port, go from step to step together, and say what gloo says when a peer goes. Recipe,
heartbeats, metrics and checkpoints are train/'s own code, so half a checkpoint here is half a checkpoint there.

Environment: TOY_STEP_S (0.1), TOY_SAVE_S (0.2: how long a rank writes at a checkpoint), TOY_STATE_KIB (256: what it writes).
A file `grow` in the node's folder of the run makes the ranks there take 8 MiB more every step.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from train import checkpoint
from train.errors import Stop
from train.metrics import Heartbeat, Metrics
from train.recipe import read_recipe
from train.storage import HashedFile

MEET_S = 30.0
GROWTH_BYTES = 8 << 20
DATA = "toy"


class Star:
    """All ranks; rank 0 is in the middle."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.peers: list[Connection[Any, Any]] = []
        if rank == 0 and count > 1:
            with Listener(place, backlog=count) as listener:
                met: dict[int, Connection[Any, Any]] = {}
                while len(met) < count - 1:
                    peer = listener.accept()
                    met[peer.recv()] = peer
            self.peers = [met[number] for number in sorted(met)]
        elif rank:
            deadline = time.monotonic() + MEET_S
            while not self.peers:
                try:
                    self.peers = [Client(place)]
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            self.peers[0].send(rank)

    def gather(self, value: Any) -> list[Any]:
        """Return everyone's values, to everyone."""
        try:
            if self.rank:
                self.peers[0].send(value)
                everyone: list[Any] = self.peers[0].recv()
            else:
                everyone = [value, *(peer.recv() for peer in self.peers)]
                for peer in self.peers:
                    peer.send(everyone)
        except (EOFError, ConnectionError) as error:
            raise RuntimeError("Connection closed by peer") from error
        return everyone


def train(run: Path, recipe_file: Path) -> None:
    """Train the recipe, as far as anybody outside can see."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    step_s, save_s = float(os.environ.get("TOY_STEP_S", "0.1")), float(os.environ.get("TOY_SAVE_S", "0.2"))
    block = os.urandom(1024) * int(os.environ.get("TOY_STATE_KIB", "256"))
    local, checkpoints = Path(os.environ["R4090C_LOCAL"]), run / "checkpoints"
    print(f"rank {rank} of {count}", flush=True)  # as torch does: a log that has a page takes a last line on a full disk, too
    recipe = read_recipe(recipe_file)
    heartbeat = Heartbeat(run, rank)
    heartbeat.beat("import", 0)
    if rank == 0:
        for name in checkpoint.remove_half_ones(checkpoints):
            print(f"removed {name}: a checkpoint that was not finished", flush=True)
    start = checkpoint.find_start(checkpoints, recipe, count, DATA)
    heartbeat.beat("init")
    ranks = checkpoint.Ranks(rank, count, Star(rank, count).gather)
    start = checkpoint.agree_on_start(
        start, checkpoints, lambda saved: checkpoint.require_same(saved, recipe, count, DATA), ranks
    )
    first = start.step + 1 if start else 1
    metrics = Metrics(run, resumed_at=first - 1) if rank == 0 else None
    manifest = {"world_size": count, "data_sha256": DATA, "recipe": recipe.model_dump(mode="json"), "precision": "fp32"}

    def write_state(folder: Path) -> checkpoint.Files:
        file = HashedFile(folder / checkpoint.STATE / f"rank{rank}.bin")
        for _ in range(8):
            file.write(block[: len(block) // 8])
            time.sleep(save_s / 8)
        return {str(file.path.relative_to(folder)): file.close()}

    hoard: list[bytes] = []
    heartbeat.beat("train", first - 1)
    for step in range(first, recipe.steps + 1):
        if (local / "grow").exists():
            hoard.append(b"x" * GROWTH_BYTES)
        time.sleep(step_s)
        ranks.gather(step)
        if metrics:
            loss = 5.0 / (1 + step)
            metrics.write({"step": step, "tokens": step * 1024, "loss": loss, "tokens_per_s": 1024 / step_s, "time": time.time()})
            print(f"step {step}/{recipe.steps} loss {loss:.6f}", flush=True)
        heartbeat.beat("train", step)
        if step % recipe.checkpoint.every_steps == 0 or step == recipe.steps:
            heartbeat.beat("checkpoint", step)
            needed_bytes = count * len(block)
            checkpoint.save(checkpoints, step, write_state, ranks, manifest, recipe.checkpoint, needed_bytes=needed_bytes)
            heartbeat.beat("train", step)
    heartbeat.beat("done")


def main() -> int:
    """Run and return the exit code train/main.py would."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments, _ = parser.parse_known_args()
    try:
        train(arguments.run_dir, arguments.recipe)
    except Stop as stop:
        print(f"train: {stop}", file=sys.stderr)
        return stop.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
