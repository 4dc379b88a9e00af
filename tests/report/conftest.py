"""The run that the pages of these tests show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.run_folders import write_run


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", corpus)
