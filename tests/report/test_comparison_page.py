"""Two results side by side in the page, with the significance of the difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_USAGE
from pruned_rnnt.decode.scoring.error_rates import count_errors
from pruned_rnnt.decode.scoring.significance import paired_difference
from pruned_rnnt.report import report_command
from pruned_rnnt.report.report_command import ReportOptions, make_report
from pruned_rnnt.system.usage_errors import UsageError
from tests.report import run_folders as runs


def signed(rate: float) -> str:
    return f"{100 * rate:+.2f}".replace("-", "\u2212")


@pytest.mark.slow
def test_two_runs_with_significance(run: Path, corpus: Path, tmp_path: Path) -> None:
    other = runs.write_run(tmp_path / "other", corpus)
    first, second = (runs.random_transcripts(150, rate, seed=5) for rate in (0.3, 0.1))
    runs.write_decoded(run, first)
    runs.write_decoded(other, [*second[1:], runs.transcript("only here", "a", "b")])
    page = runs.parse(make_report(run, other, runs.NO_MEDIA).html)
    errors = [
        [count_errors([each]).errors for each in each_run[1:]] for each_run in (first, second)
    ]
    words = [len(each.reference) for each in first[1:]]
    expected = paired_difference(*errors, words)
    (card,) = page.find("div", class_="comparison")
    facts = {dt.text: dd.text for dt, dd in zip(card.find("dt"), card.find("dd"), strict=True)}
    assert facts["Difference"] == f"{signed(expected.difference)} points"
    interval = f"{signed(expected.lower)} to {signed(expected.upper)}"
    assert facts["95% interval"] == interval
    assert "is significant at the 5% level" in card.find("p", class_="verdict")[0].text
    assert "149 utterances are compared; 2 are left out" in card.text
    better = sum(b < a for a, b in zip(*errors, strict=True))
    assert facts["Utterances better, worse, equal"].startswith(f"{better}, ")
    changes = runs.table(page, "set-0-changes")["Change"]
    assert sorted(changes) == sorted(b - a for a, b in zip(*errors, strict=True) if a != b)
    charts = {figure.find("h3")[0].text: figure for figure in page.find("figure")}
    keys = [key.text for key in charts["Validation WER"].find("span", class_="key")]
    assert keys == ["run: WER", "other: WER"]


@pytest.mark.slow
def test_a_result_compared_with_two_sets_is_listed_once(
    run: Path, corpus: Path, tmp_path: Path
) -> None:
    other = runs.write_run(tmp_path / "other", corpus)
    transcripts = runs.random_transcripts(5, 0.3, seed=6)
    runs.write_decoded(run, transcripts, data="d", own_data=True)
    runs.write_decoded(run, transcripts, data="moved", own_data=False)
    runs.write_decoded(other, transcripts)
    page = runs.parse(make_report(run, other, runs.NO_MEDIA).html)
    (section,) = [each for each in page.find("section") if "results-title" in str(each.attributes)]
    rows = [row.find("td")[0].text.split()[0] for row in section.find("tr") if row.find("td")]
    assert len(page.find("div", class_="comparison")) == 2
    assert sorted(rows) == ["other", "run", "run"]


@pytest.mark.slow
def test_results_of_one_run_are_compared(run: Path) -> None:
    runs.write_decoded(run, runs.random_transcripts(30, 0.3, seed=6))
    runs.write_decoded(run, runs.random_transcripts(30, 0.2, seed=7), label="modified_beam")
    options = ReportOptions(result="greedy*", other_result="modified*", pictures=False)
    page = runs.parse(make_report(run, run, options).html)
    assert page.find("h1")[0].text == "greedy-step-00000004 and modified_beam-step-00000004"
    # The run is shown once.
    charts = {figure.find("h3")[0].text: figure for figure in page.find("figure")}
    keys = [key.text for key in charts["Validation WER"].find("span", class_="key")]
    assert keys == ["WER"]
    shown = [each.text for each in page.find("summary") if each.text.startswith("Validations")]
    assert shown == ["Validations of run"]
    with pytest.raises(UsageError, match=r"matches 'fast.*it has .*greedy-step-00000004"):
        make_report(run, options=ReportOptions(result="fast*"))


def test_problems_of_the_second_result_are_shown(run: Path, corpus: Path, tmp_path: Path) -> None:
    other = runs.write_run(tmp_path / "other", corpus)
    transcripts = runs.random_transcripts(5, 0.3, seed=6)
    runs.write_decoded(run, transcripts, utterances="test")
    for split in ("test", "dev"):
        stem = runs.write_decoded(other, transcripts, split, utterances=split)
        path = other / "results" / f"nbest-{stem}.jsonl"
        path.write_text(path.read_text().replace('{"id"', '{"i', 2))
    page = runs.parse(make_report(run, other, runs.NO_MEDIA).html)
    hints = [hint.text for hint in page.find("p", class_="hint")]
    damaged = [hint.partition(" damaged lines")[0] for hint in hints if "damaged" in hint]
    assert damaged == ["other, dev: 2", "other: 2"]


def test_validations_have_the_name_of_their_run(run: Path, corpus: Path, tmp_path: Path) -> None:
    other = runs.write_run(tmp_path / "other", corpus)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if "valid" not in line))
    page = runs.parse(make_report(run, other, runs.NO_MEDIA).html)
    shown = [each.text for each in page.find("summary") if each.text.startswith("Validations")]
    assert shown == ["Validations of other"]


def test_options_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[Path, Path | None, ReportOptions]] = []

    def make(run: Path, other: Path | None, options: ReportOptions, **_: object) -> None:
        seen.append((run, other, options))
        raise UsageError("seen")

    monkeypatch.setattr(report_command, "make_report", make)
    results = ["--result", "greedy*", "--other", "b", "--other-result", "modified*"]
    sizes = ["--utterances", "3", "--megabytes", "2", "--no-audio", "--no-pictures"]
    assert main(["report", "a", *results, *sizes]) == EXIT_USAGE
    options = ReportOptions(
        result="greedy*", other_result="modified*", utterances=3, megabytes=2.0,
        audio=False, pictures=False,
    )  # fmt: skip
    assert seen == [(Path("a"), Path("b"), options)]
    assert not Path("a").exists()


def test_results_of_another_run_need_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "a", "--other-result", "greedy*"]) == EXIT_USAGE
    assert "--other-result needs --other RUN" in capsys.readouterr().err
