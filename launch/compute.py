"""How long one micro-step of training takes on one card, from first principles. Pure.

A micro-step is matrix multiplications, bound by the card's tensor peak, and everything between them (norms, activations, rotary
embedding, residuals, loss), bound by the card's memory. The second kind is counted as values that go through the memory: it grows
with the width of a model while the first grows with its square, so small models reach a smaller share of the peak.

Two constants are fitted (MATMUL_SHARE, MEMORY_SHARE), on two published figures that bench/planning.py names; the counts are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.memory import INT8_BYTES, NF4_BYTES
from launch.shape import Convolution, Transformer
from launch.site import Card
from launch.training import Training

MATMUL_SHARE = 1.0
"""Share of the dense peak that large matrix multiplications reach. Fitted: llmq on one 4090, 0.5B and 1.5B (bench/planning.py).
The peak is stated at 2520 MHz; a cool 4090 computes at 2700 to 2800, so 1.0 is about 0.93 of what its clock would give."""
MEMORY_SHARE = 0.73
"""Share of the memory's bandwidth that the work between them reaches. Fitted on the same two figures."""
HALF_SPEED_TOKENS = 128
"""est.: tokens of a micro-batch at which multiplications reach half their share: tiles of 128 rows over 128 SMs are not full."""
ATTENTION_SHARE = 0.6
"""est.: share of the peak that fused attention reaches forward and backward (FlashAttention-2: 50 to 73 % of an A100's)."""
INT8_SHARE = 0.5
"""est.: LLM.int8 quantizes activations and multiplies outliers apart: its multiplications take about twice the time."""
CONVOLUTION_SHARE = 0.45
"""est.: share of the tensor peak that convolutions of a ResNet reach, channels last."""
CONVOLUTION_PASSES = 7.0
"""est.: of each saved value in a ResNet: written, read for statistics, normed, rectified; as often again in the backward pass."""
ADAPTER_PASSES = 10.0
"""est.: of a matrix's inputs and outputs, that an adapter beside it adds, dropout included; forward and backward."""
DEQUANTIZED_PASSES = 2
"""A quantized matrix is written in 16 bits and read back by the multiplication, each time it is used."""
FORWARD_SHARE = 1 / 3
"""Of all passes: the backward pass moves about twice what the forward pass moves."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What software moves through the memory beside its multiplications, in values of 16 bits a token, forward and backward.

    `hidden`, `intermediate`: of each layer, in units of the hidden and of the intermediate width. `logits`: in units of the
    vocabulary. `gradients`: of each trained parameter a micro-step (accumulation, buckets). `layer_s`: the least time of a layer,
    in which the host launches its kernels.
    """

    name: str
    hidden: float
    intermediate: float
    logits: float
    gradients: float
    layer_s: float


CUDA = Kernels("hand-written CUDA", 30, 8, 3, 1, 0.1e-3)
"""Counted for llm.c-like code: norm fused with the residual (4 + 4 of each of two), rotary in place (2 + 2), attention (3 + 7);
SwiGLU (3 + 5); loss and its gradient in one kernel; CUDA graphs."""
LIGER = Kernels("PyTorch with fused kernels", 41, 8, 4, 3, 0.6e-3)
"""Counted for Transformers with Liger kernels: as CUDA, but residuals apart (3 + 3 each) and copies around attention."""
TORCH = Kernels("PyTorch, Transformers' own modules", 158, 14, 20, 5, 1.5e-3)
"""Counted for transformers' Llama in eager mode: a norm in FP32 (18 + 36), twice; rotary (10 + 14), residuals and attention 26;
SwiGLU unfused (5 + 9); logits and softmax in FP32. Times of launches: about 100 kernels of 5 us a layer forward, as many twice
backward, of which half hide. est."""


@dataclass(frozen=True, slots=True)
class MicroStep:
    """Seconds of one micro-step of one rank, by kind of work; `idle_s`: the card waits for the host to launch kernels.

    `necessary_flop`: of the multiplications without which there is no step (recomputation is not among them).
    """

    matmul_s: float
    attention_s: float
    elementwise_s: float
    recompute_s: float
    dequantize_s: float
    idle_s: float
    necessary_flop: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.matmul_s + self.attention_s + self.elementwise_s + self.recompute_s + self.dequantize_s + self.idle_s


