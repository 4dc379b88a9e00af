"""The part of the page about one decoded set: charts, tables, and the worst utterances with their
audio, pictures and aligned texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pruned_rnnt.decode.emission_delay import (
    PERCENTILES,
    WordDelay,
    percentile,
    read_delays,
)
from pruned_rnnt.report.charts import Bars, Chart, bar_chart
from pruned_rnnt.report.clips import ByteBudget, Clip, UtterancePictures, audio_clip
from pruned_rnnt.report.comparison import Comparison
from pruned_rnnt.report.ranges import RangeSection
from pruned_rnnt.report.scored_set import GroupRate, ScoredSet, ScoredUtterance
from pruned_rnnt.report.tables import (
    Table,
    change_table,
    confusion_table,
    group_table,
    lost_table,
    pair_letter,
    shown_pairs,
    utterance_table,
    word_table,
)
from pruned_rnnt.run.result_file import ResultFile

# Widths of the bars of delays in milliseconds; the smallest that needs no more than so many bars.
_WIDTHS = (20, 40, 80, 160, 320, 640, 1280)
_MOST_BARS = 24


class DelayRow(NamedTuple):
    """Percentiles in milliseconds."""

    name: str
    words: int
    p50: float
    p90: float
    p95: float
    p99: float


class DelaySection(NamedTuple):
    """The delays of a set as the template shows them."""

    chart: Chart
    rows: Sequence[DelayRow]


def delay_section(result: ResultFile, salt: str) -> DelaySection | None:
    """The delays that `decode` wrote; None if it wrote none, as for data without word times.

    Raises:
        ValueError: the file is damaged.
    """
    delays = [delay for _, delay in read_delays(result.delays_path)]
    if not delays:
        return None
    rows = [
        _delay_row("All", delays),
        _delay_row("First of an utterance", [delay for delay in delays if delay.first]),
        _delay_row("Last of an utterance", [delay for delay in delays if delay.last]),
    ]
    return DelaySection(_delay_chart(delays, salt), [row for row in rows if row.words])


def _delay_row(name: str, delays: Sequence[WordDelay]) -> DelayRow:
    seconds = [delay.seconds for delay in delays]
    found = (round(1000 * percentile(seconds, p)) if seconds else 0 for p in PERCENTILES)
    return DelayRow(name, len(delays), *found)


def _delay_chart(delays: Sequence[WordDelay], salt: str) -> Chart:
    milliseconds = [1000 * delay.seconds for delay in delays]
    # A few words with wrong times would make the bars of all others too wide.
    low, high = (1000 * percentile([d.seconds for d in delays], p) for p in (0.5, 99.5))
    width = next((w for w in _WIDTHS if high // w - low // w < _MOST_BARS), _WIDTHS[-1])
    first, last = int(low // width), int(high // width)
    counts = [0] * (last - first + 1)
    for value in milliseconds:
        counts[min(max(int(value // width), first), last) - first] += 1
    labels = [f"{width * place}" for place in range(first, last + 1)]
    unknown = float("nan")
    bars = Bars(
        label="share of the words",
        values=[count / len(delays) for count in counts],
        intervals=[(unknown, unknown)] * len(counts),
        colour=0,
    )
    # Every label would be too many.
    shown = [label if place % 4 == 0 else "" for place, label in enumerate(labels)]
    return bar_chart("Emission delay", shown, [bars], "milliseconds", salt=f"{salt}-delays")


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


@dataclass(frozen=True, kw_only=True)
class SetSection:
    """A decoded set as the template shows it.

    key: a name for ids in the page.
    problems: sentences about what is missing.
    left_out: number of clips that did not fit into the page.
    ranges: of the model's activations on the set; the first set alone has them.
    """

    key: str
    scored: ScoredSet
    comparison: Comparison | None
    durations: Chart | None
    duration_rows: Sequence[GroupRate]
    delays: DelaySection | None
    speakers: Table | None
    languages: Table | None
    lost: Table | None
    words: Table
    confusions: Table
    all_utterances: Table
    changes: Table | None
    worst: Sequence[WorstUtterance]
    problems: Sequence[str]
    left_out: int
    ranges: RangeSection | None

    @property
    def tables(self) -> list[Table]:
        found = [
            self.speakers,
            self.languages,
            self.lost,
            self.words,
            self.confusions,
            self.all_utterances,
            self.changes,
        ]
        return [table for table in found if table is not None]


def set_section(
    key: str,
    scored: ScoredSet,
    comparison: Comparison | None,
    names: Sequence[str],
    worst: Sequence[WorstUtterance],
    problems: Sequence[str],
    left_out: int,
    ranges: RangeSection | None = None,
) -> SetSection:
    """Make the charts and tables of a set.

    Args:
        key: different for each set.
        names: of the run, and of the other one if there is a comparison.
    """
    speakers, languages = scored.by_speaker(), scored.by_language()
    groups = scored.by_duration(scored.duration_limits())
    problems = [*scored.problems, *problems]
    delays = None
    try:
        delays = delay_section(scored.result, key)
    except ValueError as error:
        problems.append(f"No emission delays: {error}.")
    return SetSection(
        key=key,
        scored=scored,
        comparison=comparison,
        durations=_duration_chart(key, scored, groups, comparison, names),
        duration_rows=groups,
        delays=delays,
        speakers=group_table(speakers, f"{key}-speakers", "Speaker", scored.metric)
        if len(speakers) > 1
        else None,
        languages=group_table(languages, f"{key}-languages", "Language", scored.metric)
        if len(languages) > 1
        else None,
        lost=lost_table(scored, f"{key}-lost"),
        words=word_table(scored.statistics, f"{key}-words", scored.unit),
        confusions=confusion_table(scored.statistics, f"{key}-confusions"),
        all_utterances=utterance_table(scored, f"{key}-utterances"),
        changes=change_table(comparison, f"{key}-changes", (names[0], names[1]))
        if comparison
        else None,
        worst=worst,
        problems=problems,
        left_out=left_out,
        ranges=ranges,
    )


def _duration_chart(
    key: str,
    scored: ScoredSet,
    groups: Sequence[GroupRate],
    comparison: Comparison | None,
    names: Sequence[str],
) -> Chart | None:
    if not groups:
        return None
    labels = [group.name for group in groups]
    bars = [_bars(names[0], labels, groups, 0)]
    if comparison is not None:
        others = comparison.second.by_duration(scored.duration_limits())
        # The second set may have other utterances.
        labels += [group.name for group in others if group.name not in labels]
        bars = [_bars(names[0], labels, groups, 0), _bars(names[1], labels, others, 4)]
    shown = [
        label.removesuffix(" s").replace("over ", ">").replace("under ", "<") for label in labels
    ]
    return bar_chart(f"{scored.metric} by duration", shown, bars, "seconds", salt=key)


def _bars(label: str, labels: Sequence[str], groups: Sequence[GroupRate], colour: int) -> Bars:
    by_name = {group.name: group for group in groups}
    unknown = float("nan")
    return Bars(
        label=label,
        values=[by_name[n].errors.rate if n in by_name else unknown for n in labels],
        intervals=[by_name[n].interval if n in by_name else (unknown,) * 2 for n in labels],
        colour=colour,
    )
