"""State of streams between chunks. Axis 0 of every tensor is the stream.

Axes: N streams, P cached frames at the rate of a stack, K kernel size, E encoder width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerState(NamedTuple):
    """State of one layer, at the rate of its stack.

    keys: (N, P, heads * query_head_dim).
    nonlin: (N, P, 3 E / 4), input of the weighted sum in the nonlinear attention.
    values1, values2: (N, P, heads * value_head_dim).
    convolution1, convolution2: (N, K // 2, E), gated frames.
    """

    keys: Tensor
    nonlin: Tensor
    values1: Tensor
    values2: Tensor
    convolution1: Tensor
    convolution2: Tensor


class ZipformerState(NamedTuple):
    """State of the whole encoder.

    embedding: (N, channels, 3, bins), maps before the convolution of the embedding.
    layers: one entry per layer, in the order in which they run.
    processed: (N,) int64, feature frames before the next chunk.
    """

    embedding: Tensor
    layers: tuple[LayerState, ...]
    processed: Tensor
