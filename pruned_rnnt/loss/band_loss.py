"""The pruned loss, layer by layer: of a Joiner without storing its logits, or of any callable."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pruned_rnnt.loss.checks import check_shape
from pruned_rnnt.loss.joiner import Joiner, durations_of_call
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.loss.rows import check_logits, loss_of_logits
from pruned_rnnt.ops.common.matrix_products import is_autocast_enabled
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.fused_joiner import OutputLayers, joiner_loss, planned_joiner
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.lattice.recursion import Recursion
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
    recursion: Recursion,
    output: OutputLayers | None,
) -> Tensor:
    """(N,) for encoder_out (N,T,E), predictor_out (N,U+1,P), utterances on their device and bounds
    of choose_bounds.

    recursion: of TDT, the joiner is a Joiner. output: of a Joiner whose logits are computed in
    chunks; None calls the joiner and stores them.
    """
    start_NT, s_range = bounds
    if not isinstance(joiner, Joiner):
        frames, positions = encoder_out, predictor_out
    else:
        frames = projection(joiner.encoder_proj, encoder_out)
        positions = projection(joiner.decoder_proj, predictor_out)
        if output is not None:
            planned = planned_joiner(
                frames,
                positions,
                output,
                utterances,
                start=start_NT,
                columns=s_range,
                activation=ACTIVATIONS[joiner.activation],
                recursion=recursion,
            )
            return joiner_loss(*planned)
    frames_NTSD = frames[:, :, None, :].expand(-1, -1, s_range, -1)
    positions_NTSD = gathered_band(positions.contiguous(), start_NT, s_range)
    duration_logits = None
    if recursion.tdt is None:
        logits = joiner(frames_NTSD, positions_NTSD)
    else:
        assert isinstance(joiner, Joiner)
        logits, duration_logits = durations_of_call(joiner, frames_NTSD, positions_NTSD)
    shape = (*start_NT.shape, s_range, vocab_size)
    check_shape("what joiner returns", logits, shape, "logits (N, T, S, vocab_size)")
    check_logits(logits, bounds)
    batch = utterances.tensors
    return loss_of_logits(logits, batch, bounds, recursion, duration_logits=duration_logits)
