"""Calls of every raw op on random ragged batches, to compare compiled kernels with fallbacks.

Axes: N batch, T frames, U symbols, S columns kept a frame, V vocabulary, D joiner dim, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import RNNT_TYPES, accumulator
from pruned_rnnt.ops.common.matrix_products import parts_of
from pruned_rnnt.ops.lattice.lattice import split_workspace
from tests.ops.native_batches import (
    NEG_INF,
    Batch,
    Call,
    batch_of,
    log_softmax_like,
    poison,
    random_start,
    sloping_start,
)
from tests.ops.simple_cases import simple_calls


def geometries(
    batch: Batch, bands: tuple[int, ...] = (2, 3, 5)
) -> Iterator[tuple[tuple[object, ...], int, int]]:
    """(start, row_splits, T, S), the number of rows, and the row where a frame in the middle of
    utterance 0 begins; for padded and packed, full and band."""
    frames, lengths = batch.frames, batch.logit_lengths.long()

    def splits(widths: Tensor | int) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.long), (lengths * widths).cumsum(0)])

    middle = int(lengths[0]) // 2
    full = splits(batch.target_lengths.long() + 1)
    columns = batch.symbols + 1
    yield (None, None, frames, columns), batch.size * frames * columns, middle * columns
    yield (None, full, frames, columns), int(full[-1]), middle * int(batch.target_lengths[0] + 1)
    for kept in bands:
        start = random_start(batch, kept)
        band = splits(kept)
        yield (start, None, frames, kept), batch.size * frames * kept, middle * kept
        yield (start, band, frames, kept), int(band[-1]), middle * kept


def log_probs_calls(batch: Batch, vocabulary: int, dtype: torch.dtype) -> Iterator[Call]:
    acc = accumulator(dtype)
    for geometry, rows, _ in geometries(batch):
        for mode, blank in ((0, 0), (1, 0), (2, 0), (0, vocabulary - 1), (2, 1)):
            targets = torch.where(batch.targets == blank, 0, batch.targets)
            common = (targets, batch.logit_lengths, batch.target_lengths, *geometry)
            begin = rows // 3
            # The rows of a workspace that is wider than the vocabulary.
            workspace = 3 * torch.randn(rows - begin, vocabulary + 3, dtype=dtype)
            logits = workspace[:, :vocabulary]
            logits[::7] = NEG_INF
            logits[::5, 0] = NEG_INF
            # Nothing but the blank: with HAT the symbols have no normaliser.
            logits[3::7] = NEG_INF
            logits[3::7, blank] = 0.5
            outputs = tuple(poison(rows, dtype=acc) for _ in range(3))
            yield Call("log_probs", (logits, *common, begin, blank, mode), outputs)
            lse = poison(rows, dtype=acc)
            z = logits.to(acc)
            if mode == 2:
                z = z.clone()
                z[:, blank] = NEG_INF
            lse[begin:] = z.logsumexp(1) if mode != 1 else 0
            gx, gy = torch.rand(2, rows, dtype=acc)
            unused = torch.rand(rows) < 0.2
            gx[unused] = gy[unused] = 0
            # No path leads through a row without a normaliser, or none that emits (HAT).
            gx[lse == NEG_INF] = 0
            if mode != 2:
                gy[lse == NEG_INF] = 0
            upstream = torch.randn(batch.size, dtype=acc)
            for clamp in (0.0, 0.1):
                inputs = (upstream, logits, lse, gx, gy, *common, begin, blank, mode, 0.3, clamp)
                gradient = poison(rows - begin, vocabulary + 3, dtype=dtype)
                if mode == 1:
                    gradient.zero_()
                yield Call("log_probs_backward", inputs, (gradient,))


def band_lattice_calls(batch: Batch, dtype: torch.dtype) -> Iterator[Call]:
    sizes = [(geometry, rows) for geometry, rows, _ in geometries(batch)]
    for columns in (2, 5):
        start = sloping_start(batch, columns)
        sizes.append(((start, None, batch.frames, columns), start.numel() * columns))
    for geometry, rows in sizes:
        for rnnt_type in RNNT_TYPES.values():
            for delay in (0.0, 0.1, -0.2):
                px, py = log_softmax_like(2, rows, dtype=dtype)
                px[torch.rand(rows) < 0.1] = NEG_INF
                inputs = (px, py, batch.logit_lengths, batch.target_lengths, *geometry)
                outputs = tuple(poison(size, dtype=dtype) for size in (batch.size, rows, rows))
                work = split_workspace(px, batch.size, geometry[3], batch.size * geometry[2])
                yield Call("band_lattice", (*inputs, rnnt_type, delay, work), outputs)


def lattice_calls(batch: Batch, dtype: torch.dtype) -> Iterator[Call]:
    frames, symbols, size = batch.frames, batch.symbols, batch.size
    zeros = torch.zeros_like(batch.logit_lengths)
    ends = [batch.target_lengths, batch.logit_lengths]
    inner = [(batch.target_lengths > 1).int(), (batch.logit_lengths > 1).int()]
    boundaries = [None, torch.stack([zeros, zeros, *ends], 1), torch.stack([*inner, *ends], 1)]
    for boundary in boundaries:
        for rnnt_type in RNNT_TYPES.values():
            emit_frames = frames + 1 if rnnt_type == RNNT_TYPES["regular"] else frames
            px = log_softmax_like(size, symbols, emit_frames, dtype=dtype)
            py = log_softmax_like(size, symbols + 1, frames, dtype=dtype)
            outputs = [poison(*shape, dtype=dtype) for shape in ((size,), px.shape, py.shape)]
            work = split_workspace(px, size, symbols + 1, size * frames)
            yield Call("lattice", (px, py, boundary, rnnt_type, work), tuple(outputs))


def prune_bounds_calls(batch: Batch, dtype: torch.dtype) -> Iterator[Call]:
    shape = (batch.size, batch.frames, batch.symbols + 1)
    gx, gy = torch.rand(2, *shape, dtype=dtype)
    lengths = (batch.logit_lengths, batch.target_lengths)
    start = torch.full(shape[:2], -7, dtype=torch.int32)
    scratch = torch.full(shape, -7, dtype=torch.int32)
    for s_range in (2, 3, 5, 30):
        for rnnt_type in (0, 1):
            for padded in (False, True):
                inputs = (gx, gy, *lengths, s_range, rnnt_type, padded)
                yield Call("prune_bounds", inputs, (start,))
            yield Call(
                "prune_bounds_exact", (gx, gy, *lengths, s_range, rnnt_type, scratch), (start,)
            )


def band_gather_calls(batch: Batch, dtype: torch.dtype) -> Iterator[Call]:
    for columns, width in ((2, 1), (5, 17), (30, 8)):
        start = random_start(batch, columns)
        lm = torch.randn(batch.size, batch.symbols + 1, width, dtype=dtype)
        grad = torch.randn(batch.size, batch.frames, columns, width, dtype=dtype)
        yield Call("band_gather", (lm, start, columns), (poison(*grad.shape, dtype=dtype),))
        yield Call("band_gather_backward", (grad, start), (poison(*lm.shape, dtype=dtype),))


def joiner_rows_calls(batch: Batch, dtype: torch.dtype) -> Iterator[Call]:
    acc = accumulator(dtype)
    lengths = (batch.logit_lengths, batch.target_lengths)
    for geometry, rows, begin in geometries(batch, (2, 5, 7)):
        # Rows of whole vectors, fewer and more than a team's, and others.
        for activation, width in enumerate((72, 136, 70)):
            am = torch.randn(batch.size, batch.frames, width, dtype=dtype)
            lm = torch.randn(batch.size, batch.symbols + 1, width, dtype=dtype)
            common = (*lengths, *geometry, begin, activation)
            hidden = poison(rows - begin, width, dtype=dtype)
            yield Call("joiner_rows", (am, lm, *common), (hidden,))
            value = torch.randn_like(hidden).tanh()
            grad = torch.randn_like(hidden)
            accumulated = torch.randn_like(lm, dtype=acc)
            for out in dict.fromkeys((dtype, acc)):
                before = torch.randn_like(am, dtype=out)
                yield Call("joiner_rows_backward", (grad, value, *common), (before, accumulated))


def column_sums_calls(batch: Batch, vocabulary: int, dtype: torch.dtype) -> Iterator[Call]:
    acc = accumulator(dtype)
    rows = int(batch.logit_lengths.sum()) * (batch.symbols + 1)
    # (rows, columns, columns left out before, and after)
    for R, C, before, after in (
        (rows, vocabulary, 0, 0),
        (rows, vocabulary, 1, 2),
        (0, 3, 0, 0),
        (70, 8 * vocabulary, 8, 8),
        (330, 1, 0, 0),
    ):
        x = torch.randn(R, before + C + after, dtype=dtype)[:, before : before + C]
        for add in (False, True):
            sums = torch.randn(C, dtype=acc) if add else poison(C, dtype=acc)
            partial = poison(parts_of(R, C), C, dtype=acc)
            yield Call("column_sums", (x, add, partial), (sums,))


def all_calls(shape: tuple[str, list[int], list[int], int], dtype: torch.dtype) -> Iterator[Call]:
    """Every op on one shape; with 16-bit dtypes only the ops that take them."""
    # Here, because that module imports this one.
    from tests.ops.tdt_native_cases import duration_gradient_calls, tdt_lattice_calls

    _, frames, symbols, vocabulary = shape
    batch = batch_of(frames, symbols, vocabulary)
    yield from log_probs_calls(batch, vocabulary, dtype)
    yield from simple_calls(batch, vocabulary, dtype)
    yield from band_gather_calls(batch, dtype)
    yield from joiner_rows_calls(batch, dtype)
    yield from column_sums_calls(batch, vocabulary, dtype)
    yield from duration_gradient_calls(batch, dtype)
    if dtype == accumulator(dtype):
        yield from tdt_lattice_calls(batch, dtype)
        yield from band_lattice_calls(batch, dtype)
        yield from lattice_calls(batch, dtype)
        yield from prune_bounds_calls(batch, dtype)
