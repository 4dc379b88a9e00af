"""The cases of the benchmark: inputs of given shapes, and the work that every system does on them.

Axes: N batch, T frames, U symbols, V vocabulary, D joiner width, E encoder width, P predictor
width, S columns kept per frame, K durations.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

# full: logits (N,T,U+1,V) -> loss and gradient of the logits.
# log_probs: the same for log-probabilities, whose computation is not part of the work.
# simple: am (N,T,V), lm (N,U+1,V) -> smoothed simple loss and both gradients.
# step: encoder (N,T,E) and predictor (N,U+1,P) outputs -> four projections, smoothed simple loss,
#       band, joiner (tanh, linear), pruned loss; gradients of both inputs and all weights.
# trainer_step: a step as the trainer calls it: the sum over the utterances, and the losses of each.
# exact_step: as step, with two projections, joiner and full loss over the whole lattice.
# tdt_step, tdt_exact_step: as step and exact_step, with the TDT loss of durations 0 .. K-1 and a
#       ReLU joiner; tdt_step also projects both outputs to durations for its simple loss.
# lattice: px (N,U,T+1), py (N,U+1,T) -> total and both gradients.
# bounds: occupancies of px and py -> bounds.
KINDS = (
    "full",
    "log_probs",
    "simple",
    "step",
    "trainer_step",
    "exact_step",
    "tdt_step",
    "tdt_exact_step",
    "lattice",
    "bounds",
)

# Path of the .npz with the lengths of real utterances, arrays `frames` and `tokens` (--shapes).
SHAPES_VARIABLE = "BENCHMARK_SHAPES"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case, which every system runs.

    All utterances have T frames and U symbols, unless `ragged` (shorter ones, too) or `real` (the
    first N utterances of the shapes file, whose maxima are T and U). autocast: dtype of the
    products under autocast, "" for none. tf32: float32 products may run in TF32.
    """

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
    K: int = 0
    lm_only_scale: float = 0.25
    dtype: str = "float32"
    ragged: bool = False
    real: bool = False
    autocast: str = ""
    tf32: bool = False

    def describe(self) -> str:
        """The case in words and numbers, the field `what` of a result."""
        sizes = "".join(f" {axis} {getattr(self, axis)}" for axis in "NTUVDEPSK" if self[axis])
        shape = " ragged" if self.ragged else " of real utterances" if self.real else ""
        shape += f" autocast {self.autocast}" if self.autocast else ""
        shape += " tf32" if self.tf32 else ""
        return f"{self.kind} forward+backward,{sizes}{shape} {self.dtype} {self.device}"

    def __getitem__(self, axis: str) -> int:
        return int(getattr(self, axis))


_CPU_STEP = {"kind": "step", "device": "cpu", "T": 200, "U": 50, "D": 256, "E": 256, "P": 256}
CPU_CASES = [
    Case(name="cpu-full", kind="full", device="cpu", N=8, T=200, U=50, V=500),
    Case(name="cpu-full-small-v", kind="full", device="cpu", N=8, T=300, U=60, V=50),
    Case(name="cpu-full-one", kind="full", device="cpu", N=1, T=500, U=100, V=500),
    Case(name="cpu-log-probs", kind="log_probs", device="cpu", N=8, T=200, U=50, V=500),
    Case(name="cpu-simple", kind="simple", device="cpu", N=8, T=400, U=100, V=500),
    Case(name="cpu-step", N=8, V=500, S=5, **_CPU_STEP),
    Case(name="cpu-trainer-step", N=8, V=500, S=5, **{**_CPU_STEP, "kind": "trainer_step"}),
    Case(name="cpu-step-large-v", N=4, V=5000, S=5, **_CPU_STEP),
    Case(name="cpu-exact-step", N=2, V=500, **{**_CPU_STEP, "kind": "exact_step"}),
    Case(name="cpu-tdt-step", N=8, V=500, S=5, K=5, **{**_CPU_STEP, "kind": "tdt_step"}),
    Case(name="cpu-tdt-exact-step", N=2, V=500, K=5, **{**_CPU_STEP, "kind": "tdt_exact_step"}),
    Case(name="cpu-lattice", kind="lattice", device="cpu", N=30, T=437, U=101, V=0),
    Case(name="cpu-bounds", kind="bounds", device="cpu", N=30, T=437, U=101, V=0, S=5),
]

