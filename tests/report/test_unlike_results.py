"""`report --other` compares like with like, and otherwise says what differs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pruned_rnnt.report.comparison import compare, partner
from pruned_rnnt.report.report_command import make_report
from pruned_rnnt.report.scored_set import CutDetails, ScoredSet, score_result
from pruned_rnnt.run.result_file import ResultFile, find_results
from tests.report import run_folders as runs

WORSE = runs.random_transcripts(60, 0.4, seed=1)
BETTER = runs.random_transcripts(60, 0.1, seed=2)
NAMES = ("run", "other")


def scored(run: Path, transcripts: list[Any], **options: Any) -> ScoredSet:
    stem = runs.write_decoded(run, transcripts, **options)
    (result,) = [each for each in find_results(run) if each.stem == stem]
    return score_result(result, CutDetails(), result.read()[0])


def verdict(tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Of two runs; the second one makes fewer errors."""
    sets = [
        scored(tmp_path / name, transcripts, **options)
        for name, transcripts, options in zip(NAMES, (WORSE, BETTER), (first, second), strict=True)
    ]
    return compare(*sets).verdict(NAMES)


def test_equal_settings(tmp_path: Path) -> None:
    assert "is significant at the 5% level" in verdict(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"label": "modified_beam"}, "decode.method: greedy, modified_beam"),
        ({"settings": {"use_average": False}}, "decode.use_average: not used, False"),
        ({"files": {"fusion.hotwords": "ab"}}, "decode.fusion.hotwords: not used, ab"),
    ],
)
def test_other_settings(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    found = verdict(tmp_path, {}, changes)
    assert named in found
    assert "significant" not in found


def test_settings_of_one_model_are_compared(tmp_path: Path) -> None:
    both = {"model": "m"}
    found = verdict(tmp_path, both, {**both, "label": "modified_beam"})
    assert "is significant at the 5% level" in found


def test_other_audio(tmp_path: Path) -> None:
    found = verdict(tmp_path, {"audio": (100, -9.0)}, {"audio": (100, -8.9)})
    assert found == "Nothing to compare: the audio of 60 utterances differs."
    assert "is significant" in verdict(
        tmp_path / "b", {"audio": (100, -9.0)}, {"audio": (100, -9.0001)}
    )


def test_audio_of_data_that_were_prepared_again_is_not_shown(tmp_path: Path) -> None:
    stem = runs.write_decoded(tmp_path, WORSE[:4], audio=(100, -9.0))
    (result,) = [each for each in find_results(tmp_path) if each.stem == stem]
    names = [each.id for each in WORSE[:4]]
    lengths = (1.0, 1.04, 1.6, 100 / 16000)  # of models with features of their own: samples
    cuts = {
        n: SimpleNamespace(duration=s, supervisions=[]) for n, s in zip(names, lengths, strict=True)
    }
    found = score_result(result, CutDetails(cuts=cuts), result.read()[0])
    assert list(found.details.cuts) == [names[0], names[1], names[3]]
    assert found.utterances[2].seconds is None
    (problem,) = found.problems
    assert problem.startswith("The audio of 1 utterances has another length in the data than")
    whole = score_result(result, CutDetails(cuts=dict(list(cuts.items())[:2])), result.read()[0])
    assert whole.problems == ()


def test_nothing_in_common_has_no_error_rates(tmp_path: Path) -> None:
    found = compare(
        scored(tmp_path / "run", WORSE[:3]),
        scored(tmp_path / "other", WORSE[3:6]),
    )
    assert found.verdict(NAMES).startswith("Nothing to compare")
    assert not found.pairs


def test_results_without_their_inputs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    runs.write_old_decoded(run, WORSE)
    (result,) = find_results(run)
    old = score_result(result, CutDetails(), result.read()[0])
    found = compare(old, scored(tmp_path / "other", BETTER)).verdict(NAMES)
    assert "settings of test-greedy-step-00000004 are unknown" in found
    assert "significant" not in found


def test_partners(tmp_path: Path) -> None:
    def only(folder: str, **options: Any) -> ResultFile:
        stem = runs.write_decoded(tmp_path / folder, WORSE[:2], **options)
        return next(each for each in find_results(tmp_path / folder) if each.stem == stem)

    first = only("run")
    beam = only("other", label="modified_beam")
    greedy = only("other")
    elsewhere = only("other", data="calls", own_data=False)
    changed = only("other", utterances="other data")
    assert partner(first, [beam, greedy]) == greedy
    assert partner(first, [beam]) == beam
    assert partner(first, [changed, elsewhere]) == elsewhere
    assert partner(first, [changed]) == changed
    assert partner(first, [only("other", split="dev", utterances="dev data")]) is None


@pytest.mark.slow
def test_page_of_unlike_results(tmp_path: Path, corpus: Path) -> None:
    first, second = (runs.write_run(tmp_path / name, corpus) for name in NAMES)
    stem = runs.write_decoded(first, WORSE)
    runs.write_decoded(second, BETTER, label="modified_beam")
    page = runs.parse(make_report(first, second, runs.NO_MEDIA).html)
    (card,) = page.find("div", class_="comparison")
    assert "decode.method: greedy, modified_beam" in card.text
    assert "p-value" not in card.text
    os.utime(first / "results" / f"nbest-{stem}.jsonl", (1e9, 1e9))
    os.utime(first / "results" / f"recogs-{stem}.txt", (1e9, 1e9))
    runs.write_decoded(first, WORSE, label="greedy-left8", settings={"left": 8})
    runs.write_decoded(second, BETTER)
    page = runs.parse(make_report(first, second, runs.NO_MEDIA).html)
    (card,) = page.find("div", class_="comparison")
    assert "p-value" in card.text
    assert "significant at the 5% level" in card.text
    older = [row.text for row in page.find("tr", class_="older")]
    assert len(older) == 2
    assert any("greedy-left8" in text for text in older)
