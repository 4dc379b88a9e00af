"""Statistics of a corpus: counts for prepare.json, and report.txt for users."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from pruned_rnnt.data.prepare.corpus_entry import format_counts
from pruned_rnnt.data.prepare.shard_writer import ShardResult
from pruned_rnnt.data.tokens.tokenizer import Tokenizer

# Examples to keep of utterances left out, for each reason.
_MAX_EXAMPLES = 20
# prepare.json names up to this many speakers; of more it has the number only.
_MAX_NAMED_SPEAKERS = 1000
_BIN_SECONDS = 0.1
# A character that occurs less often is reported as rare.
_RARE_BELOW = 5


def _split_order(name: str) -> tuple[int, str]:
    known = ("train", "dev", "test")
    return (known.index(name) if name in known else len(known), name)


class CorpusStatistics:
    """Adds up the results of shards; durations are kept as a histogram with bins of 0.1 s."""

    def __init__(self) -> None:
        self.utterances: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.words: Counter[str] = Counter()
        self.speakers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.languages: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.characters: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.durations: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.rates: Counter[int] = Counter()
        self.channels: Counter[int] = Counter()
        self.left_out: Counter[str] = Counter()
        self.examples: list[tuple[str, str, str]] = []

    def add(self, result: ShardResult) -> None:
        split = result.split
        self.utterances[split] += len(result.texts)
        self.seconds[split] += sum(result.durations)
        self.words[split] += sum(len(text.split()) for text in result.texts)
        self.speakers[split].update(result.speakers)
        self.languages[split].update(result.languages)
        self.durations[split].update(int(d / _BIN_SECONDS) for d in result.durations)
        self.rates.update(result.rates)
        self.channels.update(result.channels)
        for text in result.texts:
            self.characters[split].update(text.replace(" ", ""))
        for _, origin, reason, details in result.left_out:
            self.left_out[reason] += 1
            if self.left_out[reason] <= _MAX_EXAMPLES:
                self.examples.append((origin, reason, details))

    def unknown_characters(self, tokenizer: Tokenizer) -> dict[str, Counter[str]]:
        """Counts of the characters that have no token, by split; none for tokens of whole words."""
        if tokenizer.has_whole_words:
            return {}
        found = {
            split: Counter({c: n for c, n in self.characters[split].items() if tokenizer.lacks(c)})
            for split in sorted(self.characters, key=_split_order)
        }
        return {split: counts for split, counts in found.items() if counts}

    def summaries(self, tokenizer: Tokenizer | None = None) -> dict[str, dict[str, Any]]:
        """The entry of each split for prepare.json."""
        unknown = self.unknown_characters(tokenizer) if tokenizer is not None else {}
        summaries: dict[str, dict[str, Any]] = {}
        for split in sorted(self.utterances, key=_split_order):
            if not self.utterances[split]:
                continue
            names = sorted(name for name in self.speakers[split] if name)
            summaries[split] = {
                "utterances": self.utterances[split],
                "hours": round(self.seconds[split] / 3600, 3),
                "words": self.words[split],
                "distinct_characters": len(self.characters[split]),
                "speakers": names if len(names) <= _MAX_NAMED_SPEAKERS else len(names),
            }
            if any(self.languages[split]):
                summaries[split]["languages"] = dict(sorted(self.languages[split].items()))
            if split in unknown:
                summaries[split]["unknown_characters"] = dict(unknown[split].most_common())
        return summaries

    def describe_left_out(self) -> str:
        """The reasons with counts, as in "12 empty text (the first: a.tsv:7)"; empty for none."""
        first: dict[str, str] = {}
        for origin, reason, details in self.examples:
            example = f"{reason} (the first: {origin}{f', {details}' if details else ''})"
            first.setdefault(reason, example)
        return format_counts({first[reason]: count for reason, count in self.left_out.items()})

    def report_lines(self, tokenizer: Tokenizer | None, notes: Iterable[str]) -> list[str]:
        """The lines of report.txt."""
        lines = ["Corpus", "======"]
        for split, summary in self.summaries().items():
            speakers = summary["speakers"]
            number = speakers if isinstance(speakers, int) else len(speakers)
            lines.append(
                f"{split}: {summary['utterances']:,} utterances, {summary['hours']:,} h, "
                f"{number or 'unknown'} speakers, {self._quantiles(split)}"
            )
        languages = sum(self.languages.values(), Counter())
        if any(languages):
            named = {code or "unknown": count for code, count in languages.items()}
            lines.append(f"languages: {format_counts(named)}")
        rates = {f"at {rate} Hz": count for rate, count in self.rates.items()}
        lines.append(f"sampling rates: {format_counts(rates)}")
        several = sum(count for channels, count in self.channels.items() if channels > 1)
        if several:
            lines.append(f"{several:,} utterances have several channels; only one is used")
        lines += [*notes, "", "Left out", "========"]
        lines += [f"{count:,} {reason}" for reason, count in self.left_out.most_common()]
        lines += [
            f"  {origin}: {reason}{f' ({details})' if details else ''}"
            for origin, reason, details in self.examples
        ]
        if self.left_out:
            lines.append("left_out.jsonl lists all of them")
        else:
            lines.append("nothing")
        return [*lines, "", *self._character_lines(tokenizer)] if tokenizer else lines

    def _quantiles(self, split: str) -> str:
        bins = sorted(self.durations[split].items())
        ends = np.cumsum([count for _, count in bins])
        places = np.searchsorted(ends, np.array([0.0, 0.5, 0.95, 1.0]) * (ends[-1] - 1) + 0.5)
        low, half, most, high = (bins[place][0] * _BIN_SECONDS for place in places)
        return f"{low:.1f} to {high:.1f} s (half below {half:.1f}, 95% below {most:.1f})"

    def _character_lines(self, tokenizer: Tokenizer) -> list[str]:
        train = self.characters["train"]
        lines = [f"Characters of train ({len(train)})", "=" * 20]
        for character, count in sorted(train.items(), key=lambda item: (-item[1], item[0])):
            rare = "  rare: a typing error?" if count < _RARE_BELOW else ""
            lines.append(f"{character}  {count:,}  {unicodedata.name(character, '?')}{rare}")
        lines += [
            f"{split} has characters that the tokenizer lacks: {format_counts(unknown)}"
            for split, unknown in self.unknown_characters(tokenizer).items()
        ]
        return lines
