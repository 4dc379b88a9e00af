"""Back pointers, followed for many frames at once and one frame at a time."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.decode.search.back_pointers import pending_trace
from pruned_rnnt.ops.search.search_frames import BeamSteps


@pytest.mark.parametrize("frames", [0, 1, 2, 3, 4, 5, 31, 32, 33, 100])
def test_hypotheses_are_those_of_one_step_after_the_other(frames: int) -> None:
    generator = torch.Generator().manual_seed(frames)
    batch, beam = 3, 5
    parent_NTB, symbol_NTB = torch.randint(beam, (2, batch, frames, beam), generator=generator)
    symbol_NTB -= 2
    added_NTB = torch.randn(batch, frames, beam, generator=generator)
    kept_NK = torch.tensor([[4, 0], [1, 1], [2, 3]])
    score_NK = torch.tensor([[0.0, -1.0], [-1.0, -torch.inf], [-2.0, -3.0]])
    steps = BeamSteps(parent_NTB, symbol_NTB.clamp(min=-1), added_NTB)
    found = pending_trace(kept_NK, score_NK, steps).result()
    assert [len(each) for each in found] == [2, 1, 2]
    for n, hypotheses in enumerate(found):
        for k, hypothesis in enumerate(hypotheses):
            row, path = int(kept_NK[n, k]), []
            for t in reversed(range(frames)):
                path.append((t, int(steps.symbol[n, t, row]), float(steps.added[n, t, row])))
                row = int(parent_NTB[n, t, row])
            emitted = [each for each in reversed(path) if each[1] >= 0]
            assert hypothesis.score == score_NK[n, k]
            assert list(hypothesis.frames) == [t for t, _, _ in emitted]
            assert list(hypothesis.symbols) == [symbol for _, symbol, _ in emitted]
            assert list(hypothesis.symbol_scores) == [added for _, _, added in emitted]
