"""Tensors that are divided among processes, each of which belongs to one of them.

Every process must make the same calls in the same order. There is no process group if there is one
process only, and nothing is sent then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

_AnyTensor = TypeVar("_AnyTensor", bound=Tensor)

# Of the vectors in which tensors are sent.
BUCKET_BYTES = 25 * 2**20


class Owners:
    """The process of each of some tensors, divided by numbers of elements.

    Args:
        tensors: the same in all processes.
        rank: of this process.

    Attributes:
        ranks: the process of each tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], rank: int, world_size: int) -> None:
        self.tensors = list(tensors)
        self.rank = rank
        self.world_size = world_size
        self.ranks = owners_of([tensor.numel() for tensor in tensors], world_size)
        self._rank_of = {id(tensor): rank for tensor, rank in zip(tensors, self.ranks, strict=True)}
        self._rounds = _rounds(self.tensors, self.ranks)

    def rank_of(self, tensor: Tensor) -> int:
        """The process of a tensor."""
        return self._rank_of[id(tensor)]

    def is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor belongs to this process."""
        return self.rank_of(tensor) == self.rank

    @torch.no_grad()
    def exchange(self) -> None:
        """Send the values of the own tensors to the other processes, and copy theirs."""
        if self.world_size == 1:
            return
        for buckets in self._rounds:
            flats, works = [], []
            for owner, bucket in enumerate(buckets):
                if not bucket:
                    continue
                if owner == self.rank:
                    flat = _flatten_dense_tensors(bucket)
                else:
                    flat = bucket[0].new_empty(sum(p.numel() for p in bucket))
                flats.append((owner, bucket, flat))
                works.append(distributed.broadcast(flat, src=owner, async_op=True))
            for work in works:
                work.wait()
            for owner, bucket, flat in flats:
                if owner != self.rank:
                    torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))

    def gather(self, own: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]] | None:
        """Values about the tensors, in the first process; the others get None.

        Args:
            own: values about tensors of this process, by their number, which go in one message for
                each tensor among them.

        Returns:
            The values of all processes, on the CPU, sorted by number.
        """
        if self.world_size == 1:
            return _on_cpu(own)
        layouts: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        distributed.gather_object({index: _layout(each) for index, each in own.items()}, layouts)
        if layouts is None:
            for each in own.values():
                for value in each.values():
                    if isinstance(value, Tensor):
                        distributed.send(value.detach().cpu().contiguous(), dst=0)
            return None
        whole = _on_cpu(own)
        for source, layout in enumerate(layouts[1:], start=1):
            for index, each in layout.items():
                whole[index] = {name: _received(value, source) for name, value in each.items()}
        return dict(sorted(whole.items()))


def owners_of(sizes: Sequence[int], processes: int) -> list[int]:
    """The process of each tensor: the largest first, each for the one with the least so far."""
    owners, loads = [0] * len(sizes), [0] * processes
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        # Of empty tensors, too, each process gets some.
        owner = min(range(processes), key=lambda process: loads[process])
        owners[index] = owner
        loads[owner] += max(1, sizes[index])
    return owners


def neighbours(
    tensors: Iterable[_AnyTensor], owners: Iterable[int | None], most_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[int | None, list[_AnyTensor]]]:
    """Lists of successive tensors of one owner and dtype, each with its owner.

    A list has at most so many bytes, or one tensor. It comes when the next tensor of the owner does
    not fit, the last ones at the end.
    """
    filling: dict[int | None, list[_AnyTensor]] = {}
    for tensor, owner in zip(tensors, owners, strict=True):
        members = filling.setdefault(owner, [])
        is_full = bytes_of([*members, tensor]) > most_bytes
        if members and (is_full or members[0].dtype != tensor.dtype):
            yield owner, members
            members = filling[owner] = []
        members.append(tensor)
    yield from filling.items()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rounds(tensors: Sequence[Tensor], owners: Sequence[int]) -> list[tuple[list[Tensor], ...]]:
    """For each round of sending, the tensors of each process."""
    buckets: list[list[list[Tensor]]] = [[] for _ in range(max(owners, default=-1) + 1)]
    for owner, members in neighbours(tensors, owners):
        assert owner is not None
        buckets[owner].append(members)
    return list(zip_longest(*buckets, fillvalue=[]))


@dataclass(frozen=True)
class _Layout:
    """Shape and dtype of a tensor that is sent."""

    shape: torch.Size
    dtype: torch.dtype


def _layout(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with the layout of each tensor in its place."""
    return {
        name: _Layout(value.shape, value.dtype) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def _received(value: Any, source: int) -> Any:
    if not isinstance(value, _Layout):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype)
    distributed.recv(tensor, src=source)
    return tensor


def _on_cpu(values: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        index: {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in each.items()}
        for index, each in sorted(values.items())
    }
