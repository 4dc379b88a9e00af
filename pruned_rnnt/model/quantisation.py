"""Weights and inputs of matrix products rounded as in quantised files, computed by torch.

Training with rounded weights (quantisation-aware training): before each pass of the encoder or of a
projection of the joiner, the matrices that `pruned-rnnt export --precision` quantises are replaced
by their rounded values; gradients pass the rounding unchanged (straight-through estimator, Bengio
et al. 2013, arXiv 1308.3432). The parameters themselves stay float32, so that checkpoints are those
of an ordinary model.

Ranges of inputs: in an int8 file, all channels of the input of a matrix product share one scale of
256 levels. If one channel is much larger than the others, few levels are left for these (Dettmers
et al. 2022, arXiv 2208.07339).

Axes: O and I output and input channels of a layer, B blocks of inputs, T feature frames, F mel
bins, R rows (frames).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

RoundedPrecision = Literal["int8", "int4"]
# These hold for exported files, too. Seven bits: without VNNI instructions, sums of eight-bit
# products overflow. Inputs of a matrix product share a scale of four-bit weights.
INT8_LARGEST, INT4_LEVELS, INT4_BLOCK = 64, 15, 32
# Smaller matrix products are not worth the conversion of their input; those with fewer inputs do
# not fill a block of four-bit weights.
LEAST_WEIGHTS, LEAST_INPUTS = 2048, 32
_INPUT_LEVELS = 255


def rounded(weight_OI: Tensor, precision: RoundedPrecision) -> Tensor:
    """The values of the weight in an int8 or int4 file, (O, I) float32; differentiable."""
    weight_OI = weight_OI.float()
    with torch.no_grad():
        values_OI = _rounded_int8(weight_OI) if precision == "int8" else _rounded_int4(weight_OI)
        change_OI = values_OI - weight_OI
    return weight_OI + change_OI


def _rounded_int8(weight_OI: Tensor) -> Tensor:
    scale_O1 = weight_OI.abs().amax(dim=1, keepdim=True) / INT8_LARGEST
    scale_O1 = torch.where(scale_O1 == 0, 1.0, scale_O1)
    return (weight_OI / scale_O1).round() * scale_O1


def _rounded_int4(weight_OI: Tensor) -> Tensor:
    outputs, inputs = weight_OI.shape
    padded_OI = functional.pad(weight_OI, (0, -inputs % INT4_BLOCK))
    blocks_OBI = padded_OI.reshape(outputs, -1, INT4_BLOCK)
    lowest_OB1 = blocks_OBI.amin(dim=2, keepdim=True).clamp(max=0)
    scale_OB1 = (blocks_OBI.amax(dim=2, keepdim=True).clamp(min=0) - lowest_OB1) / INT4_LEVELS
    scale_OB1 = torch.where(scale_OB1 == 0, 1.0, scale_OB1)
    zero_OB1 = (-lowest_OB1 / scale_OB1).round()
    integers_OBI = ((blocks_OBI / scale_OB1).round() + zero_OB1).clamp(0, INT4_LEVELS)
    return ((integers_OBI - zero_OB1) * scale_OB1).reshape(outputs, -1)[:, :inputs]


class _Rounding:
    """Hooks before and after the forward pass of a part of a model."""

    no_stream = "rounds its weights in training: save the run, and load it with `load_model`"

    def __init__(self, modules: list[nn.Module], precision: RoundedPrecision) -> None:
        self.modules = modules
        self.precision = precision
        self._originals: list[Any] = []

    def apply(self, *_: Any) -> None:
        originals = [module._parameters["weight"] for module in self.modules]
        for module, weight in zip(self.modules, originals, strict=True):
            assert weight is not None
            with torch.autocast(weight.device.type, enabled=False):
                values: Any = rounded(weight, self.precision).to(weight.dtype)
            module._parameters["weight"] = values
        self._originals = originals

    def restore(self, *_: Any) -> None:
        for module, weight in zip(self.modules, self._originals, strict=False):
            module._parameters["weight"] = weight
        self._originals = []


def quantised_layers(part: nn.Module) -> dict[str, nn.Linear]:
    """The matrix products of a part of a model that quantised files have in low precision."""
    found = {}
    for name, module in part.named_modules():
        weight = module._parameters.get("weight")
        if (
            isinstance(module, nn.Linear)
            and weight is not None
            and weight.numel() >= LEAST_WEIGHTS
            and weight.size(1) >= LEAST_INPUTS
        ):
            found[name] = module
    return found


def round_weights(part: nn.Module, precision: RoundedPrecision) -> list[str]:
    """From now on, let a part of a model, or a layer, compute with rounded weights.

    Returns:
        The names of the layers.

    Raises:
        ValueError: no matrix of the part is large enough to be quantised.
    """
    found = quantised_layers(part)
    if not found:
        raise ValueError(
            f"finetune.quantise={precision}: the encoder has no matrix of {LEAST_WEIGHTS:,} "
            "weights or more, so that none is quantised"
        )
    rounding = _Rounding(list(found.values()), precision)
    part.register_forward_pre_hook(rounding.apply)
    part.register_forward_hook(rounding.restore, always_call=True)
    return list(found)


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
    scale = (highest - lowest) / _INPUT_LEVELS
    if scale == 0:
        return x
    zero = (-lowest / scale).round()
    return (((x / scale).round() + zero).clamp(0, _INPUT_LEVELS) - zero) * scale
