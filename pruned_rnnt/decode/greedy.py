"""Greedy search, a batch at a time, without waiting for the device before the end.

Axes: N batch, T encoder frames, E encoder width, C context size, M symbols a frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.decode.hypothesis import Hypothesis, joint_log_probs
from pruned_rnnt.model.transducer import TransducerModel


@torch.inference_mode()
def greedy_search(
    model: TransducerModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    *,
    max_symbols_per_frame: int = 1,
    silent_symbols: Sequence[int] = (),
) -> list[Hypothesis]:
    """The most probable symbol at every node, one path.

    Args:
        encoded_NTE: (N, T, E) output of `model.encode`.
        lengths: (N,) integer encoder frames.
        max_symbols_per_frame: the search goes on to the next frame after so many symbols. Exported
            models are decoded with 1.
        silent_symbols: ids taken for a blank when they are the most probable (such as `<unk>`).

    Raises:
        ValueError: max_symbols_per_frame below 1.
    """
    if max_symbols_per_frame < 1:
        raise ValueError(f"max_symbols_per_frame is {max_symbols_per_frame}, needs at least 1")
    batch_size, num_frames, _ = encoded_NTE.shape
    device = encoded_NTE.device
    blank, hat = model.predictor.blank, model.loss_config.hat
    lengths = lengths.to(device)
    silent = torch.zeros(model.vocab_size, dtype=torch.bool, device=device)
    silent[[blank, *silent_symbols]] = True
    am_NTD = model.joiner.encoder_proj(encoded_NTE)
    context_NC = model.predictor.start_context(batch_size, device)
    lm_ND = model.joiner.decoder_proj(model.predictor(context_NC)[:, 0])
    score_N = torch.zeros(batch_size, device=device)
    emitted_steps = []
    for t in range(num_frames):
        alive_N = t < lengths
        for _ in range(max_symbols_per_frame):
            log_probs_NV = joint_log_probs(model.joiner(am_NTD[:, t], lm_ND), blank, hat)
            best_N, symbol_N = log_probs_NV.max(dim=-1)
            score_N = score_N + best_N * alive_N
            alive_N = alive_N & ~silent[symbol_N]
            emitted_steps.append(torch.where(alive_N, symbol_N, -1))
            grown_NC = torch.cat((context_NC[:, 1:], symbol_N[:, None]), dim=1)
            context_NC = torch.where(alive_N[:, None], grown_NC, context_NC)
            lm_ND = model.joiner.decoder_proj(model.predictor(context_NC)[:, 0])
    if not emitted_steps:
        return [Hypothesis(symbols=(), frames=(), score=0.0) for _ in range(batch_size)]
    emitted_NTM = torch.stack(emitted_steps, dim=1).cpu()
    scores = score_N.tolist()
    return [
        _collect(emitted.tolist(), max_symbols_per_frame, score)
        for emitted, score in zip(emitted_NTM, scores, strict=True)
    ]


def _collect(emitted: list[int], symbols_per_frame: int, score: float) -> Hypothesis:
    steps = [(symbol, step // symbols_per_frame) for step, symbol in enumerate(emitted)]
    kept = [(symbol, frame) for symbol, frame in steps if symbol >= 0]
    return Hypothesis(
        symbols=tuple(symbol for symbol, _ in kept),
        frames=tuple(frame for _, frame in kept),
        score=score,
    )
