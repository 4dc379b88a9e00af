"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) of an encoder's linear layers.

    weight used by the layer = weight + alpha / rank * up @ down

The sum is computed before each pass of the encoder, so fused kernels, casts and CUDA graphs get an
ordinary weight. It costs the memory and gradients of the full weights, but only `up` and `down`
are trained. Merging computes the same sum once, so a merged encoder gives the same output.

Axes: O and I output and input channels of a layer, R rank; up (O, R), down (R, I).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pruned_rnnt.config.checks import check_at_least

# Layers of the parts, by their names in any of the encoders.
_PARTS = {
    "attention": re.compile(
        r"\.(attention|self_attn_weights|self_attn\d?|nonlin_attention)\.(in|out|[qkv])_proj$"
    ),
    "feed_forward": re.compile(
        r"\.((feedforward_in|feedforward_out|feed_forward\d?)\.\w+|fc[12])$"
    ),
}
_UP, _DOWN = "lora_up", "lora_down"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on the encoder; its other parameters are then frozen.

    rank: rank of the change of each weight; 0 for no adapters.
    alpha: the change is multiplied by alpha / rank.
    parts: the parts of each layer that have adapters: attention, feed_forward.
    """

    rank: int = 0
    alpha: float = 16.0
    parts: tuple[str, ...] = ("attention", "feed_forward")

    def __post_init__(self) -> None:
        check_at_least("finetune.lora", self, rank=0)
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"finetune.lora.alpha is {self.alpha}, needs > 0")
        unknown = [part for part in self.parts if part not in _PARTS]
        if unknown or not self.parts:
            raise ValueError(
                f"finetune.lora.parts is {list(self.parts)}, needs some of {', '.join(_PARTS)}"
            )


class _Layer(NamedTuple):
    """A layer with an adapter; its parameters are read at each use, because casts replace them."""

    module: nn.Module
    scale: float

    def weight(self) -> Tensor:
        """(O, I) with the adapter, in the dtype of the parameters."""
        parameters = self.module._parameters
        weight, up, down = (parameters[name] for name in ("weight", _UP, _DOWN))
        assert weight is not None
        assert up is not None
        assert down is not None
        with torch.autocast(weight.device.type, enabled=False):
            return torch.addmm(weight, up, down, alpha=self.scale)


class _Adapters:
    """The adapters of an encoder, as hooks before and after its forward pass."""

    no_stream = "has adapters: call `pruned_rnnt.model.lora.merge_adapters(encoder)` first"

    def __init__(self, layers: list[_Layer]) -> None:
        self.layers = layers
        self.handles: list[RemovableHandle] = []
        self._originals: list[Any] = []

    def apply(self, *_: Any) -> None:
        originals = [layer.module._parameters["weight"] for layer in self.layers]
        weights: list[Any] = [layer.weight() for layer in self.layers]
        self._set(weights)
        self._originals = originals

    def restore(self, *_: Any) -> None:
        if self._originals:
            self._set(self._originals)
            self._originals = []

    def _set(self, weights: list[Any]) -> None:
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.module._parameters["weight"] = weight


def add_adapters(encoder: nn.Module, config: LoraConfig) -> list[str]:
    """Add adapters that change nothing yet and freeze all other parameters of the encoder.

    Returns:
        The names of the layers with adapters.

    Raises:
        ValueError: no layer of the encoder has one of the configured parts.
    """
    found = list(_layers(encoder, config))
    for part in config.parts:
        if not any(_PARTS[part].search(name) for name, _ in found):
            raise ValueError(
                f"finetune.lora.parts is {list(config.parts)}, and no layer of the "
                f"{type(encoder).__name__} belongs to {part}: leave it out"
            )
    for parameter in encoder.parameters():
        parameter.requires_grad_(False)
    layers = []
    for _, module in found:
        weight = module._parameters["weight"]
        assert weight is not None
        down_RI = weight.new_empty(config.rank, weight.size(1))
        nn.init.uniform_(down_RI, -(weight.size(1) ** -0.5), weight.size(1) ** -0.5)
        module.register_parameter(_UP, nn.Parameter(weight.new_zeros(weight.size(0), config.rank)))
        module.register_parameter(_DOWN, nn.Parameter(down_RI))
        layers.append(_Layer(module, config.alpha / config.rank))
    adapters = _Adapters(layers)
    adapters.handles = [
        encoder.register_forward_pre_hook(adapters.apply),
        encoder.register_forward_hook(adapters.restore, always_call=True),
    ]
    encoder._adapters = adapters  # type: ignore[assignment]
    return [name for name, _ in found]


@torch.no_grad()
def merge_adapters(encoder: nn.Module) -> None:
    """Add the adapters to the weights and remove them; without adapters, does nothing."""
    adapters = getattr(encoder, "_adapters", None)
    if not isinstance(adapters, _Adapters):
        return
    for handle in adapters.handles:
        handle.remove()
    for layer in adapters.layers:
        weight = layer.module._parameters["weight"]
        assert weight is not None
        weight.copy_(layer.weight())
        del layer.module._parameters[_UP], layer.module._parameters[_DOWN]
    with suppress(AttributeError):
        del encoder._adapters


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((f".{_UP}", f".{_DOWN}"))


def _layers(encoder: nn.Module, config: LoraConfig) -> Iterator[tuple[str, nn.Module]]:
    patterns = [_PARTS[part] for part in config.parts]
    for name, module in encoder.named_modules():
        weight = module._parameters.get("weight")
        is_matrix = weight is not None and weight.dim() == 2
        if is_matrix and any(pattern.search(name) for pattern in patterns):
            yield name, module
