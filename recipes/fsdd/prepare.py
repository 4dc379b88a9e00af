"""`pruned-rnnt prepare fsdd`: connected digits from the Free Spoken Digit Dataset."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pruned_rnnt.data.corpus_writer import UtteranceWriter, write_cuts
from pruned_rnnt.data.preparation import PrepareReport, add_common_arguments, save_tokenizer
from pruned_rnnt.data.prepared import PreparedFolder, building
from pruned_rnnt.data.shards import run_shards
from pruned_rnnt.data.tokens import Tokenizer, TokenizerConfig, train_tokenizer
from recipes.fsdd.connected import DigitPool, Variation, draw_utterance
from recipes.fsdd.recordings import (
    DIGITS,
    Recording,
    download,
    missing_recordings,
    read_recordings,
)
from recipes.fsdd.synthetic_speakers import speak_digits

SHARD_SIZE = 500
TEST_INDICES = range(5)
DEV_INDICES = range(5, 8)
NATURAL = Variation()


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Utterances first .. first + count - 1 of one pool of recordings, made by one process."""

    folder: Path
    split: str
    name: str
    first: int
    count: int
    seed: int
    pool: DigitPool
    variation: Variation


def make_shard(shard: Shard) -> list[Any]:
    """Writes the utterances of a shard; returns their cuts."""
    with UtteranceWriter(shard.folder, f"{shard.name}-{shard.first:05d}") as writer:
        for index in range(shard.first, shard.first + shard.count):
            writer.add(
                draw_utterance(
                    shard.pool,
                    split=shard.name,
                    index=index,
                    seed=shard.seed,
                    variation=shard.variation,
                )
            )
        return writer.cuts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pruned-rnnt prepare fsdd`."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--source", type=Path, metavar="DIR", help="folder of {digit}_{speaker}_{index}.wav files"
    )
    where.add_argument(
        "--download",
        type=Path,
        nargs="?",
        const=Path("data/download/fsdd"),
        metavar="DIR",
        help="fetch the data set into DIR (default data/download/fsdd)",
    )
    add_common_arguments(
        parser, output="data/fsdd", tokenizer=TokenizerConfig(kind="word", vocab_size=13)
    )
    for split, count in (("train", 4000), ("dev", 200), ("test", 500)):
        parser.add_argument(
            f"--{split}",
            type=int,
            default=count,
            metavar="N",
            help=f"utterances drawn for the {split} split (default {count})",
        )
    parser.add_argument(
        "--test-speakers",
        type=_names,
        default=(),
        metavar="A,B",
        help="hold these speakers out: test has them alone, with all of their recordings",
    )
    parser.add_argument(
        "--only-test",
        action="store_true",
        help="make a test set alone, from all recordings of --source (see --tokenizer-from)",
    )
    parser.add_argument(
        "--indices",
        type=_index_range,
        metavar="A-B",
        help="with --only-test: take recordings with these indices only, e.g. 0-4",
    )
    parser.add_argument(
        "--tokenizer-from",
        type=Path,
        metavar="DIR",
        help="with --only-test: copy the tokenizer of this prepared folder",
    )
    parser.add_argument(
        "--speed",
        type=_range,
        default=(0.85, 1.2),
        metavar="A,B",
        help="speed of training utterances: tempo, pitch and formants (default 0.85,1.2)",
    )
    parser.add_argument(
        "--tempo",
        type=_range,
        default=(0.85, 1.15),
        metavar="A,B",
        help="tempo of training utterances, at the same pitch (default 0.85,1.15)",
    )
    parser.add_argument(
        "--natural",
        type=float,
        default=0.3,
        metavar="P",
        help="share of the recorded training utterances left at speed and tempo 1 (default 0.3)",
    )
    parser.add_argument(
        "--synthetic",
        type=float,
        default=0.0,
        metavar="P",
        help="share of training utterances spoken by synthetic voices (default 0)",
    )
    parser.add_argument(
        "--synthetic-speakers", type=int, default=120, metavar="N", help="default 120"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _range(text: str) -> tuple[float, float]:
    low, _, high = text.partition(",")
    values = (float(low), float(high or low))
    if not 0.5 <= values[0] <= values[1] <= 2.0:
        raise argparse.ArgumentTypeError(f"needs A,B with 0.5 <= A <= B <= 2, got {text}")
    return values


def _index_range(text: str) -> range:
    low, _, high = text.partition("-")
    return range(int(low), int(high or low) + 1)


def split_recordings(
    recordings: Sequence[Recording], test_speakers: Sequence[str]
) -> dict[str, list[Recording]]:
    """The recordings of each split; no recording is in two.

    Without `test_speakers`: test has indices 0-4, dev 5-7, train 8-49 of every speaker. With them:
    test has every recording of those speakers; of the others, dev has 5-7 and train the rest.
    Raises ValueError for a speaker who is not there, or when no one is left to train on.
    """
    speakers = sorted({r.speaker for r in recordings})
    for name in test_speakers:
        if name not in speakers:
            raise ValueError(f"--test-speakers: no recordings of {name!r}; there are {speakers}")
    splits: dict[str, list[Recording]] = {"train": [], "dev": [], "test": []}
    for recording in recordings:
        if recording.speaker in test_speakers:
            splits["test"].append(recording)
        elif recording.index in DEV_INDICES:
            splits["dev"].append(recording)
        elif recording.index in TEST_INDICES and not test_speakers:
            splits["test"].append(recording)
        else:
            splits["train"].append(recording)
    for split, members in splits.items():
        if not members:
            raise ValueError(f"no recordings are left for the {split} split; there are {speakers}")
    return splits


def prepare(options: argparse.Namespace, console: Console) -> None:
    """Makes the corpus at `options.output`."""
    _check(options)
    source = download(options.download) if options.download is not None else options.source
    recordings, skipped = read_recordings(source)
    missing = missing_recordings(recordings)
    report = PrepareReport(
        recipe="fsdd",
        options={name: _plain(value) for name, value in vars(options).items()},
        skipped=skipped,
        details={"recordings": len(recordings), "missing_count": len(missing), "missing": missing},
    )
    if not recordings:
        raise ValueError(f"none of the {len(skipped)} wav files in {source} can be used")
    if options.only_test:
        if options.indices is not None:
            recordings = [r for r in recordings if r.index in options.indices]
            if not recordings:
                raise ValueError(f"no recordings with the indices {options.indices} in {source}")
        splits = {"test": recordings}
    else:
        splits = split_recordings(recordings, options.test_speakers)
    with building(options.output) as folder:
        shards = _shards(folder, splits, options, console)
        made = run_shards(
            make_shard,
            shards,
            sizes=[shard.count for shard in shards],
            num_jobs=options.num_jobs,
            description="joining digits",
            console=console,
        )
        for split in splits:
            cuts = [
                cut
                for shard, shard_cuts in zip(shards, made, strict=True)
                if shard.split == split
                for cut in shard_cuts
            ]
            write_cuts(folder, split, cuts)
            report.add_split(split, cuts)
        save_tokenizer(folder, _tokenizer(options), report)
        report.write(folder)
    report.show(options.output, console)
    if missing:
        console.print(f"{len(missing)} recordings are missing, the first of them {missing[0]}")


def _check(options: argparse.Namespace) -> None:
    for split in ("train", "dev", "test"):
        if getattr(options, split) < 1:
            raise ValueError(f"--{split} must be at least 1, got {getattr(options, split)}")
    for name in ("natural", "synthetic"):
        if not 0.0 <= getattr(options, name) <= 1.0:
            raise ValueError(f"--{name} must lie in [0, 1], got {getattr(options, name)}")
    if options.only_test and options.test_speakers:
        raise ValueError("--only-test takes every speaker of the folder: leave out --test-speakers")
    if not options.only_test and (options.indices or options.tokenizer_from):
        raise ValueError("--indices and --tokenizer-from need --only-test")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, range):
        return f"{value.start}-{value.stop - 1}"
    return value


def _tokenizer(options: argparse.Namespace) -> Tokenizer:
    if options.tokenizer_from is not None:
        return PreparedFolder(options.tokenizer_from).tokenizer()
    config = TokenizerConfig(kind=options.tokens, vocab_size=options.vocab_size)
    return train_tokenizer(DIGITS, config)


def _shards(
    folder: Path,
    splits: dict[str, list[Recording]],
    options: argparse.Namespace,
    console: Console,
) -> list[Shard]:
    shards: list[Shard] = []

    def add(split: str, name: str, pool: DigitPool, count: int, variation: Variation) -> None:
        shards.extend(
            Shard(
                folder=folder,
                split=split,
                name=name,
                first=first,
                count=min(SHARD_SIZE, count - first),
                seed=options.seed,
                pool=pool,
                variation=variation,
            )
            for first in range(0, count, SHARD_SIZE)
        )

    for split, recordings in splits.items():
        pool, count = DigitPool(recordings), getattr(options, split)
        if split != "train":
            add(split, split, pool, count, NATURAL)
            continue
        varied = Variation(speed=options.speed, tempo=options.tempo, noise_db=(-75.0, -45.0))
        synthetic = round(options.synthetic * count)
        natural = round(options.natural * (count - synthetic))
        add(split, "train", pool, natural, NATURAL)
        add(split, "train-varied", pool, count - natural - synthetic, varied)
        if synthetic > 0:
            voices = _speak(options, console)
            add(split, "train-synthetic", DigitPool(voices), synthetic, varied)
    return shards


def _speak(options: argparse.Namespace, console: Console) -> list[Recording]:
    """The synthetic speakers' digits, spoken in a process of their own."""
    spoken: list[list[Recording]] = run_shards(
        _SpeakDigits(options.synthetic_speakers, options.seed),
        [3],
        sizes=[options.synthetic_speakers],
        num_jobs=1,
        description="synthetic speakers",
        console=console,
        fresh_processes=True,
    )
    return spoken[0]


@dataclass(frozen=True)
class _SpeakDigits:
    speakers: int
    seed: int

    def __call__(self, takes: int) -> list[Recording]:
        return speak_digits(self.speakers, takes, self.seed)


def main(arguments: Sequence[str]) -> None:
    """The command line; `arguments` follow the recipe's name."""
    parser = argparse.ArgumentParser(prog="pruned-rnnt prepare fsdd", description=__doc__)
    add_arguments(parser)
    prepare(parser.parse_args(arguments), Console())
