"""Predicted against published figures of RTX 4090s: writes the tables of docs/planning.md.

    python -m bench.planning            # rewrite the tables between the markers of docs/planning.md
    python -m bench.planning --check    # exit 1 when they are not what the code predicts

Every published figure stands here with its source and the settings its source tells; a prediction is made from those alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.compute import CUDA, LIGER
from launch.perf import DEEPSPEED, Stack, all_reduce_s, predict
from launch.shape import Transformer
from launch.site import Site, assume
from launch.training import Training

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "planning.md"

LLMQ_RUN = Stack(CUDA, hidden_share=1.0, stage3_share=1.0, hides_stage3=True, reuse_distance=1e9)
"""llm.q copies between cards with copy engines, which take no processor of the card: all traffic can run unseen."""
FACTORY_RUN = Stack(LIGER, reuse_distance=1e9)
"""LlamaFactory: Transformers with Liger kernels and FlashAttention-2, under torchrun (to 1.5B) or DeepSpeed (from 3B)."""
SEQUENCE = 1024
"""Tokens of a sequence in all of these runs."""
SOURCE = "IST-DASLab/llmq, benchmarks/4090x1.md and 4090x4.md"


def _qwen(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> Transformer:
    return Transformer(layers, hidden, intermediate, heads, kv_heads, hidden // heads, vocab, tied, qkv_bias=True)


QWEN = {
    "0.5B": _qwen(24, 896, 4864, 14, 2, 151_936, True),
    "1.5B": _qwen(28, 1536, 8960, 12, 2, 151_936, True),
    "3B": _qwen(36, 2048, 11_008, 16, 2, 151_936, True),
    "7B": _qwen(28, 3584, 18_944, 28, 4, 152_064, False),
    "14B": _qwen(48, 5120, 13_824, 40, 8, 152_064, False),
}
"""Qwen2.5, from the config.json of each."""
LLAMA2_7B = Transformer(32, 4096, 11_008, 32, 32, 128, 32_000, False)


@dataclass(frozen=True, slots=True)
class Run:
    """A published throughput. `stage` 0: no ZeRO; `fitted`: a constant of ours rests on it; `why`: of the error."""

    software: str
    gpus: int
    model: str
    published: float
    micro_batch: int
    accumulation: int
    stage: int = 0
    recompute: bool = False
    offload: bool = False
    offload_parameters: bool = False
    fitted: bool = False
    why: str = ""

    @property
    def training(self) -> Training:
        """What was trained; llm.q and LlamaFactory both overlap traffic with the backward pass."""
        return Training(
            self.model, QWEN[self.model], "full", 0, (), self.stage, self.offload, self.offload_parameters, self.micro_batch,
            self.accumulation, SEQUENCE, "bf16", "adamw", self.recompute, SEQUENCE, overlap_comm=True,
        )  # fmt: skip

    @property
    def predicted(self) -> float:
        """Tokens a second."""
        stack = LLMQ_RUN if self.software == "llm.q" else FACTORY_RUN
        found = predict(self.training, assume(f"1x{self.gpus}x4090"), stack).units_per_s
        assert found is not None
        return found


ZERO3_OFFLOAD = (3, True, True, True)
"""stage, recompute, offload, offload_parameters of a Run."""
BOTH_FIT = "fitted: MATMUL_SHARE and MEMORY_SHARE"
ODD = "the odd one: the same settings gave 9 % more a card on four cards than on one"
UP_TWICE = "too high: 30 GB of weights go up twice in every micro-step and hide less than assumed"
TOGETHER = "ZeRO-3: gathers and offload meet in the host's memory, which is counted apart"
BOTH_REASONS = "too high, for both reasons: gathers, and offload of weights that no longer hides"
RUNS = (
    Run("llm.q", 1, "0.5B", 39_842, 16, 32, fitted=True, why=BOTH_FIT),
    Run("llm.q", 1, "1.5B", 14_068, 4, 128, fitted=True, why=BOTH_FIT),
    Run("llm.q", 1, "3B", 7_004, 4, 128, why="its moments lie in host memory and SwiGLU is recomputed: neither is counted"),
    Run("llm.q", 1, "7B", 2_776, 16, 32, recompute=True, why="all of a block is counted as recomputed, norms included"),
    Run("llm.q", 1, "14B", 1_348, 32, 16, recompute=True, why="as 7B"),
    Run("llm.q", 4, "0.5B", 154_000, 16, 8, 1, why="traffic hidden, as assumed; cards differ by some per cent"),
    Run("llm.q", 4, "1.5B", 52_400, 8, 16, 1, why="residuals go to host memory and back, which is not counted"),
    Run("llm.q", 4, "3B", 26_000, 4, 32, 1, why="one moment lies in host memory and SwiGLU is recomputed: neither is counted"),
    Run("llm.q", 4, "7B", 10_900, 16, 8, 3, recompute=True, why="attention is not recomputed there, here it is counted"),
    Run("llm.q", 4, "14B", 5_261, 32, 4, 3, recompute=True, why="as on one card, traffic hidden"),
    Run("LlamaFactory", 1, "0.5B", 30_183, 128, 4, recompute=True, why="passes through memory are counted, not fitted"),
    Run("LlamaFactory", 1, "1.5B", 9_419, 32, 16, recompute=True, why=ODD),
    Run("LlamaFactory", 1, "3B", 5_448, 48, 11, 2, recompute=True, offload=True, why="the host's copies hide, as assumed"),
    Run("LlamaFactory", 1, "7B", 2_523, 32, 16, *ZERO3_OFFLOAD, why="weights from the host hide, as assumed"),
    Run("LlamaFactory", 1, "14B", 1_135, 20, 26, *ZERO3_OFFLOAD, why=UP_TWICE),
    Run("LlamaFactory", 4, "0.5B", 122_784, 128, 1, recompute=True, why="plain data parallel, traffic hidden"),
    Run("LlamaFactory", 4, "1.5B", 40_960, 32, 4, recompute=True, why="plain data parallel, traffic hidden"),
    Run("LlamaFactory", 4, "3B", 18_480, 64, 2, *ZERO3_OFFLOAD, fitted=True, why="fitted: STAGE3_SHARE"),
    Run("LlamaFactory", 4, "7B", 6_929, 32, 4, *ZERO3_OFFLOAD, why=TOGETHER),
    Run("LlamaFactory", 4, "14B", 2_630, 21, 6, *ZERO3_OFFLOAD, why=BOTH_REASONS),
)
"""Full training of Qwen2.5 in bf16 on RTX 4090s; the source's command lines and configurations tell batch, stage, offload."""

