"""A tiny Zipformer with deterministic weights and features, and random test tensors."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pruned_rnnt.model.zipformer import Zipformer, ZipformerConfig

TINY = ZipformerConfig(
    num_mel_bins=24,
    downsampling=(1, 2, 4, 2),
    layers=(1, 2, 1, 1),
    dims=(16, 24, 32, 20),
    unmasked_dims=(8, 12, 16, 12),
    feedforward_dims=(24, 32, 40, 32),
    heads=(2, 2, 4, 2),
    kernel_sizes=(7, 31, 15, 7),
    query_head_dim=6,
    value_head_dim=4,
    position_head_dim=4,
    position_dim=12,
    chunk_sizes=(8, 16, 32, -1),
    left_contexts=(16, 32, -1),
    chunk_size=8,
    left_context=16,
)
CAUSAL = dataclasses.replace(TINY, causal=True)


def sine_encoder(config: ZipformerConfig) -> Zipformer:
    """An encoder in evaluation mode; the k-th parameter by name is a sine with phase k."""
    encoder = Zipformer(config)
    for order, (_, parameter) in enumerate(sorted(encoder.named_parameters())):
        wave = torch.sin(0.7 * torch.arange(parameter.numel(), dtype=torch.float64) + order)
        if parameter.dim() < 2:
            wave = 0.3 * wave + 0.5
        else:
            wave = wave * (2.0 * parameter.size(0) / parameter.numel()) ** 0.5
        parameter.data.copy_(wave.view(parameter.shape))
    return encoder.eval()


def sine_features(num_frames: int, num_bins: int = TINY.num_mel_bins) -> Tensor:
    """(1, T, F), in the range of log-mel energies."""
    frame_T1 = torch.arange(num_frames, dtype=torch.float64).unsqueeze(1)
    bin_F = torch.arange(num_bins, dtype=torch.float64)
    features_TF = 3.0 * torch.sin(0.11 * frame_T1 + 0.5 * bin_F) + torch.cos(frame_T1 * bin_F) - 4.0
    return features_TF.float().unsqueeze(0)


def ragged_batch(lengths: list[int], garbage: float = 50.0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(N, T, F) with garbage beyond the lengths, the lengths, and each utterance (1, T, F)."""
    torch.manual_seed(5)
    singles = [torch.randn(1, length, TINY.num_mel_bins) * 3 - 4 for length in lengths]
    batch_NTF = torch.full((len(lengths), max(lengths), TINY.num_mel_bins), garbage)
    for n, single in enumerate(singles):
        batch_NTF[n, : single.size(1)] = single[0]
    return batch_NTF, torch.tensor(lengths), singles


def randoms(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
