"""The checks of k2's and fast_rnnt's test suites, with their examples and sizes."""

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import fast_rnnt, k2
from tests.compat.batches import oracle_losses

TYPES = ["regular", "modified", "constrained"]
# One utterance of 4 frames and 3 symbols; the blank is 2.
LM = torch.tensor([[[0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [2.0, 2.0, 0.0]]])
AM = torch.tensor([[[0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [0.0, 2.0, 4.0], [0.0, 3.0, 3.0]]])
SYMBOLS = torch.tensor([[0, 1, 0]])


def every_loss(
    lm: Tensor, am: Tensor, symbols: Tensor, blank: int, boundary: Tensor | None, rnnt_type: str
) -> list[Tensor]:
    """The same losses (B,) by every function that computes them."""
    px, py = k2.get_rnnt_logprobs(lm, am, symbols, blank, rnnt_type, boundary)
    arguments = (symbols, blank)
    options = {"boundary": boundary, "rnnt_type": rnnt_type, "reduction": "none"}
    logits = am.unsqueeze(2) + lm.unsqueeze(1)
    return [
        -k2.mutual_information_recursion(px, py, boundary),
        k2.rnnt_loss_simple(lm, am, *arguments, **options),
        k2.rnnt_loss_smoothed(lm, am, *arguments, 0.0, 0.0, **options),
        k2.rnnt_loss(logits, *arguments, **options),
        fast_rnnt.rnnt_loss(logits, *arguments, **options, return_grad=True)[0],
    ]


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_the_small_example(rnnt_type: str) -> None:
    (expected,) = oracle_losses(
        (AM.unsqueeze(2) + LM.unsqueeze(1)).double(), SYMBOLS, rnnt_type, blank=2, lengths=[(4, 3)]
    ).tolist()
    for loss in every_loss(LM, AM, SYMBOLS, 2, None, rnnt_type):
        assert loss.tolist() == pytest.approx([expected], rel=1e-5)


def test_the_small_example_without_symbols() -> None:
    blanks = (LM[:, :1] + AM).log_softmax(-1)[..., 2].sum()
    for loss in every_loss(LM[:, :1], AM, SYMBOLS[:, :0], 2, None, "regular"):
        assert loss.item() == pytest.approx(-blanks.item(), rel=1e-5)


@pytest.mark.parametrize("scales", [(0.0, 0.0), (0.0, 0.333), (0.2, 0.333)])
def test_constants_added_to_a_frame_change_nothing(scales: tuple[float, float]) -> None:
    torch.manual_seed(0)
    lm, am = LM + torch.randn(1, 4, 1), AM + torch.randn(1, 4, 1)
    loss = k2.rnnt_loss_smoothed(LM, AM, SYMBOLS, 2, *scales)
    torch.testing.assert_close(k2.rnnt_loss_smoothed(lm, am, SYMBOLS, 2, *scales), loss)


def random_batch(
    frames: list[int], symbols: list[int], vocabulary: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lm, am, symbols, boundary; the last symbol is the blank, which is not a target."""
    torch.manual_seed(1)
    batch, longest, most = len(frames), max(frames), max(symbols)
    boundary = torch.tensor([[0, 0, s, t] for s, t in zip(symbols, frames, strict=True)])
    lm = torch.randn(batch, most + 1, vocabulary, dtype=dtype)
    am = torch.randn(batch, longest, vocabulary, dtype=dtype)
    return lm, am, torch.randint(0, vocabulary - 1, (batch, most)), boundary


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_long_random_batches(rnnt_type: str) -> None:
    lm, am, symbols, boundary = random_batch(
        [300, 21, 150, 77, 299], [19, 3, 18, 7, 11], 100, torch.float32
    )
    first, *others = every_loss(lm, am, symbols, 99, boundary, rnnt_type)
    assert first.isfinite().all()
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_wider_bands_lose_less_and_the_widest_nothing(rnnt_type: str) -> None:
    lm, am, symbols, boundary = random_batch([90, 60, 75, 41], [30, 9, 24, 40], 10, torch.float64)
    options = {"boundary": boundary, "rnnt_type": rnnt_type, "reduction": "none"}
    _, grads = k2.rnnt_loss_simple(lm, am, symbols, 9, **options, return_grad=True)
    full = k2.rnnt_loss((am.unsqueeze(2) + lm.unsqueeze(1)).sigmoid(), symbols, 9, **options)
    means = []
    for s_range in (2, 7, 12, 22, 41):
        ranges = k2.get_rnnt_prune_ranges(*grads, boundary, s_range)
        am_pruned, lm_pruned = k2.do_rnnt_pruning(am, lm, ranges)
        logits = (am_pruned + lm_pruned).sigmoid()
        loss = k2.rnnt_loss_pruned(logits, symbols, ranges, 9, **options)
        assert (loss >= full - 1e-9).all()
        means.append(loss.mean().item())
    assert means == sorted(means, reverse=True)
    torch.testing.assert_close(loss, full)


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_few_symbols_in_every_topology(rnnt_type: str) -> None:
    """With s_range up to S + 1, and targets that may be the blank."""
    lm, am, _, boundary = random_batch([19, 12], [2, 1], 10, torch.float64)
    symbols = torch.tensor([[9, 3], [9, 9]])
    options = {"boundary": boundary, "rnnt_type": rnnt_type, "reduction": "none"}
    full = k2.rnnt_loss((am.unsqueeze(2) + lm.unsqueeze(1)).sigmoid(), symbols, 9, **options)
    _, grads = k2.rnnt_loss_simple(lm, am, symbols, 9, **options, return_grad=True)
    least = {"regular": 2, "modified": 1, "constrained": 2}[rnnt_type]
    for s_range in range(least, 5):
        ranges = k2.get_rnnt_prune_ranges(*grads, boundary, s_range)
        am_pruned, lm_pruned = k2.do_rnnt_pruning(am, lm, ranges)
        logits = (am_pruned + lm_pruned).sigmoid()
        loss = k2.rnnt_loss_pruned(logits, symbols, ranges, 9, **options)
        assert loss.isfinite().all()
        assert (loss >= full - 1e-9).all()
    torch.testing.assert_close(loss, full)


@pytest.mark.filterwarnings("ignore:s_range=:UserWarning")
@pytest.mark.parametrize("s_range", [2, 3, 4])
def test_more_symbols_than_a_small_s_range_allows(s_range: int) -> None:
    lm, am, symbols, boundary = random_batch([6, 3], [17, 9], 10, torch.float64)
    _, grads = k2.rnnt_loss_simple(lm, am, symbols, 9, boundary, return_grad=True)
    ranges = k2.get_rnnt_prune_ranges(*grads, boundary, s_range)
    am_pruned, lm_pruned = k2.do_rnnt_pruning(am, lm, ranges)
    loss = k2.rnnt_loss_pruned(
        am_pruned + lm_pruned, symbols, ranges, 9, boundary, reduction="none"
    )
    assert loss.isfinite().all()


@pytest.mark.parametrize("symbol_takes_frame", [False, True])
@pytest.mark.parametrize(("px_offset", "py_offset"), [(0.0, 0.0), (15.0, 0.0), (15.0, 15.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_terms_in_boxes_anywhere(
    symbol_takes_frame: bool, px_offset: float, py_offset: float, dtype: torch.dtype
) -> None:
    """With equal terms the score depends on the number of paths and of arcs alone."""
    boundary = torch.tensor([[0, 0, 16, 400], [3, 7, 9, 30], [2, 2, 2, 9], [5, 8, 5, 8]])
    symbols, frames = boundary[:, 2] - boundary[:, 0], boundary[:, 3] - boundary[:, 1]
    last = 400 if symbol_takes_frame else 401
    px = torch.full((4, 16, last), px_offset, dtype=dtype)
    py = torch.full((4, 17, 400), py_offset, dtype=dtype)
    scores, (px_grad, py_grad) = k2.mutual_information_recursion(px, py, boundary, return_grad=True)
    s, t = symbols.double(), frames.double()
    blanks = t - s if symbol_takes_frame else t
    paths = torch.lgamma(s + blanks + 1) - torch.lgamma(s + 1) - torch.lgamma(blanks + 1)
    expected = paths + s * px_offset + blanks * py_offset
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(px_grad.sum((1, 2)).double(), s, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(py_grad.sum((1, 2)).double(), blanks, rtol=1e-4, atol=1e-4)
