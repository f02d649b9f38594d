"""A plain loop over torch's DistributedDataParallel, as one writes it by hand (see train_job.py)."""
import torch
import torch.distributed as dist
import train_job as job
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(job.build_model(), gradient_as_bucket_view=True)
optimizer = job.build_optimizer(model)
job.tell_engine(model, optimizer)
data, rank, world = job.Sequences(), dist.get_rank(), dist.get_world_size()
for step in range(1, job.recipe["steps"] + 1):
    total = torch.zeros(())
    for micro_step in range(job.accumulation):
        first = (((step - 1) * job.accumulation + micro_step) * world + rank) * job.micro_batch
        ids = torch.stack([data[position]["input_ids"] for position in range(first, first + job.micro_batch)])
        model.require_backward_grad_sync = micro_step == job.accumulation - 1
        loss = model(input_ids=ids, labels=ids).loss
        total += loss.detach()
        (loss / job.accumulation).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), job.recipe["gradient_clipping"])
    optimizer.step()
    optimizer.zero_grad()
    job.tell_step(step, total)
