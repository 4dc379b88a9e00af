"""The inputs of captured passes; the passes themselves need a GPU (test_encoder_graphs.py)."""

from __future__ import annotations

from typing import Any

import torch

from pruned_rnnt.model.captured_passes import CapturedPasses


def test_a_batch_is_padded_and_its_first_utterances_are_repeated() -> None:
    no_graph: Any = None
    unused = torch.empty(0)
    passes = CapturedPasses(
        forward=no_graph,
        backward=no_graph,
        program=(),
        features_NTF=torch.full((5, 6, 2), -1.0),
        lengths_N=torch.full((5,), -1),
        encoded_NTE=unused,
        grad_NTE=unused,
    )
    features, lengths = torch.randn(3, 4, 2), torch.tensor([4, 3, 2])
    passes.fill(features, lengths)
    assert torch.equal(passes.features_NTF[:, :4], features[[0, 1, 2, 0, 1]])
    assert not passes.features_NTF[:, 4:].any()
    assert passes.lengths_N.tolist() == [4, 3, 2, 4, 3]
    passes.fill(features[:, :1].expand(3, 6, 2)[[0, 1, 2, 2, 1]], torch.full((5,), 6))
    assert passes.lengths_N.tolist() == [6] * 5
