"""Writes one shard of a corpus in a worker process: checks, features and the manifest.

When a shard is complete, a record is written, so that the next run can reuse the shards of an
interrupted one. It holds a fingerprint of the shard's entries and options; if these change, the
shard is made again. Changed audio in a file of the same name is not detected.

Axes: S audio samples.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lhotse import CutSet, LilcomChunkyWriter
from lhotse.features.io import MemoryRawWriter
from lhotse.utils import fastcopy

from pruned_rnnt.data.audio.features import SAMPLING_RATE, fbank_extractor
from pruned_rnnt.data.audio.recordings import UnusableUtterance, read_samples
from pruned_rnnt.data.audio.waveform import FloatArray, perturb_speed, resample
from pruned_rnnt.data.input.shar_members import cuts_with_byte_ranges, open_shar_writer
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry, UtteranceLimits, cut_of_entry
from pruned_rnnt.data.tokens.text_normalisation import TextConfig, normalise_text
from pruned_rnnt.system.json_file import read_json

# Nobody says more in the longest utterance; scoring would take minutes.
_MOST_CHARACTERS = 10_000
# Folder of the records of finished shards.
RECORDS = ".shards"
_NUMBERED = re.compile(r"\.(\d{6})\.|-(\d{6})\.")


def store_features(
    samples_S: FloatArray,
    extractor: Any,
    storage: Any,
    *,
    recording_id: str,
    start: float,
    duration: float,
    channel: int,
) -> Any:
    """Stores the features of a cut and returns lhotse's `Features` for its manifest.

    samples_S: float32 at 16 kHz, the samples of this cut only.
    storage: an open writer of lhotse's below DIR/features, or one that writes to memory.
    start, duration: of the cut, in seconds. The duration computed from the samples can differ by
        rounding, and lhotse requires that features cover the whole cut.
    """
    features = extractor.extract_from_samples_and_store(
        samples_S[None], storage=storage, sampling_rate=SAMPLING_RATE, offset=start
    )
    path = features.storage_path
    return replace(
        features,
        recording_id=recording_id,
        channels=channel,
        duration=duration,
        # Relative to the prepared folder, so that the folder can be moved.
        storage_path=f"features/{Path(path).name}" if path else path,
    )


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How entries become data.

    features: "stored" computes features now; "waveform" leaves that to training.
    shar: store features or audio in tar files (see `shar_members.py`).
    needs_text: leave out utterances without text (noises have none).
    speeds: with "stored", add a copy of every training utterance at each of these speeds.
    """

    features: Literal["stored", "waveform"] = "stored"
    shar: bool = False
    needs_text: bool = True
    speeds: tuple[float, ...] = ()
    limits: UtteranceLimits = field(default_factory=UtteranceLimits)
    text: TextConfig = field(default_factory=TextConfig)

    def __post_init__(self) -> None:
        for speed in self.speeds:
            if not 0.5 <= speed <= 2.0 or speed == 1.0:
                raise ValueError(
                    f"speeds must lie between 0.5 and 2 and differ from 1, got {speed}"
                )
            if speed != round(speed, 2) or self.speeds.count(speed) > 1:
                raise ValueError(
                    "speeds must differ from each other and have at most two decimals, got "
                    f"{list(self.speeds)}"
                )
        if self.speeds and self.features == "waveform":
            raise ValueError(
                "speeds need stored features; with features=waveform set data.speed_factors for "
                "training instead"
            )


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Entries of one split that one process turns into shard `number`."""

    folder: Path
    split: str
    number: int
    entries: tuple[CorpusEntry, ...]
    config: ShardConfig


@dataclass(kw_only=True)
class ShardResult:
    """The counts of a finished shard, without the copies at other speeds unless stated.

    cuts: number of manifest lines, copies at other speeds included.
    texts, durations: of each utterance kept; durations in seconds.
    speakers, languages: number of utterances of each; "" where it is unknown.
    rates, channels: number of utterances by sampling rate in Hz and by number of channels.
    left_out: (id, origin, reason, details) of each utterance left out.
    notes: (origin, note) of each utterance kept that has a note.
    """

    split: str
    number: int
    cuts: int = 0
    texts: list[str] = field(default_factory=list)
    speakers: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    durations: list[float] = field(default_factory=list)
    rates: Counter[int] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    left_out: list[tuple[str, str, str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def manifest_name(split: str, number: int) -> str:
    return f"{split}_cuts.{number:06d}.jsonl.gz"


def write_shard(shard: Shard) -> ShardResult:
    """Writes DIR/SPLIT_cuts.NUMBER.jsonl.gz and the features or audio of its cuts."""
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
                ranged = cuts_with_byte_ranges(shard.folder, shard.split, shard.number, data_field)
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
    """The usable cuts of a shard and their copies at other speeds; counts all in `result`."""
    config = shard.config
    extractor = fbank_extractor()
    for entry in shard.entries:
        try:
            rules = _rules_of(entry, config.text)
            text = normalise_text(entry.text, rules)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if config.needs_text and not (text or entry.problem):
                    raise UnusableUtterance("empty text")
                if len(text) > _MOST_CHARACTERS:
                    raise UnusableUtterance(
                        f"text longer than {_MOST_CHARACTERS:,} characters", f"{len(text):,}"
                    )
                cut = cut_of_entry(entry, text, config.limits, rules.language)
                cut = fastcopy(cut, features=None, id=entry.id)
                samples_S = read_samples(cut)
        except UnusableUtterance as error:
            result.left_out.append((entry.id, entry.origin, error.reason, error.details))
            continue
        if entry.note:
            result.notes.append((entry.origin, entry.note))
        result.texts.append(text)
        result.speakers[entry.speaker] += 1
        result.languages[rules.language] += 1
        result.durations.append(cut.duration)
        result.rates[cut.sampling_rate] += 1
        result.channels[len(cut.recording.channel_ids)] += 1
        if config.features == "waveform":
            yield cut
            continue
        samples_S = resample(samples_S, cut.sampling_rate, SAMPLING_RATE)
        yield _with_features(cut, samples_S, extractor, storage)
        for speed in config.speeds if shard.split == "train" else ():
            # lhotse's own resampling takes minutes if rate and speed have no common divisor.
            perturbed_S = perturb_speed(samples_S, speed)
            yield _with_features(cut.perturb_speed(speed), perturbed_S, extractor, storage)


def _rules_of(entry: CorpusEntry, config: TextConfig) -> TextConfig:
    try:
        return config.in_language(entry.language)
    except ValueError as error:
        raise UnusableUtterance("language is no code", str(error)) from error


def _with_features(cut: Any, samples_S: FloatArray, extractor: Any, storage: Any) -> Any:
    features = store_features(
        samples_S,
        extractor,
        storage,
        recording_id=cut.recording.id,
        start=cut.start,
        duration=cut.duration,
        channel=cut.channel,
    )
    # Stored features need no command, so that training does not have to allow commands.
    commands = any(source.type == "command" for source in cut.recording.sources)
    return fastcopy(cut, recording=None if commands else cut.recording, features=features)


def write_shard_once(shard: Shard) -> ShardResult:
    """Calls `write_shard`, or returns the recorded result if the same shard exists already."""
    record = shard.folder / RECORDS / f"{shard.split}-{shard.number:06d}.json"
    fingerprint = _fingerprint(shard)
    result = _recorded(record, fingerprint)
    if result is not None:
        manifest = shard.folder / manifest_name(shard.split, shard.number)
        if result.cuts == 0 or manifest.is_file():
            return result
    result = write_shard(shard)
    record.parent.mkdir(exist_ok=True)
    unfinished = record.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"made_of": fingerprint, "result": vars(result)}))
    unfinished.rename(record)
    return result


def delete_records(folder: Path) -> None:
    """Deletes the records of `folder`, so that the next run makes all shards again."""
    shutil.rmtree(folder / RECORDS, ignore_errors=True)


def remove_stale_shards(folder: Path, made: Collection[tuple[str, int]]) -> None:
    """Removes files of shards that are not in `made`, (split, number) pairs, and joined manifests.

    An interrupted run, perhaps with other options, may have left them.
    """
    for path in folder.glob("*_cuts.jsonl.gz"):
        path.unlink()
    for path in [
        *folder.glob("*_cuts.*.jsonl.gz"),
        *folder.glob("features/*"),
        *folder.glob("*/*"),
    ]:
        number = _NUMBERED.search(path.name)
        if number is None or path.parent.name == RECORDS:
            continue
        split = path.parent.name
        if path.parent == folder:
            split = path.name.partition("_cuts.")[0]
        elif split == "features":
            split = path.name[: number.start()]
        if (split, int(number[1] or number[2])) not in made:
            path.unlink(missing_ok=True)


def _fingerprint(shard: Shard) -> str:
    digest = hashlib.blake2b(repr(shard.config).encode(), digest_size=16)
    for entry in shard.entries:
        values: dict[str, Any] = {**vars(entry), "cut": entry.cut and entry.cut.to_dict()}
        digest.update(repr(sorted(values.items())).encode())
    return digest.hexdigest()


def _recorded(record: Path, fingerprint: str) -> ShardResult | None:
    if not record.is_file():
        return None
    try:
        values = read_json(record)
        if values.get("made_of") != fingerprint:
            return None
        result: dict[str, Any] = values["result"]
        for name in ("rates", "channels"):
            result[name] = Counter({int(key): count for key, count in result[name].items()})
        for name in ("speakers", "languages"):
            result[name] = Counter(result[name])
        for name in ("left_out", "notes"):
            result[name] = [tuple(item) for item in result[name]]
        return ShardResult(**result)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # damaged: the shard is made again
