"""Calls of the ops over active rows, which have CUDA kernels for bfloat16 only."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import REGULAR
from pruned_rnnt.ops.common.row_geometry import LatticeRows, packed_splits
from pruned_rnnt.ops.joiner.active_joiner import ActiveChunks
from pruned_rnnt.ops.joiner.active_rows import DROPPED_OCCUPANCY, ROWS_OF_BLOCK, active_rows
from pruned_rnnt.ops.joiner.fused_log_probs import JoinerInputs, JoinerPlan
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.joiner.log_probs import HAT, LOG_PROBS, LOGITS, RowStatistics
from pruned_rnnt.ops.lattice.recursion import LossOptions
from tests.ops.native_batches import Batch, Call, poison


def list_workspace(rows: LatticeRows, count: int) -> tuple[Tensor, Tensor]:
    """Of list_active_rows for so many rows."""
    limits = torch.empty(rows.logit_lengths.shape[0], rows.frames + rows.columns)
    shape = (-(-count // ROWS_OF_BLOCK), ROWS_OF_BLOCK // 32 + 1)
    return limits, torch.empty(shape, dtype=torch.int32)


def active_calls(batch: Batch, vocabulary: int, dtype: torch.dtype, width: int) -> Iterator[Call]:
    """Chunks of a packed lattice, half of whose rows are active, and of one without any."""
    lengths = (batch.logit_lengths, batch.target_lengths)
    splits = packed_splits(*lengths, None)
    rows = LatticeRows(*lengths, None, splits, batch.frames, batch.symbols + 1)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    # More room than rows, as for lengths on the device.
    total = int(splits[-1]) + 5
    am, lm = (
        torch.randn(batch.size, size, width).to(dtype) for size in (batch.frames, batch.symbols + 1)
    )
    columns = vocabulary + -vocabulary % 8
    for active_share in (0.5, 0.0):
        gx, gy = torch.rand(2, total, dtype=acc) * (torch.rand(total) < active_share)
        statistics = RowStatistics(torch.randn(total, dtype=acc), gx, gy)
        chunk_rows = max(3, total // 2)
        large, small = (-(10.0**x) * torch.rand(batch.size, dtype=acc) for x in (9, -2))
        arguments = (rows, 0.3, DROPPED_OCCUPANCY, chunk_rows)
        active, block_ends = active_rows(statistics, large, *arguments, blocks=5)
        workspace = list_workspace(rows, total)
        # Occupancies of one size, and of all sizes with a large, a small and a negative loss.
        cases = ((1, 0.4, large), *((40, DROPPED_OCCUPANCY, x) for x in (large, small, -small)))
        for power, left_out, log_probs in cases:
            occupancies = (gx**power, gy**power, log_probs)
            inputs = (*occupancies, *rows, 0.3, left_out, chunk_rows, *workspace)
            # The list is shorter than its room.
            outputs = tuple(torch.full_like(x, -7) for x in (*active, block_ends))
            yield Call("list_active_rows", inputs, outputs)
        room = total // 2 + batch.symbols + 3
        for chunk in range(active.begins.shape[0] - 1):
            at = (*rows, *active, chunk)
            hidden = torch.randn(room, width + 8).to(dtype)
            for activation in ACTIVATIONS.values():
                yield Call("active_joiner_rows", (am, lm, *at, activation), (hidden,))
                grad_hidden = torch.randn(room, width).to(dtype)
                inputs = (grad_hidden, hidden, *at, activation)
                sums = (torch.zeros_like(am), torch.randn(lm.shape, dtype=acc))
                yield Call("active_joiner_rows_backward", inputs, sums)
            upstream = torch.randn(batch.size, dtype=acc)
            last = vocabulary - 1
            for normalization, blank in (
                (LOGITS, 0),
                (LOG_PROBS, 0),
                (HAT, 0),
                (LOGITS, last),
                (HAT, last),
            ):
                targets = torch.where(batch.targets == blank, 0, batch.targets)
                for clamp in (0.0, 0.1):
                    options = (vocabulary, blank, normalization, 0.3, clamp)
                    inputs = (upstream, *statistics, targets, *at, *options)
                    logits = torch.randn(room, columns).to(dtype)
                    sums = torch.randn(1, columns, dtype=acc)
                    yield Call("active_log_probs_backward", inputs, (logits, sums))


def gradient_calls(
    batch: Batch, vocabulary: int, dtype: torch.dtype, width: int, layer_dtype: torch.dtype
) -> Iterator[Call]:
    """All gradients of a packed lattice, half of whose rows are active, in several chunks; and
    those of am and lm alone."""
    lengths = (batch.logit_lengths, batch.target_lengths)
    splits = packed_splits(*lengths, None)
    columns = vocabulary + -vocabulary % 8
    sizes = (batch.size, batch.frames, width), (batch.size, batch.symbols + 1, width)
    shapes = (*sizes, (columns, width), (columns,))
    scales = (1.0, 1.0, 2 * width**-0.5, 1.0)
    factors = [
        (torch.randn(shape) * scale).to(dtype) for shape, scale in zip(shapes, scales, strict=True)
    ]
    inputs = JoinerInputs(*factors, batch.targets, *lengths, None, splits)
    # More room than rows, as for lengths on the device.
    total = int(splits[-1]) + 5
    options = LossOptions(0, LOGITS, REGULAR, 0.0, 0.3, 0.0)
    activation = ACTIVATIONS["tanh"]
    frames, symbols = batch.frames, batch.symbols
    chunks_of_rows = ([0, total], total, False)
    plan = JoinerPlan(frames, symbols + 1, *chunks_of_rows, vocabulary, activation, options)
    gx, gy = torch.rand(2, total) * (torch.rand(total) < 0.5)
    statistics = RowStatistics(torch.full((total,), math.log(vocabulary) + 2), gx, gy)
    chunks = ActiveChunks(max(3, total // 4), 5, 64)
    large = torch.full((batch.size,), -1e9)
    arguments = (torch.rand(batch.size) + 0.5, *inputs, *plan[:-1], *options, *statistics)
    arguments = (*arguments, large, *chunks)
    grads = [poison(*x.shape, dtype=x.dtype) for x in factors[:2]]
    of_layer = [poison(*x.shape, dtype=layer_dtype) for x in factors[2:]]
    yield Call("active_gradients", (*arguments, 0.4), (*grads, *of_layer))
    yield Call("active_gradients", (*arguments, 0.4), (*grads, None, None))


def layer_calls(layer_dtype: torch.dtype, dtype: torch.dtype) -> Iterator[Call]:
    """Output layers of widths that are multiples of 8 and others, small and large."""
    for rows, width in ((3, 8), (8, 8), (503, 512), (5000, 24)):
        layer = torch.randn(rows, width).to(layer_dtype), torch.randn(rows).to(layer_dtype)
        shapes = (rows + -rows % 8, width), (rows + -rows % 8,)
        yield Call("output_layer", layer, tuple(poison(*shape, dtype=dtype) for shape in shapes))


def packed_calls(batch: Batch, vocabulary: int, dtype: torch.dtype, width: int) -> Iterator[Call]:
    """Splits of utterances of which some exceed the padding; log-probabilities of all rows in
    chunks, of which those behind the last row are empty."""
    lengths = (batch.logit_lengths, batch.target_lengths)
    frames, columns = batch.frames, batch.symbols + 1
    for exceeded in ((0, 0), (1, 0), (0, 1), (frames + 1, columns)):
        most = (frames - exceeded[0], columns - exceeded[1])
        yield Call("fitting_splits", (*lengths, *most), (torch.full((batch.size + 1,), -7),))
    splits = packed_splits(*lengths, None)
    rows = vocabulary + -vocabulary % 8
    shapes = ((batch.size, frames, width), (batch.size, columns, width), (rows, width), (rows,))
    scales = (1.0, 1.0, width**-0.5, 1.0)
    factors = [
        (torch.randn(shape) * scale).to(dtype) for shape, scale in zip(shapes, scales, strict=True)
    ]
    inputs = JoinerInputs(*factors, batch.targets, *lengths, None, splits)
    for normalization in (LOGITS, LOG_PROBS, HAT):
        options = LossOptions(0, normalization, REGULAR, 0.0, 0.3, 0.0)
        for total, chunk_rows in ((int(splits[-1]), 7), (int(splits[-1]) + 50, 24)):
            plan = (frames, columns, [0, total], total, False, vocabulary, ACTIVATIONS["tanh"])
            hidden = torch.full((chunk_rows, width + 8), -7.0).to(dtype)
            scores = torch.full((3, total), -7.0).unbind(0)
            yield Call("packed_log_probs", (*inputs, *plan, *options), (hidden, *scores))
