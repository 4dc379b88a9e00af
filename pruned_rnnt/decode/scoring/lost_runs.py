"""Runs of reference words that a hypothesis leaves out: speech that was lost, not misheard."""

from __future__ import annotations

from pruned_rnnt.decode.scoring.error_statistics import align_words
from pruned_rnnt.decode.scoring.wer import Transcript

LEAST_WORDS = 3


def lost_runs(transcript: Transcript, least: int = LEAST_WORDS) -> list[range]:
    """Positions of `least` or more reference words in a row that the best alignment deletes.

    Insertions do not end a run: they may stand for any of its words.

    Raises:
        ValueError: as for `align_words`.
    """
    found = []
    begin = place = 0
    for reference, hypothesis in align_words(transcript.reference, transcript.hypothesis):
        if reference is None:
            continue
        if hypothesis is not None:
            found.append(range(begin, place))
            begin = place + 1
        place += 1
    found.append(range(begin, place))
    return [run for run in found if len(run) >= least]
