"""The losses of PrunedTransducerLoss layer by layer, where the compiled step does not apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.band_loss import band_loss, projection
from pruned_rnnt.loss.joiner import Joiner, output_parameters
from pruned_rnnt.loss.pruned_tdt import TdtHead
from pruned_rnnt.loss.results import Bounds, reduced
from pruned_rnnt.loss.streamed_inputs import may_exceed_stored_bytes, streamed_inputs
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.row_loss import LossOptions
from pruned_rnnt.ops.joiner.tdt_row_loss import TdtLossOptions
from pruned_rnnt.ops.pruning.prune_bounds import OccupancyAndLengths, choose_bounds
from pruned_rnnt.ops.simple.simple_loss import SimpleOptions, simple_loss
from pruned_rnnt.ops.simple.streamed_loss import ProjectedInputs, streamed_simple_loss
from pruned_rnnt.ops.step.step_plan import StepLosses


class LossLayers(Protocol):
    """Layers and options of a PrunedTransducerLoss. report: see there."""

    joiner: Joiner | Callable[[Tensor, Tensor], Tensor]
    tdt: TdtHead | None
    simple_am_proj: nn.Linear
    simple_lm_proj: nn.Linear
    options: LossOptions
    simple_options: SimpleOptions
    vocab_size: int
    s_range: int
    exact_bounds: bool
    reduction: str

    def report(self, message: str) -> None: ...


class LossCall(NamedTuple):
    """Checked inputs of one call, the scales of both losses, and the options of TDT if it is."""

    encoder_out: Tensor
    predictor_out: Tensor
    utterances: Utterances
    scales: tuple[float, float]
    tdt: TdtLossOptions | None


def composed_losses(layers: LossLayers, call: LossCall) -> StepLosses:
    """The losses of a call whose utterances are on the device."""
    encoder_out, predictor_out, utterances, scales, tdt = call
    joiner, options = layers.joiner, layers.simple_options
    output = output_parameters(joiner) if isinstance(joiner, Joiner) else None
    if isinstance(output, str):
        layers.report(
            f"{output}: the loss calls the joiner and stores its logits (N, T, s_range, "
            "vocab_size), which takes more memory and time"
        )
        output = None
    streamed = None
    # torch.compile must see each layer.
    if not torch.compiler.is_compiling():
        streamed = streamed_of(layers, encoder_out, predictor_out)
    if streamed is None:
        am = projection(layers.simple_am_proj, encoder_out)
        lm = projection(layers.simple_lm_proj, predictor_out)
        dtype = torch.promote_types(am.dtype, lm.dtype)
        am, lm = (x.to(dtype).contiguous() for x in (am, lm))
    of_tdt: list[Tensor] = []
    if layers.tdt is not None:
        assert tdt is not None
        parts = (encoder_out, predictor_out, (am, lm), utterances, options, tdt)
        simple, start_NT = layers.tdt(
            *parts, s_range=layers.s_range, exact_bounds=layers.exact_bounds
        )
        simple_N, emit, blank, *of_tdt = simple
    else:
        batch = utterances.tensors
        if streamed is None:
            simple_N, emit, blank = simple_loss(am, lm, batch, options)
        else:
            simple_N, emit, blank = streamed_simple_loss(streamed, batch, options)
        nodes = OccupancyAndLengths(emit, blank, *utterances.lengths)
        start_NT = choose_bounds(
            nodes, layers.s_range, layers.options.rnnt_type, layers.exact_bounds
        )
    pruned_N = band_loss(
        joiner,
        encoder_out,
        predictor_out,
        utterances,
        Bounds(start_NT, layers.s_range),
        vocab_size=layers.vocab_size,
        options=layers.options,
        output=output,
        tdt=tdt,
    )
    total_N = scales[0] * simple_N + scales[1] * pruned_N
    each = (total_N, simple_N, pruned_N)
    total, of_simple, of_pruned = (reduced(x, layers.reduction) for x in each)
    each_3N = torch.stack(each).detach()
    return StepLosses(total, of_simple, of_pruned, emit, blank, start_NT, each_3N, *of_tdt)


def streamed_of(
    layers: LossLayers, encoder_out: Tensor, predictor_out: Tensor
) -> ProjectedInputs | None:
    """The inputs of the simple loss if am and lm are not stored; None if they are."""
    if layers.tdt is not None or layers.simple_options.scales.am_only_scale != 0:
        return None
    rows = encoder_out.shape[:2].numel() + predictor_out.shape[:2].numel()
    if not may_exceed_stored_bytes(rows, layers.vocab_size):
        return None
    return streamed_inputs(encoder_out, predictor_out, layers.simple_am_proj, layers.simple_lm_proj)
