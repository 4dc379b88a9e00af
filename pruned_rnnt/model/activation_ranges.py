"""Ranges of the inputs of an encoder's matrix products, channel by channel.

In an int8 file, all channels of such an input share one scale of 256 levels. If one channel is much
larger than the others, few levels are left for these (Dettmers et al. 2022, arXiv 2208.07339).

Axes: T feature frames, F mel bins, I input channels of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.model.rounded_weights import quantised_layers


class LayerRange(NamedTuple):
    """Largest absolute values of the input channels of a layer.

    channel: the one with the largest value.
    median: of the largest values of all channels.
    """

    layer: str
    channel: int
    largest: float
    median: float

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
    largest: dict[str, Tensor] = {}

    def recorder(name: str) -> Any:
        def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest_I = inputs[0].flatten(0, -2).abs().amax(dim=0)
            before_I = largest.get(name, largest_I)
            largest[name] = torch.maximum(before_I, largest_I)

        return record

    for name, layer in quantised_layers(encoder).items():
        layer.register_forward_pre_hook(recorder(name))
    for features_TF in features:
        encoder(features_TF[None].cpu(), torch.tensor([len(features_TF)]))
    found = [
        LayerRange(name, int(each_I.argmax()), float(each_I.max()), float(each_I.median()))
        for name, each_I in largest.items()
    ]
    return sorted(found, key=lambda each: -each.ratio)
