"""An optimiser that is divided among the processes (ZeRO stage 2, arXiv 1910.02054).

Each parameter belongs to one process, which alone has its moments and summed gradient and updates
it:

    gradients, each      ->   update of       ->   each process sends its
    summed in its owner       own parameters       parameters to the others

Adam computes each element by itself and ScaledAdam each parameter, except for the norm by which it
clips, which is summed over the processes. So the results are those of an optimiser that is not
divided; ScaledAdam's up to the rounding of that norm.

A checkpoint has the whole state in the order of an optimiser that is not divided. Any number of
processes can continue it, with and without sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from pruned_rnnt.train.optim.conditional import ConditionalOptimiser
from pruned_rnnt.train.optim.optimiser import (
    OptimiserConfig,
    ParameterGroup,
    build_optimiser,
    parameter_options,
)
from pruned_rnnt.train.optim.owners import Owners
from pruned_rnnt.train.optim.scaled_adam import ScaledAdam


class ShardedOptimiser(torch.optim.Optimizer):
    """Updates the parameters of this process, and fetches the others; all processes must call.

    It has the methods of a `ConditionalOptimiser` if the own one has them.

    Args:
        own: the optimiser of the parameters of this process, with a group for each of `options`.
        options: groups of all parameters, in the order of an optimiser that is not divided.
        owners: the process of each parameter, in the order of the groups.
    """

    def __init__(
        self,
        own: torch.optim.Optimizer,
        options: Sequence[Mapping[str, Any]],
        owners: Owners,
    ) -> None:
        # The base class would make groups of its own: those of `own` are used, as others change
        # their learning rates.
        self.own = own
        self.owners = owners
        self._sizes = [len(group["params"]) for group in options]
        if isinstance(own, ScaledAdam):
            own.sum_over_processes = _sum

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of this process."""
        return self.own.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the parameters of this process."""
        return self.own.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.own.defaults

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters by their gradients, which are those of all processes."""
        self.own.step()
        self.owners.exchange()

    def whole_state(self) -> dict[str, Any] | None:
        """The state of all processes, in the form of an undivided optimiser, on the CPU.

        All processes must call; the first one gets the state, the others None.
        """
        numbers_of = {id(p): number for number, p in enumerate(self._own_parameters())}
        saved = self.own.state_dict()
        whole = self.owners.gather(
            {
                index: saved["state"][numbers_of[id(parameter)]]
                for index, parameter in enumerate(self.owners.tensors)
                if numbers_of.get(id(parameter)) in saved["state"]
            }
        )
        if whole is None:
            return None
        numbers = iter(range(len(self.owners.tensors)))
        groups = [
            {**group, "params": [next(numbers) for _ in range(size)]}
            for group, size in zip(saved["param_groups"], self._sizes, strict=True)
        ]
        return {"state": whole, "param_groups": groups}

    def state_dict(self) -> dict[str, Any]:
        """Not available: see `whole_state`."""
        raise NotImplementedError("a sharded optimiser has whole_state(), which all processes call")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this process's part of a whole state.

        Raises:
            ValueError: the state is that of another optimiser or of other groups of parameters.
        """
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != self._sizes:
            raise ValueError("the saved optimiser state has groups of other parameters")
        saved_names = [name for group in groups for name in group["params"]]
        is_own = [rank == self.owners.rank for rank in self.owners.ranks]
        own_state, own_groups, place, count = {}, [], 0, 0
        for group, size in zip(groups, self._sizes, strict=True):
            members = []
            for index in range(place, place + size):
                if not is_own[index]:
                    continue
                if saved_names[index] in state_dict["state"]:
                    own_state[count] = state_dict["state"][saved_names[index]]
                members.append(count)
                count += 1
            own_groups.append({**group, "params": members})
            place += size
        self.own.load_state_dict({"state": own_state, "param_groups": own_groups})

    def _own_parameters(self) -> list[Tensor]:
        return [p for group in self.own.param_groups for p in group["params"]]


class _ConditionalShardedOptimiser(ShardedOptimiser):
    def step_if(self, applies: Tensor) -> None:
        """See `ConditionalOptimiser`; the flag must be the same in all processes."""
        assert isinstance(self.own, ConditionalOptimiser)
        self.own.step_if(applies)
        self.owners.exchange()

    def take_back(self) -> None:
        """See `ConditionalOptimiser`."""
        assert isinstance(self.own, ConditionalOptimiser)
        self.own.take_back()


def build_sharded_optimiser(
    model: nn.Module,
    config: OptimiserConfig,
    groups: Sequence[ParameterGroup],
    rank: int,
    world_size: int,
) -> ShardedOptimiser:
    """As `build_optimiser`, with moments divided among the processes by numbers of elements.

    Raises:
        ValueError: there are more processes than parameters.
    """
    options = parameter_options(model, config, groups)
    parameters = [p for group in options for p in group["params"]]
    if len(parameters) < world_size:
        raise ValueError(
            f"train.shard is optimiser, with {world_size} processes for {len(parameters)} trained "
            "parameters: set train.shard=none"
        )
    owners = Owners(parameters, rank, world_size)
    mine = {id(p) for p in parameters if owners.is_own(p)}
    own = build_optimiser(model, config, groups, trains=lambda p: id(p) in mine)
    is_conditional = isinstance(own, ConditionalOptimiser)
    kind = _ConditionalShardedOptimiser if is_conditional else ShardedOptimiser
    return kind(own, options, owners)


def whole_state(optimiser: torch.optim.Optimizer, *, is_first: bool) -> dict[str, Any] | None:
    """The state for a checkpoint, in the first process; all processes must call."""
    if isinstance(optimiser, ShardedOptimiser):
        return optimiser.whole_state()
    return optimiser.state_dict() if is_first else None


def _sum(total: Tensor) -> None:
    distributed.all_reduce(total)
