"""The TDT part of PrunedTransducerLoss: durations, and the trivial joiner's projections to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pruned_rnnt.loss.checks import check_finite
from pruned_rnnt.loss.durations import check_band_durations, check_omega, draws_rnnt, tdt_recursion
from pruned_rnnt.loss.joiner import Joiner, scale_initial
from pruned_rnnt.ops.lattice.recursion import LossOptions, Recursion


class TdtHead(nn.Module):
    """Projects encoder and predictor output to duration logits of the trivial joiner.

    Args:
        encoder_dim, predictor_dim: E and P.
        durations, sigma, omega: see rnnt_loss_tdt; 1 must be among durations. omega applies in
            training.
        initial_scale: initial weights of the projections as a fraction of torch's default.
    """

    def __init__(
        self,
        encoder_dim: int,
        predictor_dim: int,
        durations: Sequence[int],
        sigma: float,
        omega: float,
        initial_scale: float,
    ):
        super().__init__()
        self.durations = check_band_durations(durations)
        self.sigma, self.omega = check_finite("sigma", sigma), check_omega(omega)
        self.simple_am_proj = nn.Linear(encoder_dim, len(self.durations))
        self.simple_lm_proj = nn.Linear(predictor_dim, len(self.durations))
        for layer in (self.simple_am_proj, self.simple_lm_proj):
            scale_initial(layer, initial_scale)
        self._drawn: tuple[int | None, bool] | None = None

    def recursion(self, loss: LossOptions, step: int | None, device: torch.device) -> Recursion:
        """The recursion of a call in that optimiser step, for which omega is drawn once."""
        recursion = tdt_recursion(loss, self.durations, self.sigma)
        if not self.training or self.omega == 0:
            return recursion
        if step is None or self._drawn is None or self._drawn[0] != step:
            self._drawn = (step, draws_rnnt(self.omega, device))
        # Dynamo of torch 2.11 passes no result of `_replace` to a function that it keeps as a node.
        return Recursion(recursion.loss, recursion.tdt, ignores_durations=self._drawn[1])


def check_no_durations(joiner: object, sigma: float, omega: float) -> None:
    """ValueError for a joiner with a layer for durations, which would not be trained, and for
    options that would have no effect."""
    for name, value in (("sigma", check_finite("sigma", sigma)), ("omega", check_omega(omega))):
        if value != 0:
            raise ValueError(
                f"{name} is {value} but durations is None; {name} needs durations=..., for example "
                "(0, 1, 2, 3, 4), and must be 0 without"
            )
    if isinstance(joiner, Joiner) and joiner.duration_linear is not None:
        count = getattr(joiner.duration_linear, "out_features", "some")
        raise ValueError(
            f"joiner has duration_count={count}, needs durations=..., one for each; without "
            "durations, give Joiner duration_count=0"
        )


def check_tdt_joiner(joiner: object, durations: Sequence[int], rnnt_type: str, hat: bool) -> None:
    """ValueError unless the joiner has a layer for these durations and options fit TDT."""
    if not isinstance(joiner, Joiner) or joiner.duration_linear is None:
        raise ValueError(
            f"durations is {tuple(durations)}, but joiner has no layer for them; it must be a "
            "pruned_rnnt.Joiner with duration_count=len(durations)"
        )
    outputs = getattr(joiner.duration_linear, "out_features", len(durations))
    if outputs != len(durations):
        raise ValueError(
            f"durations has {len(durations)} elements but joiner.duration_linear {outputs} "
            f"outputs; give Joiner duration_count={len(durations)}"
        )
    if rnnt_type != "regular" or hat:
        raise ValueError(
            f"rnnt_type is {rnnt_type!r} and hat {hat}; durations need rnnt_type='regular' and "
            "hat=False"
        )
