"""Cells of calls that are wrong in every way that the table must notice."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.cells.cell import Cell
from tests.cells.subject import Results, Subject


def _right(x: Tensor) -> Tensor:
    return x.square().sum(1)


def _crash(x: Tensor) -> Tensor:
    os.abort()


def _inaccurate(x: Tensor) -> Tensor:
    return _right(x) * 1.001


def _wrong_gradient(x: Tensor) -> Tensor:
    return _right(x.detach()) + (x - x.detach()).sum(1)


def _no_gradient(x: Tensor) -> Tensor:
    return _right(x.detach())


def _infinite(x: Tensor) -> Tensor:
    return torch.where(torch.arange(len(x)) == 1, torch.inf, _right(x))


def _raw_error(x: Tensor) -> Tensor:
    return x @ x


def _vague_error(x: Tensor) -> Tensor:
    raise ValueError("the input is bad")


def _refused(x: Tensor) -> Tensor:
    raise ValueError("x is bad")


CALLS = {
    "right": _right,
    "crash": _crash,
    "right after a crash": _right,
    "inaccurate": _inaccurate,
    "wrong gradient": _wrong_gradient,
    "no gradient": _no_gradient,
    "infinite": _infinite,
    "raw error": _raw_error,
    "vague error": _vague_error,
    "refused": _refused,
}


def _reference(given: dict[str, Tensor]) -> Results:
    return {"result": given["x"].square().sum(1)}


def cells() -> Iterator[Cell]:
    for name, call in CALLS.items():
        subject = Subject(name, lambda: {"x": torch.ones(2, 3)}, call, _reference, floats=("x",))
        yield Cell(subject, "faulty", name, "plain", words=("x",))
    subject = Subject(
        "accepted", lambda: {"x": torch.ones(2, 3)}, _right, _reference, floats=("x",)
    )
    yield Cell(subject, "faulty", "accepted", "plain", must_refuse=True)
