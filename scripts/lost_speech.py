"""Speech that transcription loses: silence around utterances, joined speech, other recordings.

    python -m scripts.lost_speech RUN --data data/synthetic
    python -m scripts.lost_speech CAUSAL_RUN decode.method=modified_beam --live --data DATA

Makes recordings of the utterances of a split, transcribes them as `pruned-rnnt transcribe` does,
with the same models and settings, as files or as streams (--live), and prints for each condition

    WER       word error rate; `alone` is that of the same utterances by themselves
    lost      runs of three or more reference words without text, in 10,000 words
    unmarked  those of these runs that no mark of the transcription touches
    false     marks of speech without text that touch no deleted word, in 100 recordings
    x         speed, in multiples of real time

Rows go to --rows as JSON lines. The conditions and all their noise depend on the seed alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

import pruned_rnnt
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray, resample
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.decode.scoring.error_statistics import lost_runs
from pruned_rnnt.decode.scoring.wer import Transcript, count_errors
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from pruned_rnnt.transcribe.lost_speech import Mark
from pruned_rnnt.transcribe.segments import SegmentConfig

# Of faint noise and of a quiet room, below full scale.
NOISES = {"zeros": 0.0, "faint": 1e-4, "room": 1e-3}
PADDING_SECONDS = (0.25, 0.5, 1.0, 1.5, 2.0)
# Decoded together.
_STREAMS = 50


@dataclass(frozen=True)
class TimedReference:
    """A reference word with its start and end in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True)
class Spoken:
    """(S,) samples at 16 kHz and the words in them."""

    samples_S: FloatArray
    words: tuple[TimedReference, ...]

    @property
    def seconds(self) -> float:
        return len(self.samples_S) / SAMPLING_RATE


@dataclass(frozen=True)
class Row:
    """The result of a condition."""

    condition: str
    recordings: int
    seconds: float
    words: int
    errors: int
    lost: int
    unmarked: int
    false_marks: int
    speed: float


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
        found.append(Spoken(np.asarray(samples_S, dtype=np.float32), words))
    return found


def joined(parts: Sequence[Spoken | FloatArray]) -> Spoken:
    """Utterances and samples without words, one after the other."""
    words: list[TimedReference] = []
    samples = []
    position = 0
    for part in parts:
        own_S = part.samples_S if isinstance(part, Spoken) else part
        if isinstance(part, Spoken):
            begin = position / SAMPLING_RATE
            words += [TimedReference(w.word, begin + w.start, begin + w.end) for w in part.words]
        samples.append(own_S)
        position += len(own_S)
    return Spoken(np.concatenate(samples), tuple(words))


class Conditions:
    """Makes the recordings of each condition from the utterances."""

    def __init__(self, utterances: Sequence[Spoken], seed: int) -> None:
        self.utterances = utterances
        self.seed = seed

    def all(self, padding: Sequence[float], lengths: Sequence[float]) -> Iterator[tuple[str, list]]:
        """The name and the recordings of each condition."""
        yield "alone", list(self.utterances)
        for kind in NOISES:
            for seconds in padding:
                yield f"{seconds:g} s of {kind} before", self.padded(kind, seconds, 0.0)
                yield f"{seconds:g} s of {kind} after", self.padded(kind, 0.0, seconds)
        yield "0 to 2 s of silence before and after", self.padded_at_random()
        yield "level changes of 30 dB", [self.gain(u) for u in self.long(20.0, (0.0, 0.0))]
        yield "telephone band", [telephone(u) for u in self.utterances]
        for seconds in lengths:
            yield f"joined to {seconds:g} s without pauses", self.long(seconds, (0.0, 0.0))
            yield f"joined to {seconds:g} s with pauses", self.long(seconds, (0.2, 2.0))

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
        found = []
        parts: list[Spoken | FloatArray] = []
        length = 0.0
        for place in rng.permutation(len(self.utterances)):
            utterance = self.utterances[int(place)]
            pause = self.noise("faint", rng.uniform(*pauses), rng)
            parts += [utterance, pause]
            length += utterance.seconds + len(pause) / SAMPLING_RATE
            if length >= seconds:
                found.append(joined(parts))
                parts, length = [], 0.0
        # The rest is a shorter recording, unless there is none of the full length.
        return found or [joined(parts)]

    def gain(self, recording: Spoken) -> Spoken:
        """Every other stretch of about 3 s is 30 dB quieter."""
        samples_S = recording.samples_S.copy()
        step = 3 * SAMPLING_RATE
        for begin in range(step, len(samples_S), 2 * step):
            samples_S[begin : begin + step] *= 10 ** (-30 / 20)
        return Spoken(samples_S, recording.words)


