"""Adds speakers for training: synthetic voices speak single digits."""

from __future__ import annotations

import random

from pruned_rnnt.recipes.fsdd.recordings import DIGITS, SAMPLING_RATE, Recording

from pruned_rnnt.data.input.augmentation import derived_seed
from pruned_rnnt.data.prepare.speech_synthesis import ACCENTS, VARIANTS, SpeechEngine, Voice


def speak_digits(speakers: int, *, takes: int, seed: int) -> list[Recording]:
    """Synthesises `takes` recordings of each digit by each of `speakers` voices, at 8 kHz.

    A speaker is a voice variant with one accent; pitch and rate change from take to take. Call
    this in a fresh process, because the engine's output depends on earlier requests.

    Raises ValueError for more speakers than voices.
    """
    voices = [(variant, accent) for variant in VARIANTS for accent in ACCENTS]
    if not 0 <= speakers <= len(voices):
        raise ValueError(f"synthetic speakers must be 0 to {len(voices)}, got {speakers}")
    rng = random.Random(derived_seed("synthetic speakers", seed))
    # Different variants with different accents come first, so that few speakers differ most.
    chosen = sorted(
        voices, key=lambda v: (ACCENTS.index(v[1]) + VARIANTS.index(v[0])) % len(ACCENTS)
    )[:speakers]
    engine = SpeechEngine()
    recordings = []
    for variant, accent in chosen:
        pitch = rng.randint(30, 70)
        for digit, word in enumerate(DIGITS):
            for take in range(takes):
                voice = Voice(
                    accent=accent,
                    variant=variant,
                    rate=rng.randint(120, 220),
                    pitch=pitch + rng.randint(-10, 10),
                    pitch_range=rng.randint(20, 80),
                )
                speech = engine.speak(word, voice, sampling_rate=SAMPLING_RATE)
                recordings.append(
                    Recording(
                        digit=digit,
                        speaker=f"espeak-{variant}-{accent}".replace(" ", "-"),
                        index=take,
                        samples_S=speech.samples_S,
                    )
                )
    return recordings
