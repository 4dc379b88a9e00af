"""The gradient of the loss by duration logits, from the occupancies of tdt_lattice.py.

With mass = sum_n gd(n), the probability that a path passes the node:
    unit(n) = mass softmax(w)(n) - gd(n)
clamped to [-clamp, clamp] if clamp > 0, then times grad_loss of the utterance. FastEmit changes the
gradient through the symbols' log-probabilities alone, and therefore not this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import Out, op
from pruned_rnnt.ops.common.row_geometry import LatticeRows


@op
def duration_gradient(
    grad_loss: Tensor,
    duration_logits: Tensor,
    gd: Tensor,
    rows: LatticeRows,
    row_begin: int,
    clamp: float,
    grad: Out[Tensor],
) -> None:
    """grad_loss (N), duration_logits and gd (R,K), all acc -> grad (r,K) of any floating dtype and
    row stride, of rows row_begin .. row_begin + r. Rows without mass get exact zeros."""
    written = slice(row_begin, row_begin + grad.shape[0])
    occupancy = gd[written]
    mass = occupancy.sum(1, keepdim=True)
    unit = mass * duration_logits[written].softmax(1) - occupancy
    if clamp > 0:
        unit.clamp_(-clamp, clamp)
    n = rows.nodes(row_begin, grad.shape[0]).n
    grad.copy_(torch.where(mass == 0, 0, unit * grad_loss[n][:, None]))
