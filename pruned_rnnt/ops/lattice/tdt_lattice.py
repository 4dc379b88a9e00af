"""The recursion of token-and-duration transducers (TDT) over lattice nodes kept as rows.

Every arc has one of the durations D[0..K-1], frames by which it advances. With px(t,u), py(t,u) the
log-probabilities of symbol u+1 and of the blank at node (t,u), and ld = log_softmax of the node's
duration logits w:

    symbol n   (t,u) -> (t + D[n], u+1)   score px(t,u) - sigma + delay(t) + ld(n)   t + D[n] < T_n
    blank n    (t,u) -> (t + D[n], u)     score py(t,u) - sigma + ld(n)              D[n] > 0

with delay(t) = delay_penalty * ((T_n - 1)/2 - t). A blank from (t, U_n) that lands on T_n exactly
ends the path; no other arc leads to a frame from T_n on, and none leaves or enters a node outside
the band. Backwards, from beta = 1 at the end:

    arrive(arc) = exp(score of the arc) beta(its target)
    beta(node)  = sum of arrive over the arcs that leave it        log P = log beta(0,0)
    share(arc)  = arrive(arc) / beta(node)

Forwards, from mass(0,0) = 1: occupancy(arc) = mass(source) share(arc), and the mass of a node is
the sum of the occupancies of the arcs that lead to it. The shares of a node's arcs are divided by
their own sum, so that the occupancies of all arcs that pass from one frame to a later one sum to 1
however long the input is, as in lattice.py. beta is kept in float64 or as factor and exponent.

Results: total = log P, and sums of occupancies d log P / d score,
    gx(t,u)   of the symbols of all durations     gd(t,u,n) of the symbol and the blank of D[n]
    gy(t,u)   of the blanks of all durations      stay(t,u) of the symbols of duration 0
With multi_blank (arXiv 2211.03541) the table begins with duration 0, which alone symbols take, and
duration_logits are scores that are not normalised: 0 for the symbol, then those of the blank of
each other duration.

The gradient of -log P by z (token logits) is that of log_probs.py with gx and gy; by the duration
logits it is sum_n gd(n) softmax(w)(n) - gd(n) (duration_gradient).
Source: arXiv 2304.06795; sigma is its logit under-normalization.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import NEG_INF, Out, op
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.lattice.lattice import recursion_dtype

# Of a node; kernels keep all of them in registers.
MOST_DURATIONS = 16


class TdtOptions(NamedTuple):
    """The scalars of the recursion; durations: K different integers from 0 on, one above 0."""

    durations: list[int]
    sigma: float
    delay_penalty: float
    multi_blank: bool = False


class TdtSums(NamedTuple):
    """total (N,), gx, gy and stay (R,), gd (R,K)."""

    total: Tensor
    gx: Tensor
    gy: Tensor
    stay: Tensor
    gd: Tensor


class _Lattice(NamedTuple):
    """Padded nodes: scores px, py (N,T,W) and log-probabilities of durations ld (N,T,W,K), -inf
    outside the lattice and the band; lengths (N,1)."""

    px: Tensor
    py: Tensor
    ld: Tensor
    frames: Tensor
    symbols: Tensor


class _Diagonal(NamedTuple):
    """Frame t and column u of each node of an anti-diagonal, which no arc connects: all lead to a
    later frame, a later column or both."""

    t: Tensor
    u: Tensor


def _diagonals(lattice: _Lattice) -> list[_Diagonal]:
    _, frames, columns = lattice.px.shape
    u = torch.arange(columns, device=lattice.px.device)
    diagonals = []
    for k in range(frames + columns - 1):
        inside = u[max(0, k + 1 - frames) : k + 1]
        diagonals.append(_Diagonal(k - inside, inside))
    return diagonals


def _arrivals(lattice: _Lattice, beta: Tensor, at: _Diagonal, options: TdtOptions) -> Tensor:
    """log arrive (2K,N,nodes) of the arcs that leave the nodes: symbols, then blanks."""
    t, u = at
    px, py = (x[:, t, u].to(beta.dtype) for x in (lattice.px, lattice.py))
    ld = lattice.ld[:, t, u].to(beta.dtype).unbind(2)
    symbols, blanks = [], []
    for duration, ld_n in zip(options.durations, ld, strict=True):
        has_symbol = t + duration < lattice.frames
        if options.multi_blank and duration > 0:
            has_symbol = torch.zeros_like(has_symbol)
        symbol = px + ld_n + beta[:, t + duration, u + 1]
        symbols.append(symbol.masked_fill(~has_symbol, NEG_INF))
        blank = py + ld_n + beta[:, t + duration, u]
        blanks.append(blank if duration > 0 else torch.full_like(blank, NEG_INF))
    return torch.stack(symbols + blanks)


def _betas(lattice: _Lattice, options: TdtOptions) -> Tensor:
    """log beta (N,T+most duration,W+1)."""
    (batch, frames, columns), device = lattice.px.shape, lattice.px.device
    shape = (batch, frames + max(options.durations), columns + 1)
    beta = torch.full(shape, NEG_INF, dtype=recursion_dtype(device), device=device)
    t = torch.arange(shape[1], device=device)[:, None]
    u = torch.arange(shape[2], device=device)
    frames_N11, symbols_N11 = lattice.frames[:, :, None], lattice.symbols[:, :, None]
    is_end = (t == frames_N11) & (u == symbols_N11)
    is_end &= (frames_N11 >= 1) & (frames_N11 <= frames)
    beta.masked_fill_(is_end, 0)
    for at in reversed(_diagonals(lattice)):
        value = _arrivals(lattice, beta, at, options).logsumexp(0)
        beta[:, at.t, at.u] = value.masked_fill(is_end[:, at.t, at.u], 0)
    return beta


def _occupancies(
    lattice: _Lattice, beta: Tensor, options: TdtOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Occupancies (N,T,W,K) of the symbols and of the blanks."""
    batch, frames, columns = lattice.px.shape
    count = len(options.durations)
    shape = (batch, frames, columns, count)
    symbol, blank = torch.zeros((2, *shape), dtype=dtype, device=beta.device).unbind(0)
    mass = torch.zeros_like(beta)
    mass[:, 0, 0] = (beta[:, 0, 0] != NEG_INF).to(mass.dtype)
    for at in _diagonals(lattice):
        t, u = at
        arrive = _arrivals(lattice, beta, at, options)
        share = arrive.softmax(0).masked_fill((arrive == NEG_INF).all(0), 0)
        occupancy = share * mass[:, t, u]
        symbol[:, t, u] = occupancy[:count].movedim(0, 2).to(dtype)
        blank[:, t, u] = occupancy[count:].movedim(0, 2).to(dtype)
        for n, duration in enumerate(options.durations):
            mass[:, t + duration, u + 1] += occupancy[n]
            mass[:, t + duration, u] += occupancy[count + n]
    return symbol, blank


