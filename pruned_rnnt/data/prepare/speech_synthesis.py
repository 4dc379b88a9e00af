"""Synthesises speech with espeak-ng, with the start time of each word.

The Python package `espeakng-loader` contains the library and its voices. It is called through
ctypes in synchronous mode: a callback receives blocks of samples, with an event at the start of
each word.

The engine has one global state per process, and its output depends slightly on earlier requests.
The same requests in the same order in a fresh process give the same samples.

Axes: S audio samples.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import espeakng_loader
import numpy as np
import numpy.typing as npt

from pruned_rnnt.data.audio.waveform import resample
from pruned_rnnt.data.input.batch import AlignedWord

_SYNCHRONOUS = 2
_UTF8 = 1
_POSITION_CHARACTER = 1
_PARAMETER_RATE = 1
_PARAMETER_PITCH = 3
_PARAMETER_RANGE = 4
_EVENT_END = 0
_EVENT_WORD = 1

# English accents of the engine.
ACCENTS = ("en-us", "en", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd")

# Voice variants differ in formants, pitch and timbre. These give the same samples in every run
# (variants with breath noise do not) and sound human.
VARIANTS = (
    *("m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "f1", "f4"),
    *("Alex", "Andrea", "Andy", "Annie", "Denis", "Diogo", "Gene", "Henrique", "Hugo", "Jacky"),
    *("Lee", "Marco", "Mario", "Michael", "Mike", "Nguyen", "Reed", "Storm", "adam", "anika"),
    *("antonio", "aunty", "belinda", "benjamin", "boris", "caleb", "david", "ed", "edward"),
    *("grandma", "grandpa", "gustave", "ian", "iven", "john", "kaukovalta", "linda", "marcelo"),
    *("max", "michel", "miguel", "norbert", "pablo", "paul", "pedro", "quincy", "rob", "robert"),
    *("shelby", "steph", "travis", "zac"),
)


@dataclass(frozen=True, kw_only=True)
class Voice:
    """accent: an espeak-ng voice name. variant: its `+variant`, or empty.

    rate: words per minute (80 to 450). pitch: 0 to 99; 50 is the voice's default. pitch_range:
    variation of the pitch, 0 to 99.
    """

    accent: str
    variant: str = ""
    rate: int = 175
    pitch: int = 50
    pitch_range: int = 50

    @property
    def name(self) -> str:
        """The speaker: accent and variant."""
        return f"{self.accent}+{self.variant}" if self.variant else self.accent


@dataclass(frozen=True, kw_only=True)
class Speech:
    """samples_S: float32 in [-1, 1]. words: the words of the text with their times, in order."""

    samples_S: npt.NDArray[np.float32]
    words: tuple[AlignedWord, ...]


class _Event(ctypes.Structure):
    """espeak_EVENT of speak_lib.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class SpeechEngine:
    """The speech engine; create one per process and keep it."""

    def __init__(self) -> None:
        """Raises RuntimeError if the library or its voices cannot be loaded."""
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.sampling_rate = int(self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0))
        if self.sampling_rate <= 0:
            raise RuntimeError(f"espeak-ng did not start: error code {self.sampling_rate}")
        self._blocks: list[npt.NDArray[np.int16]] = []
        self._starts: list[tuple[int, int]] = []  # (character of the text, sample)
        # The library keeps only the pointer, so this object must live as long as the engine.
        self._callback = _Callback(self._receive)
        self._library.espeak_SetSynthCallback(self._callback)

    def _receive(self, wav: Any, count: int, events: Any) -> int:
        if wav and count > 0:
            self._blocks.append(np.ctypeslib.as_array(wav, shape=(count,)).copy())
        index = 0
        while events[index].type != _EVENT_END:
            event = events[index]
            if event.type == _EVENT_WORD:
                self._starts.append((event.text_position - 1, event.sample))
            index += 1
        return 0

    def speak(self, text: str, voice: Voice, *, sampling_rate: int = 16000) -> Speech:
        """Synthesises `text` at `sampling_rate`, without silence at either end.

        Raises ValueError for an unknown voice or a text without words.
        """
        spans = [match.span() for match in re.finditer(r"\S+", text)]
        if not spans:
            raise ValueError(f"text must have at least one word, got {text!r}")
        if self._library.espeak_SetVoiceByName(voice.name.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice.name!r}")
        for parameter, value in (
            (_PARAMETER_RATE, voice.rate),
            (_PARAMETER_PITCH, voice.pitch),
            (_PARAMETER_RANGE, voice.pitch_range),
        ):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._blocks.clear()
        self._starts.clear()
        encoded = text.encode()
        self._library.espeak_Synth(
            encoded, len(encoded) + 1, 0, _POSITION_CHARACTER, 0, _UTF8, None, None
        )
        self._library.espeak_Synchronize()
        if not self._blocks:
            raise ValueError(f"espeak-ng produced no audio for {text!r}")
        samples_S = _without_final_silence(
            np.concatenate(self._blocks).astype(np.float32) / 32768.0
        )
        starts = _word_starts(spans, self._starts, samples_S.size)
        ends = [*starts[1:], samples_S.size]
        words = tuple(
            AlignedWord(
                word=text[begin:end],
                start=start / self.sampling_rate,
                duration=(stop - start) / self.sampling_rate,
            )
            for (begin, end), start, stop in zip(spans, starts, ends, strict=True)
        )
        return Speech(samples_S=resample(samples_S, self.sampling_rate, sampling_rate), words=words)


def _without_final_silence(samples_S: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    loud = np.flatnonzero(np.abs(samples_S) > 1e-3)
    return samples_S[: loud[-1] + 1] if loud.size else samples_S


def _word_starts(
    spans: list[tuple[int, int]], events: list[tuple[int, int]], samples: int
) -> list[int]:
    """The first sample of each word.

    The engine merges some words ("in the"), so that the second one has no event. The time up to
    the next known start is then divided in proportion to the letters.
    """
    known: dict[int, int] = {0: 0}
    for character, sample in events:
        for index, (begin, end) in enumerate(spans):
            if begin <= character < end:
                known.setdefault(index, min(sample, samples))
    starts = []
    for index in range(len(spans)):
        if index in known:
            starts.append(known[index])
            continue
        before = max(i for i in known if i < index)
        after = min((i for i in known if i > index), default=len(spans))
        stop = known.get(after, samples)
        letters = [end - begin for begin, end in spans[before:after]]
        share = sum(letters[: index - before]) / sum(letters)
        starts.append(round(known[before] + share * (stop - known[before])))
    return starts
