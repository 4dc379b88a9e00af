"""The worst utterances of a set with their audio, pictures and aligned texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pruned_rnnt.report.clips import ByteBudget, Clip, audio_clip
from pruned_rnnt.report.comparison import Comparison
from pruned_rnnt.report.pictures import UtterancePictures
from pruned_rnnt.report.scored_set import ScoredSet, ScoredUtterance
from pruned_rnnt.report.tables import pair_letter, shown_pairs


@dataclass(frozen=True, kw_only=True)
class TimedPair:
    """A pair of an alignment with its time: `kind` as `pair_letter`; empty texts for gaps.

    start, end: of the hypothesis word in seconds; None if unknown.
    """

    kind: str
    reference: str
    hypothesis: str
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorstUtterance:
    """An utterance as the page shows it.

    unit: word or character: what the pairs are.
    second: the alignment of the other result, if any.
    """

    utterance: ScoredUtterance
    unit: str
    pairs: Sequence[TimedPair]
    second: ScoredUtterance | None
    second_pairs: Sequence[TimedPair]
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
            unit=shown_pairs(utterance).unit,
            pairs=timed_pairs(utterance),
            second=second,
            second_pairs=timed_pairs(second) if second else (),
            audio=budget.take(audio_clip(cut)) if with_audio else Clip(""),
            picture=budget.take(pictures.clip(utterance, cut)) if pictures else Clip(""),
        )


def timed_pairs(utterance: ScoredUtterance) -> list[TimedPair]:
    """The alignment of an utterance with the times of the recognised words."""
    found = shown_pairs(utterance)
    # Times are of words: they do not fit characters, or texts without spaces.
    sentence = utterance.sentence
    spoken = tuple(word.word for word in utterance.words)
    timed = found.unit == "word" and sentence is not None and spoken == sentence.hypothesis
    times = iter(utterance.words)
    shown = []
    for pair in found.pairs:
        reference, hypothesis = pair
        time = next(times) if timed and hypothesis is not None else None
        shown.append(
            TimedPair(
                kind=pair_letter(pair),
                reference=reference or "",
                hypothesis=hypothesis or "",
                start=time.start if time else None,
                end=time.end if time else None,
            )
        )
    return shown
