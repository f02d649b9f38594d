"""The chunked loss: the whole one's loss and gradients, and no more logits at once than promised."""

# ruff: noqa: E402  (skipped before the imports where the libraries lack)

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the extra `train`", allow_module_level=True)
pytestmark = pytest.mark.train

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from train.data import IGNORED
from train.loss import count_targets, sum_cross_entropy, use_chunks

WIDTH, VOCABULARY, TOKENS = 16, 50, 37


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 36, 37, 1000])
@pytest.mark.parametrize("trains", ["both", "hidden", "weight"])
def test_any_chunk_gives_the_whole_ones_loss_and_gradients(chunk_tokens: int, trains: str) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    labels[::4] = IGNORED
    results = []
    for function in (plain, lambda *given: sum_cross_entropy(*given, chunk_tokens)):  # type: ignore[call-arg]
        torch.manual_seed(1)
        hidden = torch.randn(TOKENS, WIDTH, requires_grad=trains != "weight")
        weight = torch.randn(VOCABULARY, WIDTH, requires_grad=trains != "hidden")
        total = function(hidden, weight, labels) / 17
        (total * 1024).backward()  # as a loss scale does
        results.append((total.detach(), hidden.grad, weight.grad))
    for wanted, found in zip(*results, strict=True):
        if wanted is None or found is None:
            assert wanted is found
            continue
        assert (wanted - found).abs().max() <= 1e-6 * wanted.abs().max()


def test_no_more_logits_than_a_chunk_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    linear = torch.nn.functional.linear

    def counting(*given: Any) -> torch.Tensor:
        nonlocal largest
        made = linear(*given)
        largest = max(largest, made.shape[0])
        return made

    monkeypatch.setattr("train.loss.functional.linear", counting)
    hidden, weight = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    result = sum_cross_entropy(hidden, weight, torch.zeros(TOKENS, dtype=torch.long), 5)
    kept: Any = result.grad_fn
    assert largest == 5
    assert sorted(tuple(one.shape) for one in kept.saved_tensors) == [(TOKENS, WIDTH), (VOCABULARY, WIDTH)]
    result.backward()


def test_half_precision_adds_up_weight_gradients_in_fp32() -> None:
    """4096 tokens, one to a chunk: added up in bf16, whose numbers have 8 bits, the last ones would be lost."""
    torch.manual_seed(0)
    hidden = torch.rand(4096, 4, dtype=torch.bfloat16)
    weight = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    sum_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.long), 1).backward()
    exact = (1 / 3 - 1) * hidden.float().sum(0)
    assert weight.grad is not None
    assert ((weight.grad[0].float() - exact) / exact).abs().max() < 0.01


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_with_chunks_is_the_same_model(tied: bool, checkpointing: bool) -> None:
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=tied)
    torch.manual_seed(0)
    whole, chunked = LlamaForCausalLM(config), LlamaForCausalLM(config)
    chunked.load_state_dict(whole.state_dict())
    use_chunks(chunked, 5)
    if checkpointing:
        chunked.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, VOCABULARY, (3, 12))
    labels = ids.clone()
    labels[0, :7] = labels[1] = IGNORED
    positions = torch.arange(12).repeat(3, 1)
    assert count_targets(labels) == 5 + 0 + 11
    losses = [model(input_ids=ids, labels=labels, position_ids=positions).loss for model in (whole, chunked)]
    shares = [model(input_ids=ids, labels=labels, num_items_in_batch=20.0).loss for model in (whole, chunked)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert shares[1].item() == pytest.approx(losses[1].item() * 16 / 20, rel=1e-6)
    for one in (*losses, *shares):
        one.backward()
    for (name, wanted), (_, found) in zip(whole.named_parameters(), chunked.named_parameters(), strict=True):
        assert wanted.grad is not None and found.grad is not None
        assert (wanted.grad - found.grad).abs().max() <= 2e-6 * wanted.grad.abs().max(), name
    assert list(whole.state_dict()) == list(chunked.state_dict())


def test_a_batch_in_which_nothing_counts_has_loss_and_gradients_of_zero() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    use_chunks(model, 5)
    ids = torch.zeros(1, 8, dtype=torch.long)
    result = model(input_ids=ids, labels=torch.full_like(ids, IGNORED)).loss
    result.backward()
    assert result.item() == 0
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())
