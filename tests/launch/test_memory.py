"""Memory: against DeepSpeed's estimators, against what a small engine holds, against transformers' Llama, and by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.memory import (
    COME_AND_GO,
    GIB,
    HOST_PARTS,
    LIVE_ELEMENTS,
    PARTS,
    PREFETCH_ELEMENTS,
    Memory,
    fit,
    largest_micro_batch,
    layer_activation_bytes,
    memory_of,
)
from launch.recipe import ds_config_names, load_recipe, recipe_names
from launch.shape import DECODERS, Convolution, Transformer, shape_of
from launch.site import Site, assume
from launch.training import METHODS, Training, training_of
from r4090c.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "memory.json"
STATES = ("weights", "gradients", "optimizer")
LLAMA_7B = Transformer(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000, tied=False)
LLAMA_13B = Transformer(layers=40, hidden=5120, intermediate=13824, heads=40, kv_heads=40, head_dim=128, vocab=32000, tied=False)
ALL = tuple(LLAMA_7B.linears)


def of_parameters(parameters: float) -> Convolution:
    """Return a shape that has so many parameters: model states depend on nothing else."""
    return Convolution(50, 224, int(parameters), 8e9, 22e6)


def training(**changed: Any) -> Training:
    told: dict[str, Any] = {
        "name": "test",
        "shape": LLAMA_7B,
        "method": "full",
        "lora_rank": 16,
        "lora_targets": ALL,
        "stage": 2,
        "offload_optimizer": False,
        "offload_parameters": False,
        "micro_batch": 1,
        "accumulation": 1,
        "sequence_length": 2048,
        "precision": "bf16",
        "optimizer": "adamw",
        "activation_checkpointing": True,
        "loss_chunk_tokens": 0,
        "reduce_bucket_elements": 50_000_000,
        "allgather_bucket_elements": 50_000_000,
    }
    return Training(**{**told, **changed})


def states_bytes(memory: Memory) -> float:
    return sum(memory.per_gpu_gib[part] for part in STATES) * GIB


def states_of_host_bytes(memory: Memory) -> float:
    return sum(memory.host_gib[part] for part in STATES) * GIB


# ---- DeepSpeed's estimators


@pytest.mark.train
def test_model_states_are_those_of_deepspeeds_estimators() -> None:
    import deepspeed  # noqa: F401
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage2

    for shape in (LLAMA_7B, LLAMA_13B, replace(LLAMA_7B, vocab=128_256, layers=3), replace(LLAMA_7B, tied=True, vocab=1000)):
        count = shape.parameters
        largest = max(shape.vocab * shape.hidden, shape.hidden * shape.intermediate)
        for nodes, gpus in ((1, 1), (1, 8), (2, 8), (4, 8), (16, 8), (3, 5)):
            for offload in (False, True):
                cpu, gpu = stage2(count, gpus, nodes, cpu_offload=offload, additional_buffer_factor=1.0)
                memory = memory_of(training(shape=shape, offload_optimizer=offload), nodes * gpus, gpus)
                assert states_bytes(memory) == pytest.approx(gpu, abs=2), (nodes, gpus, offload)
                if offload and nodes == 1 and gpus <= 4:  # above that the estimator counts all ranks' copies while it loads
                    assert states_of_host_bytes(memory) == pytest.approx(cpu, abs=2)
            for offload, parameters in ((False, False), (True, False), (True, True)):
                cpu, gpu, _ = stage3(count, largest, gpus, nodes, offload, parameters, additional_buffer_factor=1.0)
                one = training(shape=shape, stage=3, offload_optimizer=offload, offload_parameters=parameters)
                memory = memory_of(one, nodes * gpus, gpus)
                assert states_bytes(memory) == pytest.approx(gpu, abs=2), (nodes, gpus, offload, parameters)
                if offload:
                    assert states_of_host_bytes(memory) == pytest.approx(cpu, abs=2)


@pytest.mark.parametrize(
    ("parameters", "world", "gbyte"),
    [(7e9, 8, 29.8), (7e9, 16, 21.9), (7e9, 32, 17.9), (13e9, 8, 55), (13e9, 16, 41), (13e9, 32, 33), (3e9, 8, 12.8)],
)
def test_published_figures_of_zero2(parameters: float, world: int, gbyte: float) -> None:
    memory = memory_of(training(shape=of_parameters(parameters)), world, 8)
    assert states_bytes(memory) / 1e9 == pytest.approx(gbyte, abs=0.51 if gbyte == round(gbyte) else 0.06)


# ---- what an engine really holds

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "use_cache": False,
}
SMALL_SHAPE = Transformer(layers=4, hidden=256, intermediate=704, heads=4, kv_heads=4, head_dim=64, vocab=512, tied=False)
TOKENS = 8


def free_port() -> int:
    """Return a TCP port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configuration(one: Training) -> dict[str, Any]:
    """Return the DeepSpeed configuration of `one`."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": one.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": one.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": one.stage,
            "contiguous_gradients": True,
            "overlap_comm": one.overlap_comm,
            "reduce_scatter": True,
            "reduce_bucket_size": one.reduce_bucket_elements,
            "allgather_bucket_size": one.allgather_bucket_elements,
            "stage3_param_persistence_threshold": 0,  # else even the small Llama's matrices stay whole on every rank
        },
    }


def measured(trainings: Sequence[Training], ranks: int) -> list[dict[str, Any]]:
    """Return what two steps of a small Llama under each of `trainings` hold at most, in bytes; see memory_engine.py."""
    jobs = json.dumps([{"config": SMALL, "deepspeed": configuration(one), "tokens": TOKENS} for one in trainings])
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--master-addr=127.0.0.1",
    ]
    done = subprocess.run(
        [*torchrun, f"--master-port={free_port()}", "-m", "tests.launch.memory_engine", jobs],
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    assert len(lines) == len(trainings), done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line.removeprefix("MEASURED ")) for line in lines]


@pytest.mark.train
@pytest.mark.long
def test_what_deepspeed_engines_hold() -> None:
    """Two gloo ranks: what stays after a step, the backward pass's peak and the step's peak are what the parts say."""
    kinds = [(2, "bf16", 2), (2, "bf16", 1), (2, "fp32", 2), (1, "bf16", 2), (0, "bf16", 1), (3, "bf16", 1), (3, "fp32", 1)]
    trainings = [
        training(
            shape=SMALL_SHAPE,
            stage=stage,
            precision=precision,
            accumulation=accumulation,
            sequence_length=TOKENS,
            activation_checkpointing=False,
            reduce_bucket_elements=1_000_000,
            allgather_bucket_elements=1_000_000,
        )
        for stage, precision, accumulation in kinds
    ]
    for kind, one, told in zip(kinds, trainings, measured(trainings, ranks=2), strict=True):
        assert told["parameters"] == SMALL_SHAPE.parameters
        holds_what_the_parts_say(one, told, f"stage {kind[0]}, {kind[1]}, accumulation {kind[2]}")


def holds_what_the_parts_say(one: Training, told: dict[str, Any], kind: str) -> None:
    """Assert that two steps of an engine held what the parts of `one` say; `kind` stands in the message."""
    stage, accumulation = one.stage, one.accumulation
    count, width = SMALL_SHAPE.parameters, one.parameter_bytes
    parts = {part: gib * GIB for part, gib in memory_of(one, 2, 2, on_gpu=False).per_gpu_gib.items()}
    lasting = parts["weights"] + parts["optimizer"]
    if stage == 3:
        # The largest module is counted as gathered; between steps it is not, but gradients and bucket stay.
        lasting += -width * 512 * 256 + width * count / 2 + width * 1_000_000
    assert told["after"][-1] == pytest.approx(lasting, rel=0.02), kind
    # The step: everything but the process and the margin, in full.
    peak = max(told["forward"][accumulation:] + told["backward"][accumulation:] + told["step"][accumulation:])
    predicted = lasting_parts(parts) + sum(parts[part] for part in COME_AND_GO)
    assert peak <= predicted * 1.01, kind
    if stage in (1, 2):
        assert peak == pytest.approx(predicted, rel=0.03), kind
        # The backward pass of the last micro-step, by hand: gradients (twice when they are summed), bucket, largest, activations.
        sums = 2 if stage == 2 and accumulation > 1 else 1
        gradients = sums * width * count / (2 if stage == 2 else 1)
        by_hand = lasting + gradients + parts["buckets"] + parts["activations"] + parts["logits"]
        assert told["backward"][-1] == pytest.approx(by_hand, rel=0.05), kind
    else:
        assert peak == pytest.approx(predicted, rel=0.12), kind


def lasting_parts(parts: dict[str, float]) -> float:
    return parts["weights"] + parts["optimizer"]


# ---- transformers' Llama


@pytest.mark.train
def test_parameters_are_transformers_own() -> None:
    """On tensors without content: every language recipe, and small models of the other families."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    models = [load_recipe(name)["model"] for name in recipe_names()]
    small = {**SMALL, "num_key_value_heads": 2, "head_dim": 48}
    models += [{"family": family, "config": small} for family in DECODERS]
    models += [{"family": "llama", "config": {**SMALL, "tie_word_embeddings": True}}]
    for model in models:
        if model["family"] == "resnet":
            continue
        with torch.device("meta"):
            own = AutoModelForCausalLM.from_config(AutoConfig.for_model(model["family"], **model["config"]))
        assert shape_of(model).parameters == sum(one.numel() for one in own.parameters()), model


