"""The worst utterances of a set with their audio, pictures and aligned texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pruned_rnnt.report.clips import ByteBudget, Clip, audio_clip
from pruned_rnnt.report.comparison import Comparison
from pruned_rnnt.report.pictures import UtterancePictures
from pruned_rnnt.report.scored_set import ScoredSet, ScoredUtterance
from pruned_rnnt.report.tables import pair_letter


@dataclass(frozen=True, kw_only=True)
class ShownPair:
    """A pair of an alignment: `kind` as `pair_letter`; empty texts for gaps.

    start, end: of the hypothesis word in seconds; None if unknown.
    """

    kind: str
    reference: str
    hypothesis: str
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorstUtterance:
    """An utterance as the page shows it. second: the alignment of the other result, if any."""

    utterance: ScoredUtterance
    pairs: Sequence[ShownPair]
    second: ScoredUtterance | None
    second_pairs: Sequence[ShownPair]
    audio: Clip
    picture: Clip


def worst_utterances(
    scored: ScoredSet,
    count: int,
    budget: ByteBudget,
    pictures: UtterancePictures | None,
    *,
    with_audio: bool,
    comparison: Comparison | None,
) -> Iterator[WorstUtterance]:
    """The utterances with most errors. pictures: None for no pictures."""
    others = {first.id: second for first, second in comparison.pairs} if comparison else {}
    for utterance in scored.worst(count):
        cut = scored.details.cuts.get(utterance.id)
        second = others.get(utterance.id)
        yield WorstUtterance(
            utterance=utterance,
            pairs=shown_pairs(utterance),
            second=second,
            second_pairs=shown_pairs(second) if second else (),
            audio=budget.take(audio_clip(cut)) if with_audio else Clip(""),
            picture=budget.take(pictures.clip(utterance, cut)) if pictures else Clip(""),
        )


def shown_pairs(utterance: ScoredUtterance) -> list[ShownPair]:
    """The alignment of an utterance with the times of the recognised words."""
    # Times are of words: they do not fit characters, or texts without spaces.
    recognised = [word for _, word in utterance.pairs if word is not None]
    timed = [word.word for word in utterance.words] == recognised
    times = iter(utterance.words)
    shown = []
    for pair in utterance.pairs:
        reference, hypothesis = pair
        time = next(times) if timed and hypothesis is not None else None
        shown.append(
            ShownPair(
                kind=pair_letter(pair),
                reference=reference or "",
                hypothesis=hypothesis or "",
                start=time.start if time else None,
                end=time.end if time else None,
            )
        )
    return shown
