"""CTC, for the auxiliary head on the encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.results import reduced
from pruned_rnnt.ops.common.utterances import TargetsAndLengths
from pruned_rnnt.ops.lattice.ctc import ctc_losses


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
        blank: column of the blank; negative counts from the end.
        reduction: `none`, `mean` (over utterances) or `sum`.
        validate: on other devices than the CPU, synchronize and check values as on the CPU.

    Returns:
        (N,) or a scalar; an utterance without a path (too few frames for its targets, or -inf in
        all paths) has loss 0 and gradient 0. float64 for float64 logits, else float32.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: names the argument that does not fit.
    """
    checks.check_floating("logits", logits, "(N, T, V)", 3)
    checks.check_reduction(reduction)
    size, frames, vocabulary = logits.shape
    options = checks.check_options(blank, vocabulary)
    sizes = checks.Sizes(size, frames, None, vocabulary, logits.device, "logits")
    checked = checks.check_batch(targets, logit_lengths, target_lengths, sizes, options, validate)
    utterances = checked.on_device()
    # torch's op reads padding, which may have any values.
    u = torch.arange(targets.shape[1], device=targets.device)
    unused = 0 if options.blank else vocabulary - 1
    symbols = utterances.targets.long().masked_fill(u >= utterances.target_lengths[:, None], unused)
    texts = TargetsAndLengths(symbols, *(x.long() for x in checked.lengths))
    return reduced(ctc_losses(logits, texts, options.blank), reduction)
