"""What a model is made of, from the fields of its configuration: parameters, matrices, activations. Pure, without torch.

Two kinds: decoders of the Llama family (transformers' Llama, Mistral, Qwen2 and Qwen3 configurations) and ResNets (torchvision).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from r4090c.errors import UsageError

DECODERS = ("llama", "mistral", "qwen2", "qwen3")
RESNETS: Mapping[int, tuple[int, float, float]] = {
    18: (11_689_512, 1.814e9, 2.48e6),
    34: (21_797_672, 3.664e9, 3.74e6),
    50: (25_557_032, 4.089e9, 11.11e6),
    101: (44_549_160, 7.801e9, 16.23e6),
    152: (60_192_808, 11.514e9, 22.56e6),
}
"""Depth -> parameters, multiply-adds of a 224 × 224 image (torchvision's table of models), convolution outputs (timm's)."""
RESNET_IMAGE = 224
MOST = 10**12
"""est.: more than any dimension, batch or bucket ever was; products of these are finite numbers."""
SAVED_PER_OUTPUT = 2
"""Each convolution's output is kept for the norm behind it, and that one's (rectified in place) for the next convolution."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder-only language model. Dimensions are counts of elements; `heads` and `kv_heads` have `head_dim` elements each."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """The output matrix is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Matrices of one layer: name -> (inputs, outputs)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def linear_parameters(self) -> int:
        """Elements of all layers' matrices: what quantization makes small."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer: matrices, biases, norms."""
        bias = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.linear_parameters // self.layers + bias + norms

    @property
    def embedding_parameters(self) -> int:
        """Elements of the input embedding."""
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """Elements of the output matrix, 0 when it is the embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All elements, the last norm included."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters + self.hidden


@dataclass(frozen=True, slots=True)
class Convolution:
    """A ResNet. `forward_flop_per_sample`: a multiply-add is two; `saved_elements_per_sample`: kept for the backward pass."""

    depth: int
    image_size: int
    parameters: int
    forward_flop_per_sample: float
    saved_elements_per_sample: float


Shape = Transformer | Convolution


def shape_of(model: Mapping[str, Any], image_size: int = RESNET_IMAGE) -> Shape:
    """Return the shape of a recipe's `model`. Raises UsageError naming the key that is missing or out of range."""
    family, config = model.get("family"), model.get("config")
    if not isinstance(config, Mapping):
        raise UsageError("model.config", repr(config), "a mapping of the family's configuration", "r4090c plan llama7b --json")
    if family == "resnet":
        return _resnet(config, image_size)
    if family not in DECODERS:
        observed = f"memory and speed of {family!r} are not known here"
        wanted = f"one of {', '.join((*DECODERS, 'resnet'))}; `launch` trains other language models too, without a plan"
        raise UsageError("model.family", observed, wanted)
    tied = config.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise UsageError("model.config.tie_word_embeddings", repr(tied), "true or false")
    heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UsageError("model.config.num_key_value_heads", str(kv_heads), f"a divisor of num_attention_heads ({heads})")
    if "head_dim" not in config and hidden % heads:
        raise UsageError("model.config.hidden_size", str(hidden), f"a multiple of num_attention_heads ({heads}), or a head_dim")
    return Transformer(
        layers=_count(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_count(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_count(config, "head_dim", hidden // heads),
        vocab=_count(config, "vocab_size"),
        tied=tied is True,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _resnet(config: Mapping[str, Any], image_size: int) -> Convolution:
    depth = _count(config, "depth")
    if depth not in RESNETS:
        raise UsageError("model.config.depth", str(depth), f"one of {', '.join(map(str, RESNETS))}")
    parameters, multiply_adds, outputs = RESNETS[depth]
    area = (image_size / RESNET_IMAGE) ** 2
    return Convolution(depth, image_size, parameters, 2 * multiply_adds * area, SAVED_PER_OUTPUT * outputs * area)


def shown(value: object) -> str:
    """Return a value as an error tells it: not all of a number with thousands of digits."""
    if isinstance(value, int) and abs(value) > MOST:
        return f"{'-' if value < 0 else ''}more than {MOST:g}"
    return repr(value)


def _count(config: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    """Return a positive whole number of the configuration. Raises UsageError."""
    value = config.get(key, otherwise)
    value = otherwise if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise UsageError(
            f"model.config.{key}", "missing" if value is None else shown(value), f"a whole number from 1 to {MOST:g}"
        )
    return value
