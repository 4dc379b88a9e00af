"""The Conformer: padding has no effect, a causal one never sees the future, and its sizes."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.model.attention import attention_mask, rotary_angles, rotate
from pruned_rnnt.model.chunks import Chunks
from pruned_rnnt.model.conformer import Conformer
from tests.tiny_models import tiny_conformer


def small(**changes: object) -> Conformer:
    torch.manual_seed(0)
    sizes = {"num_mel_bins": 20, "layers": 2, "feedforward_dim": 24, "kernel_size": 5}
    return Conformer(tiny_conformer(**{**sizes, "left_chunks": None, **changes})).eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"feature_norm": "utterance"},
        {"causal": True, "chunk_size": 4},
        {"causal": True, "chunk_size": 1, "left_chunks": 2},
        {"causal": True, "chunk_size": 3, "left_chunks": 0},
        {"kernel_size": 1},
        {"kernel_size": 31},
    ],
)
@pytest.mark.parametrize("padding", [0.0, 1e4, float("nan")])
def test_batch_equals_single_for_any_padding(changes: dict[str, object], padding: float) -> None:
    encoder = small(**changes)
    lengths = torch.tensor([61, 7, 40, 10])
    features = torch.full((4, 61, 20), padding)
    for n, length in enumerate(lengths.tolist()):
        features[n, :length] = torch.randn(length, 20) * 4 - 7
    output, output_lengths = encoder(features, lengths)
    assert output_lengths.tolist() == [14, 1, 9, 1]
    for n, length in enumerate(lengths.tolist()):
        alone, alone_lengths = encoder(features[n : n + 1, :length], lengths[n : n + 1])
        frames = int(alone_lengths)
        assert alone.shape[1] == frames
        torch.testing.assert_close(output[n, :frames], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"causal": True, "chunk_size": 3}, {"kernel_size": 1}])
@pytest.mark.parametrize("lengths", [[40], [40, 40], [40, 21]])
def test_inference_equals_a_pass_with_gradients(
    changes: dict[str, object], lengths: list[int]
) -> None:
    encoder = small(**changes)
    features = torch.randn(len(lengths), 40, 20) * 4 - 7
    wanted, _ = encoder(features, torch.tensor(lengths))
    assert wanted.requires_grad
    with torch.inference_mode():
        output, frames = encoder(features, torch.tensor(lengths))
    for n, count in enumerate(frames.tolist()):
        torch.testing.assert_close(output[n, :count], wanted[n, :count].detach())


def test_gradient_of_padding_is_zero_and_parameters_get_finite_ones() -> None:
    encoder = small().train()
    features = (torch.randn(2, 40, 20) * 4 - 7).requires_grad_()
    output, lengths = encoder(features, torch.tensor([40, 20]))
    mask = torch.arange(output.size(1)) < lengths[:, None]
    output[mask].square().sum().backward()
    assert features.grad is not None
    assert features.grad[1, 20:].abs().max() == 0
    assert features.grad[1, :19].abs().max() > 0
    for parameter in encoder.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
@pytest.mark.parametrize("left_chunks", [None, 0, 2])
def test_causal_encoder_sees_no_frame_after_its_chunk(
    chunk_size: int, left_chunks: int | None
) -> None:
    encoder = small(causal=True, chunk_size=chunk_size, left_chunks=left_chunks)
    features = torch.randn(1, 87, 20) * 4 - 7
    lengths = torch.tensor([87])
    before, _ = encoder(features, lengths)
    chunk = 2
    # Output frame j sees input frames up to 4 j + 6.
    last_seen = 4 * (chunk_size * (chunk + 1) - 1) + 6
    changed = features.clone()
    changed[:, last_seen + 1 :] += 3.0
    after, _ = encoder(changed, lengths)
    same = chunk_size * (chunk + 1)
    torch.testing.assert_close(before[:, :same], after[:, :same], rtol=0, atol=0)
    assert (before[:, same:] - after[:, same:]).abs().max() > 1e-3


def test_non_causal_encoder_sees_everything() -> None:
    encoder = small()
    features = torch.randn(1, 60, 20) * 4 - 7
    before, _ = encoder(features, torch.tensor([60]))
    features[:, -1] += 5.0
    after, _ = encoder(features, torch.tensor([60]))
    # 60 frames leave frames 57..59 unused by the strided windows but for the last: (60-7)%4 = 1.
    features[:, 57] += 5.0
    changed, _ = encoder(features, torch.tensor([60]))
    torch.testing.assert_close(before, after)
    assert (changed[:, 0] - after[:, 0]).abs().max() > 1e-4


def test_left_chunks_bound_the_past() -> None:
    mask = attention_mask(torch.tensor([6]), 6, Chunks(2, 1))
    assert mask[0, 0].int().tolist() == [
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 1],
    ]


def test_first_chunks_can_be_shorter() -> None:
    mask = attention_mask(torch.tensor([4, 3]), 4, Chunks(2, None, torch.tensor([0, 1])))
    assert mask[:, 0].int().tolist() == [
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    ]


def test_rotary_product_depends_on_distance_alone() -> None:
    query, key = torch.randn(8), torch.randn(8)
    angles = rotary_angles(20, 8, torch.device("cpu"))
    queries = rotate(query.expand(1, 20, 1, 1, 8), angles)[0, :, 0, 0]
    keys = rotate(key.expand(1, 20, 1, 1, 8), angles)[0, :, 0, 0]
    products = queries @ keys.T
    for distance in (-5, 0, 3):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert (products[0, 0] - products[0, 5]).abs() > 1e-4


@pytest.mark.parametrize("frames", [7, 8, 10, 11, 30, 31, 32, 33])
def test_output_length(frames: int) -> None:
    encoder = small()
    output, lengths = encoder(torch.randn(1, frames, 20), torch.tensor([frames]))
    assert output.shape == (1, int(lengths), 16)
    assert int(lengths) == (frames - 7) // 4 + 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 6, 20), "6 frames.*at least 7"),
        ((1, 30, 19), r"needs \(N, T, 20\)"),
        ((30, 20), "needs"),
    ],
)
def test_wrong_features_are_errors(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small()(torch.zeros(shape), torch.tensor([6]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 20, "heads": 4}, "multiple of 2"),
        ({"kernel_size": 4}, "odd"),
        ({"causal": True, "feature_norm": "utterance"}, "add model.encoder.feature_norm=fixed"),
        ({"chunk_size": 0}, "at least 1"),
    ],
)
def test_wrong_sizes_are_errors(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)
