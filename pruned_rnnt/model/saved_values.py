"""Check what a file of torch.save holds, before anything reads the elements of its tensors.

A tensor may be a view that repeats its storage, so a small file can describe a tensor that takes
hours to read; containers may repeat each other in the same way, or contain themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# A training state of a large model has some ten thousand values, and 700 for each GPU.
MOST_VALUES = 500_000
# Several names may share one tensor, such as tied weights.
_MOST_REPEATS = 4
_SMALL_BYTES = 1 << 20
_SHOWN = 80  # characters of a name in a message


def describe_unusable(values: Any, file_bytes: int) -> str:
    """Describe the first value that cannot be read safely; empty if there is none.

    Refused are tensors that are larger than their storage, or not dense on the CPU (meta, sparse
    and quantised ones), storages larger than the file, and more than `MOST_VALUES` values.

    Args:
        values: what `torch.load` returned: nested dicts, lists and tuples.
        file_bytes: size of the file, uncompressed.
    """
    storages: dict[int, int] = {}
    total = count = 0
    waiting = [("", values)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping | list | tuple | set):
            count += len(value)
            if count > MOST_VALUES:
                return f"it holds more than {MOST_VALUES:,} values"
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            prefix = f"{name[:_SHOWN]}." if name else ""
            waiting += [(f"{prefix}{str(key)[:_SHOWN]}", item) for key, item in items]
        elif isinstance(value, Tensor):
            if fault := _fault(value):
                return f"the tensor {name} {fault}"
            total += value.numel() * value.element_size()
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    stored = sum(storages.values())
    if stored > file_bytes:
        return f"its tensors have {stored:,} bytes, more than the file"
    if total > _MOST_REPEATS * stored + _SMALL_BYTES:
        return f"its tensors repeat {stored:,} bytes {total // max(stored, 1)} times"
    return ""


def _fault(value: Tensor) -> str:
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        kind = "quantised" if value.is_quantized else f"{value.device.type}, {value.layout}"
        return f"is not a dense tensor on the CPU ({kind})"
    stored = value.untyped_storage().nbytes()
    if value.numel() * value.element_size() > stored:
        return f"of shape {tuple(value.shape)} repeats its {stored:,} bytes"
    return ""


def describe_no_parameters(state: Any) -> str:
    """Why `state` is not a model's parameters, names with tensors; empty if it is."""
    if not isinstance(state, Mapping):
        return f"it is of type {type(state).__name__}, not names with tensors"
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            return f"{str(name)[:_SHOWN]!r} is of type {type(value).__name__}, not a tensor"
    return ""
