"""Greedy search, a batch at a time, without waiting for the device before the end.

Axes: N batch, T encoder frames, E encoder width, C context size, M steps of the search.
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
    emitted_NM, score_N, _ = greedy_symbols(
        model,
        encoded_NTE,
        lengths,
        model.predictor.start_context(encoded_NTE.size(0), encoded_NTE.device),
        max_symbols_per_frame=max_symbols_per_frame,
        silent_symbols=silent_symbols,
    )
    return [
        _collect(emitted, max_symbols_per_frame, score)
        for emitted, score in zip(emitted_NM.tolist(), score_N.tolist(), strict=True)
    ]


@torch.inference_mode()
def greedy_symbols(
    model: TransducerModel,
    encoded_NTE: Tensor,
    lengths: Tensor,
    context_NC: Tensor,
    *,
    max_symbols_per_frame: int = 1,
    silent_symbols: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy search over some frames of longer streams; arguments as of `greedy_search`.

    Args:
        context_NC: last C symbols of each stream before these frames.

    Returns:
        (N, T * max_symbols_per_frame) int64 symbols, -1 where none was emitted; (N,) float32
        log-probability of the steps taken; (N, C) last symbols after these frames.
    """
    batch_size, num_frames, _ = encoded_NTE.shape
    device = encoded_NTE.device
    blank, hat = model.predictor.blank, model.loss_config.hat
    lengths = lengths.to(device)
    silent = torch.zeros(model.vocab_size, dtype=torch.bool, device=device)
    silent[[blank, *silent_symbols]] = True
    am_NTD = model.joiner.encoder_proj(encoded_NTE)
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
        return context_NC.new_empty((batch_size, 0)), score_N, context_NC
    return torch.stack(emitted_steps, dim=1), score_N, context_NC


def _collect(emitted: list[int], symbols_per_frame: int, score: float) -> Hypothesis:
    steps = [(symbol, step // symbols_per_frame) for step, symbol in enumerate(emitted)]
    kept = [(symbol, frame) for symbol, frame in steps if symbol >= 0]
    return Hypothesis(
        symbols=tuple(symbol for symbol, _ in kept),
        frames=tuple(frame for _, frame in kept),
        score=score,
    )
