"""The speech engine: words with times, voices that differ, the same samples in each process."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pruned_rnnt.data.prepare.speech_synthesis import (
    ACCENTS,
    VARIANTS,
    SpeechEngine,
    Voice,
    _word_starts,
)
from tests.torch_forks import run_with_torch

_SCRIPT = """
import hashlib
from pruned_rnnt.data.prepare.speech_synthesis import ACCENTS, VARIANTS, SpeechEngine, Voice
engine, digest = SpeechEngine(), hashlib.sha256()
for number, variant in enumerate(VARIANTS):
    voice = Voice(accent=ACCENTS[number % len(ACCENTS)], variant=variant)
    digest.update(engine.speak("turn on the light", voice).samples_S.tobytes())
print(digest.hexdigest())
"""


@pytest.fixture(scope="module")
def engine() -> SpeechEngine:
    return SpeechEngine()


def test_words_have_times(engine: SpeechEngine) -> None:
    text = "put the ball in the red box"
    speech = engine.speak(text, Voice(accent="en-us", variant="m3"))
    assert [word.word for word in speech.words] == text.split()
    starts = [word.start for word in speech.words]
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    assert all(0.02 < word.duration < 1.0 for word in speech.words)
    last = speech.words[-1]
    assert last.start + last.duration == pytest.approx(speech.samples_S.size / 16000, abs=0.01)
    assert 0.1 < np.abs(speech.samples_S).max() <= 1.0


def test_word_starts_at_its_sound(engine: SpeechEngine) -> None:
    """A comma makes a pause: the word after it starts when sound does."""
    speech = engine.speak("stop, stop", Voice(accent="en-us"))
    second = int(speech.words[1].start * 16000)
    before = np.abs(speech.samples_S[second - 1600 : second - 320]).mean()
    after = np.abs(speech.samples_S[second : second + 3200]).mean()
    assert after > 5 * before


def test_voices_rates_and_pitches_differ(engine: SpeechEngine) -> None:
    def say(**changes: object) -> bytes:
        voice = Voice(**{"accent": "en", "variant": "f1", **changes})  # type: ignore[arg-type]
        return hashlib.sha256(engine.speak("go left", voice).samples_S.tobytes()).digest()

    said = [say(), say(accent="en-us"), say(variant="m7"), say(rate=140), say(pitch=80)]
    assert len(set(said)) == len(said)


def test_every_accent_speaks(engine: SpeechEngine) -> None:
    for accent in ACCENTS:
        assert engine.speak("nine", Voice(accent=accent)).samples_S.size > 1600
    assert len(set(VARIANTS)) == len(VARIANTS)


def test_output_rate(engine: SpeechEngine) -> None:
    at_16, at_8 = (
        engine.speak("seven", Voice(accent="en"), sampling_rate=rate).samples_S.size
        for rate in (16000, 8000)
    )
    assert at_16 == pytest.approx(2 * at_8, rel=0.02)


@pytest.mark.slow
def test_every_voice_is_the_same_in_every_process() -> None:
    one, other = (run_with_torch(_SCRIPT) for _ in range(2))
    assert one.returncode == 0, one.stderr
    assert one.stdout == other.stdout


def test_errors(engine: SpeechEngine) -> None:
    with pytest.raises(ValueError, match="no voice 'nowhere'"):
        engine.speak("hello", Voice(accent="nowhere"))
    for text in ("", "  "):
        with pytest.raises(ValueError, match="at least one word"):
            engine.speak(text, Voice(accent="en"))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([(0, 0), (3, 100), (7, 400)], [0, 100, 400]),
        # The second word has no event: it gets its share by letters (2 of 5).
        ([(0, 50), (7, 500)], [0, 200, 500]),
        # Only the first has one: all is shared.
        ([(0, 0)], [0, 222, 556]),
        # Events beyond the sound are held to it.
        ([(0, 0), (3, 100), (7, 5000)], [0, 100, 1000]),
    ],
)
def test_word_starts(events: list[tuple[int, int]], expected: list[int]) -> None:
    """Words "go", "the", "door" in 1000 samples."""
    assert _word_starts([(0, 2), (3, 6), (7, 11)], events, 1000) == expected
