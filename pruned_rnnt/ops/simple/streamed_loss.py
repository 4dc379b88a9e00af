"""The loss of the trivial joiner of a large vocabulary: am and lm are never stored.

am = encoder am_weight^T + am_bias (N,T,V) and lm = predictor lm_weight^T + lm_bias (N,U+1,V) would
take gigabytes for the vocabulary of a language model. Of tiles of the vocabulary, one after the
other, they take a fixed amount. Forward, with the ops of simple_loss.py for each tile:

    logz(t,u) = log sum over tiles of exp(logz of the tile)          likewise lm_lse(u)
    px and py take the logits of a symbol from the tile that has it

Backward, each tile is computed again, and its gradient with the logz of all tiles. In units of the
tile's maxima, product(t,u) = exp(logz(t,u) - am_max(t) - lm_max(u)) is the normaliser of all tiles;
where a tile has next to nothing of the mass this is infinite, and its weight 0.

The last column of a tile is padding, -inf in am and lm, so that it has no part in any sum. It is
the blank of the tiles that the blank is not in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative, with_occupancies
from pruned_rnnt.ops.common.library import NEG_INF, accumulator, new_outputs
from pruned_rnnt.ops.common.matrix_products import column_sums, multiply_into, product_dtype
from pruned_rnnt.ops.common.utterances import TargetsAndLengths
from pruned_rnnt.ops.lattice.recursion import run_recursion
from pruned_rnnt.ops.simple.simple_log_probs import (
    NodeScores,
    Scales,
    Smoothing,
    Upstream,
    simple_log_probs,
)
from pruned_rnnt.ops.simple.simple_loss import (
    SimpleOptions,
    SimpleResults,
    SimpleState,
    row_exponentials,
    simple_gradient,
    whole_lattices,
)
from pruned_rnnt.ops.simple.simple_products import simple_product

# Where am and lm would take more together, they are streamed: it takes longer than storing them.
MOST_STORED_BYTES = 2 << 30
# The most that am and lm of a tile may take together, and the limits of its columns.
_TILE_BYTES = 192 << 20
_LEAST_COLUMNS, _MOST_COLUMNS = 1 << 9, 1 << 14
_WIDTH_MULTIPLE = 8


class ProjectedInputs(NamedTuple):
    """encoder (N,T,E), weight (V,E) and bias (V) of am; predictor (N,U+1,P), weight (V,P) and bias
    (V) of lm."""

    encoder: Tensor
    am_weight: Tensor
    am_bias: Tensor
    predictor: Tensor
    lm_weight: Tensor
    lm_bias: Tensor


class _Tile(NamedTuple):
    """Symbols begin .. end; am and lm with padding, and the batch and blank in its own columns."""

    begin: int
    end: int
    am: Tensor
    lm: Tensor
    batch: TargetsAndLengths
    blank: int

    @property
    def symbols(self) -> slice:
        return slice(self.begin, self.end)


class _TileMemory:
    """Layers of a tile in the dtype of products, and what they compute, used for one tile after the
    other."""

    def __init__(self, inputs: ProjectedInputs, dtype: torch.dtype):
        self.inputs, self.dtype = inputs, dtype
        self.sides = [
            x.to(self.dtype).flatten(0, 1).contiguous() for x in (inputs.encoder, inputs.predictor)
        ]
        self.vocabulary = inputs.am_weight.shape[0]
        rows = sum(x.shape[0] for x in self.sides)
        fitting = _TILE_BYTES // (rows * self.dtype.itemsize)
        columns = min(max(fitting, _LEAST_COLUMNS), _MOST_COLUMNS, self.vocabulary + 1)
        self.columns = -(-columns // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        self.weights = [x.new_zeros((self.columns, x.shape[1])) for x in self.sides]
        self.biases = [x.new_empty((self.columns,)) for x in self.sides]
        self.outputs = [x.new_empty((x.shape[0], self.columns)) for x in self.sides]

    def tiles(self, batch: TargetsAndLengths, blank: int) -> Iterator[_Tile]:
        each = self.columns - 1
        for begin in range(0, self.vocabulary, each):
            yield self._tile(begin, min(begin + each, self.vocabulary), batch, blank)

    def _tile(self, begin: int, end: int, batch: TargetsAndLengths, blank: int) -> _Tile:
        count = end - begin
        layers = (self.inputs[1:3], self.inputs[4:6])
        shapes = (self.inputs.encoder.shape, self.inputs.predictor.shape)
        made = []
        for side, (weight, bias) in enumerate(layers):
            self.weights[side][:count].copy_(weight[begin:end])
            self.weights[side][count:].zero_()
            self.biases[side][:count].copy_(bias[begin:end])
            self.biases[side][count:].fill_(NEG_INF)
            out = self.outputs[side]
            # With `out`, which autocast leaves alone.
            torch.addmm(self.biases[side], self.sides[side], self.weights[side].t(), out=out)
            made.append(out.view(*shapes[side][:2], self.columns))
        # Symbols of other tiles are outside the columns, or padding.
        own_batch = batch._replace(targets=batch.targets - begin)
        own_blank = blank - begin if begin <= blank < end else self.columns - 1
        am, lm = made
        return _Tile(begin, end, am, lm, own_batch, own_blank)


class _StreamedScores(NamedTuple):
    """px, py and logz (N,T,U+1), and lm_lse (N,U+1), acc."""

    nodes: NodeScores
    lm_lse: Tensor


def _lm_of_symbols(tile: _Tile) -> tuple[Tensor, Tensor]:
    """lm (N,U+1) of the next symbol and of the blank; -inf where the tile does not have it."""
    targets = torch.nn.functional.pad(tile.batch.targets, (0, 1), value=-1).long()
    inside = (targets >= 0) & (targets < tile.end - tile.begin)
    at = targets.masked_fill(~inside, 0)[:, :, None]
    found = tile.lm.gather(2, at)[:, :, 0].masked_fill(~inside, NEG_INF)
    return found, tile.lm[:, :, tile.blank]


def _scores(
    memory: _TileMemory, batch: TargetsAndLengths, options: SimpleOptions
) -> _StreamedScores:
    acc = accumulator(memory.dtype)
    blank, lm_only_scale, _ = options.scales
    shape = (*memory.inputs.encoder.shape[:2], memory.inputs.predictor.shape[1])
    new = memory.sides[0].new_full
    of_tile = NodeScores(*new_outputs(3, memory.sides[0], shape, acc))
    # Sums am + lm of the symbols, then px and py.
    emit, blank_score, logz = new((3, *shape), NEG_INF, dtype=acc).unbind(0)
    lm_lse, lm_x, lm_y = new((3, shape[0], shape[2]), NEG_INF, dtype=acc).unbind(0)
    for tile in memory.tiles(batch, blank):
        rows = row_exponentials(tile.am, tile.lm, tile.batch)
        product = new((*shape[:2], rows.exps.lm_exp.shape[2]), 0, dtype=acc)
        simple_product(rows.exps, product)
        sides = (tile.am, tile.lm, rows.maxima, product)
        unsmoothed = (Smoothing(None, None, None), tile.batch, Scales(tile.blank, 0.0, 0.0))
        simple_log_probs(*sides, *unsmoothed, of_tile)
        for total, part in ((emit, of_tile.px), (blank_score, of_tile.py)):
            torch.where(part == NEG_INF, total, part + of_tile.logz, out=total)
        torch.logaddexp(logz, of_tile.logz, out=logz)
        if lm_only_scale != 0:
            torch.logaddexp(lm_lse, rows.lm_lse, out=lm_lse)
            for total, part in zip((lm_x, lm_y), _lm_of_symbols(tile), strict=True):
                torch.maximum(total, part.to(acc), out=total)
    # Invalid nodes have scores of -inf, and any logz.
    for score, own in ((emit, lm_x), (blank_score, lm_y)):
        smoothed = options.scales.combined * (score - logz)
        if lm_only_scale != 0:
            smoothed = smoothed + lm_only_scale * (own - lm_lse)[:, None, :]
        score.copy_(smoothed.masked_fill_(score == NEG_INF, NEG_INF))
    return _StreamedScores(NodeScores(emit, blank_score, logz), lm_lse)


class _Gradients:
    """Sums of the gradients over tiles; memory only for what is wanted."""

    def __init__(self, memory: _TileMemory, wanted: Sequence[bool], is_tied: bool):
        self.memory = memory
        inputs, acc = memory.inputs, accumulator(memory.dtype)
        # Where am and lm have one weight, both gradients are summed in the memory of the first.
        self.is_tied = is_tied and wanted[1]
        wanted = [*wanted[:4], wanted[4] and not is_tied, wanted[5]]
        self.of_sides = [
            torch.zeros_like(x, dtype=acc) if wanted[3 * side] else None
            for side, x in enumerate(memory.sides)
        ]
        # Of encoder and predictor, places 0 and 3, it is summed in `of_sides`.
        self.of_layers = [
            torch.empty_like(x) if want and place % 3 else None
            for place, (x, want) in enumerate(zip(inputs, wanted, strict=True))
        ]

    def add(self, tile: _Tile, side: int, gradient: Tensor) -> None:
        """The gradient of a side's outputs, (N,L,columns)."""
        flat, memory = gradient.flatten(0, 1), self.memory
        own = flat[:, : tile.end - tile.begin]
        total = self.of_sides[side]
        if total is not None:
            multiply_into(total, flat, memory.weights[side], add=True)
        weight, bias = self.of_layers[3 * side + 1], self.of_layers[3 * side + 2]
        if self.is_tied:
            weight = self.of_layers[1]
        if weight is not None:
            self._multiply(weight[tile.symbols], own.t(), memory.sides[side], side == 1)
        if bias is not None:
            sums = flat.new_empty(flat.shape[1:], dtype=accumulator(flat.dtype))
            column_sums(flat, sums, add=False)
            bias[tile.symbols] = sums[: own.shape[1]]

    def _multiply(self, out: Tensor, a: Tensor, b: Tensor, is_second: bool) -> None:
        add, acc = self.is_tied and is_second, accumulator(a.dtype)
        if out.dtype in (a.dtype, acc):
            multiply_into(out, a, b, add=add)
        else:
            made = multiply_into(out.new_empty(out.shape, dtype=acc), a, b)
            out.copy_(out + made if add else made)

    def all(self) -> list[Tensor | None]:
        found = list(self.of_layers)
        for side, total in enumerate(self.of_sides):
            like = self.memory.inputs[3 * side]
            if total is not None:
                found[3 * side] = total.view(like.shape).to(like.dtype)
        return found


