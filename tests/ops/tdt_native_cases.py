"""Calls of the raw ops of TDT on ragged batches (native_cases.py).

Axes: N batch, T frames, U symbols, R rows, K durations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.lattice.tdt_lattice import tdt_workspace
from tests.ops import native_cases as cases

# Of TDT, and of multi-blank transducers.
TABLES = ([0, 1, 2, 3, 4], [1], [2, 0, 1], [1, 3], [0, 1, 2, 3, 4, 5, 6, 7, 12])
BLANK_TABLES = ([0, 1, 2, 8], [0, 1, 12], [0, 1, 2, 3, 4, 6, 7, 9])


def tdt_lattice_calls(batch: cases.Batch, dtype: torch.dtype) -> Iterator[cases.Call]:
    sizes = [(geometry, rows) for geometry, rows, _ in cases.geometries(batch)]
    for columns in (2, 5):
        start = cases.sloping_start(batch, columns)
        sizes.append(((start, None, batch.frames, columns), start.numel() * columns))
    for index, (geometry, rows) in enumerate(sizes):
        # Three of all tables for each geometry.
        tables = [TABLES[0], TABLES[1 + index % (len(TABLES) - 1)]]
        tables.append(BLANK_TABLES[index % len(BLANK_TABLES)])
        for number, durations in enumerate(tables):
            px, py = cases.log_softmax_like(2, rows, dtype=dtype)
            px[torch.rand(rows) < 0.1] = cases.NEG_INF
            logits = torch.randn(rows, len(durations), dtype=dtype)
            logits[torch.rand(logits.shape) < 0.1] = cases.NEG_INF
            work = tdt_workspace(px, batch.size, batch.symbols, durations)
            lengths = (batch.logit_lengths, batch.target_lengths)
            scalars = (durations, 0.05, 0.1 * (index % 2), number == 2, batch.symbols)
            inputs = (px, py, logits, *lengths, *geometry, *scalars, work)
            nodes = [cases.poison(rows, dtype=dtype) for _ in range(3)]
            outputs = (
                cases.poison(batch.size, dtype=dtype),
                *nodes,
                torch.full_like(logits, torch.nan),
            )
            yield cases.Call("tdt_lattice", inputs, outputs)


def duration_gradient_calls(batch: cases.Batch, dtype: torch.dtype) -> Iterator[cases.Call]:
    acc = accumulator(dtype)
    for geometry, rows, _ in cases.geometries(batch):
        for count, clamp in ((5, 0.0), (1, 0.0), (9, 0.1)):
            logits, gd = torch.randn(rows, count, dtype=acc), torch.rand(rows, count, dtype=acc)
            unused = torch.rand(rows) < 0.2
            gd[unused] = 0
            logits[unused] = torch.nan
            begin = rows // 3
            upstream = torch.randn(batch.size, dtype=acc)
            lengths = (batch.logit_lengths, batch.target_lengths)
            grad = cases.poison(rows - begin, count, dtype=dtype)
            inputs = (upstream, logits, gd, *lengths, *geometry, begin, clamp)
            yield cases.Call("duration_gradient", inputs, (grad,))
