"""Connected digits: joins single recordings of one speaker with random pauses.

Axes: S audio samples.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from pruned_rnnt.recipes.fsdd.recordings import DIGITS, SAMPLING_RATE, Recording

from pruned_rnnt.data.audio.waveform import (
    add_white_noise,
    perturb_speed,
    perturb_tempo,
    resample,
    scale_to_level,
)
from pruned_rnnt.data.input.augmentation import derived_seed
from pruned_rnnt.data.input.batch import AlignedWord
from pruned_rnnt.data.prepare.generated_corpus import Utterance

OUTPUT_RATE = 16000


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Random changes of the recordings; a range of (1, 1) changes nothing.

    speed: range of the factor on tempo, pitch and formants, which resembles another speaker.
    tempo: range of the factor on tempo alone.
    noise_db: range of the level of the added white noise, in dB of full scale.
    """

    speed: tuple[float, float] = (1.0, 1.0)
    tempo: tuple[float, float] = (1.0, 1.0)
    noise_db: tuple[float, float] = (-75.0, -60.0)


@dataclass(frozen=True)
class DigitPool:
    """Recordings by speaker and digit."""

    recordings: Sequence[Recording]
    by_speaker: dict[str, dict[int, list[Recording]]] = field(init=False)

    def __post_init__(self) -> None:
        by_speaker: dict[str, dict[int, list[Recording]]] = defaultdict(lambda: defaultdict(list))
        for recording in self.recordings:
            by_speaker[recording.speaker][recording.digit].append(recording)
        object.__setattr__(self, "by_speaker", {s: dict(d) for s, d in by_speaker.items()})

    @property
    def speakers(self) -> list[str]:
        return sorted(self.by_speaker)


def draw_utterance(
    pool: DigitPool, *, split: str, index: int, seed: int, variation: Variation
) -> Utterance:
    """Utterance number `index`: 3 to 7 digits of one speaker, pauses of 20 to 350 ms.

    Speakers alternate. The utterance depends on (seed, split, index) only.
    """
    utterance_seed = derived_seed("fsdd", seed, split, index)
    rng = random.Random(utterance_seed)
    speaker = pool.speakers[index % len(pool.speakers)]
    digits = pool.by_speaker[speaker]
    # One factor per utterance, because a speaker's vocal tract does not change.
    speed = rng.uniform(*variation.speed)
    tempo = rng.uniform(*variation.tempo)
    pieces: list[np.ndarray] = []
    words: list[AlignedWord] = []
    position = 0

    def append(samples_S: np.ndarray) -> None:
        nonlocal position
        pieces.append(samples_S.astype(np.float32))
        position += samples_S.size

    append(np.zeros(int(rng.uniform(0.1, 0.3) * SAMPLING_RATE)))
    for number in range(rng.randint(3, 7)):
        if number > 0:
            append(np.zeros(int(rng.uniform(0.02, 0.35) * SAMPLING_RATE)))
        recording = rng.choice(digits[rng.choice(sorted(digits))])
        samples_S = perturb_speed(recording.samples_S, speed)
        samples_S = perturb_tempo(samples_S, tempo, SAMPLING_RATE)
        # Digits differ slightly in level; the recordings of one speaker differ too much.
        samples_S = scale_to_level(samples_S, rng.uniform(-26.0, -20.0))
        words.append(
            AlignedWord(
                word=DIGITS[recording.digit],
                start=position / SAMPLING_RATE,
                duration=samples_S.size / SAMPLING_RATE,
            )
        )
        append(samples_S)
    append(np.zeros(int(rng.uniform(0.15, 0.3) * SAMPLING_RATE)))
    samples_S = np.concatenate(pieces)
    samples_S = samples_S * np.float32(10.0 ** (rng.uniform(-9.0, 3.0) / 20.0))
    samples_S = add_white_noise(
        samples_S, rng.uniform(*variation.noise_db), np.random.default_rng(utterance_seed)
    )
    return Utterance(
        id=f"{split}-{index:05d}-{speaker}",
        samples_S=resample(samples_S, SAMPLING_RATE, OUTPUT_RATE),
        text=" ".join(word.word for word in words),
        speaker=speaker,
        words=tuple(words),
    )
