"""`--profile`: how much of the communication is hidden, worked out by hand on a trace small enough for that."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from train.profiling import FIRST, LAST, Tracer, common, length, overlap_of, union


def event(cat: str, name: str, begin_us: float, end_us: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin_us, "dur": end_us - begin_us, "pid": 0, "tid": 7}


GPU = [
    event("kernel", "ampere_bf16_s16816gemm", 0, 400),
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 300, 700),  # 300 to 400 beside the product before it
    event("kernel", "flash_bwd_kernel", 500, 600),  # all of it beside the reduction
    event("kernel", "ncclDevKernel_AllGather_RING_LL", 650, 800),  # begins before the other ends: 300 to 800 in all
    event("kernel", "vectorized_elementwise_kernel", 750, 1000),  # 750 to 800 beside it
    event("kernel", "vectorized_elementwise_kernel", 760, 770),  # on another stream at the same time: counts once
    event("gpu_memcpy", "Memcpy DtoH", 400, 500),  # a copy hides nothing
    event("cpu_op", "aten::mm", 0, 2000),  # the host's time is not the card's
    {"ph": "i", "cat": "cpu_op", "name": "ncclSomething", "ts": 3},
    {"ph": "M", "name": "process_name", "args": {}},
]
"""Communication 300–800 = 500 us; computing 0–400, 500–600, 750–1000 = 750 us; both 100 + 100 + 50 = 250 us."""


def test_the_hidden_share_of_a_trace_is_the_one_worked_out_by_hand() -> None:
    found = overlap_of(GPU)
    assert (found.comm_s, found.hidden_s, found.compute_s) == pytest.approx((500e-6, 250e-6, 750e-6))
    assert found.hidden_share == pytest.approx(0.5)
    assert str(found) == "50% of the communication is hidden behind computation: 0.000 of 0.001 s; 0.001 s of computation"


def test_on_a_cpu_gloo_and_torch_operations_are_told_apart() -> None:
    trace = [
        event("user_annotation", "gloo:all_reduce", 0, 1000),
        event("cpu_op", "aten::mm", 900, 1500),
        event("cpu_op", "c10d::allreduce_", 0, 1000),  # waits; it computes nothing
    ]
    assert overlap_of(trace).hidden_share == pytest.approx(0.1)


def test_without_communication_there_is_no_share() -> None:
    found = overlap_of([event("kernel", "gemm", 0, 1e6)])
    assert found.hidden_share is None
    assert str(found) == "no communication; 1.000 s of computation"
    assert overlap_of([]).compute_s == 0


def test_intervals() -> None:
    assert union([(5, 6), (1, 3), (2, 4), (4, 5)]) == [(1, 6)]
    assert common([(0, 10)], [(1, 2), (3, 4), (9, 12)]) == [(1, 2), (3, 4), (9, 10)]
    assert common([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]  # one of them overlaps two
    assert common([(0, 1)], [(1, 2)]) == []
    assert length([(0.5, 1), (2, 4)]) == 2.5


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra `train`")
def test_the_tracer_takes_its_steps_and_says_what_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gzip

    import torch

    tracer = Tracer(tmp_path, rank=0, gpu=False)
    for step in range(1, LAST + 2):
        tracer.begin_step()
        torch.ones(step, step) @ torch.ones(step, step)
        tracer.end_step(last=step == LAST + 1)
    told = capsys.readouterr().out.splitlines()
    assert told[-2].startswith(f"profile  steps {FIRST} to {LAST} of this attempt: no communication; ")
    assert told[-1] == f"profile  {tmp_path}/profile/rank0.json.gz, to be opened in https://ui.perfetto.dev"
    with gzip.open(tmp_path / "profile" / "rank0.json.gz", "rt") as opened:
        products = [one for one in json.load(opened)["traceEvents"] if one.get("name") == "aten::matmul"]
    assert len(products) == LAST - FIRST + 1

    short = Tracer(tmp_path / "short", rank=0, gpu=False)
    for _ in range(FIRST - 1):
        short.begin_step()
        short.end_step(last=_ == FIRST - 2)
    assert "nothing: steps from the 3rd on" in capsys.readouterr().out
    assert not (tmp_path / "short").exists()