_STEP = {"kind": "step", "device": "cuda", "D": 512, "E": 512, "P": 512, "S": 5}
_B30 = {**_STEP, "N": 30, "T": 437, "U": 101, "V": 500, "real": True}
_TRAINER_B30 = {**_B30, "kind": "trainer_step"}
_EXACT_B30 = {**_B30, "kind": "exact_step", "S": 0}
_TDT = {"device": "cuda", "N": 32, "T": 188, "U": 91, "D": 640, "E": 1024, "P": 640, "K": 5}
_TDT_STEP = {**_TDT, "kind": "tdt_step", "S": 5, "autocast": "bfloat16"}
_TDT_EXACT = {**_TDT, "kind": "tdt_exact_step", "autocast": "bfloat16"}
_V5000 = {**_STEP, "N": 30, "T": 400, "U": 100, "V": 5000}
_LOG_PROBS_V28 = {"kind": "log_probs", "device": "cuda", "T": 150, "U": 40, "V": 28}
_LOG_PROBS_V5000 = {"kind": "log_probs", "device": "cuda", "T": 150, "U": 20, "V": 5000}
# The vocabulary of a large language model.
_V151936 = {**_STEP, "N": 16, "T": 250, "U": 60, "V": 151936}
CUDA_CASES = [
    Case(name="cuda-step-b30-bf16", autocast="bfloat16", **_B30),
    Case(name="cuda-trainer-step-b30-bf16", autocast="bfloat16", **_TRAINER_B30),
    Case(name="cuda-step-b30-fp32", **_B30),
    Case(name="cuda-step-b30-tf32", tf32=True, **_B30),
    Case(name="cuda-step-v5000-bf16", autocast="bfloat16", **_V5000),
    Case(name="cuda-step-v151936-bf16", autocast="bfloat16", **_V151936),
    Case(name="cuda-simple-v1000", kind="simple", device="cuda", N=32, T=2000, U=100, V=1000),
    Case(name="cuda-simple-v10000", kind="simple", device="cuda", N=32, T=2000, U=100, V=10000),
    Case(name="cuda-full-v50", kind="full", device="cuda", N=32, T=1500, U=300, V=50),
    Case(name="cuda-full-v5000", kind="full", device="cuda", N=32, T=150, U=20, V=5000),
    Case(name="cuda-full-v28", kind="full", device="cuda", N=128, T=150, U=40, V=28),
    *(Case(name=f"cuda-log-probs-v28-n{N}", N=N, **_LOG_PROBS_V28) for N in (1, 16, 128)),
    *(
        Case(name=f"cuda-log-probs-v5000-n{N}", N=N, **_LOG_PROBS_V5000)
        for N in (1, 16, 32, 64, 128)
    ),
    Case(name="cuda-lattice", kind="lattice", device="cuda", N=30, T=437, U=101, V=0),
    Case(name="cuda-lattice-small", kind="lattice", device="cuda", N=1, T=20, U=5, V=0),
    Case(name="cuda-bounds", kind="bounds", device="cuda", N=30, T=437, U=101, V=0, S=5),
    Case(name="cuda-exact-step-b30-bf16", autocast="bfloat16", **_EXACT_B30),
    Case(name="cuda-exact-step-b30-fp32", **_EXACT_B30),
    # The same shape without durations.
    Case(name="cuda-step-v1025-bf16", V=1025, **{**_TDT_STEP, "kind": "step", "K": 0}),
    Case(name="cuda-tdt-step-v1025-bf16", V=1025, **_TDT_STEP),
    Case(name="cuda-tdt-step-v8193-bf16", V=8193, **_TDT_STEP),
    Case(name="cuda-tdt-exact-step-v1025-bf16", V=1025, **_TDT_EXACT),
    Case(name="cuda-tdt-exact-step-v8193-bf16", V=8193, **_TDT_EXACT),
]
CASES = {case.name: case for case in [*CPU_CASES, *CUDA_CASES]}


