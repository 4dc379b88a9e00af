"""Where a captured backward pass writes gradients: vectors that can be sent while it still runs.

A backward pass completes the gradients of the last layers first. A vector has those of neighbouring
parameters, and an event inside of the graph marks where it is complete:

    parameters     embed | layer 1 | layer 2 | ... | layer 12 | output
    parts             part 2       |      part 1       |   part 0
    graph       ------------------ part 0 complete ---- part 1 complete ---- part 2 complete -->
    another stream                 waits, sends 0       waits, sends 1       waits, sends 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.side_branch import is_current, join_side_branch

_PART_BYTES = 25 * 2**20
# Elements: gradients begin at multiples of 128 bytes, so that kernels can load vectors of them.
_ALIGNMENT = 32


def new_flat(parameters: Sequence[Tensor]) -> Tensor:
    """A vector, not cleared, for the gradients of parameters of one dtype; see `views_of`."""
    return parameters[0].detach().new_empty(sum(map(_room, parameters)))


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of each parameter in the vector, which is aligned."""
    rooms = flat.split([_room(p) for p in parameters])
    return [room[: p.numel()].view_as(p) for room, p in zip(rooms, parameters, strict=True)]


def _room(parameter: Tensor) -> int:
    return -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT


@dataclass(eq=False)
class GradientPart:
    """Gradients of neighbouring parameters.

    flat: a vector; views: the gradient of each parameter in it.
    complete: recorded by the newest replay of a graph.
    """

    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]
    complete: torch.cuda.Event

    def add(self, gradients: Sequence[tuple[Tensor, Tensor]], *, mark: bool) -> None:
        """Add gradients to their views, given as pairs; and record the event, if `mark`."""
        # Some may come from the side branch.
        join_side_branch()
        if gradients:
            totals, found = zip(*gradients, strict=True)
            torch._foreach_add_(totals, found)
        if mark:
            self.complete.record()


@dataclass(eq=False)
class _Pending:
    """The gradients of a part that the running backward pass has computed."""

    part: GradientPart
    stream: torch.cuda.Stream
    mark: bool
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    is_added: bool = False

    def add(self) -> None:
        self.part.add(self.pairs, mark=self.mark)
        self.pairs.clear()
        self.is_added = True

    def taker(self, total: Tensor) -> Callable[[Tensor], Tensor]:
        def take(grad: Tensor) -> Tensor:
            # Autograd makes the stream of the gradient's function current, perhaps the side branch.
            with nullcontext() if is_current(self.stream) else torch.cuda.stream(self.stream):
                # torch adds many in one launch only if each has the strides of its total.
                self.pairs.append((total, grad.contiguous().view_as(total)))
                if len(self.pairs) == len(self.part.views):
                    self.add()
            # In place of the gradient, so that its memory can be used again.
            return total

        return take


class _Seed(torch.autograd.Function):
    """A scalar whose backward pass begins with a gradient of `output`.

    torch.autograd.grad takes such a gradient too, but then imports SymPy, which takes seconds.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad_output: Tensor) -> Tensor:
        ctx.save_for_backward(grad_output)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (grad_output,) = ctx.saved_tensors
        return grad_output, None


class CapturedGradients:
    """The gradients of an encoder whose passes are captured, of parameters of one dtype.

    Attributes:
        parts: in the order in which a backward pass completes them.
        on_replay: called after each launch of a backward graph; with it, graphs mark where parts
            are complete. To be set before the first capture.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], part_bytes: int = _PART_BYTES) -> None:
        self._parameters = parameters
        self.on_replay: Callable[[], None] | None = None
        self.parts: list[GradientPart] = []
        self._flat = new_flat(parameters)
        end = 0
        members: list[nn.Parameter] = []
        for parameter in reversed(parameters):
            members.append(parameter)
            count = sum(map(_room, members))
            if count * self._flat.element_size() >= part_bytes or parameter is parameters[0]:
                self._add_part(self._flat[end : end + count], members)
                members, end = [], end + count

    def _add_part(self, flat: Tensor, parameters: list[nn.Parameter]) -> None:
        # External: a node of a graph, for which streams outside of the graph can wait.
        complete = torch.cuda.Event(external=True)
        self.parts.append(GradientPart(flat, parameters, views_of(flat, parameters), complete))

    def start_backward(self) -> None:
        """Make the parts the gradients of the parameters: zeros, unless they are it already."""
        last = self.parts[-1]
        if last.parameters[-1].grad is last.views[-1]:
            return
        self._flat.zero_()
        for part in self.parts:
            for parameter, view in zip(part.parameters, part.views, strict=True):
                parameter.grad = view

    def add(self, output: Tensor, grad_output: Tensor) -> None:
        """Run the backward pass of `output`, and add the gradients to the parts, each part as soon
        as it is complete."""
        stream, mark = torch.cuda.current_stream(), self.on_replay is not None
        all_pending = [_Pending(part, stream, mark) for part in self.parts]
        with ExitStack() as hooks:
            for pending in all_pending:
                for parameter, view in zip(
                    pending.part.parameters, pending.part.views, strict=True
                ):
                    hook = parameter.register_hook(pending.taker(view))
                    hooks.callback(hook.remove)
            # In this thread: another one would only contend for Python's lock.
            with torch.autograd.set_multithreading_enabled(False):
                seed: Tensor = _Seed.apply(output, grad_output)  # type: ignore[no-untyped-call]
                torch.autograd.grad(seed, self._parameters, allow_unused=True)
        for pending in all_pending:
            # Some of its parameters have no gradient.
            if not pending.is_added:
                pending.add()

    def tell_replay(self) -> None:
        """A backward graph is launched."""
        if self.on_replay is not None:
            self.on_replay()
