"""viterbi_alignment, and best paths and occupancies of lattices with durations, against all paths
of small lattices.
"""

from __future__ import annotations

import math

import pytest
import torch

from pruned_rnnt import Bounds
from pruned_rnnt.diagnostics import (
    LogProbRows,
    lattice_occupancy,
    log_prob_rows,
    occupancy_of_rows,
    occupancy_of_tdt_rows,
    tdt_log_prob_rows,
    tdt_viterbi_alignment,
    viterbi_alignment,
)
from tests.lattice_paths import joiner_log_probs, paths, posteriors, random_rows, weight
from tests.loss.tdt_cases import every_small_tdt_batch, random_tdt_inputs
from tests.tdt_paths import TdtArc, TdtScores, tdt_paths, tdt_scores

LENGTHS = [(4, 3), (3, 0), (4, 1), (1, 0)]
DURATIONS = [(0, 1, 2, 3, 4), (2, 0, 1), (1, 3)]


@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
@pytest.mark.parametrize("seed", range(5))
def test_best_of_all_paths(rnnt_type: str, seed: int) -> None:
    rows = random_rows(4, 4, 3, seed)
    frames, symbols = (torch.tensor(x) for x in zip(*LENGTHS, strict=True))
    result = viterbi_alignment(rows.emit, rows.blank, frames, symbols, rnnt_type=rnnt_type)
    assert result.frames.shape == (4, 3)
    assert result.frames.dtype == torch.int32
    for n, (t_n, u_n) in enumerate(LENGTHS):
        scored = [
            (weight(p, rows.emit[n], rows.blank[n], rnnt_type), p)
            for p in paths(t_n, u_n, rnnt_type)
        ]
        best, path = max(scored, key=lambda pair: pair[0])
        emitted = [arc.frame for arc in path if arc.is_symbol]
        assert result.score[n].item() == pytest.approx(best, abs=1e-12)
        assert result.frames[n].tolist() == emitted + [-1] * (3 - u_n)


def test_more_symbols_than_frames_is_regular_only() -> None:
    rows = random_rows(1, 2, 4, seed=0)
    lengths = torch.tensor([2]), torch.tensor([4])
    regular = viterbi_alignment(rows.emit, rows.blank, *lengths)
    assert sorted(regular.frames[0].tolist()) == regular.frames[0].tolist()
    assert regular.score.isfinite().all()
    for rnnt_type in ("modified", "constrained", "rna"):
        none = viterbi_alignment(rows.emit, rows.blank, *lengths, rnnt_type=rnnt_type)
        assert none.score.item() == -math.inf
        assert none.frames[0].tolist() == [-1] * 4


@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
def test_band_equals_the_full_lattice_without_other_nodes(rnnt_type: str) -> None:
    rows = random_rows(3, 6, 4, seed=7)
    frames, symbols = torch.tensor([6, 5, 6]), torch.tensor([4, 2, 0])
    start = torch.tensor(
        [[0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.int32
    )
    band = Bounds(start, 3)
    columns = start[:, :, None] + torch.arange(3)
    outside = columns > 4
    index = columns.clamp(max=4).long()
    emit_band = rows.emit.gather(2, index).masked_fill(outside, -math.inf)
    blank_band = rows.blank.gather(2, index).masked_fill(outside, -math.inf)
    inside = torch.zeros_like(rows.emit, dtype=torch.bool).scatter(2, index, True)
    expected = viterbi_alignment(
        rows.emit.masked_fill(~inside, -math.inf),
        rows.blank.masked_fill(~inside, -math.inf),
        frames,
        symbols,
        rnnt_type=rnnt_type,
    )
    result = viterbi_alignment(
        emit_band, blank_band, frames, symbols, bounds=band, rnnt_type=rnnt_type
    )
    torch.testing.assert_close(result.score, expected.score)
    assert result.frames.tolist() == expected.frames.tolist()
    assert (result.score > -math.inf).all()


def test_equal_paths_emit_early() -> None:
    zeros = torch.zeros(1, 3, 2)
    result = viterbi_alignment(zeros, zeros, torch.tensor([3]), torch.tensor([1]))
    assert result.frames.tolist() == [[0]]


def test_padding_is_ignored() -> None:
    rows = random_rows(1, 3, 2, seed=3)
    padded = [torch.full((1, 6, 5), math.nan, dtype=torch.float64) for _ in range(2)]
    for target, source in zip(padded, rows, strict=True):
        target[:, :3, :3] = source
    lengths = torch.tensor([3]), torch.tensor([2])
    plain = viterbi_alignment(rows.emit, rows.blank, *lengths)
    other = viterbi_alignment(*padded, *lengths)
    assert other.frames[:, :2].tolist() == plain.frames.tolist()
    assert other.score.item() == plain.score.item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rnnt_type": "loose"},
            r"rnnt_type is 'loose'; it must be one of \['regular', 'modified'",
        ),
        (
            {"blank": torch.zeros(1, 2, 2)},
            r"blank has shape \(1, 2, 2\); it must be the shape of emit",
        ),
        (
            {"bounds": Bounds(torch.zeros(1, 3, dtype=torch.int32), 2)},
            "bounds has s_range=2; emit and blank have 3 columns",
        ),
    ],
)
def test_wrong_arguments_are_errors(change: dict[str, object], message: str) -> None:
    arguments = {
        "emit": torch.zeros(1, 3, 3),
        "blank": torch.zeros(1, 3, 3),
        "logit_lengths": torch.tensor([3]),
        "target_lengths": torch.tensor([2]),
    }
    with pytest.raises(ValueError, match=message):
        viterbi_alignment(**{**arguments, **change})


