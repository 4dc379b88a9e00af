"""Best paths and occupancies of lattices with durations against all paths."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.diagnostics import (
    lattice_occupancy,
    log_prob_rows,
    occupancy_of_rows,
    occupancy_of_tdt_rows,
    tdt_log_prob_rows,
    tdt_viterbi_alignment,
)
from tests.loss.tdt_cases import every_small_tdt_batch, random_tdt_inputs
from tests.tdt_paths import TdtArc, TdtScores, tdt_paths, tdt_scores

DURATIONS = [(0, 1, 2, 3, 4), (2, 0, 1), (1, 3)]


def path_score(path: list[TdtArc], scores: TdtScores) -> float:
    return sum(
        float((scores.emit if arc.is_symbol else scores.blank)[arc.frame, arc.column])
        + float(scores.durations[arc.frame, arc.column, arc.duration])
        for arc in path
    )


@pytest.mark.parametrize("durations", DURATIONS)
def test_best_paths_and_occupancies_are_those_of_all_paths(durations: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    batch = every_small_tdt_batch(durations)
    inputs = random_tdt_inputs(batch, durations)
    lengths = batch.lengths("cpu")
    rows = tdt_log_prob_rows(*inputs, batch.targets, *lengths, blank=batch.blank)
    best = tdt_viterbi_alignment(rows, *lengths, durations=durations)
    occupancy = occupancy_of_tdt_rows(rows, *lengths, durations=durations)
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        nodes = [x[n, :, : symbols + 1].detach() for x in inputs]
        scores = tdt_scores(*nodes, batch.targets[n, :symbols].tolist(), batch.blank)
        paths = list(tdt_paths(frames, symbols, durations))
        weights = torch.tensor([path_score(path, scores) for path in paths], dtype=torch.float64)
        assert best.score[n].item() == pytest.approx(float(weights.max()))
        emitted = [arc for arc in paths[int(weights.argmax())] if arc.is_symbol]
        padding = [-1] * (batch.symbols - symbols)
        assert best.frames[n].tolist() == [arc.frame for arc in emitted] + padding
        taken = [durations[arc.duration] for arc in emitted]
        assert best.durations[n].tolist() == taken + padding
        expected = torch.zeros(occupancy.durations.shape[1:], dtype=torch.float64)
        stay = torch.zeros(expected.shape[:2], dtype=torch.float64)
        for path, share in zip(paths, weights.softmax(0), strict=True):
            for arc in path:
                expected[arc.frame, arc.column, arc.duration] += share
                if arc.is_symbol and durations[arc.duration] == 0:
                    stay[arc.frame, arc.column] += share
        torch.testing.assert_close(occupancy.durations[n], expected)
        torch.testing.assert_close(occupancy.stay[n], stay)
        torch.testing.assert_close((occupancy.emit + occupancy.blank)[n], expected.sum(-1))


def test_no_path_has_no_frames() -> None:
    rows = tdt_log_prob_rows(
        torch.randn(1, 2, 3, 4),
        torch.randn(1, 2, 3, 2),
        torch.ones(1, 2, dtype=torch.int32),
        *torch.tensor([[2], [2]]),
    )
    found = tdt_viterbi_alignment(rows, *torch.tensor([[2], [2]]), durations=(1, 2))
    assert found.score.tolist() == [-torch.inf]
    assert found.frames.tolist() == found.durations.tolist() == [[-1, -1]]


def test_lattice_occupancy_takes_both_kinds_of_rows() -> None:
    logits, targets = torch.randn(1, 3, 2, 4), torch.ones(1, 1, dtype=torch.int32)
    lengths = torch.tensor([[3], [1]])
    plain = log_prob_rows(logits, targets, *lengths)
    wanted = occupancy_of_rows(plain, *lengths, rnnt_type="modified")
    found = lattice_occupancy(plain, *lengths, rnnt_type="modified")
    torch.testing.assert_close(found, wanted)
    rows = tdt_log_prob_rows(logits, torch.randn(1, 3, 2, 2), targets, *lengths)
    assert lattice_occupancy(rows, *lengths, durations=(0, 1)).durations.shape == (1, 3, 2, 2)