def kept_by(family: str, config: dict[str, Any], precision: str, adapters: int = 0) -> float:
    """Return the bytes a layer keeps for a token, by hooks on saved tensors: the difference of 4 and 2 layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sequences, length = 2, 128
    sizes = {}
    for layers in (2, 4):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**config, "num_hidden_layers": layers}))
        if adapters:
            adapt(model, adapters)
        model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, Any] = {}

        def keep(tensor: Any, own: set[int] = own, kept: dict[int, Any] = kept) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage  # held, so that no later one gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model.model(input_ids=torch.randint(0, config["vocab_size"], (sequences, length))).last_hidden_state
        sizes[layers] = sum(storage.nbytes() for storage in kept.values())
        del out
    return float(sizes[4] - sizes[2]) / 2 / (sequences * length)


def adapt(model: Any, rank: int) -> None:
    """Freeze `model` and put an adapter of `rank` with dropout beside each matrix of its layers, as peft does."""
    import torch

    class Adapted(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base, self.dropout = base, torch.nn.Dropout(0.05)
            self.down = torch.nn.Linear(base.in_features, rank, bias=False)
            self.up = torch.nn.Linear(rank, base.out_features, bias=False)

        def forward(self, tokens: Any) -> Any:
            return self.base(tokens) + self.up(self.down(self.dropout(tokens))) * 2.0

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.enable_input_require_grads()
    for layer in model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, base in list(owner.named_children()):
                if isinstance(base, torch.nn.Linear):
                    setattr(owner, name, Adapted(base))


@pytest.mark.train
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_a_layer_keeps(precision: str, kv_heads: int, method: str) -> None:
    shape = replace(SMALL_SHAPE, kv_heads=kv_heads)
    one = training(shape=shape, precision=precision, method=method, lora_rank=8)
    kept = kept_by("llama", {**SMALL, "num_key_value_heads": kv_heads}, precision, 8 if method == "lora" else 0)
    if method == "lora":  # dropout on a CPU keeps its mask in the tensor's own type, on a GPU in bytes
        kept -= (one.parameter_bytes - 1) * sum(inputs for inputs, _ in shape.linears.values())
    assert kept == pytest.approx(layer_activation_bytes(one), rel=0.005)


@pytest.mark.train
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_what_a_layer_of_another_family_keeps(family: str) -> None:
    config = {**SMALL, "num_key_value_heads": 2, "head_dim": 64}
    one = training(shape=shape_of({"family": family, "config": config}))
    assert kept_by(family, config, "bf16") == pytest.approx(layer_activation_bytes(one), rel=0.01)


@pytest.mark.train
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(
    ("checkpointing", "vocab", "sequences"),
    [(False, 32000, 1), (True, 32000, 1), (False, 256, 1), (True, 256, 4), (True, 128_000, 2)],
)
def test_the_peak_of_full_size_layers(checkpointing: bool, vocab: int, sequences: int) -> None:
    """Four layers of a Llama 2 7B, bf16, on tensors without content: the most that one micro-step holds beside the weights."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.launch.memory_engine import Live

    shape = replace(LLAMA_7B, layers=4, vocab=vocab)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=4,
        num_attention_heads=32,
        use_cache=False,
        max_position_embeddings=4096,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config).train()
        finally:
            torch.set_default_dtype(torch.float32)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        tokens = torch.zeros((sequences, 2048), dtype=torch.long)
        live = Live()
        for tensor in [*model.parameters(), *model.buffers()]:
            live.sizes[tensor.untyped_storage()._cdata] = 0
        for parameter in model.parameters():  # the share of them that ZeRO keeps is another part
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        with live:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
    one = training(shape=shape, activation_checkpointing=checkpointing, micro_batch=sequences)
    parts = memory_of(replace(one, offload_optimizer=True), 8, 8).per_gpu_gib  # offloaded: no step on the card
    predicted = parts["activations"] + parts["logits"] + parts["workspace"]
    assert live.most / GIB <= predicted * 1.01
    assert live.most / GIB == pytest.approx(predicted, rel=0.06)


