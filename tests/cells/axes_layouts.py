"""Layouts: strides, views, storages and sizes of each tensor argument, and what is not a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.cells.cell import Absent, Cell, changing
from tests.cells.subject import Subject


def _like(x: Tensor, view: Tensor) -> Tensor:
    """view, requiring gradients if x does."""
    view = view.detach()
    return view.requires_grad_() if x.requires_grad else view


def transposed(x: Tensor) -> Tensor:
    """The first axis is the innermost in memory."""
    order = [*range(1, x.dim()), 0]
    back = [x.dim() - 1, *range(x.dim() - 1)]
    return x.permute(order).contiguous().permute(back)


def channels_last(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.mT.contiguous().mT if x.dim() > 1 else x.repeat_interleave(3)[::3]


def strided(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


def expanded(x: Tensor) -> Tensor:
    """All utterances (rows) are the first one, at stride 0."""
    return x[:1].expand(x.shape)


def offset(x: Tensor) -> Tensor:
    """A view that begins one element after its storage."""
    storage = x.new_zeros(x.numel() + 1)
    storage[1:] = x.reshape(-1)
    return storage[1:].view(x.shape)


def sliced(x: Tensor) -> Tensor:
    """Rows of a wider tensor, whose other elements are NaN or out of range."""
    rest = torch.full_like(x, torch.nan) if x.is_floating_point() else x.clone().fill_(99)
    return torch.cat([rest, x, rest], -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def negative(x: Tensor) -> Tensor:
    """Stored with its sign changed, as torch stores the imaginary part of a conjugate."""
    return torch._neg_view(-x)


class Labelled(Tensor):
    """A subclass of Tensor without behaviour of its own."""


_FLOAT_ONLY = {"negative"}
# Layouts that are right for each tensor.
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "transposed": transposed,
    "channels last": channels_last,
    "strided": strided,
    "offset": offset,
    "slice": sliced,
    "negative": negative,
    "subclass": lambda x: x.detach().clone().as_subclass(Labelled),
    "parameter": lambda x: torch.nn.Parameter(x.detach().clone(), x.requires_grad),
}


def nested(x: Tensor) -> Tensor:
    if x.dim() < 2:
        raise Absent("nested tensors have two axes")
    return torch.nested.nested_tensor(list(x.detach().unbind()), layout=torch.jagged)


def mkldnn(x: Tensor) -> Tensor:
    if (
        x.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
        or x.dtype != torch.float32
    ):
        raise Absent("no MKL-DNN layout")
    return x.detach().to_mkldnn()


# Others may be refused, and some must.
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "sparse": lambda x: x.detach().to_sparse(),
    "MKL-DNN": mkldnn,
    "nested": nested,
    "meta": lambda x: x.detach().to("meta"),
    "list": lambda x: x.tolist(),
    "NumPy": lambda x: x.detach().cpu().numpy(),
    "None": lambda x: None,
    "no utterances": lambda x: x[:0],
    "one axis more": lambda x: x[None],
    "one axis less": lambda x: x[0],
    "one element more": lambda x: torch.cat([x, x[:1]]),
    "last axis empty": lambda x: x[..., :0],
    "second axis empty": lambda x: x[:, :0] if x.dim() > 1 else x[:0],
}
# Of these, the sizes must be refused, or agree with values that the CPU reads.
_SIZES = ("one element more", "last axis empty", "second axis empty")


def cells(subjects: list[Subject]) -> Iterator[Cell]:
    for subject in subjects:
        for name in (*subject.floats, *subject.integers):
            if name == "module":
                continue
            row, words = f"{subject.name}: {name}", subject.names_of(name)
            for column, view in VIEWS.items():
                if column in _FLOAT_ONLY and name not in subject.floats:
                    continue
                change = changing(name, lambda x, view=view: _like(x, view(x.detach())))
                yield Cell(subject, "layouts", row, column, change, words=words)
            if name in subject.floats:
                change = changing(name, lambda x: _like(x, expanded(x.detach())))
                yield Cell(subject, "layouts", row, "expanded", change, words=words)
            for column, other in OTHERS.items():
                change = changing(name, lambda x, other=other: other(x.detach()))
                words = _words(subject, name)
                yield Cell(subject, "other tensors", row, column, change, words=words)
                if column in _SIZES:
                    yield Cell(
                        subject,
                        "unread values",
                        row,
                        column,
                        change,
                        words=words,
                        reads_values=False,
                    )


def _words(subject: Subject, name: str) -> tuple[str, ...]:
    """A wrong size is a disagreement, which either of two arguments may be blamed for."""
    others = (x for other in (*subject.floats, *subject.integers) for x in subject.names_of(other))
    return (*subject.names_of(name), *others)
