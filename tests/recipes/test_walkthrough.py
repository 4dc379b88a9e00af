"""The notebook of the synthetic recipe runs from its first cell to its last, in its small form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "recipes/synthetic/walkthrough.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.fixture
def pyplot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """pyplot without a screen; `show` collects the figures instead."""
    import matplotlib

    before = matplotlib.get_backend()
    matplotlib.use("agg", force=True)
    from matplotlib import pyplot

    pyplot.shown = []
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.shown.append(pyplot.gcf()))
    yield pyplot
    pyplot.close("all")
    matplotlib.use(before, force=True)


@pytest.mark.slow
def test_notebook_runs(
    pyplot: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SMALL", "1")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    names: dict[str, Any] = {"__name__": "__notebook__"}
    for cell in cells("code"):
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count("recognised: ") == 3
    total = names["total"]
    assert f"{names['kinds'].total()} errors in {total} words" in printed
    assert total == sum(len(cut.supervisions[0].text.split()) for cut in names["test"])
    spectrogram, curves, lattice, errors = pyplot.shown
    assert [len(line.get_xdata()) for line in curves.axes[0].lines] == [6] * 4
    assert [len(line.get_xdata()) for line in curves.axes[1].lines] == [2]
    assert spectrogram.axes[0].images[0].get_array().shape[0] == 80
    assert lattice.axes[0].images[0].get_array().shape[0] > 300
    bars = errors.axes[0].patches
    assert sum(bar.get_height() for bar in bars) == names["kinds"].total() > 0


def test_notebook_is_stored_without_output() -> None:
    for cell in cells("code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
