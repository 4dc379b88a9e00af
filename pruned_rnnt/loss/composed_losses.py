"""The losses of PrunedTransducerLoss layer by layer, where the compiled step does not apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.band_loss import band_loss, projection
from pruned_rnnt.loss.joiner import Joiner, output_parameters
from pruned_rnnt.loss.results import Bounds, reduced
from pruned_rnnt.loss.tdt_head import TdtHead
from pruned_rnnt.ops.common.matrix_products import is_autocast_enabled, product_dtype
from pruned_rnnt.ops.common.plain_layers import plain_parameters
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.lattice.recursion import LossOptions, Recursion
from pruned_rnnt.ops.pruning.prune_bounds import OccupancyAndLengths, choose_bounds, tdt_bounds
from pruned_rnnt.ops.simple import streamed_loss
from pruned_rnnt.ops.simple.simple_loss import (
    SimpleInputs,
    SimpleOptions,
    SimpleResults,
    simple_loss,
)
from pruned_rnnt.ops.simple.streamed_loss import ProjectedInputs, streamed_simple_loss
from pruned_rnnt.ops.step.step_plan import StepLosses

# Of the narrowest dtype of am and lm.
_FEWEST_BYTES = 2


def may_exceed_stored_bytes(rows: int, vocabulary: int) -> bool:
    """Whether am and lm of the simple loss, so many rows together, can take more than
    MOST_STORED_BYTES."""
    return rows * vocabulary * _FEWEST_BYTES > streamed_loss.MOST_STORED_BYTES


def streamed_inputs(
    encoder_out: Tensor, predictor_out: Tensor, am_layer: nn.Module, lm_layer: nn.Module
) -> ProjectedInputs | None:
    """The inputs of the loss in tiles; None if am and lm take at most MOST_STORED_BYTES together,
    and for layers that must be called."""
    parameters = plain_parameters(
        (("simple_am_proj", am_layer), ("simple_lm_proj", lm_layer)), encoder_out.device
    )
    if isinstance(parameters, str):
        return None
    am_weight, am_bias, lm_weight, lm_bias = parameters
    rows = encoder_out.shape[:2].numel() + predictor_out.shape[:2].numel()
    stored = rows * am_weight.shape[0] * product_dtype(encoder_out, am_weight).itemsize
    if stored <= streamed_loss.MOST_STORED_BYTES:
        return None
    if not is_autocast_enabled(encoder_out):
        encoder_out = encoder_out.to(am_weight.dtype)
        predictor_out = predictor_out.to(lm_weight.dtype)
    return ProjectedInputs(encoder_out, am_weight, am_bias, predictor_out, lm_weight, lm_bias)


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
    """Checked inputs of one call, the scales of both losses, and their recursion."""

    encoder_out: Tensor
    predictor_out: Tensor
    utterances: Utterances
    scales: tuple[float, float]
    recursion: Recursion


def composed_losses(layers: LossLayers, call: LossCall) -> StepLosses:
    """The losses of a call whose utterances are on the device."""
    encoder_out, predictor_out, utterances, scales, recursion = call
    joiner = layers.joiner
    output = output_parameters(joiner) if isinstance(joiner, Joiner) else None
    if isinstance(output, str):
        layers.report(
            f"{output}: the loss calls the joiner and stores its logits (N, T, s_range, "
            "vocab_size), which takes more memory and time"
        )
        output = None
    simple = _simple_loss(layers, call)
    start_NT = _band(layers, simple, utterances)
    pruned_N = band_loss(
        joiner,
        encoder_out,
        predictor_out,
        utterances,
        Bounds(start_NT, layers.s_range),
        vocab_size=layers.vocab_size,
        recursion=recursion,
        output=output,
    )
    simple_N, emit, blank, *of_tdt = simple
    total_N = scales[0] * simple_N + scales[1] * pruned_N
    each = (total_N, simple_N, pruned_N)
    total, of_simple, of_pruned = (reduced(x, layers.reduction) for x in each)
    each_3N = torch.stack(each).detach()
    return StepLosses(total, of_simple, of_pruned, emit, blank, start_NT, each_3N, *of_tdt)


def _simple_loss(layers: LossLayers, call: LossCall) -> SimpleResults:
    encoder_out, predictor_out, utterances, _, recursion = call
    # Dynamo of torch 2.11 passes no result of `_replace` to a function that it keeps as a node.
    options = SimpleOptions(recursion, layers.simple_options.scales)
    batch = utterances.tensors
    # torch.compile must see each layer.
    if not torch.compiler.is_compiling():
        streamed = streamed_of(layers, encoder_out, predictor_out)
        if streamed is not None:
            return streamed_simple_loss(streamed, batch, options)
    am = projection(layers.simple_am_proj, encoder_out)
    lm = projection(layers.simple_lm_proj, predictor_out)
    dtype, projected = torch.promote_types(am.dtype, lm.dtype), [am, lm]
    if layers.tdt is not None:
        projected.append(projection(layers.tdt.simple_am_proj, encoder_out))
        projected.append(projection(layers.tdt.simple_lm_proj, predictor_out))
    inputs = SimpleInputs(*(x.to(dtype).contiguous() for x in projected))
    return simple_loss(inputs, batch, options)


def _band(layers: LossLayers, simple: SimpleResults, utterances: Utterances) -> Tensor:
    """The start of the band (N,T)."""
    lengths, s_range, exact = utterances.lengths, layers.s_range, layers.exact_bounds
    if layers.tdt is not None and simple.stay is not None:
        occupancies = (simple.gx, simple.gy, simple.stay)
        durations = layers.tdt.durations
        return tdt_bounds(occupancies, lengths, s_range=s_range, durations=durations, exact=exact)
    nodes = OccupancyAndLengths(simple.gx, simple.gy, *lengths)
    return choose_bounds(nodes, s_range, layers.options.rnnt_type, exact)


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
