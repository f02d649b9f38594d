"""Packed documents under flash-attention: no document sees another, and the loss is the one of all other kinds of attention.

There is no GPU here: flash-attn's two functions are written out in torch, at the package's boundary, and transformers' own code
decides which of them is called, and with what.
"""

# ruff: noqa: E402  (skipped before the imports where the libraries lack)

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the extra `train`", allow_module_level=True)
pytestmark = pytest.mark.train

import torch
import transformers.modeling_flash_attention_utils as transformers_flash
from transformers import PreTrainedModel

from tests.train.toy_models import CPU, LORA, SHAPE, tiny_recipe
from train.data import IGNORED
from train.flash import flatten_rows
from train.loss import count_targets
from train.model import Chosen, build_model
from train.recipe import Recipe

LENGTH = 12
METHODS = ("full", *(["lora"] if importlib.util.find_spec("peft") else []))


def recipe(**changes: Any) -> Recipe:
    return tiny_recipe(**{"model": {"family": "llama", "weights": None, "config": SHAPE}, "lora": LORA, **changes})


def build(wanted: Recipe, attention: str = "sdpa") -> Any:
    return build_model(wanted, None, CPU, "fp32", kernels=Chosen(attention, False, False), sharded=False)


def batch(packed: bool) -> dict[str, torch.Tensor]:
    """Return two rows; packed: of documents of 5, 4 and 3, and of 7 and 5 tokens, as train/data.py makes them."""
    ids = torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    made = {"input_ids": ids, "labels": ids.clone()}
    if packed:
        lengths = ((5, 4, 3), (7, 5))
        made["position_ids"] = torch.stack([torch.cat([torch.arange(one) for one in row]) for row in lengths])
        made["labels"][made["position_ids"] == 0] = IGNORED
    return made


def result(model: Any, given: dict[str, torch.Tensor], share: float | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss, and the gradients of what trains."""
    model.zero_grad()
    loss = model(**given, **({"num_items_in_batch": share} if share else {})).loss
    loss.backward()
    return loss.detach(), [one.grad.clone() for one in model.parameters() if one.grad is not None]


def require_alike(one: tuple[torch.Tensor, list[torch.Tensor]], other: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    assert one[0].item() == pytest.approx(other[0].item(), rel=1e-5)
    assert len(one[1]) == len(other[1]) > 0
    for mine, wanted in zip(one[1], other[1], strict=True):
        assert (mine - wanted).abs().max() <= 1e-5 * max(1e-3, float(wanted.abs().max()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk_tokens", [0, 5])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("method", METHODS)
def test_one_row_gives_the_loss_and_gradients_of_all(method: str, attention: str, chunk_tokens: int, packed: bool) -> None:
    wanted = recipe(method=method, loss_chunk_tokens=chunk_tokens)
    model = build(wanted, attention)
    base = model.get_base_model() if method != "full" else model
    given, kept = batch(packed), batch(packed)
    seen: list[dict[str, Any]] = []
    base.model.register_forward_pre_hook(lambda _, words, named: seen.append(named), with_kwargs=True)
    rows = [result(model, given), result(model, given, share=7.0)]
    flatten_rows(base)
    flat = [result(model, given), result(model, given, share=7.0)]
    for mine, wished in zip(flat, rows, strict=True):
        require_alike(mine, wished)
    assert rows[1][0].item() == pytest.approx(rows[0][0].item() * count_targets(given["labels"]) / 7, rel=1e-5)
    assert all(torch.equal(given[name], kept[name]) for name in kept)  # the batch is the caller's

    packs = transformers_flash._is_packed_sequence
    before, after = seen[0], seen[-1]
    assert not packs(before["position_ids"], len(before["input_ids"]))  # two rows are no packing to transformers
    assert packs(after["position_ids"], len(after["input_ids"]))
    assert after["input_ids"].shape == after["position_ids"].shape == (1, 2 * LENGTH)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put a flash-attn into this process that computes on the CPU; return the names of what is called."""
    called: list[str] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal; [rows, tokens, heads, width], with fewer heads in key and value."""
        groups = query.shape[2] // key.shape[2]
        query, key, value = (
            one.repeat_interleave(many, 2).transpose(1, 2) for one, many in ((query, 1), (key, groups), (value, groups))
        )
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)

    def flash_attn_func(q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False) -> Any:
        called.append("whole rows")
        return attend(q, k, v)

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
    ) -> Any:
        called.append("documents")
        ends = cu_seqlens_q.tolist()
        parts = [slice(begin, end) for begin, end in pairwise(ends)]
        return torch.cat([attend(q[None, part], k[None, part], v[None, part])[0] for part in parts])

    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    vars(package).update(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=None
    )
    vars(padding).update(pad_input=None, unpad_input=None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(transformers_flash, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(transformers_flash, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)  # it asks for a GPU
    return called


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk_tokens", [0, 5])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flash_keeps_documents_apart(flash: list[str], method: str, chunk_tokens: int, packed: bool, checkpointing: bool) -> None:
    wanted = recipe(method=method, loss_chunk_tokens=chunk_tokens, activation_checkpointing=checkpointing)
    given = batch(packed)
    require_alike(result(build(wanted, "flash_attention_2"), given), result(build(wanted), given))
    assert set(flash) == {"documents"}
    alone = {name: one[:1] for name, one in given.items()}  # a micro-batch of one
    require_alike(result(build(wanted, "flash_attention_2"), alone), result(build(wanted), alone))


def test_the_gpu_check_sees_documents_that_see_each_other() -> None:
    from bench.gpu_check import in_documents, what_later_documents_see

    model, ids = build(recipe()), torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    apart, together = (in_documents({"input_ids": ids, "labels": ids}) for _ in range(2))
    del together["position_ids"]
    assert what_later_documents_see(model, apart) == 0.0 < what_later_documents_see(model, together)
