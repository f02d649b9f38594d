"""Samples as a sampler prints them, for tests of the live view: nodes with GPUs, a run on two of them, a node that is down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launch.live import DataLinks, Heard, parse_sample
from launch.sampler import FIELDS

NOW_S = 1_800_000_000.0
"""Unix time of the controller; 2027-01-15 08:00:00 UTC."""
AT_S = 5_000.0
"""The controller's monotonic time of the last sample."""
HOSTILE = "[red]bold[/red]\x1b[31m\x1b]0;title\x07\u202etxt"
TITLES = {"memory": " [MiB]", "power": " [W]", "utilization": " [%]"}


def header(fields: Sequence[str]) -> str:
    """Return nvidia-smi's line of titles."""
    units = [" [MHz]" if field.startswith("clocks.current") else TITLES.get(field.partition(".")[0], "") for field in fields]
    return ", ".join(field + unit for field, unit in zip(fields, units, strict=True))


def gpu_row(index: int, use: int, used_mib: int, watts: float, celsius: int, reasons: int, name: str) -> str:
    """Return one GPU as nvidia-smi prints it."""
    uuid = f"GPU-5c1b0a37-92de-4b18-8f07-0a6d3c94e5{index:02x}"
    cells = (str(index), name, uuid, f"00000000:{0x41 + index:02X}:00.0", f"{use} %", f"{used_mib} MiB", "24564 MiB")
    return ", ".join((*cells, f"{watts:.2f} W", "450.00 W", str(celsius), "2520 MHz", f"0x{reasons:016x}"))


def smi(*rows: str, age_s: float = 0.1) -> dict[str, Any]:
    """Return what a sampler tells of nvidia-smi."""
    fields = [*FIELDS, "clocks_event_reasons.active"]
    return {"text": "\n".join([header(fields), *rows]) + "\n", "fields": fields, "rc": 0, "age_s": age_s}


def apps(*rows: str) -> dict[str, Any]:
    """Return what a sampler tells of the compute processes."""
    text = "\n".join(["pid, process_name, used_gpu_memory [MiB], gpu_uuid", *rows]) + "\n"
    return {"text": text, "fields": ["pid", "process_name", "used_memory", "gpu_uuid"], "rc": 0, "age_s": 0.1}


def netdev(rx: int, tx: int, errors: int = 0) -> str:
    """Return /proc/net/dev with lo and eth0."""
    rows = (("lo", 500, 0, 500), ("eth0", rx, errors, tx))
    lines = [
        "Inter-|   Receive                            |  Transmit",
        " face |bytes packets errs drop …",
    ]  # the titles say nothing
    lines += [f"  {name}: {got}  9000 {bad} 0 0 0 0 0 {sent} 9000 0 0 0 0 0 0" for name, got, bad, sent in rows]
    return "\n".join(lines) + "\n"


def raw(node: str, seconds: float, **more: Any) -> dict[str, Any]:
    """Return a sample of `node`, `seconds` after the first one. Every second 4 of 16 CPUs are used, 125 MB come, 250 MB go."""
    jiffies = int(seconds * 100)
    return {
        "schema": "r4090c.sample/1",
        "node": node,
        "time": NOW_S - 2 + seconds,
        "monotonic": 100.0 + seconds,
        "stat": f"cpu  {4 * jiffies} 0 0 {12 * jiffies} 0 0 0 0 0 0\n"
        + "\n".join(f"cpu{n} 1 0 0 1 0 0 0 0 0 0" for n in range(16)),
        "loadavg": "4.25 3.00 2.00 5/900 4242\n",
        "meminfo": "MemTotal:       134217728 kB\nMemAvailable:   33554432 kB",
        "netdev": netdev(int(125e6 * seconds), int(250e6 * seconds)),
        "rdma": {"mlx5_0:1": {"port_rcv_data": str(int(250e6 * seconds)), "port_xmit_data": "7", "symbol_error": "2"}},
        "gpus": None,
        "apps": None,
        "disks": {"/tmp": {"size": 1 << 40, "free": 1 << 39}, "/shared/nfs": {"size": 1 << 44, "free": 1 << 39}},
        "leases": {"busy": []},
        "runs": [],
        **more,
    }


