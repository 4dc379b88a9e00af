"""The plain mean of the parameters over a training, from which that over any span follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.optim.owners import Owners


class ParameterMean:
    """The mean of all parameters that were added, in float64.

    With the means of two checkpoints, `mean_between` gives that of the parameters added between
    them; no checkpoint between them is needed.

    Args:
        model: whose parameters are averaged; frozen ones have their one value.
        since: number of steps done before the first parameters are added.
        ranks: processes with the same model, each of which keeps the mean of some parameters; in
            all of them `state_dict` must then be called. Default: this one keeps all.
    """

    def __init__(self, model: nn.Module, since: int = 0, ranks: Ranks | None = None) -> None:
        # A parameter with two names is averaged once.
        named = dict(model.named_parameters())
        ranks = ranks or Ranks()
        self._owners = Owners(list(named.values()), ranks.rank, ranks.world_size)
        self._names = list(named)
        self._live = {n: value.detach() for n, value in named.items() if self._owners.is_own(value)}
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

    def state_dict(self) -> dict[str, Any] | None:
        """Values for a checkpoint, in the first process; the others get None."""
        parameters: dict[str, Tensor] | None = dict(self._mean)
        if self._owners.world_size > 1:
            whole = self._owners.gather(
                {
                    number: {"mean": self._mean[name]}
                    for number, name in enumerate(self._names)
                    if name in self._mean
                }
            )
            if whole is None:
                return None
            parameters = {self._names[number]: each["mean"] for number, each in whole.items()}
        return {"parameters": parameters, "count": self.count, "since": self.since}

    def tensors(self) -> list[Tensor]:
        """The means that this process keeps, one for each parameter."""
        return list(self._mean.values())

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
