"""CTC, for the auxiliary head on the encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.batch import Sizes, check_batch
from pruned_rnnt.loss.results import reduced
from pruned_rnnt.ops.common.utterances import TargetsAndLengths
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
        validate: on other devices than the CPU, synchronize and check values as on the CPU.

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
    given = (targets, logit_lengths, target_lengths)
    checked = check_batch(*given, sizes, Recursion(options), validate)
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
