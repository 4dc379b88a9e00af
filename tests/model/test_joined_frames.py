"""Concatenated utterances give the output of single ones, in few shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.model import subsampling, subsampling_convolutions
from pruned_rnnt.model.joined_frames import JoinedFrames
from pruned_rnnt.model.subsampling import ConvSubsampling
from pruned_rnnt.model.zipformer import embedding

BINS = 80


def conformer_front() -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    front = ConvSubsampling(BINS, 4, 16)
    return front, lambda features, lengths: front(features)


def zipformer_front() -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    front = embedding.Embedding(embedding.Clock(), BINS, 16)
    return front, lambda features, lengths: front(features, embedding.embedding_length(lengths))[0]


@pytest.mark.parametrize("frames", [9, 20, 21, 22, 23])
@pytest.mark.parametrize(
    ("make", "modules"),
    [
        (conformer_front, (subsampling, subsampling_convolutions)),
        (zipformer_front, (embedding, subsampling_convolutions)),
    ],
    ids=["conformer", "zipformer"],
)
def test_joined_equals_separate(
    make: Callable[[], tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]],
    modules: tuple[object, ...],
    frames: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    front, encode = make()
    front = front.double().eval()
    features = torch.randn(3, frames, BINS, dtype=torch.float64)
    lengths = torch.tensor([frames, 9, max(9, frames - 3)])
    results = []
    for join in (False, True):
        for module in modules:
            name = "should_avoid_cudnn_replanning"
            monkeypatch.setattr(module, name, lambda x, join=join: join)
        front.zero_grad(set_to_none=True)
        out = encode(features, lengths)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in front.parameters())])
    for separate, joined in zip(*results, strict=True):
        torch.testing.assert_close(joined, separate, rtol=1e-9, atol=1e-9)
    empty = encode(features[:0], lengths[:0])
    assert empty.shape == (0, *results[0][0].shape[1:])


def test_branch_is_dropped_for_whole_utterances(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch that is dropped for one utterance stays for the others."""
    block = embedding.ConvNeXt(embedding.Clock(), 8).train()
    with torch.no_grad():
        block.pointwise_conv2.weight.normal_()
    joined = JoinedFrames(4, 30, embedding.EMBEDDING_RATE, embedding.RECEPTIVE_FIELD)
    maps = torch.randn(1, 8, (joined.total - 7) // 2, 5)
    keep = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    monkeypatch.setattr(embedding, "keep_mask", lambda x, skip: keep)
    with torch.no_grad():
        out = joined.part(block(maps, None, joined)[0] - maps, 11)
    assert out.abs().amax(dim=(1, 2, 3)).gt(0).tolist() == [True, False, True, False]


def test_all_batches_need_few_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    totals, batches = set(), 2000
    for _ in range(batches):
        frames = int(torch.randint(200, 3000, (), generator=generator))
        joined = JoinedFrames(30000 // frames, frames, 4, 7)
        used = joined.batch * frames
        assert used <= joined.total <= 1.15 * used + 100
        assert joined.total % 4 == 0
        totals.add(joined.total)
    assert len(totals) <= 8
