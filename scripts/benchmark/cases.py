"""What is measured: inputs of a given shape, and the work that every system does on them.

Axes: N batch, T frames, U symbols, V vocabulary, D joiner width, E encoder width, P predictor
width, S columns kept a frame.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

# full: logits (N,T,U+1,V) in, loss and the gradient by the logits out.
# simple: am (N,T,V), lm (N,U+1,V) in, smoothed simple loss and both gradients out.
# step: encoder (N,T,E) and predictor (N,U+1,P) outputs in; four projections, smoothed simple loss,
#       band, joiner (tanh, linear), pruned loss; gradients to both inputs and all weights out.
KINDS = ("full", "simple", "step")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row group of the results. Lengths are T and U for all utterances unless ragged."""

    name: str
    kind: str
    device: str
    N: int
    T: int
    U: int
    V: int
    D: int = 0
    E: int = 0
    P: int = 0
    S: int = 0
    lm_only_scale: float = 0.25
    dtype: str = "float32"
    ragged: bool = False

    def describe(self) -> str:
        """The case in words and numbers, the field `what` of a result."""
        sizes = "".join(f" {axis} {getattr(self, axis)}" for axis in "NTUVDEPS" if self[axis])
        shape = " ragged" if self.ragged else ""
        return f"{self.kind} forward+backward,{sizes}{shape} {self.dtype} {self.device}"

    def __getitem__(self, axis: str) -> int:
        return int(getattr(self, axis))


CPU_CASES = [
    Case(name="cpu-full", kind="full", device="cpu", N=8, T=200, U=50, V=500),
    Case(name="cpu-full-small-v", kind="full", device="cpu", N=8, T=300, U=60, V=50),
    Case(name="cpu-full-one", kind="full", device="cpu", N=1, T=500, U=100, V=500),
    Case(name="cpu-simple", kind="simple", device="cpu", N=8, T=400, U=100, V=500),
    Case(
        name="cpu-step",
        kind="step",
        device="cpu",
        N=8,
        T=200,
        U=50,
        V=500,
        D=256,
        E=256,
        P=256,
        S=5,
    ),
    Case(
        name="cpu-step-large-v",
        kind="step",
        device="cpu",
        N=4,
        T=200,
        U=50,
        V=5000,
        D=256,
        E=256,
        P=256,
        S=5,
    ),
]
CASES = {case.name: case for case in CPU_CASES}


class Inputs(NamedTuple):
    """The tensors of a case, the same for every system (seed 0). The first two are leaves."""

    first: Tensor
    second: Tensor | None
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor


class Layers(nn.Module):
    """The weights of a `step` case."""

    def __init__(self, case: Case):
        super().__init__()
        self.simple_am = nn.Linear(case.E, case.V)
        self.simple_lm = nn.Linear(case.P, case.V)
        self.encoder_proj = nn.Linear(case.E, case.D)
        self.decoder_proj = nn.Linear(case.P, case.D)
        self.output = nn.Linear(case.D, case.V)


def make_inputs(case: Case) -> Inputs:
    """Random inputs of a case on its device; gradients reach `first` and `second`."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=case.device, dtype=dtype).requires_grad_()

    if case.kind == "full":
        first, second = leaf(case.N, case.T, case.U + 1, case.V), None
    elif case.kind == "simple":
        first, second = leaf(case.N, case.T, case.V), leaf(case.N, case.U + 1, case.V)
    else:
        first, second = leaf(case.N, case.T, case.E), leaf(case.N, case.U + 1, case.P)
    share = torch.linspace(1.0, 0.5, case.N) if case.ragged else torch.ones(case.N)
    targets = torch.randint(1, case.V, (case.N, case.U), dtype=torch.int32)
    lengths = [(size * share).int() for size in (case.T, case.U)]
    return Inputs(
        first, second, targets.to(case.device), *(length.to(case.device) for length in lengths)
    )


def make_layers(case: Case) -> Layers:
    """The weights of a step, the same for every system (seed 1)."""
    torch.manual_seed(1)
    return Layers(case).to(case.device, getattr(torch, case.dtype))


def smaller(case: Case) -> Case:
    """A case of the same kind that runs in milliseconds, to check that all systems agree."""
    return replace(case, N=2, T=12, U=5, V=min(case.V, 20), ragged=False)
