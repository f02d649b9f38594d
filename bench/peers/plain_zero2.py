"""The job of recipe `tiny` as a competent person would write it by hand: DeepSpeed ZeRO-2, transformers, one file.

For comparison only: plain imports, normal exit. Same model, data, order, optimizer, schedule and ZeRO-2 JSON as train/main.py,
so the losses are equal digit for digit. Started by torchrun, `deepspeed` or `accelerate launch` (any launcher that sets RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT):

    torchrun --nproc_per_node 2 plain_zero2.py --recipe recipe.json --tokens DATA/tokens.bin --save-dir OUT
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
parser.add_argument("--recipe", required=True, help="the recipe, JSON or YAML")
parser.add_argument("--tokens", required=True, help="tokens.bin as train/main.py prepared it")
parser.add_argument("--ds-config", default=os.path.join(HERE, "..", "..", "ds_configs", "zero2.json"))
parser.add_argument("--steps", type=int, default=0)
parser.add_argument("--save-dir", default="", help="save checkpoints here as often as the recipe says; default: never")
parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
args = parser.parse_args()

with open(args.recipe) as f:
    if args.recipe.endswith(".json"):
        recipe = json.load(f)
    else:
        import yaml

        recipe = yaml.safe_load(f)
steps = args.steps or recipe["steps"]
micro_batch, accumulation, sequence = recipe["micro_batch"], recipe["gradient_accumulation"], recipe["data"]["sequence_length"]

local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
    device, backend, bf16 = f"cuda:{local_rank}", "nccl", torch.cuda.is_bf16_supported()
else:
    device, backend, bf16 = "cpu", "gloo", False
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles C++ for minutes
deepspeed.init_distributed(dist_backend=backend)
rank, world = dist.get_rank(), dist.get_world_size()
assert world == int(os.environ["WORLD_SIZE"])

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
    fused=True,  # as transformers' Trainer has it
)
with open(args.ds_config) as f:
    config = json.load(f)
config.update(
    train_micro_batch_size_per_gpu=micro_batch,
    gradient_accumulation_steps=accumulation,
    gradient_clipping=recipe["gradient_clipping"],
    bf16={"enabled": bf16},
)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
assert type(engine).__name__ == "DeepSpeedEngine" and engine.zero_optimization_stage() == 2
if rank == 0:  # the benchmark checks that every launcher ran the same job
    told = (type(engine).__name__, "zero", engine.zero_optimization_stage(), "world", world, "backend", dist.get_backend())
    print("ENGINE", *told, flush=True)

tokens = torch.from_file(args.tokens, shared=False, size=os.path.getsize(args.tokens), dtype=torch.uint8)
count = len(tokens) // sequence
epoch, order = -1, None


def get_batch(step, micro_step):
    global epoch, order
    batch = []
    first = (((step - 1) * accumulation + micro_step) * world + rank) * micro_batch
    for position in range(first, first + micro_batch):
        if position // count != epoch:
            epoch = position // count
            order = torch.randperm(count, generator=torch.Generator().manual_seed(recipe["seed"] + epoch))
        start = int(order[position % count]) * sequence
        batch.append(tokens[start : start + sequence])
    return torch.stack(batch).long().to(device)


def get_lr(step):
    peak, warmup = opt["lr"], recipe["schedule"]["warmup_steps"]
    if step <= warmup:
        return peak * step / warmup
    lowest = peak * recipe["schedule"]["min_lr_ratio"]
    progress = (step - warmup) / max(1, steps - warmup)
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


for step in range(1, steps + 1):
    for group in engine.optimizer.param_groups:
        group["lr"] = get_lr(step)
    total = torch.zeros((), device=device)
    for micro_step in range(accumulation):
        x = get_batch(step, micro_step)
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    dist.all_reduce(total)
    if rank == 0:
        print("STEP", step, "loss", total.item() / (accumulation * world), flush=True)
    if args.save_dir and (step % recipe["checkpoint"]["every_steps"] == 0 or step == steps):
        engine.save_checkpoint(args.save_dir, tag=f"step{step}")

dist.barrier()
dist.destroy_process_group()
