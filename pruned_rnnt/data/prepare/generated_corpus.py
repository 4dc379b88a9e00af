"""Corpora that a recipe generates in memory: writes audio, features, cuts and counts.

The features come from the generated float32 samples, before the audio file rounds them to 16 bits.
Recorded corpora go through `corpus_builder.py` instead, which checks files that already exist.

Axes: S audio samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import soundfile
from lhotse import AudioSource, CutSet, LilcomChunkyWriter, MonoCut, Recording, SupervisionSegment
from lhotse.supervision import AlignmentItem
from rich.console import Console

from pruned_rnnt.data.audio.features import SAMPLING_RATE, fbank_extractor
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.input.batch import AlignedWord
from pruned_rnnt.data.prepare.prepare_report import PrepareReport
from pruned_rnnt.data.prepare.shard_workers import stream_shards
from pruned_rnnt.data.prepare.shard_writer import store_features

# Utterances that one process generates at a time.
SHARD_SIZE = 500


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """samples_S: float32 in [-1, 1] at 16 kHz. words: with times; empty if they are unknown."""

    id: str
    samples_S: FloatArray
    text: str
    speaker: str
    words: tuple[AlignedWord, ...] = ()


class UtteranceWriter:
    """Context manager that writes utterances to DIR/audio/SHARD/*.flac and DIR/features/SHARD.lca.

    `cuts` collects the cuts, with paths relative to DIR. Each process needs its own writer with
    its own shard name.
    """

    def __init__(self, folder: Path, shard: str) -> None:
        self.folder = folder
        self.shard = shard
        self.cuts: list[MonoCut] = []
        (folder / "audio" / shard).mkdir(parents=True, exist_ok=True)
        (folder / "features").mkdir(exist_ok=True)
        self._extractor = fbank_extractor()
        self._storage = LilcomChunkyWriter(folder / "features" / shard)

    def __enter__(self) -> UtteranceWriter:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._storage.close()

    def add(self, utterance: Utterance) -> None:
        """Writes one utterance.

        Raises ValueError if its samples are empty, not finite, or of several channels.
        """
        samples_S = utterance.samples_S
        if samples_S.ndim != 1 or samples_S.size == 0 or not np.isfinite(samples_S).all():
            raise ValueError(
                f"samples_S of {utterance.id} must be one channel of finite samples, got shape "
                f"{samples_S.shape}"
            )
        samples_S = np.clip(samples_S, -1.0, 1.0)
        relative = Path("audio") / self.shard / f"{utterance.id}.flac"
        soundfile.write(self.folder / relative, samples_S, SAMPLING_RATE, subtype="PCM_16")
        duration = samples_S.size / SAMPLING_RATE
        recording = Recording(
            id=utterance.id,
            sources=[AudioSource(type="file", channels=[0], source=relative.as_posix())],
            sampling_rate=SAMPLING_RATE,
            num_samples=samples_S.size,
            duration=duration,
        )
        features = store_features(
            samples_S,
            self._extractor,
            self._storage,
            recording_id=utterance.id,
            start=0,
            duration=duration,
            channel=0,
        )
        supervision = SupervisionSegment(
            id=utterance.id,
            recording_id=utterance.id,
            start=0.0,
            duration=duration,
            text=utterance.text,
            speaker=utterance.speaker,
            alignment=_alignment(utterance.words),
        )
        self.cuts.append(
            MonoCut(
                id=utterance.id,
                start=0.0,
                duration=duration,
                channel=0,
                supervisions=[supervision],
                features=features,
                recording=recording,
            )
        )


def _alignment(words: Sequence[AlignedWord]) -> dict[str, list[AlignmentItem]] | None:
    if not words:
        return None
    return {
        "word": [
            AlignmentItem(symbol=w.word, start=round(w.start, 4), duration=round(w.duration, 4))
            for w in words
        ]
    }


def write_cuts(folder: Path, split: str, cuts: Sequence[Any]) -> None:
    """Writes DIR/SPLIT_cuts.jsonl.gz."""
    CutSet.from_cuts(cuts).to_file(folder / f"{split}_cuts.jsonl.gz")


def shard_ranges(count: int) -> list[range]:
    """The indices 0 .. count - 1 in ranges of at most `SHARD_SIZE`."""
    return [range(count)[first : first + SHARD_SIZE] for first in range(0, count, SHARD_SIZE)]


class GeneratedShard(Protocol):
    """The utterances of one split that one process generates."""

    @property
    def split(self) -> str: ...

    @property
    def indices(self) -> range: ...


ShardType = TypeVar("ShardType", bound=GeneratedShard)


def generate_splits(
    folder: Path,
    splits: Iterable[str],
    make_shard: Callable[[ShardType], list[Any]],
    shards: Sequence[ShardType],
    report: PrepareReport,
    *,
    num_jobs: int,
    description: str,
    console: Console,
    fresh_processes: bool = False,
) -> dict[str, list[Any]]:
    """Generates all shards, writes the cuts of each split and adds its counts to the report.

    make_shard: writes the utterances of a shard and returns their cuts.
    description: for the progress bar. fresh_processes: as in `stream_shards`.

    Returns:
        The cuts of each split, in the order of `shards`.
    """
    cuts: dict[str, list[Any]] = {split: [] for split in splits}
    results = stream_shards(
        make_shard,
        shards,
        size=lambda shard: len(shard.indices),
        total=sum(len(shard.indices) for shard in shards),
        num_jobs=num_jobs,
        description=description,
        console=console,
        fresh_processes=fresh_processes,
    )
    for shard, shard_cuts in zip(shards, results, strict=True):
        cuts[shard.split] += shard_cuts
    for split, split_cuts in cuts.items():
        write_cuts(folder, split, split_cuts)
        report.add_split(split, split_cuts)
    return cuts
