"""Dtypes: all floating arguments at once, each in turn, and those of targets and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.cells.cell import Cell, changing
from tests.cells.subject import Subject

WIDTHS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NO_FLOATS = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
NO_INTEGERS = (torch.float32, torch.float64, torch.bool, torch.complex64)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, nn.Module):
        return x.to(dtype)
    if not isinstance(x, Tensor):
        return x
    cast_x = x.detach().to(dtype)
    return cast_x.requires_grad_() if dtype.is_floating_point and x.requires_grad else cast_x


def cells(subjects: list[Subject]) -> Iterator[Cell]:
    for subject in subjects:
        if subject.floats:
            for dtype in WIDTHS:
                row = f"{subject.name}: all"
                words = tuple(x for name in subject.floats for x in subject.names_of(name))
                yield Cell(subject, "dtypes", row, name_of(dtype), dtype=dtype, words=words)
        yield from _one_by_one(subject)
        yield from _integers(subject)


def _one_by_one(subject: Subject) -> Iterator[Cell]:
    for name in subject.floats:
        row, words = f"{subject.name}: {name}", subject.names_of(name)
        if len(subject.floats) > 1:
            # Each dtype beside float32, and float32 beside float64.
            for dtype in WIDTHS:
                other = torch.float64 if dtype == torch.float32 else torch.float32
                column = f"{name_of(dtype)} beside {name_of(other)}"
                change = changing(name, lambda x, dtype=dtype: cast(x, dtype))
                yield Cell(
                    subject, "mixed dtypes", row, column, change, words=subject.floats, dtype=other
                )
        if name == "module":
            continue
        for dtype in NO_FLOATS:
            change = changing(name, lambda x, dtype=dtype: cast(x, dtype))
            yield Cell(
                subject,
                "dtypes",
                row,
                name_of(dtype),
                change,
                words=words,
                must_refuse=True,
            )


def _integers(subject: Subject) -> Iterator[Cell]:
    for name in subject.integers:
        row, words = f"{subject.name}: {name}", subject.names_of(name)
        for dtype in (*INTEGERS, *NO_INTEGERS):
            change = changing(name, lambda x, dtype=dtype: x.to(dtype))
            yield Cell(
                subject,
                "integer dtypes",
                row,
                name_of(dtype),
                change,
                words=words,
                must_refuse=dtype in NO_INTEGERS,
            )
