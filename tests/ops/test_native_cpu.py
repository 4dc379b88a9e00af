"""Every compiled CPU kernel against the plain-torch fallback of its op.

The fallbacks are tested against brute force elsewhere; here the two must agree on all outputs, with
every element written, for all layouts, topologies and dtypes.
"""

import pytest
import torch

from pruned_rnnt.ops._library import FALLBACKS
from pruned_rnnt.ops._native import has_native_kernel
from tests.ops.native_cases import SHAPES, Call, all_calls

pytestmark = pytest.mark.skipif(
    not has_native_kernel("log_probs", "cpu"), reason="the CPU library is not built"
)

# (dtype, rtol, atol): 16-bit results may differ by one rounding.
TOLERANCES = [
    (torch.float64, 1e-9, 1e-10),
    (torch.float32, 2e-4, 2e-5),
    (torch.float16, 4e-3, 4e-3),
    (torch.bfloat16, 3e-2, 3e-2),
]


def outputs_of(call: Call, function) -> list[torch.Tensor]:
    outputs = [output.clone() for output in call.outputs]
    function(*call.inputs, *outputs)
    return outputs


def native(call: Call):
    return getattr(torch.ops.pruned_rnnt, call.op)


def describe(call: Call) -> str:
    shown = [list(x.shape) if isinstance(x, torch.Tensor) else x for x in call.inputs]
    return f"{call.op}({', '.join(map(str, shown))})"


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES, ids=lambda x: str(x))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
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
