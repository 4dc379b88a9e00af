"""The pruned loss, layer by layer: of a Joiner without storing its logits, or of any callable."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pruned_rnnt.loss.checks import check_shape
from pruned_rnnt.loss.joiner import Joiner, OutputParameters, durations_of_call
from pruned_rnnt.loss.logit_losses import check_logits, loss_of_logits, rows_of_logits
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.loss.tdt_checks import check_duration_logits
from pruned_rnnt.ops.common.matrix_products import is_autocast_enabled
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.fused_joiner import joiner_loss, planned_joiner
from pruned_rnnt.ops.joiner.fused_tdt import OutputLayers, tdt_joiner_loss
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.joiner.row_loss import LossOptions
from pruned_rnnt.ops.joiner.tdt_row_loss import TdtLossOptions, TdtRows, tdt_row_loss
from pruned_rnnt.ops.pruning.band_gather import gathered_band


def projection(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), with x in the dtype of the layer's parameters unless autocast chooses one."""
    if not is_autocast_enabled(x):
        floating = (p.dtype for p in layer.parameters() if p.is_floating_point())
        x = x.to(next(floating, x.dtype))
    projected: Tensor = layer(x)
    return projected


def band_loss(
    joiner: Joiner | Callable[[Tensor, Tensor], Tensor],
    encoder_out: Tensor,
    predictor_out: Tensor,
    utterances: Utterances,
    bounds: Bounds,
    *,
    vocab_size: int,
    options: LossOptions,
    output: OutputParameters | None,
    tdt: TdtLossOptions | None = None,
) -> Tensor:
    """(N,) for encoder_out (N,T,E), predictor_out (N,U+1,P), utterances on their device and bounds
    of choose_bounds.

    output: of a Joiner whose logits are computed in chunks; None calls the joiner and stores them.
    tdt: of a TDT loss, whose joiner is a Joiner.
    """
    start_NT, s_range = bounds
    am, lm = encoder_out, predictor_out
    if isinstance(joiner, Joiner):
        am, lm = projection(joiner.encoder_proj, am), projection(joiner.decoder_proj, lm)
    if output is not None:
        assert isinstance(joiner, Joiner)
        activation = ACTIVATIONS[joiner.activation]
        if tdt is not None:
            assert output.durations is not None
            return tdt_joiner_loss(
                am,
                lm,
                OutputLayers(*output.tokens, *output.durations),
                utterances,
                start=start_NT,
                columns=s_range,
                activation=activation,
                options=tdt,
            )
        planned = planned_joiner(
            am,
            lm,
            *output.tokens,
            utterances,
            start=start_NT,
            columns=s_range,
            vocabulary=vocab_size,
            activation=activation,
            options=options,
        )
        return joiner_loss(*planned)
    am_NTSD = am[:, :, None, :].expand(-1, -1, s_range, -1)
    lm_NTSD = gathered_band(lm.contiguous(), start_NT, s_range)
    shape = (*start_NT.shape, s_range, vocab_size)
    batch = utterances.tensors
    if tdt is None:
        logits = joiner(am_NTSD, lm_NTSD)
        check_shape("what joiner returns", logits, shape, "logits (N, T, S, vocab_size)")
        check_logits(logits, "S", in_place=False)
        return loss_of_logits(logits, batch, bounds, options, in_place=False, validate=False)
    assert isinstance(joiner, Joiner)
    logits, durations = durations_of_call(joiner, am_NTSD, lm_NTSD)
    check_shape("what joiner returns", logits, shape, "logits (N, T, S, vocab_size)")
    check_logits(logits, "S", in_place=False)
    logits, flat_durations = check_duration_logits(durations, logits, tdt.lattice.durations)
    on_device, rows = rows_of_logits(logits, batch, bounds, options, validate=False)
    flat = logits.contiguous().view(-1, vocab_size)
    return tdt_row_loss(flat, flat_durations, TdtRows(on_device.targets, rows), tdt, False)
