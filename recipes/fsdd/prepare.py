"""`pruned-rnnt prepare fsdd`: connected digits from the Free Spoken Digit Dataset."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt.recipes.fsdd.connected import DigitPool, Variation, draw_utterance
from pruned_rnnt.recipes.fsdd.options import add_arguments, check_options
from pruned_rnnt.recipes.fsdd.recordings import (
    DIGITS,
    Recording,
    download,
    missing_recordings,
    read_recordings,
)
from pruned_rnnt.recipes.fsdd.splits import split_recordings
from pruned_rnnt.recipes.fsdd.synthetic_speakers import speak_digits
from rich.console import Console

from pruned_rnnt.data.input.prepared_folder import PreparedFolder, building
from pruned_rnnt.data.prepare.corpus_writer import UtteranceWriter
from pruned_rnnt.data.prepare.recipe_folder import PrepareReport, save_tokenizer, write_splits
from pruned_rnnt.data.prepare.replacement import check_replaceable, plain_options
from pruned_rnnt.data.prepare.shard_workers import run_shards
from pruned_rnnt.data.tokens.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

SHARD_SIZE = 500
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


def prepare(options: argparse.Namespace, console: Console) -> None:
    """Makes the corpus at `options.output`."""
    check_options(options)
    check_replaceable("fsdd", options)
    source = download(options.download) if options.download is not None else options.source
    recordings, skipped = read_recordings(source)
    missing = missing_recordings(recordings)
    report = PrepareReport(
        recipe="fsdd",
        options=plain_options(options),
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
        parts = ((shard.split, cuts) for shard, cuts in zip(shards, made, strict=True))
        write_splits(folder, splits, parts, report)
        save_tokenizer(folder, _tokenizer(options), report)
        report.write(folder)
    report.show(options.output, console)
    if missing:
        console.print(f"{len(missing)} recordings are missing, the first of them {missing[0]}")


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
