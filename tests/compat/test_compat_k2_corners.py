"""compat.k2 in k2's special cases: blanks among the targets, empty boxes, older ranges."""

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import fast_rnnt, k2
from tests.compat.batches import BLANK, VOCABULARY, assert_same_gradients, batch, oracle_losses
from tests.loss.loss_cases import not_reading

TYPES = ["regular", "modified", "constrained"]
EVERY_COLUMN = torch.tensor([0, 1, 2, 3]).expand(4, 4, 4)


def test_argument_order_is_k2s() -> None:
    joint = list(inspect.signature(k2.get_rnnt_logprobs_joint).parameters)
    assert joint[:5] == ["logits", "symbols", "termination_symbol", "rnnt_type", "boundary"]
    pruned = list(inspect.signature(k2.get_hat_logprobs_pruned).parameters)
    assert pruned == [
        "logits", "symbols", "ranges", "termination_symbol", "boundary", "rnnt_type",
    ]  # fmt: skip
    assert list(inspect.signature(k2.rnnt_loss).parameters)[7] == "use_hat_loss"
    assert list(inspect.signature(k2.rnnt_loss_pruned).parameters)[8] == "use_hat_loss"


def test_argument_order_of_fast_rnnt() -> None:
    joint = list(inspect.signature(fast_rnnt.get_rnnt_logprobs_joint).parameters)
    assert joint[3:] == ["boundary", "rnnt_type"]
    assert list(inspect.signature(fast_rnnt.rnnt_loss).parameters)[7] == "return_grad"
    assert list(inspect.signature(fast_rnnt.rnnt_loss_pruned).parameters)[8] == "return_grad"


def test_fast_rnnt_is_k2_in_another_order() -> None:
    data = batch()
    arguments = (data.logits, data.targets, BLANK, data.boundary, "modified", 0.1, "sum")
    loss, grads = fast_rnnt.rnnt_loss(*arguments, True)
    expected, expected_grads = k2.rnnt_loss(*arguments, return_grad=True)
    torch.testing.assert_close((loss, *grads), (expected, *expected_grads))
    pruned = (data.logits, data.targets, EVERY_COLUMN, *arguments[2:])
    loss, grads = fast_rnnt.rnnt_loss_pruned(*pruned, True)
    torch.testing.assert_close((loss, *grads), (expected, *expected_grads))
    log_probs = fast_rnnt.get_rnnt_logprobs_joint(
        data.logits, data.targets, BLANK, data.boundary, "constrained"
    )
    torch.testing.assert_close(
        log_probs,
        k2.get_rnnt_logprobs_joint(data.logits, data.targets, BLANK, "constrained", data.boundary),
    )
    assert fast_rnnt.with_cuda() == torch.cuda.is_available()
    with pytest.raises(TypeError, match=r"rnnt_loss\(\): too many .*; it takes logits symbols"):
        fast_rnnt.rnnt_loss(*arguments, True, False)


def calls(data, targets: Tensor, rnnt_type: str, boundary: Tensor | None) -> list[Tensor]:
    """The losses (N,) of every function, each of the same joiner's logits."""
    logits = data.am[:, :, None] + data.lm[:, None]
    options = {"boundary": boundary, "rnnt_type": rnnt_type, "reduction": "none"}
    band = torch.zeros(4, 4, 1, dtype=torch.int64) + torch.arange(4)
    return [
        k2.rnnt_loss(logits, targets, BLANK, **options),
        k2.rnnt_loss_simple(data.lm, data.am, targets, BLANK, **options),
        k2.rnnt_loss_smoothed(data.lm, data.am, targets, BLANK, 0.0, 0.0, **options),
        k2.rnnt_loss_pruned(logits, targets, band, BLANK, **options),
        k2.rnnt_loss(logits, targets, BLANK, **options, return_grad=True)[0],
    ]


@pytest.mark.parametrize("rnnt_type", TYPES)
@pytest.mark.parametrize("with_boundary", [False, True])
def test_a_target_may_be_the_blank(rnnt_type: str, with_boundary: bool) -> None:
    data = batch()
    targets = data.targets.clone()
    targets[0, 1] = targets[1, 0] = targets[2, 2] = BLANK  # the last of these is padding
    logits = data.am[:, :, None] + data.lm[:, None]
    lengths = {} if with_boundary else {"lengths": [(4, 3)] * 4}
    expected = oracle_losses(logits, targets, rnnt_type, **lengths)
    for got in calls(data, targets, rnnt_type, data.boundary if with_boundary else None):
        assert_same_gradients(got, expected, [data.am, data.lm])