PUBLISHED_EIGHT = 0.908
"""arXiv 2311.03687, at second hand (HARDWARE.md): 8 RTX 4090 in one machine, batch not told."""
KIB, MIB = 1024, 1024**2


@dataclass(frozen=True, slots=True)
class Reduce:
    """A published all_reduce: microseconds of one size on a machine that `site` stands for."""

    machine: str
    site: str
    size_bytes: int
    published_us: float
    fitted: bool
    why: str

    @property
    def predicted_us(self) -> float:
        """Microseconds."""
        seconds = all_reduce_s(self.size_bytes, assume(self.site))
        assert seconds is not None
        return seconds * 1e6


STOCK, STOCK_SITE = "8 × 4090, 2 × EPYC 7542, stock driver", "1x8x4090"
BUSBW_TEST = 512 * MIB
"""Bytes of the messages of which only the bus bandwidth is told: any large size."""


def _us(busbw_gbyte_s: float, ranks: int) -> float:
    """Return the microseconds of BUSBW_TEST at this bus bandwidth."""
    return 2 * (ranks - 1) / ranks * BUSBW_TEST / busbw_gbyte_s / 1e3


REDUCES = (
    Reduce(STOCK, STOCK_SITE, 8, 43.73, True, "fitted: latency of a hop"),
    Reduce(STOCK, STOCK_SITE, 64 * KIB, 61.17, False, "NCCL's low-latency protocols move small messages slower"),
    Reduce(STOCK, STOCK_SITE, MIB, 227.4, False, "too fast: between latency and bandwidth NCCL changes protocols"),
    Reduce(STOCK, STOCK_SITE, 16 * MIB, 2181.4, False, "large enough: what a bucket of gradients has"),
    Reduce(STOCK, STOCK_SITE, 128 * MIB, 16_533, True, "fitted: bus bandwidth, the middle of 14.4 to 15.0"),
    Reduce(
        "the same, patched P2P",
        "1x8x4090+p2p",
        BUSBW_TEST,
        _us(20.6, 8),
        True,
        "fitted: bus bandwidth (told as 20.6 GB/s)",
    ),
    Reduce(
        "4 × 4090, one socket, patched P2P",
        "1x4x4090+p2p",
        BUSBW_TEST,
        _us(25.3, 4),
        False,
        "nothing crosses sockets there; the plan assumes the machine with two (told as 25.3 GB/s)",
    ),
)
"""nccl-tests issues 269, 307; sizes from the log in tests/tools/fixtures/nccl-tests/old-13tok-8x4090-stock.txt."""


