"""torch.library.opcheck on every raw op: schema, fake, and tracing by AOTAutograd."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils._pytree import tree_map_only

import pruned_rnnt.public  # noqa: F401 (defines all ops)
from pruned_rnnt.ops.common.library import FALLBACKS, REGULAR
from pruned_rnnt.ops.joiner.fused_log_probs import JoinerInputs, JoinerPlan
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.joiner.log_probs import LOGITS
from pruned_rnnt.ops.lattice.recursion import LossOptions
from tests.ops.active_cases import active_calls, gradient_calls, layer_calls, packed_calls
from tests.ops.beam_cases import beam_frames_calls, greedy_frames_calls
from tests.ops.counted_cases import counted_calls
from tests.ops.native_batches import SHAPES, Call, batch_of, poison
from tests.ops.native_cases import all_calls


def fused_calls() -> Iterator[Call]:
    """Two chunks of a padded lattice, T = 3, U = 2, V = 6 in 8 columns, D = 5."""
    batch = batch_of([3, 2], [2, 1], 6)
    factors = [torch.randn(shape) for shape in ((2, 3, 5), (2, 3, 5), (8, 5), (8,))]
    lengths = (batch.logit_lengths, batch.target_lengths)
    inputs = JoinerInputs(*factors, batch.targets, *lengths, None, None)
    options = LossOptions(0, LOGITS, REGULAR, 0.0, 0.0, 0.0)
    *sizes, _ = JoinerPlan(3, 3, [0, 12, 18], 6, False, 6, ACTIVATIONS["tanh"], options)
    workspace = [poison(12, width, dtype=torch.float32) for width in (5, 8)]
    rows = [poison(18, dtype=torch.float32) for _ in range(3)]
    yield Call("fused_log_probs", (*inputs, *sizes, *options), (*workspace, *rows, None))
    upstream, statistics = torch.randn(2), torch.rand(3, 18).unbind()
    sums = [torch.empty_like(x) for x in factors]
    has_first_chunk = False
    arguments = (upstream, *inputs, *sizes, *options, *statistics, None, None, has_first_chunk)
    yield Call("fused_log_probs_backward", arguments, (*workspace, *sums))


def ctc_calls() -> Iterator[Call]:
    logits = torch.randn(2, 7, 5)
    targets, lengths = torch.tensor([[1, 2], [3, 3]]), (torch.tensor([7, 5]), torch.tensor([2, 1]))
    outputs = (poison(2, dtype=torch.float32), torch.empty_like(logits))
    yield Call("ctc", (logits, targets, *lengths, 0), outputs)


def scale_calls() -> Iterator[Call]:
    sources = [torch.randn(3, 4), torch.randn(3, 2, 5)]
    yield Call("scale", (sources, torch.randn(3)), ([torch.empty_like(x) for x in sources],))


def first_calls() -> dict[str, tuple]:
    torch.manual_seed(0)
    found: dict[str, tuple] = {}
    batch = batch_of([3, 2], [2, 1], 6)
    for calls in (
        all_calls(SHAPES[0], torch.float32),
        fused_calls(),
        ctc_calls(),
        scale_calls(),
        beam_frames_calls([3, 2], 6),
        greedy_frames_calls([3, 2], 6),
        counted_calls(),
        # Their kernels take bfloat16 only.
        active_calls(batch, 6, torch.bfloat16, width=8),
        gradient_calls(batch, 6, torch.bfloat16, 8, torch.float32),
        layer_calls(torch.float32, torch.bfloat16),
        packed_calls(batch, 6, torch.bfloat16, 8),
    ):
        for call in calls:
            found.setdefault(call.op, (*call.inputs, *call.outputs))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(FALLBACKS))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(op, device) -> None:
    arguments = tree_map_only(torch.Tensor, lambda x: x.clone().to(device), first_calls()[op])
    torch.library.opcheck(getattr(torch.ops.pruned_rnnt, op).default, arguments)
