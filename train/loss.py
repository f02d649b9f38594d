"""The language-model loss without ever holding the logits of a whole micro-batch.

Logits are tokens × vocabulary numbers, several copies of them: often the peak on a card of 24 GB. Here they are made for a
chunk of tokens, turned into this chunk's loss and gradients at once, and forgotten; nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from train.data import IGNORED


def count_targets(labels: torch.Tensor) -> int:
    """Return how many tokens of `labels` [sequences, tokens] are predicted from the one before them and count; [images]: all."""
    if labels.dim() == 1:
        return len(labels)
    return int((labels[:, 1:] != IGNORED).sum())


def use_chunks(model: Any, chunk_tokens: int) -> None:
    """Make the transformers causal language model `model` return its loss alone, computed `chunk_tokens` at a time."""

    def forward(
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        num_items_in_batch: float | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        hidden = model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        following = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        total = sum_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, following.flatten(), chunk_tokens)
        return CausalLMOutput(loss=total / max(1, num_items_in_batch or count_targets(labels)))

    model.forward = forward


def sum_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """Return the cross-entropy, summed over the tokens that count, of logits hidden · weightᵀ against `labels`.

    hidden [tokens, width], weight [vocabulary, width], labels [tokens]. Logits are of the dtype of `hidden`, the rest fp32.
    """
    loss: torch.Tensor = _SumCrossEntropy.apply(hidden, weight, labels, chunk_tokens)
    return loss


class _SumCrossEntropy(torch.autograd.Function):
    """The gradient of a sum of losses is known in the forward pass, but for the factor that `backward` is given."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        loss = torch.zeros((), device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None  # many small numbers are added
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            counts = (labels[chunk] != IGNORED).unsqueeze(1)
            target = labels[chunk].unsqueeze(1).clamp(min=0)
            surprise = torch.log_softmax(functional.linear(hidden[chunk], weight).float(), dim=1)
            loss -= (surprise.gather(1, target) * counts).sum()
            if hidden_grad is None and weight_grad is None:
                continue
            logits_grad = surprise.exp_().scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
            logits_grad = logits_grad.mul_(counts).to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(logits_grad, weight, out=hidden_grad[chunk])
            if weight_grad is not None:
                weight_grad += logits_grad.T @ hidden[chunk]
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return (
            None if hidden_grad is None else hidden_grad.mul_(factor),
            None if weight_grad is None else weight_grad.mul_(factor).to(ctx.weight_dtype),
            None,
            None,
        )