def telephone(recording: Spoken) -> Spoken:
    """At 8 kHz and back."""
    narrow_S = resample(recording.samples_S, SAMPLING_RATE, 8000)
    wide_S = resample(narrow_S, 8000, SAMPLING_RATE)
    return Spoken(np.asarray(wide_S, dtype=np.float32), recording.words)


class MarkedText(NamedTuple):
    """The recognised text of a recording, and the marks in it."""

    text: str
    marks: Sequence[Mark]


def transcribe_files(recogniser: AudioRecogniser, recordings: Sequence[Spoken]) -> list[MarkedText]:
    results = recogniser.transcribe([recording.samples_S for recording in recordings])
    return [MarkedText(result.text, result.marks) for result in results]


def transcribe_streams(
    recogniser: AudioRecogniser, recordings: Sequence[Spoken]
) -> list[MarkedText]:
    """Each as a live stream; some are decoded together."""
    results = []
    for begin in range(0, len(recordings), _STREAMS):
        streams = []
        for recording in recordings[begin : begin + _STREAMS]:
            streams.append(recogniser.stream())
            streams[-1].accept_waveform(recording.samples_S)
            streams[-1].finish()
        while recogniser.step(streams):
            pass
        for stream in streams:
            finals = stream.take_finals()
            text = " ".join(final.text for final in finals if final.text)
            results.append(MarkedText(text, [mark for final in finals for mark in final.marks]))
    return results


def measured(
    name: str, recordings: Sequence[Spoken], recogniser: AudioRecogniser, *, live: bool = False
) -> Row:
    """Transcribe the recordings of a condition."""
    started = time.perf_counter()
    results = (transcribe_streams if live else transcribe_files)(recogniser, recordings)
    taken = time.perf_counter() - started
    scores = [score(*pair) for pair in zip(recordings, results, strict=True)]
    seconds = sum(recording.seconds for recording in recordings)
    return Row(
        condition=name,
        recordings=len(recordings),
        seconds=round(seconds, 1),
        words=sum(len(recording.words) for recording in recordings),
        errors=sum(each[0] for each in scores),
        lost=sum(each[1] for each in scores),
        unmarked=sum(each[2] for each in scores),
        false_marks=sum(each[3] for each in scores),
        speed=round(seconds / taken, 1),
    )


def score(recording: Spoken, result: MarkedText) -> tuple[int, int, int, int]:
    """Errors, lost runs, those without a mark, and marks on no deleted word."""
    transcript = Transcript(
        id="",
        reference=tuple(word.word for word in recording.words),
        hypothesis=tuple(result.text.split()),
    )
    spans = [(mark.start, mark.end) for mark in result.marks if mark.kind == "speech without text"]

    def touched(runs: Sequence[range]) -> list[list[bool]]:
        return [
            [
                start < recording.words[run[-1]].end and end > recording.words[run[0]].start
                for start, end in spans
            ]
            for run in runs
        ]

    lost = touched(lost_runs(transcript))
    deleted = touched(lost_runs(transcript, least=1))
    return (
        count_errors([transcript]).errors,
        len(lost),
        sum(not any(run) for run in lost),
        sum(not any(run[n] for run in deleted) for n in range(len(spans))),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="as for `pruned-rnnt transcribe`")
    parser.add_argument("settings", nargs="*", metavar="decode.key=value")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--utterances", type=int, default=0, help="the first ones; 0 for all")
    parser.add_argument("--padding", type=float, nargs="*", default=PADDING_SECONDS)
    parser.add_argument("--lengths", type=float, nargs="*", default=(5, 10, 20, 60, 600))
    parser.add_argument("--lost-speech", choices=("retry", "mark", "ignore"), default="retry")
    parser.add_argument("--live", action="store_true", help="as live streams; causal models only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path)
    options = parser.parse_intermixed_args(arguments)
    recogniser = pruned_rnnt.load(
        options.model,
        options.device,
        settings=options.settings,
        segments=SegmentConfig(lost_speech=options.lost_speech),
    )
    utterances = read_utterances(options.data, options.split, options.utterances)
    conditions = Conditions(utterances, options.seed)
    print(f"{'condition':38}  words     WER   lost unmarked  false       x")
    for name, recordings in conditions.all(options.padding, options.lengths):
        row = measured(name, recordings, recogniser, live=options.live)
        per_word = 10_000 / max(1, row.words)
        print(
            f"{name:38} {row.words:6} {row.errors / max(1, row.words):7.2%} "
            f"{row.lost * per_word:6.1f} {row.unmarked:8} "
            f"{100 * row.false_marks / row.recordings:6.2f} {row.speed:7.0f}",
            flush=True,
        )
        if options.rows is not None:
            with options.rows.open("a", encoding="utf-8") as file:
                how = {"settings": options.settings, "live": options.live}
                file.write(json.dumps({"model": options.model, **how, **asdict(row)}) + "\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
