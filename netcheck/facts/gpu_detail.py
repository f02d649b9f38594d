"""What only `nvidia-smi -q` tells of a GPU: BAR1, what slows it down, replays of its link; only asked where GPUs are stated."""

from __future__ import annotations

from netcheck.facts.gpus import smi_text
from netcheck.facts.question import Question, Reply
from netcheck.tools import nvidia_smi_q
from r4090c.errors import ParseError
from r4090c.model import Cluster, GpuDetail, Node

NAME = "gpu_detail"
SOUND = frozenset(("0", "no", "none", "n/a"))
"""What a remapped row's line says when all is well; the counts of rows that were remapped in time are no fault either."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. 20 s: as for facts.gpus."""
    return Question(command=("nvidia-smi", "-q") if node.gpus else None, timeout_s=20)


def parse(reply: Reply) -> tuple[GpuDetail, ...]:
    """Return the GPUs in the order of nvidia-smi. Raises ParseError, also when the text ends before the last GPU."""
    log = nvidia_smi_q.parse(smi_text(reply))
    if log.attached is not None and len(log.gpus) < log.attached:
        raise ParseError(f"nvidia-smi -q: {log.attached} GPUs are announced, {len(log.gpus)} told")
    return tuple(_detail(gpu) for gpu in log.gpus)


def _detail(gpu: nvidia_smi_q.SmiGpu) -> GpuDetail:
    memory = (gpu.remapped_rows or {}).items()
    return GpuDetail(
        pci=gpu.pci,
        uuid=gpu.uuid,
        bar1_mib=gpu.bar1_total_mib,
        temperature_c=gpu.temperature_c,
        slowdown_c=gpu.temperature_slowdown_c,
        headroom_c=gpu.temperature_left_c,
        throttle=tuple(reason for reason, active in gpu.clock_reasons.items() if active),
        replays=gpu.replays,
        ecc=gpu.ecc,
        memory_faults=tuple(
            f"{name}: {value}"
            for name, value in memory
            if name in ("Pending", "Remapping Failure Occurred") and value.lower() not in SOUND
        ),
    )
