"""k2's Swoosh activations if k2 is not installed (Zipformer, arXiv 2310.11230, equations 4, 5).

SwooshL(x) = log(1 + exp(x - 4)) - 0.08 x - 0.035
SwooshR(x) = log(1 + exp(x - 1)) - 0.08 x - 0.313261687

With a dropout_prob above 0, dropout follows the activation if x requires a gradient, as in k2.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import dropout, softplus

_SLOPE = 0.08
_L = (4.0, 0.035)
_R = (1.0, 0.313261687)


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
