"""The values of a model's parameters: a short name for them, and NaN, infinite and huge ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

# Training with larger parameters has diverged: float32 has a resolution of only 0.06 there, and
# float16 ends at 65,504.
LARGEST_PARAMETER = 1e6
_DIGITS = 16


@torch.no_grad()
def describe_broken(
    state: Mapping[str, Tensor], buffers: Collection[str] = (), kind: str = ""
) -> str:
    """Describe the first tensor with NaN, infinite or huge values; empty if there is none.

    Args:
        state: parameters and buffers by name, as `nn.Module.state_dict` returns them, on any
            device. Tensors that are not floating-point are ignored.
        buffers: names of those that are buffers, whose values may be huge: they may be counts.
        kind: what a tensor is called; by default "parameter" or "buffer".

    Returns:
        For example "parameter ctc_head.bias has NaN values (3 of 50); 7 more are broken".
    """
    tensors = {
        name: value
        for name, value in state.items()
        if value.is_floating_point() and value.numel() > 0
    }
    if not tensors:
        return ""
    # Both are NaN for a tensor with NaN; all are copied to the CPU together. A maximum norm takes
    # several times as long.
    largest_K = torch.stack(
        [torch.maximum(value.amax(), -value.amin()).float() for value in tensors.values()]
    )
    finite = torch.finfo(torch.float32).max
    broken = [
        (name, largest)
        for name, largest in zip(tensors, largest_K.tolist(), strict=True)
        if not largest <= (finite if name in buffers else LARGEST_PARAMETER)
    ]
    if not broken:
        return ""
    name, largest = next((each for each in broken if each[0] not in buffers), broken[0])
    kind = kind or ("buffer" if name in buffers else "parameter")
    others = f"; {len(broken) - 1} more are broken" if len(broken) > 1 else ""
    return f"{kind} {name} {_fault(tensors[name], largest)}{others}"


def _fault(value: Tensor, largest: float) -> str:
    if math.isfinite(largest):
        return f"has values up to {largest:.1e}"
    for kind, count in (("NaN", value.isnan().sum()), ("infinite", value.isinf().sum())):
        if count:
            return f"has {kind} values ({int(count)} of {value.numel()})"
    return "has values beyond float32"


def fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits, equal for equal names, shapes and values on any device.

    Only parameters count: buffers such as counters of training do not change what a model outputs.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        value = parameter.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:_DIGITS]
