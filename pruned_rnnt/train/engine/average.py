"""Averages of parameters: a running average and a plain mean in training, means of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.optim.owners import Owners


class RunningAverage:
    """Exponential moving average of a model's parameters; buffers have their current values.

    Update k gives the newest parameters the weight 1 - min(decay, (1 + k) / (10 + k)), so that the
    average quickly forgets early values.

    torch.optim.swa_utils.AveragedModel is not a substitute: it copies in the first update instead
    of averaging, keeps a second module, and names the saved parameters `module.*`.

    Averages of float16 and bfloat16 parameters are float32: in their own type a step of 1 % of the
    difference is often rounded away, so that the average would stand still.

    Args:
        ranks: processes with the same model, each of which keeps the average of some parameters; in
            all of them `applied` and `state_dict` must then be called. Default: this one keeps all.
    """

    def __init__(self, model: nn.Module, decay: float, ranks: Ranks | None = None) -> None:
        self.decay = decay
        self.updates = 0
        self._model = model
        # A module that is registered twice has two names for one parameter, which is averaged once.
        # Frozen parameters are their own average.
        parameters = {
            id(p): p
            for p in self._tensors().values()
            if isinstance(p, nn.Parameter) and p.requires_grad
        }
        ranks = ranks or Ranks()
        self._owners = Owners(list(parameters.values()), ranks.rank, ranks.world_size)
        self._live: dict[int, Tensor] = {
            key: p for key, p in parameters.items() if self._owners.is_own(p)
        }
        self._average = {
            key: value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
            for key, value in self._live.items()
        }
        # Parameters stay the same objects, so their lists are built once.
        pairs = [(self._average[key], value) for key, value in self._live.items()]
        alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        self._moving = [average for average, _ in alike], [value for _, value in alike]
        self._wider = [pair for pair in pairs if pair[0].dtype != pair[1].dtype]
        # Within `applied`, the newest values of parameters whose average has another dtype.
        self._newest: dict[int, Tensor] = {}

    def _tensors(self) -> dict[str, Tensor]:
        """The model's parameters and buffers; a module may have replaced a buffer."""
        return dict(self._model.state_dict(keep_vars=True))

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the model's current parameters."""
        for key, value in self._live.items():
            self._average[key].copy_(value)
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the model's current parameters."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages, live = self._moving
        if averages:
            torch._foreach_lerp_(averages, live, 1 - decay)
        # One by one: a wider copy of all at once would need as much memory as the average.
        for average, value in self._wider:
            average.lerp_(value.to(average.dtype), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the averaged parameters into the model for the length of the context.

        After an error, a process does not wait for the others: parameters whose average they keep
        then stay averaged.
        """
        self._swap()
        self._owners.exchange()
        try:
            yield
        finally:
            self._swap()
        self._owners.exchange()

    @torch.no_grad()
    def _swap(self) -> None:
        for key, value in self._live.items():
            average = self._average[key]
            if key in self._newest:
                value.copy_(self._newest.pop(key))
                continue
            own = value.detach().clone()
            value.copy_(average)
            if average.dtype == value.dtype:
                average.copy_(own)
            else:
                self._newest[key] = own

    def state_dict(self) -> dict[str, Tensor] | None:
        """Averages, buffers and frozen parameters under the names of the model's own state.

        Of several processes that keep them, the first gets them on the CPU, and the others None.
        """
        if self._owners.world_size == 1:
            return {
                name: self._average.get(id(value), value) for name, value in self._tensors().items()
            }
        numbers = {id(value): number for number, value in enumerate(self._owners.tensors)}
        whole = self._owners.gather(
            {numbers[key]: {"average": value} for key, value in self._average.items()}
        )
        if whole is None:
            return None
        return {
            name: whole[numbers[id(value)]]["average"] if id(value) in numbers else value
            for name, value in self._tensors().items()
        }

    def tensors(self) -> list[Tensor]:
        """The averages that this process keeps, one for each parameter."""
        return list(self._average.values())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Load saved averages and the number of updates behind them."""
        for name, value in self._tensors().items():
            if id(value) in self._average:
                self._average[id(value)].copy_(state[name])
        self.updates = updates


def mean_of_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of floating-point entries, in float64; other entries are those of the last state.

    Raises:
        ValueError: no state, or states of different models.
    """
    if not states:
        raise ValueError("there is nothing to average")
    mean: dict[str, Tensor] = {}
    for name, last in states[-1].items():
        values = [state.get(name) for state in states]
        if any(value is None or value.shape != last.shape for value in values):
            raise ValueError(f"the checkpoints are of different models: '{name}' differs")
        if last.is_floating_point():
            total = sum(value.double() for value in values if value is not None)
            mean[name] = (total / len(states)).to(last.dtype)  # type: ignore[union-attr]
        else:
            mean[name] = last.clone()
    return mean


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
        # A copy also of float64 parameters.
        self._mean = {n: value.to(torch.float64, copy=True) for n, value in self._live.items()}
        self.since = since
        self.count = 0

    @torch.no_grad()
    def add(self) -> None:
        """Add the model's current parameters, with the weight of all earlier ones each."""
        self.count += 1
        for name, value in self._live.items():
            self._mean[name].lerp_(value.double(), 1 / self.count)

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
