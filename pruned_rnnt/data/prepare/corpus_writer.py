"""Writes utterances made in memory into a prepared folder: audio, features and cuts.

Axes: S audio samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import soundfile
from lhotse import AudioSource, CutSet, LilcomChunkyWriter, MonoCut, Recording, SupervisionSegment
from lhotse.supervision import AlignmentItem

from pruned_rnnt.data.audio.features import SAMPLING_RATE, fbank_extractor
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.input.batch import AlignedWord


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """samples_S: float32 in [-1, 1] at 16 kHz. words: their times, empty when unknown."""

    id: str
    samples_S: FloatArray
    text: str
    speaker: str
    words: tuple[AlignedWord, ...] = ()


class UtteranceWriter:
    """Appends utterances to DIR/audio/SHARD/*.flac and DIR/features/SHARD.lca.

    The cuts, with paths relative to DIR, gather in `cuts`. One writer and one shard name a
    process; use it as a context manager.
    """

    def __init__(self, folder: Path, shard: str) -> None:
        self.folder = folder
        self.shard = shard
        self.cuts: list[MonoCut] = []
        (folder / "audio" / shard).mkdir(parents=True, exist_ok=True)
        (folder / "features").mkdir(exist_ok=True)
        self._extractor = fbank_extractor()
        self._features = LilcomChunkyWriter(folder / "features" / shard)

    def __enter__(self) -> UtteranceWriter:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._features.close()

    def add(self, utterance: Utterance) -> None:
        """Raises ValueError for samples that are not one finite channel, or are empty."""
        samples_S = utterance.samples_S
        if samples_S.ndim != 1 or samples_S.size == 0 or not np.isfinite(samples_S).all():
            raise ValueError(
                f"samples_S of {utterance.id} must be one channel of finite samples, got shape "
                f"{samples_S.shape}"
            )
        samples_S = np.clip(samples_S, -1.0, 1.0)
        relative = Path("audio") / self.shard / f"{utterance.id}.flac"
        soundfile.write(self.folder / relative, samples_S, SAMPLING_RATE, subtype="PCM_16")
        recording = Recording(
            id=utterance.id,
            sources=[AudioSource(type="file", channels=[0], source=relative.as_posix())],
            sampling_rate=SAMPLING_RATE,
            num_samples=samples_S.size,
            duration=samples_S.size / SAMPLING_RATE,
        )
        features = self._extractor.extract_from_samples_and_store(
            samples_S[None], storage=self._features, sampling_rate=SAMPLING_RATE
        )
        features = replace(
            features,
            recording_id=utterance.id,
            channels=0,
            storage_path=f"features/{Path(features.storage_path).name}",
        )
        supervision = SupervisionSegment(
            id=utterance.id,
            recording_id=utterance.id,
            start=0.0,
            duration=recording.duration,
            text=utterance.text,
            speaker=utterance.speaker,
            alignment=_alignment(utterance.words),
        )
        self.cuts.append(
            MonoCut(
                id=utterance.id,
                start=0.0,
                duration=recording.duration,
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
