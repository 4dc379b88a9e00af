"""compat.k2's losses against all paths in float64, and as a recipe calls them."""

import inspect

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import k2
from tests.compat.batches import (
    BLANK,
    FRAMES,
    LENGTHS,
    SYMBOLS,
    VOCABULARY,
    assert_same_gradients,
    batch,
    oracle_losses,
)

TYPES = ["regular", "modified", "constrained"]


def trivial_logits(am: Tensor, lm: Tensor) -> Tensor:
    return am[:, :, None] + lm[:, None]


def test_argument_order_and_defaults_are_k2s() -> None:
    simple = inspect.signature(k2.rnnt_loss_smoothed).parameters
    assert list(simple) == [
        "lm", "am", "symbols", "termination_symbol", "lm_only_scale", "am_only_scale", "boundary",
        "rnnt_type", "delay_penalty", "reduction", "return_grad",
    ]  # fmt: skip
    assert (simple["lm_only_scale"].default, simple["am_only_scale"].default) == (0.1, 0.1)
    pruned = inspect.signature(k2.rnnt_loss_pruned).parameters
    assert list(pruned)[:9] == [
        "logits", "symbols", "ranges", "termination_symbol", "boundary", "rnnt_type",
        "delay_penalty", "reduction", "use_hat_loss",
    ]  # fmt: skip
    assert pruned["reduction"].default == "mean"
    log_probs = inspect.signature(k2.get_rnnt_logprobs).parameters
    assert list(log_probs)[-2:] == ["rnnt_type", "boundary"]


@pytest.mark.parametrize("rnnt_type", TYPES)
@pytest.mark.parametrize("hat", [False, True])
def test_full_loss(rnnt_type: str, hat: bool) -> None:
    data = batch()
    got = k2.rnnt_loss(
        data.logits, data.targets, BLANK, data.boundary, rnnt_type, 0.0, "none", use_hat_loss=hat
    )
    expected = oracle_losses(data.logits, data.targets, rnnt_type, hat=hat)
    assert_same_gradients(got, expected, [data.logits])


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_simple_loss(rnnt_type: str) -> None:
    data = batch()
    got = k2.rnnt_loss_simple(
        data.lm, data.am, data.targets, BLANK, data.boundary, rnnt_type, reduction="none"
    )
    expected = oracle_losses(trivial_logits(data.am, data.lm), data.targets, rnnt_type)
    assert_same_gradients(got, expected, [data.am, data.lm])


@pytest.mark.parametrize("delay_penalty", [0.3, -0.3])
def test_delay_penalty_acts_when_positive(delay_penalty: float) -> None:
    data = batch()
    expected = oracle_losses(data.logits, data.targets, delay_penalty=max(delay_penalty, 0.0))
    got = k2.rnnt_loss(
        data.logits, data.targets, BLANK, data.boundary, "regular", delay_penalty, "none"
    )
    assert_same_gradients(got, expected, [data.logits])
    by_rows, _ = k2.rnnt_loss(
        data.logits, data.targets, BLANK, data.boundary, "regular", delay_penalty, "none",
        return_grad=True,
    )  # fmt: skip
    assert_same_gradients(by_rows, expected, [data.logits])


def smoothed_rows(am: Tensor, lm: Tensor, l_scale: float, a_scale: float) -> Tensor:
    """Per (n, t, u, v): the mixed log-probability of v, averaging q over padding as k2 does."""
    joint = trivial_logits(am, lm).log_softmax(-1)
    unigram = lm.softmax(-1).reshape(-1, VOCABULARY).mean(0)
    am_alone = (am + unigram.log()).log_softmax(-1)
    mixed = (1 - l_scale - a_scale) * joint + a_scale * am_alone[:, :, None]
    return mixed + l_scale * lm.log_softmax(-1)[:, None]


def smoothed_oracle(data, rnnt_type: str, l_scale: float, a_scale: float) -> tuple[Tensor, ...]:
    """(losses, px, py) with px (N, S, T), py (N, S + 1, T) leaves of the graph of losses."""
    from tests.lattice_paths import log_total

    rows = smoothed_rows(data.am, data.lm, l_scale, a_scale)
    index = torch.nn.functional.pad(data.targets, (0, 1), value=BLANK)
    index = index[:, None, :, None].expand(-1, rows.shape[1], -1, -1)
    emit, blank = rows.gather(3, index).squeeze(3), rows[..., BLANK]
    losses = [
        -log_total(emit[n], blank[n], frames, symbols, rnnt_type)
        for n, (frames, symbols) in enumerate(LENGTHS)
    ]
    return torch.stack(losses), emit, blank


