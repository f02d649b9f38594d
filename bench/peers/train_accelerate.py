"""A loop with accelerate and its DeepSpeed plugin, ZeRO-2, as its documentation has it (see train_job.py)."""
import torch
import torch.distributed as dist
import train_job as job

job.deepspeed_on_cpu()

from accelerate import Accelerator, DeepSpeedPlugin

plugin = DeepSpeedPlugin(hf_ds_config=job.deepspeed_config(), gradient_accumulation_steps=job.accumulation)
accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=job.accumulation)
model = job.build_model()
inner = job.build_optimizer(model)
loader = torch.utils.data.DataLoader(job.Sequences(), batch_size=job.micro_batch, shuffle=False)
model, optimizer, loader = accelerator.prepare(model, inner, loader)
assert accelerator.num_processes == dist.get_world_size(), accelerator.state
job.tell_engine(model, inner)
batches = iter(loader)
for step in range(1, job.recipe["steps"] + 1):
    total = torch.zeros(())
    for _ in range(job.accumulation):
        with accelerator.accumulate(model):
            loss = model(**next(batches)).loss
            total += loss.detach()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    job.tell_step(step, total)
