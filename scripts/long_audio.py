"""Word error rates of a long recording and of the utterances in it.

    python -m scripts.long_audio RUN --data data/synthetic --seconds 590

Joins utterances of a split into one recording, in random order and with pauses of faint noise
between them. Transcribes the recording as `pruned-rnnt transcribe` does, and each utterance alone.
Prints both word error rates, and the peak memory of the process after 10% and after all of the
recording.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import soundfile

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.input.training_durations import read_p99_duration
from pruned_rnnt.decode.scoring.wer import Transcript, count_errors
from pruned_rnnt.train.run import load_model, run_config
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.segments import SegmentConfig


class Spoken(NamedTuple):
    """(S,) samples at 16 kHz and their transcript."""

    samples_S: FloatArray
    text: str


def read_utterances(folder: Path, split: str) -> list[Spoken]:
    """The utterances of a split of a prepared folder with audio at 16 kHz."""
    found = []
    for cut in PreparedFolder(folder).cuts(split):
        samples_S = cut.load_audio()[0].astype(np.float32)
        found.append(Spoken(samples_S, cut.supervisions[0].text))
    return found


def join_utterances(
    utterances: Sequence[Spoken],
    seconds: float,
    pauses: tuple[float, float],
    decibels: tuple[float, float],
    seed: int,
) -> tuple[FloatArray, list[Spoken]]:
    """A recording of at most `seconds`, and the utterances in it.

    Args:
        pauses: the shortest and the longest, in seconds.
        decibels: of their noise below full scale, the least and the most.
    """
    rng = random.Random(seed)
    noise = np.random.default_rng(seed)
    order = list(utterances)
    rng.shuffle(order)
    parts: list[FloatArray] = []
    used: list[Spoken] = []
    left = int(seconds * SAMPLING_RATE)
    for utterance in order:
        pause = int(rng.uniform(*pauses) * SAMPLING_RATE)
        level = 10 ** (-rng.uniform(*decibels) / 20)
        left -= len(utterance.samples_S) + pause
        if left < 0:
            break
        pause_S = (level * noise.standard_normal(pause)).astype(np.float32)
        parts += [utterance.samples_S, pause_S]
        used.append(utterance)
    return np.concatenate(parts), used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--seconds", type=float, default=590.0)
    parser.add_argument("--pauses", type=float, nargs=2, default=(0.2, 1.5))
    parser.add_argument(
        "--decibels", type=float, nargs=2, default=(60.0, 75.0), help="of noise below full scale"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=float)
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--detector", choices=("energy", "silero"), default="energy")
    options = parser.parse_intermixed_args()
    config = run_config(options.run, options.overrides)
    loaded = load_model(config)
    recogniser = Recogniser(
        loaded.model,
        loaded.tokenizer,
        read_p99_duration(options.run),
        segments=SegmentConfig(
            window=options.window, pause=options.pause, detector=options.detector
        ),
        decode=config.decode,
    )
    samples_S, utterances = join_utterances(
        read_utterances(options.data, options.split),
        options.seconds,
        tuple(options.pauses),
        tuple(options.decibels),
        options.seed,
    )
    single = [
        _transcript(str(index), utterance.text, recogniser.transcribe(utterance.samples_S).text)
        for index, utterance in enumerate(utterances)
    ]
    print(f"{len(utterances)} utterances alone: WER {count_errors(single)}")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "joined.wav"
        soundfile.write(path, samples_S[: len(samples_S) // 10], SAMPLING_RATE)
        recogniser.transcribe(path)
        before = _memory_mib()
        soundfile.write(path, samples_S, SAMPLING_RATE)
        started = time.perf_counter()
        result = recogniser.transcribe(path)
        seconds = time.perf_counter() - started
    reference = " ".join(utterance.text for utterance in utterances)
    print(f"joined to {result.seconds:.0f} s: WER", end=" ")
    print(count_errors([_transcript("joined", reference, result.text)]))
    print(f"{seconds:.1f} s, {_memory_mib():.0f} MiB; after 10% of it {before:.0f} MiB")


def _transcript(name: str, reference: str, hypothesis: str) -> Transcript:
    return Transcript(
        id=name, reference=tuple(reference.split()), hypothesis=tuple(hypothesis.split())
    )


def _memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
