"""Sweep collectives over message sizes, as nccl-tests does, with torch: NCCL on GPUs, gloo on CPUs. Runs on the nodes.

Needs torch and nothing of ours (Python >= 3.8). Started by torchrun, or once a node with WORLD_SIZE, MASTER_ADDR and MASTER_PORT
set, to start the node's ranks itself: that saves an import of torch, and a rank that never comes is told by its number and not by
torchrun's waiting for all nodes.

    torchrun --nproc-per-node 8 collectives.py --op all_reduce --min-bytes 1M --max-bytes 256M
    WORLD_SIZE=16 MASTER_ADDR=10.0.0.11 MASTER_PORT=29500 python collectives.py --local-ranks 8 --first-rank 8

Rank 0 prints a table in nccl-tests' layout on standard error and one JSON document on standard output, in a line that begins with
MARKER; every rank prints those lines of NCCL's log that tell of networks and transports on standard error. All definitions are
nccl-tests' (doc/PERFORMANCE.md): a size is the bytes of the whole result of a gather and of the whole input of a scatter;
algbw = size / time; busbw = algbw x 2(n-1)/n for all_reduce, x (n-1)/n for all_gather and reduce_scatter; #wrong counts elements
that differ from what they must be. GB/s = 1e9 bytes a second. Exit: 0 done, 1 failed, 4 no end in time, 7 wrong data.

Nothing waits for ever: the ranks are called up before torch's own start, so that one that never comes is told by its number, and
a thread ends each phase at its time limit, whatever the main thread waits for. DeepSpeed is never imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA = "r4090c.collectives/1"
MARKER = "R4090C-COLLECTIVES "
OPS = ("all_reduce", "all_gather", "reduce_scatter")
FAILED, TIMED_OUT, WRONG = 1, 4, 7
"""Exit codes, as far as nccl-tests has them."""
PERIOD = 251
"""Element i holds i mod 251 (a prime: no power-of-two mistake maps onto itself) plus the rank: sums of 32768 ranks stay exact."""
CHUNK = 1 << 22
"""Elements that are filled or compared at once: bounds what a check takes of a card's memory."""
ELEMENT_BYTES = 4
LOG_LINES_MAX = 400
TELLING = re.compile(r"NET/|via |Using network|WARN|Bootstrap|nranks|NCCL version|set by environment|cudaDriverVersion")
"""What is kept of NCCL's log."""
EMULATED = "inside gloo's reduce_scatter is an all_reduce, which moves twice the bytes: busbw is half of what the wire carries"
"""Measured with torch 2.13: 2.0 bytes on the wire for a byte of two ranks, where all_gather has 1.1."""


def main() -> int:
    """Run the sweep as one rank, or start the ranks of this node; return the exit code."""
    wish = arguments()
    return start_ranks(wish) if wish.local_ranks else run_rank(wish)


def start_ranks(wish: argparse.Namespace) -> int:
    """Fork the ranks of this node, before anything of torch is there, and return the worst of their exit codes.

    When one has failed, the others get the time of a phase to tell what they saw of it.
    """
    running = set()
    for place in range(wish.local_ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(wish.first_rank + place), LOCAL_RANK=str(place), LOCAL_WORLD_SIZE=str(wish.local_ranks))
            os._exit(run_rank(wish))
        running.add(pid)
    worst, deadline = 0, float("inf")
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            for late in running if time.monotonic() > deadline else ():
                os.kill(late, signal.SIGKILL)
            time.sleep(0.02)
            continue
        running.discard(pid)
        worst = max(worst, os.WEXITSTATUS(status) if os.WIFEXITED(status) else FAILED)
        if worst:
            deadline = min(deadline, time.monotonic() + wish.timeout_s + 10)
    return worst


def run_rank(wish: argparse.Namespace) -> int:
    """Run the sweep as this rank; return the exit code."""
    rank = Rank(wish)
    watchdog = threading.Thread(target=rank.watch, daemon=True)
    watchdog.start()
    try:
        code = rank.run()
    except Exception as error:  # noqa: BLE001 -- whatever torch raises is what there is to tell
        code = rank.fail(str(error).strip() or type(error).__name__, FAILED)
    rank.finish(code)
    return code


