"""The pruned loss, layer by layer: of a Joiner without storing its logits, or of any callable."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.checks import check_shape
from pruned_rnnt.loss.joiner import Joiner
from pruned_rnnt.loss.logit_losses import check_logits, loss_of_logits
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.fused_joiner import joiner_loss, planned_joiner
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.joiner.row_loss import LossOptions
from pruned_rnnt.ops.pruning.band_gather import gathered_band


def projection(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), with x in the dtype of the layer's weight unless autocast chooses one."""
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(getattr(layer, "weight", x).dtype)
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
) -> Tensor:
    """(N,) for encoder_out (N,T,E), predictor_out (N,U+1,P), utterances on their device and bounds
    of choose_bounds."""
    start_NT, s_range = bounds
    if isinstance(joiner, Joiner):
        planned = planned_joiner(
            projection(joiner.encoder_proj, encoder_out),
            projection(joiner.decoder_proj, predictor_out),
            joiner.output_linear.weight,
            joiner.output_linear.bias,
            utterances,
            start=start_NT,
            columns=s_range,
            vocabulary=vocab_size,
            activation=ACTIVATIONS[joiner.activation],
            options=options,
        )
        return joiner_loss(*planned)
    am_NTSE = encoder_out[:, :, None, :].expand(-1, -1, s_range, -1)
    logits = joiner(am_NTSE, gathered_band(predictor_out.contiguous(), start_NT, s_range))
    shape = (*start_NT.shape, s_range, vocab_size)
    check_shape("what joiner returns", logits, shape, "logits (N, T, S, vocab_size)")
    check_logits(logits, "S", in_place=False)
    batch = utterances.tensors
    return loss_of_logits(logits, batch, bounds, options, in_place=False, validate=False)
