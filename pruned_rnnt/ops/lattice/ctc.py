"""CTC by torch's own kernels, as one op, so that torch.compile can trace it.

torch's kernels turn log-probabilities of -inf into NaN, and read padding. Here zeros replace the
padding, and a number far below every sum of other log-probabilities replaces -inf: an utterance
whose paths all need one has no path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import opaque_to_compile, refuses_second_derivative
from pruned_rnnt.ops.common.library import LOG_ZERO, NEG_INF, Out, accumulator, op
from pruned_rnnt.ops.common.utterances import TargetsAndLengths


def _log_softmax(logits: Tensor, logit_lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """(N,T,V) in the accumulator's dtype, finite where the logits are finite or -inf."""
    t = torch.arange(logits.shape[1], device=logits.device)
    padding = t >= logit_lengths.to(logits.device)[:, None]
    log_probs = logits.to(dtype).masked_fill(padding[:, :, None], 0)
    nothing_allowed = (log_probs == NEG_INF).all(2, keepdim=True)
    log_probs = log_probs.log_softmax(2).masked_fill_(nothing_allowed, NEG_INF)
    return log_probs.masked_fill_(log_probs == NEG_INF, LOG_ZERO)


@op
def ctc(
    logits: Tensor,
    batch: TargetsAndLengths,
    blank: int,
    loss: Out[Tensor],
    grad: Out[Tensor | None],
) -> None:
    """logits (N,T,V); targets (N,U) and lengths (N) int64, lengths on the CPU if possible. -> loss
    (N) and grad (N,T,V) = d loss / d logits, acc; 0 for an utterance without a path, and grad 0 on
    padding. grad None: the loss alone."""
    targets, logit_lengths, target_lengths = batch
    log_probs = _log_softmax(logits, logit_lengths, loss.dtype)
    by_time = log_probs.transpose(0, 1)
    lengths: tuple[Any, Any] = (logit_lengths, target_lengths)
    forward, backward = torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor
    if logit_lengths.device.type == "cpu":
        # torch 2.11 needs length tensors on the log-probabilities' device, and lists on the CPU.
        lengths = (logit_lengths.tolist(), target_lengths.tolist())
        forward = torch.ops.aten._ctc_loss.default
        backward = torch.ops.aten._ctc_loss_backward.default
    nll, log_alpha = forward(by_time, targets, *lengths, blank, zero_infinity=True)
    infeasible = nll >= -LOG_ZERO / 2
    loss.copy_(nll.masked_fill(infeasible, 0))
    if grad is None:
        return
    unit = torch.ones_like(nll)
    grad_by_time = backward(unit, by_time, targets, *lengths, nll, log_alpha, blank, True)
    grad_log_probs = grad_by_time.transpose(0, 1).masked_fill_(infeasible[:, None, None], 0)
    # The gradient of the logits.
    torch.addcmul(
        grad_log_probs, log_probs.exp_(), grad_log_probs.sum(2, keepdim=True), value=-1, out=grad
    )


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, *arguments: Any) -> Tensor:
        acc = accumulator(logits.dtype)
        loss = logits.new_empty(logits.shape[:1], dtype=acc)
        grad = None
        if ctx.needs_input_grad[0]:
            grad = torch.empty(logits.shape, dtype=acc, device=logits.device)
        ctc(logits, *arguments, loss, grad)
        ctx.save_for_backward(grad)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad_loss[:, None, None] * grad).to(ctx.dtype), None, None, None, None


@opaque_to_compile
def ctc_losses(logits_NTV: Tensor, batch: TargetsAndLengths, blank: int) -> Tensor:
    """Loss (N,) acc of logits, differentiable; integers are int64."""
    loss: Tensor = _Ctc.apply(logits_NTV, *batch, blank)  # type: ignore[no-untyped-call]
    return loss
