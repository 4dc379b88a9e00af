"""Calls of log_probs on 16-bit rows of aligned vectors, which the CUDA kernel holds in registers.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pruned_rnnt.ops.joiner.log_probs import HAT, LOG_PROBS, LOGITS
from tests.ops.native_batches import NEG_INF, Batch, Call, poison
from tests.ops.native_cases import geometries


def rows_with_extremes(rows: int, vocabulary: int, columns: int, dtype: torch.dtype) -> Tensor:
    """(R,V) view of a workspace of more columns, which are NaN and must have no effect."""
    workspace = torch.randn(rows, columns).mul(3).to(dtype)
    logits = workspace[:, :vocabulary]
    logits[1::11] = NEG_INF
    logits[2::11, ::2] = NEG_INF
    logits[3::11, vocabulary // 2] = torch.nan
    logits[4::11] = torch.nan
    # Far from 0, far apart, and masked with the smallest number.
    logits[5::11] += 100
    logits[6::11] = logits[6::11].round() * 64
    logits[7::11] = torch.finfo(dtype).min
    logits[8::11, : vocabulary // 2] = torch.finfo(dtype).min
    logits[9::11] = torch.finfo(dtype).max
    workspace[:, vocabulary:] = torch.nan
    return logits


def held_row_calls(batch: Batch, vocabulary: int, dtype: torch.dtype) -> Iterator[Call]:
    """Rows without and with unused columns, in all layouts and modes."""
    aligned = vocabulary + -vocabulary % 8
    blanks = (0, vocabulary // 2, vocabulary - 1)
    for index, (geometry, rows, _) in enumerate(geometries(batch)):
        for mode in (LOGITS, LOG_PROBS, HAT):
            for columns in (aligned, aligned + 8):
                blank = blanks[index % len(blanks)]
                targets = torch.where(batch.targets == blank, 0, batch.targets)
                begin = rows // 5
                logits = rows_with_extremes(rows - begin, vocabulary, columns, dtype)
                common = (targets, batch.logit_lengths, batch.target_lengths, *geometry)
                outputs = tuple(poison(rows, dtype=torch.float32) for _ in range(3))
                yield Call("log_probs", (logits, *common, begin, blank, mode), outputs)
