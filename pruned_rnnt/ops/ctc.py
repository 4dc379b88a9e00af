"""CTC by torch's own kernels, as one op, so that torch.compile can trace it.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.ops._library import define
from pruned_rnnt.ops.second_derivative import refuses_second_derivative


def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    loss: Tensor,
    grad: Tensor,
) -> None:
    by_time = log_probs.transpose(0, 1)
    lengths: tuple[Any, Any] = (logit_lengths, target_lengths)
    forward, backward = torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor
    if logit_lengths.device.type == "cpu":
        # torch 2.11 wants length tensors where the log-probabilities are; lists are for the host.
        lengths = (logit_lengths.tolist(), target_lengths.tolist())
        forward = torch.ops.aten._ctc_loss.default
        backward = torch.ops.aten._ctc_loss_backward.default
    nll, log_alpha = forward(by_time, targets, *lengths, blank, zero_infinity=True)
    unit = torch.ones_like(nll)
    grad_by_time = backward(unit, by_time, targets, *lengths, nll, log_alpha, blank, True)
    infeasible = nll == torch.inf
    loss.copy_(nll.masked_fill(infeasible, 0))
    grad.copy_(grad_by_time.transpose(0, 1).masked_fill(infeasible[:, None, None], 0))


# log_probs (N,T,V) acc, normalised; targets (N,U), lengths (N) int64, lengths best on the CPU.
# -> loss (N) and grad (N,T,V) = d loss / d log_probs. An utterance without a path gets 0.
ctc = define(
    "ctc(Tensor log_probs, Tensor targets, Tensor logit_lengths, Tensor target_lengths, int blank, "
    "Tensor(a!) loss, Tensor(b!) grad) -> ()",
    _ctc,
)


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        log_probs: Tensor,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
        blank: int,
    ) -> Tensor:
        loss = log_probs.new_empty(log_probs.shape[:1])
        grad = torch.empty_like(log_probs)
        ctc(log_probs, targets, logit_lengths, target_lengths, blank, loss, grad)
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad_loss[:, None, None] * grad, None, None, None, None


def ctc_losses(
    log_probs_NTV: Tensor,
    targets_NU: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
) -> Tensor:
    """Loss (N,) of normalised log-probabilities, differentiable; integers are int64."""
    loss: Tensor = _Ctc.apply(  # type: ignore[no-untyped-call]
        log_probs_NTV, targets_NU, logit_lengths, target_lengths, blank
    )
    return loss
