"""fast_rnnt's functions under their own names and argument order.

They are those of `pruned_rnnt.compat.k2` with two differences in their arguments: there is no
use_hat_loss, so that return_grad is argument 8 of rnnt_loss and argument 9 of rnnt_loss_pruned
(counted from 1); and get_rnnt_logprobs_joint takes boundary before rnnt_type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pruned_rnnt.compat import k2_log_probs, k2_losses
from pruned_rnnt.compat.k2_log_probs import get_rnnt_logprobs, get_rnnt_logprobs_smoothed
from pruned_rnnt.compat.k2_losses import rnnt_loss_simple, rnnt_loss_smoothed
from pruned_rnnt.compat.k2_pruning import do_rnnt_pruning, get_rnnt_prune_ranges
from pruned_rnnt.compat.k2_recursion import (
    joint_mutual_information_recursion,
    mutual_information_recursion,
)

__all__ = [
    "do_rnnt_pruning",
    "get_rnnt_logprobs",
    "get_rnnt_logprobs_joint",
    "get_rnnt_logprobs_pruned",
    "get_rnnt_logprobs_smoothed",
    "get_rnnt_prune_ranges",
    "joint_mutual_information_recursion",
    "mutual_information_recursion",
    "rnnt_loss",
    "rnnt_loss_pruned",
    "rnnt_loss_simple",
    "rnnt_loss_smoothed",
    "with_cuda",
]


Result = TypeVar("Result")


def with_cuda() -> bool:
    """True if the losses can run on CUDA tensors."""
    return torch.cuda.is_available()


def _with_parameters(function: Callable[..., Result], names: str) -> Callable[..., Result]:
    """The function with these parameters in this order; all others have their defaults."""
    parameters = inspect.signature(function).parameters
    signature = inspect.Signature([parameters[name] for name in names.split()])

    def call(*arguments: Any, **named: Any) -> Result:
        try:
            given = signature.bind(*arguments, **named).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}(): {error}; it takes {names}") from None
        return function(**given)

    call.__name__ = call.__qualname__ = function.__name__
    call.__doc__ = f"As `pruned_rnnt.compat.k2.{function.__name__}`, with fast_rnnt's arguments."
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


get_rnnt_logprobs_joint = _with_parameters(
    k2_log_probs.get_rnnt_logprobs_joint, "logits symbols termination_symbol boundary rnnt_type"
)
get_rnnt_logprobs_pruned = _with_parameters(
    k2_log_probs.get_rnnt_logprobs_pruned,
    "logits symbols ranges termination_symbol boundary rnnt_type",
)
rnnt_loss = _with_parameters(
    k2_losses.rnnt_loss,
    "logits symbols termination_symbol boundary rnnt_type delay_penalty reduction return_grad",
)
rnnt_loss_pruned = _with_parameters(
    k2_losses.rnnt_loss_pruned,
    "logits symbols ranges termination_symbol boundary rnnt_type delay_penalty reduction "
    "return_grad",
)
