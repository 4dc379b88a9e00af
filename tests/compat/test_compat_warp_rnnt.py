"""compat.warp_rnnt: modes, known values, and the wording of its errors."""

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import warp_rnnt
from tests.compat.batches import BLANK, FRAMES, SYMBOLS, batch, oracle_losses

XN, YN = FRAMES.int(), SYMBOLS.int()


def example() -> tuple[Tensor, Tensor]:
    """Log-probabilities (float32, requiring grad) and labels (int32) of the ragged batch."""
    data = batch()
    return data.logits.detach().float().log_softmax(-1).requires_grad_(), data.targets.int()


def packed(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    blocks = [
        log_probs[n, :t, : u + 1].reshape(-1, log_probs.shape[-1])
        for n, (t, u) in enumerate(zip(XN.tolist(), YN.tolist(), strict=True))
    ]
    return torch.cat(blocks), torch.cat([labels[n, :u] for n, u in enumerate(YN.tolist())])


def test_costs_against_all_paths() -> None:
    log_probs, labels = example()
    costs = warp_rnnt.rnnt_loss(log_probs, labels, XN, YN, blank=BLANK)
    expected = oracle_losses(log_probs.double(), labels)
    torch.testing.assert_close(costs, expected.float())


@pytest.mark.parametrize("gather", [False, True])
def test_known_values(gather: bool) -> None:
    raw = torch.tensor(
        [[[[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]]]]
    )
    one_frame = warp_rnnt.rnnt_loss(
        raw.log_softmax(-1), torch.tensor([[1, 2]]).int(), torch.tensor([1]).int(),
        torch.tensor([2]).int(), gather=gather,
    )  # fmt: skip
    assert one_frame.item() == pytest.approx(4.274244594423859, rel=1e-6)
    empty = warp_rnnt.rnnt_loss(
        raw[:, :, :1].log_softmax(-1), torch.zeros(1, 0).int(), torch.tensor([1]).int(),
        torch.tensor([0]).int(), gather=gather,
    )  # fmt: skip
    assert empty.item() == pytest.approx(1.7314291957733714, rel=1e-6)


def test_gradients_reach_two_entries_a_node() -> None:
    log_probs, labels = example()
    costs = warp_rnnt.rnnt_loss(log_probs, labels, XN, YN, blank=BLANK, reduction="sum")
    (gradient,) = torch.autograd.grad(costs, log_probs)
    assert (gradient <= 0).all()
    assert (gradient != 0).sum(-1).max() == 2
    torch.testing.assert_close(-gradient.sum((1, 2, 3)), (XN + YN).float())


def test_gather_compact_and_gathered_values_agree() -> None:
    log_probs, labels = example()
    plain = warp_rnnt.rnnt_loss(log_probs, labels, XN, YN, blank=BLANK)
    gathering = warp_rnnt.rnnt_loss(log_probs, labels, XN, YN, blank=BLANK, gather=True)
    rows, words = packed(log_probs, labels)
    compact = warp_rnnt.rnnt_loss(rows, words, XN, YN, blank=BLANK, compact=True)
    compact_gathering = warp_rnnt.rnnt_loss(rows, words, XN, YN, blank=-1 - BLANK, compact=True)
    index = torch.full((*log_probs.shape[:3], 2), BLANK)
    index[:, :, :-1, 1] = labels.unsqueeze(1)
    gathered = warp_rnnt.rnnt_loss(log_probs.gather(3, index), labels, XN, YN, blank=-1)
    upstream = torch.tensor([0.5, -2.0, 0.0, 1.25])
    (expected,) = torch.autograd.grad(plain, log_probs, upstream, retain_graph=True)
    for costs in (gathering, compact, compact_gathering, gathered):
        torch.testing.assert_close(costs, plain)
        (gradient,) = torch.autograd.grad(costs, log_probs, upstream, retain_graph=True)
        torch.testing.assert_close(gradient, expected)


def test_compact_takes_half_precision() -> None:
    log_probs, labels = example()
    rows, words = packed(log_probs.detach(), labels)
    exact = warp_rnnt.rnnt_loss(rows, words, XN, YN, blank=BLANK, compact=True)
    half = warp_rnnt.rnnt_loss(rows.bfloat16(), words, XN, YN, blank=BLANK, compact=True)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=2e-2, atol=2e-2)


