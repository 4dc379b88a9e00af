"""The transducer loss of logits over the whole lattice.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.loss.checks import (
    check_floating,
    check_options,
    check_tensor,
    check_utterances,
)
from pruned_rnnt.loss.packing import given_packed_rows
from pruned_rnnt.ops.common.reduction import reduced
from pruned_rnnt.ops.common.row_geometry import RowGeometry
from pruned_rnnt.ops.joiner.row_loss import row_loss


def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    blank: int = 0,
    rnnt_type: str = "regular",
    from_log_probs: bool = False,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    hat: bool = False,
    reduction: str = "mean",
    in_place: bool = False,
    validate: bool = False,
) -> Tensor:
    """Transducer loss -log P(targets | logits), Graves arXiv 1211.3711.

    Args:
        logits: (N, T, U+1, V), float64, float32, float16 or bfloat16; or packed,
            (sum T_n (U_n+1), V): the rows of each utterance's own lattice, frame by frame, one
            utterance after the other (packed_row_splits). Log-probabilities, with from_log_probs.
        targets: (N, U) integers in 0..V-1, not the blank; padding may hold anything.
        logit_lengths, target_lengths: (N,) integers, on the device of logits or the CPU. The
            default is T and U; packed logits need logit_lengths.
        blank: column of the blank; negative counts from the end.
        rnnt_type: `regular`: any number of symbols a frame. `modified`: one at most, and a frame
            emits a symbol or a blank. `constrained`: as modified, a symbol followed by the blank of
            the same frame. `rna`: as modified, the last frame emits a blank.
        from_log_probs: do not normalise.
        delay_penalty: d adds d ((T_n - 1)/2 - t) to the log-probability of a symbol at frame t:
            above 0 favours early symbols.
        fastemit_lambda: f scales the gradient through symbols by 1 + f; the loss stays (FastEmit,
            arXiv 2010.11148).
        clamp: bound of each element of d loss_n / d logits, applied before the incoming gradient.
        hat: blank is a Bernoulli variable, symbols share the rest (HAT, arXiv 2003.07705).
        reduction: `none`, `mean` (over utterances) or `sum`.
        in_place: write the gradient over the logits, which saves their size in memory; logits
            must then not be used after the backward pass.
        validate: on other devices than the CPU, wait and check values as on the CPU.

    Returns:
        (N,) or a scalar; float64 for float64 logits, else float32.

    Raises:
        TypeError: an argument that must be a tensor and is none.
        ValueError: what does not fit, by name. Values (lengths, targets, an utterance without a
            path) are checked on the CPU or with validate; elsewhere the loss of such an utterance
            is +inf and its gradient 0.
    """
    check_tensor("logits", logits)
    packed = logits.dim() == 2
    check_floating("logits", logits, "(N, T, U+1, V) or packed (rows, V)", 2 if packed else 4)
    vocabulary = logits.shape[-1]
    options = check_options(
        blank=blank,
        vocabulary=vocabulary,
        rnnt_type=rnnt_type,
        reduction=reduction,
        delay_penalty=delay_penalty,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        hat=hat,
        from_log_probs=from_log_probs,
    )
    if in_place and not logits.is_contiguous():
        raise ValueError("in_place=True needs contiguous logits")
    utterances = check_utterances(
        targets,
        logit_lengths,
        target_lengths,
        batch=None if packed else logits.shape[0],
        frames=None if packed else logits.shape[1],
        symbols=None if packed else logits.shape[2] - 1,
        vocabulary=vocabulary,
        blank=options.blank,
        rnnt_type=options.rnnt_type,
        device=logits.device,
        validate=validate,
        source="logits",
    )
    if packed:
        utterances, geometry = given_packed_rows(utterances, None, logits.shape[0], validate)
    else:
        geometry = RowGeometry(None, None, logits.shape[1], logits.shape[2])
    loss = row_loss(
        logits.contiguous().view(-1, vocabulary),
        utterances.targets,
        utterances.logit_lengths,
        utterances.target_lengths,
        geometry,
        options,
        in_place,
    )
    return reduced(loss, reduction)