LINKS = DataLinks("eth0", ("mlx5_0:1",), {"eth0": 10.0, "mlx5_0:1": 100.0, "lo": None}, "route to node02 (10.0.0.2)")


def heard(node: str, links: DataLinks = LINKS, **more: Any) -> Heard:
    """Return a node that has given two samples, two seconds apart."""
    before, last = (parse_sample(json.dumps(raw(node, seconds, **more))) for seconds in (0.0, 2.0))
    return Heard(node, before, last, AT_S, links, NOW_S - 3600, None)


def down(node: str) -> Heard:
    """Return a node that has not answered for some time."""
    why = "connection refused by 10.0.0.3:22"
    return Heard(node, since_s=NOW_S - 135, why=why, next_command=f"ssh root@{node}", tries=27)


def metrics(last_step: int, **more: Any) -> list[dict[str, Any]]:
    """Return the last lines of metrics.jsonl: a step a second and a half, the last one three seconds ago."""
    return [
        {
            "step": step,
            "loss": 10.0 - step / 100,
            "tokens_per_s": 12_345.6,
            "step_time_s": 1.4,
            "time": NOW_S - 3 - (last_step - step) * 1.5,
            **more,
        }
        for step in range(last_step - 9, last_step + 1)
    ]


def state(
    run_id: str, node: str, node_rank: int, beats: Mapping[int, tuple[str, int, float]], steps: int | None = 200, **more: Any
) -> dict[str, Any]:
    """Return an agent's state as a sampler sends it. `beats`: rank -> (phase, step, seconds ago)."""
    plan = {
        "recipe": "tiny",
        "steps": steps,
        "attempt": 1,
        "world_size": 4,
        "nodes": ["node01", "node02"],
        "ranks": {"0": "node01", "1": "node01", "2": "node02", "3": "node02"},
    }
    return {
        "run_id": run_id,
        "run_dir": f"/shared/nfs/runs/{run_id}",
        "attempt": 1,
        "node": node,
        "state": "running",
        "started": NOW_S - 600,
        "heartbeat": NOW_S,
        "ranks": {str(rank): {"pid": 100 + rank, "start": 5, "gone": None, "exit": None} for rank in beats},
        "beats": {str(rank): {"phase": phase, "step": step, "time": NOW_S - ago} for rank, (phase, step, ago) in beats.items()},
        "alive": True,
        "outcome": None,
        "cause": None,
        "node_rank": node_rank,
        "plan": plan,
        "metrics": {"lines": metrics(42), "age_s": 0.1} if node_rank == 0 else None,
        **more,
    }


RUN = "tiny-20270115-075000-a3f1"


def cluster_of_three() -> list[Heard]:
    """Return node01 at work, node02 behind with a hostile GPU name and a hot card, node03 down."""
    card = "NVIDIA GeForce RTX 4090"
    process = "4242, python, 21000 MiB, GPU-5c1b0a37-92de-4b18-8f07-0a6d3c94e500"
    first = heard(
        "node01",
        gpus=smi(gpu_row(0, 97, 21_504, 449.6, 66, 0x4, card), gpu_row(1, 88, 20_480, 402.0, 71, 0x0, card)),
        apps=apps(process),
        leases={"busy": [{"lease": "0000:42:00.0", "user": HOSTILE, "run_id": RUN, "node": "x", "pid": 5, "since": NOW_S - 60}]},
        runs=[state(RUN, "node01", 0, {0: ("train", 42, 0.4), 1: ("train", 42, 0.6)})],
    )
    hostile = {
        "/tmp": {"size": 1 << 40, "free": 1 << 39},
        f"/x/{HOSTILE}": {"error": "the file system has not answered for 11 s"},
    }
    second = heard(
        "node02",
        gpus=smi(gpu_row(0, 0, 512, 24.0, 31, 0x1, HOSTILE), gpu_row(1, 100, 24_300, 210.0, 88, 0x48, card)),
        apps={"error": "nvidia-smi did not answer within 20 s"},
        disks=hostile,
        runs=[state(RUN, "node02", 1, {2: ("train", 42, 0.5), 3: ("train", 40, 14.0)})],
    )
    return [first, second, down("node03")]
