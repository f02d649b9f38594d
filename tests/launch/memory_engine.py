"""Run by test_memory.py under torch.distributed.run: a small Llama in DeepSpeed engines on CPU ranks, and the bytes each holds.

Every tensor's storage is seen as operations make it (a dispatch mode) and forgotten when it is freed. Prints one JSON line an
engine: bytes that stay after a step, the most in a backward pass, the most in a step. One engine after the other in the same
processes: their start takes longer than all the work.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 2


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of all storages made under it that still exist, and the most there ever were since `most` was last set."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, call: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage: Any) -> None:
        """Count a storage once."""
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        """Take a freed storage off."""
        self.now -= self.sizes.pop(key, 0)

    def peak_of(self, work: Callable[[], Any]) -> tuple[int, Any]:
        """Return the most bytes during `work`, and its result."""
        gc.collect()  # what hangs in cycles goes when Python likes
        self.most = self.now
        result = work()
        return self.most, result


def measured(job: dict[str, Any]) -> dict[str, Any]:
    """Return what two steps of one engine hold."""
    torch.manual_seed(0)
    with Live() as live:
        model = LlamaForCausalLM(LlamaConfig(**job["config"]))
        matrices = [one for one in model.parameters() if one.ndim > 1]
        vectors = [one for one in model.parameters() if one.ndim == 1]
        parameters = sum(one.numel() for one in matrices + vectors)
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-4)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=job["deepspeed"])
        tokens = torch.randint(0, job["config"]["vocab_size"], (1, job["tokens"]))
        told: dict[str, list[int]] = {"forward": [], "backward": [], "step": [], "after": []}
        for _ in range(STEPS * job["deepspeed"]["gradient_accumulation_steps"]):
            most, loss = live.peak_of(lambda: engine(input_ids=tokens, labels=tokens).loss)
            told["forward"].append(most)
            told["backward"].append(live.peak_of(lambda loss=loss: engine.backward(loss))[0])
            del loss
            told["step"].append(live.peak_of(engine.step)[0])
            told["after"].append(live.now)
    return {**told, "parameters": parameters}


def main() -> None:
    """Measure what the jobs in argv say, in their order."""
    getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False  # else a C++ extension is compiled
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for job in json.loads(sys.argv[1]):
        told = measured(job)
        gc.collect()
        if dist.get_rank() == 0:
            print("MEASURED " + json.dumps(told), flush=True)
    os._exit(0)  # gloo's threads have nothing left to do


if __name__ == "__main__":
    main()
