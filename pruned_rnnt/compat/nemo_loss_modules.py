"""The RNN-T and TDT losses as NeMo resolves them by name; `nemo_loss` registers them.

They refuse the outputs of a joint that are neither symbols nor the blank and that they are not for.
NeMo gives its losses a number of classes and logits, and for every loss name but its own `tdt` that
number counts durations as symbols. Only the joint knows better, so it notes its count in the
autograd node of its logits, where it outlasts what NeMo does to them before the loss.

Axes: N batch, T frames, U symbols, V symbols; RNN-T: with the blank, TDT: without; K durations.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.compat import joint_inputs
from pruned_rnnt.compat.joint_inputs import JointInputs
from pruned_rnnt.compat.package_names import named_as
from pruned_rnnt.loss.checks import check_fastemit, check_finite, check_flag
from pruned_rnnt.loss.durations import check_durations, check_omega

_NAMES = {
    "logits": "acts",
    "targets": "labels",
    "logit_lengths": "act_lens",
    "target_lengths": "label_lens",
}
_KEY = "pruned_rnnt_joint_extra_outputs"
# Between the joint and the loss NeMo narrows, copies and converts.
_NODES = 5


class NemoRNNTLoss(torch.nn.Module):
    """The transducer loss as NeMo resolves it by name, under NeMo's argument names.

    Args:
        blank: column of the blank; NeMo passes the last one.
        reduction: None or `none`, `mean` (over utterances), `sum`. NeMo passes none and reduces
            the losses itself.
        fastemit_lambda: f scales the gradient through symbols by 1 + f (FastEmit, arXiv
            2010.11148). The value stays -log P, unless fastemit_scales_value.
        clamp: bound of each element of d loss_n / d logits; 0 or less, or None: none.
        fastemit_scales_value: multiply the value, not the gradient, by 1 + fastemit_lambda, as
            warprnnt_numba does, so that logged losses compare with older runs.
        delay_penalty: see `pruned_rnnt.rnnt_loss`; above 0 favours early symbols.
        in_place: write the gradient over the logits, which saves as much memory as they take. For
            joints with `log_softmax: false`, and on GPUs also with `log_softmax: null`; with
            others, torch refuses the backward pass.
        validate: on GPUs, synchronize and check labels and lengths as on CPUs, so that an utterance
            without a path is an error and not a loss of +inf.

    Raises:
        TypeError, ValueError: an option that does not fit.
    """

    def __init__(
        self,
        blank: int,
        reduction: str | None = "none",
        *,
        fastemit_lambda: float = 0.0,
        clamp: float | None = -1.0,
        fastemit_scales_value: bool = False,
        delay_penalty: float = 0.0,
        in_place: bool = False,
        validate: bool = False,
    ) -> None:
        super().__init__()
        # NeMo overwrites both from outside: SampledRNNTJoint the blank, RNNTLoss the reduction.
        self.blank = blank
        # Of a loss that NeMo resolved: the column that must be the last one.
        self.last_column: int | None = None
        self.reduction = reduction
        self.fastemit_lambda = check_fastemit(fastemit_lambda)
        self.clamp = -1.0 if clamp is None else check_finite("clamp", clamp)
        self.fastemit_scales_value = check_flag("fastemit_scales_value", fastemit_scales_value)
        self.delay_penalty = check_finite("delay_penalty", delay_penalty)
        self.in_place = check_flag("in_place", in_place)
        self.validate = check_flag("validate", validate)

    @named_as(_NAMES)
    def forward(
        self, acts: Tensor | JointInputs, labels: Tensor, act_lens: Tensor, label_lens: Tensor
    ) -> Tensor:
        """Transducer loss.

        Args:
            acts: (N, T, U + 1, V) logits or log-probabilities; float32, float64, float16 or
                bfloat16; or the inputs of the joint in their place, for which in_place has no
                effect.
            labels: (N, U) integers.
            act_lens, label_lens: (N,) integers.

        Returns:
            (N,) without reduction, else a scalar; float64 for float64 acts, else float32.

        Raises:
            ValueError: acts have outputs behind the blank (durations of a TDT model, big blanks);
                and as `pruned_rnnt.rnnt_loss`.
        """
        extra = extra_outputs(acts) or 0
        # A joint that samples its vocabulary moves the blank to the first column for a call.
        if self.last_column is not None and self.blank == self.last_column:
            extra = max(extra, acts.shape[-1] - 1 - self.last_column)
        if extra > 0:
            raise ValueError(
                f"loss_name: pruned_rnnt is for joints of symbols and the blank, and this joint "
                f"has {extra} outputs more: durations of a TDT model, whose loss is loss_name: "
                "pruned_rnnt_tdt, or big blanks, which keep NeMo's own loss"
            )
        options: dict[str, Any] = {
            "blank": self.blank,
            "delay_penalty": self.delay_penalty,
            "fastemit_lambda": self.fastemit_lambda,
            "clamp": self.clamp if self.clamp > 0 else None,
            "reduction": self.reduction or "none",
            "validate": self.validate,
        }
        if self.in_place and isinstance(acts, Tensor):
            options["in_place"] = True
        loss = joint_inputs.rnnt_loss(acts, labels, act_lens, label_lens, **options)
        if self.fastemit_scales_value:
            loss = loss + self.fastemit_lambda * loss.detach()
        return loss


class NemoTDTLoss(torch.nn.Module):
    """The token-and-duration loss as NeMo resolves it by name, under NeMo's argument names.

    Args:
        blank: NeMo's id of the blank, V. Configurations with another loss name than `tdt` make NeMo
            pass V + K; both are right, because the blank is always the column before the durations.
        reduction: None or `none`, `mean` (over utterances), `sum`. NeMo passes none and reduces
            the losses itself.
        durations: of the K last columns, in their order.
        sigma: subtracted from each log-probability of symbols and blanks.
        omega: probability with which a call is the RNN-T loss of the symbols and the blank instead.
        fastemit_lambda: f scales the gradient through symbols by 1 + f; the value stays -log P.
        clamp: bound of each element of d loss_n / d acts; 0 or less, or None: none.
        delay_penalty: see `pruned_rnnt.rnnt_loss_tdt`; above 0 favours early symbols.
        validate: on GPUs, synchronize and check labels and lengths as on CPUs.

    Raises:
        TypeError, ValueError: there are no durations, or an option does not fit.
    """

    def __init__(
        self,
        blank: int,
        reduction: str | None = "none",
        *,
        durations: Sequence[int],
        sigma: float = 0.0,
        omega: float = 0.0,
        fastemit_lambda: float = 0.0,
        clamp: float | None = -1.0,
        delay_penalty: float = 0.0,
        validate: bool = False,
    ) -> None:
        super().__init__()
        if not durations:
            raise ValueError(
                "durations is empty, needs those of the joint's last outputs, for example "
                "[0, 1, 2, 3, 4]"
            )
        # NeMo overwrites the reduction from outside.
        self.blank = blank
        self.reduction = reduction
        self.durations = tuple(check_durations(durations))
        self.sigma = check_finite("sigma", sigma)
        self.omega = check_omega(omega)
        self.fastemit_lambda = check_fastemit(fastemit_lambda)
        self.clamp = -1.0 if clamp is None else check_finite("clamp", clamp)
        self.delay_penalty = check_finite("delay_penalty", delay_penalty)
        self.validate = check_flag("validate", validate)

    @named_as(_NAMES)
    def forward(
        self, acts: Tensor | JointInputs, labels: Tensor, act_lens: Tensor, label_lens: Tensor
    ) -> Tensor:
        """Transducer loss.

        Args:
            acts: (N, T, U + 1, V + 1 + K) logits, or log-probabilities of any normalisation;
                or the inputs of the joint in their place.
            labels: (N, U) integers below V.
            act_lens, label_lens: (N,) integers.

        Returns:
            (N,) without reduction, else a scalar; float64 for float64 acts, else float32.

        Raises:
            ValueError: the columns are not V symbols, the blank and one for each of `durations`, or
                the joint has no durations; and as `pruned_rnnt.rnnt_loss_tdt`.
        """
        count, extra = len(self.durations), extra_outputs(acts)
        if extra is not None and extra != count:
            raise ValueError(
                f"loss_name: pruned_rnnt_tdt has {count} durations, {self.durations}, and the "
                f"joint {extra} outputs besides symbols and blank: pass the durations of the "
                "joint; one without durations needs loss_name: pruned_rnnt"
            )
        column = acts.shape[-1] - count - 1
        if self.blank not in (column, column + count):
            raise ValueError(
                f"acts has {acts.shape[-1]} columns and durations {count} elements, so that "
                f"the blank is column {column}, but NeMo's blank is {self.blank}: pass the "
                "durations of the model's joint (joint.num_extra_outputs of them)"
            )
        return joint_inputs.rnnt_loss_tdt(
            acts[..., : column + 1],
            acts[..., column + 1 :],
            labels,
            act_lens,
            label_lens,
            durations=self.durations,
            sigma=self.sigma,
            omega=self.omega,
            blank=column,
            delay_penalty=self.delay_penalty,
            fastemit_lambda=self.fastemit_lambda,
            clamp=self.clamp if self.clamp > 0 else None,
            reduction=self.reduction or "none",
            validate=self.validate,
        )


def mark_outputs() -> None:
    """Make NeMo's joint note with its logits what `extra_outputs` reads. Calling it again is
    harmless."""
    try:
        module = importlib.import_module("nemo.collections.asr.modules.rnnt")
    except ImportError:
        # Models then have joints of other classes, which note nothing.
        return
    own = module.RNNTJoint.joint_after_projection
    # functools.wraps copies this attribute into what another library wraps around ours.
    if not hasattr(own, _KEY):
        module.RNNTJoint.joint_after_projection = _noting(own)


def extra_outputs(acts: Any) -> int | None:
    """Columns of a joint's logits that are durations or big blanks; None if nothing is known, as
    without gradients."""
    node: Any = acts.grad_fn if isinstance(acts, Tensor) else None
    for _ in range(_NODES):
        if node is None:
            break
        if _KEY in node.metadata:
            return int(node.metadata[_KEY])
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def joint_after_projection(self: Any, f: Tensor, g: Tensor) -> Any:
        logits = original(self, f, g)
        node: Any = logits.grad_fn if isinstance(logits, Tensor) else None
        if node is not None:
            node.metadata[_KEY] = self.num_extra_outputs
        return logits

    joint_after_projection.__dict__[_KEY] = True
    return joint_after_projection
