"""The diagnostics for the results of the losses, and the script for the README's picture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import diagnostics

SCRIPT = Path(__file__).parents[2] / "scripts" / "lattice_picture.py"
FRAMES, SYMBOLS = torch.tensor([30, 22, 30]), torch.tensor([9, 12, 0])


def scores(sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    am = sharpness * torch.randn(3, 30, 8, generator=generator)
    lm = sharpness * torch.randn(3, 13, 8, generator=generator)
    return am, lm, torch.randint(1, 8, (3, 12), generator=generator)


@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained"])
def test_more_columns_keep_more_and_lose_less(rnnt_type: str) -> None:
    am, lm, targets = scores(2.0)
    occupancy = pruned_rnnt.rnnt_loss_simple(
        am, lm, targets, FRAMES, SYMBOLS, rnnt_type=rnnt_type
    ).occupancy
    logits = am[:, :, None] + lm[:, None]
    full = pruned_rnnt.rnnt_loss(
        logits, targets, FRAMES, SYMBOLS, rnnt_type=rnnt_type, reduction="none"
    )
    kept, lost = [], []
    for s_range in (2, 4, 7, 13):
        bounds = pruned_rnnt.prune_bounds(occupancy, FRAMES, SYMBOLS, s_range, rnnt_type=rnnt_type)
        am_p, lm_p = pruned_rnnt.prune(am, lm, bounds)
        pruned = pruned_rnnt.rnnt_loss_pruned(
            am_p + lm_p, targets, bounds, FRAMES, SYMBOLS, rnnt_type=rnnt_type, reduction="none"
        )
        mass = diagnostics.retained_mass(occupancy, bounds, FRAMES, SYMBOLS, rnnt_type=rnnt_type)
        kept.append(mass.total.mean().item())
        lost.append((pruned - full).mean().item())
    assert kept == sorted(kept)
    assert lost == sorted(lost, reverse=True)
    # Bounds of `modified` count symbols beside blanks, and so lose less (0.993 kept).
    assert kept[0] < (0.995 if rnnt_type == "modified" else 0.99)
    assert lost[0] > 0.01
    assert kept[-1] == pytest.approx(1.0, abs=1e-5)
    assert lost[-1] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
def test_best_path_is_less_probable_than_all_paths(rnnt_type: str) -> None:
    am, lm, targets = scores(3.0)
    logits = am[:, :, None] + lm[:, None]
    lengths = (FRAMES, SYMBOLS)
    total = -pruned_rnnt.rnnt_loss(logits, targets, *lengths, rnnt_type=rnnt_type, reduction="none")
    rows = diagnostics.log_prob_rows(logits, targets, *lengths)
    best = diagnostics.viterbi_alignment(rows.emit, rows.blank, *lengths, rnnt_type=rnnt_type)
    assert (best.score <= total + 1e-4).all()
    # Without symbols there is only one path.
    assert best.score[2].item() == pytest.approx(total[2].item(), abs=1e-3)
    assert (best.score[:2] < total[:2] - 0.01).all()


def test_delay_penalty_makes_symbols_earlier() -> None:
    am, lm, targets = scores(1.0)
    means = []
    for penalty in (-0.3, 0.0, 0.3):
        occupancy = pruned_rnnt.rnnt_loss_simple(
            am, lm, targets, FRAMES, SYMBOLS, delay_penalty=penalty
        ).occupancy
        means.append(diagnostics.mean_symbol_delay(occupancy, FRAMES, SYMBOLS).mean.item())
    assert means[0] > means[1] + 1
    assert means[1] > means[2] + 1


def test_advice_for_a_narrow_band_is_sufficient() -> None:
    am, lm, targets = scores(1.0)
    occupancy = pruned_rnnt.rnnt_loss_simple(am, lm, targets, FRAMES, SYMBOLS).occupancy

    def report(s_range: int) -> diagnostics.BandEdgeMass:
        bounds = pruned_rnnt.prune_bounds(occupancy, FRAMES, SYMBOLS, s_range)
        return diagnostics.band_edge_mass(occupancy, bounds, FRAMES, SYMBOLS)

    narrow = report(3)
    assert f"try s_range={narrow.needed_s_range}" in narrow.advice
    assert "too small" not in report(narrow.needed_s_range).advice


@pytest.mark.slow
def test_picture_of_the_readme(tmp_path: Path) -> None:
    output = tmp_path / "new" / "lattice.png"
    result = subprocess.run(
        [sys.executable, SCRIPT, "--output", output],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
    )
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "the band keeps 100.00% of the probability" in result.stdout
