"""Hidden rows of the joiner for a chunk of lattice nodes: act(am(n,t) + lm(n,u)), and its gradient.

fused_joiner.py calls these chunk by chunk. A chunk of a band has whole frames; one of a whole
lattice may begin and end within a frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import Out, op
from pruned_rnnt.ops.common.row_geometry import LatticeRows, Nodes

# The numbers by which the kernels distinguish the activations.
ACTIVATIONS = {"none": 0, "tanh": 1, "relu": 2}


@op
def joiner_rows(
    am: Tensor, lm: Tensor, rows: LatticeRows, row_begin: int, activation: int, hidden: Out[Tensor]
) -> None:
    """am (N,T,D), lm (N,U+1,D) of one dtype -> hidden (r,D) of that dtype for rows row_begin ..
    row_begin + r. activation is a value of ACTIVATIONS. Rows of invalid nodes are 0; those behind
    the last packed row may keep what they have."""
    n, t, u, valid = rows.nodes(row_begin, hidden.shape[0])
    total = am[n, t.clamp(max=am.shape[1] - 1)] + lm[n, u.clamp(0, lm.shape[1] - 1)]
    hidden.copy_(activated(total, activation).masked_fill(~valid[:, None], 0))


def activated(total: Tensor, activation: int) -> Tensor:
    """act(total) for a value of ACTIVATIONS."""
    if activation == ACTIVATIONS["tanh"]:
        return total.tanh()
    return total.relu() if activation == ACTIVATIONS["relu"] else total


@op
def joiner_rows_backward(
    grad_hidden: Tensor,
    hidden: Tensor,
    rows: LatticeRows,
    row_begin: int,
    activation: int,
    grad_am: Out[Tensor],
    grad_lm: Out[Tensor],
) -> None:
    """grad_hidden, hidden (r,D) of one dtype -> grad_am (N,T,D) of that dtype or acc: the frames of
    this chunk are assigned (0 where no node is valid; summed in acc, rounded once), or added to if
    the chunk has only a part of them; others are not touched. grad_lm (N,U+1,D) acc: added to, in a
    fixed order (the fallback on CUDA: only under torch.use_deterministic_algorithms)."""
    nodes = rows.nodes(row_begin, hidden.shape[0])
    is_cut = _rows_of_cut_frames(rows, nodes) if rows.start is None else None
    add_gradients(grad_hidden, hidden, nodes, activation, grad_am, grad_lm, is_cut)


def _rows_of_cut_frames(rows: LatticeRows, nodes: Nodes) -> Tensor:
    """A mask of the rows (r) of a whole lattice whose frame is outside, or only partly in them."""
    n, t, u, _ = nodes
    last_u = rows.columns - 1 if rows.row_splits is None else rows.target_lengths[n[-1]]
    cut_first = (n == n[0]) & (t == t[0]) & (u[0] > 0)
    cut_last = (n == n[-1]) & (t == t[-1]) & (u[-1] < last_u)
    return cut_first | cut_last | (t >= rows.frames)


def add_gradients(
    grad_hidden: Tensor,
    hidden: Tensor,
    nodes: Nodes,
    activation: int,
    grad_am: Tensor,
    grad_lm: Tensor,
    is_cut: Tensor | None = None,
) -> None:
    """The sums of joiner_rows_backward over rows (r,D) of these nodes; is_cut (r): the rows of
    frames that are added to."""
    n, t, u, valid = nodes
    grad = grad_hidden.to(grad_lm.dtype)
    if activation == ACTIVATIONS["tanh"]:
        grad = grad * (1 - hidden.to(grad.dtype).square())
    elif activation == ACTIVATIONS["relu"]:
        grad = grad * (hidden > 0)
    grad = grad.masked_fill(~valid[:, None], 0)
    at_am = n * grad_am.shape[1] + t.clamp(max=grad_am.shape[1] - 1)
    at_lm = n * grad_lm.shape[1] + u.clamp(0, grad_lm.shape[1] - 1)
    am_rows = grad_am.view(-1, grad_am.shape[2])
    sums = torch.zeros_like(am_rows, dtype=grad.dtype).index_add_(0, at_am, grad)
    assigned = sums[at_am].to(am_rows.dtype)
    if is_cut is not None:
        has_cut = torch.zeros_like(sums[:, 0]).index_add_(0, at_am, is_cut.to(sums.dtype)) > 0
        before = am_rows[at_am].masked_fill(~has_cut[at_am][:, None], 0)
        assigned += before
    am_rows.index_copy_(0, at_am, assigned)
    grad_lm.view(-1, grad_lm.shape[2]).index_add_(0, at_lm, grad)