@pytest.mark.parametrize("rnnt_type", TYPES)
@pytest.mark.parametrize("scales", [(0.0, 0.0), (0.25, 0.0), (0.1, 0.2), (0.0, 0.3)])
def test_smoothed_loss_and_its_occupancies(rnnt_type: str, scales: tuple[float, float]) -> None:
    data = batch()
    losses, emit, blank = smoothed_oracle(data, rnnt_type, *scales)
    got, (px_grad, py_grad) = k2.rnnt_loss_smoothed(
        data.lm, data.am, data.targets, BLANK, *scales, data.boundary, rnnt_type,
        reduction="none", return_grad=True,
    )  # fmt: skip
    assert_same_gradients(got, losses, [data.am, data.lm])
    assert not px_grad.requires_grad
    assert not py_grad.requires_grad
    emit_grad, blank_grad = torch.autograd.grad(-losses.sum(), (emit, blank))
    expected_px = emit_grad[:, :, :-1].transpose(1, 2)
    expected_py = blank_grad.transpose(1, 2)
    if rnnt_type == "constrained":  # k2 counts the blank after a symbol with the symbol
        expected_py = expected_py - torch.nn.functional.pad(expected_px, (0, 0, 1, 0))
    if rnnt_type == "regular":
        assert px_grad.shape == (4, 3, 5)
        assert not px_grad[:, :, 4].any()
        px_grad = px_grad[:, :, :4]
    torch.testing.assert_close(px_grad, expected_px)
    torch.testing.assert_close(py_grad, expected_py)


def test_defaults_of_the_smoothed_loss() -> None:
    data = batch()
    losses, *_ = smoothed_oracle(data, "regular", 0.1, 0.1)
    got = k2.rnnt_loss_smoothed(data.lm, data.am, data.targets, BLANK, boundary=data.boundary)
    torch.testing.assert_close(got, losses.mean())


@pytest.mark.parametrize("scale", [80.0, 120.0])
def test_scores_far_apart(scale: float) -> None:
    """am and lm that peak at different symbols: only k2's normaliser has a floor there."""
    am = torch.zeros(1, 3, 5)
    lm = torch.zeros(1, 3, 5)
    am[..., 3], lm[..., 4] = scale, scale
    targets = torch.tensor([[1, 2]])
    data = [x.clone().requires_grad_() for x in (lm, am)]
    for a_scale in (0.0, 1e-9):  # the native loss, and the one by log-probabilities
        loss = k2.rnnt_loss_smoothed(*data, targets, 0, 0.0, a_scale)
        logits = trivial_logits(am.double(), lm.double()).requires_grad_()
        exact = k2.rnnt_loss(logits, targets, 0)
        assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
        grads = torch.autograd.grad(loss, data)
        (wanted,) = torch.autograd.grad(exact, logits)
        torch.testing.assert_close(grads[0].double(), wanted.sum(1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grads[1].double(), wanted.sum(2), rtol=1e-4, atol=1e-4)


def test_reductions_and_missing_boundary() -> None:
    data = batch()
    losses = k2.rnnt_loss(data.logits, data.targets, BLANK, data.boundary, reduction="none")
    for reduction, expected in [("mean", losses.mean()), ("sum", losses.sum())]:
        got = k2.rnnt_loss(data.logits, data.targets, BLANK, data.boundary, reduction=reduction)
        torch.testing.assert_close(got, expected)
    whole = data.boundary.clone()
    whole[:, 2], whole[:, 3] = 3, 4
    ranges = torch.tensor([0, 1, 2, 3]).expand(4, 4, 4)
    for function, inputs in [
        (k2.rnnt_loss, (data.logits, data.targets, BLANK)),
        (k2.rnnt_loss_simple, (data.lm, data.am, data.targets, BLANK)),
        (k2.rnnt_loss_pruned, (data.logits, data.targets, ranges, BLANK)),
    ]:
        torch.testing.assert_close(function(*inputs), function(*inputs, boundary=whole))


BEGINS = torch.tensor([[1, 1, 3, 4], [0, 1, 2, 3], [0, 2, 0, 4], [0, 0, 1, 1]])


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_boundaries_with_an_offset(rnnt_type: str) -> None:
    """Equals the loss of inputs without the frames and symbols before the boundary."""
    data = batch()
    ranges = torch.tensor([0, 1, 2, 3]).expand(4, 4, 4)
    logits = trivial_logits(data.am, data.lm)
    losses = [
        k2.rnnt_loss(
            logits[n : n + 1, t0:t1, u0 : u1 + 1], data.targets[n : n + 1, u0:u1], BLANK,
            rnnt_type=rnnt_type,
        )
        for n, (u0, t0, u1, t1) in enumerate(BEGINS.tolist())
    ]  # fmt: skip
    expected = torch.stack(losses)
    options = {"boundary": BEGINS, "rnnt_type": rnnt_type, "reduction": "none"}
    inputs = [data.am, data.lm]
    simple = k2.rnnt_loss_simple(data.lm, data.am, data.targets, BLANK, **options)
    assert_same_gradients(simple, expected, inputs)
    assert_same_gradients(k2.rnnt_loss(logits, data.targets, BLANK, **options), expected, inputs)
    assert_same_gradients(
        k2.rnnt_loss_pruned(logits, data.targets, ranges, BLANK, **options), expected, inputs
    )


RANGES = {
    "regular": [[0, 0, 1, 2], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]],
    "modified": [[0, 1, 1, 2], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]],
    "constrained": [[0, 1, 1, 2], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]],
}


