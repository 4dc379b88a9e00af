"""The run that the pages of these tests show, and its charts, each of which is drawn once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pruned_rnnt.report import training_charts
from pruned_rnnt.report.charts import Chart, Line, line_chart
from tests.report.run_folders import write_run

_drawn: dict[str, Chart | None] = {}


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", corpus)


@pytest.fixture(autouse=True)
def charts_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests show the same curves, whose drawing takes most of the time of a page."""

    def drawn(title: str, lines: Sequence[Line], **options: Any) -> Chart | None:
        key = repr((title, lines, options))
        if key not in _drawn:
            _drawn[key] = line_chart(title, lines, **options)
        return _drawn[key]

    monkeypatch.setattr(training_charts, "line_chart", drawn)
