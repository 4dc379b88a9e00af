"""The loss of the trivial joiner: matrix products around simple_log_probs and the recursion.

The maths is in simple_log_probs.py, how exponentials are stored in simple_products.py. Here is the
prior q that smooths am, the mean of the predictor's softmax over all real positions. The duration
logits of TDT, am(t) + lm(u) of other projections, are few, and stored for all nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import (
    opaque_to_compile,
    refuses_second_derivative,
    with_occupancies,
)
from pruned_rnnt.ops.common.library import NEG_INF, accumulator, new_outputs
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.common.utterances import TargetsAndLengths
from pruned_rnnt.ops.joiner.log_probs import duration_gradient
from pruned_rnnt.ops.lattice.recursion import Recursion, run_recursion
from pruned_rnnt.ops.simple.simple_log_probs import (
    NodeScores,
    Products,
    RowMaxima,
    Scales,
    Smoothing,
    Upstream,
    simple_backward,
    simple_log_probs,
    simple_weights,
)
from pruned_rnnt.ops.simple.simple_products import (
    Exponentials,
    exp_layout,
    exp_rows,
    simple_product,
    simple_sums,
)


class SimpleOptions(NamedTuple):
    """recursion: of whose loss the simple loss uses the topology and the penalties."""

    recursion: Recursion
    scales: Scales


class SimpleInputs(NamedTuple):
    """am (N,T,V) and lm (N,U+1,V); of TDT also duration_am (N,T,K) and duration_lm (N,U+1,K). All
    contiguous and of one dtype."""

    am: Tensor
    lm: Tensor
    duration_am: Tensor | None = None
    duration_lm: Tensor | None = None


class SimpleResults(NamedTuple):
    """loss (N,), differentiable; occupancies gx and gy (N,T,U+1), and of TDT stay (N,T,U+1) and gd
    (N,T,U+1,K), which are not; all acc."""

    loss: Tensor
    gx: Tensor
    gy: Tensor
    stay: Tensor | None = None
    gd: Tensor | None = None


class SimpleState(NamedTuple):
    """The results of the forward pass that the gradient needs."""

    maxima: RowMaxima
    exps: Exponentials
    product: Tensor
    logz: Tensor
    smoothing: Smoothing

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All, to be saved for backward."""
        return *self.maxima, *self.exps, self.product, self.logz, *self.smoothing

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> SimpleState:
        maxima, exps = RowMaxima(*tensors[:2]), Exponentials(*tensors[2:4])
        product, logz, *smoothing = tensors[4:]
        return SimpleState(maxima, exps, product, logz, Smoothing(*smoothing))


def whole_lattices(am: Tensor, lm: Tensor, batch: TargetsAndLengths) -> LatticeRows:
    """The geometry of (N,T,U+1)."""
    return LatticeRows(*batch[1:], None, None, am.shape[1], lm.shape[1])


class RowExponentials(NamedTuple):
    """Maxima of the rows, lm_lse (N,U+1), and exponentials."""

    maxima: RowMaxima
    lm_lse: Tensor
    exps: Exponentials


