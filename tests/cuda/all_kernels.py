"""Every CUDA kernel on small shapes: what compute-sanitizer runs (scripts/gpu_check.sh).

    compute-sanitizer --tool racecheck python -m tests.cuda.all_kernels

A checked kernel takes milliseconds, so a few calls of each op stand for the many of the tests,
spread over all layouts, topologies and options. Ops that are cuBLAS products alone are left out,
and a whole step has products of float64: racecheck dies of some of cuBLAS's own kernels for others
("failed to handle a hardware exception").
"""

from __future__ import annotations

from collections import defaultdict

import torch

import pruned_rnnt
from pruned_rnnt.ops.common.native import COMPOSED
from tests.cuda.test_kernels import on_cuda
from tests.ops.native_cases import SHAPES, Call, all_calls, batch_of, split_simple_calls

# Longer than a ring of the lattice kernels and wider than a stripe.
LONGER = ("longer", [45, 20], [70, 3], 40)
CALLS_OF_AN_OP = 12


def few_calls(shape: tuple[str, list[int], list[int], int], dtype: torch.dtype) -> list[Call]:
    """At most CALLS_OF_AN_OP calls of every op, evenly spaced."""
    by_op: dict[str, list[Call]] = defaultdict(list)
    for call in all_calls(shape, dtype):
        by_op[call.op].append(call)
    _, frames, symbols, vocabulary = shape
    for call in split_simple_calls(batch_of(frames, symbols, vocabulary), vocabulary, dtype):
        by_op[call.op + " split"].append(call)
    return [
        calls[i * len(calls) // CALLS_OF_AN_OP]
        for calls in by_op.values()
        for i in range(CALLS_OF_AN_OP)
        if i == 0 or i * len(calls) // CALLS_OF_AN_OP > (i - 1) * len(calls) // CALLS_OF_AN_OP
    ]


def step(reduction: str) -> None:
    """Forward and backward of a whole loss, whose small kernels are no ops of their own."""
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
        step(reduction)
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
    torch.cuda.synchronize()
    print(f"{count} calls of {len(done)} ops, 2 steps")


if __name__ == "__main__":
    main()
