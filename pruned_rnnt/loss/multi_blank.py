"""The multi-blank transducer loss (arXiv 2211.03541): blanks that advance several frames.

K is the number of blanks.

The recursion is that of TDT with a table of arcs in which blanks of different durations are entries
of the one softmax, and symbols have duration 0:

    alpha(t,u) = logsumexp of alpha(t,u-1) + lp(t,u-1,y[u])
                 and, for each blank b of duration d, alpha(t-d,u) + lp(t-d,u,b)

with lp = log_softmax(logits) - sigma. A path ends with a blank that lands on T exactly. It is
computed by torch operations, one anti-diagonal after the other, on every device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.logit_losses import check_logits
from pruned_rnnt.loss.results import reduced
from pruned_rnnt.ops.common.library import LOG_ZERO, accumulator
from pruned_rnnt.ops.common.utterances import Utterances


def rnnt_loss_multi_blank(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    big_blanks: Mapping[int, int],
    sigma: float = 0.0,
    blank: int = 0,
    reduction: str = "mean",
    validate: bool = False,
) -> Tensor:
    """Multi-blank transducer loss -log P(targets | logits), arXiv 2211.03541.

    Composed of torch operations: slower than the other losses, and it stores the log-probabilities.

    Args:
        logits: (N, T, U+1, V), floating.
        targets, logit_lengths, target_lengths: as of rnnt_loss; targets are no big blanks.
        big_blanks: the frames by which each further blank advances, 2 or more, by its column.
        sigma: subtracted from each log-probability (logit under-normalization, 0.05 in the paper).
        blank: column of the blank that advances one frame; negative counts from the end.
        reduction, validate: as of rnnt_loss.

    Returns:
        (N,) or a scalar; float64 for float64 logits, else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss; ValueError also for columns or durations of big_blanks
            that do not fit.
    """
    if logits.dim() == 2:
        raise ValueError("logits is packed; the multi-blank loss needs (N, T, U+1, V)")
    vocabulary = check_logits(logits, "U+1", in_place=False)
    checks.check_reduction(reduction)
    options = checks.check_options(blank, vocabulary)
    durations = {options.blank: 1, **_checked(big_blanks, options.blank, vocabulary)}
    sigma = checks.check_finite("sigma", sigma)
    size, frames, columns, _ = logits.shape
    sizes = checks.Sizes(size, frames, columns - 1, vocabulary, logits.device, "logits")
    checked = checks.check_batch(targets, logit_lengths, target_lengths, sizes, options, validate)
    log_probs = logits.to(accumulator(logits.dtype)).log_softmax(-1) - sigma
    total = _total(log_probs, checked.on_device(), durations)
    has_path = total > LOG_ZERO / 2
    loss = torch.where(has_path, -total, torch.inf)
    return reduced(loss, reduction)


def _checked(big_blanks: Mapping[int, int], blank: int, vocabulary: int) -> Mapping[int, int]:
    for column, duration in big_blanks.items():
        if not 0 <= column < vocabulary or column == blank:
            raise ValueError(
                f"big_blanks has the column {column}; it must be in 0..{vocabulary - 1} and not "
                f"that of blank, {blank}"
            )
        if duration < 2:
            raise ValueError(
                f"big_blanks[{column}] is {duration}; a big blank advances 2 frames or more"
            )
    return big_blanks


def _total(log_probs: Tensor, utterances: Utterances, durations: Mapping[int, int]) -> Tensor:
    """log P (N,) of log-probabilities (N,T,U+1,V)."""
    size, frames, columns, _ = log_probs.shape
    device = log_probs.device
    lengths_N, symbols_N = (x.long() for x in utterances.lengths)
    index_NU = utterances.targets.long().clamp(0, log_probs.shape[3] - 1)
    index = pad(index_NU, (0, 1))[:, None, :, None].expand(-1, frames, -1, 1)
    emit_NTU = log_probs.gather(3, index)[..., 0]
    t = torch.arange(frames, device=device)[:, None]
    u = torch.arange(columns, device=device)
    inside = t < lengths_N[:, None, None]
    emit_NTU = torch.where(inside & (u < symbols_N[:, None, None]), emit_NTU, LOG_ZERO)
    # Of anti-diagonal k, element u is the node (k - u, u).
    emits = _antidiagonals(emit_NTU)
    blanks = {
        column: _antidiagonals(torch.where(inside, log_probs[..., column], LOG_ZERO))
        for column in durations
    }
    alphas = [torch.where(u == 0, 0.0, LOG_ZERO).to(log_probs.dtype).expand(size, -1)]
    for k in range(1, frames + columns):
        by_symbol = alphas[k - 1] + emits[:, k - 1]
        terms = [pad(by_symbol[:, :-1], (1, 0), value=LOG_ZERO)]
        terms += [
            alphas[k - duration] + blanks[column][:, k - duration]
            for column, duration in durations.items()
            if duration <= k
        ]
        # Sums of several minus infinities must not overflow.
        alphas.append(torch.stack(terms).logsumexp(0).clamp(min=LOG_ZERO))
    ends_N = (lengths_N + symbols_N).clamp(0, frames + columns - 1)
    at_end = torch.stack(alphas, dim=1)[torch.arange(size, device=device), ends_N]
    return at_end.gather(1, symbols_N.clamp(0, columns - 1)[:, None])[:, 0]


def _antidiagonals(nodes_NTU: Tensor) -> Tensor:
    """(N,T,U+1) -> (N,T+U,U+1): element (k,u) is that of the node (k - u, u)."""
    frames, columns = nodes_NTU.shape[1:]
    k = torch.arange(frames + columns - 1, device=nodes_NTU.device)[:, None]
    t = k - torch.arange(columns, device=nodes_NTU.device)
    inside = (t >= 0) & (t < frames)
    index = t.clamp(0, frames - 1)[None].expand(nodes_NTU.shape[0], -1, -1)
    return torch.where(inside, nodes_NTU.gather(1, index), LOG_ZERO)