def row_exponentials(am: Tensor, lm: Tensor, batch: TargetsAndLengths) -> RowExponentials:
    """Of contiguous am (N,T,V) and lm (N,U+1,V)."""
    acc = accumulator(am.dtype)
    (utterances, frames, vocabulary), width = am.shape, lm.shape[1]
    layout = exp_layout(am.dtype, am.device)

    def exponentials(
        x: Tensor, lengths: Tensor, extra: int, parts: int, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        row_max, row_lse = new_outputs(2, x, x.shape[:2], acc)
        stored = x.new_empty(
            (utterances, parts, rows, layout.padded(vocabulary)), dtype=layout.dtype
        )
        exp_rows(x, lengths, extra, row_max, row_lse, stored)
        return row_max, row_lse, stored

    am_max, _, am_exp = exponentials(am, batch.logit_lengths, 0, layout.am_parts, frames)
    rows = layout.padded(width)
    lm_max, lm_lse, lm_exp = exponentials(lm, batch.target_lengths, 1, layout.lm_parts, rows)
    return RowExponentials(RowMaxima(am_max, lm_max), lm_lse, Exponentials(am_exp, lm_exp))


def _counted_rows(lm_log_softmax: Tensor, target_lengths: Tensor) -> Tensor:
    """(N,U+1) bool: positions that q is the mean of; those of NaN would spread over the batch."""
    u = torch.arange(lm_log_softmax.shape[1], device=lm_log_softmax.device)
    return (u <= target_lengths[:, None]) & ~lm_log_softmax[:, :, 0].isnan()


def _log_unigram(lm: Tensor, target_lengths: Tensor) -> Tensor:
    """log q (V): q is the mean of softmax(lm) over real positions; exact where q underflows."""
    log_softmax = torch.log_softmax(lm.to(accumulator(lm.dtype)), dim=2)
    counted = _counted_rows(log_softmax, target_lengths)
    log_softmax = log_softmax.masked_fill(~counted[:, :, None], NEG_INF)
    return torch.logsumexp(log_softmax, dim=(0, 1)) - counted.sum().log()


def _simple_scores(
    am: Tensor, lm: Tensor, batch: TargetsAndLengths, options: SimpleOptions
) -> tuple[NodeScores, SimpleState]:
    """px and py (N,T,U+1) of contiguous am (N,T,V) and lm (N,U+1,V)."""
    acc = accumulator(am.dtype)
    maxima, row_lse, exps = row_exponentials(am, lm, batch)
    product = am.new_empty((*am.shape[:2], exps.lm_exp.shape[2]), dtype=acc)
    simple_product(exps, product)
    am_lse = log_q = None
    if options.scales.am_only_scale != 0:
        log_q = _log_unigram(lm, batch.target_lengths)
        am_lse = torch.logsumexp(am.to(acc) + log_q, dim=2)
    lm_lse = row_lse if options.scales.lm_only_scale != 0 else None
    smoothing = Smoothing(lm_lse, am_lse, log_q)
    scores = NodeScores(*new_outputs(3, am, (*am.shape[:2], lm.shape[1]), acc))
    simple_log_probs(am, lm, maxima, product, smoothing, batch, options.scales, scores)
    return scores, SimpleState(maxima, exps, product, scores.logz, smoothing)


def _unigram_gradient(
    upstream: Upstream,
    am: Tensor,
    lm: Tensor,
    smoothing: Smoothing,
    batch: TargetsAndLengths,
    blank: int,
    fastemit_lambda: float,
) -> Tensor:
    """The gradient of lm (N,U+1,V) through log q, in acc, for an am_only_scale of 1.

    Utterances with a NaN contribute none, because log q would pass it on to the others.
    """
    grad_loss, gx, gy = upstream
    _, am_lse, log_q = smoothing
    targets, _, target_lengths = batch
    assert am_lse is not None
    assert log_q is not None
    acc = log_q.dtype
    ex = gx * ((1 + fastemit_lambda) * grad_loss)[:, None, None]
    ey = gy * grad_loss[:, None, None]
    broken_N = (ex + ey).sum((1, 2)).isnan()[:, None, None]
    ex, ey = ex.masked_fill(broken_N, 0), ey.masked_fill(broken_N, 0)
    leaving_NT = (ex + ey).sum(2)
    softmax = (am.to(acc) + log_q - am_lse[:, :, None]).exp()
    softmax = softmax.masked_fill((leaving_NT == 0)[:, :, None], 0)
    # Autocast does not change products with `out`.
    grad_log_q = torch.empty_like(log_q)
    torch.mv(softmax.flatten(0, 1).t(), leaving_NT.flatten(), out=grad_log_q)
    emitted_NU = ex.sum(1)[:, :-1]
    y = torch.where(emitted_NU != 0, targets, blank).long()
    grad_log_q.index_put_((y.flatten(),), -emitted_NU.flatten(), accumulate=True)
    grad_log_q[blank] -= ey.sum()

    log_softmax = torch.log_softmax(lm.to(acc), dim=2)
    counted = _counted_rows(log_softmax, target_lengths)
    # d log q(v) / d log softmax(u,v) is the share of position u in q(v).
    share = (log_softmax - log_q - counted.sum().log()).exp() * grad_log_q
    # A symbol that no position allows has no share, and no gradient.
    share = share.masked_fill(log_softmax == NEG_INF, 0)
    grad = share - log_softmax.exp() * share.sum(2, keepdim=True)
    return grad.masked_fill(~counted[:, :, None], 0)


class _Gradients(NamedTuple):
    """What the gradient is computed from, and where it is written."""

    upstream: Upstream
    am: Tensor
    lm: Tensor
    state: SimpleState
    batch: TargetsAndLengths
    weights: Tensor
    grad_am: Tensor
    grad_lm: Tensor

    def of(self, utterances: slice) -> _Gradients:
        """The part of some utterances."""
        log_q = self.state.smoothing.log_q  # has no utterances
        part: _Gradients = _sliced(self, utterances)
        smoothing = part.state.smoothing._replace(log_q=log_q)
        return part._replace(state=part.state._replace(smoothing=smoothing))


def _sliced(x: Any, utterances: slice) -> Any:
    if isinstance(x, tuple):
        return type(x)(*[_sliced(field, utterances) for field in x])
    return None if x is None else x[utterances]


def simple_gradient(
    upstream: Upstream,
    am: Tensor,
    lm: Tensor,
    state: SimpleState,
    batch: TargetsAndLengths,
    options: SimpleOptions,
) -> tuple[Tensor, Tensor]:
    """The gradients of am and lm; in the dtype of am."""
    scales, fastemit = options.scales, options.recursion.loss.fastemit_lambda
    smoothing = state.smoothing
    layout = exp_layout(am.dtype, am.device)
    utterances, frames, vocabulary = am.shape
    parts, columns, width = state.exps.lm_exp.shape[1:]
    weights = am.new_empty((utterances, frames, parts, columns), dtype=layout.dtype)
    simple_weights(upstream, state.product, *batch[1:], scales.combined, fastemit, weights)
    grad_am, grad_lm = torch.empty_like(am), torch.empty_like(lm, dtype=am.dtype)
    whole = _Gradients(upstream, am, lm, state, batch, weights, grad_am, grad_lm)
    together = layout.together(utterances, frames, vocabulary)
    acc = accumulator(am.dtype)
    # The gradients are written over the sums if these have the same dtype and shape.
    am_in_place = am.dtype == acc and width == vocabulary
    lm_in_place = am_in_place and columns == lm.shape[1]
    am_sums = None if am_in_place else am.new_empty((together, frames, width), dtype=acc)
    lm_sums = None if lm_in_place else am.new_empty((together, columns, width), dtype=acc)
    # torch.compile keeps the number of utterances dynamic, unless a range depends on it.
    is_whole = together == utterances
    for begin in [0] if is_whole else range(0, utterances, together):
        part = whole if is_whole else whole.of(slice(begin, begin + together))
        count = part.am.shape[0]
        am_sum = part.grad_am if am_sums is None else am_sums[:count]
        lm_sum = part.grad_lm if lm_sums is None else lm_sums[:count]
        maxima, exps, product, logz, of_rows = part.state
        simple_sums(part.weights, exps, lm_sum, am_sum)
        both = (part.upstream, part.am, part.lm, maxima, Products(product, logz, am_sum, lm_sum))
        options_of_both = (of_rows, part.batch, scales, fastemit)
        simple_backward(*both, *options_of_both, part.grad_am, part.grad_lm)
    if smoothing.log_q is not None:
        through_prior = _unigram_gradient(
            upstream, am, lm, smoothing, batch, scales.blank, fastemit
        )
        grad_lm = grad_lm + scales.am_only_scale * through_prior
    return grad_am, grad_lm.to(lm.dtype)


class _SimpleLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        am, lm, duration_am, duration_lm, *tensors, ctx.options = arguments
        batch, logits = TargetsAndLengths(*tensors), None
        scores, state = _simple_scores(am, lm, batch, ctx.options)
        if duration_am is not None:
            acc = scores.px.dtype
            logits = duration_am.to(acc)[:, :, None] + duration_lm.to(acc)[:, None]
        rows, symbols = whole_lattices(am, lm, batch), lm.shape[1] - 1
        recursion = ctx.options.recursion
        sums = run_recursion(scores.px, scores.py, rows, recursion, logits, symbols=symbols)
        total, gx, gy, *durations = sums
        if recursion.ignores_durations:
            durations[0] = gx.clone()  # gx itself until here
        gd = durations[1] if durations else None
        ctx.save_for_backward(am, lm, logits, gx, gy, gd, *batch, *state.tensors())
        return with_occupancies(ctx, -total, gx, gy, *durations)

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        am, lm, logits, gx, gy, gd, *saved = ctx.saved_tensors
        batch, state = TargetsAndLengths(*saved[:3]), SimpleState.of(saved[3:])
        upstream = Upstream(grad_loss.to(gx.dtype).contiguous(), gx, gy)
        grads = simple_gradient(upstream, am, lm, state, batch, ctx.options)
        by_duration: list[Tensor | None] = [None, None]
        if logits is not None:
            unit, rows = torch.empty_like(logits), whole_lattices(am, lm, batch)
            flat = [x.view(-1, logits.shape[3]) for x in (logits, gd, unit)]
            duration_gradient(upstream.grad_loss, flat[0], flat[1], rows, 0, 0.0, flat[2])
            by_duration = [unit.sum(axis).to(am.dtype) for axis in (2, 1)]
        return *grads, *by_duration, *[None] * 4


@opaque_to_compile
def simple_loss(
    inputs: SimpleInputs, batch: TargetsAndLengths, options: SimpleOptions
) -> SimpleResults:
    """The loss of am(t) + lm(u), differentiable in the inputs, with its occupancies."""
    return SimpleResults(*_SimpleLoss.apply(*inputs, *batch, options))  # type: ignore[no-untyped-call]
