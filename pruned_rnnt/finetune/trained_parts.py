"""Select the parameters that fine-tuning trains, and their learning rates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.model.lora import is_adapter
from pruned_rnnt.train.optim.parameter_groups import ParameterGroup

_LAYER = re.compile(r"^(encoder\..*?layers\.\d+)\.")


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Exclude parameters from training; returns the number of their elements.

    Args:
        patterns: names of parameters or of modules that hold them, or patterns of such names.

    Raises:
        ConfigError: a pattern matches nothing (the message lists the names), or all is frozen.
    """
    frozen = 0
    for pattern in patterns:
        chosen = [p for name, p in model.named_parameters() if _matches(name, pattern)]
        if not chosen:
            raise ConfigError(
                f"finetune.freeze: {pattern!r} matches no parameter; the parts of this model are "
                f"{', '.join(part_names(model))}"
            )
        for parameter in chosen:
            frozen += parameter.numel() if parameter.requires_grad else 0
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"finetune.freeze={list(patterns)} leaves nothing to train")
    return frozen


def _matches(name: str, pattern: str) -> bool:
    """True if the pattern matches the parameter's name or a module that contains it."""
    parts = name.split(".")
    starts = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return any(fnmatchcase(start, pattern) for start in starts)


def part_names(model: nn.Module) -> list[str]:
    """Names of the modules with parameters: parts, their children, and the encoder's layers."""
    names: dict[str, None] = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        names[parts[0]] = None
        layer = _LAYER.match(name)
        names[layer[1] if layer else ".".join(parts[:-1][:2])] = None
    return list(names)


def grouped_by_rate(model: nn.Module, layer_decay: float) -> list[ParameterGroup]:
    """The trained parameters by the depth of their encoder layer.

    The top layer, predictor and joiner have the full rate, each layer below `layer_decay` times
    the rate of the one above. Adapters have groups of their own.
    """
    names = [name for name, _ in model.named_parameters()]
    depths = _depths(names)
    top = max(depths.values(), default=0)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = layer_decay ** (top - depths[name])
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
        if layer := _LAYER.match(name):
            depth = layers.setdefault(layer[1], len(layers) + 1)
        depths[name] = depth if name.startswith("encoder.") else -1
    return {name: len(layers) if depth < 0 else depth for name, depth in depths.items()}
