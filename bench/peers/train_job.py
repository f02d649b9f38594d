"""What the programs that train beside ours have in common: the recipe's model, its data in the run's order, and what they say.

Each is started as one rank (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) with --recipe and --tokens, trains until it is
ended, and prints, on rank 0, first ENGINE and what it really runs on, then STEP and the loss over all ranks.
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))

parser = argparse.ArgumentParser()
parser.add_argument("--recipe", required=True, help="the recipe, JSON")
parser.add_argument("--tokens", required=True, help="tokens.bin as train/main.py prepared it")
parser.add_argument("--default-optimizer", action="store_true", help="torch's AdamW as it is by default, not fused")
args = parser.parse_args()

with open(args.recipe) as f:
    recipe = json.load(f)
micro_batch, accumulation, sequence = recipe["micro_batch"], recipe["gradient_accumulation"], recipe["data"]["sequence_length"]
opt = recipe["optimizer"]
torch.set_num_threads(1)


def build_model():
    torch.manual_seed(recipe["seed"])
    return LlamaForCausalLM(LlamaConfig(**recipe["model"]["config"]))


def build_optimizer(model):
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": opt["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = {} if args.default_optimizer else {"fused": True}
    return torch.optim.AdamW(groups, lr=opt["lr"], betas=tuple(opt["betas"]), **fused)


class Sequences(torch.utils.data.Dataset):
    """The run's sequences, position after position; a DataLoader without shuffling gives what train/main.py trains on."""

    def __init__(self):
        self.tokens = torch.from_file(args.tokens, shared=False, size=os.path.getsize(args.tokens), dtype=torch.uint8)
        self.count = len(self.tokens) // sequence
        self.epoch, self.order = -1, None

    def __len__(self):
        return recipe["steps"] * micro_batch * accumulation * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, position):
        if position // self.count != self.epoch:
            self.epoch = position // self.count
            self.order = torch.randperm(self.count, generator=torch.Generator().manual_seed(recipe["seed"] + self.epoch))
        start = int(self.order[position % self.count]) * sequence
        ids = self.tokens[start : start + sequence].long()
        return {"input_ids": ids, "labels": ids}


def deepspeed_config():
    with open(os.path.join(HERE, "..", "..", "ds_configs", recipe["ds_config"])) as f:
        config = json.load(f)
    config.update(
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=recipe["gradient_clipping"],
        bf16={"enabled": False},
    )
    return config


def deepspeed_on_cpu():
    """accelerate 1.15 has no CPU backend for DeepSpeed: without this, each process is a world of one, or plain DDP runs, silently."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles C++ for minutes
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import state
    from accelerate.utils import DistributedType

    state.PartialState._prepare_backend = lambda self, cpu=False, *rest, **more: ("gloo", DistributedType.MULTI_GPU)


def tell_engine(engine, optimizer):
    """Say what really runs; `optimizer` is torch's own, inside of whatever wraps it."""
    stage = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0
    fused = bool(optimizer.defaults.get("fused"))
    told = f"zero {stage} world {dist.get_world_size()} backend {dist.get_backend()} optimizer {type(optimizer).__name__} fused {fused}"
    if dist.get_rank() == 0:
        print("ENGINE", type(engine).__name__, told, flush=True)


def tell_step(step, total):
    """Say the loss of a step; `total` is the sum of this rank's micro-batches."""
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("STEP", step, "loss", total.item() / (accumulation * dist.get_world_size()), flush=True)
