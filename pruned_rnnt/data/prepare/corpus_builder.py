"""Entries of any corpus to a prepared folder: splits, checks, features, tokenizer, report.

Everything streams: at any time only a few shards of entries are in memory, beside counts, a sample
of the texts, and the names of the utterances held out for dev and test.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console

from pruned_rnnt.data.input.prepared_folder import PreparedFolder, building
from pruned_rnnt.data.prepare.corpus_report import CorpusStatistics
from pruned_rnnt.data.prepare.entries import Entry
from pruned_rnnt.data.prepare.recipe_folder import PrepareReport, SkippedFile, save_tokenizer
from pruned_rnnt.data.prepare.shard_records import (
    RECORDS,
    forget_records,
    remove_others,
    write_shard_once,
)
from pruned_rnnt.data.prepare.shard_workers import stream_shards
from pruned_rnnt.data.prepare.shard_writer import Shard, ShardConfig, ShardResult, manifest_name
from pruned_rnnt.data.prepare.splits import NamedSplits, OneSplit, SplitPlan
from pruned_rnnt.data.prepare.text_hints import text_hints, token_hints
from pruned_rnnt.data.tokens.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

LEFT_OUT_NAME = "left_out.jsonl"
# Of the utterances left out, prepare.json names these many and left_out.jsonl all.
_NAMED = 100


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """shard: how each entry becomes data. shard_size: utterances in one shard.

    one_file_up_to: corpora of at most so many manifest lines get one manifest a split, which
        training holds in memory; larger ones, and Shar, keep one a shard, which training reads as
        it goes, each process its own.
    needed_split: must not be empty.
    tokenizer: what to train; tokenizer_from: or the prepared folder whose tokenizer to copy.
    tokenizer_texts: most texts the tokenizer is trained on, drawn at random.
    """

    shard: ShardConfig = field(default_factory=ShardConfig)
    shard_size: int = 1000
    one_file_up_to: int = 300_000
    needed_split: str = "train"
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    tokenizer_from: Path | None = None
    tokenizer_texts: int = 1_000_000
    seed: int = 42
    num_jobs: int = 1


def build_corpus(
    output: Path,
    entries: Iterable[Entry],
    plan: SplitPlan | NamedSplits | OneSplit,
    config: BuildConfig,
    report: PrepareReport,
    console: Console,
    notes: Iterable[str] = (),
    total: int | None = None,
) -> CorpusStatistics:
    """Makes the prepared folder `output` of `entries`; fills, writes and shows `report`.

    total: number of entries where it is known, for the progress bar.
    After a kill the next call with the same arguments goes on with the shards that are missing.

    Raises:
        ValueError: nothing is left of the split needed (the message says why), the tokenizer
            cannot be trained, or the output cannot be written.
    """
    statistics = CorpusStatistics()
    sample = _TextSample(config.tokenizer_texts, config.seed)
    made: dict[str, list[tuple[int, int]]] = {}
    with _naming_what_cannot_be_written(output), building(output, resume=RECORDS) as folder:
        with _forgetting_after_errors(folder):
            with (folder / LEFT_OUT_NAME).open("w", encoding="utf-8") as left_out:
                shards = _shards(folder, entries, plan, config)
                for result in stream_shards(
                    write_shard_once,
                    shards,
                    size=lambda shard: len(shard.entries),
                    total=total,
                    num_jobs=config.num_jobs,
                    description="checking audio and text",
                    console=console,
                ):
                    statistics.add(result)
                    _write_left_out(left_out, result)
                    if result.cuts:
                        made.setdefault(result.split, []).append((result.number, result.cuts))
                    if result.split == "train":
                        sample.add(result.texts)
            remove_others(folder, {(split, n) for split, all_ in made.items() for n, _ in all_})
            if config.needed_split not in made:
                why = statistics.describe_left_out() or "the source has none"
                raise ValueError(f"no {config.needed_split} utterances are left: {why}")
        tokenizer = None
        if config.shard.needs_text:
            tokenizer = _tokenizer(config, sample.texts, statistics.characters["train"])
            save_tokenizer(folder, tokenizer, report)
            report.hints = _hints(config, statistics.characters["train"], tokenizer)
        if not config.shard.shar:
            for split, numbers in made.items():
                if sum(cuts for _, cuts in numbers) <= config.one_file_up_to:
                    _join_manifests(folder, split, [number for number, _ in numbers])
        report.splits.update(statistics.summaries())
        report.skipped_counts.update(statistics.left_out)
        report.skipped = [
            SkippedFile(path=origin, reason=f"{reason} ({details})" if details else reason)
            for origin, reason, details in statistics.examples[:_NAMED]
        ]
        report.write(folder)
        hints = [f"hint: {hint}" for hint in report.hints]
        lines = statistics.report_lines(tokenizer, [plan.describe(), *notes, *hints])
        (folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        forget_records(folder)
    report.show(output, console)
    return statistics


@contextmanager
def _naming_what_cannot_be_written(output: Path) -> Iterator[None]:
    """Errors of reading audio are caught where it is read; what is left is about the output."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(
            f"{output} cannot be written ({error.strerror or error}): the same command goes on "
            "when that is mended"
        ) from error


