"""get_rnnt_prune_ranges and do_rnnt_pruning: k2's rule, step by step, in plain Python."""

import warnings

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import k2, k2_pruning
from tests.compat.batches import BLANK, VOCABULARY, batch


def rule(px_grad: Tensor, py_grad: Tensor, boundary: Tensor, s_range: int) -> list[list[int]]:
    """First kept column of each frame: best window, pinned end, monotone, no skipped symbol."""
    batch, columns, frames = py_grad.shape
    regular = px_grad.shape[2] == frames + 1
    step = s_range - 1 if regular else 1
    result = []
    for n in range(batch):
        symbols, length = boundary[n, 2:].tolist()
        end = max(symbols - s_range + 1, 0)
        starts = []
        for t in range(frames):
            if t >= length - 1:
                starts.append(end)
                continue
            scores = []
            for s in range(columns - s_range + 1):  # up to the padded S
                kept = float(py_grad[n, s : s + s_range, t].sum())
                entering = float(px_grad[n, s - 1, t]) if s else 0.0
                emitted = float(px_grad[n, s : s + s_range, t].sum())
                scores.append(kept - entering if regular else kept + emitted)
            best = max(scores)
            tied = [s for s, score in enumerate(scores) if score >= best - 1e-5]
            starts.append(tied[(len(tied) - 1) // 2])
        for t in reversed(range(frames - 1)):
            starts[t] = min(starts[t], starts[t + 1])
        for t in reversed(range(frames - 1)):
            starts[t] = max(starts[t], starts[t + 1] - step)
        result.append([min(s, step * t) for t, s in enumerate(starts)])
    return result


def occupancies(rnnt_type: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    am = 3 * torch.randn(4, 14, 6, generator=generator, dtype=torch.float64)
    lm = 3 * torch.randn(4, 10, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, 6, (4, 9), generator=generator)
    boundary = torch.tensor([[0, 0, 9, 14], [0, 0, 3, 14], [0, 0, 6, 8], [0, 0, 2, 9]])
    _, (px_grad, py_grad) = k2.rnnt_loss_simple(
        lm, am, targets, 0, boundary, rnnt_type, return_grad=True
    )
    return px_grad, py_grad, boundary


@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained"])
@pytest.mark.parametrize("s_range", [2, 3, 5, 9])
@pytest.mark.parametrize("seed", range(3))
def test_ranges_follow_the_rule(rnnt_type: str, s_range: int, seed: int) -> None:
    px_grad, py_grad, boundary = occupancies(rnnt_type, seed)
    ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, s_range)
    assert ranges.dtype == torch.int64
    assert ranges.shape == (4, 14, s_range)
    assert ranges[:, :, 0].tolist() == rule(px_grad, py_grad, boundary, s_range)
    assert (ranges - ranges[:, :, :1] == torch.arange(s_range)).all()
    assert (ranges <= 9).all()


def test_strided_occupancies() -> None:
    px_grad, py_grad, boundary = occupancies("regular", 0)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (px_grad, py_grad)]
    torch.testing.assert_close(
        k2.get_rnnt_prune_ranges(*strided, boundary, 4),
        k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 4),
    )


def test_a_large_s_range_keeps_every_column() -> None:
    px_grad, py_grad, boundary = occupancies("regular", 0)
    for s_range in (10, 11, 50):
        ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, s_range)
        assert ranges.tolist() == [[list(range(10))] * 14] * 4


def test_a_small_s_range_is_raised_with_one_warning() -> None:
    """9 symbols in 3 frames need 4 columns a frame."""
    px_grad, py_grad = torch.rand(1, 9, 4), torch.rand(1, 10, 3)
    boundary = torch.tensor([[0, 0, 9, 3]])
    k2_pruning._WARNED.clear()
    message = "s_range=2 cannot reach .* utterance 0, which has 9 symbols in 3 frames.*s_range=4"
    with pytest.warns(UserWarning, match=message) as caught:
        ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 2)
    assert caught[0].filename == __file__
    assert ranges.shape == (1, 3, 4)
    assert ranges[0, 0, 0] == 0
    assert ranges[0, -1, -1] == 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 2)
        k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 4)
    assert again.tolist() == ranges.tolist()
    with pytest.warns(UserWarning, match="utterance 1, which has 8 symbols in 2 .*s_range=5"):
        k2.get_rnnt_prune_ranges(
            px_grad.expand(2, 9, 4),
            py_grad.expand(2, 10, 3),
            torch.tensor([[0, 0, 1, 3], [0, 0, 8, 2]]),
            2,
        )


@pytest.mark.parametrize("s_range", [0, 1])
@pytest.mark.parametrize("name", ["get_rnnt_prune_ranges", "get_rnnt_prune_ranges_deprecated"])
def test_what_has_no_path_is_refused_and_not_raised(name: str, s_range: int) -> None:
    """As in k2, whose assertion it is."""
    px_grad, py_grad, boundary = occupancies("regular", 0)
    with pytest.raises(ValueError, match=f"s_range is {s_range}; it must be at least 2"):
        getattr(k2, name)(px_grad, py_grad, boundary, s_range)


def test_a_reference_without_frames_widens_nothing() -> None:
    """It has no path in any number of columns."""
    data = batch()
    boundary = data.boundary.clone()
    boundary[0, 3] = 0
    arguments = (data.lm, data.am, data.targets, BLANK, boundary)
    _, grads = k2.rnnt_loss_simple(*arguments, return_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranges = k2.get_rnnt_prune_ranges(*grads, boundary, 2)
    assert ranges.shape == (4, 4, 2)
    index = ranges[..., None].expand(-1, -1, -1, VOCABULARY)
    loss = k2.rnnt_loss_pruned(
        data.logits.gather(2, index), data.targets, ranges, BLANK, boundary, reduction="none"
    )
    assert loss[0] == torch.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"s_range": 0}, "s_range is 0; it must be at least 1, or no path is left"),
        ({"px_grad": torch.zeros(1, 4, 9)}, r"px_grad has shape \(1, 4, 9\).*\(1, 5, 6\)"),
        ({"boundary": torch.zeros(1, 3).long()}, r"boundary has shape \(1, 3\); .*\(1, 4\)"),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    good = {
        "px_grad": torch.zeros(1, 4, 6),
        "py_grad": torch.zeros(1, 5, 6),
        "boundary": torch.tensor([[0, 0, 0, 6]]),
        "s_range": 3,
    }
    with pytest.raises(ValueError, match=message):
        k2.get_rnnt_prune_ranges(**{**good, **change})


def test_pruning_picks_columns_and_sends_gradients_back() -> None:
    am = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    lm = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    ranges = torch.tensor([[[0, 1], [1, 2], [3, 4]], [[0, 1], [0, 1], [2, 3]]])
    am_pruned, lm_pruned = k2.do_rnnt_pruning(am=am, lm=lm, ranges=ranges)
    assert am_pruned.shape == lm_pruned.shape == (2, 3, 2, 4)
    wanted_lm = torch.stack([lm[n][ranges[n]] for n in range(2)])
    torch.testing.assert_close(lm_pruned, wanted_lm)
    torch.testing.assert_close(am_pruned, am[:, :, None].expand_as(am_pruned))
    weight = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    got = torch.autograd.grad((am_pruned * lm_pruned * weight).sum(), (am, lm))
    wanted = torch.autograd.grad((am[:, :, None] * wanted_lm * weight).sum(), (am, lm))
    torch.testing.assert_close(got, wanted)
