"""Shapes: parameters counted by hand, and every configuration that cannot be planned named by its key."""

from __future__ import annotations

from typing import Any

import pytest

from launch.shape import Convolution, Transformer, shape_of
from r4090c.errors import UsageError

LLAMA13B = {
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}


def decoder(family: str = "llama", **changes: Any) -> Transformer:
    shape = shape_of({"family": family, "config": {**LLAMA13B, **changes}})
    assert isinstance(shape, Transformer)
    return shape


def test_published_parameter_counts() -> None:
    """Numbers of the models' own cards: 13,015,864,320 (Llama 2 13B), 8,030,261,248 (Llama 3 8B), 7,615,616,512 (Qwen2.5 7B)."""
    assert decoder().parameters == 13_015_864_320
    llama3 = decoder(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    assert llama3.parameters == 8_030_261_248
    qwen = decoder(
        "qwen2",
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    assert qwen.parameters == 7_615_616_512


def test_a_tied_head_counts_once_and_a_head_dimension_of_its_own_counts() -> None:
    assert decoder().parameters - decoder(tie_word_embeddings=True).parameters == 32000 * 5120
    assert decoder(head_dim=64).linears["q_proj"] == (5120, 40 * 64)
    assert decoder("qwen3").layer_parameters - decoder().layer_parameters == 2 * 128


def test_matrices_of_a_layer() -> None:
    shape = decoder(num_key_value_heads=8)
    assert shape.linears["k_proj"] == (5120, 1024)
    by_hand = 40 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 13824)
    assert shape.linear_parameters == by_hand


def test_resnet() -> None:
    shape = shape_of({"family": "resnet", "config": {"depth": 50}})
    assert isinstance(shape, Convolution)
    assert (shape.parameters, shape.forward_flop_per_sample) == (25_557_032, 2 * 4.089e9)
    small = shape_of({"family": "resnet", "config": {"depth": 50}}, image_size=112)
    assert isinstance(small, Convolution)
    assert small.forward_flop_per_sample == shape.forward_flop_per_sample / 4
    assert small.saved_elements_per_sample == shape.saved_elements_per_sample / 4


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        ({"family": "llama"}, "model.config"),
        ({"family": "llama", "config": 3}, "model.config"),
        ({"family": "gpt5", "config": {}}, "model.family"),
        ({"config": {}}, "model.family"),
        ({"family": "llama", "config": {}}, "model.config.num_attention_heads"),
        ({"family": "llama", "config": {**LLAMA13B, "hidden_size": "big"}}, "model.config.hidden_size"),
        ({"family": "llama", "config": {**LLAMA13B, "hidden_size": True}}, "model.config.hidden_size"),
        ({"family": "llama", "config": {**LLAMA13B, "num_hidden_layers": 0}}, "model.config.num_hidden_layers"),
        ({"family": "llama", "config": {**LLAMA13B, "hidden_size": 5121}}, "model.config.hidden_size"),
        ({"family": "llama", "config": {**LLAMA13B, "num_key_value_heads": 7}}, "model.config.num_key_value_heads"),
        ({"family": "llama", "config": {**LLAMA13B, "vocab_size": 10**400}}, "model.config.vocab_size"),
        ({"family": "llama", "config": {**LLAMA13B, "tie_word_embeddings": "no"}}, "model.config.tie_word_embeddings"),
        ({"family": "resnet", "config": {"depth": 51}}, "model.config.depth"),
    ],
)
def test_mistakes_name_the_key(model: dict[str, Any], culprit: str) -> None:
    with pytest.raises(UsageError) as caught:
        shape_of(model)
    assert caught.value.culprit == culprit
