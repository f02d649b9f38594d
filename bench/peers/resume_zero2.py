"""plain_zero2.py with what a careful person adds so that torchrun's own restart is of use: it goes on from its last checkpoint.

    torchrun --nnodes 2 --nproc_per_node 1 --max-restarts 3 --rdzv_backend c10d --rdzv_endpoint HOST:PORT --rdzv_id ID \\
        resume_zero2.py --recipe recipe.json --tokens DATA/tokens.bin --save-dir OUT
"""
import argparse
import json
import math
import os

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))

parser = argparse.ArgumentParser()
parser.add_argument("--recipe", required=True)
parser.add_argument("--tokens", required=True)
parser.add_argument("--save-dir", required=True)
args = parser.parse_args()

with open(args.recipe) as f:
    recipe = json.load(f)
steps, every = recipe["steps"], recipe["checkpoint"]["every_steps"]
micro_batch, accumulation, sequence = recipe["micro_batch"], recipe["gradient_accumulation"], recipe["data"]["sequence_length"]

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles C++ for minutes
deepspeed.init_distributed(dist_backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(recipe["seed"])
model = LlamaForCausalLM(LlamaConfig(**recipe["model"]["config"]))
opt = recipe["optimizer"]
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": opt["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ],
    lr=opt["lr"],
    betas=tuple(opt["betas"]),
    fused=True,
)
with open(os.path.join(HERE, "..", "..", "ds_configs", "zero2.json")) as f:
    config = json.load(f)
config.update(
    train_micro_batch_size_per_gpu=micro_batch,
    gradient_accumulation_steps=accumulation,
    gradient_clipping=recipe["gradient_clipping"],
    bf16={"enabled": False},
)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
assert type(engine).__name__ == "DeepSpeedEngine" and engine.zero_optimization_stage() == 2
if rank == 0:
    told = (type(engine).__name__, "zero", engine.zero_optimization_stage(), "world", world, "backend", dist.get_backend())
    print("ENGINE", *told, flush=True)

first = 1
if os.path.exists(os.path.join(args.save_dir, "latest")):
    _, client_state = engine.load_checkpoint(args.save_dir)
    first = client_state["step"] + 1

tokens = torch.from_file(args.tokens, shared=False, size=os.path.getsize(args.tokens), dtype=torch.uint8)
count = len(tokens) // sequence
epoch, order = -1, None


def get_batch(step, micro_step):
    global epoch, order
    batch = []
    start_at = (((step - 1) * accumulation + micro_step) * world + rank) * micro_batch
    for position in range(start_at, start_at + micro_batch):
        if position // count != epoch:
            epoch = position // count
            order = torch.randperm(count, generator=torch.Generator().manual_seed(recipe["seed"] + epoch))
        start = int(order[position % count]) * sequence
        batch.append(tokens[start : start + sequence])
    return torch.stack(batch).long()


def get_lr(step):
    peak, warmup = opt["lr"], recipe["schedule"]["warmup_steps"]
    if step <= warmup:
        return peak * step / warmup
    lowest = peak * recipe["schedule"]["min_lr_ratio"]
    progress = (step - warmup) / max(1, steps - warmup)
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


for step in range(first, steps + 1):
    for group in engine.optimizer.param_groups:
        group["lr"] = get_lr(step)
    total = torch.zeros(())
    for micro_step in range(accumulation):
        x = get_batch(step, micro_step)
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    dist.all_reduce(total)
    if rank == 0:
        print("STEP", step, "loss", total.item() / (accumulation * world), flush=True)
    if step % every == 0 or step == steps:
        engine.save_checkpoint(args.save_dir, tag=f"step{step}", client_state={"step": step})

dist.barrier()
dist.destroy_process_group()
