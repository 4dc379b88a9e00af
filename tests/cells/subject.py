"""What a cell calls: a public function, valid arguments of it, and its float64 reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# By parameter name. A module under test is among them, so that its parameters are leaves too.
Arguments = dict[str, Any]
Results = dict[str, Tensor]


class Option(NamedTuple):
    """Another value of an option that the reference knows, as a column of the table."""

    name: str
    given: Arguments


@dataclass(frozen=True)
class Subject:
    """A row of the table.

    name: its function, and in brackets the variant.
    make: valid arguments, floating ones in float64 on the CPU.
    call: the function under test.
    reference: the same results in float64 by plain torch, of arguments on the CPU in float64 whose
        floating ones require gradients. Results that require gradients are losses.
    floats: arguments that take floating tensors. integers: those that take integer tensors.
    scalars: options, by kind (axes/scalars.py).
    options: other valid values of options.
    has_products: some products run in the dtype of the inputs, so that 16-bit inputs give results
        of that precision.
    words: other names of an argument in messages. meanings: of arguments with names of another
        package, the name here.
    reduces: whether `reduction` is an option. is_differentiable: whether results of arguments with
        gradients have gradients, where the function says so. overwrites: whether the backward pass
        writes over an argument, so that no graph and no argument is used twice. gives_scores:
        whether it returns log-probabilities, not losses.
    """

    name: str
    make: Callable[[], Arguments]
    call: Callable[..., Any]
    reference: Callable[..., Results]
    floats: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    scalars: dict[str, str] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    has_products: bool = False
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)
    reduces: bool = True
    is_differentiable: bool = True
    overwrites: bool = False
    gives_scores: bool = False

    @property
    def function(self) -> str:
        return self.name.partition(" (")[0]

    @functools.cached_property
    def is_module(self) -> bool:
        return "module" in self.make()

    def names_of(self, argument: str) -> tuple[str, ...]:
        """Names by which a message may call the argument."""
        return (argument, *self.words.get(argument, ()))

    def meaning_of(self, argument: str) -> str:
        return self.meanings.get(argument, argument)


def seed(value: int) -> None:
    """As torch.manual_seed, which without a GPU takes milliseconds to note the call for one."""
    if torch.cuda.is_available():
        torch.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)


def results_of(raw: Any, prefix: str = "") -> Results:
    """The tensors of a result by name: fields of named tuples, positions of tuples."""
    if isinstance(raw, Tensor):
        return {prefix or "result": raw}
    if isinstance(raw, dict):
        return raw
    if not isinstance(raw, tuple):
        return {}
    names = getattr(raw, "_fields", None) or [str(n) for n in range(len(raw))]
    found: Results = {}
    for name, part in zip(names, raw, strict=True):
        found |= results_of(part, f"{prefix}.{name}" if prefix else name)
    return found


def floats_of(given: Arguments) -> dict[str, Tensor]:
    """Floating arguments and the parameters of a module."""
    found = {}
    for name, x in given.items():
        if isinstance(x, nn.Module):
            found |= parameters_of(name, x)
        elif isinstance(x, Tensor) and x.is_floating_point():
            found[name] = x
    return found


def leaves_of(given: Arguments) -> dict[str, Tensor]:
    """Those that require gradients."""
    return {name: x for name, x in floats_of(given).items() if x.requires_grad}


def parameters_of(name: str, module: nn.Module) -> dict[str, Tensor]:
    """By name, whatever wrapper the module is in."""
    found = module.named_parameters()
    return {f"{name}.{key.removeprefix('module.')}": x for key, x in found}


def placed(
    given: Arguments,
    device: str,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = True,
) -> Arguments:
    """The arguments on a device, floating ones in a dtype and with gradients."""

    def move(x: Any) -> Any:
        if isinstance(x, nn.Module):
            return x.to(device, dtype)
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point():
            return x.detach().to(device, dtype).requires_grad_(requires_grad)
        return x.to(device)

    return {name: move(x) for name, x in given.items()}
