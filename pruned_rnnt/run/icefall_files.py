"""Result files in icefall's format, for which its users have tools.

recogs-STEM.txt        `id:<tab>ref=['a', 'b']` and `id:<tab>hyp=[...]`, by utterance
errs-STEM.txt          %WER (%CER), utterances with errors marked, errors by kind and word
wer-summary-STEM.txt   `settings<tab>WER` (CER)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pruned_rnnt.decode.scoring.error_rates import Transcript, count_errors
from pruned_rnnt.decode.scoring.error_statistics import (
    ErrorStatistics,
    WordCounts,
    WordPair,
    align_words,
    can_align,
)
from pruned_rnnt.system.whole_files import write_lines

_KeyT = TypeVar("_KeyT", str, tuple[str, str])

# In an utterance with errors: no word on this side.
_GAP = "*"


def write_icefall_files(
    folder: Path, stem: str, setting: str, transcripts: Sequence[Transcript], metric: str = "WER"
) -> float:
    """Write the three result files; returns the error rate in percent with two decimals.

    Without reference words it is NaN, written as `nan`.

    Args:
        folder: created if it does not exist.
        stem: STEM in the names of the files.
        setting: name of the search setting in the summary, for example `greedy`.
        transcripts: in words, or in characters if metric is `CER`.
    """
    ordered = sorted(transcripts, key=lambda transcript: transcript.id)
    lines, error_rate = _error_lines(ordered, metric)
    write_lines(folder / f"recogs-{stem}.txt", _recogs_lines(ordered))
    write_lines(folder / f"errs-{stem}.txt", lines)
    summary = [f"settings\t{metric}", f"{setting}\t{error_rate}"]
    write_lines(folder / f"wer-summary-{stem}.txt", summary)
    return error_rate


def _recogs_lines(transcripts: Sequence[Transcript]) -> list[str]:
    lines = []
    for transcript in transcripts:
        lines.append(f"{transcript.id}:\tref={list(transcript.reference)}")
        lines.append(f"{transcript.id}:\thyp={list(transcript.hypothesis)}")
    return lines


def _error_lines(transcripts: Sequence[Transcript], metric: str) -> tuple[list[str], float]:
    statistics = ErrorStatistics()
    details = []
    for transcript in transcripts:
        if not can_align(transcript.reference, transcript.hypothesis):
            details.append(f"{transcript.id}:\ttoo long to align")
            continue
        pairs = align_words(transcript.reference, transcript.hypothesis)
        statistics.add(pairs)
        details.append(f"{transcript.id}:\t{_marked_text(pairs)}")
    counts = count_errors(transcripts)
    words = counts.reference_words
    correct = words - counts.deletions - counts.substitutions
    rate = f"{100.0 * counts.errors / words:.2f}" if words else "nan"
    lines = [
        f"%{metric} = {rate}",
        f"Errors: {counts.insertions} insertions, {counts.deletions} deletions, "
        f"{counts.substitutions} substitutions, over {words} reference words ({correct} correct)",
        "Search below for sections starting with PER-UTT DETAILS:, SUBSTITUTIONS:, DELETIONS:, "
        "INSERTIONS:, PER-WORD STATS:",
        "",
        # The format has two spaces at the end of this line.
        "PER-UTT DETAILS: corr or (ref->hyp)  ",
        *details,
        "",
        "SUBSTITUTIONS: count ref -> hyp",
        *(
            f"{count}   {reference} -> {hypothesis}"
            for (reference, hypothesis), count in _most_frequent(statistics.substitutions)
        ),
        "",
        "DELETIONS: count ref",
        *(f"{count}   {word}" for word, count in _most_frequent(statistics.deletions)),
        "",
        "INSERTIONS: count hyp",
        *(f"{count}   {word}" for word, count in _most_frequent(statistics.insertions)),
        "",
        "PER-WORD STATS: word  corr tot_errs count_in_ref count_in_hyp",
        *_word_lines(statistics.words),
    ]
    return lines, float(rate)


def _most_frequent(counter: Counter[_KeyT]) -> list[tuple[_KeyT, int]]:
    return sorted(counter.items(), key=lambda item: (item[1], item[0]), reverse=True)


def _word_lines(words: Mapping[str, WordCounts]) -> list[str]:
    worst_first = sorted(words.items(), key=lambda item: (item[1].errors, item[0]), reverse=True)
    return [
        f"{word}   {counts.correct} {counts.errors} {counts.in_reference} {counts.in_hypothesis}"
        for word, counts in worst_first
    ]


def _marked_text(pairs: Sequence[WordPair]) -> str:
    """Correct words as they are, errors as (reference->hypothesis), adjacent errors joined."""
    parts: list[str] = []
    reference: list[str] = []
    hypothesis: list[str] = []

    def close_bracket() -> None:
        if reference or hypothesis:
            parts.append(f"({' '.join(reference) or _GAP}->{' '.join(hypothesis) or _GAP})")
            reference.clear()
            hypothesis.clear()

    for expected, found in pairs:
        if expected is not None and expected == found:
            close_bracket()
            parts.append(expected)
            continue
        if expected is not None:
            reference.append(expected)
        if found is not None:
            hypothesis.append(found)
    close_bracket()
    return " ".join(parts)
