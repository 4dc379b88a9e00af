"""What a pruned step is told, beside tensors; its two implementations share it.

Axes as in pruned_step.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pruned_rnnt.ops.joiner.fused_joiner import RowPlan
from pruned_rnnt.ops.simple.simple_loss import SimpleOptions

# The five layers, each by weight and bias, in the order of the arguments.
AM, LM, ENCODER, DECODER, OUTPUT = range(5)
LAYERS = 5
# Differentiable arguments: encoder and predictor, and two for each layer.
INPUTS = 2 + 2 * LAYERS


class StepPlan(NamedTuple):
    """dtype: of all products. differentiable: whether a backward pass may come. rows: how the rows
    of the band are worked through. reduction: `mean`, `sum` or `none`, of all three losses."""

    dtype: torch.dtype
    differentiable: bool
    simple: SimpleOptions
    rows: RowPlan
    exact_bounds: bool
    simple_scale: float
    pruned_scale: float
    reduction: str
