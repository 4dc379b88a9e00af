"""The initial size of projections, as in icefall's Zipformer recipes."""

from __future__ import annotations

import math

import torch
from torch import nn

# Bound of initial biases at a scale of one, whatever the number of inputs.
_BIAS_BOUND = 0.1


@torch.no_grad()
def scale_initial(layer: nn.Linear, scale: float) -> None:
    """Change torch's initial values: weights by `scale`, biases to uniform in +-0.1 * scale."""
    layer.weight.mul_(scale)
    # torch's bound is 1 / sqrt(inputs).
    layer.bias.mul_(_BIAS_BOUND * scale * math.sqrt(layer.in_features))
