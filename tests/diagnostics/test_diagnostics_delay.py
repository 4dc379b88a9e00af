"""mean_symbol_delay against path posteriors."""

import math

import pytest
import torch

from pruned_rnnt.diagnostics import mean_symbol_delay
from tests.lattice_paths import paths, posteriors, random_rows, weight

LENGTHS = [(4, 3), (3, 1), (4, 0)]
FRAMES = torch.tensor([4, 3, 4])
SYMBOLS = torch.tensor([3, 1, 0])


@pytest.mark.parametrize("rnnt_type", ["regular", "modified"])
def test_expected_frames(rnnt_type: str) -> None:
    rows = random_rows(3, 4, 3, seed=5)
    occupancy = posteriors(rows.emit, rows.blank, LENGTHS, rnnt_type)
    result = mean_symbol_delay(occupancy, FRAMES, SYMBOLS)
    for n, (t_n, u_n) in enumerate(LENGTHS):
        weighted = [
            (math.exp(weight(p, rows.emit[n], rows.blank[n], rnnt_type)), p)
            for p in paths(t_n, u_n, rnnt_type)
        ]
        total = sum(w for w, _ in weighted)
        for u in range(3):
            if u >= u_n:
                assert result.frames[n, u].isnan()
                continue
            expected = sum(
                w * arc.frame for w, p in weighted for arc in p if arc.is_symbol and arc.column == u
            )
            assert result.frames[n, u].item() == pytest.approx(expected / total)
    assert result.mean.item() == pytest.approx(result.frames.nanmean().item())


def test_delay_against_reference_times() -> None:
    rows = random_rows(3, 4, 3, seed=6)
    occupancy = posteriors(rows.emit, rows.blank, LENGTHS)
    free = mean_symbol_delay(occupancy, FRAMES, SYMBOLS)
    reference = torch.tensor([[0.5, math.nan, 2.0], [1.0, 7.0, 7.0], [7.0, 7.0, 7.0]])
    result = mean_symbol_delay(occupancy, FRAMES, SYMBOLS, reference)
    known = [free.frames[0, 0] - 0.5, free.frames[0, 2] - 2.0, free.frames[1, 0] - 1.0]
    assert result.delay[0, 0].item() == pytest.approx(known[0].item())
    assert result.delay[0, 1].isnan()
    assert result.mean.item() == pytest.approx(sum(k.item() for k in known) / 3)


def test_no_symbols_give_nan() -> None:
    rows = random_rows(1, 3, 0, seed=0)
    occupancy = posteriors(rows.emit, rows.blank, [(3, 0)])
    result = mean_symbol_delay(occupancy, torch.tensor([3]), torch.tensor([0]))
    assert result.frames.shape == (1, 0)
    assert result.mean.isnan()


def test_reference_of_wrong_shape_is_an_error() -> None:
    rows = random_rows(1, 3, 2, seed=0)
    with pytest.raises(ValueError, match=r"reference_frames has shape \(1, 3\).*\(1, 2\)"):
        mean_symbol_delay(rows, torch.tensor([3]), torch.tensor([2]), torch.zeros(1, 3))
