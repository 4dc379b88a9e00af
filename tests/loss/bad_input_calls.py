"""Every loss on one batch of valid arguments by name, so that a test can change one.

Axes: N batch, T frames, U symbols, S columns kept a frame, V vocabulary.
"""

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds, Occupancy

N, T, U, V, S = 3, 6, 3, 7, 3


def arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "targets": torch.tensor([[1, 2, 3], [4, 5, 6], [1, 1, 1]]),
        "logit_lengths": torch.tensor([6, 5, 4]),
        "target_lengths": torch.tensor([3, 2, 0]),
        "start": torch.tensor([[0, 0, 1, 1, 1, 1], [0] * 6, [0] * 6], dtype=torch.int32),
        "logits": torch.randn(N, T, U + 1, V, generator=generator),
        "band": torch.randn(N, T, S, V, generator=generator),
        "am": torch.randn(N, T, V, generator=generator),
        "lm": torch.randn(N, U + 1, V, generator=generator),
        "weight": torch.randn(V, V, generator=generator),
        "bias": torch.randn(V, generator=generator),
        "px": torch.randn(N, U, T + 1, generator=generator),
        "py": torch.randn(N, U + 1, T, generator=generator),
    }


def full(a: dict, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    return pruned_rnnt.rnnt_loss(a["logits"], a["targets"], *lengths, **options)


def packed(logits: Tensor) -> Tensor:
    """The rows of T_n = 6, 5, 4 and U_n = 3, 2, 0."""
    sizes = ((6, 3), (5, 2), (4, 0))
    return torch.cat([logits[n, :t, : u + 1].flatten(0, 1) for n, (t, u) in enumerate(sizes)])


def full_packed(a: dict, **options):
    return full({**a, "logits": packed(a["logits"])}, **options)


def simple(a: dict, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    return pruned_rnnt.rnnt_loss_simple(a["am"], a["lm"], a["targets"], *lengths, **options).loss


def pruned(a: dict, *, s_range: int = S, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    bounds = Bounds(a["start"], s_range)
    return pruned_rnnt.rnnt_loss_pruned(a["band"], a["targets"], bounds, *lengths, **options)


def fused(a: dict, *, s_range: int = S, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    bounds = Bounds(a["start"], s_range)
    layer = (a["am"], a["lm"], a["weight"], a["bias"])
    return pruned_rnnt.rnnt_loss_fused(*layer, a["targets"], bounds, *lengths, **options)


def bounds(a: dict, *, s_range: int = S, **options):
    occupancy = Occupancy(a["py"].mT.contiguous(), a["py"].mT.contiguous())
    lengths = (a["logit_lengths"], a["target_lengths"])
    return pruned_rnnt.prune_bounds(occupancy, *lengths, s_range, **options).start


def prune(a: dict):
    return pruned_rnnt.prune(a["am"], a["lm"], Bounds(a["start"], S)).lm


def information(a: dict, **options):
    return pruned_rnnt.mutual_information(a["px"], a["py"], a.get("boundary"), **options).total


def ctc(a: dict, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    return pruned_rnnt.ctc_loss(a["am"], a["targets"], *lengths, **options)


def module(a: dict, **options):
    torch.manual_seed(0)
    joiner = options.pop("joiner", pruned_rnnt.Joiner(V, V, 8, V))
    criterion = pruned_rnnt.PrunedTransducerLoss(joiner, V, V, V, s_range=S, **options)
    lengths = (a["logit_lengths"], a["target_lengths"])
    return criterion(a["am"], a["lm"], a["targets"], *lengths, 0).loss


# Values of utterance 1 that have no path or do not exist.
SPOILT = [
    ("logit_lengths", torch.tensor([6, 7, 4])),
    ("logit_lengths", torch.tensor([6, 0, 4])),
    ("logit_lengths", torch.tensor([6, -3, 4])),
    ("logit_lengths", torch.tensor([6, 2**31 - 1, 4])),
    ("target_lengths", torch.tensor([3, 4, 0])),
    ("target_lengths", torch.tensor([3, -1, 0])),
    ("target_lengths", torch.tensor([3, 2**31 - 1, 0])),
    ("targets", torch.tensor([[1, 2, 3], [4, 0, 6], [1, 1, 1]])),
    ("targets", torch.tensor([[1, 2, 3], [4, V, 6], [1, 1, 1]])),
    ("targets", torch.tensor([[1, 2, 3], [4, -(2**31), 6], [1, 1, 1]])),
    # As int32 these would be 5, 2 and 5.
    ("logit_lengths", torch.tensor([6, 2**32 + 5, 4])),
    ("target_lengths", torch.tensor([3, 2**32 + 2, 0])),
    ("targets", torch.tensor([[1, 2, 3], [4, 2**32 + 5, 6], [1, 1, 1]])),
]
LOSSES = [full, simple, pruned, fused, ctc]


CALLS = [*LOSSES, full_packed, bounds, prune, information, module]


def changed(name: str, value) -> dict[str, Tensor]:
    given = arguments()
    given[name] = value(given[name]) if callable(value) else value
    return given


def refused(call, given: dict, words: str, error: type = ValueError, **options) -> None:
    with pytest.raises(error, match=words):
        call(given, **options)
