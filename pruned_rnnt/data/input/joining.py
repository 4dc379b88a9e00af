"""Silence around training utterances, and utterances joined into longer ones.

Corpora are cut close to the speech, one sentence to an utterance. A model that sees nothing else
loses words after a second of silence and in speech that goes on for longer than a sentence, without
a sign.

Axes: T feature frames (10 ms), F mel bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import FeatureName
from pruned_rnnt.data.input.augmentation import LOG_ENERGY_PER_DB
from pruned_rnnt.data.input.data_config import JoiningConfig

FRAMES_PER_SECOND = 100
# Power of inserted noise, from one step of 16 bits to a loud room.
_NOISE_DB = (-90.0, -35.0)
# Share of an utterance's frames that are taken for its background.
_QUIETEST_SHARE = 0.1


class _Energies(NamedTuple):
    """Log-mel energies of silence and noise in features of one kind.

    silence: of samples that are all zero.
    first_bin, last_bin: how far those of noise lie above the logarithm of its power, from brown
        noise to white noise.
    """

    silence: float
    first_bin: tuple[float, float]
    last_bin: tuple[float, float]


# NeMo's filters all have the same area, so the wide ones at the top do not gather more white noise.
_ENERGIES = {
    "fbank": _Energies(-15.9424, (-3.0, 0.0), (-2.0, 8.5)),
    "nemo": _Energies(-16.6355, (-5.7, -2.7), (-7.6, 2.9)),
}


class JoinedFeatures(NamedTuple):
    """features_TF: (T, F). begins: the first frame of each utterance in it."""

    features_TF: Tensor
    begins: tuple[int, ...]


def groups_to_join(
    durations: Sequence[float], most: int, config: JoiningConfig, rng: np.random.Generator
) -> list[list[int]]:
    """Places of the utterances of a batch, grouped; each group becomes one utterance.

    most: utterances of a group, whatever their durations.
    """
    apart = [[place] for place in range(len(durations))]
    if rng.uniform() >= config.probability:
        return apart
    pause = config.pause_seconds if config.pause_probability > 0 else 0.0
    longest = max(durations, default=0.0)
    most = int(min(most, len(durations), (config.longest_seconds + pause) // (longest + pause)))
    if most < 2:
        return apart
    size = int(rng.integers(2, most + 1))
    order = [int(place) for place in rng.permutation(len(durations))]
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def joined_utterances(
    parts: Sequence[Tensor],
    config: JoiningConfig,
    rng: np.random.Generator,
    features: FeatureName = "fbank",
) -> JoinedFeatures:
    """Joins (T, F) features of utterances in this order, with pauses between them.

    features: `fbank` or `nemo`.
    """
    if len(parts) == 1:
        return JoinedFeatures(parts[0], (0,))
    pieces: list[Tensor] = []
    begins = []
    for number, features_TF in enumerate(parts):
        if config.gain_db > 0:
            gain_db = rng.uniform(-config.gain_db, config.gain_db)
            features_TF = features_TF + gain_db * LOG_ENERGY_PER_DB
        if number and rng.uniform() < config.pause_probability:
            frames = int(rng.uniform(0, config.pause_seconds) * FRAMES_PER_SECOND)
            pieces.append(_silence(features_TF, frames, rng, features))
        begins.append(sum(map(len, pieces)))
        pieces.append(features_TF)
    return JoinedFeatures(torch.cat(pieces), tuple(begins))


def silences_around(
    lengths: Sequence[int], config: JoiningConfig, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Frames of silence before and after each utterance of a batch, of so many frames.

    They fill the batch to one length, as far as the longest silence allows: most of them are in
    place of padding, which takes as much time.
    """
    if rng.uniform() >= config.silence_probability:
        return [(0, 0)] * len(lengths)
    most = int(config.silence_seconds * FRAMES_PER_SECOND)
    filled = max(lengths, default=0) + int(rng.uniform(0, most))
    found = []
    for length in lengths:
        total = min(filled - length, 2 * most)
        # Before it only, after it only, or both.
        share = rng.choice([0.0, 1.0, rng.uniform()])
        before = min(max(int(share * total), total - most), most)
        found.append((before, min(total - before, most)))
    return found


def with_silence(
    utterance: JoinedFeatures,
    before: int,
    after: int,
    rng: np.random.Generator,
    features: FeatureName = "fbank",
) -> JoinedFeatures:
    """With so many frames of silence before and after it; `features` as for `joined_utterances`."""
    if before == after == 0:
        return utterance
    features_TF, begins = utterance
    left_TF = _silence(features_TF, before, rng, features)
    right_TF = _silence(features_TF, after, rng, features)
    pieces = (left_TF, features_TF, right_TF)
    return JoinedFeatures(torch.cat(pieces), tuple(begin + before for begin in begins))


def _silence(
    features_TF: Tensor, frames: int, rng: np.random.Generator, features: FeatureName
) -> Tensor:
    """(frames, F) of silence beside an utterance."""
    energies = _ENERGIES[features]
    bins = features_TF.shape[1]
    if frames == 0:
        return features_TF.new_empty(0, bins)
    kind = rng.choice(["zeros", "noise", "noise", "background"])
    if kind == "zeros":
        return features_TF.new_full((frames, bins), energies.silence)
    fluctuation_TF = torch.from_numpy(
        np.log(rng.gamma(4.0, 0.25, size=(frames, bins)).astype(np.float32))
    )
    level = rng.uniform(*_NOISE_DB) * LOG_ENERGY_PER_DB
    first, last = rng.uniform(*energies.first_bin), rng.uniform(*energies.last_bin)
    # As concave as the energies of white noise, whose bins become wider.
    level_F = level + first + (last - first) * torch.linspace(0, 1, bins) ** 0.6
    if kind == "background":
        quietest = max(1, int(_QUIETEST_SHARE * len(features_TF)))
        places = features_TF.mean(1).topk(quietest, largest=False).indices
        level_F = features_TF[places].mean(0)
    return torch.logaddexp(level_F + fluctuation_TF, torch.tensor(energies.silence))
