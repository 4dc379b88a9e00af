"""Groups of parameters that are trained alike, and their options for an optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

# The root mean square that ScaledAdam takes for parameters that start at zero.
_ZERO_RMS = 0.02


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