def test_average_frames_and_reductions() -> None:
    log_probs, labels = example()
    costs = warp_rnnt.rnnt_loss(log_probs, labels, XN, YN, blank=BLANK)
    for average in (False, True):
        each = costs / XN if average else costs
        for reduction, expected in [
            (None, each), ("none", each), ("mean", each.mean()), ("sum", each.sum())
        ]:  # fmt: skip
            got = warp_rnnt.rnnt_loss(log_probs, labels, XN, YN, average, reduction, BLANK)
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("scale", [0.5, -0.25])
def test_fastemit_scales_the_labels_gradient_alone(scale: float) -> None:
    """Also by less than 1, as warp_rnnt does."""
    log_probs, labels = example()

    def run(fastemit_lambda: float) -> tuple[Tensor, Tensor]:
        costs = warp_rnnt.rnnt_loss(
            log_probs, labels, XN, YN, blank=BLANK, fastemit_lambda=fastemit_lambda
        )
        return costs, torch.autograd.grad(costs.sum(), log_probs)[0]

    costs, gradient = run(0.0)
    fast_costs, fast_gradient = run(scale)
    torch.testing.assert_close(fast_costs, costs)
    expected = gradient * (1 + scale)
    expected[..., BLANK] = gradient[..., BLANK]
    torch.testing.assert_close(fast_gradient, expected)


def test_gather_takes_strided_log_probs() -> None:
    log_probs, labels = example()
    strided = log_probs.detach().transpose(1, 2).contiguous().transpose(1, 2)
    costs = warp_rnnt.rnnt_loss(strided, labels, XN, YN, blank=BLANK, gather=True)
    torch.testing.assert_close(
        costs, warp_rnnt.rnnt_loss(log_probs, labels, XN, YN, blank=BLANK).detach()
    )


YS_SHAPE = r"ys shape \(N, U-1\) mismatched with xs \(N, T, U, V\)"
PADDED_ERRORS = [
    ("xs", lambda x: x.transpose(1, 2), "xs must be contiguous"),
    ("ys", lambda y: y.t().contiguous().t(), "ys must be contiguous"),
    ("xn", lambda n: n.repeat(2)[::2], "xn must be contiguous"),
    ("yn", lambda n: n.repeat(2)[::2], "yn must be contiguous"),
    ("xs", lambda x: x.double(), "xs must be a Float tensor"),
    ("xs", lambda x: x.half(), "xs must be a Float tensor"),
    ("ys", lambda y: y.long(), "ys must be a Int tensor"),
    ("xn", lambda n: n.long(), "xn must be a Int tensor"),
    ("yn", lambda n: n.short(), "yn must be a Int tensor"),
    ("xs", lambda x: x[0], "xs must have 4 dimensions"),
    ("xn", lambda n: n[:2], r"xn shape must be equal \(N,\)"),
    ("yn", lambda n: n[:2], r"yn shape must be equal \(N,\)"),
    ("ys", lambda y: y[:, :2].contiguous(), YS_SHAPE),
    ("ys", lambda y: y.to("meta"), "xs must be located in the CUDA"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), PADDED_ERRORS)