def arguments() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description="Sweep collectives over message sizes with torch.")
    parser.add_argument("--op", choices=OPS, action="append", help="which; may be given several times (default: all_reduce)")
    parser.add_argument("--min-bytes", type=size_of, default=size_of("1M"), metavar="SIZE")
    parser.add_argument("--max-bytes", type=size_of, default=size_of("16M"), metavar="SIZE")
    parser.add_argument("--factor", type=int, default=2, help="between one size and the next")
    parser.add_argument("--iterations", type=int, default=20, help="at most, of each size")
    parser.add_argument("--warm-up", type=int, default=5, help="iterations before the clock runs, at most")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=2.0,
        help="of one size; none larger follows where one iteration takes this long",
    )
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="auto: nccl where torch sees a GPU")
    parser.add_argument("--local-ranks", type=int, default=0, help="start so many ranks here (default: be one, torchrun's)")
    parser.add_argument("--first-rank", type=int, default=0, help="number of the first of them")
    parser.add_argument(
        "--log-folder", default="", help="where NCCL's log is kept (default: nowhere, its telling lines are shown)"
    )
    parser.add_argument("--join-s", type=float, default=60.0, help="until every rank must have come")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="for each phase after that")
    wish = parser.parse_args()
    wish.op = wish.op or ["all_reduce"]
    if not 0 < wish.min_bytes <= wish.max_bytes or wish.factor < 2 or wish.iterations < 1:
        parser.error("0 < --min-bytes <= --max-bytes, --factor >= 2 and --iterations >= 1 are needed")
    return wish


def size_of(text: str) -> int:
    """Return the bytes of "8", "64K", "16M" or "1G" (powers of 1024, as nccl-tests has it)."""
    match = re.match(r"^(\d+)\s*([kKmMgG]?)(?:i?[bB])?$", text)
    if not match:
        raise argparse.ArgumentTypeError("not a size like 8, 64K, 16M or 1G: " + repr(text))
    return int(match.group(1)) << {"": 0, "k": 10, "m": 20, "g": 30}[match.group(2).lower()]