# ---- by hand


def test_qlora_by_hand() -> None:
    """13B: 40 layers of 4 × 5120² and 3 × 5120 × 13824 matrices in 4.127 bits, 328.1e6 others in 16."""
    matrices = 40 * (4 * 5120**2 + 3 * 5120 * 13824)
    others = 2 * 32000 * 5120 + 81 * 5120
    assert LLAMA_13B.parameters == matrices + others == 13_015_864_320
    memory = memory_of(training(shape=LLAMA_13B, method="qlora"), 16, 8)
    assert memory.per_gpu_gib["weights"] * GIB == pytest.approx(matrices * 4.126953125 / 8 + others * 2)
    assert memory.per_gpu_gib["weights"] * GIB / 13_015_864_320 == pytest.approx(0.553, abs=0.001)
    adapters = 40 * 16 * (4 * (5120 + 5120) + 3 * (5120 + 13824))
    assert memory.per_gpu_gib["adapters"] * GIB == adapters * 2
    assert memory.per_gpu_gib["gradients"] * GIB == pytest.approx(adapters * 6 / 16)
    assert memory.per_gpu_gib["optimizer"] * GIB == pytest.approx(adapters * 12 / 16)


def test_int8_by_hand() -> None:
    rows = 40 * (4 * 5120 + 2 * 13824 + 5120)
    matrices = 40 * (4 * 5120**2 + 3 * 5120 * 13824)
    memory = memory_of(training(shape=LLAMA_13B, method="int8"), 16, 8)
    assert memory.per_gpu_gib["weights"] * GIB == pytest.approx(matrices + 4 * rows + 2 * (13_015_864_320 - matrices))


