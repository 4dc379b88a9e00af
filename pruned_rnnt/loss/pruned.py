"""The transducer loss of logits inside a band of the lattice."""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.loss.bounds import check_bounds_type
from pruned_rnnt.loss.checks import check_options, check_reduction
from pruned_rnnt.loss.full import check_logits, loss_of_logits
from pruned_rnnt.loss.results import Bounds, reduced


def rnnt_loss_pruned(
    logits: Tensor,
    targets: Tensor,
    bounds: Bounds,
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
    """Transducer loss over the paths that stay inside a band (arXiv 2206.13236).

    Args:
        logits: (N, T, S, V), column j of frame t standing for bounds.start[n, t] + j; or packed,
            (sum T_n S, V): the frames of each utterance, one utterance after the other.
        bounds: of prune_bounds; start (N, T).
        others: as of rnnt_loss.

    Returns:
        (N,) or a scalar; float64 for float64 logits, else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss, and a band without a path.
    """
    V = check_logits(logits, "S", in_place)
    check_bounds_type(bounds)
    check_reduction(reduction)
    options = check_options(
        blank, V, rnnt_type, delay_penalty, fastemit_lambda, clamp, hat, from_log_probs
    )
    batch = (targets, logit_lengths, target_lengths)
    return reduced(loss_of_logits(logits, batch, bounds, options, in_place, validate), reduction)
