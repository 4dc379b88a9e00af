"""Speech of tones: every character of a text is a fixed sequence of sounds.

It is learnable, needs no synthesiser, and takes little time: an utterance is a lookup in a table.

Axes: S audio samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

# Sounds; a character is a number with these digits.
_SOUNDS = 40
_PAUSE = _SOUNDS
_LOWEST_HZ, _HIGHEST_HZ = 250.0, 3400.0
# Peak of a sound, standard deviation of the noise, of 32768.
_PEAK, _NOISE = 6000.0, 12.0
_NOISE_SECONDS = 20

Samples = npt.NDArray[np.int16]


class ToneVoice:
    """The sounds of one speaker.

    Args:
        sounds: of a character; 1 for an alphabet of at most 40 characters.
        seconds: duration of a character.
        pitch: factor of all frequencies.
    """

    def __init__(self, *, sampling_rate: int, sounds: int, seconds: float, pitch: float) -> None:
        self.sampling_rate = sampling_rate
        self.sounds = sounds
        self._length = round(sampling_rate * seconds / sounds)
        time_S = np.arange(self._length) / sampling_rate
        lowest, highest = np.log(_LOWEST_HZ * pitch), np.log(_HIGHEST_HZ * pitch)
        hertz = np.exp(np.linspace(lowest, highest, _SOUNDS))
        # The second tone separates neighbours: their first ones are close to each other.
        pairs = zip(hertz, hertz[np.arange(_SOUNDS) * 7 % _SOUNDS], strict=True)
        window_S = np.hanning(self._length)
        table = [_tones(time_S, pair) * window_S for pair in pairs]
        table.append(np.zeros(self._length))
        self._table = (_PEAK * np.stack(table)).astype(np.int16)
        self._noise_S = _noise(sampling_rate * _NOISE_SECONDS)

    def speak(self, text: str, rng: np.random.Generator) -> Samples:
        """The samples of a text, with 0.1 to 0.3 seconds of noise before and after it."""
        spoken_S = self._table[list(self._sounds_of(text))].reshape(-1)
        before, after = (round(s * self.sampling_rate) for s in rng.uniform(0.1, 0.3, 2))
        padded_S = np.pad(spoken_S, (before, after))
        start = int(rng.integers(len(self._noise_S)))
        padded_S += np.take(self._noise_S, np.arange(start, start + len(padded_S)), mode="wrap")
        return padded_S

    def _sounds_of(self, text: str) -> Iterator[int]:
        for character in text:
            code = ord(character)
            for _ in range(self.sounds):
                code, sound = divmod(code, _SOUNDS)
                yield sound if character.isalnum() else _PAUSE


@cache
def _noise(samples: int) -> Samples:
    noise_S = np.random.default_rng(0).standard_normal(samples)
    return (_NOISE * noise_S).astype(np.int16)


def _tones(time_S: npt.NDArray[np.float64], hertz: tuple[float, float]) -> npt.NDArray[np.float64]:
    first, second = (np.sin(2 * np.pi * h * time_S) for h in hertz)
    total: npt.NDArray[np.float64] = 0.6 * first + 0.4 * second
    return total
