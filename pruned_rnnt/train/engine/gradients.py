"""Gradients of one step: of one process, or summed over all processes during backward.

torch's DistributedDataParallel also sums gradients, but needs every process to finish every
backward pass: if one runs out of memory, the others wait for it forever. Here each process sends
each bucket exactly once per step and in the same order, even if its passes failed: `finish` sends
the buckets that the passes did not reach, and flags summed along with the gradients give all
processes the same decision about the step. A parameter may therefore lack a gradient in some steps
or on some processes.

With an optimiser that is divided, only the owner of a parameter gets the sum of its gradients, and
the other processes release theirs as soon as they are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from pruned_rnnt.model.captured_gradients import CapturedGradients, new_flat, views_of
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.optim.owners import BUCKET_BYTES, Owners, bytes_of, neighbours

# Vectors on their way to their owners at a time: each is released when it has arrived.
_MOST_ON_THE_WAY = 4


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

    def norm(self) -> Tensor:
        """(), the norm of all gradients, after `finish`."""
        return nn.utils.get_total_norm(p.grad for p in self.parameters if p.grad is not None)

    def kept_bytes(self) -> int:
        """Bytes of the gradients that this process keeps for the update, without gaps."""
        return bytes_of(self.parameters)


@dataclass
class _Bucket:
    """Neighbouring parameters, and one vector with a view for the gradient of each.

    flat, views: None and empty if another process gets the sums: each `fill` makes a new vector.
    owner: the process that gets the sums; None for all.
    complete: of a vector that a captured backward pass fills, recorded when it is complete.
    missing: parameters whose gradients the last pass has not completed.
    in_graph: a graph that is launched completes them.
    """

    flat: Tensor | None
    parameters: list[nn.Parameter]
    views: list[Tensor]
    owner: int | None = None
    complete: torch.cuda.Event | None = None
    missing: int = 0
    in_graph: bool = False

    @classmethod
    def new(cls, parameters: list[nn.Parameter], owner: int | None, *, kept: bool) -> _Bucket:
        flat = new_flat(parameters) if kept else None
        return cls(flat, parameters, views_of(flat, parameters) if flat is not None else [], owner)

    def fill(self) -> Tensor:
        """Copy the gradients into the vector with one launch for all, and return it."""
        flat = new_flat(self.parameters) if self.flat is None else self.flat
        pairs = list(
            zip(self.parameters, self.views or views_of(flat, self.parameters), strict=True)
        )
        # view_as gives a gradient the strides of its view, also along axes of length 1: if the
        # strides of one differ, torch copies each gradient by itself.
        elsewhere = [
            (view, parameter.grad.view_as(view))
            for parameter, view in pairs
            if parameter.grad is not None and parameter.grad is not view
        ]
        absent = [view for parameter, view in pairs if parameter.grad is None]
        if absent:
            torch._foreach_zero_(absent)
        if elsewhere:
            targets, gradients = zip(*elsewhere, strict=True)
            torch._foreach_copy_(targets, gradients)
        for parameter, view in pairs:
            parameter.grad = None if self.flat is None else view
        return flat


class SummedGradients(LocalGradients):
    """Gradients summed over the processes of a group; every process must make the same calls.

    Gradients are copied into a few vectors, which are sent. In the last pass of a step, a vector is
    sent as soon as its last gradient is complete and the vectors before it are sent: later layers
    first, while backward computes earlier ones. A missing gradient counts as zero.

    Those of a captured backward pass are sent from where the graph writes them. They are launched
    after the graph, on a stream that waits for a point in the middle of it.

    Args:
        group: the processes; default: all.
        owners: the process of each parameter, which alone gets the sum of its gradients; the others
            have no gradient of it after `finish`. None gives all of them all sums.
        captured: the gradients that captured backward passes write. With owners, they are copied
            after the passes, as others are.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bucket_bytes: int = BUCKET_BYTES,
        group: distributed.ProcessGroup | None = None,
        owners: Owners | None = None,
        captured: CapturedGradients | None = None,
    ) -> None:
        super().__init__(parameters)
        self._group = group
        self._owners = owners
        self._buckets: list[_Bucket] = []
        self._sent = 0
        self._works: deque[Any] = deque()
        self._is_last_pass = False
        if owners is not None:
            places = [place for place, p in enumerate(parameters) if owners.is_own(p)]
            self._own_places = torch.tensor(places, device=parameters[0].device)
        parts = captured.parts if captured is not None and owners is None else []
        by_graphs = {id(parameter) for part in parts for parameter in part.parameters}
        others = [p for p in reversed(parameters) if id(p) not in by_graphs]
        ranks = [None if owners is None else owners.rank_of(p) for p in others]
        for owner, members in neighbours(others, ranks, bucket_bytes):
            is_kept = owners is None or owner == owners.rank
            self._add_bucket(_Bucket.new(members, owner, kept=is_kept))
        # Last, because the graph is the last that a backward pass launches.
        for part in parts:
            views, complete = part.views, part.complete
            self._add_bucket(_Bucket(part.flat, part.parameters, views, complete=complete))
        if captured is not None and parts:
            captured.on_replay = self._send_replayed
            self._side = torch.cuda.Stream(parts[0].flat.device)

    def _add_bucket(self, bucket: _Bucket) -> None:
        self._buckets.append(bucket)

        def count(parameter: Tensor) -> None:
            if self._is_last_pass:
                if bucket.in_graph:
                    raise RuntimeError(
                        "a parameter of the encoder has a gradient outside of the encoder, which "
                        "may be sent without it; set train.cuda_graphs=off"
                    )
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._send(only_complete=True)

        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(count)

    def start(self) -> None:
        super().start()
        self._sent = 0
        self._works.clear()
        self._is_last_pass = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.in_graph = False

    def expect_last_pass(self) -> None:
        self._is_last_pass = True

    def finish(self, flags_K: Tensor) -> Tensor:
        self._is_last_pass = False
        self._send(only_complete=False)
        if self._owners is None:
            self._works.append(distributed.all_reduce(flags_K, group=self._group, async_op=True))
        while self._works:
            self._works.popleft().wait()
        if self._owners is None:
            return flags_K
        # Norms of the parameters of other processes are 0 here, so that the total is that of a
        # process that has all gradients, bit for bit.
        norms_P = torch.zeros(len(self.parameters), device=flags_K.device)
        own = [p.grad for p in self.parameters if p.grad is not None]
        norms_P[self._own_places] = torch.stack(torch._foreach_norm(own)).to(norms_P.dtype)
        sums_K = torch.cat([flags_K, norms_P])
        distributed.all_reduce(sums_K, group=self._group)
        self._norm = torch.linalg.vector_norm(sums_K[len(flags_K) :])
        return sums_K[: len(flags_K)]

    def norm(self) -> Tensor:
        return super().norm() if self._owners is None else self._norm

    def kept_bytes(self) -> int:
        return sum(bytes_of(b.parameters) for b in self._buckets if b.flat is not None)

    def _send(self, *, only_complete: bool) -> None:
        """Send the next buckets in order, up to the first incomplete one if `only_complete`."""
        while self._sent < len(self._buckets):
            bucket = self._buckets[self._sent]
            if only_complete and bucket.missing > 0:
                return
            self._works.append(self._sending(bucket))
            self._sent += 1
            # A work holds its vector.
            while self._owners is not None and len(self._works) > _MOST_ON_THE_WAY:
                self._works.popleft().wait()

    def _sending(self, bucket: _Bucket) -> Any:
        """The work that sends a bucket."""
        if bucket.complete is not None and bucket.in_graph:
            with torch.cuda.stream(self._side):
                self._side.wait_event(bucket.complete)
                return distributed.all_reduce(bucket.flat, group=self._group, async_op=True)
        flat = bucket.fill()
        if bucket.owner is None:
            return distributed.all_reduce(flat, group=self._group, async_op=True)
        return distributed.reduce(flat, bucket.owner, group=self._group, async_op=True)

    def _send_replayed(self) -> None:
        """Send what the graph that has just been launched completes."""
        if not self._is_last_pass:
            return
        for bucket in self._buckets:
            if bucket.complete is not None:
                bucket.missing, bucket.in_graph = 0, True
        self._send(only_complete=True)


def gradients_of(
    parameters: Sequence[nn.Parameter],
    ranks: Ranks,
    owners: Owners | None = None,
    captured: CapturedGradients | None = None,
) -> LocalGradients:
    """An object that sums the gradients of `parameters` over `ranks`, for all or for `owners`."""
    if ranks.world_size == 1:
        return LocalGradients(parameters)
    return SummedGradients(parameters, owners=owners, captured=captured)