@contextmanager
def _forgetting_after_errors(folder: Path) -> Iterator[None]:
    """A kill leaves the records for the next run to go on; an error wants another look.

    Not so an error of the tokenizer, which another --vocab-size mends, or a full disk.
    """
    try:
        yield
    except OSError:
        raise
    except Exception:
        forget_records(folder)
        raise


def _shards(
    folder: Path,
    entries: Iterable[Entry],
    plan: SplitPlan | NamedSplits | OneSplit,
    config: BuildConfig,
) -> Iterator[Shard]:
    """Entries gathered by split; an entry of an unknown split is only reported, with train."""
    gathered: dict[str, list[Entry]] = {}
    numbers: Counter[str] = Counter()

    def shard(split: str) -> Shard:
        made = Shard(
            folder=folder,
            split=split,
            number=numbers[split],
            entries=tuple(gathered.pop(split)),
            config=config.shard,
        )
        numbers[split] += 1
        return made

    for entry in entries:
        split = plan.split_of(entry)
        if split is None:
            split, entry = "train", _of_unknown_split(entry)
        gathered.setdefault(split, []).append(entry)
        if len(gathered[split]) >= config.shard_size:
            yield shard(split)
    for split in list(gathered):
        yield shard(split)


def _of_unknown_split(entry: Entry) -> Entry:
    return Entry(
        id=entry.id,
        origin=entry.origin,
        problem="split is none of train, dev and test",
        details=entry.split,
    )


def _write_left_out(file: TextIO, result: ShardResult) -> None:
    for name, origin, reason, details in result.left_out:
        values = {"id": name, "origin": origin, "reason": reason, "details": details}
        file.write(json.dumps(values, ensure_ascii=False) + "\n")


def _join_manifests(folder: Path, split: str, numbers: Iterable[int]) -> None:
    """One manifest of many: gzip files one after the other are a gzip file."""
    with (folder / f"{split}_cuts.jsonl.gz").open("wb") as joined:
        for number in numbers:
            part = folder / manifest_name(split, number)
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined)
            part.unlink()


def _tokenizer(config: BuildConfig, texts: list[str], characters: Counter[str]) -> Tokenizer:
    if config.tokenizer_from is not None:
        return PreparedFolder(config.tokenizer_from).tokenizer()
    seen = set("".join(texts))
    # A character that the sample of texts missed shall have a symbol nevertheless.
    missed = [character for character in sorted(characters) if character not in seen]
    try:
        return train_tokenizer([*texts, *missed], config.tokenizer)
    except ValueError as error:
        raise ValueError(
            f"{error}; change --vocab-size or --tokens and run again, what was read so far is kept"
        ) from error


def _hints(config: BuildConfig, characters: Counter[str], tokenizer: Tokenizer) -> list[str]:
    """None with the tokenizer of other data, whose spelling these have to follow."""
    if config.tokenizer_from is not None:
        return []
    return [
        *text_hints(characters, config.shard.text),
        *token_hints(tokenizer, config.tokenizer),
    ]


class _TextSample:
    """At most `most` texts, each as likely as any other (reservoir sampling)."""

    def __init__(self, most: int, seed: int) -> None:
        self.most = most
        self.texts: list[str] = []
        self._seen = 0
        self._rng = random.Random(seed)

    def add(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._seen += 1
            if len(self.texts) < self.most:
                self.texts.append(text)
                continue
            place = self._rng.randrange(self._seen)
            if place < self.most:
                self.texts[place] = text
