"""The report of `pruned-rnnt prepare`: prepare.json, and the summary that is printed at the end."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import write_report
from pruned_rnnt.data.prepare.training_length import training_length
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.licences.chain import Licence

# The summary lists this many of the skipped files.
_MAX_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class SkippedFile:
    """A source file that was skipped, and why."""

    path: str
    reason: str


@dataclass(kw_only=True)
class PrepareReport:
    """Collects the contents of prepare.json and of the summary.

    config: the configuration to suggest, which the recipe's README names; by default that of the
        recipe's name.
    options: the recipe's settings. details: further values of the recipe (voices, seeds, ...).
    licence: of the corpus, and where it comes from.
    skipped_counts: counts by reason, if `skipped` holds examples only.
    train_options: settings that training needs for these data, as `section.key=value`.
    hints: advice about texts and tokens.
    training_hours: hours of the train split with its copies at other speeds, for advice about the
        length of training; 0 for none.
    """

    recipe: str
    options: Mapping[str, Any]
    licence: Licence = field(default_factory=Licence)
    skipped: Sequence[SkippedFile] = ()
    details: dict[str, Any] = field(default_factory=dict)
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: int = 0
    skipped_counts: Counter[str] = field(default_factory=Counter)
    train_options: tuple[str, ...] = ()
    config: str = ""
    hints: Sequence[str] = ()
    training_hours: float = 0.0

    def add_split(self, name: str, cuts: Sequence[Any]) -> None:
        """Counts the utterances, hours, words and speakers of a split."""
        words = Counter(word for cut in cuts for word in cut_text(cut).split())
        self.splits[name] = {
            "utterances": len(cuts),
            "hours": round(sum(cut.duration for cut in cuts) / 3600, 3),
            "words": sum(words.values()),
            "distinct_words": len(words),
            "speakers": sorted({s.speaker for cut in cuts for s in cut.supervisions}),
        }

    def save_tokenizer(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Writes DIR/tokens and records the number of tokens."""
        tokenizer.save(folder / "tokens")
        self.tokens = len(tokenizer)

    def write(self, folder: Path) -> None:
        """Writes prepare.json into `folder`."""
        reasons = self.skipped_counts or Counter(file.reason for file in self.skipped)
        write_report(
            folder,
            {
                "recipe": self.recipe,
                "command": ["pruned-rnnt", "prepare", self.recipe, *sys.argv[3:]],
                "options": dict(self.options),
                "licence": asdict(self.licence),
                "splits": self.splits,
                "tokens": self.tokens,
                "skipped_counts": dict(sorted(reasons.items())),
                "skipped": [{"path": f.path, "reason": f.reason} for f in self.skipped],
                **self.details,
                "versions": _versions(),
            },
        )

    def show(self, output: Path, console: Console) -> None:
        """Prints the splits, the skipped files, and the command that trains on the result."""
        table = Table(title=escape(f"{output}: {self.tokens} tokens"))
        for column in ("split", "utterances", "hours", "words", "speakers"):
            table.add_column(column, justify="left" if column == "split" else "right")
        for name, split in self.splits.items():
            named = split["speakers"]
            speakers = str(named if isinstance(named, int) else len(named) or "unknown")
            cells = (split["utterances"], split["hours"], split["words"], speakers)
            table.add_row(name, *(str(cell) for cell in cells))
        console.print(table)
        for line in [*self._skipped_lines(output), *(f"Hint: {hint}" for hint in self.hints)]:
            console.print(line, markup=False, soft_wrap=True)
        console.print(self._next_command(output), markup=False, soft_wrap=True)
        if self.training_hours > 0:
            for line in training_length(self.training_hours).advice(self.training_hours):
                console.print(line, markup=False, soft_wrap=True, highlight=False)
        if "train" in self.splits and "dev" not in self.splits:
            console.print("There is no dev split to validate on: set data.valid to another split")

    def _skipped_lines(self, output: Path) -> list[str]:
        if not self.skipped:
            return []
        count = sum(self.skipped_counts.values()) or len(self.skipped)
        lines = [f"{count:,} file{'s' if count > 1 else ''} skipped:"]
        lines += [f"  {file.path}: {file.reason}" for file in self.skipped[:_MAX_SHOWN]]
        if count > _MAX_SHOWN:
            name = "left_out.jsonl" if self.skipped_counts else "prepare.json"
            lines.append(f"  ... {output}/{name} lists all of them")
        return lines

    def _next_command(self, output: Path) -> str:
        data = f"data.path={output}"
        if "train" in self.splits:
            settings = shlex.join([data, *self.train_options])
            return f"Train: pruned-rnnt train --config {self.config or self.recipe} {settings}"
        if "noise" in self.splits:
            noise = shlex.quote(f"data.augmentation.noise_cuts={output}/noise_cuts.jsonl.gz")
            return f"Mix into training: pruned-rnnt train ... {noise}"
        return f"Decode: pruned-rnnt decode RUN {shlex.quote(data)}"


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("pruned_rnnt", "torch", "lhotse", "sentencepiece", "espeakng-loader", "scipy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
