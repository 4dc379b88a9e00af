"""`optimized_transducer.transducer_loss` and `TransducerLoss`: the loss on packed logits.

Axes: N batch, T frames, U symbols, V vocabulary; rows: sum over n of T_n (U_n + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.compat.package_names import named_as
from pruned_rnnt.loss.checks import check_flag, check_tensor


@named_as({"from_log_probs": "from_log_softmax"})
def transducer_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    from_log_softmax: bool,
    one_sym_per_frame: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Transducer loss on packed logits; as in the original, the gradient overwrites them.

    Args:
        logits: (rows, V): the (T_n, U_n + 1, V) blocks of the utterances one after the other. If
            they require grad and from_log_softmax is False, they are overwritten.
        targets: (N, U) integers, U at least the largest target length.
        logit_lengths, target_lengths: (N,) integers.
        blank: the blank symbol, 0 <= blank < V.
        from_log_softmax: True if logits are log-probabilities already.
        one_sym_per_frame: True for the RNA topology: at most one symbol a frame, the last
            transition is a blank.
        reduction: 'mean' (over utterances) or 'sum'. There is no 'none'.

    Returns:
        A scalar.

    Raises:
        TypeError: from_log_softmax or one_sym_per_frame is neither True nor False.
        ValueError: another reduction, logits that are not packed or would be overwritten and are
            not contiguous, targets narrower than the longest, and as `pruned_rnnt.rnnt_loss`.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    check_tensor("logits", logits)
    if logits.ndim != 2:
        raise ValueError(
            f"logits has {logits.ndim} dimensions; it must be packed, (sum of T_n (U_n + 1), V)"
        )
    is_rna = check_flag("one_sym_per_frame", one_sym_per_frame)
    is_overwritten = logits.requires_grad and not check_flag("from_log_softmax", from_log_softmax)
    if is_overwritten and not logits.is_contiguous():
        raise ValueError(
            "logits is not contiguous, needs to be where the gradient overwrites it: call "
            "logits.contiguous()"
        )
    return pruned_rnnt.rnnt_loss(
        logits,
        targets,
        logit_lengths,
        target_lengths,
        blank=blank,
        rnnt_type="rna" if is_rna else "regular",
        from_log_probs=from_log_softmax,
        reduction=reduction,
        in_place=is_overwritten,
    )


class TransducerLoss(torch.nn.Module):
    """`transducer_loss` as a module; the arguments are those of the function."""

    def __init__(self, blank: int, reduction: str = "mean") -> None:
        super().__init__()
        self.blank = blank
        self.reduction = reduction

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
        from_log_softmax: bool,
        one_sym_per_frame: bool = False,
    ) -> Tensor:
        """As the function `transducer_loss`."""
        return transducer_loss(
            logits,
            targets,
            logit_lengths,
            target_lengths,
            self.blank,
            from_log_softmax,
            one_sym_per_frame,
            self.reduction,
        )