def test_eight_bit_optimizer_by_hand() -> None:
    """Two moments of a byte, each with a 32-bit scale for 256; the FP32 masters stay."""
    memory = memory_of(training(shape=of_parameters(1e9), optimizer="adamw8bit"), 8, 8)
    assert memory.per_gpu_gib["optimizer"] * GIB == pytest.approx(1e9 * (4 + 2 + 2 * 4 / 256) / 8)


def test_activations_and_logits_by_hand() -> None:
    """7B, 2 × 2048 tokens: with checkpointing the 32 layers' inputs; a layer keeps 20 h + 4 kv + 8 i bytes a token."""
    layer = 24 * 4096 + 8 * 11008 + 8 + 4 * 32
    tokens = 4096
    kept = memory_of(training(micro_batch=2, activation_checkpointing=False), 8, 8).per_gpu_gib
    assert kept["activations"] * GIB == tokens * (32 * layer + 12 * 4096)
    assert kept["logits"] * GIB == tokens * 32000 * 12
    again = memory_of(training(micro_batch=2, offload_optimizer=True), 8, 8).per_gpu_gib
    assert again["activations"] * GIB == tokens * 4096 * (2 * 32 + 12)
    assert again["workspace"] == 0  # a layer computed again takes less than the logits, which are gone by then
    chunked = memory_of(training(micro_batch=2, loss_chunk_tokens=1024, offload_optimizer=True), 8, 8).per_gpu_gib
    loss = 1024 * 32000 * 12 + tokens * 4096 * 2 + 32000 * 4096 * 2
    assert chunked["logits"] * GIB == loss
    assert chunked["workspace"] * GIB == pytest.approx(tokens * (layer + 6 * 11008) - loss - tokens * 12 * 4096)


