"""Runs of reference words that a hypothesis leaves out: speech that was lost, not misheard."""

from __future__ import annotations

from collections.abc import Iterable

from pruned_rnnt.decode.scoring.error_statistics import WordPair, align_words
from pruned_rnnt.decode.scoring.wer import Transcript

LEAST_WORDS = 3


def lost_runs(transcript: Transcript, least: int = LEAST_WORDS) -> list[range]:
    """Positions of `least` or more reference words in a row that the best alignment deletes.

    Raises:
        ValueError: as for `align_words`.
    """
    return lost_runs_of_pairs(align_words(transcript.reference, transcript.hypothesis), least)


def lost_runs_of_pairs(pairs: Iterable[WordPair], least: int = LEAST_WORDS) -> list[range]:
    """As `lost_runs`, of aligned words. Insertions do not end a run: they may stand for words."""
    found = []
    begin = place = 0
    for reference, hypothesis in pairs:
        if reference is None:
            continue
        if hypothesis is not None:
            found.append(range(begin, place))
            begin = place + 1
        place += 1
    found.append(range(begin, place))
    return [run for run in found if len(run) >= least]
