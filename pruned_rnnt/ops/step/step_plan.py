"""Inputs, options and results of a pruned step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.joiner.fused_log_probs import JoinerPlan
from pruned_rnnt.ops.simple.simple_loss import SimpleOptions


class StepInputs(NamedTuple):
    """The differentiable arguments: encoder (N,T,E), predictor (N,U+1,P), and weight and bias of
    the five layers: am (V,E), lm (V,P), encoder (D,E), decoder (D,P) and output (V,D). Of TDT also
    those of durations: am (K,E), lm (K,P) and, of the joiner, (K,D)."""

    encoder: Tensor
    predictor: Tensor
    am_weight: Tensor
    am_bias: Tensor
    lm_weight: Tensor
    lm_bias: Tensor
    encoder_weight: Tensor
    encoder_bias: Tensor
    decoder_weight: Tensor
    decoder_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    duration_am_weight: Tensor | None = None
    duration_am_bias: Tensor | None = None
    duration_lm_weight: Tensor | None = None
    duration_lm_bias: Tensor | None = None
    duration_weight: Tensor | None = None
    duration_bias: Tensor | None = None

    @property
    def given(self) -> list[Tensor]:
        """Without those that are None."""
        return [x for x in self if x is not None]


class StepPlan(NamedTuple):
    """dtype: of all products. differentiable: whether a backward pass may follow. reduction:
    `mean`, `sum` or `none`, of all three losses. The topology of the joiner's options is that of
    the band's rule, also with durations (prune_bounds.py). pruned_step chooses the last two:
    packed: lengths are on the CPU and rows packed; grads_in_forward: gradients for a gradient of
    1, at once."""

    dtype: torch.dtype
    differentiable: bool
    simple: SimpleOptions
    joiner: JoinerPlan
    exact_bounds: bool
    simple_scale: float
    pruned_scale: float
    reduction: str
    packed: bool = False
    grads_in_forward: bool = False

    @property
    def durations(self) -> list[int]:
        """Of TDT, otherwise none."""
        tdt = self.simple.recursion.tdt
        return [] if tdt is None else tdt.durations


class StepLosses(NamedTuple):
    """total = simple_scale simple + pruned_scale pruned, all three (N,) or (); emit and blank
    occupancy (N,T,U+1) and the start of the band (N,T); and if the losses are reduced, the three
    losses of each utterance (3,N), in the same order, without gradients. Of a TDT loss also the
    occupancies of symbols of duration 0 (N,T,U+1), and of each duration (N,T,U+1,K)."""

    total: Tensor
    simple: Tensor
    pruned: Tensor
    emit_occupancy: Tensor
    blank_occupancy: Tensor
    start: Tensor
    utterance_losses: Tensor | None
    stay_occupancy: Tensor | None = None
    duration_occupancy: Tensor | None = None
