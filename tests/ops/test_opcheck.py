"""torch.library.opcheck on every raw op: schema, fake, and tracing by AOTAutograd."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils._pytree import tree_map_only

from pruned_rnnt.ops.common.library import FALLBACKS
from tests.ops.native_cases import SHAPES, Call, all_calls, batch_of, poison


def fused_calls() -> Iterator[tuple[str, list, dict]]:
    """Op, positional and named arguments: two chunks of a padded lattice, T = 3, U = 2, V = 6 in 8
    columns, D = 5."""
    batch = batch_of([3, 2], [2, 1], 6)
    factors = [torch.randn(shape) for shape in ((2, 3, 5), (2, 3, 5), (8, 5), (8,))]
    inputs = [*factors, batch.targets, batch.logit_lengths, batch.target_lengths, None, None]
    shared = {"frames": 3, "columns": 3, "chunk_offsets": [0, 12, 18], "vocabulary": 6}
    shared |= {"activation": 1, "blank": 0, "normalization": 0}
    shared |= {
        name: torch.full((12, x), float("nan")) for name, x in (("hidden", 5), ("logits", 8))
    }
    rows = {name: torch.rand(18) for name in ("px", "py", "lse", "gx", "gy")}
    log_probs = {name: rows[name] for name in ("px", "py", "lse")}
    yield "fused_log_probs", inputs, shared | log_probs
    statistics = {name: rows[name] for name in ("lse", "gx", "gy")}
    options = {"fastemit_lambda": 0.0, "clamp": 0.0, "has_last_chunk": False, "hidden_rows": 6}
    names = ("grad_am", "grad_lm", "grad_weight", "grad_bias")
    sums = {name: torch.empty_like(x) for name, x in zip(names, factors, strict=True)}
    upstream = {"grad_loss": torch.randn(2)}
    yield "fused_log_probs_backward", inputs, shared | statistics | options | sums | upstream


def ctc_calls() -> Iterator[Call]:
    logits = torch.randn(2, 7, 5)
    targets, lengths = torch.tensor([[1, 2], [3, 3]]), (torch.tensor([7, 5]), torch.tensor([2, 1]))
    outputs = (poison(2, dtype=torch.float32), torch.empty_like(logits))
    yield Call("ctc", (logits, targets, *lengths, 0), outputs)


def scale_calls() -> Iterator[Call]:
    sources = [torch.randn(3, 4), torch.randn(3, 2, 5)]
    yield Call("scale", (sources, torch.randn(3)), ([torch.empty_like(x) for x in sources],))


def first_calls() -> dict[str, tuple[list, dict]]:
    torch.manual_seed(0)
    found: dict[str, tuple[list, dict]] = {}
    for calls in (all_calls(SHAPES[0], torch.float32), ctc_calls(), scale_calls()):
        for call in calls:
            found.setdefault(call.op, ([*call.inputs, *call.outputs], {}))
    found |= {op: (arguments, named) for op, arguments, named in fused_calls()}
    return found


@pytest.mark.parametrize("op", sorted(FALLBACKS))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(op, device) -> None:
    arguments, named = tree_map_only(
        torch.Tensor, lambda x: x.clone().to(device), first_calls()[op]
    )
    torch.library.opcheck(getattr(torch.ops.pruned_rnnt, op).default, tuple(arguments), named)