@pytest.mark.parametrize("rnnt_type", TYPES)
@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("return_grad", [False, True])
def test_pruned_loss(rnnt_type: str, hat: bool, return_grad: bool) -> None:
    data = batch()
    start = torch.tensor(RANGES[rnnt_type])
    ranges = start[:, :, None] + torch.arange(2)
    index = ranges[..., None].expand(-1, -1, -1, VOCABULARY)
    got = k2.rnnt_loss_pruned(
        data.logits.gather(2, index), data.targets, ranges, BLANK, data.boundary, rnnt_type,
        reduction="none", use_hat_loss=hat, return_grad=return_grad,
    )  # fmt: skip
    expected = oracle_losses(
        data.logits, data.targets, rnnt_type, hat=hat,
        keep=lambda n, t, u: 0 <= u - int(start[n, t]) < 2,
    )  # fmt: skip
    if return_grad:
        got, (px_grad, py_grad) = got
        assert px_grad.shape == (4, 3, 5 if rnnt_type == "regular" else 4)
        # Every path takes each symbol once; blanks fill the rest.
        torch.testing.assert_close(px_grad.sum((1, 2)), SYMBOLS.double())
        blanks = FRAMES if rnnt_type == "regular" else FRAMES - SYMBOLS
        torch.testing.assert_close(py_grad.sum((1, 2)), blanks.double())
    assert_same_gradients(got, expected, [data.logits])


def test_pruning_nothing_is_the_full_loss() -> None:
    data = batch()
    ranges = torch.tensor([0, 1, 2, 3]).expand(4, 4, 4)
    pruned = k2.rnnt_loss_pruned(
        data.logits, data.targets, ranges, BLANK, data.boundary, reduction="none"
    )
    full = k2.rnnt_loss(data.logits, data.targets, BLANK, data.boundary, reduction="none")
    assert_same_gradients(pruned, full, [data.logits])


def test_a_batch_of_empty_references() -> None:
    am, lm = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 1, 5, requires_grad=True)
    boundary = torch.tensor([[0, 0, 0, 3], [0, 0, 0, 2]])
    targets = torch.zeros(2, 0, dtype=torch.int64)
    simple, (px_grad, py_grad) = k2.rnnt_loss_smoothed(
        lm, am, targets, 0, 0.25, 0.0, boundary, return_grad=True
    )
    ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 5)
    assert ranges.tolist() == [[[0]] * 3] * 2
    am_pruned, lm_pruned = k2.do_rnnt_pruning(am, lm, ranges)
    pruned = k2.rnnt_loss_pruned(am_pruned + lm_pruned, targets, ranges, 0, boundary)
    log_probs = (am + lm).log_softmax(-1)[..., 0]
    expected = -(log_probs[0].sum() + log_probs[1, :2].sum()) / 2
    torch.testing.assert_close(pruned, expected)
    assert simple.isfinite()


@pytest.mark.parametrize("reduction", ["Mean", None])
def test_unknown_reduction(reduction: str) -> None:
    data = batch()
    for call in (
        lambda: k2.rnnt_loss(data.logits, data.targets, BLANK, reduction=reduction),
        lambda: k2.rnnt_loss_simple(data.lm, data.am, data.targets, BLANK, reduction=reduction),
    ):
        with pytest.raises(ValueError, match=r"reduction is .*; it must be one of"):
            call()