class Rank:
    """One rank at work."""

    def __init__(self, wish: argparse.Namespace) -> None:
        self.wish = wish
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.host = socket.gethostname().split(".")[0]
        self.phase, self.deadline = "importing torch", time.monotonic() + wish.join_s
        self.ending = threading.Lock()
        self.store = None  # type: Any
        self.log = ""
        self.document = {
            "schema": SCHEMA,
            "backend": wish.backend,
            "torch": None,
            "nccl": None,
            "world_size": self.world,
            "ranks": [],
            "join_s": None,
            "results": [],
            "wrong_ranks": [],
            "error": None,
            "nccl_log": [],
        }  # type: dict[str, Any]

    # ------------------------------------------------------------------------------------------ phases and their ends

    def begin(self, phase: str, limit_s: float | None = None) -> None:
        """Enter a phase, with its time limit."""
        self.phase, self.deadline = phase, time.monotonic() + (self.wish.timeout_s if limit_s is None else limit_s)

    def watch(self) -> None:
        """End this process when a phase takes too long: the main thread may hang inside NCCL, and no signal frees it there."""
        while time.monotonic() < self.deadline:
            time.sleep(0.2)
        self.finish(self.fail("no end within the time limit", TIMED_OUT))

    def fail(self, text: str, code: int) -> int:
        """Note what went wrong, where nothing was noted before; return the exit code."""
        text = re.sub(r"\[/\S+:\d+\] ", "", text)  # gloo's source lines
        if self.document["error"] is None:
            self.document["error"] = {"phase": self.phase, "text": text[:2000], "missing": []}
        say(f"rank {self.rank} on {self.host}: {self.phase}: {text.splitlines()[0] if text else text}")
        return code

    def finish(self, code: int) -> None:
        """Print what there is and end at once: tearing torch down takes seconds, and hangs where a peer is gone."""
        self.ending.acquire()  # never released: whoever comes second has nothing to add
        lines = telling_lines(self.log)
        if self.log and not self.wish.log_folder:
            shutil.rmtree(Path(self.log).parent, ignore_errors=True)
        if self.rank == 0:
            self.document["nccl_log"] = lines
            sys.stdout.write(MARKER + json.dumps(self.document) + "\n")
        if lines:
            say("\n".join(lines))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # ------------------------------------------------------------------------------------------ the work

    def run(self) -> int:
        """Meet the other ranks and run every size; return the exit code."""
        warnings.filterwarnings("ignore", category=FutureWarning)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else every lost peer is told with a page of C++ frames
        import torch
        import torch.distributed as dist

        self.document["torch"] = torch.__version__
        wish = self.wish
        use_gpu = wish.backend == "nccl" or (wish.backend == "auto" and torch.cuda.is_available())
        self.document["backend"] = backend = "nccl" if use_gpu else "gloo"
        if use_gpu:
            self.log_nccl()
            if self.local_rank >= torch.cuda.device_count():
                return self.fail(f"torch sees {torch.cuda.device_count()} GPUs, local rank {self.local_rank} has none", 1)
            torch.cuda.set_device(self.local_rank)
            self.document["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        self.store = self.open_store(dist)
        missing = self.call_up(torch, use_gpu)
        if missing:
            code = self.fail(f"{len(missing)} of {self.world} ranks did not come", TIMED_OUT)
            self.document["error"]["missing"] = missing
            return code
        self.begin("connecting the ranks")
        limit = timedelta(seconds=wish.timeout_s + (30 if use_gpu else 0))  # NCCL's watchdog aborts: ours is to come first
        for name in ("default_pg_timeout", "_DEFAULT_PG_TIMEOUT", "default_pg_nccl_timeout", "_DEFAULT_PG_NCCL_TIMEOUT"):
            if hasattr(dist.distributed_c10d, name):  # sub-groups take it, whatever init_process_group was told
                setattr(dist.distributed_c10d, name, limit)
        dist.init_process_group(
            backend, store=dist.PrefixStore("work", self.store), rank=self.rank, world_size=self.world, timeout=limit
        )
        device = torch.device("cuda", self.local_rank) if use_gpu else torch.device("cpu")
        if self.rank == 0:
            self.print_devices()
        for op in wish.op:
            self.begin(op + ": first contact")
            size = wish.min_bytes
            if self.rank == 0:
                self.print_header(op)
            while size <= wish.max_bytes and self.sweep(torch, dist, op, size, device):
                size *= wish.factor
            if self.rank == 0:
                self.print_footer(op)
        self.say_goodbye()
        return WRONG if self.document["wrong_ranks"] else 0

    def open_store(self, dist: Any) -> Any:
        """Return a connection to the key-value store of all ranks: torchrun's where there is one, else that of rank 0."""
        here = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.begin("reaching {}:{}".format(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), self.wish.join_s + 5)
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self.world,
            here,
            timedelta(seconds=self.wish.join_s),
            wait_for_workers=False,
        )

    def call_up(self, torch: Any, use_gpu: bool) -> list[int]:
        """Tell the others who we are; return the ranks that did not come in time, none on all ranks but 0."""
        own = {"rank": self.rank, "host": self.host, "pid": os.getpid(), "device": self.local_rank, "pci": "", "name": "CPU"}
        if use_gpu:
            card = torch.cuda.get_device_properties(self.local_rank)
            own["name"] = card.name
            if hasattr(card, "pci_bus_id"):
                own["pci"] = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}"
        started = time.monotonic()
        self.begin("awaiting the other ranks", self.wish.join_s + 10)
        self.store.set(f"here/{self.rank}", json.dumps(own))
        if self.rank:
            self.store.wait(["go"], timedelta(seconds=self.wish.join_s + 5))
            if self.store.get("go") != b"1":
                raise RuntimeError("rank 0 misses other ranks")
            return []
        missing = list(range(self.world))
        while missing and time.monotonic() < started + self.wish.join_s:
            missing = [rank for rank in missing if not self.store.check([f"here/{rank}"])]
            time.sleep(0.02)
        if not missing:
            told = [json.loads(self.store.get(f"here/{rank}")) for rank in range(self.world)]
            self.document["ranks"], self.document["join_s"] = told, time.monotonic() - started
        self.store.set("go", "0" if missing else "1")
        if missing:
            time.sleep(0.5)  # those that wait are to read it before the store ends with this process
        return missing

    def say_goodbye(self) -> None:
        """Wait until all ranks are done: the store, and with it every late rank, ends with rank 0."""
        self.begin("the end", 10.0)
        self.store.set(f"done/{self.rank}", "1")
        if self.rank == 0:
            self.store.wait([f"done/{rank}" for rank in range(self.world)], timedelta(seconds=8))

    def share(self, key: str, own: float) -> list[float]:
        """Return everybody's value of `key` on rank 0, nothing elsewhere; over the store, not over what is measured."""
        self.store.set(f"{key}/{self.rank}", repr(own))
        if self.rank:
            return []
        return [float(self.store.get(f"{key}/{rank}")) for rank in range(self.world)]

    def sweep(self, torch: Any, dist: Any, op: str, size: int, device: Any) -> bool:
        """Warm up, time and check one size; return whether there is time for a larger one.

        On a wire so slow that one iteration takes the budget, the first one is all there is.
        """
        wish, key = self.wish, f"{op}/{size}"
        self.begin(f"{op} of {size} bytes")
        buffers = Buffers(torch, dist, op, size, self.rank, self.world, device)
        dist.barrier()

        def timed(count: int) -> float:
            started = time.monotonic()
            for _ in range(count):
                buffers.launch()
            buffers.await_all()
            return time.monotonic() - started

        each_s, count = timed(1), 1
        enough = self.agreed(key + "/enough", int(each_s > wish.budget_s))
        if not enough:
            timed(self.agreed(key + "/warm-up", max(1, min(wish.warm_up, int(wish.budget_s / 4 / max(each_s, 1e-9))))))
            sample_s = timed(1)
            count = self.agreed(key + "/count", max(2, min(wish.iterations, int(wish.budget_s / max(sample_s, 1e-9)))))
            self.begin(f"{op} of {size} bytes", wish.timeout_s + wish.budget_s * 3)
            dist.barrier()
            each_s = timed(count) / count
        wrong = buffers.wrong()
        times, wrongs = self.share(key + "/time", each_s), self.share(key + "/wrong", wrong)
        if self.rank:
            return not enough
        mean_s = sum(times) / len(times)  # nccl-tests' default, -a 1
        algbw = buffers.bytes / mean_s / 1e9
        factor = (self.world - 1) / self.world * (2 if op == "all_reduce" else 1)
        result = {
            "op": op,
            "bytes": buffers.bytes,
            "count": buffers.bytes // ELEMENT_BYTES,
            "type": "float",
            "time_us": mean_s * 1e6,
            "algbw_gbyte_s": algbw,
            "busbw_gbyte_s": algbw * factor,
            "wrong": int(sum(wrongs)),
            "iterations": count,
            "in_place": op == "all_reduce",
            "note": EMULATED if op == "reduce_scatter" and self.document["backend"] == "gloo" else "",
        }
        self.document["results"].append(result)
        bad = {rank for rank, number in enumerate(wrongs) if number}
        self.document["wrong_ranks"] = sorted(bad | set(self.document["wrong_ranks"]))
        redop = "none" if op == "all_gather" else "sum"
        say(
            f"{result['bytes']:12d}  {result['count']:12d}  {'float':>8}  {redop:>6}  {-1:>6} {mean_s * 1e6:8.1f} {algbw:7.2f} "
            f"{algbw * factor:7.2f} {result['wrong']:6d}"
        )
        return not enough

    def agreed(self, key: str, wished: int) -> int:
        """Return what rank 0 wishes: all must run the same number of iterations."""
        if self.rank == 0:
            self.store.set(key, str(wished))
        return int(self.store.get(key))

    # ------------------------------------------------------------------------------------------ NCCL's log, and the table

    def log_nccl(self) -> None:
        """Let NCCL write its log into a file: what it says there is the only proof of the network it really used."""
        if os.environ.get("NCCL_DEBUG", "").upper() != "TRACE":
            os.environ["NCCL_DEBUG"] = "INFO"
        folder = self.wish.log_folder or tempfile.mkdtemp(prefix="nccl-log-")
        self.log = str(Path(folder) / f"nccl.{self.rank}.log")
        os.environ["NCCL_DEBUG_FILE"] = self.log

    def print_devices(self) -> None:
        """Print who takes part, as nccl-tests does."""
        wish = self.wish
        say(
            f"# nThread 1 nGpus 1 minBytes {wish.min_bytes} maxBytes {wish.max_bytes} step: {wish.factor}(factor) "
            f"warmup iters: {wish.warm_up} iters: {wish.iterations} agg iters: 1 validate: 1 graph: 0"
        )
        say("#\n# Using devices")
        for one in self.document["ranks"]:
            place = "[{pci}] ".format(**one) if one["pci"] else ""
            say(
                "#  Rank {rank:2d} Group  0 Pid {pid:6d} on {host:>10} device {device:2d} {place}{name}".format(
                    place=place, **one
                )
            )

    def print_header(self, op: str) -> None:
        """Print the head of the table: the one placement there is, so one half of nccl-tests' columns."""
        say("#\n# Collective test starting: {}_perf (torch, {})".format(op, self.document["backend"]))
        if op == "reduce_scatter" and self.document["backend"] == "gloo":
            say("# note: " + EMULATED)
        place = "in-place" if op == "all_reduce" else "out-of-place"
        say(f"#{place:>70}")
        say("#       size         count      type   redop    root     time   algbw   busbw #wrong")
        say("#        (B)    (elements)                               (us)  (GB/s)  (GB/s)")

    def print_footer(self, op: str) -> None:
        """Print nccl-tests' last lines."""
        rows = [one for one in self.document["results"] if one["op"] == op]
        wrong = sum(1 for one in rows if one["wrong"])
        say("# Out of bounds values : {} {}".format(wrong, "FAILED" if wrong else "OK"))
        say("# Avg bus bandwidth    : {:g}".format(sum(one["busbw_gbyte_s"] for one in rows) / max(1, len(rows))))


