"""Groups of parameters that are trained alike, and their options for an optimiser; learning rates
that fall from layer to layer of the encoder, from the top downwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pruned_rnnt.model.lora import is_adapter

# The root mean square that ScaledAdam takes for parameters that start at zero.
_ZERO_RMS = 0.02
_LAYER = re.compile(r"^(encoder\..*?layers\.\d+)\.")
# The module of the transformers library in its encoder.
_PRETRAINED = "encoder.network."


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are trained alike; at least one.

    rate: factor of the learning rate.
    start_at_zero: parameters that may be zero at first, as those of adapters are. The steps of
        ScaledAdam, which are proportional to the size of a parameter, would not move them: they are
        as long as for a small weight. Nor are they clipped, as the norm would be zero at first.
    """

    parameters: Sequence[nn.Parameter]
    rate: float = 1.0
    start_at_zero: bool = False

    def options(self, optimiser: str) -> dict[str, Any]:
        """The group for a torch optimiser of this name; the trainer reads `rate`."""
        options: dict[str, Any] = {"params": list(self.parameters), "rate": self.rate}
        if self.start_at_zero and optimiser == "scaled_adam":
            options["min_rms"] = _ZERO_RMS
            options["clip_scale"] = 0.0
        return options


def trained_parameters(model: nn.Module) -> list[ParameterGroup]:
    """One group of all parameters that require a gradient, in the model's order."""
    return [ParameterGroup(parameters=[p for p in model.parameters() if p.requires_grad])]


def layer_of(name: str) -> str | None:
    """The encoder layer of a parameter's name, for example encoder.layers.3; None outside one."""
    layer = _LAYER.match(name)
    return layer[1] if layer else None


def grouped_by_rate(
    model: nn.Module, layer_decay: float, *, pretrained_rate: float = 1.0
) -> list[ParameterGroup]:
    """The trained parameters by the depth of their encoder layer.

    The top layer, predictor and joiner have the full rate, each layer below `layer_decay` times
    the rate of the one above. Adapters have groups of their own.

    Args:
        pretrained_rate: factor of the rate of the transformers library's module.
    """
    names = [name for name, _ in model.named_parameters()]
    depths = _depths(names)
    top = max(depths.values(), default=0)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = layer_decay ** (top - depths[name])
            if name.startswith(_PRETRAINED):
                rate *= pretrained_rate
            groups.setdefault((rate, is_adapter(name)), []).append(parameter)
    return [
        ParameterGroup(parameters=parameters, rate=rate, start_at_zero=adapter)
        for (rate, adapter), parameters in groups.items()
    ]


def _depths(names: Sequence[str]) -> dict[str, int]:
    """The encoder layer of each parameter, counted from 1; 0 for what comes before them.

    Between layers (where stacks change the frame rate), that of the layer before.
    """
    layers: dict[str, int] = {}
    depths, depth = {}, 0
    for name in names:
        if (layer := layer_of(name)) is not None:
            depth = layers.setdefault(layer, len(layers) + 1)
        depths[name] = depth if name.startswith("encoder.") else -1
    return {name: len(layers) if depth < 0 else depth for name, depth in depths.items()}
