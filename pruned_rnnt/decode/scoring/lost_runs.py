"""Runs of reference words that a hypothesis leaves out: speech that was lost, not misheard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pruned_rnnt.decode.scoring.wer import Transcript

LEAST_WORDS = 3
# Marks a deletion or insertion in an alignment; no word of a text is empty.
_NOTHING = ""


def lost_runs(transcript: Transcript, least: int = LEAST_WORDS) -> list[range]:
    """Positions of `least` or more reference words in a row that the best alignment deletes.

    Insertions do not end a run: they may stand for any of its words.
    """
    import kaldialign

    pairs = kaldialign.align(list(transcript.reference), list(transcript.hypothesis), _NOTHING)
    found = []
    begin = place = 0
    for reference, hypothesis in pairs:
        if reference == _NOTHING:
            continue
        if hypothesis != _NOTHING:
            found.append(range(begin, place))
            begin = place + 1
        place += 1
    found.append(range(begin, place))
    return [run for run in found if len(run) >= least]


def lost_runs_per_10000_words(transcripts: Sequence[Transcript]) -> float:
    """Their number in a set, for 10,000 reference words; 0 without reference words."""
    words = sum(len(transcript.reference) for transcript in transcripts)
    return 10_000 * sum(1 for _ in _all_runs(transcripts)) / max(1, words)


def _all_runs(transcripts: Sequence[Transcript]) -> Iterator[range]:
    for transcript in transcripts:
        yield from lost_runs(transcript)
