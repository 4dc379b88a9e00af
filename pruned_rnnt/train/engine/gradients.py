"""Gradients of one step: of one process, or summed over all processes during backward.

torch's DistributedDataParallel also sums gradients, but needs every process to finish every
backward pass: if one runs out of memory, the others wait for it forever. Here each process sends
each bucket exactly once per step and in the same order, even if its passes failed: `finish` sends
the buckets that the passes did not reach, and flags summed along with the gradients give all
processes the same decision about the step. A parameter may therefore lack a gradient in some steps
or on some processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from pruned_rnnt.train.engine.distributed import Ranks

_BUCKET_BYTES = 25 * 2**20


class LocalGradients:
    """Gradients of a training run with one process."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters

    def start(self) -> None:
        """Begin a step without gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def expect_last_pass(self) -> None:
        """Announce that the next backward pass is the last one of the step."""

    def finish(self, flags_K: Tensor) -> Tensor:
        """End the passes of a step; returns the flags summed over processes."""
        return flags_K


@dataclass
class _Bucket:
    """Neighbouring parameters, and one vector with a view for the gradient of each."""

    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]
    missing: int = 0

    def fill(self) -> None:
        """Copy the gradients into the vector with one launch for all."""
        pairs = list(zip(self.parameters, self.views, strict=True))
        # view_as gives a gradient the strides of its view, also along axes of length 1: if the
        # strides of one differ, torch copies each gradient by itself.
        present = [
            (view, parameter.grad.view_as(view))
            for parameter, view in pairs
            if parameter.grad is not None
        ]
        if len(present) < len(pairs):
            self.flat.zero_()
        if present:
            views, gradients = zip(*present, strict=True)
            torch._foreach_copy_(views, gradients)
        for parameter, view in pairs:
            parameter.grad = view


class SummedGradients(LocalGradients):
    """Gradients summed over the processes of a group; every process must make the same calls.

    Gradients are copied into a few vectors, which are sent. In the last pass of a step, a vector is
    sent as soon as its last gradient is complete and the vectors before it are sent: later layers
    first, while backward computes earlier ones. A missing gradient counts as zero.

    Args:
        group: the processes; default: all.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bucket_bytes: int = _BUCKET_BYTES,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters)
        self._group = group
        self._buckets: list[_Bucket] = []
        self._works: list[Any] = []
        self._is_last_pass = False
        members: list[nn.Parameter] = []
        for parameter in reversed(parameters):
            size = sum(p.numel() * p.element_size() for p in (*members, parameter))
            if members and (size > bucket_bytes or members[0].dtype != parameter.dtype):
                self._add_bucket(members)
                members = []
            members.append(parameter)
        self._add_bucket(members)

    def _add_bucket(self, parameters: Sequence[nn.Parameter]) -> None:
        flat = parameters[0].detach().new_zeros(sum(p.numel() for p in parameters))
        parts = flat.split([p.numel() for p in parameters])
        views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        bucket = _Bucket(flat, list(parameters), views)
        self._buckets.append(bucket)

        def count(parameter: Tensor) -> None:
            if self._is_last_pass:
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._send(only_complete=True)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(count)

    def start(self) -> None:
        super().start()
        self._works.clear()
        self._is_last_pass = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def expect_last_pass(self) -> None:
        self._is_last_pass = True

    def finish(self, flags_K: Tensor) -> Tensor:
        self._is_last_pass = False
        self._send(only_complete=False)
        self._works.append(distributed.all_reduce(flags_K, group=self._group, async_op=True))
        for work in self._works:
            work.wait()
        return flags_K

    def _send(self, *, only_complete: bool) -> None:
        """Send the next buckets in order, up to the first incomplete one if `only_complete`."""
        while len(self._works) < len(self._buckets):
            bucket = self._buckets[len(self._works)]
            if only_complete and bucket.missing > 0:
                return
            bucket.fill()
            self._works.append(
                distributed.all_reduce(bucket.flat, group=self._group, async_op=True)
            )


def gradients_of(parameters: Sequence[nn.Parameter], ranks: Ranks) -> LocalGradients:
    """An object that sums the gradients of `parameters` over `ranks`."""
    return SummedGradients(parameters) if ranks.world_size > 1 else LocalGradients(parameters)
