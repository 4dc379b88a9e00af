"""Replacements for k2's other names if k2 is not installed.

They let icefall's model and training code be imported and train: RaggedTensor and RaggedShape, the
Swoosh activations, the version that icefall logs, and k2's classes as names for annotations, which
raise when called.

Swoosh (Zipformer, arXiv 2310.11230, equations 4, 5):

    SwooshL(x) = log(1 + exp(x - 4)) - 0.08 x - 0.035
    SwooshR(x) = log(1 + exp(x - 1)) - 0.08 x - 0.313261687

With a dropout_prob above 0, dropout follows the activation if x requires a gradient, as in k2.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import dropout, softplus

from pruned_rnnt.compat import ragged

_CLASSES = (
    "CtcLoss",
    "DecodeStateInfo",
    "DenseFsaVec",
    "Fsa",
    "MWERLoss",
    "Nbest",
    "OnlineDenseIntersecter",
    "RnntDecodingConfig",
    "RnntDecodingStream",
    "RnntDecodingStreams",
    "SymbolTable",
)
_NEEDS_K2 = "k2.{} needs k2, which is not installed: https://k2-fsa.github.io/k2/installation"
_SLOPE = 0.08
_L = (4.0, 0.035)
_R = (1.0, 0.313261687)


def stand_in(name: str) -> Any:
    """The replacement for k2.name.

    Raises:
        KeyError: there is none.
    """
    if name in _CLASSES:
        return _class(name)
    if name == "with_cuda":
        return torch.cuda.is_available()
    return _NAMES[name]


class _NeedsK2(type):
    """The type of the classes that only k2 has."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(_NEEDS_K2.format(f"{cls.__name__}.{name}"))

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ImportError(_NEEDS_K2.format(cls.__name__), name="k2")


@functools.cache
def _class(name: str) -> type:
    return _NeedsK2(name, (), {"__module__": __name__, "__doc__": _NEEDS_K2.format(name)})


def swoosh_l(x: Tensor, dropout_prob: float = 0.0) -> Tensor:
    """SwooshL, elementwise, differentiable."""
    return dropout(_swoosh(x, *_L), dropout_prob, x.requires_grad)


def swoosh_r(x: Tensor, dropout_prob: float = 0.0) -> Tensor:
    """SwooshR, elementwise, differentiable."""
    return dropout(_swoosh(x, *_R), dropout_prob, x.requires_grad)


def swoosh_l_forward_and_deriv(x: Tensor) -> tuple[Tensor, Tensor]:
    """SwooshL and its derivative."""
    return swoosh_l(x), (x - _L[0]).sigmoid() - _SLOPE


def swoosh_r_forward_and_deriv(x: Tensor) -> tuple[Tensor, Tensor]:
    """SwooshR and its derivative."""
    return swoosh_r(x), (x - _R[0]).sigmoid() - _SLOPE


def _swoosh(x: Tensor, shift: float, offset: float) -> Tensor:
    return softplus(x - shift) - _SLOPE * x - offset


_NAMES = {
    "RaggedShape": ragged.RaggedShape,
    "RaggedTensor": ragged.RaggedTensor,
    "ragged": ragged,
    "swoosh_l": swoosh_l,
    "swoosh_l_forward": swoosh_l,
    "swoosh_l_forward_and_deriv": swoosh_l_forward_and_deriv,
    "swoosh_r": swoosh_r,
    "swoosh_r_forward": swoosh_r,
    "swoosh_r_forward_and_deriv": swoosh_r_forward_and_deriv,
    "version": SimpleNamespace(
        __version__="pruned_rnnt.compat", __build_type__="Release", __git_sha1__="", __git_date__=""
    ),
}
