"""Log-probabilities of several symbol sequences of each utterance, from one pass of the encoder.

Axes: N batch, K sequences of an utterance, H = N * K, T encoder frames, E encoder width,
U symbols, D joiner width, V vocabulary.

Each is the sum over all alignments of the model's topology, from the loss that stores no logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pruned_rnnt.loss.fused import rnnt_loss_fused, rnnt_loss_tdt_fused
from pruned_rnnt.loss.joiner import output_parameters
from pruned_rnnt.model.speech_model import TransducerModel

# The most elements of the joiner's encoder input, repeated for each sequence, that are scored at
# once: 256 MiB in float32. The gradient takes as much.
_MOST_ELEMENTS = 1 << 26


def sequence_log_probs(
    model: TransducerModel,
    encoded_NTE: Tensor,
    frames_N: Tensor,
    targets_HU: Tensor,
    target_lengths_H: Tensor,
) -> Tensor:
    """log P(sequence | utterance), (N, K), differentiable, in float32 (float64 for float64 models).

    Delay penalty, FastEmit and sigma, which are no part of a probability, are left out. Memory is
    bounded: batches above a limit are scored in chunks of utterances, and the backward pass
    computes each chunk again.

    Args:
        encoded_NTE, frames_N: as from `model.encode`, the lengths on the CPU.
        targets_HU: int32, all K sequences of the first utterance, then those of the second.
        target_lengths_H: int32, on the CPU. Every sequence must have a path.

    Raises:
        ValueError: the joiner or its output layers have hooks, adapters or forwards of their own.
    """
    joiner, number = model.joiner, encoded_NTE.size(0)
    width = len(target_lengths_H) // number
    targets_HU = targets_HU.to(encoded_NTE.device, non_blocking=True)
    am_NTD = joiner.encoder_proj(encoded_NTE)
    lm_HUD = joiner.decoder_proj(model.predictor.forward_targets(targets_HU))
    parameters = output_parameters(joiner)
    if isinstance(parameters, str):
        raise ValueError(
            f"{parameters}, and the scores of sequences need a joiner with plain output layers: "
            "remove it, or merge adapters into the weights"
        )
    output = parameters[:2] if parameters.duration_weight is None else parameters
    each = max(1, _MOST_ELEMENTS // (width * am_NTD[0].numel()))
    log_probs = []
    for begin in range(0, number, each):
        chunk = slice(begin, begin + each)
        rows = slice(begin * width, (begin + each) * width)
        frames_H = frames_N[chunk].int().repeat_interleave(width)
        lengths_H = target_lengths_H[rows]
        frames, symbols = int(frames_H.max()), int(lengths_H.max())
        score = _Scoring(model, targets_HU[rows, :symbols], frames_H, lengths_H)
        inputs = am_NTD[chunk, :frames], lm_HUD[rows, : symbols + 1], *output
        if each >= number:
            log_probs.append(score(*inputs))
        else:
            # Only the reentrant variant also releases the workspace of the loss.
            log_probs.append(
                checkpoint(score, *inputs, use_reentrant=True, preserve_rng_state=False)
            )
    return torch.cat(log_probs).view(number, width)


class _Scoring:
    """Log-probabilities (H,) of H sequences of N utterances.

    Parameters are arguments of the call: otherwise, when the backward pass computes chunks again,
    each would get its gradient in parts, of which only the first would reach other processes.
    """

    def __init__(
        self, model: TransducerModel, targets_HU: Tensor, frames_H: Tensor, lengths_H: Tensor
    ) -> None:
        self.model = model
        self.batch = (targets_HU, frames_H, lengths_H)

    def __call__(self, am_NTD: Tensor, lm_HUD: Tensor, *output: Tensor) -> Tensor:
        """output: weight (V, D) and bias (V,), and those of the durations if the model has any."""
        targets_HU, frames_H, lengths_H = self.batch
        width = len(frames_H) // am_NTD.size(0)
        # Not by indexing, whose gradient on CUDA is summed in an undefined order.
        am_HTD = am_NTD[:, None].expand(-1, width, -1, -1).flatten(0, 1)
        inputs: tuple[Any, ...] = (am_HTD, lm_HUD, *output, targets_HU, None, frames_H, lengths_H)
        activation, blank = self.model.joiner.activation, self.model.predictor.blank
        if self.model.loss_config.durations:
            return -rnnt_loss_tdt_fused(
                *inputs,
                durations=self.model.loss_config.durations,
                activation=activation,
                blank=blank,
                reduction="none",
            )
        return -rnnt_loss_fused(
            *inputs,
            activation=activation,
            blank=blank,
            rnnt_type=self.model.loss_config.rnnt_type,
            hat=self.model.loss_config.hat,
            reduction="none",
        )