def test_adapters_need_no_inputs_of_frozen_matrices() -> None:
    """LoRA of q_proj only keeps less of a layer than full training; of all matrices, behind a dropout each, more."""
    full = layer_activation_bytes(training())
    few = layer_activation_bytes(training(method="lora", lora_targets=("q_proj",)))
    assert few == 4 * 4096 * 2 + 8 + 2 * 4 * 4096 + 4 * 32 + 6 * 11008 + 3 * 4096 + 2 * 16
    assert few < full < layer_activation_bytes(training(method="lora"))


def test_offload_by_hand() -> None:
    """7B on 2 × 8 cards: 18 bytes a parameter, among nodes; blocks of pinned memory are rounded up to powers of two."""
    count = LLAMA_7B.parameters
    memory = memory_of(training(offload_optimizer=True), 16, 8)
    host = memory.host_gib
    assert (host["optimizer"] + host["gradients"] + host["buckets"]) * GIB == pytest.approx(18 * count / 2)
    share = count / 16  # 421e6: masters and gradients 1.68e9 -> 2^31 bytes each, 16-bit parameters 0.84e9 -> 2^30
    assert host["margin"] * GIB == pytest.approx(8 * (2 * 2**31 + 2**30 - 10 * share))
    assert memory.per_gpu_gib["optimizer"] == memory.per_gpu_gib["gradients"] == 0


def test_the_host_memory_of_a_full_training() -> None:
    """Each rank builds the model in 16 bits before it goes to its card; adapters' frozen weights come from mapped files."""
    memory = memory_of(training(), 8, 8)
    assert memory.host_gib["loading"] * GIB == pytest.approx(8 * 2 * LLAMA_7B.parameters)
    assert memory_of(training(method="lora"), 8, 8).host_gib["loading"] == 0
    assert memory.host_gib["processes"] == 8 * 2.5


def test_quantized_matrices_are_not_divided_by_stage_3() -> None:
    by_stage = [memory_of(training(method="qlora", stage=stage), 16, 8).per_gpu_gib["weights"] for stage in (2, 3)]
    assert by_stage[0] == by_stage[1]
    full = [memory_of(training(method="lora", stage=stage), 16, 8).per_gpu_gib["weights"] for stage in (2, 3)]
    assert full[1] < full[0] / 8


def test_zero3_configurations_say_what_is_counted() -> None:
    for name in ("zero3.json", "zero3_offload.json"):
        zero = json.loads((ROOT / "ds_configs" / name).read_text())["zero_optimization"]
        assert zero["stage3_max_live_parameters"] == LIVE_ELEMENTS
        assert zero["stage3_prefetch_bucket_size"] == PREFETCH_ELEMENTS
        assert "data_types" not in json.loads((ROOT / "ds_configs" / name).read_text())


# ---- the verdict


def shipped(name: str, *sets: str, site: Site) -> Training:
    recipe = load_recipe(name, sets)
    config = json.loads((ROOT / "ds_configs" / recipe["ds_config"]).read_text())
    return training_of(recipe, config, on_gpu=site.card is not None)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_13b_in_16_bits_is_refused_with_the_arithmetic(method: str) -> None:
    site = assume("2x8x4090@100gbe-roce")
    verdict = fit(shipped("llama13b", f"method={method}", site=site), site)
    assert not verdict.fits
    assert verdict.reasons[0] == (
        "weights: 13.02e9 parameters × 2 bytes = 26.0 GB (24.2 GiB) on every GPU under ZeRO-2, of 23.5 GiB the card has"
    )
    assert "GiB too much" in verdict.reasons[-1]
    assert largest_micro_batch(shipped("llama13b", f"method={method}", site=site), site) is None


def test_13b_in_4_bits_fits() -> None:
    site = assume("2x8x4090@100gbe-roce")
    verdict = fit(shipped("llama13b", site=site), site)
    assert verdict.fits and not verdict.reasons
    assert verdict.room_gib == pytest.approx(23.53, abs=0.01)
    assert verdict.host_room_gib is None


def test_host_memory_refuses_too() -> None:
    one = training(shape=LLAMA_13B, stage=3, offload_optimizer=True, offload_parameters=True)
    small = fit(one, assume("2x8x4090@100gbe-roce,ram=128gib"))
    assert not small.fits and small.memory.total_gib < 23
    assert small.reasons[0].startswith("host memory, optimizer: 6.51e9 FP32 master weights of 8 of 16 ranks × 4 bytes")
    assert small.reasons[-1].endswith("of host memory a node, and there are 121.6 GiB to take")
    assert fit(one, assume("2x8x4090@100gbe-roce,ram=512gib")).fits


