"""Memory of a GPU (or of a CPU rank) and of a node, part by part with its arithmetic, and what therefore fits. Pure.

Every part is a few terms "amount × bytes / ranks", so that a person can work each out again. The sources are DeepSpeed 0.19
(its code, its estimators), transformers' Llama with fused attention, bitsandbytes, and Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198). tests/launch/test_memory.py holds the parts against
DeepSpeed's own estimators, against what a small engine really allocates, and against what transformers' Llama keeps at full size.

What does not exist at the same time is not added twice: the workspace of a layer's backward pass, and of the optimizer's step,
counts as far as it exceeds the logits, or the whole backward pass, that are gone by then. One thing is added though it cannot
coincide: the FP32 gradients of the step, because DeepSpeed's estimators count them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from launch.shape import Transformer
from launch.site import Site
from launch.training import Training

PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buckets", "workspace", "context", "margin")
HOST_PARTS = ("processes", "weights", "gradients", "optimizer", "buckets", "loading", "margin")
COME_AND_GO = ("gradients", "activations", "logits", "buckets", "workspace")
GIB = 2**30

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""A parameter in nf4 with double quantization: 4 bits, for each 64 a scale in 8 bits, for each 256 of those one in FP32
(QLoRA, arXiv 2305.14314, section 3: 0.127 bit a parameter for the scales). In all 0.516 of a byte; of a whole 13B model 0.55 on
average, since embedding and head keep 16 bits."""
INT8_BYTES = 1
INT8_SCALE_BYTES = 4
"""LLM.int8 (arXiv 2208.07339): 8 bits an element and an FP32 scale for each row of the matrix (bitsandbytes' SCB)."""
MASTER_BYTES = 4
ADAM_BYTES = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256)}
"""Adam's two moments: FP32, or 8 bits with an FP32 scale for each 256 (bitsandbytes' block-wise optimizers)."""
CONVOLUTION_LARGEST = 512 * 512 * 3 * 3
"""The largest matrix of every ResNet of torchvision: a 3 × 3 convolution of its last stage."""
CONVOLUTION_FIRST_OUTPUT = 64 * (224 // 2) ** 2
"""Elements of the first convolution's output for an image of 224 × 224: a ResNet's largest tensor."""
FLAT_COPY_ELEMENTS = 500_000_000
"""DeepSpeed without ZeRO all-reduces flat copies of so many gradients (engine.py, MEMORY_OPT_ALLREDUCE_SIZE)."""
PREFETCH_ELEMENTS = 50_000_000
LIVE_ELEMENTS = 300_000_000
"""ZeRO-3: fetched ahead (stage3_prefetch_bucket_size), kept for reuse (stage3_max_live_parameters), as our ds_configs say."""
STEP_SUBGROUP_ELEMENTS = 1_000_000_000
"""ZeRO-3 takes its step in groups of so many elements (sub_group_size)."""
LOGITS_BYTES = 12
"""Per token and word of the vocabulary when the loss goes backward: log-softmax, its gradient and that of the FP32 logits, 4
bytes each. Measured with transformers 5.24, 2026-11-30; 10 in the forward pass."""
BACKWARD_TENSORS = 3
"""Gradients as wide as the MLP that live at once in a layer's backward pass: 1 to 3. Measured, transformers 5.24, 2026-11-30."""
CUDA_CONTEXT_GIB = 0.5
"""est.: the CUDA context with torch's kernels takes 0.3 to 0.45 GiB on Ada; cuBLAS and cuBLASLt keep 10 to 40 MiB to work in."""
NCCL_GIB = 0.4
"""est.: NCCL's 8 to 16 channels with some 10 MiB a direction, and DeepSpeed's second communicator."""
CUDNN_GIB = 0.5
"""est.: cuDNN's workspace for the convolution algorithms that torch takes by default."""
CPU_PROCESS_GIB = 0.35
"""A rank's process with torch 2.13, DeepSpeed 0.19.8 and transformers 5.24, joined over gloo. Measured: 354 MiB, 2026-11-30."""
CUDA_PROCESS_GIB = 2.5
"""est.: host memory of a rank with CUDA's libraries, NCCL's shared memory and two workers that read data."""
FRAGMENTATION = 0.05
"""est.: of what comes and goes, the share that torch's caching allocator holds in blocks of a wrong size."""
HOST_SHARE = 0.95
"""est.: of a node's available memory, what ranks may take: the rest is for the agent, logs and files being written."""


class Term(NamedTuple):
    """One product: `amount` of `what`, `size` bytes each, divided among `among` ranks.

    A size as such, no product, has its words in `known` (made only for a reader: searches work out thousands of terms).
    """

    what: str
    amount: float
    size: float
    among: int = 1
    known: Callable[[], str] | None = None

    def __str__(self) -> str:
        if self.known is not None:
            return f"{_gigabytes(self.size)} {self.known()}"
        each = f"{self.size:,.0f}" if self.size >= 100 else f"{self.size:.4g}"
        shared = f" / {self.among} ranks" if self.among > 1 else ""
        return f"{_amount(self.amount)} {self.what} × {each} {'byte' if self.size == 1 else 'bytes'}{shared}"


Terms = dict[str, list[Term]]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank takes of its GPU (of its node's memory, when it runs on a CPU), and what a node takes of its own memory.

    GiB by part, in the order of PARTS. `arithmetic`: part -> how a rank's figure comes about; `host_arithmetic` likewise.
    """

    per_gpu_gib: Mapping[str, float]
    host_gib: Mapping[str, float]
    arithmetic: Mapping[str, str]
    host_arithmetic: Mapping[str, str]

    @property
    def total_gib(self) -> float:
        """GiB of one rank."""
        return sum(self.per_gpu_gib.values())

    @property
    def host_total_gib(self) -> float:
        """GiB of one node's host memory."""
        return sum(self.host_gib.values())


@dataclass(frozen=True, slots=True)
class Fit:
    """The verdict. `room_gib`: of one rank, None = nobody told a CPU node's memory. `reasons`: why it does not fit."""

    memory: Memory
    room_gib: float | None
    host_room_gib: float | None
    fits: bool
    reasons: tuple[str, ...]


def memory_of(training: Training, world: int, ranks_per_node: int, *, on_gpu: bool = True) -> Memory:
    """Return what each of `world` ranks, `ranks_per_node` on a node, needs for `training`."""
    rank = _rank_terms(training, world, on_gpu)
    host = _host_terms(training, world, ranks_per_node, rank, on_gpu)
    return Memory(
        per_gpu_gib={part: _sum(terms) / GIB for part, terms in rank.items()},
        host_gib={part: _sum(terms) / GIB for part, terms in host.items()},
        arithmetic={part: _told(terms) for part, terms in rank.items() if terms},
        host_arithmetic={part: _told(terms) for part, terms in host.items() if terms},
    )


def fit(training: Training, site: Site) -> Fit:
    """Return whether `training` fits `site`, and if not, the arithmetic of what is too large.

    A card offers what torch tells (23.5 GiB of an RTX 4090), a node HOST_SHARE of its available memory. Host memory that
    nobody told refuses nothing.
    """
    on_gpu = site.card is not None
    memory = memory_of(training, site.world, site.ranks_per_node, on_gpu=on_gpu)
    room, host_room = _rooms(site)
    reasons: list[str] = []
    if room is not None and memory.total_gib > room:
        reasons += [_why(part, memory, training, site) for part in _culprits(memory.per_gpu_gib, room)]
        has = f"GPU, and the card has {room:.1f} GiB" if on_gpu else f"rank, and each may take {room:.1f} GiB"
        reasons.append(f"in all {memory.total_gib:.1f} GiB a {has}: {memory.total_gib - room:.1f} GiB too much")
    if on_gpu and host_room is not None and memory.host_total_gib > host_room:
        for part in _culprits(memory.host_gib, host_room):
            reasons.append(f"host memory, {part}: {memory.host_arithmetic[part]} ({memory.host_gib[part]:.1f} GiB) on every node")
        reasons.append(f"in all {memory.host_total_gib:.1f} GiB of host memory a node, and there are {host_room:.1f} GiB to take")
    return Fit(memory, room, host_room, not reasons, tuple(reasons))


def largest_micro_batch(training: Training, site: Site) -> int | None:
    """Return the largest micro-batch that fits `site`; None when not even 1 does, or when the room is not known.

    Every part grows with the micro-batch or stays, so halving the interval finds it exactly.
    """
    room, host_room = _rooms(site)
    if room is None or not _fits(replace(training, micro_batch=1), site, room, host_room):
        return None
    fitting, too_large = 1, 2
    while _fits(replace(training, micro_batch=too_large), site, room, host_room):
        fitting, too_large = too_large, 2 * too_large
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if _fits(replace(training, micro_batch=middle), site, room, host_room):
            fitting = middle
        else:
            too_large = middle
    return fitting


def _fits(training: Training, site: Site, room_gib: float, host_room_gib: float | None) -> bool:
    """Say what `fit` says, without its words."""
    on_gpu = site.card is not None
    rank = _rank_terms(training, site.world, on_gpu)
    if sum(_sum(terms) / GIB for terms in rank.values()) > room_gib:
        return False
    if not on_gpu or host_room_gib is None:
        return True
    host = _host_terms(training, site.world, site.ranks_per_node, rank, on_gpu)
    return sum(_sum(terms) / GIB for terms in host.values()) <= host_room_gib


def _rooms(site: Site) -> tuple[float | None, float | None]:
    """Return what a rank may take, and what a node's ranks may take of its host memory; GiB, None = not known."""
    host = None if site.host_gib is None else HOST_SHARE * site.host_gib
    if site.card is not None:
        return site.card.memory_gib, host
    return (None if host is None else host / site.ranks_per_node), host


# ---- one rank


def _rank_terms(training: Training, world: int, on_gpu: bool) -> Terms:
    """Return the terms of every part, in the order of PARTS."""
    terms: Terms = {
        "weights": _weights(training, world, on_gpu),
        "adapters": _adapters(training),
        "gradients": _gradients(training, world, on_gpu),
        "optimizer": [] if _optimizer_offloaded(training, on_gpu) else _optimizer(training, world),
        "activations": _activations(training),
        "logits": (logits := _logits(training)),
        "buckets": _buckets(training, on_gpu),
        "workspace": _workspace(training, on_gpu, logits),
        "context": _context(world, on_gpu),
    }
    terms["workspace"] += _step_beyond_backward(training, world, on_gpu, terms)
    moving = sum(_sum(terms[part]) for part in COME_AND_GO)
    terms["margin"] = [_known(lambda: f"is {FRAGMENTATION:.0%} of {_gigabytes(moving)} that come and go", FRAGMENTATION * moving)]
    return terms


def _weights(training: Training, world: int, on_gpu: bool) -> list[Term]:
    """The model's weights. Stages 0 to 2 keep all of them on every rank; stage 3 divides those of 16 and 32 bits.

    Quantized matrices are not divided under stage 3 either (xtuner#88). Embedding, head, norms and biases keep 16 bits:
    DeepSpeed casts every floating-point parameter to the engine's precision, also those that peft would hold in FP32.
    """
    shape, size = training.shape, training.parameter_bytes
    if training.method in ("int8", "qlora") and isinstance(shape, Transformer):
        small = shape.linear_parameters
        terms = [Term("parameters of the layers' matrices", small, NF4_BYTES if training.method == "qlora" else INT8_BYTES)]
        if training.method == "int8":
            rows = shape.layers * sum(outputs for _, outputs in shape.linears.values())
            terms.append(Term("rows with a scale", rows, INT8_SCALE_BYTES))
        return [*terms, Term("other parameters", shape.parameters - small, size)]
    if training.stage < 3:
        return [Term("parameters", shape.parameters, size)]
    gathered = Term("parameters of the largest module, gathered", _largest_module(training), size)
    if _parameters_offloaded(training, on_gpu):
        return [gathered]
    return [Term("parameters", shape.parameters, size, world), gathered]


def _adapters(training: Training) -> list[Term]:
    """LoRA's matrices, in the engine's precision: DeepSpeed casts them to bf16 and holds FP32 masters in the optimizer.

    Stage 3 leaves matrices this small whole on every rank (stage3_param_persistence_threshold).
    """
    if training.method == "full":
        return []
    return [Term("parameters of adapters", training.trainable_parameters, training.parameter_bytes)]


def _gradients(training: Training, world: int, on_gpu: bool) -> list[Term]:
    """Gradients, as DeepSpeed's estimators count them: 2 bytes as they are reduced and 4 of the FP32 copy for the step.

    ZeRO-2 holds its share only: with gradient accumulation the sum and the newest, 4 bytes (measured); the FP32 copy comes when
    the newest are gone, so 6 cover both. FP32 training needs no copy. ZeRO-3's estimator counts 4; the 16-bit gradients beside
    the FP32 ones of its step are in the workspace (`_step_beyond_backward`). Offloaded: the host's. DeepSpeed sums in the model's
    precision as long as data_types.grad_accum_dtype is not set; ours is not.
    """
    count, size, stage = training.trainable_parameters, training.parameter_bytes, training.stage
    if _optimizer_offloaded(training, on_gpu):
        terms = [Term("gradients", count, size)] if stage == 1 else []
    elif stage == 3:
        terms = [Term("gradients", count, 4, world)]
    else:
        terms = [Term("gradients", count, size, world if stage == 2 else 1)]
        if size == 2:
            terms.append(Term("FP32 gradients for the step", count, 4, world if stage >= 1 else 1))
        elif stage == 2 and training.accumulation > 1:
            terms.append(Term("newest gradients, before they are added", count, size, world))
    if stage == 3:
        terms.append(Term("gradients of the largest module, before they are divided", _largest_trainable(training), size))
    return terms


def _optimizer(training: Training, world: int) -> list[Term]:
    """FP32 master weights of what is trained and Adam's moments; divided from stage 1 on. Plain FP32 training has no masters."""
    count, among = training.trainable_parameters, world if training.stage >= 1 else 1
    terms = []
    if training.parameter_bytes == 2 or training.stage >= 1:
        terms.append(Term("FP32 master weights", count, MASTER_BYTES, among))
    terms.append(Term("pairs of Adam's moments", count, ADAM_BYTES[training.optimizer], among))
    return terms


def _activations(training: Training) -> list[Term]:
    """What the backward pass needs of the forward pass: of all layers, or with checkpointing their inputs only."""
    shape, size = training.shape, training.parameter_bytes
    if not isinstance(shape, Transformer):
        return [Term("elements kept of images", training.micro_batch * shape.saved_elements_per_sample, size)]
    tokens = training.units_per_micro_batch
    around = _around_layers(training, shape)
    if training.activation_checkpointing:
        return [
            Term(f"tokens × elements × {shape.layers} layers, their inputs", tokens * shape.hidden * shape.layers, size),
            around,
        ]
    return [Term(f"tokens × {shape.layers} layers", tokens * shape.layers, layer_activation_bytes(training)), around]


def _around_layers(training: Training, shape: Transformer) -> Term:
    """The last norm in FP32, as it was normed and its output, the hidden states that come and go. Measured with the layers."""
    elements = training.units_per_micro_batch * shape.hidden
    return Term("tokens × elements around the layers (last norm, input, output)", elements, 4 + 4 * training.parameter_bytes)


def layer_activation_bytes(training: Training) -> float:
    """Return the bytes one layer keeps for a token; 0 for convolutions.

    Korthikanti et al. count 34 h for GPT-3 (GELU of 4 h, dropout) when attention keeps no maps. This is transformers' Llama with
    fused attention and SwiGLU, w bytes an element: 20 h + 4 kv + 8 i of bf16. Measured by hooks on saved tensors (transformers
    5.24, 2026-11-30). Frozen matrices need no inputs; an adapter needs its own, behind a dropout.
    """
    shape, w = training.shape, training.parameter_bytes
    if not isinstance(shape, Transformer):
        return 0.0
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = (
        2 * (4 * shape.hidden + 4)  # each norm: its input in FP32, and one root of a mean
        + w * (2 * queries + 2 * keys)  # queries, attention's output; keys, values
        + 4 * shape.heads  # attention's log-sum-exp
        + w * 3 * shape.intermediate  # gate, its SiLU, up
    )
    if shape.qk_norm:
        kept += (4 + w) * (queries + keys)
    inputs = w * (2 * shape.hidden + shape.intermediate)  # of q, k, v; of gate, up; of down; o's is attention's output
    if training.method == "full":
        return float(kept + 2 * w * shape.hidden + inputs)  # the weights of the norms want the normed input as well
    for name in training.lora_targets:
        kept += (w + 1) * shape.linears[name][0] + w * training.lora_rank  # dropout's output and mask; between A and B
    return float(kept + (inputs if training.method == "int8" else 0))  # bitsandbytes' MatMul8bitLt keeps its input


def _logits(training: Training) -> list[Term]:
    """The loss: all logits of the micro-batch, or those of one chunk.

    Chunks add up the gradient of the hidden states and, where the head is trained, the head's.
    """
    shape, size = training.shape, training.parameter_bytes
    if not isinstance(shape, Transformer):
        return []
    tokens, chunk = training.units_per_micro_batch, training.loss_chunk_tokens
    if not 0 < chunk < tokens:
        return [Term("tokens × vocabulary", tokens * shape.vocab, LOGITS_BYTES)]
    terms = [
        Term("tokens of a chunk × vocabulary", chunk * shape.vocab, LOGITS_BYTES),
        Term("tokens × elements of gradient", tokens * shape.hidden, size),
    ]
    if training.method == "full":
        terms.append(Term("gradients of the head, summed over chunks", shape.vocab * shape.hidden, size))
    return terms


def _buckets(training: Training, on_gpu: bool) -> list[Term]:
    """What is on its way between ranks. ZeRO allocates its reduce bucket whole, however small the model.

    With overlap_comm two take turns, and slices of a third may still be held (measured: 2.0 to 2.8 buckets). The all-gather of
    stages 1 and 2 writes into the weights in place (all_gather_into_tensor): allgather_bucket_size takes no memory. Stage 3
    gathers into a flat buffer and copies from there, so what it fetches ahead is there twice.
    """
    count, size, stage = training.trainable_parameters, training.parameter_bytes, training.stage
    if stage == 0:
        return [Term("gradients in a flat copy", min(count, FLAT_COPY_ELEMENTS), size)]
    # On a CPU, pages of a bucket that no gradient ever touches are never there.
    bucket = training.reduce_bucket_elements if on_gpu else min(training.reduce_bucket_elements, count)
    if stage == 3:
        terms = [Term("elements of the reduce bucket", bucket, size)]
        if training.method in ("full", "lora"):
            parameters = training.shape.parameters
            terms.append(
                Term("parameters kept for reuse or fetched ahead", min(parameters, LIVE_ELEMENTS + PREFETCH_ELEMENTS), size)
            )
            terms.append(Term("elements of a buffer they come through", min(parameters, PREFETCH_ELEMENTS), size))
        return terms
    largest = _largest_trainable(training)
    terms = [
        Term("elements of reduce buckets", bucket * (3 if training.overlap_comm else 1), size),
        Term("elements of the largest gradient", largest, size),
    ]
    if _optimizer_offloaded(training, on_gpu):
        terms.append(Term("elements of a buffer for gradients that come back", largest, size))
    return terms


def _workspace(training: Training, on_gpu: bool, logits: list[Term]) -> list[Term]:
    """What a layer's backward pass needs while it runs, as far as it exceeds the loss, which is gone by then.

    With checkpointing the layer itself, computed again; gradients of activations; a quantized matrix brought back to 16 bits.
    """
    shape, size = training.shape, training.parameter_bytes
    if not isinstance(shape, Transformer):
        first = training.micro_batch * CONVOLUTION_FIRST_OUTPUT * (shape.image_size / 224) ** 2
        terms = [Term("elements of the first output, its gradient and the next", 2 * first, size)]
        return [*terms, _known(lambda: "for cuDNN", CUDNN_GIB * GIB)] if on_gpu else terms
    tokens = training.units_per_micro_batch
    terms = [Term("tokens × MLP's width", tokens * shape.intermediate, BACKWARD_TENSORS * size)]
    if training.method in ("int8", "qlora"):
        terms.append(Term("elements of the largest matrix in 16 bits", _largest_linear(shape), 2))
    if training.method == "int8":
        widest = max(outputs for _, outputs in shape.linears.values())
        terms.append(Term("tokens × outputs in 32-bit integers", tokens * widest, 4))
    gone = logits
    if training.activation_checkpointing:
        terms.insert(0, Term("tokens of one layer, computed again", tokens, layer_activation_bytes(training)))
        gone = [*logits, _around_layers(training, shape)]
    beyond = _sum(terms) - _sum(gone)
    if beyond <= 0:
        return []
    return [
        _known(
            lambda: f"of a layer going backward ({_sizes(terms)}) beyond {_gigabytes(_sum(gone))} that are gone by then", beyond
        )
    ]


def _context(world: int, on_gpu: bool) -> list[Term]:
    """The process itself: what it takes before it holds a tensor."""
    if not on_gpu:
        return [_known(lambda: "for Python, torch and DeepSpeed", CPU_PROCESS_GIB * GIB)]
    cuda = _known(lambda: "for CUDA, torch's kernels and cuBLAS", CUDA_CONTEXT_GIB * GIB)
    return [cuda, _known(lambda: "for NCCL", NCCL_GIB * GIB)] if world > 1 else [cuda]


def _step_beyond_backward(training: Training, world: int, on_gpu: bool, terms: Terms) -> list[Term]:
    """What the optimizer's step needs beyond what the backward pass leaves: activations and buckets are free by then.

    A group of parameters steps with the FP32 copy of its gradients and the temporaries of torch's AdamW, 4 bytes (foreach, on
    GPUs) or 8 (on CPUs; without ZeRO those of one matrix). The gradients in the model's precision are still there: those of all
    groups are one buffer; under stage 3 they always stay, and so does the reduce bucket. While stages 1 and 2 make a group's
    gradients flat, they hold 8 bytes.
    Measured with a small engine (DeepSpeed 0.19.8, torch 2.13, 2026-11-30).
    """
    if _optimizer_offloaded(training, on_gpu):
        return []
    count, size, stage = training.trainable_parameters, training.parameter_bytes, training.stage
    copied = 4 + ((4 if on_gpu else 8) if training.optimizer == "adamw" and (on_gpu or stage) else 0)
    if stage == 0:
        step: float = count * (copied + (size if size == 2 else 0))
    elif stage < 3:
        step = count / world * max(8, copied + size)
    else:
        step = count / world * size + min(count / world, STEP_SUBGROUP_ELEMENTS) * copied + _sum(terms["buckets"][:1])
    free = sum(_sum(terms[part]) for part in COME_AND_GO)
    return [_known(lambda: "that the optimizer's step needs beyond the backward pass", step - free)] if step > free else []


# ---- a node's memory


def _host_terms(training: Training, world: int, ranks: int, rank: Terms, on_gpu: bool) -> Terms:
    """Return what a node's memory holds. Ranks on CPUs: all they have. Ranks on GPUs: their processes, and what is offloaded."""
    if not on_gpu:
        return {part: [_known(lambda: f"of {ranks} ranks", ranks * _sum(terms))] if terms else [] for part, terms in rank.items()}
    count, size, parameters = training.trainable_parameters, training.parameter_bytes, training.shape.parameters
    terms: Terms = {part: [] for part in HOST_PARTS}
    terms["processes"] = [_known(lambda: f"for {ranks} processes with CUDA", ranks * CUDA_PROCESS_GIB * GIB)]
    share = f" of {ranks} of {world} ranks"
    pinned: list[float] = []
    if _optimizer_offloaded(training, on_gpu):
        mine = ranks * count / world
        # DeepSpeed's Adam for CPUs holds its moments in FP32, whatever the recipe's optimizer.
        terms["optimizer"] = [
            Term(f"FP32 master weights{share}", mine, MASTER_BYTES),
            Term("pairs of Adam's moments", mine, ADAM_BYTES["adamw"]),
        ]
        terms["gradients"] = [Term(f"FP32 gradients{share}", mine, 4)]
        way = "parameters on their way back" if training.stage < 3 else "gradients on their way here"
        terms["buckets"] = [Term(f"{way}{share}", mine, size)]
        pinned += [MASTER_BYTES * count / world, 4 * count / world, size * count / world]
        if training.stage == 2 and training.accumulation > 1:
            terms["buckets"].append(Term("gradients summed over micro-steps", mine, size))
            pinned.append(size * count / world)
    if _parameters_offloaded(training, on_gpu):
        terms["weights"] = [Term(f"parameters{share}", ranks * parameters / world, size)]
        pinned.append(size * parameters / world)
    # torch's allocator of pinned memory rounds each block up to a power of two.
    rounding = ranks * sum(2 ** math.ceil(math.log2(block)) - block for block in pinned if block > 1)
    if rounding:
        terms["margin"] = [_known(lambda: "by which blocks of pinned memory are rounded up", rounding)]
    # Each rank builds a trained model in host memory first; stage 3 divides it from the start (zero.Init), and frozen weights go
    # from their memory-mapped files to the card tensor by tensor.
    if training.stage < 3 and training.method == "full":
        lasting = sum(_sum(terms[part]) for part in ("weights", "gradients", "optimizer", "buckets", "margin"))
        beyond = ranks * size * parameters - lasting
        if beyond > 0:
            terms["loading"] = [
                _known(
                    lambda: f"at the start ({ranks} × {_amount(parameters)} parameters × {size} bytes) beyond what stays", beyond
                )
            ]
    return terms


def _optimizer_offloaded(training: Training, on_gpu: bool) -> bool:
    """On a CPU rank both places are the same memory; without ZeRO DeepSpeed does not offload."""
    return training.offload_optimizer and training.stage >= 1 and on_gpu


def _parameters_offloaded(training: Training, on_gpu: bool) -> bool:
    return training.offload_parameters and training.stage == 3 and on_gpu


def _largest_linear(shape: Transformer) -> int:
    return max(inputs * outputs for inputs, outputs in shape.linears.values())


def _largest_module(training: Training) -> int:
    """Return the elements of the largest module with parameters of its own, as DeepSpeed's stage 3 estimator wants them."""
    shape = training.shape
    if not isinstance(shape, Transformer):
        return CONVOLUTION_LARGEST
    return max(shape.embedding_parameters, _largest_linear(shape))


def _largest_trainable(training: Training) -> int:
    shape = training.shape
    if training.method == "full" or not isinstance(shape, Transformer):
        return _largest_module(training)
    return max(training.lora_rank * max(shape.linears[name]) for name in training.lora_targets)


# ---- words


def _known(words: Callable[[], str], size: float) -> Term:
    return Term("", 1, size, known=words)


def _sum(terms: list[Term]) -> float:
    """Return bytes."""
    return sum(amount * size / among for _, amount, size, among, _ in terms)


def _sizes(terms: list[Term]) -> str:
    return " + ".join(map(str, terms))


def _told(terms: list[Term]) -> str:
    sizes = _sizes(terms)
    return sizes if len(terms) == 1 and terms[0].known is not None else f"{sizes} = {_gigabytes(_sum(terms))}"


def _culprits(parts: Mapping[str, float], room_gib: float) -> list[str]:
    """Return the parts, largest first, without any one of which all would fit; the three largest when no single one does that."""
    order = sorted((part for part in parts if parts[part] > 0), key=lambda part: -parts[part])
    excess = sum(parts.values()) - room_gib
    return [part for part in order if parts[part] >= excess][:3] or order[:3]


def _why(part: str, memory: Memory, training: Training, site: Site) -> str:
    size = f"{memory.arithmetic[part]} ({memory.per_gpu_gib[part]:.1f} GiB)"
    owner = "GPU" if site.card is not None else "rank"
    whole = part == "weights" and (training.stage < 3 or training.method in ("int8", "qlora"))
    where = f"on every {owner} under ZeRO-{training.stage}" if whole and training.stage else f"on every {owner}"
    room = f", of {site.card.memory_gib:.1f} GiB the card has" if site.card is not None else ""
    return f"{part}: {size} {where}{room}"


def _amount(value: float) -> str:
    """Return 13.02e9, 50.0e6, or a small number as it is."""
    if value >= 1e9:
        return f"{value / 1e9:.2f}e9"
    return f"{value / 1e6:.1f}e6" if value >= 1e6 else f"{value:,.0f}"


def _gigabytes(size: float) -> str:
    if size < 0.95e8:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e9:.1f} GB" if size >= 1e10 else f"{size / 1e9:.2f} GB"
