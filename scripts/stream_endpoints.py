"""Endpoints of live streams: their latency, and utterances that they cut or join.

    python -m scripts.stream_endpoints RUN --data data/synthetic --pauses 0.5 0.8 1.2

Joins utterances with word times into streams, with pauses of faint noise between them. All streams
are decoded together, and get 50 ms of audio at a time. Prints a line for streams without endpoints,
and one for each rule: the word error rate, the time from the end of the last word of an utterance
to its endpoint, how many of the pauses that are as long as the rule have an endpoint, and how many
utterances have their words in two texts.
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pruned_rnnt import load
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.input.batch import AlignedWord
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.input.speech_dataset import aligned_words
from pruned_rnnt.decode.emission_delay import percentile
from pruned_rnnt.decode.scoring.error_rates import ErrorCounts, Transcript, count_errors
from pruned_rnnt.decode.scoring.error_statistics import align_words
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.stream import FinalText

_PIECE_SECONDS = 0.05
# Of the noise between utterances, below full scale.
_DECIBELS = (60.0, 75.0)


class Utterance(NamedTuple):
    """(S,) samples at 16 kHz, and words with times in seconds."""

    samples_S: FloatArray
    words: Sequence[AlignedWord]


class Joined(NamedTuple):
    """The samples (S,) of a stream, and the words of each utterance with times in the stream."""

    samples_S: FloatArray
    utterances: list[list[AlignedWord]]

    @property
    def ends(self) -> list[float]:
        return [words[-1].start + words[-1].duration for words in self.utterances]


class Found(NamedTuple):
    """A final text, and the seconds of audio that the stream had got by then."""

    final: FinalText
    seconds: float


class Endpoints(NamedTuple):
    """What is measured for a rule; latencies in seconds."""

    errors: ErrorCounts
    latencies: list[float]
    pauses: int
    found: int
    utterances: int
    cut: int

    def __str__(self) -> str:
        line = f"WER {self.errors.rate:.2%}"
        if self.latencies:
            p50, p90, p99 = (1000 * percentile(self.latencies, p) for p in (50, 90, 99))
            line += f", latency p50 {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f} ms"
        if self.pauses:
            line += f", {self.found} of {self.pauses} pauses found"
        return f"{line}, {self.cut} of {self.utterances} utterances cut"


def read_utterances(folder: Path, split: str) -> list[Utterance]:
    """The utterances of a split with word times, of a prepared folder with audio at 16 kHz."""
    found = []
    for cut in PreparedFolder(folder).cuts(split):
        words = aligned_words(cut)
        if words:
            found.append(Utterance(cut.load_audio()[0].astype(np.float32), words))
    return found


def join(utterances: Sequence[Utterance], pauses: tuple[float, float], seed: int) -> Joined:
    """The utterances with a pause after each; pauses: the least and the most seconds."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    parts, placed, begin = [], [], 0.0
    for utterance in utterances:
        pause = int(rng.uniform(*pauses) * SAMPLING_RATE)
        level = 10 ** (-rng.uniform(*_DECIBELS) / 20)
        parts += [utterance.samples_S, (level * noise.standard_normal(pause)).astype(np.float32)]
        placed.append(
            [
                AlignedWord(word=word.word, start=begin + word.start, duration=word.duration)
                for word in utterance.words
            ]
        )
        begin += (len(utterance.samples_S) + pause) / SAMPLING_RATE
    return Joined(np.concatenate(parts), placed)


def decode(
    recogniser: AudioRecogniser, joined: Sequence[Joined], rules: EndpointConfig
) -> list[list[Found]]:
    """The final texts of the streams, which are decoded together."""
    streams = [recogniser.stream(endpoints=rules) for _ in joined]
    found: list[list[Found]] = [[] for _ in joined]
    piece = round(_PIECE_SECONDS * SAMPLING_RATE)
    begin = 0
    while not all(stream.is_done for stream in streams):
        for stream, each in zip(streams, joined, strict=True):
            if begin < len(each.samples_S):
                stream.accept_waveform(each.samples_S[begin : begin + piece])
            else:
                stream.finish()
        begin += piece
        while recogniser.step(streams):
            pass
        for own, stream in zip(found, streams, strict=True):
            own += [Found(final, begin / SAMPLING_RATE) for final in stream.take_finals()]
    return found


def measure(joined: Sequence[Joined], found: Sequence[Sequence[Found]], pause: float) -> Endpoints:
    """Errors and latencies; pause: that of the rule, 0 for none."""
    transcripts, latencies = [], []
    pauses = with_endpoint = cut = 0
    for number, (stream, own) in enumerate(zip(joined, found, strict=True)):
        spoken = [word.word for words in stream.utterances for word in words]
        owners = [n for n, words in enumerate(stream.utterances) for _ in words]
        texts = [(word, n) for n, each in enumerate(own) for word in each.final.text.split()]
        said = tuple(word for word, _ in texts)
        transcripts.append(Transcript(id=str(number), reference=tuple(spoken), hypothesis=said))
        cut += _cut_utterances(spoken, owners, texts)
        ends = stream.ends
        starts = [words[0].start for words in stream.utterances[1:]]
        long_enough = {n for n, s in enumerate(starts) if pause and s - ends[n] >= pause}
        pauses += len(long_enough)
        hit = set[int]()
        for each in own:
            place = bisect_right(ends, each.final.end) - 1
            if each.final.reason == "pause" and each.final.text and place in long_enough - hit:
                hit.add(place)
                latencies.append(each.seconds - ends[place])
        with_endpoint += len(hit)
    utterances = sum(len(stream.utterances) for stream in joined)
    errors = count_errors(transcripts)
    return Endpoints(errors, latencies, pauses, with_endpoint, utterances, cut)


def _cut_utterances(
    spoken: Sequence[str], owners: Sequence[int], texts: Sequence[tuple[str, int]]
) -> int:
    """The number of utterances with correct words in different texts."""
    places, numbers = iter(owners), iter(number for _, number in texts)
    texts_of: dict[int, set[int]] = {}
    for reference, word in align_words(spoken, [word for word, _ in texts]):
        owner = None if reference is None else next(places)
        number = None if word is None else next(numbers)
        if owner is not None and number is not None and reference == word:
            texts_of.setdefault(owner, set()).add(number)
    return sum(len(found) > 1 for found in texts_of.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("settings", nargs="*", metavar="decode.key=value")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--utterances", type=int, default=20, help="of each stream")
    parser.add_argument("--between", type=float, nargs=2, default=(0.3, 3.0), help="seconds")
    parser.add_argument("--pauses", type=float, nargs="+", default=(0.5, 0.8, 1.2))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_intermixed_args()
    recogniser = load(options.run, options.device, settings=options.settings)
    utterances = read_utterances(options.data, options.split)
    random.Random(options.seed).shuffle(utterances)
    count = options.utterances
    joined = [
        join(utterances[n * count : (n + 1) * count], tuple(options.between), options.seed + n)
        for n in range(min(options.streams, len(utterances) // count))
    ]
    for pause in (0.0, *options.pauses):
        rules = EndpointConfig(pause=pause, silence=0.0, longest=0.0)
        name = f"pause {pause:g} s" if pause else "no endpoints"
        print(f"{name}: {measure(joined, decode(recogniser, joined, rules), pause)}", flush=True)


if __name__ == "__main__":
    main()
