"""Files of the safetensors format: the length of a JSON header, the header, and the tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.model.saved_file import UnusableFileError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_MOST_HEADER = 1 << 26
_LENGTH_BYTES = 8


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, as copies.

    Raises:
        UnusableFileError: the file is damaged, or has a dtype that parameters do not have.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < size <= _MOST_HEADER:
            raise UnusableFileError(f"{path} is damaged or not a safetensors file")
        try:
            header = json.loads(file.read(size))
            entries = {str(k): v for k, v in header.items() if k != "__metadata__"}
        except (ValueError, AttributeError) as error:
            raise UnusableFileError(f"{path} is damaged: its header is not JSON") from error
    begin = _LENGTH_BYTES + size
    content = np.fromfile(path, dtype=np.uint8, offset=begin)
    return {name: _tensor(path, name, entry, content) for name, entry in entries.items()}


def _tensor(path: Path, name: str, entry: Any, content: np.ndarray[Any, Any]) -> Tensor:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], [int(x) for x in entry["shape"]]
        begin, end = (int(x) for x in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableFileError(f"{path} is damaged: its entry of {name} is {entry}") from error
    expected = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if (
        min(shape, default=0) < 0
        or not 0 <= begin <= end <= len(content)
        or end - begin != expected
    ):
        raise UnusableFileError(f"{path} is damaged: the bytes of {name} do not fit its shape")
    return torch.from_numpy(content[begin:end].copy()).view(dtype).view(shape)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file that safetensors and transformers read."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, begin = [], 0
    for name, value in tensors.items():
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, begin + len(data)],
        }
        parts.append(data)
        begin += len(data)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    path.write_bytes(b"".join((len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded, *parts)))
