"""Multi-head self-attention with relative positions (Dai et al. 2019, arXiv 1901.02860).

Axes: N batch, T frames, P past frames, S = P + T frames attended to, R distances, E encoder width,
G queries, keys or values, H heads, K width of one head.

The score of a query and a key is that of their contents plus that of the query's content and a
vector for their distance; each part adds a bias of its own to the query.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.linear import Linear


def relative_positions(
    frames: int, dim: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(2 S - 1, E) sinusoids of the distances S-1 .. -(S-1) between S frames, query minus key."""
    distance_R = torch.arange(frames - 1, -frames, -1, device=device, dtype=torch.float32)
    channels = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    angles_RC = distance_R[:, None] * torch.exp(channels * (-math.log(10000.0) / dim))
    return torch.stack((angles_RC.sin(), angles_RC.cos()), dim=2).flatten(1).to(dtype)


class RelativeAttention(nn.Module):
    """Self-attention over (N, T, E).

    Args:
        dim: E, a multiple of heads.
        heads: H.
        bias: whether the linear layers have biases; that of the positions never has one.
    """

    def __init__(self, dim: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = Linear(dim, 3 * dim, bias)
        self.position_proj = Linear(dim, dim, bias=False)
        self.out_proj = Linear(dim, dim, bias)
        self.content_bias = nn.Parameter(torch.zeros(heads, dim // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, dim // heads))

    def forward(
        self,
        x_NTE: Tensor,
        mask_N1TS: Tensor | None,
        positions_RE: Tensor,
        past_NPE: Tensor | None = None,
    ) -> Tensor:
        """Output for the frames of x, which attend to S = P + T frames: the past and x itself.

        Args:
            mask_N1TS: True where a frame of x may attend to another, or an `attention_bias`; None:
                each attends to all.
            positions_RE: `relative_positions` of all S frames, in the dtype of the products.
            past_NPE: x of the P frames before; None: no past.
        """
        frames = x_NTE.size(1)
        seen_NSE = x_NTE if past_NPE is None else torch.cat((past_NPE, x_NTE), dim=1)
        seen = seen_NSE.size(1)
        qkv_NSGHK = self.in_proj(seen_NSE).unflatten(-1, (3, self.heads, -1))
        query_NSHK, key_NSHK, value_NSHK = qkv_NSGHK.unbind(2)
        query_NTHK = query_NSHK[:, seen - frames :]
        dtype = query_NTHK.dtype
        # The last query never looks as far ahead as the first: T + S - 1 of the 2 S - 1 distances.
        positions_RHK = self.position_proj(positions_RE[: seen + frames - 1]).unflatten(
            -1, (self.heads, -1)
        )
        located_NHTK = (query_NTHK + self.position_bias.to(dtype)).transpose(1, 2)
        scores_NHTR = located_NHTK @ positions_RHK.permute(1, 2, 0)
        bias_NHTS = shift_rows(scores_NHTR)[..., :seen] / math.sqrt(query_NTHK.size(-1))
        if mask_N1TS is not None:
            if mask_N1TS.dtype == torch.bool:
                bias_NHTS = bias_NHTS.masked_fill(~mask_N1TS, -math.inf)
            else:
                bias_NHTS = bias_NHTS + mask_N1TS
        context_NHTK = functional.scaled_dot_product_attention(
            (query_NTHK + self.content_bias.to(dtype)).transpose(1, 2),
            key_NSHK.transpose(1, 2),
            value_NSHK.transpose(1, 2),
            attn_mask=bias_NHTS,
        )
        projected: Tensor = self.out_proj(context_NHTK.transpose(1, 2).flatten(2))
        return projected


def shift_rows(scores_NHTR: Tensor) -> Tensor:
    """Move row t by T-1-t columns to the left, so that columns of distances become those of keys.

    What enters a row on the right is undefined.
    """
    batch, heads, frames, columns = scores_NHTR.shape
    # In rows of R + 1 columns, reading R at a time moves each row one column further.
    padded = functional.pad(scores_NHTR, (1, 0)).view(batch, heads, columns + 1, frames)
    return padded[:, :, 1:].reshape(batch, heads, frames, columns)