def test_a_pruned_target_may_be_the_blank() -> None:
    data = batch()
    targets = data.targets.clone()
    targets[0, 1] = BLANK
    start = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
    ranges = start[:, :, None] + torch.arange(2)
    index = ranges[..., None].expand(-1, -1, -1, VOCABULARY)
    got = k2.rnnt_loss_pruned(
        data.logits.gather(2, index), targets, ranges, BLANK, data.boundary, reduction="none"
    )
    expected = oracle_losses(
        data.logits, targets, keep=lambda n, t, u: 0 <= u - int(start[n, t]) < 2
    )
    assert_same_gradients(got, expected, [data.logits])


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_a_box_without_frames_and_symbols_scores_zero(rnnt_type: str) -> None:
    data = batch()
    boundary = data.boundary.clone()
    boundary[2] = 0
    boundary[3] = torch.tensor([1, 2, 1, 2])
    plain = batch()
    expected = calls(plain, plain.targets, rnnt_type, plain.boundary)
    for got, wanted in zip(calls(data, data.targets, rnnt_type, boundary), expected, strict=True):
        torch.testing.assert_close(got[:2], wanted[:2])
        assert got[2:].tolist() == [0.0, 0.0]
        grads = torch.autograd.grad(got.sum(), (data.am, data.lm), retain_graph=True)
        wanted_grads = torch.autograd.grad(
            wanted[:2].sum(), (plain.am, plain.lm), retain_graph=True
        )
        torch.testing.assert_close(grads, wanted_grads)


def test_symbols_without_frames_have_no_path() -> None:
    data = batch()
    boundary = data.boundary.clone()
    boundary[0, 3] = 0
    for rnnt_type in TYPES:
        for got in calls(data, data.targets, rnnt_type, boundary):
            assert got[0] == torch.inf
            assert got[1:].isfinite().all()
            (gradient,) = torch.autograd.grad(got[1:].sum(), data.am, retain_graph=True)
            assert gradient.isfinite().all()


@pytest.mark.parametrize("with_boundary", [False, True])
@pytest.mark.parametrize("rnnt_type", TYPES)
def test_more_symbols_than_frames(rnnt_type: str, with_boundary: bool) -> None:
    """With the native losses and without."""
    data = batch()
    boundary = data.boundary[:1].clone() if with_boundary else None
    frames = data.logits.shape[1]
    if boundary is not None:
        boundary[:, 2:] = torch.tensor([3, 2])
    else:
        frames = 2
    logits, am, lm = data.logits[:1, :frames], data.am[:1, :frames], data.lm[:1]
    symbols = data.targets[:1]
    given = {"boundary": boundary, "rnnt_type": rnnt_type, "reduction": "none"}
    losses = (
        lambda: k2.rnnt_loss(logits, symbols, BLANK, **given),
        lambda: k2.rnnt_loss(logits, symbols, BLANK, **given, return_grad=True)[0],
        lambda: k2.rnnt_loss_smoothed(lm, am, symbols, BLANK, 0.1, 0.0, **given),
        lambda: k2.rnnt_loss_smoothed(lm, am, symbols, BLANK, 0.1, 0.1, **given),
    )
    for loss in losses:
        if rnnt_type == "regular":
            assert loss().isfinite().all()
        else:
            with pytest.raises(ValueError, match="utterance 0 has no path: 3 symbols need at"):
                loss()


def test_a_box_without_frames_emits_its_symbols() -> None:
    """Of finite px at the frame after the last, which k2's recursion uses, too."""
    px = torch.arange(24.0).view(2, 3, 4).requires_grad_()
    py = torch.zeros(2, 4, 3)
    boundary = torch.tensor([[1, 2, 3, 2], [0, 0, 0, 0]])
    scores, (px_grad, py_grad) = k2.mutual_information_recursion(px, py, boundary, return_grad=True)
    assert scores.tolist() == [6.0 + 10.0, 0.0]
    expected = torch.zeros(2, 3, 4)
    expected[0, 1:, 2] = 1.0
    torch.testing.assert_close(px_grad, expected)
    assert not py_grad.any()
    torch.testing.assert_close(torch.autograd.grad(scores.sum(), px)[0], expected)
    one_a_frame = k2.mutual_information_recursion(px[:, :, :3], py, boundary)
    assert one_a_frame.tolist() == [-torch.inf, 0.0]


def test_a_box_outside_the_lattice_is_refused() -> None:
    px, py = torch.zeros(1, 3, 4), torch.zeros(1, 4, 3)
    for row in ([2, 1, 1, 1], [0, 4, 0, 4], [0, 0, 4, 0]):
        with pytest.raises(ValueError, match=r"boundary\[0\] is"):
            k2.mutual_information_recursion(px, py, torch.tensor([row]))