class Inputs(NamedTuple):
    """The tensors of a case, the same for every system (seed 0). The first two are leaves, except
    those of bounds."""

    first: Tensor
    second: Tensor | None
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor

    @property
    def targets_and_lengths(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positional arguments that most losses take after the logits."""
        return self.targets, self.logit_lengths, self.target_lengths


class Layers(nn.Module):
    """The weights of a `step` case."""

    def __init__(self, case: Case):
        super().__init__()
        self.simple_am = nn.Linear(case.E, case.V)
        self.simple_lm = nn.Linear(case.P, case.V)
        self.encoder_proj = nn.Linear(case.E, case.D)
        self.decoder_proj = nn.Linear(case.P, case.D)
        self.output = nn.Linear(case.D, case.V)

    def joiner_parameters(self) -> list[Tensor]:
        """Weights of an `exact_step`, which has no simple loss."""
        used = (self.encoder_proj, self.decoder_proj, self.output)
        return [x for layer in used for x in layer.parameters()]


def make_inputs(case: Case) -> Inputs:
    """Random inputs of a case on its device; gradients reach `first` and `second`."""
    generators = {device: torch.Generator(device) for device in ("cpu", case.device)}
    for generator in generators.values():
        generator.manual_seed(0)
    kind = {"device": case.device, "dtype": getattr(torch, case.dtype)}

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generators[case.device], **kind).requires_grad_()

    if case.kind in ("full", "log_probs"):
        first, second = leaf(case.N, case.T, case.U + 1, case.V), None
        if case.kind == "log_probs":
            first = first.detach().log_softmax(-1).requires_grad_()
    elif case.kind == "simple":
        first, second = leaf(case.N, case.T, case.V), leaf(case.N, case.U + 1, case.V)
    elif case.kind in ("lattice", "bounds"):
        first, second = leaf(case.N, case.U, case.T + 1), leaf(case.N, case.U + 1, case.T)
        if case.kind == "bounds":
            first, second = first.detach().sigmoid(), second.detach().sigmoid()
    else:
        first, second = leaf(case.N, case.T, case.E), leaf(case.N, case.U + 1, case.P)
    shape = (case.N, case.U)
    targets = torch.randint(
        1, max(case.V, 2), shape, generator=generators["cpu"], dtype=torch.int32
    )
    lengths = _lengths(case)
    return Inputs(
        first, second, targets.to(case.device), *(length.to(case.device) for length in lengths)
    )


def _lengths(case: Case) -> list[Tensor]:
    if not case.real:
        share = torch.linspace(1.0, 0.5, case.N) if case.ragged else torch.ones(case.N)
        return [(size * share).int() for size in (case.T, case.U)]
    path = os.environ.get(SHAPES_VARIABLE)
    if path is None:
        raise ValueError(f"case {case.name} needs the lengths of real utterances: give --shapes")
    shapes = np.load(path)
    lengths = [torch.from_numpy(shapes[key][: case.N]).int() for key in ("frames", "tokens")]
    found = [int(x.max()) for x in lengths]
    if found != [case.T, case.U]:
        raise ValueError(f"the shapes file has maxima {found}, the case needs [{case.T}, {case.U}]")
    return lengths


def make_layers(case: Case) -> Layers:
    """The weights of a step, the same for every system (seed 1)."""
    torch.manual_seed(1)
    return Layers(case).to(case.device, getattr(torch, case.dtype))


def smaller(case: Case) -> Case:
    """A case of the same kind that runs in milliseconds, to check that all systems agree."""
    return replace(case, N=2, T=12, U=5, V=min(case.V, 20), ragged=False, real=False)