@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_error_wording(name: str, change, message: str, error: type[Exception]) -> None:
    log_probs, labels = example()
    arguments = {"xs": log_probs, "ys": labels, "xn": XN, "yn": YN}
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=f"^{message}$"):
        warp_rnnt.rnnt_loss(*arguments.values(), blank=BLANK)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("xs", lambda x: x[None], "xs must have 2 dimensions"),
        ("xs", lambda x: x[:-1], r"xs shape mismatch with \(\\sum\{xn\*\(yn\+1\)\}, \)"),
        ("ys", lambda y: y[:-1], r"ys shape must be equal to \(sum\(yn\), \)"),
        ("yn", lambda n: n[:-1], r"xn and yn shape must be equal \(N,\)"),
    ],
)
def test_error_wording_of_compact(name: str, change, message: str) -> None:
    rows, words = packed(*example())
    arguments = {"xs": rows, "ys": words, "xn": XN, "yn": YN}
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        warp_rnnt.rnnt_loss(*arguments.values(), blank=BLANK, compact=True)


def test_gathered_values_are_pairs() -> None:
    log_probs, labels = example()
    with pytest.raises(ValueError, match="xs must have values only for blank and label"):
        warp_rnnt.rnnt_loss(log_probs, labels, XN, YN, blank=-1)


def test_unknown_reduction() -> None:
    log_probs, labels = example()
    message = r"Unknown reduction method: max, expected to be one of \['mean', 'sum', 'none'\]"
    with pytest.raises(ValueError, match=message):
        warp_rnnt.rnnt_loss(log_probs, labels, XN, YN, reduction="max")


def test_float64_oracle_of_the_gradient() -> None:
    """The float32 gradient is that of the log-probabilities, against all paths in float64."""
    log_probs, labels = example()
    exact = log_probs.detach().double().requires_grad_()
    costs = warp_rnnt.rnnt_loss(exact.log_softmax(-1).float(), labels, XN, YN, blank=BLANK)
    expected = oracle_losses(exact, labels)
    torch.testing.assert_close(costs.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.tensor([0.5, -2.0, 0.0, 1.25])
    (got,) = torch.autograd.grad(costs, exact, upstream)
    (want,) = torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_apply_functions() -> None:
    log_probs, labels = example()
    arguments = (log_probs, labels, XN, YN)
    costs = warp_rnnt.RNNTLoss.apply(*arguments, BLANK, 0.25)
    expected = warp_rnnt.rnnt_loss(*arguments, blank=BLANK, fastemit_lambda=0.25)
    torch.testing.assert_close(costs, expected)
    got, wanted = (torch.autograd.grad(x.sum(), log_probs)[0] for x in (costs, expected))
    torch.testing.assert_close(got, wanted)
    rows, words = packed(log_probs, labels)
    costs = warp_rnnt.RNNTLossCompact.apply(rows, words, XN, YN, BLANK)
    torch.testing.assert_close(costs, warp_rnnt.rnnt_loss(*arguments, blank=BLANK))
    assert costs.requires_grad
    assert not warp_rnnt.RNNTLossCompact.apply(rows, words, XN, YN, BLANK, 0.0, False).requires_grad


def test_negative_lengths_of_packed_labels_are_refused() -> None:
    rows, words = torch.zeros(2, 4), torch.ones(2, dtype=torch.int32)
    lengths = torch.tensor([[2, 2], [-1, 3]], dtype=torch.int32)
    with pytest.raises(warp_rnnt.WarpRnntError, match="yn must have one length or more, from 0 on"):
        warp_rnnt.rnnt_loss(rows, words, *lengths, compact=True)


@pytest.mark.parametrize("name", ["average_frames", "gather", "compact", "enable_grad"])
def test_what_is_neither_true_nor_false(name: str) -> None:
    data = batch()
    log_probs = data.logits.detach().float().log_softmax(-1)
    given = (log_probs, data.targets.int(), FRAMES.int(), SYMBOLS.int())
    call = warp_rnnt.RNNTLossCompact.apply if name == "enable_grad" else warp_rnnt.rnnt_loss
    with pytest.raises(TypeError, match=f"{name} is 'no', needs True or False"):
        call(*given, **{name: "no"})
