"""The report of `pruned-rnnt prepare`: prepare.json, and the summary that is printed at the end,
with settings for a length of the training that fits the amount of speech.
"""

from __future__ import annotations

import math
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

from pruned_rnnt.config.written import as_override
from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import write_report
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.licences.chain import Licence

# icefall trains Zipformers for 50 epochs on LibriSpeech, which has 2,900 hours with its copies at
# other speeds; larger corpora need fewer epochs.
_EPOCHS = 50
_MOST_HOURS = 145_000
# Seconds of speech in a step; fewer for small corpora, so that an epoch has many steps.
_BATCH_SECONDS = (60, 600)
_STEPS_PER_EPOCH = 100
_FEWEST_STEPS = 2000
_VALIDATIONS = 20
_VALIDATE_EVERY = (100, 5000)
# The summary lists this many of the skipped files.
_MAX_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class TrainingLength:
    """Suggestions for one process; the fields after epochs are settings.

    epochs: passes over the training set, copies at other speeds included.
    """

    epochs: float
    max_duration: int
    steps: int
    validate_every: int
    warm_up_steps: int
    loss_warm_up_steps: int

    def settings(self) -> tuple[str, ...]:
        """As `section.key=value`."""
        return (
            f"data.max_duration={self.max_duration}",
            f"train.steps={self.steps}",
            f"train.validate_every={self.validate_every}",
            f"schedule.warm_up_steps={self.warm_up_steps}",
            f"loss.warm_up_steps={self.loss_warm_up_steps}",
        )

    def advice(self, hours: float) -> list[str]:
        """Lines for the summary of prepare."""
        epochs = f"{self.epochs:,.0f}" if self.epochs >= 10 else f"{self.epochs:.2g}"
        return [
            f"Settings for {hours:,.3g} hours on one GPU: {' '.join(self.settings())}",
            f"  This is a rule of thumb ({epochs} epochs). With several GPUs divide "
            "train.steps and train.validate_every by their number;",
            "  train.early_stopping_patience=5 ends training when the error rate stops falling.",
        ]


def training_length(hours: float) -> TrainingLength:
    """Suggestions for this many hours of training speech, copies at other speeds included.

    Raises:
        ValueError: hours is not above 0.
    """
    if not hours > 0:
        raise ValueError(f"hours is {hours}, needs > 0")
    seconds = 3600 * hours
    batch = _within(_BATCH_SECONDS, _rounded(seconds / _STEPS_PER_EPOCH))
    epochs = min(_EPOCHS, _MOST_HOURS / hours)
    steps = max(_FEWEST_STEPS, _rounded(epochs * seconds / batch))
    return TrainingLength(
        epochs=steps * batch / seconds,
        max_duration=batch,
        steps=steps,
        validate_every=_within(_VALIDATE_EVERY, _rounded(steps / _VALIDATIONS)),
        warm_up_steps=min(500, steps // 10),
        loss_warm_up_steps=min(2000, steps // 5),
    )


def _within(bounds: tuple[int, int], value: int) -> int:
    return min(max(value, bounds[0]), bounds[1])


def _rounded(value: float) -> int:
    """To two significant digits, or to an integer below 10."""
    digits = max(0, math.floor(math.log10(max(value, 1))) - 1)
    return round(round(value, -digits))


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
    hints: advice about splits, texts and tokens.
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
        # Of a corpus, counts are of utterances, whose file may be one of many or have no fault.
        what = "utterance" if self.skipped_counts else "file"
        verb = "left out" if self.skipped_counts else "skipped"
        lines = [f"{count:,} {what}{'s' if count > 1 else ''} {verb}:"]
        lines += [f"  {file.path}: {file.reason}" for file in self.skipped[:_MAX_SHOWN]]
        if count > _MAX_SHOWN:
            name = "left_out.jsonl" if self.skipped_counts else "prepare.json"
            lines.append(f"  ... {output}/{name} lists all of them")
        return lines

    def _next_command(self, output: Path) -> str:
        data = as_override("data.path", output)
        if "train" in self.splits:
            settings = shlex.join([data, *self.train_options])
            return f"Train: pruned-rnnt train --config {self.config or self.recipe} {settings}"
        if "noise" in self.splits:
            cuts = output / "noise_cuts.jsonl.gz"
            noise = as_override("data.augmentation.noise_cuts", cuts)
            return f"Mix into training: pruned-rnnt train ... {shlex.quote(noise)}"
        return f"Decode: pruned-rnnt decode RUN {shlex.quote(data)}"


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("pruned_rnnt", "torch", "lhotse", "sentencepiece", "espeakng-loader", "scipy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
