"""What every recipe's prepare has in common: its options, its report, its last words."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import write_report
from pruned_rnnt.data.prepare.corpus_writer import write_cuts
from pruned_rnnt.data.prepare.replacement import add_replace_argument
from pruned_rnnt.data.tokens.tokenizer import TOKENIZER_KINDS, Tokenizer, TokenizerConfig

SHOWN_SKIPPED = 5


@dataclass(frozen=True, kw_only=True)
class SkippedFile:
    """A source file that was left out, and why."""

    path: str
    reason: str


@dataclass(kw_only=True)
class PrepareReport:
    """Gathers what prepare.json and the summary say.

    options: the recipe's settings. details: anything else worth keeping (voices, seeds, ...).
    skipped_counts: by reason, when `skipped` holds examples only.
    train_options: settings that training needs for these data, as `section.key=value`.
    hints: sentences about the texts and tokens, for a person to act on.
    """

    recipe: str
    options: Mapping[str, Any]
    skipped: Sequence[SkippedFile] = ()
    details: dict[str, Any] = field(default_factory=dict)
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: int = 0
    skipped_counts: Counter[str] = field(default_factory=Counter)
    train_options: tuple[str, ...] = ()
    hints: Sequence[str] = ()

    def add_split(self, name: str, cuts: Sequence[Any]) -> None:
        """Counts a split: utterances, hours, words and speakers."""
        words = Counter(word for cut in cuts for word in cut_text(cut).split())
        self.splits[name] = {
            "utterances": len(cuts),
            "hours": round(sum(cut.duration for cut in cuts) / 3600, 3),
            "words": sum(words.values()),
            "distinct_words": len(words),
            "speakers": sorted({s.speaker for cut in cuts for s in cut.supervisions}),
        }

    def write(self, folder: Path) -> None:
        """Writes prepare.json into `folder`."""
        reasons = self.skipped_counts or Counter(file.reason for file in self.skipped)
        write_report(
            folder,
            {
                "recipe": self.recipe,
                "command": ["pruned-rnnt", "prepare", self.recipe, *sys.argv[3:]],
                "options": dict(self.options),
                "splits": self.splits,
                "tokens": self.tokens,
                "skipped_counts": dict(sorted(reasons.items())),
                "skipped": [{"path": f.path, "reason": f.reason} for f in self.skipped],
                **self.details,
                "versions": _versions(),
            },
        )

    def show(self, output: Path, console: Console) -> None:
        """Prints the splits, what was skipped, and the command that trains on the result."""
        table = Table(title=escape(f"{output}: {self.tokens} tokens"))
        for column in ("split", "utterances", "hours", "words", "speakers"):
            table.add_column(column, justify="left" if column == "split" else "right")
        for name, split in self.splits.items():
            named = split["speakers"]
            speakers = str(named if isinstance(named, int) else len(named) or "unknown")
            cells = (split["utterances"], split["hours"], split["words"], speakers)
            table.add_row(name, *(str(cell) for cell in cells))
        console.print(table)
        if self.skipped:
            count = sum(self.skipped_counts.values()) or len(self.skipped)
            console.print(f"{count:,} file{'s' if count > 1 else ''} skipped:")
            for file in self.skipped[:SHOWN_SKIPPED]:
                console.print(f"  {file.path}: {file.reason}", markup=False, soft_wrap=True)
            if count > SHOWN_SKIPPED:
                name = "left_out.jsonl" if self.skipped_counts else "prepare.json"
                console.print(
                    f"  ... all of them are in {output}/{name}", markup=False, soft_wrap=True
                )
        for hint in self.hints:
            console.print(f"Hint: {hint}", markup=False, soft_wrap=True)
        if "train" in self.splits:
            settings = shlex.join([f"data.path={output}", *self.train_options])
            command = f"pruned-rnnt train --config {self.recipe} {settings}"
            console.print(f"Train: {command}", markup=False, soft_wrap=True)
            if "dev" not in self.splits:
                console.print("Training validates on dev, which there is none of: set data.valid")
        elif "noise" in self.splits:
            setting = shlex.quote(f"data.augmentation.noise_cuts={output}/noise_cuts.jsonl.gz")
            console.print(
                f"Mix into training: pruned-rnnt train ... {setting}", markup=False, soft_wrap=True
            )
        else:
            setting = shlex.quote(f"data.path={output}")
            console.print(f"Decode: pruned-rnnt decode RUN {setting}", markup=False, soft_wrap=True)


def add_common_arguments(
    parser: argparse.ArgumentParser, *, output: str, tokenizer: TokenizerConfig
) -> None:
    """--output, --replace, --seed, --num-jobs, --tokens, --vocab-size, the same in every recipe."""
    parser.add_argument(
        "--output", type=Path, default=Path(output), metavar="DIR", help=f"default: {output}"
    )
    add_replace_argument(parser)
    parser.add_argument("--seed", type=int, default=42, help="of everything random (default 42)")
    parser.add_argument(
        "--num-jobs", "--jobs", type=int, default=2, metavar="N", help="processes (default 2)"
    )
    parser.add_argument(
        "--tokens",
        choices=TOKENIZER_KINDS,
        default=tokenizer.kind,
        help=f"kind of symbol the model emits (default {tokenizer.kind})",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=tokenizer.vocab_size,
        metavar="N",
        help=f"most symbols, for unigram and bpe (default {tokenizer.vocab_size})",
    )


def add_count_arguments(parser: argparse.ArgumentParser, counts: Mapping[str, int]) -> None:
    """--train, --dev and --test of recipes that make their utterances.

    counts: the default of each split.
    """
    for split, count in counts.items():
        parser.add_argument(
            f"--{split}",
            type=int,
            default=count,
            metavar="N",
            help=f"utterances in the {split} split (default {count})",
        )


def write_splits(
    folder: Path,
    splits: Iterable[str],
    parts: Iterable[tuple[str, list[Any]]],
    report: PrepareReport,
) -> dict[str, list[Any]]:
    """Write the cuts of each split and count them in the report; returns them.

    parts: (split, cuts) in any order; those of one split are kept in theirs.
    """
    cuts: dict[str, list[Any]] = {split: [] for split in splits}
    for split, some in parts:
        cuts[split] += some
    for split, all_of_it in cuts.items():
        write_cuts(folder, split, all_of_it)
        report.add_split(split, all_of_it)
    return cuts


def save_tokenizer(folder: Path, tokenizer: Tokenizer, report: PrepareReport) -> None:
    """Writes DIR/tokens and notes its size."""
    tokenizer.save(folder / "tokens")
    report.tokens = len(tokenizer)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("pruned_rnnt", "torch", "lhotse", "sentencepiece", "espeakng-loader", "scipy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