def log_durations(duration_logits: Tensor) -> Tensor:
    """log_softmax over the last dimension, -inf where all logits are -inf."""
    nothing_allowed = (duration_logits == NEG_INF).all(-1, keepdim=True)
    return duration_logits.log_softmax(-1).masked_fill(nothing_allowed, NEG_INF)


def tdt_workspace(px: Tensor, batch: int, symbols: int, durations: list[int]) -> Tensor:
    """Memory in which kernels keep the arcs of the nodes of px (R), with beta and mass, and those
    of the last steps of each utterance; see csrc/cuda/lattice/tdt_nodes.cuh and tdt_walk.cuh."""
    ring = 4 * (max(durations) + 2) * (symbols + 2)
    return px.new_empty((2 * (len(durations) + 3) * px.shape[0] + batch * ring,))


@op
def tdt_lattice(
    px: Tensor,
    py: Tensor,
    duration_logits: Tensor,
    rows: LatticeRows,
    options: TdtOptions,
    symbols: int,
    work: Out[Tensor],
    sums: Out[TdtSums],
) -> None:
    """px, py (R) as log_probs writes them and duration_logits (R,K), all acc; symbols is the padded
    U -> total (N), gx, gy, stay (R), gd (R,K).

    No path, T_n outside 1..T or U_n outside 0..U: total = -inf, all occupancies 0, and nothing is
    read outside the rows. Invalid nodes: occupancies of 0. work: as tdt_workspace makes it.
    """
    # Nodes are spread over the padded (T,U+1) lattice, which the compiled kernels do not need.
    if rows.row_splits is not None:
        rows = rows._replace(frames=min(rows.frames, int(rows.logit_lengths.max())))
    lengths_N = rows.logit_lengths
    n, t, u, valid = rows.nodes(0, px.shape[0])
    valid = valid & (u <= symbols)
    at = (n[valid], t[valid], u[valid])
    delay = options.delay_penalty * ((lengths_N.to(px.dtype)[n] - 1) / 2 - t)
    shape = (lengths_N.shape[0], rows.frames, symbols + 1)
    scores = px.new_full((2, *shape), NEG_INF)
    scores[(0, *at)] = (px + delay - options.sigma)[valid]
    scores[(1, *at)] = (py - options.sigma)[valid]
    ld = px.new_zeros((*shape, len(options.durations)))
    given = duration_logits[valid]
    ld[at] = given if options.multi_blank else log_durations(given)
    symbols_N1 = rows.target_lengths[:, None]
    lattice = _Lattice(scores[0], scores[1], ld, lengths_N[:, None], symbols_N1)
    beta = _betas(lattice, options)
    symbol, blank = _occupancies(lattice, beta, options, px.dtype)
    sums.total.copy_(beta[:, 0, 0])
    stays = [n for n, duration in enumerate(options.durations) if duration == 0]
    for out, dense in (
        (sums.gx, symbol.sum(3)),
        (sums.gy, blank.sum(3)),
        (sums.stay, symbol[..., stays].sum(3)),
        (sums.gd, symbol + blank),
    ):
        out.zero_()
        out[valid] = dense[at]
