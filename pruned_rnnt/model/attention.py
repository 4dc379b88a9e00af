"""Multi-head self-attention with rotary positions.

Axes: N batch, T frames, P frames of the past, S = P + T frames seen, E encoder width, H heads,
K width of one head.

Rotary positions (Su et al., arXiv 2104.09864) turn pairs of channels of queries and keys by an
angle proportional to the frame's number, so that a product of a query and a key depends on their
distance alone. A chunk of a stream therefore needs no absolute position, only one offset.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pruned_rnnt.model.joined_frames import pays

_SHAPELESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def rotary_angles(num_frames: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (T, head_dim / 2) float32, for frames 0 .. T-1."""
    pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    frequencies = 10000.0 ** (-pairs / (head_dim // 2))
    angles_TK = torch.arange(num_frames, device=device).unsqueeze(1) * frequencies
    return angles_TK.cos(), angles_TK.sin()


def rotate(x_NTHK: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel i with channel i + K/2 by the frame's angle; x is (N, T, H, K)."""
    cosine, sine = (angle.to(x_NTHK.dtype).unsqueeze(1) for angle in angles)
    first, second = x_NTHK.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def attention_mask(
    lengths: Tensor, num_frames: int, chunk_size: int | None, left_chunks: int | None
) -> Tensor:
    """Which key frames (last axis) each query frame may see: bool (N, 1, T, T).

    Padding is never seen by a real frame. Every frame sees itself, so that no row of the softmax
    is empty; for a frame of padding that is all that may remain.

    Args:
        chunk_size: frames of a chunk, which sees itself and what came before; None: everything.
        left_chunks: chunks of the past that are seen; None: all of them.
    """
    frames = torch.arange(num_frames, device=lengths.device)
    seen_NTT = (frames < lengths[:, None]).unsqueeze(1)
    if chunk_size is not None:
        chunks = frames // chunk_size
        distance = chunks[:, None] - chunks[None, :]
        in_reach = distance >= 0
        if left_chunks is not None:
            in_reach &= distance <= left_chunks
        seen_NTT = seen_NTT & in_reach
    return (seen_NTT | (frames[:, None] == frames[None, :])).unsqueeze(1)


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
            mask_N1TS: True where a frame of x may see another one.
            angles: of all S frames.
            past_NPE: what x was for the P frames before; None: there are none.
        """
        seen_NSE = x_NTE if past_NPE is None else torch.cat((past_NPE, x_NTE), dim=1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)) for part in self.in_proj(seen_NSE).chunk(3, dim=-1)
        )
        query_NTHK = rotate(query, angles)[:, seen_NSE.size(1) - x_NTE.size(1) :]
        context_NHTK = functional.scaled_dot_product_attention(
            query_NTHK.transpose(1, 2),
            rotate(key, angles).transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask_N1TS,
        )
        projected: Tensor = self.out_proj(context_NHTK.transpose(1, 2).flatten(2))
        return projected
