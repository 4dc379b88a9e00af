"""`torchaudio.functional.rnnt_loss` and `torchaudio.transforms.RNNTLoss`.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt import loss as losses


def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = -1,
    clamp: float = -1,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
) -> Tensor:
    """Transducer loss (Graves 2012) as torchaudio has it.

    Args:
        logits: (N, T, U + 1, V).
        targets: (N, U) integers.
        logit_lengths, target_lengths: (N,) integers.
        blank: a negative index counts from the end of the vocabulary.
        clamp: gradients are clamped to [-clamp, clamp]; negative: not at all.
        reduction: 'none', 'mean' (over utterances) or 'sum'.
        fused_log_softmax: False if logits are log-probabilities already.

    Returns:
        (N,) for reduction 'none', else a scalar; float32 for half-precision logits.

    Raises:
        ValueError: an unknown reduction, and what `pruned_rnnt.rnnt_loss` refuses.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'none', 'mean' or 'sum'")
    return losses.rnnt_loss(
        logits,
        targets,
        logit_lengths,
        target_lengths,
        blank=logits.shape[-1] + blank if blank < 0 else blank,
        clamp=clamp if clamp > 0 else None,
        reduction=reduction,
        from_log_probs=not fused_log_softmax,
    )


class RNNTLoss(torch.nn.Module):
    """`rnnt_loss` as a module; the arguments are those of the function."""

    def __init__(
        self,
        blank: int = -1,
        clamp: float = -1.0,
        reduction: str = "mean",
        fused_log_softmax: bool = True,
    ) -> None:
        super().__init__()
        self.blank = blank
        self.clamp = clamp
        self.reduction = reduction
        self.fused_log_softmax = fused_log_softmax

    def forward(
        self, logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor
    ) -> Tensor:
        return rnnt_loss(
            logits,
            targets,
            logit_lengths,
            target_lengths,
            self.blank,
            self.clamp,
            self.reduction,
            self.fused_log_softmax,
        )
