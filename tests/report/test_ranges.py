"""The part of the page about activation ranges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pruned_rnnt.model.quantisation import LayerRange
from pruned_rnnt.report import report_command
from pruned_rnnt.report.clips import Clip
from pruned_rnnt.report.ranges import SHOWN_LAYERS, RangeSection, range_section
from pruned_rnnt.report.report_command import ReportOptions, make_report
from pruned_rnnt.report.scored_set import CutDetails
from tests.report.run_folders import parse, random_transcripts, write_decoded


def ranges(*ratios: float) -> list[LayerRange]:
    return [LayerRange(f"layers.{n}", n, ratio, 1.0, 0.031) for n, ratio in enumerate(ratios)]


def test_layers_beyond_the_limit_have_advice() -> None:
    section = range_section(ranges(40.0, 17.0, 16.0, *[2.0] * 9), 8, "conformer")
    assert section is not None
    assert (section.layers, section.beyond, len(section.rows)) == (12, 2, SHOWN_LAYERS)
    assert "--precision int8 --calibrate" in section.advice
    assert "balancers" not in section.advice
    zipformer = range_section(ranges(40.0), 8, "zipformer")
    assert zipformer is not None
    assert "balancers" in zipformer.advice


def test_without_outliers_there_is_no_advice() -> None:
    section = range_section(ranges(3.0), 8, "conformer")
    assert section is not None
    assert not section.advice
    assert range_section([], 8, "conformer") is None


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [40.0, 3.0])
def test_the_page_lists_the_worst_layers(
    run: Path, monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    for split in ("test", "dev"):
        write_decoded(run, random_transcripts(20, 0.2, 1), split)
    seen: list[int] = []

    def found_ranges(cuts: Sequence[Any]) -> tuple[RangeSection | None, str]:
        seen.append(len(cuts))
        return range_section(ranges(ratio, 1.5), 8, "conformer"), ""

    pictures = SimpleNamespace(ranges=found_ranges, clip=lambda *_: Clip("", "none"))
    monkeypatch.setattr(report_command, "_pictures", lambda *_: (pictures, ""))
    monkeypatch.setattr(
        report_command,
        "read_cut_details",
        lambda *_: CutDetails(cuts=dict.fromkeys(map(str, range(20)))),
    )
    page = parse(make_report(run, options=ReportOptions(audio=False, utterances=1)).html)
    assert seen == [8]
    (found,) = [each for each in page.find("section") if each.attributes.get("id") == "ranges"]
    rows = [[cell.text for cell in row.find("td")] for row in found.find("tr")]
    assert rows[1:] == [
        [f"{ratio:.1f}", f"{ratio:.2f}", "1.00", "0", "3.1%"],
        ["1.5", "1.50", "1.00", "1", "3.1%"],
    ]
    assert ("no outlier channels" in found.text) == (ratio < 16)
