"""k2's transducer losses under their own names and argument order.

With `from pruned_rnnt.compat import k2` a recipe's loss code runs unchanged:

    simple_loss, (px_grad, py_grad) = k2.rnnt_loss_smoothed(lm=lm, am=am, ..., return_grad=True)
    ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, s_range=5)
    am_pruned, lm_pruned = k2.do_rnnt_pruning(am=am, lm=lm, ranges=ranges)
    pruned_loss = k2.rnnt_loss_pruned(logits, symbols, ranges, blank, boundary)

All other names come from the installed k2. Without k2, k2_names.py provides those that icefall's
model and training code needs: RaggedTensor, ragged.cat, the Swoosh activations.

Kept from k2: `delay_penalty` acts only when positive; bounds are searched up to the padded S; the
am smoothing averages over padding; a target may be the blank; a box without frames and symbols
scores 0. Better than k2: the normaliser of the simple loss has no floor, and most batches use
the native losses (see k2_losses.py), whose pruned recursion never leaves the band.
"""

from __future__ import annotations

from typing import Any

from pruned_rnnt.compat.k2_log_probs import (
    get_hat_logprobs_pruned,
    get_rnnt_logprobs,
    get_rnnt_logprobs_joint,
    get_rnnt_logprobs_pruned,
    get_rnnt_logprobs_smoothed,
)
from pruned_rnnt.compat.k2_losses import (
    rnnt_loss,
    rnnt_loss_pruned,
    rnnt_loss_simple,
    rnnt_loss_smoothed,
)
from pruned_rnnt.compat.k2_names import stand_in
from pruned_rnnt.compat.k2_pruning import (
    do_rnnt_pruning,
    get_rnnt_prune_ranges,
    get_rnnt_prune_ranges_deprecated,
)
from pruned_rnnt.compat.k2_recursion import (
    joint_mutual_information_recursion,
    mutual_information_recursion,
)
from pruned_rnnt.compat.package_names import attribute_of

__all__ = [
    "do_rnnt_pruning",
    "get_hat_logprobs_pruned",
    "get_rnnt_logprobs",
    "get_rnnt_logprobs_joint",
    "get_rnnt_logprobs_pruned",
    "get_rnnt_logprobs_smoothed",
    "get_rnnt_prune_ranges",
    "get_rnnt_prune_ranges_deprecated",
    "joint_mutual_information_recursion",
    "mutual_information_recursion",
    "rnnt_loss",
    "rnnt_loss_pruned",
    "rnnt_loss_simple",
    "rnnt_loss_smoothed",
]


def __getattr__(name: str) -> Any:
    return attribute_of("k2", name, __name__, stand_in)
