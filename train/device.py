"""Where this rank computes: the only place that tells a GPU from a CPU."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Literal

import torch

from train.errors import Stop, counted

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT_BYTES = 2**31 - 1
"""The most mallopt takes: activations are 1 to 100 MiB each."""


@dataclass(frozen=True)
class Device:
    """`name` is torch's device string; `backend` carries the collectives."""

    kind: Literal["cuda", "cpu"]
    name: str
    backend: Literal["nccl", "gloo"]


def choose_device(local_rank: int) -> Device:
    """Return the GPU of this local rank, or the CPU where torch sees no GPU at all. Tells DeepSpeed the same.

    R4090C_DEVICE=cpu takes the CPU in spite of GPUs. Raises Stop when there are GPUs but too few for this rank.
    """
    gpus = 0 if os.environ.get("R4090C_DEVICE") == "cpu" else torch.cuda.device_count()
    if gpus == 0:
        device = Device("cpu", "cpu", "gloo")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        keep_freed_memory()
    elif local_rank < gpus:
        device = Device("cuda", f"cuda:{local_rank}", "nccl")
        torch.cuda.set_device(local_rank)
    else:
        expected = f"at most {counted(gpus, 'rank')} on this node: torch sees so many GPUs"
        raise Stop(f"local rank {local_rank}", "has no GPU", expected, "start fewer ranks, or look at CUDA_VISIBLE_DEVICES")
    os.environ["DS_ACCELERATOR"] = device.kind
    return device


def keep_freed_memory() -> None:
    """Have malloc keep what is freed for the next tensor, instead of asking the kernel for zeroed pages again and again.

    A step's activations are freed and asked for in every micro-step: 4 % of a small model's step on a CPU went into page faults
    (21,000 a second; 0 so; 2026-11-30). C libraries other than glibc have no mallopt, and do without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def choose_precision(wanted: str, device: Device) -> str:
    """Return fp32, bf16 or fp16. "auto" is bf16 on a GPU that has it (every RTX 4090), fp32 on a CPU."""
    if wanted == "auto":
        if device.kind == "cpu":
            return "fp32"
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    if wanted == "fp16" and device.kind == "cpu":
        raise Stop("recipe precision", "fp16 on a CPU", "fp32, bf16 or auto: DeepSpeed has no fp16 there", "change the recipe")
    return wanted


def memory_peaks_gib(device: Device) -> dict[str, float]:
    """Return the most GPU memory this rank took so far: its tensors, and what torch keeps for them. Nothing on a CPU."""
    if device.kind == "cpu":
        return {}
    peaks = {"gpu_mem_gib": torch.cuda.max_memory_allocated(), "gpu_reserved_gib": torch.cuda.max_memory_reserved()}
    return {name: round(peak / 2**30, 3) for name, peak in peaks.items()}
