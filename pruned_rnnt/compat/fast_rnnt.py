"""fast_rnnt's functions under their own names and argument order.

They are those of `pruned_rnnt.compat.k2`, but the arguments differ at two places: there is no
use_hat_loss, so that argument 8 of rnnt_loss and argument 9 of rnnt_loss_pruned (from 1) is
return_grad; and get_rnnt_logprobs_joint takes boundary before rnnt_type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.compat import k2_log_probs, k2_losses
from pruned_rnnt.compat.k2_log_probs import get_rnnt_logprobs, get_rnnt_logprobs_smoothed
from pruned_rnnt.compat.k2_losses import LossAndGrads, rnnt_loss_simple, rnnt_loss_smoothed
from pruned_rnnt.compat.k2_pruning import do_rnnt_pruning, get_rnnt_prune_ranges
from pruned_rnnt.compat.k2_recursion import (
    joint_mutual_information_recursion,
    mutual_information_recursion,
)

__all__ = [
    "do_rnnt_pruning",
    "get_rnnt_logprobs",
    "get_rnnt_logprobs_joint",
    "get_rnnt_logprobs_pruned",
    "get_rnnt_logprobs_smoothed",
    "get_rnnt_prune_ranges",
    "joint_mutual_information_recursion",
    "mutual_information_recursion",
    "rnnt_loss",
    "rnnt_loss_pruned",
    "rnnt_loss_simple",
    "rnnt_loss_smoothed",
    "with_cuda",
]


def with_cuda() -> bool:
    """Whether the losses run on CUDA tensors here."""
    return torch.cuda.is_available()


def get_rnnt_logprobs_joint(
    logits: Tensor,
    symbols: Tensor,
    termination_symbol: int,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
) -> tuple[Tensor, Tensor]:
    """As `pruned_rnnt.compat.k2.get_rnnt_logprobs_joint`."""
    return k2_log_probs.get_rnnt_logprobs_joint(
        logits, symbols, termination_symbol, rnnt_type, boundary
    )


def get_rnnt_logprobs_pruned(
    logits: Tensor,
    symbols: Tensor,
    ranges: Tensor,
    termination_symbol: int,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
) -> tuple[Tensor, Tensor]:
    """As `pruned_rnnt.compat.k2.get_rnnt_logprobs_pruned`."""
    return k2_log_probs.get_rnnt_logprobs_pruned(
        logits, symbols, ranges, termination_symbol, boundary, rnnt_type
    )


def rnnt_loss(
    logits: Tensor,
    symbols: Tensor,
    termination_symbol: int,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    reduction: str = "mean",
    return_grad: bool = False,
) -> Tensor | LossAndGrads:
    """As `pruned_rnnt.compat.k2.rnnt_loss`."""
    return k2_losses.rnnt_loss(
        logits,
        symbols,
        termination_symbol,
        boundary,
        rnnt_type,
        delay_penalty,
        reduction,
        return_grad=return_grad,
    )


def rnnt_loss_pruned(
    logits: Tensor,
    symbols: Tensor,
    ranges: Tensor,
    termination_symbol: int,
    boundary: Tensor | None = None,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    reduction: str = "mean",
    return_grad: bool = False,
) -> Tensor | LossAndGrads:
    """As `pruned_rnnt.compat.k2.rnnt_loss_pruned`."""
    return k2_losses.rnnt_loss_pruned(
        logits,
        symbols,
        ranges,
        termination_symbol,
        boundary,
        rnnt_type,
        delay_penalty,
        reduction,
        return_grad=return_grad,
    )
