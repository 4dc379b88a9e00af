"""`python -m scripts.word_time_errors`: which lines it prints, without training a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pruned_rnnt.decode.calibration import Calibration, SymbolTimes, save_calibration
from scripts import word_time_errors
from scripts.word_time_errors import TimeErrors, main, time_errors

SIZE = 3


@pytest.fixture(autouse=True)
def _run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(model=SimpleNamespace(vocab_size=SIZE), tokenizer=None)
    monkeypatch.setattr(word_time_errors, "load_run_and_split", lambda: (tmp_path, loaded, []))


def errors_of(*args: Any) -> TimeErrors:
    return TimeErrors(torch.full((2,), 0.25 if args[-1] is None else 0.125), torch.zeros(2))


def test_a_calibrated_line_needs_calibrated_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(word_time_errors, "time_errors", errors_of)
    main()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("without calibration: 2 words, starts off by 250 ms")
    save_calibration(tmp_path, Calibration(times=None, confidence=None, source="dev"))
    main()
    assert capsys.readouterr().out.splitlines() == [line]
    times = SymbolTimes(before=(0.0,) * SIZE, after=(0.0,) * SIZE)
    save_calibration(tmp_path, Calibration(times=times, confidence=None, source="dev"))
    main()
    first, second = capsys.readouterr().out.splitlines()
    assert first == line
    assert second.startswith("calibrated: 2 words, starts off by 125 ms")


def test_a_set_without_word_times_is_refused() -> None:
    model: Any = None
    with pytest.raises(ValueError, match="name a set with word times"):
        time_errors(model, model, [], None)
