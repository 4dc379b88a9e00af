"""Random masks of training: skipped branches and layers, dropout of channels.

Axes: N batch, K masks, W channels of all masks together.

The masks of all layers are sampled together; one by one they would take more kernel launches than
attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.model.zipformer.schedule import Clock, Schedule


class LayerMasks(NamedTuple):
    """Masks of one layer; None means that nothing is left out.

    The first six, for branches and the whole layer, are (N, 1, 1) of 0 and 1. The last three, for
    the hidden layers of the feed-forward modules, are (N, 1, channels) of 0 and 1 / (1 - dropout).
    """

    attention: Tensor | None = None
    convolution1: Tensor | None = None
    convolution2: Tensor | None = None
    feed_forward2: Tensor | None = None
    feed_forward3: Tensor | None = None
    bypass: Tensor | None = None
    hidden1: Tensor | None = None
    hidden2: Tensor | None = None
    hidden3: Tensor | None = None


NO_MASKS = LayerMasks()


def sample_layer_masks(
    clock: Clock,
    skips: Sequence[Sequence[float | Schedule]],
    widths: Sequence[Sequence[int]],
    dropout: float | Schedule,
    like: Tensor,
) -> list[LayerMasks]:
    """Masks of all layers.

    Args:
        clock: evaluates skip and dropout rates.
        skips: for each layer, the skip rates in the order of the masks.
        widths: for each layer, the channels of its hidden layers.
        dropout: dropout rate of the hidden layers.
        like: (N, ...) tensor whose dtype and device the masks of branches have.
    """
    rates = [rate for of_layer in skips for rate in of_layer]
    active = [index for index, rate in enumerate(rates) if clock.drops(rate)]
    keeps: list[Tensor | None] = [None] * len(rates)
    if active:
        rates_K = clock.numbers(
            lambda: [clock.dropout_rate(rates[index]) for index in active], like.device
        )
        uniform_KN11 = torch.rand((len(active), like.size(0), 1, 1), device=like.device)
        keep_KN11 = (uniform_KN11 >= rates_K[:, None, None, None]).to(like.dtype)
        for index, keep_N11 in zip(active, keep_KN11.unbind(), strict=True):
            keeps[index] = keep_N11
    flat_widths = [width for of_layer in widths for width in of_layer]
    hidden: Sequence[Tensor | None] = [None] * len(flat_widths)
    rate = clock.dropout_rate_on(dropout, like.device)
    mask_N1W = dropout_mask(like.size(0), sum(flat_widths), rate, like.device)
    if mask_N1W is not None:
        hidden = mask_N1W.split(flat_widths, dim=-1)
    return [
        LayerMasks(*of_keeps, *of_hidden)
        for of_keeps, of_hidden in zip(
            _split_evenly(keeps, len(skips)), _split_evenly(hidden, len(skips)), strict=True
        )
    ]


def _split_evenly(masks: Sequence[Tensor | None], parts: int) -> list[Sequence[Tensor | None]]:
    each = len(masks) // parts
    return [masks[each * part : each * (part + 1)] for part in range(parts)]


def dropout_mask(
    count: int, width: int, rate: float | Tensor | None, device: torch.device
) -> Tensor | None:
    """(N, 1, W) float32 of 0 and 1 / (1 - rate), the same for all frames of a sequence.

    None if the rate, of `Clock.dropout_rate_on`, is None.
    """
    if rate is None:
        return None
    kept_N1W = torch.rand((count, 1, width), device=device) >= rate
    return kept_N1W / (1.0 - rate)


def keep_mask(x: Tensor, skip: float | Tensor | None) -> Tensor | None:
    """(N, 1, ..) of 0 (with probability `skip`) and 1, in the dtype of x.

    None if the rate, of `Clock.dropout_rate_on`, is None.
    """
    if skip is None:
        return None
    shape = (x.size(0),) + (1,) * (x.dim() - 1)
    return (torch.rand(shape, device=x.device) >= skip).to(x.dtype)
