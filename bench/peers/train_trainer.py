"""transformers' Trainer with a DeepSpeed configuration, ZeRO-2 (see train_job.py). Its own default optimizer is the fused AdamW."""
import os
import tempfile

import torch
import torch.distributed as dist
import train_job as job

job.deepspeed_on_cpu()

from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments


class Tell(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        assert trainer.accelerator.num_processes == dist.get_world_size(), trainer.accelerator.state
        inner = trainer.optimizer
        while hasattr(inner, "optimizer"):  # accelerate's around DeepSpeed's around torch's
            inner = inner.optimizer
        job.tell_engine(trainer.model_wrapped, inner)

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in (logs or {}) and state.is_world_process_zero:
            print("STEP", state.global_step, "loss", float(logs["loss"]), flush=True)


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


args = TrainingArguments(
    output_dir=os.path.join(tempfile.gettempdir(), "trainer"),
    per_device_train_batch_size=job.micro_batch,
    gradient_accumulation_steps=job.accumulation,
    max_steps=job.recipe["steps"],
    learning_rate=job.opt["lr"],
    adam_beta1=job.opt["betas"][0],
    adam_beta2=job.opt["betas"][1],
    weight_decay=job.opt["weight_decay"],
    lr_scheduler_type="constant",
    max_grad_norm=job.recipe["gradient_clipping"],
    seed=job.recipe["seed"],
    deepspeed=job.deepspeed_config(),
    ddp_backend="gloo",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = InOrder(model=job.build_model(), args=args, train_dataset=job.Sequences(), callbacks=[Tell()])
trainer.remove_callback(PrinterCallback)
trainer.train()
