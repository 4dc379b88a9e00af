"""CTC, for the auxiliary head on the encoder.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss.checks import (
    check_blank,
    check_floating,
    check_reduction,
    check_utterances,
)
from pruned_rnnt.ops.common.library import REGULAR
from pruned_rnnt.ops.common.reduction import reduced
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
        logits: (N, T, V), unnormalised activations; log-probabilities give the same, for
            normalising them again changes nothing. Padding may hold anything.
        targets: (N, U) integers in 0..V-1, not the blank; padding may hold anything.
        logit_lengths, target_lengths: (N,) integers; default T and U.
        blank: column of the blank; negative counts from the end.
        reduction: `none`, `mean` (over utterances) or `sum`.
        validate: on other devices than the CPU, wait and check values as on the CPU.

    Returns:
        (N,) or a scalar; an utterance without a path (too few frames for its targets, or -inf in
        all paths) has loss 0 and gradient 0. float64 for float64 logits, else float32.

    Raises:
        TypeError: an argument of another type.
        ValueError: what does not fit, by name.
    """
    check_floating("logits", logits, "(N, T, V)", 3)
    check_reduction(reduction)
    batch, frames, vocabulary = logits.shape
    blank = check_blank(blank, vocabulary)
    utterances = check_utterances(
        targets,
        logit_lengths,
        target_lengths,
        batch=batch,
        frames=frames,
        symbols=None,
        vocabulary=vocabulary,
        blank=blank,
        rnnt_type=REGULAR,
        device=logits.device,
        validate=validate,
        source="logits",
    )
    # Padding may hold anything here, but not in torch's op.
    used = torch.arange(targets.shape[1], device=targets.device)
    within = used < utterances.target_lengths[:, None]
    symbols = utterances.targets.long().masked_fill(~within, 0 if blank else vocabulary - 1)
    lengths = utterances.host_lengths or (utterances.logit_lengths, utterances.target_lengths)
    loss = ctc_losses(logits, symbols, lengths[0].long(), lengths[1].long(), blank)
    return reduced(loss, reduction)
