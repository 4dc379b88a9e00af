"""The TDT part of PrunedTransducerLoss: projections of the trivial joiner to durations, its loss,
and the band."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pruned_rnnt.loss.band_loss import projection
from pruned_rnnt.loss.checks import check_finite, known_lengths
from pruned_rnnt.loss.joiner import Joiner, scale_initial
from pruned_rnnt.loss.tdt_checks import (
    check_durations,
    check_omega,
    check_tdt_options,
    check_tdt_paths,
)
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.row_loss import LossOptions
from pruned_rnnt.ops.joiner.tdt_row_loss import TdtLossOptions
from pruned_rnnt.ops.pruning.tdt_bounds import tdt_bounds, tdt_topology
from pruned_rnnt.ops.simple.simple_loss import SimpleOptions
from pruned_rnnt.ops.simple.simple_tdt import SimpleTdtInputs, SimpleTdtResults, simple_tdt_loss


class TdtHead(nn.Module):
    """Projects encoder and predictor output to duration logits of the trivial joiner.

    Args:
        encoder_dim, predictor_dim: E and P.
        durations, sigma, omega: see rnnt_loss_tdt; omega applies in training.
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
        self.durations = check_durations(durations)
        self.sigma, self.omega = check_finite("sigma", sigma), check_omega(omega)
        self.simple_am_proj = nn.Linear(encoder_dim, len(self.durations))
        self.simple_lm_proj = nn.Linear(predictor_dim, len(self.durations))
        for layer in (self.simple_am_proj, self.simple_lm_proj):
            scale_initial(layer, initial_scale)

    @property
    def band_topology(self) -> int:
        """By which rule of prune_bounds.py the band moves."""
        return tdt_topology(self.durations)

    def call_options(self, loss: LossOptions, utterances: Utterances) -> TdtLossOptions:
        """The options of one call, for which omega has been drawn."""
        check_tdt_paths(known_lengths(utterances, validate=False), self.durations)
        omega = self.omega if self.training else 0.0
        device = utterances.targets.device
        return check_tdt_options(loss, self.durations, self.sigma, omega, device)

    def forward(
        self,
        encoder_out: Tensor,
        predictor_out: Tensor,
        tokens: tuple[Tensor, Tensor],
        utterances: Utterances,
        options: SimpleOptions,
        recursion: TdtLossOptions,
        *,
        s_range: int,
        exact_bounds: bool,
    ) -> tuple[SimpleTdtResults, Tensor]:
        """The simple loss and the start of the band (N,T).

        tokens: am (N,T,V) and lm (N,U+1,V) of the trivial joiner, contiguous and of one dtype;
        utterances on the device."""
        am, lm = tokens
        projected = (
            projection(self.simple_am_proj, encoder_out),
            projection(self.simple_lm_proj, predictor_out),
        )
        durations = [x.to(am.dtype).contiguous() for x in projected]
        inputs = SimpleTdtInputs(am, lm, durations[0], durations[1])
        simple = simple_tdt_loss(inputs, utterances.tensors, options, recursion)
        start_NT = tdt_bounds(
            (simple.gx, simple.gy, simple.stay),
            utterances.lengths,
            s_range=s_range,
            durations=self.durations,
            exact=exact_bounds,
        )
        return simple, start_NT


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
