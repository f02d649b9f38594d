"""Under flash-attention a micro-batch is one row: only so does transformers keep the documents of packed rows apart.

It reads documents off position_ids that begin anew where the batch has one row (`_is_packed_sequence`, transformers 5.24); of
more rows it takes each for one document, and the mask that the other kinds of attention are given does not reach flash-attention.
"""

from __future__ import annotations

from typing import Any

import torch

from train.data import IGNORED


def flatten_rows(model: Any) -> None:
    """Make the causal language model `model` take its rows [B, T] as one row [1, B·T], with the same loss and gradients.

    Each row begins at position 0, so it sees nothing of the row before; its first label is left out, which nothing predicts.
    """
    by_row = model.forward

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor | None = None, **more: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        labels = labels.clone()
        labels[:, 0] = IGNORED
        ids, labels, positions = (one.reshape(1, -1) for one in (input_ids, labels, position_ids))
        return by_row(input_ids=ids, labels=labels, position_ids=positions, **more)

    model.forward = forward
