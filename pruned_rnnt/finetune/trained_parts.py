"""Select the parameters that fine-tuning trains."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.train.optim.layer_rates import layer_of


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
        names[layer_of(name) or ".".join(parts[:-1][:2])] = None
    return list(names)