def forward_flop(shape: Transformer, sequence_length: int) -> tuple[float, float, float]:
    """Return the FLOP a token takes forward: in the layers' matrices, in attention (causal: half of the square), in the head."""
    attention = 2.0 * shape.layers * sequence_length * shape.heads * shape.head_dim
    return 2.0 * shape.linear_parameters, attention, 2.0 * shape.vocab * shape.hidden


def necessary_flop_per_unit(training: Training) -> float:
    """Return the FLOP of one token or image: forward, and backward for what the method needs.

    A trained matrix takes 2 FLOP a parameter forward and 4 backward (6 P); a frozen one has no weight gradient (4 P), and its
    adapter takes 6 of its own parameters.
    """
    shape = training.shape
    if isinstance(shape, Convolution):
        return 3.0 * shape.forward_flop_per_sample
    layers, attention, head = forward_flop(shape, training.sequence_length)
    if training.method == "full":
        return 3.0 * (layers + attention + head)
    return 2.0 * (layers + head) + 3.0 * attention + 6.0 * training.trainable_parameters


def micro_step(training: Training, card: Card, kernels: Kernels = TORCH) -> MicroStep | None:
    """Return the time of a micro-step; None where the peaks of the card are not known."""
    peak = card.fp32_tflops if training.precision == "fp32" else card.bf16_tflops
    if peak is None or card.memory_gbyte_s is None:
        return None
    peak, memory = peak * 1e12, card.memory_gbyte_s * 1e9 * MEMORY_SHARE
    units = training.units_per_micro_batch
    necessary = necessary_flop_per_unit(training) * units
    shape = training.shape
    if isinstance(shape, Convolution):
        moved = 2 * CONVOLUTION_PASSES * shape.saved_elements_per_sample * units * training.parameter_bytes / 2
        return MicroStep(necessary / (peak * CONVOLUTION_SHARE), 0.0, moved / memory, 0.0, 0.0, 0.0, necessary)

    layers, attention, head = forward_flop(shape, training.sequence_length)
    share = MATMUL_SHARE * units / (units + HALF_SPEED_TOKENS)
    inside_share = share * INT8_SHARE if training.method == "int8" else share
    passes = 3.0 if training.method == "full" else 2.0
    head_passes = 3.0 if training.method == "full" else 2.0
    adapters = 6.0 * training.trainable_parameters if training.method != "full" else 0.0
    matmul_s = units * (passes * layers / inside_share + (head_passes * head + adapters) / share) / peak
    attention_s = units * 3.0 * attention / (peak * ATTENTION_SHARE)

    value = training.parameter_bytes
    layer_values = shape.layers * (kernels.hidden * shape.hidden + kernels.intermediate * shape.intermediate)
    if training.method != "full":
        widths = sum(sum(shape.linears[name]) for name in training.lora_targets)
        layer_values += ADAPTER_PASSES * shape.layers * widths
    moved = units * (layer_values + kernels.logits * shape.vocab) + kernels.gradients * training.trainable_parameters
    elementwise_s = moved * value / memory

    uses, recompute_s = 2, 0.0
    if training.activation_checkpointing:
        uses = 3
        recompute_s = units * (layers / inside_share + attention / ATTENTION_SHARE) / peak
        recompute_s += units * FORWARD_SHARE * layer_values * value / memory
    dequantize_s = 0.0
    if training.method in ("qlora", "int8"):
        stored = NF4_BYTES if training.method == "qlora" else INT8_BYTES
        dequantize_s = uses * shape.linear_parameters * (stored + DEQUANTIZED_PASSES * value) / memory
    busy_s = matmul_s + attention_s + elementwise_s + recompute_s + dequantize_s
    least_s = shape.layers * kernels.layer_s * (1 + FORWARD_SHARE * training.activation_checkpointing)
    if training.method != "full":
        least_s *= 2  # an adapter beside every matrix: about as many kernels again
    return MicroStep(matmul_s, attention_s, elementwise_s, recompute_s, dequantize_s, max(0.0, least_s - busy_s), necessary)
