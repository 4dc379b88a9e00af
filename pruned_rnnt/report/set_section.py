"""The part of the page about one decoded set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pruned_rnnt.report.charts import Bars, Chart, bar_chart
from pruned_rnnt.report.comparison import Comparison
from pruned_rnnt.report.delays import DelaySection, delay_section
from pruned_rnnt.report.ranges import RangeSection
from pruned_rnnt.report.scored_set import GroupRate, ScoredSet
from pruned_rnnt.report.tables import (
    Table,
    change_table,
    confusion_table,
    group_table,
    lost_table,
    utterance_table,
    word_table,
)
from pruned_rnnt.report.worst import WorstUtterance


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
    return SetSection(
        key=key,
        scored=scored,
        comparison=comparison,
        durations=_duration_chart(key, scored, comparison, names),
        duration_rows=scored.by_duration(scored.duration_limits()),
        delays=delay_section(scored.result, key),
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
        problems=[*scored.problems, *problems],
        left_out=left_out,
        ranges=ranges,
    )


def _duration_chart(
    key: str, scored: ScoredSet, comparison: Comparison | None, names: Sequence[str]
) -> Chart | None:
    limits = scored.duration_limits()
    groups = scored.by_duration(limits)
    if not groups:
        return None
    labels = [group.name for group in groups]
    bars = [_bars(names[0], labels, groups, 0)]
    if comparison is not None:
        others = comparison.second.by_duration(limits)
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
