"""Averages of parameters: a running average in training, and an average of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

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

    Args:
        ranks: processes with the same model, each of which keeps the average of some parameters; in
            all of them `applied` and `state_dict` must then be called. Default: this one keeps all.
    """

    def __init__(self, model: nn.Module, decay: float, ranks: Ranks | None = None) -> None:
        self.decay = decay
        self.updates = 0
        self._names = dict(model.state_dict(keep_vars=True))
        # A module that is registered twice has two names for one parameter, which is averaged once.
        # Frozen parameters are their own average.
        parameters = {
            id(p): p
            for p in self._names.values()
            if isinstance(p, nn.Parameter) and p.requires_grad
        }
        ranks = ranks or Ranks()
        self._owners = Owners(list(parameters.values()), ranks.rank, ranks.world_size)
        self._live: dict[int, Tensor] = {
            key: p for key, p in parameters.items() if self._owners.is_own(p)
        }
        self._average = {key: value.detach().clone() for key, value in self._live.items()}
        # The tensors stay the same objects, so their lists are built once.
        self._moving = (list(self._average.values()), list(self._live.values()))

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
        torch._foreach_lerp_(*self._moving, 1 - decay)

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
            own = value.detach().clone()
            value.copy_(self._average[key])
            self._average[key].copy_(own)

    def state_dict(self) -> dict[str, Tensor] | None:
        """Averages, buffers and frozen parameters under the names of the model's own state.

        Of several processes that keep them, the first gets them on the CPU, and the others None.
        """
        if self._owners.world_size == 1:
            return {
                name: self._average.get(id(value), value) for name, value in self._names.items()
            }
        numbers = {id(value): number for number, value in enumerate(self._owners.tensors)}
        whole = self._owners.gather(
            {numbers[key]: {"average": value} for key, value in self._average.items()}
        )
        if whole is None:
            return None
        return {
            name: whole[numbers[id(value)]]["average"] if id(value) in numbers else value
            for name, value in self._names.items()
        }

    def tensors(self) -> list[Tensor]:
        """The averages that this process keeps, one for each parameter."""
        return list(self._average.values())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Load saved averages and the number of updates behind them."""
        for name, value in self._names.items():
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