def test_ranks_on_cpus_share_their_nodes_memory() -> None:
    site = assume("2x2xcpu@10gbe,ram=16gib")
    one = shipped("tiny", site=site)
    verdict = fit(one, site)
    assert verdict.fits and verdict.room_gib == pytest.approx(0.95 * 16 / 2)
    memory = verdict.memory
    assert memory.per_gpu_gib["context"] == 0.35
    assert memory.per_gpu_gib["weights"] * GIB == 4 * one.shape.parameters  # FP32
    assert memory.host_total_gib == pytest.approx(2 * memory.total_gib)
    assert not fit(one, assume("2x2xcpu@10gbe,ram=0gib")).fits
    offloaded = memory_of(replace(one, offload_optimizer=True), 4, 2, on_gpu=False)
    assert offloaded == memory  # to the same memory


def test_a_cpu_node_of_unknown_memory() -> None:
    site = assume("2x2xcpu@10gbe")
    verdict = fit(shipped("tiny", site=site), site)
    assert (verdict.room_gib, verdict.fits) == (None, True)
    assert largest_micro_batch(shipped("tiny", site=site), site) is None


def test_arithmetic_tells_every_part_there_is() -> None:
    memory = memory_of(training(method="qlora"), 16, 8)
    assert tuple(memory.per_gpu_gib) == PARTS and tuple(memory.host_gib) == HOST_PARTS
    assert set(memory.arithmetic) == {part for part, gib in memory.per_gpu_gib.items() if gib}
    assert memory.arithmetic["weights"] == (
        "6.48e9 parameters of the layers' matrices × 0.5159 bytes + 262.4e6 other parameters × 2 bytes = 3.87 GB"
    )
    assert memory.arithmetic["context"] == "0.54 GB for CUDA, torch's kernels and cuBLAS + 0.43 GB for NCCL = 0.97 GB"


# ---- properties

SHAPES = st.one_of(
    st.builds(
        Transformer,
        layers=st.integers(1, 80),
        hidden=st.sampled_from([256, 2048, 8192]),
        intermediate=st.sampled_from([704, 5632, 28672]),
        heads=st.just(32),
        kv_heads=st.sampled_from([1, 4, 32]),
        head_dim=st.sampled_from([64, 128]),
        vocab=st.sampled_from([256, 32000, 151_936]),
        tied=st.booleans(),
        qkv_bias=st.booleans(),
        qk_norm=st.booleans(),
    ),
    st.floats(1e6, 1e11).map(of_parameters),
)


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    shape = draw(SHAPES)
    language = isinstance(shape, Transformer)
    return training(
        shape=shape,
        method=draw(st.sampled_from(METHODS)) if language else "full",
        lora_rank=draw(st.integers(1, 256)),
        lora_targets=tuple(draw(st.lists(st.sampled_from(ALL), min_size=1, unique=True))),
        stage=draw(st.integers(0, 3)),
        offload_optimizer=draw(st.booleans()),
        offload_parameters=draw(st.booleans()),
        micro_batch=draw(st.integers(1, 64)),
        accumulation=draw(st.integers(1, 4)),
        sequence_length=draw(st.integers(1, 8192)) if language else 1,
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        optimizer=draw(st.sampled_from(["adamw", "adamw8bit"])),
        activation_checkpointing=draw(st.booleans()),
        loss_chunk_tokens=draw(st.sampled_from([0, 1, 1024, 100_000])),
        reduce_bucket_elements=draw(st.sampled_from([1000, 50_000_000, 500_000_000])),
        overlap_comm=draw(st.booleans()),
    )


SITES = st.sampled_from(["1x1x4090", "1x8x4090", "2x8x4090@10gbe", "4x4x4090@25gbe,ram=256gib", "2x2xcpu@10gbe,ram=64gib"]).map(
    assume
)
SLACK = 1e-9


