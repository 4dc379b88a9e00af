"""Runs of a graph that are kept for the comparison of its layers."""

from __future__ import annotations

import numpy as np
import pytest

from pruned_rnnt.quantise.recorded_runs import _SpreadRuns


@pytest.mark.parametrize("number", [1, 12, 23, 24, 100, 5000])
def test_kept_runs_are_evenly_spread(number: int) -> None:
    runs = _SpreadRuns(12)
    for place in range(number):
        runs.add({"x": np.array([place])})
    places = [int(feeds["x"][0]) for feeds in runs.kept]
    assert min(number, 12) <= len(places) < 24
    assert places[0] == 0
    assert len(set(np.diff(places))) <= 1
    assert places[-1] >= number - 1 - number // 12