def test_ranges_of_an_empty_box() -> None:
    px_grad, py_grad = torch.rand(2, 6, 5), torch.rand(2, 7, 4)
    boundary = torch.tensor([[0, 0, 6, 4], [0, 0, 0, 0]])
    ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 3)
    assert ranges[1].tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_boundary_beyond_int32_is_out_of_range(dtype: torch.dtype) -> None:
    """Cut to its low bits, 2^32 + 4 would be 4 frames."""
    data = batch()
    boundary = data.boundary.to(dtype)
    torch.testing.assert_close(
        k2.rnnt_loss(data.logits, data.targets, BLANK, boundary),
        k2.rnnt_loss(data.logits, data.targets, BLANK, data.boundary),
    )
    if dtype == torch.int64:
        boundary[:, 3] += 2**32
        with pytest.raises(ValueError, match=r"boundary\[:, 3\]\[0\] is"):
            k2.rnnt_loss(data.logits, data.targets, BLANK, boundary)
        with pytest.raises(ValueError, match=r"boundary\[:, 3\]\[0\] is"):
            k2.rnnt_loss_simple(data.lm, data.am, data.targets, BLANK, boundary)


def test_ranges_beyond_int32_are_out_of_range() -> None:
    data = batch()
    ranges = torch.tensor([0, 1]).expand(4, 4, 2) + 2**32
    with pytest.raises(ValueError, match=r"ranges\[0\] has a column outside of 0\.\."):
        k2.rnnt_loss_pruned(data.logits[:, :, :2], data.targets, ranges, BLANK, data.boundary)


def test_prune_ranges_of_a_far_boundary() -> None:
    px_grad, py_grad = torch.rand(1, 6, 9), torch.rand(1, 7, 8)
    boundary = torch.tensor([[0, 0, 6, 8 + 2**32]])
    with pytest.raises(ValueError, match=r"boundary\[0\] is .* t_end in 0\.\.8"):
        k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 3)


def test_a_boundary_of_another_shape() -> None:
    data = batch()
    with pytest.raises(ValueError, match=r"boundary has shape \(4, 3\); it must be \(B, 4\)"):
        k2.rnnt_loss(data.logits, data.targets, BLANK, data.boundary[:, :3])


