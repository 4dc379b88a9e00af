"""`warprnnt_pytorch.rnnt_loss` and `RNNTLoss`, the torch binding of warp-transducer.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.compat.package_names import named_as

_NAMES = {
    "logits": "acts",
    "targets": "labels",
    "logit_lengths": "act_lens",
    "target_lengths": "label_lens",
}


@named_as(_NAMES)
def rnnt_loss(
    acts: Tensor,
    labels: Tensor,
    act_lens: Tensor,
    label_lens: Tensor,
    blank: int = 0,
    reduction: str | None = "mean",
    fastemit_lambda: float = 0.0,
) -> Tensor:
    """Transducer loss of unnormalised joiner outputs.

    Args:
        acts: (N, T, U + 1, V), unnormalised.
        labels: (N, U) integers.
        act_lens, label_lens: (N,) integers.
        blank: the blank symbol.
        reduction: 'mean' (over utterances), 'sum', or 'none' or None.
        fastemit_lambda: scales the gradient through labels, including their part of the softmax's
            gradient, by 1 + fastemit_lambda; the loss does not change.

    Returns:
        (1,) for 'mean' and 'sum', else (N,); float64 for float64 acts, else float32.

    Raises:
        ValueError: another reduction, and as `pruned_rnnt.rnnt_loss`.
    """
    if reduction not in ("mean", "sum", "none", None):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
    costs = pruned_rnnt.rnnt_loss(
        acts,
        labels,
        act_lens,
        label_lens,
        blank=blank,
        fastemit_lambda=fastemit_lambda,
        reduction=reduction or "none",
    )
    return costs.view(-1)


class RNNTLoss(torch.nn.Module):
    """`rnnt_loss` as a module; the arguments are those of the function.

    Pass reduction and fastemit_lambda by name: the forks of warp-transducer that have both differ
    in their order.
    """

    def __init__(
        self, blank: int = 0, reduction: str | None = "mean", fastemit_lambda: float = 0.0
    ) -> None:
        super().__init__()
        self.blank = blank
        self.reduction = reduction
        self.fastemit_lambda = fastemit_lambda

    def forward(self, acts: Tensor, labels: Tensor, act_lens: Tensor, label_lens: Tensor) -> Tensor:
        """As the function `rnnt_loss`."""
        return rnnt_loss(
            acts, labels, act_lens, label_lens, self.blank, self.reduction, self.fastemit_lambda
        )
