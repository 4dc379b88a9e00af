"""The recordings of `scripts.lost_speech`, made of the utterances of a split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray, resample
from pruned_rnnt.data.input.prepared_folder import PreparedFolder

# Of faint noise and of a quiet room, below full scale.
NOISES = {"zeros": 0.0, "faint": 1e-4, "room": 1e-3}


@dataclass(frozen=True)
class TimedReference:
    """A reference word with its start and end in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True)
class Spoken:
    """(S,) samples at 16 kHz, the words in them, of how many utterances, and who speaks."""

    samples_S: FloatArray
    words: tuple[TimedReference, ...]
    utterances: int = 1
    speaker: str = ""

    @property
    def seconds(self) -> float:
        return len(self.samples_S) / SAMPLING_RATE


def read_utterances(folder: Path, split: str, most: int) -> list[Spoken]:
    """The first utterances of a split with recordings, as samples and timed words."""
    found = []
    prepared = PreparedFolder(folder)
    for cut in islice(prepared.cuts(split), most or None):
        samples_S = resample(cut.load_audio()[0], cut.sampling_rate, SAMPLING_RATE)
        (supervision,) = cut.supervisions
        aligned = (supervision.alignment or {}).get("word", ())
        if aligned:
            words = tuple(
                TimedReference(item.symbol, item.start, item.start + (item.duration or 0.0))
                for item in aligned
            )
        else:
            texts = supervision.text.split()
            step = cut.duration / max(1, len(texts))
            words = tuple(TimedReference(w, i * step, (i + 1) * step) for i, w in enumerate(texts))
        speaker = supervision.speaker or ""
        found.append(Spoken(np.asarray(samples_S, dtype=np.float32), words, speaker=speaker))
    return found


def joined(parts: Sequence[Spoken | FloatArray]) -> Spoken:
    """Utterances and samples without words, one after the other."""
    words: list[TimedReference] = []
    samples = []
    position = utterances = 0
    for part in parts:
        own_S = part.samples_S if isinstance(part, Spoken) else part
        if isinstance(part, Spoken):
            begin = position / SAMPLING_RATE
            words += [TimedReference(w.word, begin + w.start, begin + w.end) for w in part.words]
            utterances += part.utterances
        samples.append(own_S)
        position += len(own_S)
    return Spoken(np.concatenate(samples), tuple(words), utterances)


class Conditions:
    """Makes the recordings of each condition from the utterances."""

    def __init__(self, utterances: Sequence[Spoken], seed: int) -> None:
        self.utterances = utterances
        self.seed = seed

    def all(
        self, padding: Sequence[float], lengths: Sequence[float]
    ) -> Iterator[tuple[str, Callable[[], list[Spoken]]]]:
        """The name of each condition, and what makes its recordings."""
        yield "alone", lambda: list(self.utterances)
        for kind in NOISES:
            for seconds in padding:
                yield f"{seconds:g} s of {kind} before", partial(self.padded, kind, seconds, 0.0)
                yield f"{seconds:g} s of {kind} after", partial(self.padded, kind, 0.0, seconds)
        yield "0 to 2 s of silence before and after", self.padded_at_random
        yield "level changes of 30 dB", lambda: list(map(gain, self.long(20.0, (0.0, 0.0))))
        yield "telephone band", lambda: list(map(telephone, self.utterances))
        if len({utterance.speaker for utterance in self.utterances}) > 1:
            yield "two speakers in turns, 10 s", lambda: self.two_speakers(10.0)
        for seconds in lengths:
            for name, pauses in (("without", (0.0, 0.0)), ("with", (0.2, 2.0))):
                yield f"joined to {seconds:g} s {name} pauses", partial(self.long, seconds, pauses)

    def noise(self, kind: str, seconds: float, rng: np.random.Generator) -> FloatArray:
        samples_S = NOISES[kind] * rng.standard_normal(round(seconds * SAMPLING_RATE))
        return samples_S.astype(np.float32)

    def padded(self, kind: str, before: float, after: float) -> list[Spoken]:
        rng = np.random.default_rng(self.seed)
        return [
            joined((self.noise(kind, before, rng), utterance, self.noise(kind, after, rng)))
            for utterance in self.utterances
        ]

    def padded_at_random(self) -> list[Spoken]:
        rng = np.random.default_rng(self.seed)
        found = []
        for utterance in self.utterances:
            kind = str(rng.choice(list(NOISES)))
            before, after = (self.noise(kind, rng.uniform(0, 2), rng) for _ in range(2))
            found.append(joined((before, utterance, after)))
        return found

    def long(self, seconds: float, pauses: tuple[float, float]) -> list[Spoken]:
        """All utterances in a random order, joined to recordings of at least `seconds`."""
        rng = np.random.default_rng(self.seed)
        order = [self.utterances[int(n)] for n in rng.permutation(len(self.utterances))]
        return self._joined_to(seconds, order, pauses, rng)

    def two_speakers(self, seconds: float) -> list[Spoken]:
        """Utterances of two speakers in turns without pauses, joined to at least `seconds`."""
        rng = np.random.default_rng(self.seed)
        by_speaker: dict[str, list[Spoken]] = {}
        for utterance in self.utterances:
            by_speaker.setdefault(utterance.speaker, []).append(utterance)
        turns = list(by_speaker.values())
        found = []
        for one, other in zip(turns[::2], turns[1::2], strict=False):
            order = [each for turn in zip(one, other, strict=False) for each in turn]
            found += self._joined_to(seconds, order, (0.0, 0.0), rng)
        return found

    def _joined_to(
        self,
        seconds: float,
        order: Sequence[Spoken],
        pauses: tuple[float, float],
        rng: np.random.Generator,
    ) -> list[Spoken]:
        found = []
        parts: list[Spoken | FloatArray] = []
        length = 0.0
        for utterance in order:
            pause = self.noise("faint", rng.uniform(*pauses), rng)
            parts += [utterance, pause]
            length += utterance.seconds + len(pause) / SAMPLING_RATE
            if length >= seconds:
                found.append(joined(parts))
                parts, length = [], 0.0
        # The rest is a shorter recording, unless there is none of the full length.
        return found or [joined(parts)]


def gain(recording: Spoken) -> Spoken:
    """Every other stretch of about 3 s is 30 dB quieter."""
    samples_S = recording.samples_S.copy()
    step = 3 * SAMPLING_RATE
    for begin in range(step, len(samples_S), 2 * step):
        samples_S[begin : begin + step] *= 10 ** (-30 / 20)
    return replace(recording, samples_S=samples_S)


def telephone(recording: Spoken) -> Spoken:
    """At 8 kHz and back."""
    narrow_S = resample(recording.samples_S, SAMPLING_RATE, 8000)
    wide_S = resample(narrow_S, 8000, SAMPLING_RATE)
    return replace(recording, samples_S=np.asarray(wide_S, dtype=np.float32))
