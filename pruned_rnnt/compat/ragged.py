"""A replacement for k2's RaggedTensor if k2 is not installed: lists of numbers, of two axes.

It covers icefall's use for the labels of a batch. Names, dtypes and results are k2's. More axes
and automata need k2 itself.

    y = RaggedTensor([[1, 3], [5]])          # int32, on the CPU
    y.shape.row_splits(1)                    # tensor([0, 2, 3], dtype=torch.int32)
    cat([y, y], axis=1).pad("constant", 0)   # (2, 4)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.int32, torch.float32, torch.float64)


class RaggedShape:
    """The lengths of the rows of a RaggedTensor."""

    num_axes = 2

    def __init__(self, row_splits: Tensor) -> None:
        """Args: row_splits: (rows + 1,) int32: where each row begins, and where the last ends."""
        self._row_splits = row_splits

    @property
    def dim0(self) -> int:
        """Number of rows."""
        return self._row_splits.numel() - 1

    @property
    def device(self) -> torch.device:
        return self._row_splits.device

    def row_splits(self, axis: int) -> Tensor:
        """(rows + 1,) int32: where each row begins, and where the last ends. The axis is 1."""
        _check_axis(axis, (1,))
        return self._row_splits

    def row_ids(self, axis: int) -> Tensor:
        """(values,) int32: the row of each value. The axis is 1."""
        _check_axis(axis, (1,))
        rows = torch.arange(self.dim0, dtype=torch.int32, device=self.device)
        return rows.repeat_interleave(self._lengths())

    def tot_size(self, axis: int) -> int:
        """Number of rows (axis 0) or of values (axis 1)."""
        _check_axis(axis, (0, 1))
        return self.dim0 if axis == 0 else int(self._row_splits[-1])

    def tot_sizes(self) -> tuple[int, int]:
        return self.dim0, self.numel()

    def max_size(self, axis: int) -> int:
        """Length of the longest row. The axis is 1."""
        _check_axis(axis, (1,))
        return int(self._lengths().max()) if self.dim0 else 0

    def numel(self) -> int:
        """Number of values."""
        return self.tot_size(1)

    def to(self, device: torch.device | str) -> RaggedShape:
        return RaggedShape(self._row_splits.to(device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShape) and torch.equal(self._row_splits, other._row_splits)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rows = " ".join(f"[ {'x ' * length}]" for length in self._lengths().tolist())
        return f"[ {rows} ]"

    def _lengths(self) -> Tensor:
        return self._row_splits[1:] - self._row_splits[:-1]


class RaggedTensor:
    """Rows of numbers, each of its own length.

    Args:
        data: a list of lists of numbers, a tensor of two dimensions, or a RaggedShape.
        value: with a RaggedShape, its values, (values,).
        dtype: int32, float32 or float64. A list is int32, or float32 if it contains a float.
        device: of the tensors made from a list; the CPU.

    Raises:
        ValueError: data of more or fewer than two axes, values that do not fill the shape, or
            another dtype.
    """

    num_axes = 2

    def __init__(
        self,
        data: Sequence[Sequence[float]] | Tensor | RaggedShape,
        value: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(data, RaggedShape):
            if value is None or value.shape != (data.numel(),):
                shown = "missing" if value is None else f"of shape {tuple(value.shape)}"
                raise ValueError(f"value is {shown}; the shape needs ({data.numel()},)")
            self.shape, self.values = data, value
        elif isinstance(data, Tensor):
            if data.ndim != 2:
                raise ValueError(f"data has {data.ndim} dimensions; without k2 it must have 2")
            steps = torch.arange(data.shape[0] + 1, dtype=torch.int32, device=data.device)
            self.shape = RaggedShape(steps * data.shape[1])
            self.values = data.contiguous().view(-1)
        else:
            self.shape, self.values = _from_rows(data, device or "cpu")
        if dtype is not None:
            self.values = self.values.to(dtype)
        if self.values.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.values.dtype}; it must be int32, float32 or float64")

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    @property
    def requires_grad(self) -> bool:
        return self.values.requires_grad

    @property
    def dim0(self) -> int:
        """Number of rows."""
        return self.shape.dim0

    def tot_size(self, axis: int) -> int:
        """Number of rows (axis 0) or of values (axis 1)."""
        return self.shape.tot_size(axis)

    def numel(self) -> int:
        """Number of values."""
        return self.values.numel()

    def to(self, target: torch.device | str | torch.dtype) -> RaggedTensor:
        """On another device, or of another dtype."""
        if isinstance(target, torch.dtype):
            return RaggedTensor(self.shape, self.values, dtype=target)
        return RaggedTensor(self.shape.to(target), self.values.to(target))

    def clone(self) -> RaggedTensor:
        return RaggedTensor(self.shape, self.values.clone())

    def tolist(self) -> list[list[Any]]:
        return [row.tolist() for row in self._rows()]

    def pad(self, mode: str = "constant", padding_value: float = 0) -> Tensor:
        """(rows, longest row) with the free places filled.

        Args:
            mode: 'constant', or 'replicate' to fill a row with its last value.
            padding_value: fills the free places, with 'replicate' those of empty rows alone.

        Raises:
            ValueError: another mode.
        """
        if mode not in ("constant", "replicate"):
            raise ValueError(f"mode is {mode!r}; it must be 'constant' or 'replicate'")
        splits = self.shape.row_splits(1).long()
        begin, end = splits[:-1, None], splits[1:, None]
        column = torch.arange(self.shape.max_size(1), device=self.device)
        source = begin + column
        is_filled = source < end
        if mode == "replicate":
            source, is_filled = source.minimum(end - 1), (begin < end).expand_as(source)
        fill = self.values.new_tensor(padding_value)
        if self.numel() == 0:
            return fill.expand(source.shape).contiguous()
        return torch.where(is_filled, self.values[source.clamp(0, self.numel() - 1)], fill)

    def remove_values_eq(self, target: float) -> RaggedTensor:
        """Without the values equal to target."""
        return self._kept(self.values != target)

    def remove_values_leq(self, cutoff: float) -> RaggedTensor:
        """Without the values up to cutoff."""
        return self._kept(self.values > cutoff)

    def __getitem__(self, key: int | slice | Tensor) -> Tensor | RaggedTensor:
        """A row as a tensor; or the rows of a slice, or of a tensor of indexes, (rows',)."""
        if isinstance(key, int):
            return self._rows()[key]
        rows = self._rows()
        chosen = rows[key] if isinstance(key, slice) else [rows[i] for i in key.tolist()]
        return _joined(chosen, self)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RaggedTensor)
            and self.shape == other.shape
            and torch.equal(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rows = ",\n              ".join(str(row) for row in self.tolist())
        device = "" if self.device.type == "cpu" else f"device='{self.device}', "
        return f"RaggedTensor([{rows}], {device}dtype={self.dtype})"

    @staticmethod
    def cat(srcs: Sequence[RaggedTensor], axis: int) -> RaggedTensor:
        """`cat` of this module."""
        return cat(srcs, axis)

    def _rows(self) -> tuple[Tensor, ...]:
        rows: tuple[Tensor, ...] = self.values.split(self.shape._lengths().tolist())
        return rows

    def _kept(self, is_kept: Tensor) -> RaggedTensor:
        kept_before = torch.nn.functional.pad(is_kept.cumsum(0, dtype=torch.int32), (1, 0))
        splits = kept_before[self.shape.row_splits(1).long()]
        return RaggedTensor(RaggedShape(splits), self.values[is_kept])


def cat(srcs: Sequence[RaggedTensor], axis: int) -> RaggedTensor:
    """The rows of all srcs one after the other (axis 0), or row by row joined to one (axis 1).

    Raises:
        ValueError: no srcs, different dtypes, or for axis 1 different numbers of rows.
    """
    _check_axis(axis, (0, 1))
    srcs = tuple(srcs)
    if not srcs:
        raise ValueError("srcs is empty; there must be at least one ragged tensor")
    if len({src.dtype for src in srcs}) > 1:
        raise ValueError(f"srcs have dtypes {[src.dtype for src in srcs]}; they must be the same")
    values = torch.cat([src.values for src in srcs])
    lengths = [src.shape._lengths() for src in srcs]
    if axis == 0:
        return RaggedTensor(RaggedShape(_splits(torch.cat(lengths))), values)
    if len({src.dim0 for src in srcs}) > 1:
        raise ValueError(f"srcs have {[src.dim0 for src in srcs]} rows; axis 1 needs equal numbers")
    order = torch.cat([src.shape.row_ids(1) for src in srcs]).argsort(stable=True)
    return RaggedTensor(RaggedShape(_splits(torch.stack(lengths).sum(0))), values[order])


def create_ragged_tensor(
    data: Sequence[Sequence[float]] | Tensor, dtype: torch.dtype | None = None
) -> RaggedTensor:
    """RaggedTensor(data, dtype=dtype)."""
    return RaggedTensor(data, dtype=dtype)


def _from_rows(
    rows: Sequence[Sequence[float]], device: torch.device | str
) -> tuple[RaggedShape, Tensor]:
    if isinstance(rows, str) or not all(isinstance(row, list | tuple) for row in rows):
        raise ValueError("data must be a list of lists of numbers, or a tensor")
    flat = [value for row in rows for value in row]
    if any(isinstance(value, list | tuple) for value in flat):
        raise ValueError("data has three axes or more; without k2 it must have 2")
    dtype = torch.float32 if any(isinstance(value, float) for value in flat) else torch.int32
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32, device=device)
    return RaggedShape(_splits(lengths)), torch.tensor(flat, dtype=dtype, device=device)


def _joined(rows: Iterable[Tensor], like: RaggedTensor) -> RaggedTensor:
    rows = list(rows)
    lengths = torch.tensor([row.numel() for row in rows], dtype=torch.int32, device=like.device)
    values = torch.cat(rows) if rows else like.values[:0]
    return RaggedTensor(RaggedShape(_splits(lengths)), values)


def _splits(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _check_axis(axis: int, allowed: tuple[int, ...]) -> None:
    if axis not in allowed:
        raise ValueError(f"axis is {axis}; it must be {' or '.join(map(str, allowed))}")
