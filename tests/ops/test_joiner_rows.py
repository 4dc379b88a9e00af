"""Gradients of the joiner's rows for bands that move slowly, jump or go back, chunk by chunk."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import FALLBACKS
from pruned_rnnt.ops.joiner.joiner_rows import joiner_rows_backward

LENGTHS, SYMBOLS, FRAMES = [150, 97, 1, 60], [40, 12, 0, 30], 152
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def starts_of(movement: str, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (len(LENGTHS), FRAMES)
    steps = {
        # Windows of hundreds of frames, of one frame, that jump over columns, and that go back.
        "still": torch.zeros(shape),
        "slow": (torch.rand(shape, generator=generator) < 0.05).float(),
        "fast": torch.randint(0, 3, shape, generator=generator).float(),
        "jumps": 9.0 * (torch.rand(shape, generator=generator) < 0.1),
        "back": torch.randint(-2, 4, shape, generator=generator).float(),
    }[movement]
    last = (torch.tensor(SYMBOLS)[:, None] + 1 - columns).clamp_min(0)
    return steps.cumsum(1).clamp_min(0).minimum(last.float() + (movement == "jumps")).int()


def gradients(device, function, start, splits, columns, dtype, out, width, cuts):
    """grad_am and grad_lm of random rows, NaN outside the lattice, in chunks of `cuts` frames."""
    torch.manual_seed(3)
    rows = len(LENGTHS) * FRAMES * columns if splits is None else int(splits[-1])
    grad, hidden = torch.randn(2, rows, width, dtype=torch.float64).to(dtype)
    lengths = [torch.tensor(x, dtype=torch.int32) for x in (LENGTHS, SYMBOLS)]
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    grad_am = torch.full((len(LENGTHS), FRAMES, width), 7.0, dtype=out)
    grad_lm = torch.randn(len(LENGTHS), max(SYMBOLS) + 1, width, dtype=acc)
    if splits is None:
        u = start[..., None] + torch.arange(columns)
        inside = (u >= 0) & (u <= lengths[1][:, None, None])
        inside &= (torch.arange(FRAMES) < lengths[0][:, None])[..., None]
        grad[~inside.view(-1)] = hidden[~inside.view(-1)] = float("nan")
    moved = [x.to(device) if isinstance(x, Tensor) else x for x in (*lengths, start, splits)]
    grad_am, grad_lm, grad, hidden = (x.to(device) for x in (grad_am, grad_lm, grad, hidden))
    begin = 0
    for frames in (*cuts, rows):
        end = min(rows, begin + frames * columns)
        chunk = (grad[begin:end], hidden[begin:end], *moved, FRAMES, columns, begin, 1)
        function(*chunk, grad_am, grad_lm)
        begin = end
    return grad_am.cpu(), grad_lm.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("columns", [1, 4, 5, 8, 9])
@pytest.mark.parametrize("movement", ["still", "slow", "fast", "jumps", "back"])
def test_gradients_of_bands(device, packed, columns, movement) -> None:
    start = starts_of(movement, columns)
    splits = torch.tensor([0, *LENGTHS]).cumsum(0) * columns if packed else None
    for dtype, out, tolerance in (
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-4),
        (torch.bfloat16, torch.bfloat16, 8e-3),
        (torch.bfloat16, torch.float32, 1e-4),
    ):
        for cuts in ((), (70, 3, 100)):
            case = (start, splits, columns, dtype, out, 72, cuts)
            got = gradients(device, joiner_rows_backward, *case)
            want = gradients("cpu", FALLBACKS["joiner_rows_backward"], *case)
            again = gradients(device, joiner_rows_backward, *case)
            for left, right, repeated in zip(got, want, again, strict=True):
                torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
                assert torch.equal(left, repeated)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("out", [torch.float32, torch.float64])
def test_whole_lattices_cut_within_frames(device, packed, out) -> None:
    """Gradients equal those of one chunk, from chunks that begin anywhere, also behind the rows."""
    torch.manual_seed(4)
    frames_N, symbols_N = (torch.tensor(x, dtype=torch.int32) for x in ([7, 9, 1, 6], [5, 2, 0, 8]))
    splits = torch.tensor([0, *(frames_N * (symbols_N + 1)).tolist()]).cumsum(0) if packed else None
    room = 4 * 9 * 9
    grad, hidden = torch.randn(2, room, 40, dtype=out)
    rows = [frames_N, symbols_N, None, splits, 9, 9]
    rows = [x.to(device) if isinstance(x, Tensor) else x for x in rows]
    grad, hidden = grad.to(device), hidden.to(device)

    def sums(function, cuts: list[int]) -> list[Tensor]:
        grad_am, grad_lm = (torch.zeros(4, 9, 40, dtype=out, device=device) for _ in range(2))
        for begin, end in pairwise([0, *cuts, room]):
            chunk = (grad[begin:end], hidden[begin:end], *rows, begin, 1)
            function(*chunk, grad_am, grad_lm)
        return [grad_am, grad_lm]

    tolerance = 1e-5 if out == torch.float32 else 1e-12
    whole = sums(FALLBACKS["joiner_rows_backward"], [])
    for function in (FALLBACKS["joiner_rows_backward"], joiner_rows_backward):
        for cuts in ([], [1, 2, 3, 20, 57, 83, 84, 120, 201], [63], [150]):
            found = sums(function, cuts)
            torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance)
            again = sums(function, cuts)
            if function is joiner_rows_backward:
                assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