def first_rule(px_grad: Tensor, py_grad: Tensor, length: int, symbols: int, s_range: int) -> list:
    """First kept column of each frame of one utterance: windows by all their mass."""
    columns, frames = py_grad.shape
    regular = px_grad.shape[1] == frames + 1
    step = s_range - 1 if regular else 1
    starts = [max(symbols - s_range + 1, 0)] * frames
    for t in range(min(length - 1, frames)):
        scores = [
            float(px_grad[s : s + s_range, t].sum() + py_grad[s : s + s_range, t].sum())
            for s in range(columns - s_range + 1)
        ]
        tied = [s for s, score in enumerate(scores) if score >= max(scores) - 1e-5]
        starts[t] = tied[(len(tied) - 1) // 2]
    for t in reversed(range(frames - 1)):
        starts[t] = min(starts[t], starts[t + 1])
    for t in reversed(range(frames - 1)):
        starts[t] = max(starts[t], starts[t + 1] - step)
    return [min(s, step * t) for t, s in enumerate(starts)]


@pytest.mark.parametrize("rnnt_type", TYPES)
@pytest.mark.parametrize("s_range", [2, 4])
def test_deprecated_ranges(rnnt_type: str, s_range: int) -> None:
    generator = torch.Generator().manual_seed(3)
    am = torch.randn(3, 14, 6, generator=generator)
    lm = torch.randn(3, 10, 6, generator=generator)
    targets = torch.randint(1, 6, (3, 9), generator=generator)
    boundary = torch.tensor([[0, 0, 9, 14], [0, 0, 3, 14], [0, 0, 6, 8]])
    _, grads = k2.rnnt_loss_simple(lm, am, targets, 0, boundary, rnnt_type, return_grad=True)
    ranges = k2.get_rnnt_prune_ranges_deprecated(*grads, boundary, s_range)
    assert (ranges - ranges[:, :, :1] == torch.arange(s_range)).all()
    for n, (_, _, symbols, length) in enumerate(boundary.tolist()):
        wanted = first_rule(grads[0][n], grads[1][n], length, symbols, s_range)
        assert ranges[n, :, 0].tolist() == wanted


def test_hat_log_probs_of_a_band() -> None:
    data = batch()
    px, py = k2.get_hat_logprobs_pruned(
        data.logits, data.targets, EVERY_COLUMN, BLANK, data.boundary, "modified"
    )
    wanted = k2.get_rnnt_logprobs_joint(
        data.logits, data.targets, BLANK, "modified", data.boundary, use_hat_loss=True
    )
    torch.testing.assert_close((px, py), wanted)


def test_one_column_of_the_constrained_type_has_no_path_for_symbols() -> None:
    data = batch()
    ranges = torch.zeros(4, 4, 1, dtype=torch.int64)
    loss = k2.rnnt_loss_pruned(
        data.logits[:, :, :1], data.targets, ranges, BLANK, data.boundary, "constrained",
        reduction="none",
    )  # fmt: skip
    assert loss.isinf().tolist() == [True, True, False, True]


@pytest.mark.parametrize("hat", [False, True])
def test_columns_outside_of_the_lattice_have_no_arcs_where_ranges_are_not_read(hat) -> None:
    logits = torch.randn(1, 2, 3, 5)
    symbols = torch.tensor([[1, 2]])
    inside, outside = torch.tensor([[[[0, 1, 2]] * 2], [[[0, 1, 2], [-7, 1, 2**40]]]])
    px, py = k2.get_rnnt_logprobs_pruned(logits, symbols, inside, 0, use_hat_loss=hat)
    with not_reading():
        found = k2.get_rnnt_logprobs_pruned(logits, symbols, outside, 0, use_hat_loss=hat)
    px[:, 0, 1] = -torch.inf
    py[:, [0, 2], 1] = -torch.inf
    torch.testing.assert_close(found, (px, py))
    none = k2.get_rnnt_logprobs_pruned(logits, symbols[:, :0], inside * 0, 0, use_hat_loss=hat)
    assert none[0].shape == (1, 0, 3)


@pytest.mark.parametrize("hat", [False, True])
def test_a_termination_symbol_may_count_from_the_end(hat) -> None:
    data = batch()
    for function, given in (
        (k2.get_rnnt_logprobs_joint, (data.logits, data.targets)),
        (k2.get_rnnt_logprobs_pruned, (data.logits, data.targets, EVERY_COLUMN)),
    ):
        first, last = (
            function(*given, blank, boundary=data.boundary, use_hat_loss=hat)
            for blank in (BLANK, BLANK - VOCABULARY)
        )
        torch.testing.assert_close(last, first)
    first, last = (
        k2.rnnt_loss(data.logits, data.targets, blank, data.boundary)
        for blank in (BLANK, np.int64(BLANK - VOCABULARY))
    )
    torch.testing.assert_close(last, first)


@pytest.mark.parametrize("target", [BLANK, 1])
def test_an_rnnt_type_that_k2_does_not_have(target: int) -> None:
    """With a blank among the targets and without, which are other computations."""
    data = batch()
    targets = torch.full_like(data.targets, target)
    for call in (
        lambda: k2.rnnt_loss(data.logits, targets, BLANK, rnnt_type="rna"),
        lambda: k2.rnnt_loss_simple(data.lm, data.am, targets, BLANK, rnnt_type="rna"),
    ):
        with pytest.raises(ValueError, match=r"rnnt_type is 'rna'; .*'constrained'\]"):
            call()


def test_a_pruned_loss_needs_ranges() -> None:
    data = batch()
    with pytest.raises(TypeError, match="ranges is a NoneType"):
        k2.rnnt_loss_pruned(data.logits, data.targets, None, BLANK, data.boundary)


@pytest.mark.parametrize("name", ["use_hat_loss", "return_grad"])
def test_what_is_neither_true_nor_false(name: str) -> None:
    data = batch()
    joint = (data.logits, data.targets, BLANK)
    calls = [(k2.rnnt_loss, joint)]
    if name == "use_hat_loss":
        calls.append((k2.get_rnnt_logprobs_joint, joint))
    else:
        calls.append((k2.rnnt_loss_simple, (data.lm, data.am, data.targets, BLANK)))
        calls.append(
            (k2.mutual_information_recursion, (torch.zeros(1, 2, 4), torch.zeros(1, 3, 3)))
        )
    for call, arguments in calls:
        with pytest.raises(TypeError, match=f"{name} is 'no', needs True or False"):
            call(*arguments, **{name: "no"})


def test_the_default_device_is_not_that_of_the_boundary() -> None:
    data = batch()
    given = (data.lm, data.am, data.targets, BLANK, data.boundary)
    _, grads = k2.rnnt_loss_simple(*given, return_grad=True)
    expected = k2.get_rnnt_prune_ranges(*grads, data.boundary, 3)
    with torch.device("meta"):
        assert torch.equal(k2.get_rnnt_prune_ranges(*grads, data.boundary, 3), expected)
