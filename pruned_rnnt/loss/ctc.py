"""CTC, for the auxiliary head on the encoder, and the consistency of two CTC outputs for one
utterance: the regulariser of CR-CTC (arXiv 2410.05101).

With log-probabilities a and b of two augmented views of an utterance, and sg for "no gradient":

    loss = 1/2 sum_t [ KL(sg(exp b) || exp a) + KL(sg(exp a) || exp b) ]
         = 1/2 sum_t sum_v (exp a - exp b) (a - b)            each term is at least 0
    d loss / d logits of a = 1/2 (exp a - exp b) = - d loss / d logits of b

so one difference of probabilities is all that the backward pass needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.batch import Sizes, check_batch
from pruned_rnnt.loss.results import reduced
from pruned_rnnt.ops.common.autograd import opaque_to_compile, refuses_second_derivative
from pruned_rnnt.ops.common.library import LOG_ZERO, accumulator
from pruned_rnnt.ops.common.utterances import TargetsAndLengths, as_int32
from pruned_rnnt.ops.lattice.ctc import ctc_losses
from pruned_rnnt.ops.lattice.recursion import Recursion


def ctc_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    blank: int = 0,
    reduction: str = "mean",
    validate: bool = False,
) -> Tensor:
    """Connectionist temporal classification with warp-ctc's contract (Graves et al. 2006).

    Args:
        logits: (N, T, V), unnormalised; log-probabilities give the same result. Padding may have
            any values.
        targets: (N, U) integers in 0..V-1, not the blank; padding may have any values.
        logit_lengths, target_lengths: (N,) integers; default T and U.
        blank: column of the blank.
        reduction: `none`, `mean` (over utterances) or `sum`.
        validate: on other devices than the CPU, synchronize and check values as on the CPU;
            not in torch.compile, which refuses True.

    Returns:
        (N,) or a scalar; an utterance without a path (too few frames for its targets, or -inf in
        all paths) has loss 0 and gradient 0. float64 for float64 logits, else float32.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: names the argument that does not fit. Values of lengths and targets are checked
            on the CPU or with validate; otherwise the loss of such an utterance is +inf and its
            gradient 0.
    """
    checks.check_floating("logits", logits, "(N, T, V)", 3)
    checks.check_last_axis("logits", logits)
    checks.check_reduction(reduction)
    batch, frames, vocabulary = logits.shape
    options = checks.check_options(blank, vocabulary)
    sizes = Sizes(batch, frames, None, vocabulary, logits.device, "logits")
    integers = (targets, logit_lengths, target_lengths)
    checked = check_batch(*integers, sizes, Recursion(options), validate)
    symbols, (frames_N, symbols_N) = checked.targets, checked.lengths
    # torch's kernels read all symbols as columns of logits, also those of padding.
    u = torch.arange(targets.shape[1], device=targets.device)
    is_used = u < checked.on_device().target_lengths[:, None]
    unusable = (symbols < 0) | (symbols >= vocabulary) | (symbols == options.blank)
    unused = 0 if options.blank else vocabulary - 1
    if checks.readable(validate, targets, *checked.lengths):
        # All that is used has been checked.
        misfits_N = None
        symbols = symbols.masked_fill(~is_used, unused)
    else:
        misfits_N = (is_used & unusable).any(1)
        symbols = symbols.masked_fill(~is_used | unusable, unused)
        if checked.host_lengths is None:
            misfits_N |= (frames_N < 1) | (frames_N > frames)
            misfits_N |= (symbols_N < 0) | (symbols_N > targets.shape[1])
            frames_N, symbols_N = frames_N.clamp(1, frames), symbols_N.clamp(0, targets.shape[1])
    texts = TargetsAndLengths(symbols.long(), frames_N.long(), symbols_N.long())
    loss_N = ctc_losses(logits, texts, options.blank)
    if misfits_N is not None:
        loss_N = loss_N.masked_fill(misfits_N, torch.inf)
    return reduced(loss_N, reduction)


def ctc_consistency_loss(
    logits: Tensor,
    other_logits: Tensor,
    logit_lengths: Tensor | None = None,
    *,
    reduction: str = "mean",
    validate: bool = False,
) -> Tensor:
    """Half the symmetric Kullback-Leibler divergence of two views, summed over frames.

    In each of the two divergences only the second distribution has a gradient: the other view is
    its fixed target (CR-CTC, arXiv 2410.05101, equation 4).

    Args:
        logits, other_logits: (N, T, V), unnormalised; log-probabilities give the same result.
            Padding may have any values. A frame needs at least one finite logit. If a symbol is
            -inf in one view only, the divergence is infinite; the loss is then huge, but finite.
        logit_lengths: (N,) integers; default T. An utterance without frames has a loss of 0.
        reduction: `none`, `mean` (over utterances) or `sum`.
        validate: on other devices than the CPU, synchronize and check lengths as on the CPU;
            not in torch.compile, which refuses True.

    Returns:
        (N,) or a scalar; float64 if logits or other_logits are, else float32.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: names the argument that does not fit. Lengths outside 0..T are found on the CPU
            or with validate; otherwise the loss of such an utterance is +inf and its gradient 0.
    """
    checks.check_floating("logits", logits, "(N, T, V)", 3)
    checks.check_last_axis("logits", logits)
    checks.check_floating("other_logits", other_logits, "(N, T, V)", 3)
    checks.check_shape("other_logits", other_logits, tuple(logits.shape), "the shape of logits")
    checks.check_same("other_logits", other_logits, "logits", logits)
    checks.check_reduction(reduction)
    checks.check_validate(validate)
    batch, frames, _ = logits.shape
    if logit_lengths is None:
        return reduced(_consistency(logits, other_logits, None), reduction)
    checks.check_integers("logit_lengths", logit_lengths)
    checks.check_shape("logit_lengths", logit_lengths, (batch,), "(N,)")
    if logit_lengths.device.type != "cpu":
        checks.check_same("logit_lengths", logit_lengths, "logits", logits)
    misfits_N = (logit_lengths < 0) | (logit_lengths > frames)
    is_checked = checks.readable(validate, logit_lengths)
    if is_checked and (n := checks.first_bad(misfits_N)) is not None:
        raise ValueError(
            f"logit_lengths[{n}] is {int(logit_lengths[n])}; it must be in 0..{frames}, the frames "
            "of logits"
        )
    lengths_N = as_int32(logit_lengths).to(logits.device, non_blocking=True)
    padding_NT = torch.arange(frames, device=logits.device) >= lengths_N[:, None]
    loss_N = _consistency(logits, other_logits, padding_NT)
    if not is_checked:
        loss_N = loss_N.masked_fill(misfits_N.to(logits.device), torch.inf)
    return reduced(loss_N, reduction)


class _Consistency(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, other_logits: Tensor, padding_NT: Tensor | None
    ) -> Tensor:
        dtype = torch.promote_types(accumulator(logits.dtype), accumulator(other_logits.dtype))
        # Finite, so that a symbol which both views rule out has a difference of 0.
        ours, theirs = (
            x.to(dtype).log_softmax(2).clamp_(min=LOG_ZERO) for x in (logits, other_logits)
        )
        difference_NTV = ours.exp() - theirs.exp()
        loss_NT = (ours.sub_(theirs).mul_(difference_NTV)).sum(2)
        if padding_NT is not None:
            loss_NT = loss_NT.masked_fill(padding_NT, 0)
            difference_NTV.masked_fill_(padding_NT[:, :, None], 0)
        ctx.save_for_backward(difference_NTV)
        ctx.dtypes = logits.dtype, other_logits.dtype
        return loss_NT.sum(1) / 2

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        (difference_NTV,) = ctx.saved_tensors
        grad_NTV = difference_NTV * (grad_N / 2)[:, None, None]
        dtype, other_dtype = ctx.dtypes
        return grad_NTV.to(dtype), grad_NTV.neg().to(other_dtype), None


@opaque_to_compile
def _consistency(logits: Tensor, other_logits: Tensor, padding_NT: Tensor | None) -> Tensor:
    loss_N: Tensor = _Consistency.apply(logits, other_logits, padding_NT)  # type: ignore[no-untyped-call]
    return loss_N
