"""Runs every CUDA kernel on small shapes, for compute-sanitizer (scripts/gpu_check.sh).

    compute-sanitizer --tool racecheck python -m tests.cuda.all_kernels

A checked kernel takes milliseconds, so only a few of the tests' calls of each op are made, spread
over all layouts, topologies and options. Ops that consist of cuBLAS products are left out, and
whole steps run in float64: racecheck fails on some of cuBLAS's kernels for other dtypes ("failed to
handle a hardware exception").
"""

from __future__ import annotations

from collections import defaultdict

import torch

import pruned_rnnt
from pruned_rnnt.ops.common.native import COMPOSED
from tests.cuda.test_kernels import on_cuda
from tests.ops.counted_cases import counted_calls
from tests.ops.held_row_cases import held_row_calls
from tests.ops.native_batches import SHAPES, Call, batch_of
from tests.ops.native_cases import all_calls
from tests.ops.simple_cases import split_simple_calls

# Longer than a ring buffer of the lattice kernels and wider than a stripe.
LONGER = ("longer", [45, 20], [70, 3], 40)
CALLS_PER_OP = 12


def few_calls(shape: tuple[str, list[int], list[int], int], dtype: torch.dtype) -> list[Call]:
    """At most CALLS_PER_OP calls of every op, evenly spaced."""
    by_op: dict[str, list[Call]] = defaultdict(list)
    for call in all_calls(shape, dtype):
        by_op[call.op].append(call)
    _, frames, symbols, vocabulary = shape
    for call in split_simple_calls(batch_of(frames, symbols, vocabulary), vocabulary, dtype):
        by_op[call.op + " split"].append(call)
    return [
        calls[index]
        for calls in by_op.values()
        for index in sorted({i * len(calls) // CALLS_PER_OP for i in range(CALLS_PER_OP)})
    ]


def run_step(reduction: str) -> None:
    """Forward and backward of a whole loss, some of whose small kernels are not ops."""
    joiner = pruned_rnnt.Joiner(6, 5, 8, 11)
    module = pruned_rnnt.PrunedTransducerLoss(joiner, 6, 5, 11, s_range=3, reduction=reduction)
    module.to("cuda", torch.float64)
    batch = batch_of(*LONGER[1:])
    encoder, predictor = (
        torch.randn(2, size, width, dtype=torch.float64, device="cuda", requires_grad=True)
        for size, width in ((max(LONGER[1]), 6), (max(LONGER[2]) + 1, 5))
    )
    targets = batch.targets.clamp(max=10).cuda()
    losses = module(encoder, predictor, targets, batch.logit_lengths, batch.target_lengths, 0)
    losses.loss.sum().backward()


def main() -> None:
    torch.manual_seed(0)
    for reduction in ("mean", "none"):
        run_step(reduction)
    done: set[str] = set()
    count = 0
    for shape in (SHAPES[0], LONGER):
        for dtype in (torch.float32, torch.bfloat16):
            for call in few_calls(shape, dtype):
                if call.op in COMPOSED:
                    continue
                moved = on_cuda(call)
                getattr(torch.ops.pruned_rnnt, call.op)(*moved.inputs, *moved.outputs)
                done.add(call.op)
                count += 1
    held = held_row_calls(batch_of(*LONGER[1:]), LONGER[3], torch.bfloat16)
    for call in (*counted_calls(), *held):
        moved = on_cuda(call)
        getattr(torch.ops.pruned_rnnt, call.op)(*moved.inputs, *moved.outputs)
        done.add(call.op)
        count += 1
    torch.cuda.synchronize()
    print(f"{count} calls of {len(done)} ops, 2 steps")


if __name__ == "__main__":
    main()
