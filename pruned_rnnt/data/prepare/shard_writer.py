"""One shard of a corpus: entries checked, features computed, manifest written. Runs in a worker.

Axes: S audio samples.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lhotse import CutSet, LilcomChunkyWriter
from lhotse.features.io import MemoryRawWriter
from lhotse.utils import fastcopy

from pruned_rnnt.data.audio.features import SAMPLING_RATE, fbank_extractor
from pruned_rnnt.data.audio.recordings import LeftOut, read_samples
from pruned_rnnt.data.audio.waveform import FloatArray, perturb_speed, resample
from pruned_rnnt.data.input.shar_members import cuts_with_ranges, open_shar_writer
from pruned_rnnt.data.prepare.entries import Entry, Limits, entry_cut
from pruned_rnnt.data.tokens.text_normalisation import TextConfig, normalise_text

Storage = Literal["stored", "waveform"]


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How entries become data.

    features: "stored" computes features now; "waveform" leaves it to training.
    shar: features or audio go into tar files (see `shar_members.py`).
    needs_text: an utterance without text is left out (noises have none).
    speeds: with "stored", further copies of every training utterance at these speeds.
    """

    features: Storage = "stored"
    shar: bool = False
    needs_text: bool = True
    speeds: tuple[float, ...] = ()
    limits: Limits = field(default_factory=Limits)
    text: TextConfig = field(default_factory=TextConfig)

    def __post_init__(self) -> None:
        for speed in self.speeds:
            if not 0.5 <= speed <= 2.0 or speed == 1.0:
                raise ValueError(f"speeds need 0.5 <= speed <= 2 other than 1, got {speed}")
        if self.speeds and self.features == "waveform":
            raise ValueError(
                "speeds are for stored features; with features=waveform set data.speed_factors "
                "for training"
            )


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Entries of one split which one process turns into shard `number`."""

    folder: Path
    split: str
    number: int
    entries: tuple[Entry, ...]
    config: ShardConfig


@dataclass(kw_only=True)
class ShardResult:
    """What became of a shard. Durations of speech in seconds, speed copies not counted.

    cuts: number of manifest lines, speed copies counted.
    texts: of the utterances kept. left_out: (entry, reason, details).
    rates, channels: how many utterances have which. durations: of the utterances kept.
    """

    split: str
    number: int
    cuts: int = 0
    texts: list[str] = field(default_factory=list)
    speakers: Counter[str] = field(default_factory=Counter)
    durations: list[float] = field(default_factory=list)
    rates: Counter[int] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    left_out: list[tuple[str, str, str, str]] = field(default_factory=list)


def manifest_name(split: str, number: int) -> str:
    return f"{split}_cuts.{number:06d}.jsonl.gz"


def write_shard(shard: Shard) -> ShardResult:
    """Writes DIR/SPLIT_cuts.NUMBER.jsonl.gz and what its cuts point at."""
    result = ShardResult(split=shard.split, number=shard.number)
    manifest = shard.folder / manifest_name(shard.split, shard.number)
    with ExitStack() as stack:
        if shard.config.shar:
            data_field = "features" if shard.config.features == "stored" else "recording"
            writer = stack.enter_context(
                open_shar_writer(shard.folder, shard.split, shard.number, data_field)
            )
            for cut in _cuts(shard, result, MemoryRawWriter()):
                writer.write(cut)
                result.cuts += 1
            stack.close()
            if result.cuts:
                ranged = cuts_with_ranges(shard.folder, shard.split, shard.number, data_field)
                CutSet.from_cuts(ranged).to_file(manifest)
            return result
        storage = None
        if shard.config.features == "stored":
            (shard.folder / "features").mkdir(exist_ok=True)
            path = shard.folder / "features" / f"{shard.split}-{shard.number:06d}"
            storage = stack.enter_context(LilcomChunkyWriter(path))
        cuts = list(_cuts(shard, result, storage))
    result.cuts = len(cuts)
    if cuts:
        CutSet.from_cuts(cuts).to_file(manifest)
    return result


def _cuts(shard: Shard, result: ShardResult, storage: Any) -> Iterator[Any]:
    """The good cuts of a shard and their copies at other speeds."""
    config = shard.config
    extractor = fbank_extractor()
    for entry in shard.entries:
        text = normalise_text(entry.text, config.text)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if config.needs_text and not (text or entry.problem):
                    raise LeftOut("empty text")
                cut = entry_cut(entry, text, config.limits)
                cut = fastcopy(cut, features=None, id=entry.id)
                samples_S = read_samples(cut)
        except LeftOut as error:
            result.left_out.append((entry.id, entry.origin, error.reason, error.details))
            continue
        result.texts.append(text)
        result.speakers[entry.speaker] += 1
        result.durations.append(cut.duration)
        result.rates[cut.sampling_rate] += 1
        result.channels[len(cut.recording.channel_ids)] += 1
        if config.features == "waveform":
            yield cut
            continue
        samples_S = resample(samples_S, cut.sampling_rate, SAMPLING_RATE)
        yield _with_features(cut, samples_S, extractor, storage)
        for speed in config.speeds if shard.split == "train" else ():
            # Not by lhotse, which needs minutes where rate and speed have no common divisor.
            faster_S = perturb_speed(samples_S, speed)
            yield _with_features(cut.perturb_speed(speed), faster_S, extractor, storage)


def _with_features(cut: Any, samples_S: FloatArray, extractor: Any, storage: Any) -> Any:
    features = extractor.extract_from_samples_and_store(
        samples_S[None], storage=storage, sampling_rate=SAMPLING_RATE, offset=cut.start
    )
    path = features.storage_path
    # With features stored the command is not needed again: training need not allow it.
    commands = any(source.type == "command" for source in cut.recording.sources)
    return fastcopy(
        cut,
        recording=None if commands else cut.recording,
        features=replace(
            features,
            recording_id=cut.recording.id,
            channels=cut.channel,
            # Rounded differently at other rates; lhotse wants the feature to hold the whole cut.
            duration=cut.duration,
            storage_path=f"features/{Path(path).name}" if path else path,
        ),
    )
