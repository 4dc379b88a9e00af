"""The plain mean of the parameters over a training, from which that over any span follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class ParameterMean:
    """The mean of all parameters that were added, in float64.

    With the means of two checkpoints, `mean_between` gives that of the parameters added between
    them; no checkpoint between them is needed.

    Args:
        model: whose parameters are averaged; frozen ones have their one value.
        since: number of steps done before the first parameters are added.
    """

    def __init__(self, model: nn.Module, since: int = 0) -> None:
        # A parameter with two names is averaged once.
        self._live = {name: value.detach() for name, value in model.named_parameters()}
        self._mean = {name: value.double() for name, value in self._live.items()}
        self.since = since
        self.count = 0

    @torch.no_grad()
    def add(self) -> None:
        """Add the model's current parameters, with the weight of all earlier ones each."""
        self.count += 1
        for name, value in self._live.items():
            mean = self._mean[name]
            mean.add_(value.double().sub_(mean), alpha=1 / self.count)

    def state_dict(self) -> dict[str, Any]:
        """Values for a checkpoint."""
        return {"parameters": dict(self._mean), "count": self.count, "since": self.since}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the values of a checkpoint."""
        for name, mean in self._mean.items():
            mean.copy_(state["parameters"][name])
        self.count, self.since = state["count"], state["since"]


@dataclass(frozen=True)
class SpanMean:
    """parameters: means by name, in float64. count: number of averaged sets of parameters."""

    parameters: dict[str, Tensor]
    count: int


def mean_between(start: Mapping[str, Any], end: Mapping[str, Any]) -> SpanMean:
    """The mean of the parameters that were added after `start` and until `end`.

    Args:
        start, end: values of `ParameterMean.state_dict`, of one training.

    Raises:
        ValueError: nothing was added between them, or they are of different means or models.
    """
    if start["since"] != end["since"]:
        raise ValueError(
            f"the mean was begun anew after step {end['since']}, so that the two means have "
            "nothing in common"
        )
    first, last = start["parameters"], end["parameters"]
    if {n: v.shape for n, v in first.items()} != {n: v.shape for n, v in last.items()}:
        raise ValueError("they are of different models")
    count = end["count"] - start["count"]
    if count < 1:
        raise ValueError("no parameters were added between them")
    # In steps from the end: the terms are smaller than in the difference of two sums.
    weight = start["count"] / count
    return SpanMean(
        parameters={name: value + weight * (value - first[name]) for name, value in last.items()},
        count=count,
    )
