"""Load every GPU of a node: copies to and from the host, then bf16 matrix products on all at once, sampling nvidia-smi meanwhile.

Runs on the nodes; needs torch and nothing of ours (Python >= 3.8). Prints one JSON document in a line that begins with MARKER:

    {"schema", "torch", "device", "gpus": [{"place", "name", "pci", "h2d_gbyte_s", "d2h_gbyte_s", "together_gbyte_s", "tflops"}],
     "samples": [{"phase", "time_s", "text"}], "cycles", "error": null | {"phase", "text"}}

GB/s = 1e9 bytes a second; tflops: 1e12 floating point operations a second, 2 n^3 for a product of n x n. `place`: index among the
visible GPUs. With --device cpu the same code runs on the processor, for tests.

    --mode load    copies one card after the other, then all at once, then products on all
    --mode power   products on all cards, on and off in step with the wall clock, so that all nodes draw and drop at once
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SCHEMA = "r4090c.gpu-load/1"
MARKER = "R4090C-GPU "
SETTLE_S = 1.0
"""est.: clocks and link have risen by then; products before it do not count."""
COPY_S = 0.4
"""est.: of each direction of each card; at 25 GB/s that is 10 GB."""
TOGETHER_S = 3.0
"""est.: long enough for nvidia-smi to look at the links while all cards copy."""
SMI_TIMEOUT_S = 15.0
BATCH = 8
"""Products between two looks at the clock: 60 ms on an RTX 4090 at n = 8192."""


def main() -> int:
    """Do what was asked; return the exit code."""
    work = Load(arguments())
    threading.Thread(target=work.watch, daemon=True).start()
    try:
        work.run()
        code = 0
    except Exception as error:  # noqa: BLE001 -- whatever torch raises is what there is to tell
        work.fail(str(error).strip() or type(error).__name__)
        code = 1
    work.finish(code)
    return code


def arguments() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description="Load the GPUs of this machine with torch.")
    parser.add_argument("--mode", choices=("load", "power"), default="load")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0, help="of products (load), or of going on and off (power)")
    parser.add_argument("--size", type=int, default=8192, help="n of the n x n matrices")
    parser.add_argument("--copy-mib", type=int, default=256)
    parser.add_argument("--period-s", type=float, default=2.0, help="power: one on and one off")
    parser.add_argument("--limit-s", type=float, default=90.0, help="end at once after this time, whatever hangs")
    parser.add_argument("--cpus", default="", help="CPUs near each GPU, like 0-7;8-15: where its host memory is taken")
    parser.add_argument("--query", action="append", default=[], help="fields for nvidia-smi; the first that it knows is used")
    return parser.parse_args()


class Load:
    """The work, and what is known of it so far."""

    def __init__(self, wish: argparse.Namespace) -> None:
        self.wish = wish
        self.phase, self.started = "importing torch", time.monotonic()
        self.ending, self.stop = threading.Lock(), threading.Event()
        self.gpus = []  # type: list[dict[str, Any]]
        self.document = {
            "schema": SCHEMA,
            "torch": None,
            "device": wish.device,
            "gpus": self.gpus,
            "samples": [],
            "cycles": 0,
            "error": None,
        }  # type: dict[str, Any]

    def watch(self) -> None:
        """End this process at its limit: a call into the driver may hang for ever."""
        while time.monotonic() < self.started + self.wish.limit_s:
            time.sleep(0.2)
        self.fail("no end within the time limit")
        self.finish(4)

    def fail(self, text: str) -> None:
        """Note what went wrong, where nothing was noted before."""
        if self.document["error"] is None:
            self.document["error"] = {"phase": self.phase, "text": text[:1000]}

    def finish(self, code: int) -> None:
        """Print what there is and end at once."""
        self.ending.acquire()  # never released: whoever comes second has nothing to add
        sys.stdout.write(MARKER + json.dumps(self.document) + "\n")
        sys.stdout.flush()
        os._exit(code)

    def run(self) -> None:
        """Do the work of the mode."""
        import torch

        wish = self.wish
        self.document["torch"] = torch.__version__
        count = torch.cuda.device_count() if wish.device == "cuda" else 1
        if count == 0:
            raise RuntimeError("torch sees no GPU")
        torch.set_num_threads(1)
        self.gpus += [describe(torch, place, wish.device) for place in range(count)]
        devices = [torch.device("cuda", place) if wish.device == "cuda" else torch.device("cpu") for place in range(count)]
        sampler = threading.Thread(target=self.sample, daemon=True)
        if wish.query and wish.device == "cuda":
            sampler.start()
        if wish.mode == "load":
            self.copy(torch, devices)
            self.multiply(torch, devices)
        else:
            self.pulse(torch, devices)
        self.phase = "the end"
        self.stop.set()
        if sampler.ident is not None:
            sampler.join(SMI_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------ copies

    def copy(self, torch: Any, devices: list[Any]) -> None:
        """Copy between host and card: each card alone, both ways, then all at once to the cards."""
        near = cpus_of(self.wish.cpus)
        allowed = os.sched_getaffinity(0)
        pairs = []
        self.phase = "taking memory"
        for place, device in enumerate(devices):
            wanted = near[place] & allowed if place < len(near) else set()
            os.sched_setaffinity(0, wanted or allowed)  # memory comes from the NUMA node of whoever touches it first
            elements = self.wish.copy_mib << 18
            host = torch.ones(elements, dtype=torch.float32)
            pairs.append((host.pin_memory() if device.type == "cuda" else host, torch.empty(elements, device=device)))
        os.sched_setaffinity(0, allowed)
        for place, (host, card) in enumerate(pairs):
            self.phase = "copy"
            self.gpus[place]["h2d_gbyte_s"] = rate_of(torch, [(card, host)], COPY_S)[0]
            self.gpus[place]["d2h_gbyte_s"] = rate_of(torch, [(host, card)], COPY_S)[0]
            if not bool((host == 1).all()):
                raise RuntimeError("GPU {}: what came back from the card is not what was copied to it".format(place))
        self.phase = "copy together"
        seconds = TOGETHER_S if devices[0].type == "cuda" else 0.05
        for place, rate in enumerate(rate_of(torch, [(card, host) for host, card in pairs], seconds)):
            self.gpus[place]["together_gbyte_s"] = rate

    # ------------------------------------------------------------------------------------------ products

    def multiply(self, torch: Any, devices: list[Any]) -> None:
        """Multiply on all cards at once and note each one's rate, after they have settled."""
        self.phase = "products"
        cuda = devices[0].type == "cuda"
        start = time.monotonic() + (SETTLE_S if cuda else 0.02)
        end = start + self.wish.seconds

        def one(place: int, device: Any) -> None:
            step = self.product(torch, device)
            while time.monotonic() < start:
                step()
            began, count = time.monotonic(), 0
            while count == 0 or time.monotonic() < end:  # the first product may have taken all of the time
                count += step()
            self.gpus[place]["tflops"] = count * 2 * self.wish.size**3 / (time.monotonic() - began) / 1e12

        self.on_all(devices, one)

    def pulse(self, torch: Any, devices: list[Any]) -> None:
        """Multiply in the first half of every period of the wall clock, rest in the second."""
        self.phase = "on and off"
        end, period = time.monotonic() + self.wish.seconds, self.wish.period_s

        def one(place: int, device: Any) -> None:
            step, was_on = self.product(torch, device), False
            while time.monotonic() < end:
                on = time.time() % period < period / 2
                if on:
                    step()
                else:
                    time.sleep(0.005)
                if on and not was_on and place == 0:
                    self.document["cycles"] += 1
                was_on = on

        self.on_all(devices, one)

    def product(self, torch: Any, device: Any) -> Callable[[], int]:
        """Return a function that multiplies some matrices on a device, waits, and returns how many."""
        size, kind = self.wish.size, torch.bfloat16 if device.type == "cuda" else torch.float32
        left, right, out = (torch.full((size, size), 1 / 64, dtype=kind, device=device) for _ in range(3))

        def step() -> int:
            for _ in range(BATCH):
                torch.mm(left, right, out=out)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return BATCH

        step()
        return step

    def on_all(self, devices: list[Any], one: Callable[[int, Any], None]) -> None:
        """Run `one(place, device)` in a thread a card; the first failure is raised."""
        failures = []  # type: list[Exception]

        def guarded(place: int, device: Any) -> None:
            try:
                one(place, device)
            except Exception as error:  # noqa: BLE001 -- carried to the caller
                failures.append(RuntimeError("GPU {}: {}".format(place, error)))

        threads = [threading.Thread(target=guarded, args=pair, daemon=True) for pair in enumerate(devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    # ------------------------------------------------------------------------------------------ samples

    def sample(self) -> None:
        """Keep what nvidia-smi says while the cards work, with the phase in which it was asked."""
        queries = list(self.wish.query)
        while not self.stop.is_set() and queries:
            phase, asked = self.phase, time.monotonic()
            text = nvidia_smi(queries[0])
            if "is not a valid field" in text:
                queries.pop(0)  # an older or newer driver calls it differently
                continue
            if phase == self.phase:
                self.document["samples"].append({"phase": phase, "time_s": round(asked - self.started, 2), "text": text})
            self.stop.wait(0.5)


def describe(torch: Any, place: int, device: str) -> dict[str, Any]:
    """Return name and PCI address of one card, "" where this torch does not tell it."""
    found = {"place": place, "name": "CPU", "pci": ""}  # type: dict[str, Any]
    if device == "cuda":
        card = torch.cuda.get_device_properties(place)
        found["name"] = card.name
        if hasattr(card, "pci_bus_id"):
            found["pci"] = "{:04x}:{:02x}:{:02x}.0".format(card.pci_domain_id, card.pci_bus_id, card.pci_device_id)
    found.update(dict.fromkeys(("h2d_gbyte_s", "d2h_gbyte_s", "together_gbyte_s", "tflops")))
    return found


def rate_of(torch: Any, copies: list[tuple[Any, Any]], seconds: float) -> list[float]:
    """Return GB/s of each (to, from), all copied at the same time, over and over for about `seconds`."""
    cards = [to if to.device.type == "cuda" else given for to, given in copies]
    cuda = cards[0].device.type == "cuda"

    def once() -> None:
        for to, given in copies:
            to.copy_(given, non_blocking=True)

    def wait() -> None:
        for card in cards:
            if cuda:
                torch.cuda.synchronize(card.device)

    once()
    wait()
    marks = []
    for card in cards:
        if cuda:
            with torch.cuda.device(card.device):
                marks.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
                marks[-1][0].record()
    began, count = time.monotonic(), 0
    while count == 0 or time.monotonic() < began + seconds:
        for _ in range(4):
            once()
        count += 4
        wait()
    elapsed = [time.monotonic() - began] * len(cards)
    if cuda:
        for place, card in enumerate(cards):
            with torch.cuda.device(card.device):
                marks[place][1].record()
        wait()
        elapsed = [first.elapsed_time(last) / 1e3 for first, last in marks]
    return [count * to.numel() * 4 / spent / 1e9 for (to, _), spent in zip(copies, elapsed)]


def nvidia_smi(query: str) -> str:
    """Return what nvidia-smi says to a query, or why it does not answer."""
    argv = ["nvidia-smi", "--query-gpu=" + query, "--format=csv"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "nvidia-smi: {}".format(error)
    return done.stdout + done.stderr


def cpus_of(text: str) -> list[set[int]]:
    """Return the sets of CPUs in "0-3,8;4-7": one a card."""
    found = []
    for part in text.split(";") if text else []:
        cpus = set()  # type: set[int]
        for piece in filter(None, part.split(",")):
            first, _, last = piece.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
        found.append(cpus)
    return found


if __name__ == "__main__":
    sys.exit(main())