@settings(deadline=None)
@given(trainings(), st.integers(1, 64), st.integers(1, 8192), st.booleans())
def test_more_work_never_takes_less_memory(one: Training, sequences: int, tokens: int, on_gpu: bool) -> None:
    now = memory_of(one, 16, 8, on_gpu=on_gpu)
    more = memory_of(replace(one, micro_batch=one.micro_batch + sequences), 16, 8, on_gpu=on_gpu)
    assert now.total_gib <= more.total_gib + SLACK
    longer = memory_of(replace(one, sequence_length=one.sequence_length + tokens), 16, 8, on_gpu=on_gpu)
    assert now.total_gib <= longer.total_gib + SLACK


@settings(deadline=None)
@given(trainings(), st.integers(2, 64), st.integers(1, 64), st.booleans())
def test_more_ranks_never_take_more_of_each(one: Training, world: int, more: int, on_gpu: bool) -> None:
    few, many = (memory_of(one, ranks, 2, on_gpu=on_gpu) for ranks in (world, world + more))
    assert all(many.per_gpu_gib[part] <= few.per_gpu_gib[part] + SLACK for part in STATES)
    assert many.total_gib <= few.total_gib + SLACK
    if one.stage >= 1 and not one.offload_optimizer:
        assert many.per_gpu_gib["optimizer"] < few.per_gpu_gib["optimizer"]


@settings(deadline=None)
@given(trainings())
def test_offload_never_raises_what_the_gpu_holds(one: Training) -> None:
    stays = replace(one, offload_optimizer=False, offload_parameters=False)
    here = memory_of(stays, 16, 8)
    gone = memory_of(replace(one, offload_optimizer=True), 16, 8)
    buffer = gone.per_gpu_gib["buckets"] - here.per_gpu_gib["buckets"]
    assert gone.total_gib <= here.total_gib + 1.05 * buffer + SLACK
    assert gone.per_gpu_gib["optimizer"] + gone.per_gpu_gib["gradients"] <= sum(
        here.per_gpu_gib[part] for part in ("optimizer", "gradients")
    )


@settings(deadline=None)
@given(trainings(), SITES)
def test_fits_means_the_total_has_room(one: Training, site: Site) -> None:
    verdict = fit(one, site)
    assert verdict.room_gib is not None
    has_host = site.card is None or verdict.host_room_gib is None or verdict.memory.host_total_gib <= verdict.host_room_gib
    assert verdict.fits == (verdict.memory.total_gib <= verdict.room_gib and has_host)
    assert verdict.fits == (not verdict.reasons)
    assert min(verdict.memory.per_gpu_gib.values()) >= 0
    assert all(gib >= 0 for gib in verdict.memory.host_gib.values())


@settings(deadline=None)
@given(trainings(), SITES)
def test_the_largest_micro_batch_fits_and_the_next_does_not(one: Training, site: Site) -> None:
    largest = largest_micro_batch(one, site)
    if largest is None:
        assert not fit(replace(one, micro_batch=1), site).fits
    else:
        assert fit(replace(one, micro_batch=largest), site).fits
        assert not fit(replace(one, micro_batch=largest + 1), site).fits


# ---- every shipped recipe


def table() -> dict[str, dict[str, Any]]:
    """Return recipe, method and DeepSpeed configuration -> GiB by part on 2 × 8 RTX 4090, rounded for a reader."""
    return dict(_rows(assume("2x8x4090@100gbe-roce")))


def _rows(site: Site) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, method, config in product(recipe_names(), METHODS, ds_config_names()):
        sets = [f"ds_config={config}", *([f"method={method}"] if "method" in load_recipe(name) else [])]
        try:
            one = shipped(name, *sets, site=site)
        except UsageError:
            continue  # adapters beside a ResNet
        if one.method != method:
            continue  # a recipe without a choice
        verdict = fit(one, site)
        yield (
            f"{name} {method} {config.removesuffix('.json')}",
            {
                "fits": verdict.fits,
                "largest_micro_batch": largest_micro_batch(one, site),
                "total_gib": round(verdict.memory.total_gib, 2),
                "host_total_gib": round(verdict.memory.host_total_gib, 1),
                "per_gpu_gib": {part: round(gib, 2) for part, gib in verdict.memory.per_gpu_gib.items() if round(gib, 2)},
            },
        )


def test_every_shipped_recipe() -> None:
    """Golden: the memory of all recipes; `python -m tests.launch.test_memory` writes it anew."""
    assert table() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(table(), indent=1) + "\n")
