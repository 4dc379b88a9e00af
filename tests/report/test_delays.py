"""The emission delays of a report."""

from __future__ import annotations

from pathlib import Path

from pruned_rnnt.decode.emission_delay import WordDelay, delay_lines
from pruned_rnnt.report.report_command import make_report
from pruned_rnnt.report.set_section import delay_section
from pruned_rnnt.run.result_file import ResultFile
from pruned_rnnt.system.whole_files import write_lines
from tests.report.run_folders import NO_MEDIA, parse, transcript, write_decoded


def test_a_damaged_file_is_named(run: Path) -> None:
    stem = write_decoded(run, [transcript("a", "one", "one")])
    (run / "results" / f"delays-{stem}.jsonl").write_text('{"id": "a", "wo')
    page = parse(make_report(run, options=NO_MEDIA).html)
    assert f"delays-{stem}.jsonl, line 1 is damaged" in page.text


def test_histogram_and_percentiles(tmp_path: Path) -> None:
    result = ResultFile(
        folder=tmp_path, stem="test-greedy-step-7", set_name="test", setting="greedy-step-7"
    )
    assert delay_section(result, "a") is None
    delays = [WordDelay("one", n, 0.04, n == 0, n == 99) for n in range(100)]
    write_lines(result.delays_path, delay_lines([("utterance", delay) for delay in delays]))
    section = delay_section(result, "a")
    assert section is not None
    assert [tuple(row) for row in section.rows] == [
        ("All", 100, 1980, 3564, 3762, 3920),
        ("First of an utterance", 1, 0, 0, 0, 0),
        ("Last of an utterance", 1, 3960, 3960, 3960, 3960),
    ]
    assert "Emission delay. share of the words: 0 " in section.chart.description
    shares = [float(part.split()[-1].rstrip("%.")) for part in section.chart.description.split(",")]
    assert abs(sum(shares) - 100) < 3
