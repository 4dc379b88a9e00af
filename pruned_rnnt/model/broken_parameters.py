"""Whether the parameters of a model are numbers that a model can work with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

# float32 resolves such values to 0.06 only, and float16 ends below a tenth of them: training that
# comes here has diverged.
LARGEST_PARAMETER = 1e6


@torch.no_grad()
def describe_broken(state: Mapping[str, Tensor]) -> str:
    """Name the first tensor with NaN, infinite or absurdly large values; empty if there is none.

    Args:
        state: parameters and buffers by name, as of `nn.Module.state_dict`, on any device. Tensors
            that are not floating-point are not looked at.

    Returns:
        e.g. "parameter ctc_head.bias has NaN values (3 of 50); 7 more are broken".
    """
    tensors = {
        name: value
        for name, value in state.items()
        if value.is_floating_point() and value.numel() > 0
    }
    if not tensors:
        return ""
    # The largest absolute value of a tensor with NaN is NaN. One copy to the CPU for all tensors.
    largest_K = torch.stack(
        [torch.linalg.vector_norm(value, math.inf).float() for value in tensors.values()]
    )
    broken = [
        (name, largest)
        for name, largest in zip(tensors, largest_K.tolist(), strict=True)
        if not largest <= LARGEST_PARAMETER
    ]
    if not broken:
        return ""
    name, largest = broken[0]
    others = f"; {len(broken) - 1} more are broken" if len(broken) > 1 else ""
    return f"parameter {name} {_fault(tensors[name], largest)}{others}"


def _fault(value: Tensor, largest: float) -> str:
    if math.isfinite(largest):
        return f"has values up to {largest:.1e}"
    for kind, count in (("NaN", value.isnan().sum()), ("infinite", value.isinf().sum())):
        if count:
            return f"has {kind} values ({int(count)} of {value.numel()})"
    return "has values beyond float32"
