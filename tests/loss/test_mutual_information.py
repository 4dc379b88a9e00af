"""mutual_information against all paths one by one, with boundaries."""

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from tests.lattice_paths import log_total
from tests.loss.loss_cases import DEVICES, RNNT_TYPES, has_path

# [u_begin, t_begin, u_end, t_end] inside U = 4, T = 5.
BOUNDARIES = [
    [0, 0, 4, 5],
    [0, 0, 2, 5],
    [1, 0, 3, 4],
    [0, 2, 1, 5],
    [2, 1, 4, 5],
    [3, 3, 3, 4],
    [0, 4, 0, 5],
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(31)


def arcs(batch: int, rnnt_type: str) -> tuple[Tensor, Tensor]:
    last = 6 if rnnt_type == "regular" else 5
    px = torch.randn(batch, 4, last, dtype=torch.float64)
    if rnnt_type == "regular":
        px[:, :, 5] = -torch.inf
    return px.requires_grad_(), torch.randn(batch, 5, 5, dtype=torch.float64).requires_grad_()


def reference(px: Tensor, py: Tensor, boundary: list[int], rnnt_type: str) -> Tensor:
    """px, py of one utterance; symbols cannot be emitted at t_end."""
    u_begin, t_begin, u_end, t_end = boundary
    emit = torch.full((5, 5), -torch.inf, dtype=px.dtype).index_put(
        (torch.arange(5)[:, None], torch.arange(4)[None]), px[:, :5].T
    )
    window = (slice(t_begin, t_end), slice(u_begin, u_end + 1))
    return log_total(emit[window], py.T[window], t_end - t_begin, u_end - u_begin, rnnt_type)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_value_gradient_and_occupancy(rnnt_type, dtype, device) -> None:
    boundaries = [b for b in BOUNDARIES if has_path(b[3] - b[1], b[2] - b[0], rnnt_type)]
    px, py = arcs(len(boundaries), rnnt_type)
    if rnnt_type == "regular":
        with torch.no_grad():
            for n, (_, _, _, t_end) in enumerate(boundaries):
                px[n, :, t_end] = -torch.inf
    expected = torch.stack(
        [reference(px[n], py[n], b, rnnt_type) for n, b in enumerate(boundaries)]
    )
    upstream = torch.linspace(-1, 2, len(boundaries), dtype=torch.float64)
    wanted = torch.autograd.grad((expected * upstream).sum(), (px, py), retain_graph=True)
    occupied = torch.autograd.grad(expected.sum(), (px, py))
    given = [x.detach().to(device, dtype).requires_grad_() for x in (px, py)]
    boundary = torch.tensor(boundaries, device=device)
    total, occupancy = pruned_rnnt.mutual_information(*given, boundary, rnnt_type=rnnt_type)
    assert total.dtype == dtype
    precision = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(total.cpu().double(), expected.detach(), **(precision or {}))
    grads = torch.autograd.grad((total * upstream.to(total)).sum(), given)
    for i in range(2):
        torch.testing.assert_close(grads[i].cpu().double(), wanted[i], **precision)
        torch.testing.assert_close(occupancy[i].cpu().double(), occupied[i], **precision)
        assert occupancy[i].shape == given[i].shape
        assert not occupancy[i].requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_default_boundary_is_everything(device) -> None:
    px, py = (x.detach().to(device) for x in arcs(2, "regular"))
    whole = torch.tensor([[0, 0, 4, 5]] * 2, device=device)
    plain, bounded = (pruned_rnnt.mutual_information(px, py, b) for b in (None, whole))
    assert torch.equal(plain.total, bounded.total)
    assert torch.equal(plain.occupancy.emit, bounded.occupancy.emit)


@pytest.mark.parametrize("device", DEVICES)
def test_finite_emits_in_the_last_column_count(device) -> None:
    """As in k2: symbols may follow the last blank if px[:, :, T] allows it."""
    px = torch.zeros(1, 1, 2, dtype=torch.float64, device=device)
    py = torch.zeros(1, 2, 1, dtype=torch.float64, device=device)
    total, _ = pruned_rnnt.mutual_information(px, py)
    assert total.item() == pytest.approx(torch.tensor(2.0).log().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES)
def test_no_path_is_minus_infinity_without_occupancy(rnnt_type, device) -> None:
    px, py = arcs(3, rnnt_type)
    with torch.no_grad():
        py[1] = -torch.inf
        px[1] = -torch.inf
    given = [x.detach().to(device).requires_grad_() for x in (px, py)]
    total, occupancy = pruned_rnnt.mutual_information(*given, rnnt_type=rnnt_type)
    assert total.isinf().tolist() == [False, True, False]
    assert not occupancy.emit[1].any()
    assert not occupancy.blank[1].any()
    for grad in torch.autograd.grad(total[[0, 2]].sum(), given):
        assert grad.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_occupancies_add_up(device) -> None:
    """One blank leaves every frame, and every symbol is emitted once."""
    px, py = (torch.randn(2, *shape).to(device) for shape in ((37, 91), (38, 90)))
    px[:, :, 90] = -torch.inf
    _, (emit, blank) = pruned_rnnt.mutual_information(px, py)
    ones = torch.ones((), device=device)
    torch.testing.assert_close(blank.sum(1), ones.expand(2, 90), rtol=0, atol=3e-4)
    torch.testing.assert_close(emit.sum(2), ones.expand(2, 37), rtol=0, atol=3e-4)


@pytest.mark.parametrize("rnnt_type", RNNT_TYPES)
def test_gradcheck(rnnt_type) -> None:
    px, py = arcs(2, rnnt_type)
    used = px.shape[2] - 1 if rnnt_type == "regular" else px.shape[2]
    px = px.detach()[:, :, :used].requires_grad_()

    def total(inner: Tensor, stay: Tensor) -> Tensor:
        pad = (0, 1) if rnnt_type == "regular" else (0, 0)
        whole = torch.nn.functional.pad(inner, pad, value=-torch.inf)
        return pruned_rnnt.mutual_information(whole, stay, rnnt_type=rnnt_type).total

    assert torch.autograd.gradcheck(total, (px, py), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_long_lattices_do_not_lose_precision(device) -> None:
    """Float32 against float64 for log P near -2000."""
    px, py = (-5 * torch.rand(2, *shape, dtype=torch.float64) for shape in ((60, 701), (61, 700)))
    px[:, :, 700] = -torch.inf
    wide = pruned_rnnt.mutual_information(px, py)
    narrow = pruned_rnnt.mutual_information(*(x.float().to(device) for x in (px, py)))
    torch.testing.assert_close(narrow.total.cpu().double(), wide.total, rtol=1e-6, atol=0)
    for a, b in zip(narrow.occupancy, wide.occupancy, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=5e-3)


def test_py_without_rows_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"^py has shape \(2, 0, 4\); it must have a row for u = 0"
    ):
        pruned_rnnt.mutual_information(torch.zeros(2, 0, 4), torch.zeros(2, 0, 4))
