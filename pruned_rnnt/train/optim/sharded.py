"""An optimiser whose moments are divided among the processes (ZeRO stage 1, arXiv 1910.02054).

Each parameter belongs to one process, which alone has its moments and updates it:

    gradients, summed     ->   update of       ->   each process sends its
    in all processes           own parameters       parameters to the others

Adam computes each element by itself and ScaledAdam each parameter, except for the norm by which it
clips, which is summed over the processes. So the results are those of an optimiser that is not
divided; ScaledAdam's up to the rounding of that norm.

A checkpoint has the whole state in the order of an optimiser that is not divided. Any number of
processes can continue it, with and without sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pruned_rnnt.train.optim.conditional import ConditionalOptimiser
from pruned_rnnt.train.optim.optimiser import (
    OptimiserConfig,
    build_optimiser,
    parameter_options,
)
from pruned_rnnt.train.optim.parameter_groups import ParameterGroup
from pruned_rnnt.train.optim.scaled_adam import ScaledAdam

# Of the vectors in which parameters are sent; there is one for each process at a time.
_BUCKET_BYTES = 25 * 2**20


class ShardedOptimiser(torch.optim.Optimizer):
    """Updates the parameters of this process, and fetches the others; all processes must call.

    Args:
        own: the optimiser of the parameters of this process, with a group for each of `options`.
        options: groups of all parameters, in the order of an optimiser that is not divided.
        owners: the process of each parameter, in the order of the groups.
        rank: of this process.
    """

    def __init__(
        self,
        own: torch.optim.Optimizer,
        options: Sequence[Mapping[str, Any]],
        owners: Sequence[int],
        rank: int,
    ) -> None:
        # The base class would make groups of its own: those of `own` are used, as others change
        # their learning rates.
        self.own = own
        self._sizes = [len(group["params"]) for group in options]
        self._parameters = [p for group in options for p in group["params"]]
        self._owners = list(owners)
        self._rank = rank
        self._rounds = _rounds(self._parameters, self._owners)
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
        self._exchange()

    def step_if(self, applies: Tensor) -> None:
        """See `ConditionalOptimiser`; the flag must be the same in all processes."""
        assert isinstance(self.own, ConditionalOptimiser)
        self.own.step_if(applies)
        self._exchange()

    def take_back(self) -> None:
        """See `ConditionalOptimiser`."""
        assert isinstance(self.own, ConditionalOptimiser)
        self.own.take_back()

    def whole_state(self) -> dict[str, Any] | None:
        """The state of all processes, as of an optimiser that is not divided, on the CPU.

        All processes must call; the first one gets the state, the others None.
        """
        own_index = {id(p): n for n, p in enumerate(self._own_parameters())}
        saved = self.own.state_dict()
        mine = {
            index: saved["state"][own_index[id(parameter)]]
            for index, parameter in enumerate(self._parameters)
            if self._owners[index] == self._rank and own_index[id(parameter)] in saved["state"]
        }
        layouts: list[Any] | None = None
        if self._rank == 0:
            layouts = [None] * distributed.get_world_size()
        distributed.gather_object({index: _layout(each) for index, each in mine.items()}, layouts)
        if layouts is None:
            for each in mine.values():
                for value in each.values():
                    if isinstance(value, Tensor):
                        distributed.send(value.detach().cpu().contiguous(), dst=0)
            return None
        whole = {index: {n: _on_cpu(v) for n, v in each.items()} for index, each in mine.items()}
        for source, layout in enumerate(layouts[1:], start=1):
            for index, each in layout.items():
                whole[index] = {name: _received(value, source) for name, value in each.items()}
        numbers = iter(range(len(self._parameters)))
        groups = [
            {**group, "params": [next(numbers) for _ in range(size)]}
            for group, size in zip(saved["param_groups"], self._sizes, strict=True)
        ]
        return {"state": dict(sorted(whole.items())), "param_groups": groups}

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
        is_own = [owner == self._rank for owner in self._owners]
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

    def state_bytes(self) -> int:
        """Bytes of this process's moments."""
        tensors = [v for each in self.state.values() for v in each.values()]
        return sum(v.numel() * v.element_size() for v in tensors if isinstance(v, Tensor))

    def _own_parameters(self) -> list[Tensor]:
        return [p for group in self.own.param_groups for p in group["params"]]

    @torch.no_grad()
    def _exchange(self) -> None:
        """Send the parameters of this process to the others, and copy theirs."""
        for buckets in self._rounds:
            flats, works = [], []
            for owner, bucket in enumerate(buckets):
                if not bucket:
                    continue
                if owner == self._rank:
                    flat = _flatten_dense_tensors(bucket)
                else:
                    flat = bucket[0].new_empty(sum(p.numel() for p in bucket))
                flats.append((owner, bucket, flat))
                works.append(distributed.broadcast(flat, src=owner, async_op=True))
            for work in works:
                work.wait()
            for owner, bucket, flat in flats:
                if owner != self._rank:
                    torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))


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
    owners = owners_of([p.numel() for p in parameters], world_size)
    mine = {id(p) for p, owner in zip(parameters, owners, strict=True) if owner == rank}
    own = build_optimiser(model, config, groups, trains=lambda p: id(p) in mine)
    return ShardedOptimiser(own, options, owners, rank)


def owners_of(sizes: Sequence[int], processes: int) -> list[int]:
    """The process of each parameter: the largest first, each for the one with the least so far."""
    owners, loads = [0] * len(sizes), [0] * processes
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        # Of empty parameters, too, each process gets some.
        owner = min(range(processes), key=lambda process: loads[process])
        owners[index] = owner
        loads[owner] += max(1, sizes[index])
    return owners


def whole_state(optimiser: torch.optim.Optimizer, *, is_first: bool) -> dict[str, Any] | None:
    """The state for a checkpoint, in the first process; all processes must call."""
    if isinstance(optimiser, ShardedOptimiser):
        return optimiser.whole_state()
    return optimiser.state_dict() if is_first else None


def _rounds(parameters: Sequence[Tensor], owners: Sequence[int]) -> list[tuple[list[Tensor], ...]]:
    """For each round of sending, the parameters of each process: of one dtype, about a bucket."""
    buckets: list[list[list[Tensor]]] = [[] for _ in range(max(owners) + 1)]
    for parameter, owner in zip(parameters, owners, strict=True):
        of_owner = buckets[owner]
        last = of_owner[-1] if of_owner else []
        size = sum(p.numel() * p.element_size() for p in (*last, parameter))
        if not last or size > _BUCKET_BYTES or last[0].dtype != parameter.dtype:
            of_owner.append([])
        of_owner[-1].append(parameter)
    return list(zip_longest(*buckets, fillvalue=[]))


def _sum(total: Tensor) -> None:
    distributed.all_reduce(total)


def _layout(state: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a parameter's state, with the shape and dtype of each tensor in its place."""
    return {
        name: _Layout(value.shape, value.dtype) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


class _Layout:
    """Shape and dtype of a tensor that is sent."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype


def _received(value: Any, source: int) -> Any:
    if not isinstance(value, _Layout):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype)
    distributed.recv(tensor, src=source)
    return tensor


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
