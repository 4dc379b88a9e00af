"""Ranges of the inputs of an encoder's matrix products, channel by channel.

In an int8 file, all channels of such an input share one scale of 256 levels. If one channel is much
larger than the others, few levels are left for these (Dettmers et al. 2022, arXiv 2208.07339).

Axes: T feature frames, F mel bins, R rows (frames), I and O input and output channels of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.rounded_weights import quantised_layers

_LEVELS = 255


class LayerRange(NamedTuple):
    """Largest absolute values of the input channels of a layer.

    channel: the one with the largest value.
    median: of the largest values of all channels.
    error: relative change of the layer's output if the input is rounded to eight bits.
        Channels that are nearly zero raise the ratio, but hardly the error.
    """

    layer: str
    channel: int
    largest: float
    median: float
    error: float

    @property
    def ratio(self) -> float:
        """How many times the largest channel exceeds the median one; 1 if all are zero."""
        if self.median == 0:
            return 1.0 if self.largest == 0 else float("inf")
        return self.largest / self.median


@torch.inference_mode()
def activation_ranges(encoder: nn.Module, features: Iterable[Tensor]) -> list[LayerRange]:
    """The ranges of the layers that int8 files quantise, the largest ratio first.

    The encoder is copied to the CPU, where it runs in plain torch; utterances run one by one.

    Args:
        features: (T, F) of each utterance, or the samples of an encoder that reads these.
    """
    encoder = copy.deepcopy(encoder).cpu().float().eval()
    records = {name: _Record(layer) for name, layer in quantised_layers(encoder).items()}
    for features_TF in features:
        encoder(features_TF[None].cpu(), torch.tensor([len(features_TF)]))
    found = [record.range(name) for name, record in records.items() if record.squares]
    return sorted(found, key=lambda each: -each.ratio)


class _Record:
    """What a layer has seen: its largest inputs, and squared norms of its output and of the change
    of this output by rounded inputs."""

    def __init__(self, layer: nn.Linear) -> None:
        self.squares = self.changed = 0.0
        self._largest_I = torch.zeros(layer.in_features)
        layer.register_forward_pre_hook(self._add)

    def _add(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        input_RI = inputs[0].flatten(0, -2)
        self._largest_I = torch.maximum(self._largest_I, input_RI.abs().amax(dim=0))
        weight_OI = layer.get_parameter("weight")
        self.squares += float(functional.linear(input_RI, weight_OI).square().sum())
        change_RI = rounded_input(input_RI) - input_RI
        self.changed += float(functional.linear(change_RI, weight_OI).square().sum())

    def range(self, name: str) -> LayerRange:
        return LayerRange(
            name,
            channel=int(self._largest_I.argmax()),
            largest=float(self._largest_I.max()),
            median=float(self._largest_I.median()),
            error=(self.changed / self.squares) ** 0.5,
        )


def rounded_input(x: Tensor) -> Tensor:
    """The values of x in eight bits with one scale, as DynamicQuantizeLinear of ONNX computes them:
    from the smallest to the largest value, with an exact zero."""
    lowest, highest = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (highest - lowest) / _LEVELS
    if scale == 0:
        return x
    zero = (-lowest / scale).round()
    return (((x / scale).round() + zero).clamp(0, _LEVELS) - zero) * scale
