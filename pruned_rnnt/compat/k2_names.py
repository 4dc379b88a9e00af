"""Replacements for k2's other names if k2 is not installed.

They let icefall's model and training code be imported and train: RaggedTensor and RaggedShape, the
Swoosh activations, the version that icefall logs, and k2's classes as names for annotations, which
raise when called.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from pruned_rnnt.compat import ragged, swoosh

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


_NAMES = {
    "RaggedShape": ragged.RaggedShape,
    "RaggedTensor": ragged.RaggedTensor,
    "ragged": ragged,
    "swoosh_l": swoosh.swoosh_l,
    "swoosh_l_forward": swoosh.swoosh_l,
    "swoosh_l_forward_and_deriv": swoosh.swoosh_l_forward_and_deriv,
    "swoosh_r": swoosh.swoosh_r,
    "swoosh_r_forward": swoosh.swoosh_r,
    "swoosh_r_forward_and_deriv": swoosh.swoosh_r_forward_and_deriv,
    "version": SimpleNamespace(
        __version__="pruned_rnnt.compat", __build_type__="Release", __git_sha1__="", __git_date__=""
    ),
}