class _StreamedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, ctx.options, ctx.is_tied = arguments
        inputs, batch = ProjectedInputs(*tensors[:6]), TargetsAndLengths(*tensors[6:])
        ctx.dtype = product_dtype(*inputs)
        memory = _TileMemory(inputs, ctx.dtype)
        (px, py, logz), lm_lse = _scores(memory, batch, ctx.options)
        rows = whole_lattices(inputs.encoder, inputs.predictor, batch)
        total, gx, gy, *_ = run_recursion(px, py, rows, ctx.options.recursion)
        ctx.save_for_backward(*tensors, logz, lm_lse, gx, gy)
        return with_occupancies(ctx, -total, gx, gy)

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, logz, lm_lse, gx, gy = ctx.saved_tensors
        inputs, batch = ProjectedInputs(*tensors[:6]), TargetsAndLengths(*tensors[6:])
        options: SimpleOptions = ctx.options
        blank, lm_only_scale = options.scales.blank, options.scales.lm_only_scale
        memory = _TileMemory(inputs, ctx.dtype)
        gradients = _Gradients(memory, ctx.needs_input_grad[:6], ctx.is_tied)
        upstream = Upstream(grad_loss.to(gx.dtype).contiguous(), gx, gy)
        smoothing = Smoothing(lm_lse if lm_only_scale != 0 else None, None, None)
        for tile in memory.tiles(batch, blank):
            rows = row_exponentials(tile.am, tile.lm, tile.batch)
            product = gx.new_ones((*gx.shape[:2], rows.exps.lm_exp.shape[2]))
            am_max, lm_max = rows.maxima
            in_units = logz - am_max[:, :, None] - lm_max[:, None, :]
            torch.exp(in_units, out=product[:, :, : gx.shape[2]])
            scales = options.scales._replace(blank=tile.blank)
            state = SimpleState(rows.maxima, rows.exps, product, logz, smoothing)
            both = (tile.am, tile.lm, state, tile.batch, options._replace(scales=scales))
            for side, gradient in enumerate(simple_gradient(upstream, *both)):
                gradients.add(tile, side, gradient)
        return *gradients.all(), *[None] * 5


def streamed_simple_loss(
    inputs: ProjectedInputs, batch: TargetsAndLengths, options: SimpleOptions
) -> SimpleResults:
    """simple_loss of the projections, differentiable in all inputs; without am_only_scale."""
    is_tied = inputs.am_weight is inputs.lm_weight
    return SimpleResults(*_StreamedLoss.apply(*inputs, *batch, options, is_tied))  # type: ignore[no-untyped-call]