# --------------------------------------------------------------------------- the tables


def _error(predicted: float, published: float) -> str:
    return f"{predicted / published - 1:+.0%}"


def _role(fitted: bool) -> str:
    return "fitted" if fitted else "predicted"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def throughput() -> str:
    """Return the table of tokens a second."""
    rows = []
    for run in RUNS:
        zero = f"ZeRO-{run.stage}" if run.stage else "no ZeRO"
        zero += ", offload" if run.offload else ""
        settings = f"{run.micro_batch} × {run.accumulation}, {zero}" + (", recomputation" if run.recompute else "")
        rows.append(
            (f"{run.gpus} × 4090", run.software, run.model, settings, f"{run.published:,.0f}", f"{run.predicted:,.0f}",
             _error(run.predicted, run.published), _role(run.fitted), run.why)
        )  # fmt: skip
    head = ("cards", "software", "model", "micro-batch × accumulation", "published", "ours", "error", "role", "why")
    return _table(head, rows)


def scaling() -> str:
    """Return the table of the rate of four cards against four times that of one."""
    rows = []
    for software in ("llm.q", "LlamaFactory"):
        for model in QWEN:
            one, four = (next(run for run in RUNS if (run.software, run.model, run.gpus) == (software, model, n)) for n in (1, 4))
            published, predicted = four.published / 4 / one.published, four.predicted / 4 / one.predicted
            rows.append((software, model, f"{published:.1%}", f"{predicted:.1%}", _error(predicted, published)))
    return _table(("software", "model", "published E(4)", "ours", "error"), rows)


def eight() -> str:
    """Return the table of what eight cards in one machine give, of eight times one card, by the work between reductions."""
    rows = []
    for tokens in (4096, 8192, 16_384, 32_768, 65_536):
        training = replace(
            RUNS[0].training, name="llama2-7b", shape=LLAMA2_7B, stage=2, micro_batch=tokens // SEQUENCE, accumulation=1,
            activation_checkpointing=True, overlap_comm=False,
        )  # fmt: skip
        one, many = (predict(training, assume(f"1x{gpus}x4090"), DEEPSPEED).units_per_s for gpus in (1, 8))
        assert one is not None and many is not None
        rows.append((f"{tokens:,}", f"{many / 8 / one:.1%}", _error(many / 8 / one, PUBLISHED_EIGHT)))
    return _table(("tokens a card and micro-step", "ours: rate of 8 cards / 8 × rate of one", "against 90.8 %"), rows)


def collectives() -> str:
    """Return the table of all_reduce times."""
    rows = [
        (one.machine, _size(one.size_bytes), f"{one.published_us:,.0f}", f"{one.predicted_us:,.0f}",
         _error(one.predicted_us, one.published_us), _role(one.fitted), one.why)
        for one in REDUCES
    ]  # fmt: skip
    return _table(("machine", "bytes", "published µs", "ours µs", "error", "role", "why"), rows)


def _size(number: int) -> str:
    return f"{number // MIB} MiB" if number >= MIB else f"{number // KIB} KiB" if number >= KIB else f"{number} B"


def networks() -> str:
    """Return the table of the wait for the gradients of a 7B model between 16 cards, by network: what full fine-tuning costs."""
    rows = []
    for rate in (10, 25, 100):
        site: Site = assume(f"2x8x4090@{rate}gbe-roce")
        seconds = all_reduce_s(2 * LLAMA2_7B.parameters, site)
        assert seconds is not None and site.between is not None
        rows.append((f"{rate} GbE", f"{site.between.busbw_gbyte_s:.3g} GB/s", f"{seconds:.1f} s"))
    return _table(("network", "bus bandwidth assumed", "one all_reduce of 13.5 GB"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "throughput": throughput,
    "scaling": scaling,
    "eight": eight,
    "collectives": collectives,
    "networks": networks,
}


def renewed(text: str) -> str:
    """Return `text` with every table between its markers made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: python -m bench.planning -->", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise SystemExit(f"{DOCUMENT}: the markers of the table {name!r} are missing")
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        table = f"{begin}\n\n{make()}\n\n{end}"
        text = pattern.sub(lambda _, table=table: table, text)  # type: ignore[misc]
    return text


def main() -> int:
    """Rewrite the tables, or check them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a table is not what the code predicts")
    check = parser.parse_args().check
    old = DOCUMENT.read_text(encoding="utf-8")
    new = renewed(old)
    if check:
        return int(new != old)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
