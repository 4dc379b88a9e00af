"""Builds a prepared folder from the entries of a corpus.

Entries are processed as a stream. Memory holds a few shards of entries, counts, a sample of the
texts, and the ids of the utterances held out for dev and test.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from rich.console import Console

from pruned_rnnt.data.input.prepared_folder import PreparedFolder, building
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.corpus_report import (
    CorpusStatistics,
    language_hints,
    spelling_hints,
    text_hints,
    token_hints,
    unknown_hints,
)
from pruned_rnnt.data.prepare.prepare_report import PrepareReport, SkippedFile
from pruned_rnnt.data.prepare.shard_workers import stream_shards
from pruned_rnnt.data.prepare.shard_writer import (
    RECORDS,
    Shard,
    ShardConfig,
    ShardResult,
    delete_records,
    manifest_name,
    remove_stale_shards,
    write_shard_once,
)
from pruned_rnnt.data.prepare.splits import NamedSplits, SingleSplit, SplitPlan
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer

_LEFT_OUT_NAME = "left_out.jsonl"
# prepare.json names this many of the utterances left out; left_out.jsonl lists all of them.
_MAX_SKIPPED_NAMED = 100


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """How `build_corpus` makes a prepared folder.

    shard: how each entry becomes data. shard_size: utterances in one shard.
    max_lines_in_memory: a split of at most this many manifest lines gets a single manifest, which
        training holds in memory. Larger splits, and Shar, keep one manifest per shard; training
        streams these, and each process takes its own lines of every shard.
    required_split: the split that must not be empty.
    tokenizer: the tokenizer to train. language_tags: it gets a tag for each language of train.
    tokenizer_from: a prepared folder whose tokenizer is copied instead.
    max_tokenizer_texts: the tokenizer is trained on at most this many texts, drawn at random.
    """

    shard: ShardConfig = field(default_factory=ShardConfig)
    shard_size: int = 1000
    max_lines_in_memory: int = 300_000
    required_split: str = "train"
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    language_tags: bool = False
    tokenizer_from: Path | None = None
    max_tokenizer_texts: int = 1_000_000
    seed: int = 42
    num_jobs: int = 1


def build_corpus(
    output: Path,
    entries: Iterable[CorpusEntry],
    plan: SplitPlan | NamedSplits | SingleSplit,
    config: BuildConfig,
    report: PrepareReport,
    console: Console,
    notes: Iterable[str] = (),
    total: int | None = None,
) -> CorpusStatistics:
    """Writes the prepared folder `output` from `entries`; fills, writes and prints `report`.

    If the process is killed, the next call with the same arguments makes only the missing shards.

    Args:
        notes: lines for report.txt.
        total: number of entries if it is known, for the progress bar.

    Raises:
        ValueError: the required split is empty (the message says why), the tokenizer cannot be
            trained, or the output cannot be written; of a `SplitPlan`, before audio is read:
            language tags, and no utterance has a language.
    """
    if config.language_tags and isinstance(plan, SplitPlan):
        _check_languages({config.shard.text.language, *plan.languages})
    statistics = CorpusStatistics(whole_words=_has_whole_words(config))
    sample = _ReservoirSample(config.max_tokenizer_texts, config.seed)
    # By split: the number of each shard and the number of its manifest lines.
    made: dict[str, dict[int, int]] = {}
    with _write_errors_reported(output), building(output, resume=RECORDS) as folder:
        with _records_deleted_on_error(folder):
            # Names of files that are not UTF-8 become escapes of JSON.
            with (folder / _LEFT_OUT_NAME).open(
                "w", encoding="utf-8", errors="backslashreplace"
            ) as left_out:
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
                        made.setdefault(result.split, {})[result.number] = result.cuts
                    if result.split == "train":
                        sample.add(result.texts)
            remove_stale_shards(
                folder, {(split, number) for split, numbers in made.items() for number in numbers}
            )
            if config.required_split not in made:
                reasons = [_other_splits(made), statistics.describe_left_out()]
                why = "; ".join(filter(None, reasons)) or "the source has none"
                raise ValueError(f"no {config.required_split} utterances are left: {why}")
        tokenizer = None
        if config.shard.needs_text:
            tokenizer = _tokenizer(config, sample.texts, statistics)
            report.save_tokenizer(tokenizer, folder)
            report.hints = _hints(config, statistics, tokenizer)
        if not config.shard.shar:
            for split, lines_of_shard in made.items():
                if sum(lines_of_shard.values()) <= config.max_lines_in_memory:
                    _join_manifests(folder, split, lines_of_shard)
        report.splits.update(statistics.summaries(tokenizer))
        copies = 1 + sum(1 / speed for speed in config.shard.speeds)
        report.training_hours = copies * statistics.seconds["train"] / 3600
        report.skipped_counts.update(statistics.left_out)
        report.skipped = [
            SkippedFile(path=origin, reason=f"{reason} ({details})" if details else reason)
            for origin, reason, details in statistics.examples[:_MAX_SKIPPED_NAMED]
        ]
        report.write(folder)
        hints = [f"hint: {hint}" for hint in report.hints]
        lines = statistics.report_lines(tokenizer, [plan.describe(), *notes, *hints])
        (folder / "report.txt").write_text(
            "\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace"
        )
        delete_records(folder)
    report.show(output, console)
    return statistics


def _other_splits(found: Iterable[str]) -> str:
    """What to do with a source that has other splits than the required one; "" if it has none."""
    names = " and ".join(sorted(found))
    return names and (
        f"only those of {names}; to prepare them as a test set, add --only-test and "
        "--tokenizer-from with the folder or run of the training data"
    )


@contextmanager
def _write_errors_reported(output: Path) -> Iterator[None]:
    """Raises ValueError about `output` for an OSError, or about the other file that it names, and
    for a worker that was killed; errors of reading audio are caught elsewhere."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        what = f"{output} cannot be written"
        if error.filename is not None and not _is_of(output, str(error.filename)):
            what = f"{error.filename} cannot be opened"
        raise ValueError(
            f"{what} ({error.strerror or error}). Fix this and run the same command again; it "
            "resumes."
        ) from error
    except (BrokenExecutor, MemoryError) as error:
        raise ValueError(
            "a process was killed, perhaps because memory ran out. Run the same command again, "
            "perhaps with a smaller --num-jobs: it resumes. If that is not enough, choose a "
            "smaller --shard-size, with which it starts anew."
        ) from error


