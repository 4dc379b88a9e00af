"""Calls of the simple loss's raw ops, with exponentials in one part and in several.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pruned_rnnt.ops.common.library import accumulator
from tests.ops.native_batches import Batch, Call, poison


def simple_calls(batch: Batch, vocabulary: int, dtype: torch.dtype) -> Iterator[Call]:
    acc = accumulator(dtype)
    nodes = (batch.size, batch.frames, batch.symbols + 1)
    lengths = (batch.logit_lengths, batch.target_lengths)
    am = torch.randn(*nodes[:2], vocabulary, dtype=dtype)
    lm = torch.randn(nodes[0], nodes[2], vocabulary, dtype=dtype)
    # Peaks so far apart that their product underflows: these entries are summed exactly.
    am[:, ::2, 0] += 3000 if dtype == torch.float64 else 120
    lm[:, ::2, -1] += 3000 if dtype == torch.float64 else 120
    maxima, exponentials = [], []
    for x, length, extra in ((am, lengths[0], 0), (lm, lengths[1], 1)):
        rows = [poison(*x.shape[:2], dtype=acc) for _ in range(2)]
        stored = poison(x.shape[0], 1, *x.shape[1:], dtype=acc)
        yield Call("exp_rows", (x, length, extra), (*rows, stored))
        maxima.append(x.to(acc).amax(-1))
        exponentials.append((x.to(acc) - maxima[-1][..., None]).exp()[:, None])
    product = (exponentials[0] @ exponentials[1].mT)[:, 0]
    log_q = torch.randn(vocabulary, dtype=acc).log_softmax(0)
    lm_lse, am_lse = lm.to(acc).logsumexp(-1), (am.to(acc) + log_q).logsumexp(-1)
    logz = (am[:, :, None].to(acc) + lm[:, None].to(acc)).logsumexp(-1)
    gx, gy = torch.rand(2, *nodes, dtype=acc)
    gx[:, ::3] = gy[:, ::3] = 0
    upstream = torch.randn(batch.size, dtype=acc)
    sums = [torch.randn(*x.shape, dtype=acc) for x in (am, lm)]
    yield Call(
        "simple_weights",
        (upstream, gx, gy, product, *lengths, 0.75, 0.2),
        (poison(nodes[0], nodes[1], 1, nodes[2], dtype=acc),),
    )
    yield Call("simple_product", tuple(exponentials), (poison(*nodes, dtype=acc),))
    weights = torch.rand(nodes[0], nodes[1], 1, nodes[2], dtype=acc)
    outputs = tuple(torch.empty_like(x) for x in reversed(sums))
    yield Call("simple_sums", (weights, *exponentials), outputs)
    for blank, lm_scale, am_scale in ((0, 0.0, 0.0), (vocabulary - 1, 0.25, 0.0), (1, 0.25, 0.5)):
        targets = torch.where(batch.targets == blank, 0, batch.targets)
        smoothing = (
            lm_lse if lm_scale else None,
            am_lse if am_scale else None,
            log_q if am_scale else None,
        )
        common = (*smoothing, targets, *lengths, blank, lm_scale, am_scale)
        yield Call(
            "simple_log_probs",
            (am, lm, *maxima, product, *common),
            tuple(poison(*nodes, dtype=acc) for _ in range(3)),
        )
        values = (upstream, gx, gy, am, lm, *maxima, product, logz, *sums)
        yield Call(
            "simple_backward",
            (*values, *common, 0.3),
            (poison(*am.shape, dtype=dtype), poison(*lm.shape, dtype=dtype)),
        )


def split_simple_calls(batch: Batch, vocabulary: int, dtype: torch.dtype) -> Iterator[Call]:
    """The same with exponentials in bfloat16 parts and padded, as CUDA stores them."""
    acc = torch.float32
    nodes = (batch.size, batch.frames, batch.symbols + 1)
    lengths = (batch.logit_lengths, batch.target_lengths)
    size, width = -(-vocabulary // 8) * 8, -(-nodes[2] // 8) * 8
    am = torch.randn(*nodes[:2], vocabulary, dtype=dtype)
    lm = torch.randn(nodes[0], nodes[2], vocabulary, dtype=dtype)
    stored = []
    sides = ((am, nodes[1], lengths[0], 0, 2), (lm, width, lengths[1], 1, 3))
    for x, rows, length, extra, parts in sides:
        numbers = [poison(*x.shape[:2], dtype=acc) for _ in range(2)]
        outputs = poison(nodes[0], parts, rows, size, dtype=torch.bfloat16)
        yield Call("exp_rows", (x, length, extra), (*numbers, outputs))
        exact = torch.zeros(nodes[0], rows, size)
        exact[:, : x.shape[1], :vocabulary] = torch.rand(x.shape)
        high = exact.bfloat16()
        low = (exact - high.float()).bfloat16()
        stored.append(torch.stack([high, low, high][:parts], 1))
    gx, gy = torch.rand(2, *nodes, dtype=acc)
    product, logz = torch.rand(*nodes[:2], width) + 0.1, torch.randn(nodes)
    upstream = torch.randn(batch.size)
    yield Call(
        "simple_weights",
        (upstream, gx, gy, product, *lengths, 0.75, 0.2),
        (poison(nodes[0], nodes[1], 3, width, dtype=torch.bfloat16),),
    )
    yield Call("simple_product", tuple(stored), (poison(*nodes[:2], width, dtype=acc),))
    weights = torch.rand(*nodes[:2], 3, width).bfloat16()
    sums = (poison(nodes[0], width, size, dtype=acc), poison(*nodes[:2], size, dtype=acc))
    yield Call("simple_sums", (weights, *stored), sums)
    maxima, lm_lse = (am.to(acc).amax(-1), lm.to(acc).amax(-1)), lm.to(acc).logsumexp(-1)
    factors = (torch.randn(*nodes[:2], size), torch.randn(nodes[0], width, size))
    values = (upstream, gx, gy, am, lm, *maxima, product, logz, *factors, lm_lse, None, None)
    yield Call(
        "simple_backward",
        (*values, batch.targets, *lengths, 0, 0.25, 0.0, 0.3),
        (poison(*am.shape, dtype=dtype), poison(*lm.shape, dtype=dtype)),
    )
