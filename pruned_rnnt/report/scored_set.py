"""A decoded set with its errors: in total, by utterance, and by duration and speaker of the cuts in
the prepared data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.input.batch import Audio
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.filters import cut_language
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.decode.scoring.error_rates import (
    ErrorCounts,
    Transcript,
    count_errors,
)
from pruned_rnnt.decode.scoring.error_statistics import ErrorStatistics, WordPair, align_words
from pruned_rnnt.decode.scoring.significance import REPLICATIONS, rate_interval
from pruned_rnnt.decode.word_times import TimedWord
from pruned_rnnt.run.result_file import ResultFile, ResultUtterance, Token

# Widths of the groups of durations in seconds; the smallest with few enough groups is used. The
# longest utterances, one in 50, are one group.
_WIDTHS = (0.25, 0.5, 1, 2, 5, 10, 20, 60, 300, 1200)
_MOST_GROUPS = 8
_SHORT_SHARE = 0.98
# Fewer than for printed intervals: those of groups are only drawn.
_GROUP_REPLICATIONS = 1000
# The length of audio and that of its features differ by less.
_SAME_SECONDS = 0.05
# Of the table of an alignment in characters, which takes some seconds.
_MOST_CELLS = 10**8


@dataclass(frozen=True, kw_only=True)
class CutDetails:
    """The cuts of decoded utterances, by id.

    problem: why some or all are missing; empty if none is.
    """

    cuts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def seconds(self, name: str) -> float | None:
        """The duration of an utterance; None if unknown."""
        cut = self.cuts.get(name)
        return None if cut is None else float(cut.duration)

    def speaker(self, name: str) -> str:
        """The speakers of an utterance, joined; empty if unknown."""
        cut = self.cuts.get(name)
        speakers = [s.speaker for s in cut.supervisions if s.speaker] if cut is not None else []
        return " ".join(dict.fromkeys(speakers))

    def language(self, name: str) -> str:
        """The language code of an utterance; empty if unknown."""
        cut = self.cuts.get(name)
        return "" if cut is None else cut_language(cut)


def read_cut_details(config: DataConfig, split: str, names: Collection[str]) -> CutDetails:
    """The cuts of a split with these ids; manifests of several shards are read, too."""
    folder = PreparedFolder(Path(config.path), config.allow_commands)
    hint = "if the data were moved, add data.path=DIR"
    wanted = frozenset(names)
    try:
        cuts = {cut.id: cut for cut in folder.cuts(split, lazy=True) if cut.id in wanted}
    except (OSError, ValueError) as error:
        return CutDetails(problem=f"The data cannot be read: {error}; {hint}.")
    missing = len(wanted) - len(cuts)
    problem = ""
    if missing:
        problem = (
            f"{missing:,} of {len(wanted):,} utterances are not in the split {split} of "
            f"{config.path}: {hint}."
        )
    return CutDetails(cuts=cuts, problem=problem)


@dataclass(frozen=True, kw_only=True)
class ScoredUtterance:
    """An utterance with its aligned words (or characters) and errors.

    sentence: the texts in words; the transcript itself if that is in words, None if unknown.
    seconds: duration; None if unknown. speaker, language: empty if unknown.
    words, tokens: of the hypothesis, empty if unknown.
    audio: None if unknown.
    """

    transcript: Transcript
    sentence: Transcript | None
    pairs: tuple[WordPair, ...]
    errors: ErrorCounts
    seconds: float | None
    speaker: str
    language: str
    words: tuple[TimedWord, ...]
    tokens: tuple[Token, ...]
    audio: Audio | None = None

    @property
    def id(self) -> str:
        return self.transcript.id


@dataclass(frozen=True, kw_only=True)
class GroupRate:
    """The error rate of a group of utterances, with its 95% interval by bootstrap."""

    name: str
    utterances: int
    errors: ErrorCounts
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ScoredSet:
    """A result file with its errors.

    unit: what its error rate counts.
    problems: sentences about what is missing.
    """

    result: ResultFile
    unit: Literal["word", "character"]
    utterances: tuple[ScoredUtterance, ...]
    details: CutDetails
    problems: tuple[str, ...]

    @property
    def metric(self) -> str:
        return "WER" if self.unit == "word" else "CER"

    @cached_property
    def transcripts(self) -> list[Transcript]:
        return [utterance.transcript for utterance in self.utterances]

    @cached_property
    def errors(self) -> ErrorCounts:
        return sum((utterance.errors for utterance in self.utterances), ErrorCounts())

    @cached_property
    def other_errors(self) -> ErrorCounts | None:
        """Errors that the other metric counts; None if the words are unknown."""
        if self.unit == "word":
            return count_errors([transcript.characters() for transcript in self.transcripts])
        sentences = [each.sentence for each in self.utterances if each.sentence is not None]
        return count_errors(sentences) if len(sentences) == len(self.utterances) else None

    @property
    def other_metric(self) -> str:
        return "CER" if self.unit == "word" else "WER"

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95% interval that `pruned-rnnt decode` prints."""
        return _interval(self.utterances)

    @cached_property
    def statistics(self) -> ErrorStatistics:
        statistics = ErrorStatistics()
        for utterance in self.utterances:
            statistics.add(utterance.pairs)
        return statistics

    def with_problem(self, problem: str) -> ScoredSet:
        """This set with one more sentence about what is missing."""
        return replace(self, problems=(*self.problems, problem))

    @property
    def correct(self) -> int:
        """The number of utterances without an error."""
        return sum(utterance.errors.errors == 0 for utterance in self.utterances)

    @property
    def seconds(self) -> float:
        """The duration of the utterances for which it is known."""
        return sum(utterance.seconds or 0.0 for utterance in self.utterances)

    def worst(self, count: int) -> list[ScoredUtterance]:
        """Utterances with errors, by number of errors, then error rate."""
        wrong = [utterance for utterance in self.utterances if utterance.errors.errors]
        wrong.sort(key=lambda u: (-u.errors.errors, -u.errors.rate, u.id))
        return wrong[:count]

    def holding_half(self) -> int:
        """The smallest number of utterances that have half of the errors."""
        half, found = self.errors.errors / 2, 0
        for number, utterance in enumerate(self.worst(len(self.utterances)), 1):
            found += utterance.errors.errors
            if found >= half:
                return number
        return 0

    def duration_limits(self) -> list[float]:
        """Limits of groups of similar duration in seconds; empty if durations are unknown."""
        known = sorted(u.seconds for u in self.utterances if u.seconds is not None)
        if not known:
            return []
        lowest, highest = known[0], known[min(len(known) - 1, int(_SHORT_SHARE * len(known)))]
        for width in _WIDTHS:
            first, last = int(lowest // width), int(highest // width) + 1
            if last - first < _MOST_GROUPS:
                break
        return [width * place for place in range(first, last + 1)]

    def by_duration(self, limits: Sequence[float]) -> list[GroupRate]:
        """Error rates of the utterances between these limits (seconds), where there are any."""
        groups: dict[int, list[ScoredUtterance]] = {}
        for utterance in self.utterances:
            if utterance.seconds is not None:
                groups.setdefault(bisect_right(limits, utterance.seconds), []).append(utterance)
        return [
            _group_rate(_between(limits, place), members)
            for place, members in sorted(groups.items())
        ]

    def by_speaker(self) -> list[GroupRate]:
        """Error rates of speakers, by name; empty if no utterance has one."""
        return self._by(lambda utterance: utterance.speaker)

    def by_language(self) -> list[GroupRate]:
        """Error rates of languages, by code; empty if no utterance has one."""
        return self._by(lambda utterance: utterance.language)

    def _by(self, name_of: Callable[[ScoredUtterance], str]) -> list[GroupRate]:
        groups: dict[str, list[ScoredUtterance]] = {}
        for utterance in self.utterances:
            if name := name_of(utterance):
                groups.setdefault(name, []).append(utterance)
        return [_group_rate(name, members) for name, members in sorted(groups.items())]


def score_result(
    result: ResultFile, details: CutDetails, decoded: Sequence[ResultUtterance]
) -> ScoredSet:
    """Align and count; utterances keep their order, on which the interval by bootstrap depends."""
    details = _of_decoded_audio(details, decoded)
    utterances = []
    too_long = [each.transcript.id for each in decoded if _is_too_long(each)]
    for each in decoded:
        transcript = each.transcript
        if transcript.id in too_long:
            continue
        utterances.append(
            ScoredUtterance(
                transcript=transcript,
                sentence=each.sentence,
                pairs=tuple(align_words(transcript.reference, transcript.hypothesis)),
                errors=count_errors([transcript]),
                seconds=details.seconds(transcript.id),
                speaker=details.speaker(transcript.id),
                language=each.language or details.language(transcript.id),
                words=each.words,
                tokens=each.tokens,
                audio=each.audio,
            )
        )
    problems = [details.problem] if details.problem else []
    if too_long:
        problems.append(
            f"{len(too_long):,} utterances with texts of thousands of characters are left out, "
            f"because it would take too long to align them (the first: {too_long[0][:100]})."
        )
    empty = sum(not utterance.transcript.reference for utterance in utterances)
    if empty and empty == len(utterances):
        problems.append(
            "No utterance has a reference text: there are no error rates, and every recognised "
            "word counts as an insertion."
        )
    elif empty:
        problems.append(
            f"{empty:,} utterances have no reference text; their words count as insertions."
        )
    return ScoredSet(
        result=result,
        unit="character" if result.counts_characters else "word",
        utterances=tuple(utterances),
        details=details,
        problems=tuple(problems),
    )


def _of_decoded_audio(details: CutDetails, decoded: Sequence[ResultUtterance]) -> CutDetails:
    """Without the cuts whose audio has another length than when it was decoded."""
    others = set()
    for each in decoded:
        name, seconds = each.transcript.id, details.seconds(each.transcript.id)
        if each.audio is None or seconds is None:
            continue
        # Of models with features of their own, the frames are samples.
        found = each.audio.frames / 100, each.audio.frames / SAMPLING_RATE
        if all(abs(seconds - length) > _SAME_SECONDS for length in found):
            others.add(name)
    if not others:
        return details
    problem = (
        f"The audio of {len(others):,} utterances has another length in the data than when they "
        "were decoded, and is not shown: the data were prepared again. Decode again, or add "
        "data.path=DIR with the data that were decoded."
    )
    return replace(
        details,
        cuts={name: cut for name, cut in details.cuts.items() if name not in others},
        problem=f"{details.problem} {problem}".strip(),
    )


def _is_too_long(decoded: ResultUtterance) -> bool:
    texts = decoded.transcript.reference, decoded.transcript.hypothesis
    reference, hypothesis = (sum(map(len, words)) for words in texts)
    return reference * hypothesis > _MOST_CELLS


def _between(limits: Sequence[float], place: int) -> str:
    """The name of the durations between two limits."""
    if place == 0:
        return f"under {limits[0]:g} s"
    if place == len(limits):
        return f"over {limits[-1]:g} s"
    return f"{limits[place - 1]:g}\N{EN DASH}{limits[place]:g} s"


def _group_rate(name: str, members: Sequence[ScoredUtterance]) -> GroupRate:
    return GroupRate(
        name=name,
        utterances=len(members),
        errors=sum((member.errors for member in members), ErrorCounts()),
        interval=_interval(members, _GROUP_REPLICATIONS),
    )


def _interval(
    members: Sequence[ScoredUtterance], replications: int = REPLICATIONS
) -> tuple[float, float]:
    errors = [member.errors.errors for member in members]
    words = [member.errors.reference_words for member in members]
    return rate_interval(errors, words, replications=replications)
