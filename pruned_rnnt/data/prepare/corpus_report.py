"""Statistics of a corpus: counts for prepare.json, report.txt for users, and hints about its texts
with the options of `prepare` to change them.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pruned_rnnt.data.prepare.shard_writer import ShardResult
from pruned_rnnt.data.tokens.text_normalisation import TextConfig, is_punctuation
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import DEFAULT_VOCAB_SIZE, TokenizerConfig

# Examples to keep of utterances left out, for each reason.
_MAX_EXAMPLES = 20
# prepare.json names up to this many speakers; of more it has the number only.
_MAX_NAMED_SPEAKERS = 1000
_BIN_SECONDS = 0.1
# A character that occurs less often is reported as rare.
_RARE_BELOW = 5
_SHOWN = 8
# prepare.json and report.txt list up to this many words without a token, and all characters.
_MAX_UNKNOWN_WORDS = 1000


def _split_order(name: str) -> tuple[int, str]:
    known = ("train", "dev", "test")
    return (known.index(name) if name in known else len(known), name)


class CorpusStatistics:
    """Adds up the results of shards; durations are kept as a histogram with bins of 0.1 s.

    whole_words: the tokens are words, so that all of these are counted, too.
    """

    def __init__(self, *, whole_words: bool = False) -> None:
        self.whole_words = whole_words
        self.utterances: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.words: Counter[str] = Counter()
        self.speakers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.languages: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.characters: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.distinct_words: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.durations: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.rates: Counter[int] = Counter()
        self.channels: Counter[int] = Counter()
        self.left_out: Counter[str] = Counter()
        self.left_out_of: Counter[str] = Counter()
        self.examples: list[tuple[str, str, str]] = []
        # Of the utterances with each note: the number, and the origin of the first.
        self.notes: Counter[str] = Counter()
        self.noted: dict[str, str] = {}

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
            if self.whole_words:
                self.distinct_words[split].update(text.split())
        self.left_out_of[split] += len(result.left_out)
        for _, origin, reason, details in result.left_out:
            self.left_out[reason] += 1
            if self.left_out[reason] <= _MAX_EXAMPLES:
                self.examples.append((origin, reason, details))
        for origin, note in result.notes:
            self.notes[note] += 1
            self.noted.setdefault(note, origin)

    @property
    def _most_unknown(self) -> int | None:
        return _MAX_UNKNOWN_WORDS if self.whole_words else None

    def unknown_parts(self, tokenizer: Tokenizer) -> dict[str, Counter[str]]:
        """Counts of the characters, or whole words, that have no token, by split."""
        parts = self.distinct_words if self.whole_words else self.characters
        found = {
            split: Counter({c: n for c, n in parts[split].items() if tokenizer.lacks(c)})
            for split in sorted(parts, key=_split_order)
        }
        return {split: counts for split, counts in found.items() if counts}

    def empty_split_hints(self) -> list[str]:
        """A hint for each split of which all utterances were left out."""
        return [
            f"the {split} split is empty: all its {count:,} utterances were left out "
            "(left_out.jsonl says why). Repair these, or, if the source has no splits, draw others "
            "with another --seed"
            for split, count in sorted(self.left_out_of.items(), key=lambda x: _split_order(x[0]))
            if count and not self.utterances[split]
        ]

    def summaries(self, tokenizer: Tokenizer | None = None) -> dict[str, dict[str, Any]]:
        """The entry of each split for prepare.json."""
        unknown = self.unknown_parts(tokenizer) if tokenizer is not None else {}
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
                key = "unknown_words" if self.whole_words else "unknown_characters"
                summaries[split][key] = dict(unknown[split].most_common(self._most_unknown))
        return summaries

    def describe_left_out(self) -> str:
        """The reasons with counts, as in "12 empty text (the first: a.tsv:7)"; empty for none."""
        first: dict[str, str] = {}
        for origin, reason, details in self.examples:
            example = f"{reason} (the first: {origin}{f', {details}' if details else ''})"
            first.setdefault(reason, example)
        return _format_counts({first[reason]: count for reason, count in self.left_out.items()})

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
            lines.append(f"languages: {_format_counts(named)}")
        rates = {f"at {rate} Hz": count for rate, count in self.rates.items()}
        lines.append(f"sampling rates: {_format_counts(rates)}")
        several = sum(count for channels, count in self.channels.items() if channels > 1)
        if several:
            lines.append(f"{several:,} utterances have several channels; only one is used")
        lines += [
            f"{count:,} utterance{'s' * (count > 1)} {note} (the first: {self.noted[note]})"
            for note, count in self.notes.most_common()
        ]
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
        parts = "words" if self.whole_words else "characters"
        lines = [f"Characters of train ({len(train)})", "=" * 20]
        for character, count in sorted(train.items(), key=lambda item: (-item[1], item[0])):
            rare = "  rare: a typing error?" if count < _RARE_BELOW else ""
            lines.append(f"{character}  {count:,}  {unicodedata.name(character, '?')}{rare}")
        for split, unknown in self.unknown_parts(tokenizer).items():
            shown = dict(unknown.most_common(self._most_unknown))
            more = f", and {len(unknown) - len(shown):,} more" * (len(unknown) > len(shown))
            counts = f"{_format_counts(shown)}{more}"
            lines.append(f"{split} has {parts} that the tokenizer lacks: {counts}")
        return lines


def _format_counts(counts: Mapping[str, int]) -> str:
    """Formats counts as "3 A, 1 B", most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {name}" for name, count in ordered)


