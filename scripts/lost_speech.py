"""Speech that transcription loses: silence around utterances, joined speech, other recordings.

    python -m scripts.lost_speech RUN --data data/synthetic
    python -m scripts.lost_speech CAUSAL_RUN decode.method=modified_beam --live --data DATA

Makes recordings of the utterances of a split, transcribes them as `pruned-rnnt transcribe` does,
with the same models and settings, as files or as streams (--live), and prints for each condition

    WER       word error rate; `alone` is that of the same utterances by themselves
    lost      runs of three or more reference words without text, in 10,000 words
    unmarked  those of these runs that no mark of the transcription touches
    false     marks of speech without text that touch no deleted word, and of text unlike the speech
              that touch no wrong one, in 100 utterances
    x         speed, in multiples of real time

Rows go to --rows as JSON lines. The conditions and all their noise depend on the seed alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import pruned_rnnt
from pruned_rnnt.decode.scoring.error_rates import Transcript, count_errors
from pruned_rnnt.decode.scoring.error_statistics import LEAST_WORDS, lost_runs_of_pairs
from pruned_rnnt.decode.word_times import TimedWord
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from pruned_rnnt.transcribe.lost_speech import Mark
from pruned_rnnt.transcribe.segments import SegmentConfig
from scripts.benchmark.results import commit, machine
from scripts.lost_conditions import Conditions, Spoken, TimedReference, read_utterances

PADDING_SECONDS = (0.25, 0.5, 1.0, 1.5, 2.0)
_MOST_PADDING = 2.0
# Decoded together.
_STREAMS = 50
# The cost of an error, in seconds by which words differ.
_ERROR = 1e5

# From and to, in seconds.
Span = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """The result of a condition."""

    condition: str
    recordings: int
    utterances: int
    seconds: float
    words: int
    errors: int
    lost: int
    unmarked: int
    false_marks: int
    speed: float
    cpu_seconds: float


class MarkedText(NamedTuple):
    """The recognised text of a recording, its words with their times, and the marks in it."""

    text: str
    words: Sequence[TimedWord]
    marks: Sequence[Mark]


def transcribe_files(recogniser: AudioRecogniser, recordings: Sequence[Spoken]) -> list[MarkedText]:
    results = recogniser.transcribe([recording.samples_S for recording in recordings])
    return [MarkedText(result.text, result.words, result.marks) for result in results]


def transcribe_streams(
    recogniser: AudioRecogniser, recordings: Sequence[Spoken], sizes: Mapping[str, int]
) -> list[MarkedText]:
    """Each as a live stream of these chunks; some are decoded together."""
    results = []
    for begin in range(0, len(recordings), _STREAMS):
        streams = []
        for recording in recordings[begin : begin + _STREAMS]:
            streams.append(recogniser.stream(**sizes))
            streams[-1].accept_waveform(recording.samples_S)
            streams[-1].finish()
        while recogniser.step(streams):
            pass
        for stream in streams:
            finals = stream.take_finals()
            text = " ".join(final.text for final in finals if final.text)
            words = [word for final in finals for word in final.words]
            marks = [mark for final in finals for mark in final.marks]
            results.append(MarkedText(text, words, marks))
    return results


def measured(
    name: str,
    recordings: Sequence[Spoken],
    recogniser: AudioRecogniser,
    sizes: Mapping[str, int] | None = None,
) -> Row:
    """Transcribe the recordings of a condition: files, or live streams with these chunks."""
    started, started_cpu = time.perf_counter(), time.process_time()
    if sizes is None:
        results = transcribe_files(recogniser, recordings)
    else:
        results = transcribe_streams(recogniser, recordings, sizes)
    taken, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    scores = [score(*pair) for pair in zip(recordings, results, strict=True)]
    seconds = sum(recording.seconds for recording in recordings)
    return Row(
        condition=name,
        recordings=len(recordings),
        utterances=sum(recording.utterances for recording in recordings),
        seconds=round(seconds, 1),
        words=sum(len(recording.words) for recording in recordings),
        errors=sum(each.errors for each in scores),
        lost=sum(each.lost for each in scores),
        unmarked=sum(each.unmarked for each in scores),
        false_marks=sum(each.false_marks for each in scores),
        speed=round(seconds / taken, 1),
        cpu_seconds=round(cpu, 2),
    )


class Score(NamedTuple):
    """Of one recording: errors, lost runs, those without a mark, and false marks."""

    errors: int
    lost: int
    unmarked: int
    false_marks: int


def score(recording: Spoken, result: MarkedText) -> Score:
    transcript = Transcript(
        id="",
        reference=tuple(word.word for word in recording.words),
        hypothesis=tuple(result.text.split()),
    )
    pairs = timed_pairs(recording.words, result.words)
    spoken = [word for word, _ in pairs if word is not None]
    in_order = [(None if r is None else r.word, None if h is None else h.word) for r, h in pairs]

    def spans(least: int) -> list[Span]:
        runs = lost_runs_of_pairs(in_order, least)
        return [(spoken[run[0]].start, spoken[run[-1]].end) for run in runs if run]

    deleted, wrong = spans(1), spans(1)
    for (one, other), (reference, hypothesis) in zip(pairs, in_order, strict=True):
        if other is not None and reference != hypothesis:
            times = [(each.start, each.end) for each in (one, other) if each is not None]
            wrong.append((min(times)[0], max(end for _, end in times)))
    lost = spans(LEAST_WORDS)
    return Score(
        errors=count_errors([transcript]).errors,
        lost=len(lost),
        unmarked=sum(not any(_touches(mark, run) for mark in result.marks) for run in lost),
        false_marks=sum(
            not any(_touches(mark, run) for run in right)
            for mark in result.marks
            for kind, right in (
                ("speech without text", deleted),
                ("text unlike the speech", wrong),
            )
            if mark.kind == kind
        ),
    )


def _touches(mark: Mark, span: Span) -> bool:
    return mark.start < span[1] and mark.end > span[0]


def timed_pairs(
    reference: Sequence[TimedReference], hypothesis: Sequence[TimedWord]
) -> list[tuple[TimedReference | None, TimedWord | None]]:
    """The alignment with the fewest errors; of several, the one whose times agree best.

    Without times, of "stop the music and stop the fan" and "stop the fan" it is open which words
    were lost.
    """
    same_RH = np.array([[r.word == h.word for h in hypothesis] for r in reference], dtype=bool)
    same_RH = same_RH.reshape(len(reference), len(hypothesis))
    middles_R, middles_H = (
        np.array([(word.start + word.end) / 2 for word in words])
        for words in (reference, hypothesis)
    )
    replaced_RH = np.abs(middles_R[:, None] - middles_H) + _ERROR * ~same_RH
    skipped_H = _ERROR * np.arange(len(hypothesis) + 1.0)
    best = [skipped_H]
    for replaced_H in replaced_RH:
        above_H = best[-1]
        row_H = above_H + _ERROR
        row_H[1:] = np.minimum(row_H[1:], above_H[:-1] + replaced_H)
        best.append(np.minimum.accumulate(row_H - skipped_H) + skipped_H)
    i, j = len(reference), len(hypothesis)
    pairs: list[tuple[TimedReference | None, TimedWord | None]] = []
    while i or j:
        steps = [(np.inf, 0, 0)]
        if i and j:
            steps.append((best[i - 1][j - 1] + replaced_RH[i - 1, j - 1], 1, 1))
        if i:
            steps.append((best[i - 1][j] + _ERROR, 1, 0))
        if j:
            steps.append((best[i][j - 1] + _ERROR, 0, 1))
        _, down, right = min(steps)
        i, j = i - down, j - right
        pairs.append((reference[i] if down else None, hypothesis[j] if right else None))
    return pairs[::-1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="as for `pruned-rnnt transcribe`")
    parser.add_argument("settings", nargs="*", metavar="decode.key=value")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--utterances", type=int, default=0, help="the first ones; 0 for all")
    parser.add_argument("--padding", type=float, nargs="*", default=PADDING_SECONDS)
    parser.add_argument("--padding-step", type=float, help="seconds, from 0 to 2 s: 0.02 or 0.05")
    parser.add_argument("--lengths", type=float, nargs="*", default=(5, 10, 20, 60, 600))
    parser.add_argument("--lost-speech", choices=("retry", "mark", "ignore"), default="retry")
    parser.add_argument("--only", nargs="*", help="conditions whose names contain one of these")
    parser.add_argument("--live", action="store_true", help="as live streams; causal models only")
    parser.add_argument("--chunk", type=int, default=0, help="of live streams, in encoder frames")
    parser.add_argument("--left", type=int, default=0, help="context of a chunk, in encoder frames")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--label", help="what the rows call the model; its file name if not given")
    options = parser.parse_intermixed_args(arguments)
    if options.padding_step is not None:
        if not 0 < options.padding_step <= _MOST_PADDING:
            parser.error(f"--padding-step is {options.padding_step}, needs more than 0, at most 2")
        steps = int(_MOST_PADDING / options.padding_step + 1e-6)
        options.padding = [round(n * options.padding_step, 3) for n in range(1, steps + 1)]
    if not options.live and (options.chunk or options.left):
        parser.error("--chunk and --left need --live; of files, set decode.chunk and decode.left")
    sizes = {"chunk": options.chunk, "left": options.left} if options.live else None
    recogniser = pruned_rnnt.load(
        options.model,
        options.device,
        settings=options.settings,
        segments=SegmentConfig(lost_speech=options.lost_speech),
    )
    utterances = read_utterances(options.data, options.split, options.utterances)
    conditions = Conditions(utterances, options.seed)
    how = {
        "model": options.label or Path(options.model).name,
        "settings": options.settings,
        "live": sizes,
        "lost_speech": options.lost_speech,
        "machine": machine(options.device),
        "torch": torch.__version__,
        "commit": commit(),
        "date": f"{date.today():%Y-%m-%d}",
    }
    print(f"{'condition':38}  words     WER   lost unmarked  false       x")
    for name, make in conditions.all(options.padding, options.lengths):
        if options.only and not any(part in name for part in options.only):
            continue
        row = measured(name, make(), recogniser, sizes)
        per_word = 10_000 / max(1, row.words)
        print(
            f"{name:38} {row.words:6} {row.errors / max(1, row.words):7.2%} "
            f"{row.lost * per_word:6.1f} {row.unmarked:8} "
            f"{100 * row.false_marks / row.utterances:6.2f} {row.speed:7.0f}",
            flush=True,
        )
        if options.rows is not None:
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**how, **asdict(row)}) + "\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
