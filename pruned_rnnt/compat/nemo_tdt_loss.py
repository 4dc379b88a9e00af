"""The TDT loss as NeMo resolves it by name; `nemo_loss` registers it.

Axes: N batch, T frames, U symbols, V symbols without the blank, K durations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.compat import joint_inputs
from pruned_rnnt.compat.argument_names import named_as
from pruned_rnnt.compat.joint_inputs import JointInputs
from pruned_rnnt.compat.nemo_outputs import extra_outputs
from pruned_rnnt.loss.checks import check_finite, check_flag
from pruned_rnnt.loss.durations import check_durations, check_omega

_NAMES = {
    "logits": "acts",
    "targets": "labels",
    "logit_lengths": "act_lens",
    "target_lengths": "label_lens",
}


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
        self.fastemit_lambda = check_finite("fastemit_lambda", fastemit_lambda)
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
