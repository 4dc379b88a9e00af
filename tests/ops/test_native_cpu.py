"""Every compiled CPU kernel against the plain-torch fallback of its op.

The fallbacks are tested against brute force elsewhere; here the two must agree on all outputs, with
every element written, for all layouts, topologies and dtypes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pruned_rnnt
from pruned_rnnt.ops.common.library import FALLBACKS
from pruned_rnnt.ops.common.native import has_native_kernel
from tests.ops.native_batches import SHAPES, TOLERANCES, Call, torch_threads
from tests.ops.native_cases import all_calls

pytestmark = pytest.mark.skipif(
    not has_native_kernel("log_probs", "cpu"), reason="the CPU library is not built"
)


SLOW = {"single_long": [pytest.mark.slow]}
MARKED_SHAPES = [pytest.param(x, id=x[0], marks=SLOW.get(x[0], [])) for x in SHAPES]


def outputs_of(call: Call, function) -> list[torch.Tensor]:
    outputs = call.fresh_outputs()
    function(*call.inputs, *outputs)
    return [output for output in outputs if output is not None]


def native(call: Call):
    return getattr(torch.ops.pruned_rnnt, call.op)


def describe(call: Call) -> str:
    shown = [list(x.shape) if isinstance(x, torch.Tensor) else x for x in call.inputs]
    return f"{call.op}({', '.join(map(str, shown))})"


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES, ids=lambda x: str(x))
@pytest.mark.parametrize("shape", MARKED_SHAPES)
def test_kernel_equals_fallback(shape, dtype, rtol, atol) -> None:
    torch.manual_seed(len(shape[0]))
    for call in all_calls(shape, dtype):
        expected = outputs_of(call, FALLBACKS[call.op])
        got = outputs_of(call, native(call))
        for index, (left, right) in enumerate(zip(got, expected, strict=True)):
            torch.testing.assert_close(
                left,
                right,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text, c=call, i=index: f"output {i} of {describe(c)}\n{text}",
            )


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(0)
    calls = list(all_calls(SHAPES[5], torch.float32))
    results = []
    for count in (1, 3):
        with torch_threads(count):
            results.append([outputs_of(call, native(call)) for call in calls])
    for call, one, three in zip(calls, *results, strict=True):
        for left, right in zip(one, three, strict=True):
            assert torch.equal(left.nan_to_num(7), right.nan_to_num(7)), describe(call)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_kernels_for_older_processors(capability) -> None:
    # The library selects the version of its loops when it is loaded.
    selected = [f"{__file__}::test_kernel_equals_fallback", "-k", "ragged and float32"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *selected],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout


def units_in_the_last_place(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of got, in units of the last place of the exact float64 values."""
    rounded = exact.to(got.dtype)
    unit = torch.nextafter(rounded.abs(), torch.tensor(float("inf"))).double() - rounded.abs()
    return float(((got.double() - exact).abs() / unit).max())


def test_exp_is_accurate() -> None:
    x = torch.cat([torch.zeros(1), -torch.logspace(-8, 1.94, 200_001)])[None, None]
    maximum, lse, x_exp = torch.empty(1, 1), torch.empty(1, 1), torch.empty_like(x[None])
    lengths = torch.tensor([1], dtype=torch.int32)
    torch.ops.pruned_rnnt.exp_rows(x, lengths, 0, maximum, lse, x_exp)
    assert units_in_the_last_place(x_exp[0], x.double().exp()) < 1.5


def test_exp_keeps_infinity_and_nan() -> None:
    x = torch.tensor([[0.0, -float("inf"), -1e4, -104.0], [float("nan"), 0.0, 1.0, 2.0]])[None]
    maximum, lse, x_exp = torch.empty(1, 2), torch.empty(1, 2), torch.empty_like(x[None])
    lengths = torch.tensor([2], dtype=torch.int32)
    torch.ops.pruned_rnnt.exp_rows(x, lengths, 0, maximum, lse, x_exp)
    assert x_exp[0, 0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert x_exp[0, 0, 1, 0].isnan()


def test_log_is_accurate() -> None:
    product = torch.logspace(-27, 30, 100_001)[None, None]
    width = product.shape[2]
    zeros = torch.zeros(1, width, 1)
    lengths = [torch.tensor([size], dtype=torch.int32) for size in (1, width - 1)]
    targets = torch.zeros(1, width - 1, dtype=torch.int32)
    px, py, logz = (torch.empty(1, 1, width) for _ in range(3))
    maxima = (torch.zeros(1, 1), torch.zeros(1, width))
    inputs = (zeros[:, :1], zeros, *maxima, product, None, None, None, targets, *lengths)
    torch.ops.pruned_rnnt.simple_log_probs(*inputs, 0, 0.0, 0.0, px, py, logz)
    assert units_in_the_last_place(logz, product.double().log()) < 2


def test_tanh_is_accurate() -> None:
    x = torch.logspace(-20, 2, 100_000)
    am = torch.cat([x, -x, torch.tensor([0.0, float("inf"), -float("inf")])])[None, None]
    lengths = [torch.tensor([size], dtype=torch.int32) for size in (1, 0)]
    hidden = torch.empty(1, am.shape[2])
    geometry = (*lengths, None, None, 1, 1, 0)
    torch.ops.pruned_rnnt.joiner_rows(am, torch.zeros_like(am), *geometry, 1, hidden)
    assert units_in_the_last_place(hidden, am[0].double().tanh()) < 3


def test_gradients_of_a_trained_model_have_no_subnormal_numbers() -> None:
    """Off its path, occupancies fall below them: they would slow down the matrix products after."""
    torch.manual_seed(0)
    logits = (40 * torch.randn(2, 30, 11, 20)).requires_grad_()
    lengths = torch.tensor([30, 20], dtype=torch.int32), torch.tensor([10, 7], dtype=torch.int32)
    targets = torch.randint(1, 20, (2, 10), dtype=torch.int32)
    for clamp in (None, 0.5):
        (gradient,) = torch.autograd.grad(
            pruned_rnnt.rnnt_loss(logits, targets, *lengths, clamp=clamp).sum(), logits
        )
        size = gradient.abs()
        assert not ((size > 0) & (size < torch.finfo(torch.float32).tiny)).any()
        assert 0.4 < (size == 0).float().mean() < 1
