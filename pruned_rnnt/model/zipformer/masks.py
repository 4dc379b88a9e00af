"""What training leaves out for some of the sequences: branches, layers, channels.

Axes: N batch, K masks, W channels of all masks together.

Masks are drawn for all layers at once: one by one they take more launches than attention does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LayerMasks(NamedTuple):
    """Of one layer; None where nothing is left out.

    The first six (N, 1, 1), of 0 and 1, for branches and the whole layer. The last three
    (N, 1, channels), of 0 and 1 / (1 - dropout), for the hidden layers of the feed-forward modules.
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


NOTHING_LEFT_OUT = LayerMasks()


def draw_layer_masks(
    skips: Sequence[Sequence[float]],
    widths: Sequence[Sequence[int]],
    dropout: float,
    like: Tensor,
) -> list[LayerMasks]:
    """Masks of all layers.

    Args:
        skips: of each layer, shares of the sequences which are left out, in the order of the masks.
        widths: of each layer, channels of the hidden layers.
        dropout: share of these which is left out.
        like: (N, ...), whose dtype the masks of branches have.
    """
    shares = [share for of_layer in skips for share in of_layer]
    drawn = [index for index, share in enumerate(shares) if share > 0.0]
    keeps: list[Tensor | None] = [None] * len(shares)
    if drawn:
        shares_K = torch.tensor([shares[index] for index in drawn])
        shares_K = shares_K.to(like.device, non_blocking=True)
        draws_KN11 = torch.rand((len(drawn), like.size(0), 1, 1), device=like.device)
        keep_KN11 = (draws_KN11 >= shares_K[:, None, None, None]).to(like.dtype)
        for index, keep_N11 in zip(drawn, keep_KN11.unbind(), strict=True):
            keeps[index] = keep_N11
    flat_widths = [width for of_layer in widths for width in of_layer]
    hidden: Sequence[Tensor | None] = [None] * len(flat_widths)
    mask_N1W = dropout_mask(like.size(0), sum(flat_widths), dropout, like.device)
    if mask_N1W is not None:
        hidden = mask_N1W.split(flat_widths, dim=-1)
    return [
        LayerMasks(*of_keeps, *of_hidden)
        for of_keeps, of_hidden in zip(
            _cut(keeps, len(skips)), _cut(hidden, len(skips)), strict=True
        )
    ]


def _cut(masks: Sequence[Tensor | None], parts: int) -> list[Sequence[Tensor | None]]:
    each = len(masks) // parts
    return [masks[each * part : each * (part + 1)] for part in range(parts)]


def dropout_mask(count: int, width: int, rate: float, device: torch.device) -> Tensor | None:
    """(N, 1, W) float32 of 0 and 1 / (1 - rate), the same for all frames of a sequence.

    None where nothing is dropped.
    """
    if rate <= 0.0:
        return None
    kept_N1W = torch.rand((count, 1, width), device=device) >= rate
    return kept_N1W / (1.0 - rate)


def keep_mask(x: Tensor, skip: float) -> Tensor | None:
    """(N, 1, ..) of 0 (for a share `skip`) and 1, in the dtype of x; None without any skipping."""
    if skip <= 0.0:
        return None
    shape = (x.size(0),) + (1,) * (x.dim() - 1)
    return (torch.rand(shape, device=x.device) >= skip).to(x.dtype)
