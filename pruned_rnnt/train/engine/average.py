"""Averages of parameters: a running one while training, and one over checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Of `pruned-rnnt average` without --last and of decode.checkpoint=average: as many as
# train.keep_last keeps by default.
AVERAGED_CHECKPOINTS = 3


class RunningAverage:
    """Exponential moving average of a model's parameters and buffers.

    After k updates the newest parameters weigh 1 - min(decay, (1 + k) / (10 + k)): early values,
    which are far from anything useful, are forgotten quickly.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._names = dict(model.state_dict(keep_vars=True))
        # A module which is held twice has two names for one parameter; it is averaged once.
        self._live = {id(value): value for value in self._names.values()}
        self._average = {key: value.detach().clone() for key, value in self._live.items()}
        # Lists are made once: the tensors stay the same.
        moving = [key for key, value in self._live.items() if value.is_floating_point()]
        self._moving = self._pairs(moving)
        self._copied = self._pairs([key for key in self._live if key not in set(moving)])

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the model's present parameters."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(*self._moving, 1 - decay)
        if self._copied[0]:
            torch._foreach_copy_(*self._copied)

    def _pairs(self, keys: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        return [self._average[key] for key in keys], [self._live[key] for key in keys]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged parameters inside, and its own ones again afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for key, value in self._live.items():
            own = value.detach().clone()
            value.copy_(self._average[key])
            self._average[key].copy_(own)

    def state_dict(self) -> dict[str, Tensor]:
        """Averages under the names of the model's own state."""
        return {name: self._average[id(value)] for name, value in self._names.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Take over saved values, and the number of updates that made them."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])
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