def text_hints(characters: Counter[str], config: TextConfig) -> list[str]:
    """Hints about mixed case and about punctuation, if `config` keeps them.

    characters: counts of the characters in the normalised training texts.
    """
    hints = []
    upper = sum(count for character, count in characters.items() if character.isupper())
    lower = sum(count for character, count in characters.items() if character.islower())
    if config.case == "keep" and upper and lower:
        hints.append(
            f"texts have upper-case ({upper:,}) and lower-case ({lower:,}) letters, which the "
            "model learns as different symbols; pass --case lower unless it should write both"
        )
    marks = Counter({c: count for c, count in characters.items() if is_punctuation(c)})
    if config.punctuation == "keep" and marks:
        shown = " ".join(mark for mark, _ in marks.most_common(_SHOWN))
        more = f" and {len(marks) - _SHOWN} more kinds" if len(marks) > _SHOWN else ""
        hints.append(
            f"texts have punctuation ({shown}{more}; {marks.total():,} in all); pass --punctuation "
            "remove unless the model should write it"
        )
    return hints


def token_hints(tokenizer: Tokenizer, config: TokenizerConfig, characters: int) -> list[str]:
    """A hint if the tokenizer has fewer tokens than requested, or more than by default.

    characters: the number of different ones in the training texts.
    """
    wanted = config.vocab_size or DEFAULT_VOCAB_SIZE
    if config.kind not in ("bpe", "unigram"):
        return []
    if len(tokenizer) > wanted and not config.byte_fallback:
        return [
            f"texts have {characters:,} different characters, so --tokens {config.kind} has "
            f"{len(tokenizer):,} tokens, not {wanted}. --tokens char has one for each character; "
            "--byte-fallback with a smaller --vocab-size writes rare characters as bytes"
        ]
    if len(tokenizer) >= wanted:
        return []
    return [
        f"--tokens {config.kind} found {len(tokenizer)} tokens, not the {wanted} of "
        "--vocab-size, because the texts have no more pieces. Many of them are whole words with "
        "few examples; a smaller --vocab-size, or --tokens char, gives more examples per token"
    ]


def unknown_hints(
    unknown: Mapping[str, Counter[str]], *, whole_words: bool, copied: bool
) -> list[str]:
    """A hint for each split with characters that have no token, or words with `whole_words`.

    unknown: their counts, by split. copied: the tokenizer is that of other data.
    """
    advice = (
        "the options --case, --punctuation and --spaces of the tokenizer's data may remove them"
        if copied
        else "--tokens unigram, bpe or char writes words that train does not have"
        if whole_words
        else "--byte-fallback gives every character a spelling"
    )
    part = "word" if whole_words else "character"
    return [
        f"{split} has {len(counts):,} {part}{'s' * (len(counts) > 1)} without a token "
        f"({_shown_counts(counts)}), {counts.total():,} in all, each of which counts as an error; "
        f"{advice}"
        for split, counts in unknown.items()
    ]


def language_hints(tokenizer: Tokenizer, languages: Counter[str]) -> list[str]:
    """A hint if training utterances get no language tag from a tokenizer that has tags.

    languages: counts of the utterances by language code, "" for none.
    """
    untagged = Counter(
        {code or "unknown": n for code, n in languages.items() if code not in tokenizer.languages}
    )
    if not tokenizer.languages or not untagged:
        return []
    return [
        f"the tokenizer has tags of {', '.join(tokenizer.languages)}, and train has "
        f"{untagged.total():,} utterances without one ({_shown_counts(untagged)}), from which a "
        "model learns to leave the tag out; give each the language of a tag, by --language or a "
        "column `language`"
    ]


def spelling_hints(source: Path, text: TextConfig) -> list[str]:
    """A hint if texts are spelt unlike those of the prepared folder that the tokenizer is from."""
    try:
        options = json.loads((source / "prepare.json").read_bytes())["options"]
        before = {name: options[name] for name in ("case", "punctuation", "spaces")}
    except (OSError, ValueError, KeyError, TypeError):
        return []  # a run, or the folder of an earlier version
    if all(getattr(text, name) == value for name, value in before.items()):
        return []
    used = " ".join(f"--{name} {value}" for name, value in before.items())
    return [
        f"the texts of {source} were prepared with {used}, and these were not: words that differ "
        "in this count as errors of a model that was trained there; prepare again with these "
        "options"
    ]


def _shown_counts(counts: Counter[str]) -> str:
    """The most frequent ones, as in "a 12, b 3, ..."."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    shown = [f"{name} {count:,}" for name, count in most]
    return ", ".join([*shown, *(["..."] if len(counts) > _SHOWN else [])])
