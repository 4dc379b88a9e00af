"""Autograd functions of the encoders, without autograd where no gradient is wanted.

`Function.apply` takes the host about ten microseconds, as long as launching a kernel. A pass of a
large Zipformer has four hundred of them, and in inference nothing comes of it.
"""

from __future__ import annotations

from typing import Any

import torch


class _NothingSaved:
    """The context of a forward pass that no backward pass follows."""

    def save_for_backward(self, *tensors: object) -> None: ...

    def mark_non_differentiable(self, *tensors: object) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply(*arguments); in inference, its forward pass alone."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*arguments)
    return function.forward(_NothingSaved(), *arguments)
