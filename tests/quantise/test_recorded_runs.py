"""Runs of a graph that are kept for the comparison of its layers."""

from __future__ import annotations

import numpy as np
import pytest

from pruned_rnnt.quantise.measured_files import _joined, _SpreadRuns


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


def test_runs_of_a_graph_are_joined_along_the_batch() -> None:
    """The second axis of the states of models in NeMo's layout."""
    runs = [{"targets": np.full((1, 1), n), "states.1": np.full((2, 1, 3), n)} for n in range(4)]
    joined = _joined(runs)
    assert joined["targets"].shape == (4, 1)
    assert joined["states.1"].shape == (2, 4, 3)
    assert joined["states.1"][0, :, 0].tolist() == [0, 1, 2, 3]
