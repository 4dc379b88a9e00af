"""Result files as `decode` writes them, whole, in parts, and of several sets."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from pruned_rnnt.decode.scoring.error_rates import Transcript
from pruned_rnnt.run.result_file import find_results
from pruned_rnnt.run.results import measurement_path, read_measurement
from pruned_rnnt.train.engine.log import RunLog
from pruned_rnnt.train.inspection import inspect_run
from tests.report.run_folders import transcript, write_decoded, write_old_decoded

DECODED = [
    transcript("u-1", "über den wolken", "über wolken"),
    transcript("u-2", "", "noise"),
    transcript("u-3", "it's <b>", "it's <b>"),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_old_decoded(tmp_path, DECODED)
    return tmp_path


def test_results_are_named_by_set_and_setting(run: Path) -> None:
    for split, suffix in (
        ("test-clean-100", "ctc_greedy-chunk16-step-00000004"),
        ("dev", "modified_beam-beam8-step-00000004-average-last-3"),
        ("dev", "greedy-best"),
    ):
        write_old_decoded(run, DECODED, split, suffix)
    found = {(result.split, result.setting) for result in find_results(run)}
    assert found == {
        ("test", "greedy-step-00000004"),
        ("test-clean-100", "ctc_greedy-chunk16-step-00000004"),
        ("dev", "modified_beam-beam8-step-00000004-average-last-3"),
        ("dev", "greedy-best"),
    }
    assert {result.split for result in find_results(run, "greedy*")} == {"test", "dev"}


def test_newest_result_comes_first(run: Path) -> None:
    write_old_decoded(run, DECODED, suffix="modified_beam-step-00000004")
    for path in (run / "results").glob("*greedy*"):
        os.utime(path, (2e9, 2e9))
    assert next(r.setting for r in find_results(run)) == "greedy-step-00000004"


def test_nbest_file_has_times(run: Path) -> None:
    (result,) = find_results(run)
    utterances, damaged = result.read()
    assert [each.transcript for each in utterances] == DECODED
    assert damaged == 0
    assert [word.word for word in utterances[0].words] == ["über", "wolken"]
    assert utterances[0].words[1].start == pytest.approx(0.1)
    assert [token.name for token in utterances[1].tokens] == ["noise"]


def test_recogs_file_alone_is_enough(run: Path) -> None:
    (result,) = find_results(run)
    result.nbest_path.unlink()
    (result,) = find_results(run)
    utterances, damaged = result.read()
    assert [each.transcript for each in utterances] == DECODED
    assert (damaged, utterances[0].words) == (0, ())


def test_file_that_is_being_written(run: Path) -> None:
    (result,) = find_results(run)
    text = result.nbest_path.read_text(encoding="utf-8")
    result.nbest_path.write_text(text[: len(text) * 2 // 3], encoding="utf-8")
    utterances, damaged = result.read()
    assert [each.transcript for each in utterances] == DECODED[: len(utterances)]
    assert 0 < len(utterances) < 3
    assert damaged == 1


def test_characters_of_a_result_that_counts_them(tmp_path: Path) -> None:
    write_old_decoded(tmp_path, DECODED, suffix="greedy-cer-step-00000004", metric="CER")
    (result,) = find_results(tmp_path)
    assert result.counts_characters
    expected = [each.characters() for each in DECODED]
    assert [each.transcript for each in result.read()[0]] == expected
    result.nbest_path.unlink()
    assert [each.transcript for each in result.read()[0]] == expected


def test_sets_without_reference_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stem = write_decoded(run, [transcript("a", "", "word")])
    (result,) = [each for each in find_results(run) if each.inputs is not None]
    summary = result.summary()
    assert summary is not None
    assert math.isnan(summary.percent)
    with RunLog(run, 0, loggers=[]) as log:
        log.scalars("train", 1, {"epoch": 0})
    inspect_run(run, Console())
    assert f"result {stem}: WER of no words\n" in capsys.readouterr().out
    folder = result.folder
    errors = folder / f"errs-{stem}.txt"
    errors.write_text(errors.read_text().replace("= nan", "= 0.00"))  # as version 0.2 wrote it
    summary = result.summary()
    assert summary is not None
    assert math.isnan(summary.percent)

    scores = measurement_path(folder, stem)
    text = scores.read_text()
    json.loads(text, parse_constant=pytest.fail)
    assert math.isnan(read_measurement(scores).words.upper)
    # Version 0.2 wrote NaN, which is no JSON.
    scores.write_text(text.replace('"upper": null', '"upper": NaN'))
    assert math.isnan(read_measurement(scores).words.upper)
    write_decoded(run, [transcript("a", "one", "one")], "dev")
    all_scores = json.loads((folder / "scores.json").read_text(), parse_constant=pytest.fail)
    assert sorted(line["words"]["upper"] is None for line in all_scores) == [False, True]


def recogs_alone(run: Path, *lines: str) -> tuple[list[Transcript], int]:
    (result,) = find_results(run)
    result.nbest_path.unlink()
    result.recogs_path.write_text("".join(f"{line}\n" for line in lines))
    utterances, damaged = result.read()
    return [each.transcript for each in utterances], damaged


def test_recogs_file_with_times(run: Path) -> None:
    lines = ["a:\tref=['x']", "a:\thyp=['y']", "a:\ttimestamp_hyp=[0.04]"]
    assert recogs_alone(run, *lines) == ([transcript("a", "x", "y")], 0)


@pytest.mark.parametrize("damaged", ["", "b:\thyp=5", "b:\thyp='x y'", "b:\thyp=[5]", "b:\thyp=['"])
def test_utterances_of_a_damaged_recogs_file_are_counted(run: Path, damaged: str) -> None:
    lines = ["a:\tref=['x']", "a:\thyp=[]", "b:\tref=['x']", damaged]
    assert recogs_alone(run, *lines) == ([transcript("a", "x", "")], 1)


def test_scores_without_the_data_of_their_configuration(tmp_path: Path) -> None:
    stem = write_decoded(tmp_path, DECODED, own_data=False, data="moved")
    scores = measurement_path(tmp_path / "results", stem)
    values = json.loads(scores.read_text())
    values["configuration"]["data"] = None
    scores.write_text(json.dumps(values))
    (result,) = find_results(tmp_path)
    assert (result.set_name, result.data_path) == ("test@moved", "")
