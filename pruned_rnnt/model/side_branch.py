"""A second branch of captured passes, for what no other kernel waits for until much later.

    forward   main   x -> next module -> ...                            end of the pass
                      \\                                                /
              side     -> statistics of x for balancers and whiteners ...

    backward  main   gradient of y -> gradient of x -> ...     casts of a layer's gradients
                                  \\                         /
              side                 -> gradients of weight and bias ...

Products of a small layer, and sums over rows, leave most of a GPU idle, and so do the short kernels
between them. Kernels in two branches of a CUDA graph run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

# The branch of the pass that is being captured.
_active: SideBranch | None = None


class SideBranch:
    """A stream beside `main`, on which passes are captured.

    A tensor that its kernels read is kept until `join`, so that nothing on the main stream uses
    the memory again, or changes the tensor in place, before they have read it.

    Attributes:
        main: the stream.
    """

    def __init__(self, main: torch.cuda.Stream) -> None:
        self.main = main
        self._stream = torch.cuda.Stream(main.device)
        self._kept: list[Tensor] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """`beside` and `join_side_branch` use this branch."""
        global _active
        _active = self
        try:
            yield
        finally:
            _active = None
            # Left over only by a pass that failed.
            self._kept.clear()

    @contextmanager
    def fork(self, *read: Tensor) -> Iterator[None]:
        """Launches go to this branch, after all that the main stream has launched.

        The main stream must be torch's current one.
        """
        self._kept += read
        self._stream.wait_stream(self.main)
        # Much faster than torch.cuda.stream, which first asks for the current stream.
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(self.main)

    def join(self) -> None:
        """What the main stream launches from here on comes after all launches of this branch."""
        if self._kept:
            self.main.wait_stream(self._stream)
            self._kept.clear()


def is_current(stream: torch.cuda.Stream) -> bool:
    """Whether the stream is torch's current one on its device."""
    # torch.cuda.current_stream() takes the host ten times as long.
    current: int = torch._C._cuda_getCurrentRawStream(stream.device_index)
    return current == stream.cuda_stream


def beside(*read: Tensor, where: bool = True) -> AbstractContextManager[None]:
    """Launches go to the side branch of the pass that is being captured, if there is one.

    A use of the results must come after `join_side_branch`. So, of gradients, only those qualify
    that nothing uses but the `CastParameters` of a layer, or, of leaves, `CapturedGradients`.

    Args:
        read: tensors that the launches read, and that the main stream may release or change.
        where: if false, launches stay where they are.
    """
    branch = _current() if where else None
    return nullcontext() if branch is None else branch.fork(*read)


def may_launch_early(x: Tensor) -> bool:
    """Whether statistics of x for the backward pass can go to the side branch in the forward pass.

    Not those of maps (4 axes), which are computed again in the backward pass: keeping them would
    take much memory.
    """
    return x.dim() == 3 and _current() is not None


def join_side_branch() -> None:
    """The results of `beside` can be used from here on."""
    if (branch := _current()) is not None:
        branch.join()


def _current() -> SideBranch | None:
    return _active if _active is not None and is_current(_active.main) else None
