"""The reductions of losses."""

from __future__ import annotations

from torch import Tensor


def reduced(loss_N: Tensor, reduction: str) -> Tensor:
    """`mean` and `sum` are over utterances, the last dimension."""
    if reduction == "mean":
        return loss_N.mean(-1)
    return loss_N.sum(-1) if reduction == "sum" else loss_N