@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
def test_occupancy_is_the_posterior_of_each_arc(rnnt_type: str) -> None:
    emit, blank = random_rows(4, 4, 3, seed=5)
    frames, symbols = (torch.tensor(x) for x in zip(*LENGTHS, strict=True))
    columns = torch.arange(4)
    real = (columns[:, None] < frames[:, None, None]) & (columns <= symbols[:, None, None])
    rows = LogProbRows(
        emit.masked_fill(~real | (columns == symbols[:, None, None]), -math.inf),
        blank.masked_fill(~real, -math.inf),
    )
    found = occupancy_of_rows(rows, frames, symbols, rnnt_type=rnnt_type)
    expected = posteriors(rows.emit, rows.blank, LENGTHS, rnnt_type)
    torch.testing.assert_close(found.emit, expected.emit)
    blanks = expected.blank
    if rnnt_type == "constrained":
        blanks = blanks + torch.nn.functional.pad(expected.emit[:, :, :-1], (1, 0))
    torch.testing.assert_close(found.blank, blanks)


@pytest.mark.parametrize("hat", [False, True])
def test_log_prob_rows_of_logits_and_of_a_band(hat: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4, 4, 6, generator=generator, dtype=torch.float64)
    targets = torch.tensor([[0, 4, 3], [5, 1, 0]])
    frames, symbols = torch.tensor([4, 3]), torch.tensor([3, 2])
    rows = log_prob_rows(logits, targets, frames, symbols, blank=2, hat=hat)
    start = torch.tensor([[0, 0, 1, 2], [0, 0, 1, 1]], dtype=torch.int32)
    columns = start[:, :, None].long() + torch.arange(2)
    banded = logits.gather(2, columns[..., None].expand(-1, -1, -1, 6))
    band_rows = log_prob_rows(
        banded, targets, frames, symbols, bounds=Bounds(start, 2), blank=2, hat=hat
    )
    for n, (t_n, u_n) in enumerate([(4, 3), (3, 2)]):
        emit, none = joiner_log_probs(
            logits[n, :t_n, : u_n + 1], targets[n, :u_n].tolist(), 2, hat=hat
        )
        torch.testing.assert_close(rows.emit[n, :t_n, : u_n + 1], emit)
        torch.testing.assert_close(rows.blank[n, :t_n, : u_n + 1], none)
        inside = columns[n, :t_n]
        torch.testing.assert_close(band_rows.emit[n, :t_n], emit.gather(1, inside))
        torch.testing.assert_close(band_rows.blank[n, :t_n], none.gather(1, inside))


def test_log_prob_rows_of_wrong_width_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"targets has shape \(1, 4\); it must be \(N, U\)"):
        log_prob_rows(
            torch.zeros(1, 2, 3, 5), torch.ones(1, 4).int(), torch.tensor([2]), torch.tensor([4])
        )


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
    with pytest.raises(ValueError, match=r"durations is \(0, 1\), but rows are not of a TDT"):
        lattice_occupancy(plain, *lengths, durations=(0, 1))
    with pytest.raises(ValueError, match="rnnt_type is 'modified'; durations need"):
        lattice_occupancy(rows, *lengths, rnnt_type="modified", durations=(0, 1))


def test_rows_may_be_plain_tuples() -> None:
    logits, targets = torch.randn(1, 3, 2, 4), torch.ones(1, 1, dtype=torch.int32)
    lengths = torch.tensor([[3], [1]])
    plain = log_prob_rows(logits, targets, *lengths)
    found = occupancy_of_rows(tuple(plain), *lengths)
    torch.testing.assert_close(found, occupancy_of_rows(plain, *lengths))
    rows = tdt_log_prob_rows(logits, torch.randn(1, 3, 2, 2), targets, *lengths)
    for call in (occupancy_of_tdt_rows, tdt_viterbi_alignment):
        found = call(tuple(rows), *lengths, durations=(0, 1))
        torch.testing.assert_close(found, call(rows, *lengths, durations=(0, 1)))


def test_the_default_device_is_not_that_of_the_rows() -> None:
    rows = tdt_log_prob_rows(
        torch.randn(1, 3, 2, 4),
        torch.randn(1, 3, 2, 2),
        torch.ones(1, 1, dtype=torch.int32),
        *torch.tensor([[3], [1]]),
    )
    lengths = torch.tensor([[3], [1]])
    with torch.device("meta"):
        found = tdt_viterbi_alignment(rows, *lengths, durations=(0, 1))
    assert all(x.is_cpu for x in found)