class Buffers:
    """Memory and operation of one size."""

    def __init__(self, torch: Any, dist: Any, op: str, size: int, rank: int, world: int, device: Any) -> None:
        self.torch, self.op, self.rank, self.world, self.device = torch, op, rank, world, device
        share = max(1, size // ELEMENT_BYTES // world)
        whole = max(1, size // ELEMENT_BYTES) if op == "all_reduce" else share * world
        self.bytes = whole * ELEMENT_BYTES
        self.given = torch.zeros(share if op == "all_gather" else whole, dtype=torch.float32, device=device)
        if op == "all_reduce":
            self.result = self.given
            self.launch = lambda: dist.all_reduce(self.given)  # type: Any
        elif op == "all_gather":
            self.result = torch.zeros(whole, dtype=torch.float32, device=device)
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            self.launch = lambda: gather(self.result, self.given)
        else:
            self.result = torch.zeros(share, dtype=torch.float32, device=device)
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            self.launch = lambda: scatter(self.result, self.given)

    def await_all(self) -> None:
        """Wait until what was launched is done; gloo's calls return only then."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def wrong(self) -> int:
        """Fill the buffers, run once, and return how many elements of our result are not what they must be."""
        for start, part in self.parts(self.given):
            part.copy_(self.pattern(start, part.numel()) + self.rank)
        if self.result is not self.given:
            self.result.fill_(-1)
        self.launch()
        self.await_all()
        total, all_ranks, share = 0, self.world * (self.world - 1) // 2, self.result.numel() // self.world
        if self.op == "all_gather":
            for rank in range(self.world):
                for start, part in self.parts(self.result[rank * share : (rank + 1) * share]):
                    total += int((part != self.pattern(start, part.numel()) + rank).sum())
            return total
        first = 0 if self.op == "all_reduce" else self.rank * self.result.numel()
        for start, part in self.parts(self.result):
            total += int((part != self.pattern(first + start, part.numel()) * self.world + all_ranks).sum())
        return total

    def parts(self, whole: Any) -> list[tuple[int, Any]]:
        """Return (first index, view) of pieces of `whole`."""
        return [(start, whole[start : start + CHUNK]) for start in range(0, whole.numel(), CHUNK)]

    def pattern(self, start: int, count: int) -> Any:
        """Return the values of elements `start` and following, without the rank's share."""
        return (self.torch.arange(start, start + count, device=self.device) % PERIOD).to(self.torch.float32)


def telling_lines(path: str) -> list[str]:
    """Return the lines of NCCL's log that tell of networks, transports and failures."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n")[:500] for line in file if TELLING.search(line)]
    except OSError:
        return []
    return lines[:LOG_LINES_MAX]


def say(text: str) -> None:
    """Print for people: standard error, since standard output carries the document."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
