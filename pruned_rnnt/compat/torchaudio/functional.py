"""`torchaudio.functional` with this package's `rnnt_loss`.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.compat.k2_arguments import column_of
from pruned_rnnt.compat.package_names import attribute_of
from pruned_rnnt.loss.checks import check_finite, check_flag

__all__ = ["rnnt_loss"]


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

    torch.jit.script runs it as a call to Python: scripted code trains, but a scripted module that
    computes the loss cannot be saved (torch.jit.save says 'Could not export Python function call').

    Args:
        logits: (N, T, U + 1, V).
        targets: (N, U) integers.
        logit_lengths, target_lengths: (N,) integers.
        blank: a negative index counts from the end of the vocabulary.
        clamp: gradients are clamped to [-clamp, clamp]; negative: not at all.
        reduction: 'none', 'mean' (over utterances) or 'sum'.
        fused_log_softmax: False if logits are log-probabilities already.

    Returns:
        (N,) for reduction 'none', else a scalar. The dtype is that of logits, except
        float32 for bfloat16 (which torchaudio does not take). Float16 logits are summed in float32.

    Raises:
        TypeError, ValueError: an unknown reduction, and as `pruned_rnnt.rnnt_loss`.
    """
    return _call_in_python(
        logits, targets, logit_lengths, target_lengths, blank, clamp, reduction, fused_log_softmax
    )


def _rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    clamp: float,
    reduction: str,
    fused_log_softmax: bool,
) -> Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'none', 'mean' or 'sum'")
    costs = pruned_rnnt.rnnt_loss(
        logits,
        targets,
        logit_lengths,
        target_lengths,
        blank=column_of(blank, logits),
        clamp=clamp if check_finite("clamp", clamp) > 0 else None,
        reduction=reduction,
        from_log_probs=not check_flag("fused_log_softmax", fused_log_softmax),
    )
    return costs.half() if logits.dtype == torch.float16 else costs


# TorchScript compiles rnnt_loss, fills in its defaults, and calls this in Python. It reads the
# annotations of both functions, so that those of this file must not be postponed.
_call_in_python: Callable[..., Tensor] = torch.jit.ignore(_rnnt_loss)


def __getattr__(name: str) -> Any:
    return attribute_of("torchaudio.functional", name, __name__)
