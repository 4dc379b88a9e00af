"""The losses of PrunedTransducerLoss layer by layer, where the compiled step does not apply; the
pruned one of a Joiner without storing its logits, or of any callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.checks import check_shape
from pruned_rnnt.loss.joiner import (
    Joiner,
    durations_of_call,
    logits_of_callable,
    output_parameters,
)
from pruned_rnnt.loss.logit_losses import check_logits, loss_of_logits
from pruned_rnnt.loss.results import Bounds, reduced
from pruned_rnnt.loss.tdt_head import TdtHead
from pruned_rnnt.ops.common.matrix_products import is_autocast_enabled, product_dtype
from pruned_rnnt.ops.common.plain_layers import hook_of, plain_parameters
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.fused_joiner import OutputLayers, joiner_loss, planned_joiner
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.lattice.recursion import LossOptions, Recursion
from pruned_rnnt.ops.pruning.band_gather import gathered_band
from pruned_rnnt.ops.pruning.prune_bounds import OccupancyAndLengths, choose_bounds, tdt_bounds
from pruned_rnnt.ops.simple import streamed_loss
from pruned_rnnt.ops.simple.simple_loss import (
    SimpleInputs,
    SimpleOptions,
    SimpleResults,
    simple_loss,
)
from pruned_rnnt.ops.simple.streamed_loss import ProjectedInputs, streamed_simple_loss
from pruned_rnnt.ops.step.step_library import StepLosses

# Of the narrowest dtype of am and lm.
_FEWEST_BYTES = 2


class LossLayers(Protocol):
    """Layers and options of a PrunedTransducerLoss. report: see there."""

    joiner: Joiner | Callable[[Tensor, Tensor], Tensor]
    tdt: TdtHead | None
    simple_am_proj: nn.Linear
    simple_lm_proj: nn.Linear
    options: LossOptions
    simple_options: SimpleOptions
    vocab_size: int
    exact_bounds: bool
    reduction: str

    def report(self, message: str) -> None: ...


class LossCall(NamedTuple):
    """Checked inputs of one call, the scales of both losses, their recursion, and the band's
    columns."""

    encoder_out: Tensor
    predictor_out: Tensor
    utterances: Utterances
    scales: tuple[float, float]
    recursion: Recursion
    columns: int


def composed_losses(layers: LossLayers, call: LossCall) -> StepLosses:
    """The losses of a call whose utterances are on the device."""
    joiner, scales = layers.joiner, call.scales
    output = output_parameters(joiner) if isinstance(joiner, Joiner) else None
    if isinstance(output, str):
        layers.report(
            f"{output}: the loss calls the joiner and stores its logits (N, T, s_range, "
            "vocab_size), which takes more memory and time"
        )
        output = None
    simple = _simple_loss(layers, call)
    start_NT = _band(layers, simple, call)
    pruned_N = _pruned_loss(layers, call, output, start_NT)
    simple_N, emit, blank, *of_tdt = simple
    total_N = scales[0] * simple_N + scales[1] * pruned_N
    each = (total_N, simple_N, pruned_N)
    total, of_simple, of_pruned = (reduced(x, layers.reduction) for x in each)
    each_3N = torch.stack(each).detach()
    return StepLosses(total, of_simple, of_pruned, emit, blank, start_NT, each_3N, *of_tdt)


def _simple_loss(layers: LossLayers, call: LossCall) -> SimpleResults:
    encoder_out, predictor_out, utterances, _, recursion, _ = call
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


def _band(layers: LossLayers, simple: SimpleResults, call: LossCall) -> Tensor:
    """The start of the band (N,T)."""
    lengths, s_range, exact = call.utterances.lengths, call.columns, layers.exact_bounds
    if layers.tdt is not None and simple.stay is not None:
        occupancies = (simple.gx, simple.gy, simple.stay)
        durations = layers.tdt.durations
        return tdt_bounds(occupancies, lengths, s_range=s_range, durations=durations, exact=exact)
    nodes = OccupancyAndLengths(simple.gx, simple.gy, *lengths)
    return choose_bounds(nodes, s_range, layers.options.rnnt_type, exact)


def streamed_of(
    layers: LossLayers, encoder_out: Tensor, predictor_out: Tensor
) -> ProjectedInputs | None:
    """The inputs of the simple loss in tiles, if am and lm would take more than MOST_STORED_BYTES
    together; None if they are stored, as where layers must be called."""
    if layers.tdt is not None or layers.simple_options.scales.am_only_scale != 0:
        return None
    rows = encoder_out.shape[:2].numel() + predictor_out.shape[:2].numel()
    # Nearly always this is enough, without a look at the layers.
    if rows * layers.vocab_size * _FEWEST_BYTES <= streamed_loss.MOST_STORED_BYTES:
        return None
    named = (("simple_am_proj", layers.simple_am_proj), ("simple_lm_proj", layers.simple_lm_proj))
    parameters = plain_parameters(named, encoder_out.device)
    if isinstance(parameters, str):
        return None
    am_weight, am_bias, lm_weight, lm_bias = parameters
    stored = rows * am_weight.shape[0] * product_dtype(encoder_out, am_weight).itemsize
    if stored <= streamed_loss.MOST_STORED_BYTES:
        return None
    if not is_autocast_enabled(encoder_out):
        encoder_out = encoder_out.to(am_weight.dtype)
        predictor_out = predictor_out.to(lm_weight.dtype)
    return ProjectedInputs(encoder_out, am_weight, am_bias, predictor_out, lm_weight, lm_bias)


def projection(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), with x in the dtype of the layer's parameters unless autocast chooses one.

    Raises:
        ValueError: the parameters are sharded, and the layer's call would not gather them.
    """
    # By name, because importing DTensor takes seconds. Hooks of the layer itself gather them.
    sharded = any(type(p).__name__ == "DTensor" for p in layer.parameters(recurse=False))
    if sharded and hook_of(layer) is None:
        raise ValueError(
            "a projection of the loss or of its Joiner has sharded parameters (DTensor) when the "
            "loss calls it: the loss calls the Joiner's layers one by one, so that the hooks of "
            "fully_shard(joiner) come too late; apply fully_shard to the loss, to the whole model "
            "or to the layers of the Joiner instead"
        )
    if not is_autocast_enabled(x):
        floating = (p.dtype for p in layer.parameters() if p.is_floating_point())
        x = x.to(next(floating, x.dtype))
    projected: Tensor = layer(x)
    return projected


def _pruned_loss(
    layers: LossLayers, call: LossCall, output: OutputLayers | None, start_NT: Tensor
) -> Tensor:
    """(N,) inside the band. output: of a Joiner whose logits are computed in chunks; None calls the
    joiner and stores them."""
    frames, positions, utterances, _, recursion, s_range = call
    joiner = layers.joiner
    if isinstance(joiner, Joiner):
        frames = projection(joiner.encoder_proj, frames)
        positions = projection(joiner.decoder_proj, positions)
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
    if not isinstance(joiner, Joiner):
        logits = logits_of_callable(joiner, frames_NTSD, positions_NTSD)
    elif recursion.tdt is None:
        logits = joiner(frames_NTSD, positions_NTSD)
    else:
        logits, duration_logits = durations_of_call(joiner, frames_NTSD, positions_NTSD)
    shape = (*start_NT.shape, s_range, layers.vocab_size)
    check_shape("what joiner returns", logits, shape, "logits (N, T, S, vocab_size)")
    bounds = Bounds(start_NT, s_range)
    check_logits(logits, bounds)
    batch = utterances.tensors
    return loss_of_logits(logits, batch, bounds, recursion, duration_logits=duration_logits)
