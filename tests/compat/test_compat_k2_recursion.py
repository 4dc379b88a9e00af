"""compat.k2's recursions and log-probabilities against all paths in float64."""

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import k2
from tests.compat.batches import BLANK, LENGTHS, UPSTREAM, batch
from tests.lattice_paths import joiner_log_probs, log_total

TYPES = ["regular", "modified", "constrained"]


def random_px_py(symbol_takes_frame: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    frames = 4
    px = torch.randn(4, 3, frames, generator=generator, dtype=torch.float64)
    py = torch.randn(4, 4, frames, generator=generator, dtype=torch.float64)
    if not symbol_takes_frame:
        px = torch.nn.functional.pad(px, (0, 1), value=-torch.inf)
    return px.requires_grad_(), py.requires_grad_()


def rows(px: Tensor, py: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """px, py of one utterance as rows (T, U + 1)."""
    frames = py.shape[2]
    return torch.nn.functional.pad(px[n, :, :frames].T, (0, 1)), py[n].T


def blocked(px: Tensor, boundary: Tensor) -> Tensor:
    """-inf at the end of a regular lattice, as k2's log-probability functions leave it."""
    after = torch.arange(px.shape[2]) == boundary[:, 3, None]
    return torch.where(after[:, None, :], -torch.inf, px)


BOUNDARIES = {
    "lengths": torch.tensor([[0, 0, u, t] for t, u in LENGTHS]),
    "begins": torch.tensor([[1, 1, 3, 4], [0, 1, 2, 3], [0, 2, 0, 4], [0, 0, 1, 1]]),
}


@pytest.mark.parametrize("symbol_takes_frame", [False, True])
@pytest.mark.parametrize("name", BOUNDARIES)
def test_recursion(symbol_takes_frame: bool, name: str) -> None:
    boundary = BOUNDARIES[name]
    px, py = random_px_py(symbol_takes_frame)
    usable = px if symbol_takes_frame else blocked(px, boundary)
    rnnt_type = "modified" if symbol_takes_frame else "regular"
    expected = []
    for n, (u0, t0, u1, t1) in enumerate(boundary.tolist()):
        emit, blank = rows(px, py, n)
        expected.append(log_total(emit[t0:t1, u0:], blank[t0:t1, u0:], t1 - t0, u1 - u0, rnnt_type))
    total = torch.stack(expected)
    scores, (px_grad, py_grad) = k2.mutual_information_recursion(
        usable, py, boundary, return_grad=True
    )
    torch.testing.assert_close(scores, total)
    torch.testing.assert_close(k2.mutual_information_recursion(usable, py, boundary), scores)
    wanted = torch.autograd.grad(total.sum(), (px, py), retain_graph=True)
    torch.testing.assert_close(px_grad, wanted[0])
    torch.testing.assert_close(py_grad, wanted[1])
    assert not px_grad.requires_grad
    got = torch.autograd.grad(scores, (px, py), UPSTREAM)
    wanted = torch.autograd.grad(total, (px, py), UPSTREAM)
    for got_grad, wanted_grad in zip(got, wanted, strict=True):
        torch.testing.assert_close(got_grad, wanted_grad)


@pytest.mark.parametrize("symbol_takes_frame", [False, True])
def test_joint_recursion_splits_the_score(symbol_takes_frame: bool) -> None:
    boundary = BOUNDARIES["lengths"]
    terms = [random_px_py(symbol_takes_frame, seed) for seed in (1, 2, 3)]
    px = [x if symbol_takes_frame else blocked(x, boundary) for x, _ in terms]
    py = [y for _, y in terms]
    parts = k2.joint_mutual_information_recursion(px, py, boundary)
    assert parts.shape == (3, 4)
    scores, (px_grad, py_grad) = k2.mutual_information_recursion(
        sum(px), sum(py), boundary, return_grad=True
    )
    torch.testing.assert_close(parts.sum(0), scores)
    for part, x, y in list(zip(parts, px, py, strict=True))[1:]:
        share = (px_grad * x.nan_to_num(neginf=0.0)).sum((1, 2)) + (py_grad * y).sum((1, 2))
        torch.testing.assert_close(part, share)
    # Each part's derivative in its own term is the occupancy, that of the first as well.
    for k, (x, y) in enumerate(terms):
        got = torch.autograd.grad(parts[k], (x, y), UPSTREAM, retain_graph=True)
        torch.testing.assert_close(got[0], px_grad * UPSTREAM[:, None, None])
        torch.testing.assert_close(got[1], py_grad * UPSTREAM[:, None, None])


def test_joint_recursion_needs_terms() -> None:
    px, py = random_px_py(True)
    with pytest.raises(ValueError, match="px has 0 terms and py 0"):
        k2.joint_mutual_information_recursion([], [])
    with pytest.raises(ValueError, match="px has 1 terms and py 2"):
        k2.joint_mutual_information_recursion([px], [py, py])
    with pytest.raises(TypeError, match="px is a NoneType; it must be a list or tuple of tensors"):
        k2.joint_mutual_information_recursion(None, None)


def test_joint_recursion_has_no_second_derivative() -> None:
    terms = [random_px_py(True, seed) for seed in (1, 2)]
    px, py = zip(*terms, strict=True)
    scores = k2.joint_mutual_information_recursion(px, py)
    (grad,) = torch.autograd.grad(scores.sum(), px[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        (scores.sum() + grad.pow(2).sum()).backward()


@pytest.mark.parametrize("rnnt_type", TYPES)
@pytest.mark.parametrize("hat", [False, True])
def test_joint_log_probs(rnnt_type: str, hat: bool) -> None:
    data = batch()
    px, py = k2.get_rnnt_logprobs_joint(
        data.logits, data.targets, BLANK, rnnt_type, data.boundary, hat
    )
    assert py.shape == (4, 4, 4)
    assert px.shape == (4, 3, 5 if rnnt_type == "regular" else 4)
    for n, (t_n, u_n) in enumerate(LENGTHS):
        words = data.targets[n].tolist()
        emit, blank = joiner_log_probs(data.logits[n], words, BLANK, hat=hat)
        expected = emit[:, :3].T
        if rnnt_type == "constrained":
            expected = expected + blank[:, 1:].T
        torch.testing.assert_close(px[n, :u_n, :t_n], expected[:u_n, :t_n])
        torch.testing.assert_close(py[n], blank.T)
        if rnnt_type == "regular":
            assert (px[n, :, t_n] == -torch.inf).all()
            assert (px[n, :, 4] == -torch.inf).all()


@pytest.mark.parametrize("rnnt_type", TYPES)
@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_log_probs_of_16_bits_are_those_of_float32(
    rnnt_type: str, hat: bool, dtype: torch.dtype
) -> None:
    """Far apart, where products of probabilities underflow in float16."""
    data = batch()
    am, lm = (20 * x.detach().to(dtype) for x in (data.am, data.lm))
    logits = am[:, :, None] + lm[:, None]
    ranges = torch.arange(4).expand(4, 4, 4)

    def log_probs(am: Tensor, lm: Tensor, logits: Tensor) -> list[Tensor]:
        given = (data.targets, BLANK, rnnt_type, data.boundary)
        band = (data.targets, ranges, BLANK, data.boundary, rnnt_type, hat)
        return [
            *k2.get_rnnt_logprobs_smoothed(
                lm, am, data.targets, BLANK, boundary=data.boundary, rnnt_type=rnnt_type
            ),
            *k2.get_rnnt_logprobs_joint(logits, *given, hat),
            *k2.get_rnnt_logprobs_pruned(logits, *band),
        ]

    inputs = (am, lm, logits)
    in_float32 = [x.float() for x in inputs]
    expected = log_probs(*in_float32)
    torch.testing.assert_close(log_probs(*inputs), expected)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(log_probs(*in_float32), expected)


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_simple_log_probs_are_those_of_the_joint(rnnt_type: str) -> None:
    data = batch()
    logits = data.am[:, :, None] + data.lm[:, None]
    joint = k2.get_rnnt_logprobs_joint(logits, data.targets, BLANK, rnnt_type, data.boundary)
    simple = k2.get_rnnt_logprobs(data.lm, data.am, data.targets, BLANK, rnnt_type, data.boundary)
    smoothed = k2.get_rnnt_logprobs_smoothed(
        data.lm, data.am, data.targets, BLANK, 0.0, 0.0, data.boundary, rnnt_type
    )
    for expected, *others in zip(joint, simple, smoothed, strict=True):
        for other in others:
            torch.testing.assert_close(other, expected)
            weight = torch.randn(expected.shape, dtype=torch.float64)
            finite = expected > -torch.inf
            for tensor in (data.am, data.lm):
                (got,) = torch.autograd.grad(
                    (weight * other)[finite].sum(), tensor, retain_graph=True
                )
                (want,) = torch.autograd.grad(
                    (weight * expected)[finite].sum(), tensor, retain_graph=True
                )
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_pruned_log_probs_are_the_joints_inside_the_band(rnnt_type: str) -> None:
    data = batch()
    start = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
    ranges = start[:, :, None] + torch.arange(2)
    kept = torch.zeros(4, 4, 4, dtype=torch.bool).scatter(2, ranges, True).transpose(1, 2)
    index = ranges[..., None].expand(-1, -1, -1, data.logits.shape[-1])
    px, py = k2.get_rnnt_logprobs_pruned(
        data.logits.gather(2, index), data.targets, ranges, BLANK, data.boundary, rnnt_type
    )
    full_px, full_py = k2.get_rnnt_logprobs_joint(
        data.logits, data.targets, BLANK, rnnt_type, data.boundary
    )
    torch.testing.assert_close(py, full_py.where(kept, -torch.inf))
    allowed = kept[:, :3]
    if rnnt_type == "constrained":
        allowed = allowed & kept[:, 1:]
    if rnnt_type == "regular":
        allowed = torch.nn.functional.pad(allowed, (0, 1))
    torch.testing.assert_close(px, full_px.where(allowed, -torch.inf))


def test_log_probs_of_scores_far_apart_are_exact() -> None:
    am, lm = torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)
    am[..., 1], lm[..., 2] = 120.0, 120.0
    targets = torch.tensor([[3, 1]])
    px, py = k2.get_rnnt_logprobs(lm, am, targets, 0)
    exact = (am[:, :, None] + lm[:, None]).double().log_softmax(-1)
    torch.testing.assert_close(py, exact[..., 0].transpose(1, 2).float())
    torch.testing.assert_close(px[0, 0, :2], exact[0, :, 0, 3].float())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: k2.get_rnnt_logprobs(d.lm[0], d.am, d.targets, 0), r"lm has shape \(4, 6\)"),
        (
            lambda d: k2.get_rnnt_logprobs(d.lm, d.am[..., :3], d.targets, 0),
            "lm has shape .* by the shape of am",
        ),
        (
            lambda d: k2.get_rnnt_logprobs(d.lm, d.am, d.targets[:, :2], 0),
            r"symbols has shape \(4, 2\); it must be \(B, S\) = \(4, 3\)",
        ),
        (
            lambda d: k2.get_rnnt_logprobs(d.lm, d.am, d.targets, 0, "rna"),
            r"rnnt_type is 'rna'; it must be one of \['regular', 'modified', 'constrained'\]",
        ),
        (
            lambda d: k2.get_rnnt_logprobs_joint(d.am, d.targets, 0),
            r"logits has shape \(4, 4, 6\); it must be \(B, T, S \+ 1, C\)",
        ),
        (
            lambda d: k2.get_rnnt_logprobs_pruned(d.logits, d.targets, d.targets, 0),
            r"ranges has shape \(4, 3\); it must be \(B, T, R\)",
        ),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(batch())