def _is_of(output: Path, path: str) -> bool:
    """Whether a path is in `output`, above it, or in a folder that `building` makes beside it."""
    beside = [output.with_name(f"{output.name}{end}") for end in ("", ".unfinished", ".replaced")]
    return output.is_relative_to(path) or any(map(Path(path).is_relative_to, beside))


@contextmanager
def _records_deleted_on_error(folder: Path) -> Iterator[None]:
    """Deletes the records of finished shards after an error, so that the next run checks all again.

    The records stay after a kill, also of a worker, and after a failure to write (a full disk), and
    the next run resumes.
    """
    try:
        yield
    except (OSError, BrokenExecutor, MemoryError):
        raise
    except Exception:
        delete_records(folder)
        raise


def _shards(
    folder: Path,
    entries: Iterable[CorpusEntry],
    plan: SplitPlan | NamedSplits | SingleSplit,
    config: BuildConfig,
) -> Iterator[Shard]:
    """Groups entries by split; an entry of an unknown split only is reported, among train."""
    gathered: dict[str, list[CorpusEntry]] = {}
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
            split = "train"
            # The cells of a row with a problem may be shifted, so that its split means nothing.
            if not entry.problem:
                entry = _with_unknown_split(entry)
        gathered.setdefault(split, []).append(entry)
        if len(gathered[split]) >= config.shard_size:
            yield shard(split)
    for split in list(gathered):
        yield shard(split)


def _with_unknown_split(entry: CorpusEntry) -> CorpusEntry:
    return CorpusEntry(
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
    """Joins the manifests of shards: a concatenation of gzip files is a valid gzip file."""
    with (folder / f"{split}_cuts.jsonl.gz").open("wb") as joined:
        for number in numbers:
            part = folder / manifest_name(split, number)
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined)
            part.unlink()


def _has_whole_words(config: BuildConfig) -> bool:
    if not config.shard.needs_text:
        return False
    if config.tokenizer_from is not None:
        return PreparedFolder(config.tokenizer_from).tokenizer().has_whole_words
    return config.tokenizer.kind == "word"


def _check_languages(languages: Iterable[str]) -> None:
    if not any(languages):
        raise ValueError(
            "--language-tags needs the languages of the utterances: a column `language` or "
            "`locale`, or --language"
        )


def _tokenizer(config: BuildConfig, texts: list[str], statistics: CorpusStatistics) -> Tokenizer:
    if config.tokenizer_from is not None:
        return PreparedFolder(config.tokenizer_from).tokenizer()
    seen = set("".join(texts))
    # Characters that are not in the sample of texts need a symbol too.
    missed = [c for c in sorted(statistics.characters["train"]) if c not in seen]
    languages = tuple(sorted(code for code in statistics.languages["train"] if code))
    if config.language_tags:
        _check_languages(languages)
    tags = languages if config.language_tags else ()
    try:
        return train_tokenizer([*texts, *missed], replace(config.tokenizer, languages=tags))
    except ValueError as error:
        advice = "change --vocab-size or --tokens and run again (the features are kept)"
        if not config.tokenizer.byte_fallback:
            advice += ", or add --byte-fallback, which writes rare characters as bytes"
        raise ValueError(f"{error}; {advice}") from error


def _hints(config: BuildConfig, statistics: CorpusStatistics, tokenizer: Tokenizer) -> list[str]:
    """Advice about splits, texts and tokens; a copied tokenizer has a fixed spelling."""
    source = config.tokenizer_from
    empty = statistics.empty_split_hints()
    unknown = unknown_hints(
        statistics.unknown_parts(tokenizer),
        whole_words=statistics.whole_words,
        copied=source is not None,
    )
    untagged = language_hints(tokenizer, statistics.languages["train"])
    if source is not None:
        return [*empty, *spelling_hints(source, config.shard.text), *unknown, *untagged]
    return [
        *empty,
        *text_hints(statistics.characters["train"], config.shard.text),
        *token_hints(tokenizer, config.tokenizer, len(statistics.characters["train"])),
        *unknown,
        *untagged,
    ]


class _ReservoirSample:
    """A uniform random sample of at most `size` texts from a stream (reservoir sampling)."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.texts: list[str] = []
        self._seen = 0
        self._rng = random.Random(seed)

    def add(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._seen += 1
            if len(self.texts) < self.size:
                self.texts.append(text)
                continue
            index = self._rng.randrange(self._seen)
            if index < self.size:
                self.texts[index] = text
