"""Multi-head self-attention with rotary positions.

Axes: N batch, T frames, P frames of the past, S = P + T frames seen, E encoder width, G queries or
keys, H heads, K width of one head.

Rotary positions (Su et al., arXiv 2104.09864) turn pairs of channels of queries and keys by an
angle proportional to the frame's number, so that a product of a query and a key depends on their
distance alone. A chunk of a stream therefore needs no absolute position, only one offset.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pruned_rnnt.model.joined_frames import pays

_SHAPELESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def rotary_angles(
    num_frames: int, head_dim: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Factors of `rotate`, each (T, 1, 1, head_dim), for frames 0 .. T-1.

    Of each channel itself, the cosine, and of its partner: the sine, negative in the first half.
    """
    pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    frequencies = 10000.0 ** (-pairs / (head_dim // 2))
    angles_TK = torch.arange(num_frames, device=device).unsqueeze(1) * frequencies
    sine_TK, cosine_TK = angles_TK.sin(), angles_TK.cos()
    own_TK, partner_TK = torch.cat((cosine_TK, cosine_TK), 1), torch.cat((-sine_TK, sine_TK), 1)
    return own_TK[:, None, None].to(dtype), partner_TK[:, None, None].to(dtype)


def rotate(x_NTGHK: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel i with channel i + K/2 by the frame's angle; x is (N, T, G, H, K)."""
    own, partner = angles
    return torch.addcmul(x_NTGHK * own, x_NTGHK.roll(x_NTGHK.size(-1) // 2, -1), partner)


def attention_mask(
    lengths: Tensor, num_frames: int, chunk_size: int | None, left_chunks: int | None
) -> Tensor:
    """Which key frames (last axis) each query frame may see: bool (N, 1, T, T), or (N, 1, 1, T)
    without chunks, where all see the same.

    Padding is never seen by a real frame. No row of the softmax is empty: without chunks the first
    frame is always seen, with them every frame sees itself.

    Args:
        chunk_size: frames of a chunk, which sees itself and what came before; None: everything.
        left_chunks: chunks of the past that are seen; None: all of them.
    """
    frames = torch.arange(num_frames, device=lengths.device)
    if chunk_size is None:
        return (frames < lengths.clamp(min=1)[:, None])[:, None, None]
    chunks = frames // chunk_size
    distance = chunks[:, None] - chunks[None, :]
    in_reach = distance >= 0
    if left_chunks is not None:
        in_reach &= distance <= left_chunks
    seen_NTT = (frames < lengths[:, None]).unsqueeze(1) & in_reach
    return (seen_NTT | (frames[:, None] == frames[None, :])).unsqueeze(1)


def attention_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: 0 or minus infinity, of the same shape.

    A GPU's kernels take nothing else, in rows a multiple of eight apart: made once for all layers,
    which otherwise each convert the mask and copy it.
    """
    seen = mask.size(-1)
    padded = functional.pad(mask, (0, -seen % 8))
    bias = torch.zeros_like(padded, dtype=dtype).masked_fill_(~padded, -math.inf)
    return bias[..., :seen]


def attention_kernels(x: Tensor) -> AbstractContextManager[None]:
    """Where x is on a GPU: attention inside by any kernel but cuDNN's.

    cuDNN plans forward and backward anew for every shape, 0.1 seconds each, and two batches of
    speech hardly ever have the same.
    """
    return sdpa_kernel(_SHAPELESS) if pays(x) else nullcontext()


class RotaryAttention(nn.Module):
    """Self-attention over (N, T, E).

    Args:
        dim: E, a multiple of 2 * heads.
        heads: H.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(
        self,
        x_NTE: Tensor,
        mask_N1TS: Tensor,
        angles: tuple[Tensor, Tensor],
        past_NPE: Tensor | None = None,
    ) -> Tensor:
        """Output of the frames of x, which see S = P + T frames: those of the past and x itself.

        Args:
            mask_N1TS: True where a frame of x may see another one, or an `attention_bias`.
            angles: of all S frames, in the dtype of products.
            past_NPE: what x was for the P frames before; None: there are none.
        """
        seen_NSE = x_NTE if past_NPE is None else torch.cat((past_NPE, x_NTE), dim=1)
        parts_NS3HK = self.in_proj(seen_NSE).unflatten(-1, (3, self.heads, -1))
        turned_NS2HK, value_NS1HK = parts_NS3HK.split((2, 1), dim=2)
        query_NSHK, key_NSHK = rotate(turned_NS2HK, angles).unbind(2)
        if past_NPE is not None:
            query_NSHK = query_NSHK[:, past_NPE.size(1) :]
        context_NHTK = functional.scaled_dot_product_attention(
            query_NSHK.transpose(1, 2),
            key_NSHK.transpose(1, 2),
            value_NS1HK.squeeze(2).transpose(1, 2),
            attn_mask=mask_N1TS,
        )
        projected: Tensor = self.out_proj(context_NHTK.transpose(1, 2).flatten(2))
        return projected
