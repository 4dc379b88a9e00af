"""Layers whose parameters a fused computation may take instead of calling the layer.

Users wrap layers: adapters replace them, hooks and parametrizations change what a call computes. A
call of nn.Linear's own forward is the product with its weight and bias; any other must be made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_PLAIN_TENSORS = (nn.Parameter, Tensor)


class LayerParameters(NamedTuple):
    """weight (O,I) and bias (O) or None of a linear layer, as its next call would use them."""

    weight: Tensor
    bias: Tensor | None


def hook_of(module: nn.Module) -> str | None:
    """What a call of the module runs besides its forward, for a message; None if nothing."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "has backward hooks"
    if torch_module._has_any_global_hook():
        return "runs under global module hooks"
    if type(module).__call__ is not nn.Module.__call__:
        return "has a __call__ of its own"
    return "has a forward of its own" if "forward" in module.__dict__ else None


def linear_parameters(layer: nn.Module) -> LayerParameters | str:
    """The parameters of a linear layer, or why it has to be called, for a message.

    A parametrization is computed here, once, and its gradient flows through the result.
    """
    kind = type(layer)
    if not isinstance(layer, nn.Linear):
        return f"is a {kind.__name__}, not a torch.nn.Linear"
    if kind.forward is not nn.Linear.forward:
        return f"is a {kind.__name__} with a forward of its own"
    hook = hook_of(layer)
    if hook is not None:
        return hook
    # Reading an attribute takes the host ten times as long; a parametrization needs it.
    weight, bias = (
        layer._parameters[name] if name in layer._parameters else getattr(layer, name)
        for name in ("weight", "bias")
    )
    if weight is None or type(weight) not in _PLAIN_TENSORS:
        return f"has a weight of type {type(weight).__name__}"
    if bias is not None and type(bias) not in _PLAIN_TENSORS:
        return f"has a bias of type {type(bias).__name__}"
    return LayerParameters(weight, bias)


def called_weight(layer: nn.Module, kind: type[nn.Module]) -> Tensor | None:
    """The weight of a layer of that kind without a bias, as each call uses it; None if the layer
    has to be called."""
    weight = layer._parameters.get("weight")
    if type(layer).forward is not kind.forward or hook_of(layer) is not None:
        return None
    if type(weight) not in _PLAIN_TENSORS or getattr(layer, "bias", None) is not None:
        return None
    return weight


def plain_parameters(
    layers: Iterable[tuple[str, nn.Module]], device: torch.device
) -> list[Tensor] | str:
    """weight and bias of each of the named layers, in order, all on that device; or which layer has
    to be called and why, for a message."""
    found: list[Tensor] = []
    for name, layer in layers:
        parameters = linear_parameters(layer)
        if isinstance(parameters, str):
            return f"{name} {parameters}"
        weight, bias = parameters
        if bias is None:
            return f"{name} has no bias"
        if weight.device != device:
            return f"{name} is on {weight.device}"
        found += (weight, bias)
    return found
