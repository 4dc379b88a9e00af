"""Tests for all encoders: lengths, chunks and streams, schedules, configuration."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.decode.search.greedy import greedy_search
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.model.conformer_settings import ConformerSettings
from pruned_rnnt.model.encoder import WHOLE, Encoder, EncoderConfig
from pruned_rnnt.model.encoder_kinds import ENCODER_CONFIGS, build_encoder, stream_encoder
from pruned_rnnt.model.lora import LoraConfig, add_adapters, merge_adapters
from pruned_rnnt.model.quantisation import round_weights
from pruned_rnnt.model.zipformer import Zipformer, ZipformerConfig
from tests.model.chunks import encode_chunks
from tests.model.zipformer_tiny import CAUSAL
from tests.tiny_models import tiny_conformer, tiny_fastconformer, tiny_model

CONFORMER = tiny_conformer(
    num_mel_bins=CAUSAL.num_mel_bins,
    layers=2,
    kernel_size=5,
    causal=True,
    chunk_size=8,
    chunk_sizes=(4, 8),
)
FASTCONFORMER = tiny_fastconformer(
    num_mel_bins=CAUSAL.num_mel_bins,
    layers=2,
    kernel_size=5,
    causal=True,
    chunk_size=8,
    chunk_sizes=(4, 8),
    feature_norm="fixed",
)
CONFIGS = [CONFORMER, FASTCONFORMER, CAUSAL]
KINDS = [config.kind for config in CONFIGS]


def make_encoder(config: EncoderConfig) -> Encoder:
    torch.manual_seed(0)
    return build_encoder(config).eval()


def ragged(lengths: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    features = torch.full((len(lengths), max(lengths), CAUSAL.num_mel_bins), 50.0)
    for n, length in enumerate(lengths):
        features[n, :length] = torch.randn(length, CAUSAL.num_mel_bins) * 3 - 5
    return features, torch.tensor(lengths)


def run_stream(
    encoder: Encoder, chunk: int, left: int, features: Tensor, lengths: Tensor
) -> Tensor:
    return encode_chunks(stream_encoder(encoder, chunk, left), features, lengths)


@pytest.mark.parametrize("config", CONFIGS, ids=KINDS)
@torch.inference_mode()
def test_output_lengths(config: EncoderConfig) -> None:
    encoder = make_encoder(config)
    shortest = encoder.receptive_field
    for frames in (shortest, shortest + 3, shortest + 4, shortest + 6):
        features, lengths = ragged([frames])
        encoded, encoded_lengths = encoder(features, lengths)
        assert encoder.output_lengths(lengths).tolist() == [encoded.size(1)]
        assert encoded_lengths.tolist() == [encoded.size(1)]
        assert encoded.size(2) == encoder.output_dim
    assert encoder.output_lengths(torch.tensor([shortest - 1, 0])).tolist() == [0, 0]
    with pytest.raises(ValueError, match="needs at least"):
        encoder(*ragged([shortest - 1]))


@pytest.mark.parametrize(("chunk", "left_chunks"), [(4, 2), (8, 1), (8, 2), (16, 1)])
@pytest.mark.parametrize("config", CONFIGS, ids=KINDS)
@torch.inference_mode()
def test_set_chunks_equals_a_stream(config: EncoderConfig, chunk: int, left_chunks: int) -> None:
    encoder = make_encoder(config)
    features, lengths = ragged([131, 110, 65])
    as_trained, _ = encoder(features, lengths)
    encoder.set_chunks(chunk, left_chunks * chunk)
    whole, frames = encoder(features, lengths)
    streamed = run_stream(encoder, chunk, left_chunks * chunk, features, lengths)
    for n, count in enumerate(frames.tolist()):
        torch.testing.assert_close(streamed[n, :count], whole[n, :count], rtol=0, atol=1e-4)
    same = (chunk, left_chunks * chunk) == config.stream_sizes
    assert torch.equal(whole[0], as_trained[0]) == same


@pytest.mark.parametrize("config", CONFIGS, ids=KINDS)
@torch.inference_mode()
def test_the_whole_utterance_can_be_a_chunk(config: EncoderConfig) -> None:
    """One model can stream, and decode whole utterances."""
    encoder = make_encoder(config)
    features, lengths = ragged([131, 110])
    encoder.set_chunks(WHOLE, 0)
    before, frames = encoder(features, lengths)
    changed = features.clone()
    changed[0, 120:] += 3.0
    after, _ = encoder(changed, lengths)
    # The first frame sees the last one; nothing sees padding.
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-4
    alone, _ = encoder(features[1:, :110], lengths[1:])
    torch.testing.assert_close(before[1, : frames[1]], alone[0], rtol=0, atol=1e-5)
    if isinstance(config, ConformerSettings):
        one_chunk, _ = encoder(features, lengths, chunk_size=4000)
        torch.testing.assert_close(before[0], one_chunk[0], rtol=0, atol=1e-5)
    whole = dataclasses.replace(config, chunk_size=WHOLE)  # type: ignore[call-arg]
    trained, _ = make_encoder(whole)(features, lengths)
    assert torch.equal(trained, before)
    assert min(whole.stream_sizes) > 0


@pytest.mark.parametrize("config", CONFIGS, ids=KINDS)
@torch.inference_mode()
def test_stream_with_trained_chunks(config: EncoderConfig) -> None:
    encoder = make_encoder(config)
    features, lengths = ragged([90])
    whole, _ = encoder(features, lengths)
    streamed = run_stream(encoder, *config.stream_sizes, features, lengths)
    torch.testing.assert_close(streamed[:, : whole.size(1)], whole, rtol=0, atol=1e-4)


def test_zipformer_draws_the_chunk_size_of_each_training_batch() -> None:
    encoder = make_encoder(CAUSAL).train()
    assert isinstance(encoder, Zipformer)
    drawn = [encoder._chunking(None, None).chunk_size for _ in range(40)]
    assert set(drawn) == {8, 16, 32, None}


@pytest.mark.parametrize(
    "config",
    # The statistics of a batch norm depend on the other utterances.
    [CONFORMER, dataclasses.replace(FASTCONFORMER, convolution_norm="layer")],
    ids=KINDS[:2],
)
@pytest.mark.parametrize("left_chunks", [None, 1])
def test_conformers_draw_the_chunk_size_of_each_training_utterance(
    config: ConformerSettings, left_chunks: int | None
) -> None:
    """Each utterance is encoded as with its size alone; whole ones keep their first chunk, too."""
    sizes = (4, 8, WHOLE)
    changes = {"dropout": 0.0, "chunk_sizes": sizes, "left_chunks": left_chunks}
    encoder = make_encoder(dataclasses.replace(config, **changes)).train()  # type: ignore[arg-type]
    features, lengths = ragged([150, 131])
    of_size = [encoder(features, lengths, chunk_size=size)[0].detach() for size in sizes]
    counts = encoder.output_lengths(lengths).tolist()
    drawn = []
    for _ in range(40):
        encoded = encoder(features, lengths)[0].detach()
        pair = []
        for row in range(2):
            differences = [(encoded - other)[row, : counts[row]] for other in of_size]
            distances = [float(difference.abs().max()) for difference in differences]
            assert min(distances) < 1e-5
            pair.append(distances.index(min(distances)))
        drawn.append(tuple(pair))
    assert len(set(drawn)) == 9
    cut = dataclasses.replace(config, **changes, random_first_chunk=True)  # type: ignore[arg-type]
    encoder = make_encoder(dataclasses.replace(cut, chunk_sizes=(WHOLE, WHOLE))).train()
    torch.testing.assert_close(encoder(features, lengths)[0][0], of_size[2][0])


@pytest.mark.parametrize("config", [CONFORMER, FASTCONFORMER], ids=KINDS[:2])
def test_first_training_steps_have_the_smallest_chunks_alone(config: ConformerSettings) -> None:
    changes = {"dropout": 0.0, "chunk_sizes": (WHOLE, 8, 4), "smallest_chunk_steps": 2}
    encoder = make_encoder(dataclasses.replace(config, **changes)).train()  # type: ignore[arg-type]
    assert set(encoder.state_dict()) == set(make_encoder(config).state_dict())
    features, lengths = ragged([150, 131])
    smallest, _ = encoder(features, lengths, chunk_size=4)
    for step in (0, 1):
        encoder.set_step(10.0, step)
        assert torch.equal(encoder(features, lengths)[0], smallest)
    encoder.set_step(0.5, 2)
    drawn = [encoder(features, lengths)[0] for _ in range(12)]
    assert not all(torch.equal(encoded, smallest) for encoded in drawn)
    encoder.set_step(0.0)
    assert torch.equal(encoder(features, lengths)[0], smallest)


@pytest.mark.parametrize(
    "config",
    # The statistics of a batch norm depend on the other utterances.
    [CONFORMER, dataclasses.replace(FASTCONFORMER, convolution_norm="layer")],
    ids=KINDS[:2],
)
def test_training_draws_the_length_of_the_first_chunk(config: ConformerSettings) -> None:
    config = dataclasses.replace(config, dropout=0.0, chunk_sizes=())
    encoder = make_encoder(dataclasses.replace(config, random_first_chunk=True))
    features, lengths = ragged([150, 150])
    expected, _ = make_encoder(config)(features, lengths)
    assert torch.equal(encoder(features, lengths)[0], expected)
    encoder.train()
    drawn = [encoder(features, lengths)[0][:, 0, 0].tolist() for _ in range(150)]
    # The first frame sees as many frames as its chunk has.
    for utterance in zip(*drawn, strict=True):
        assert len({round(value, 6) for value in utterance}) == config.chunk_size
    assert len(set(map(tuple, drawn))) > config.chunk_size


@pytest.mark.parametrize("config", CONFIGS, ids=KINDS)
def test_wrong_chunks_are_errors(config: EncoderConfig) -> None:
    encoder = make_encoder(config)
    for chunk, left in ((0, 0), (4, 6), (4, -4)):
        with pytest.raises(ValueError, match=f"chunk is {chunk} and left is {left}"):
            encoder.set_chunks(chunk, left)
    offline = make_encoder(dataclasses.replace(config, causal=False))
    with pytest.raises(ValueError, match="not causal"):
        offline.set_chunks(4, 8)
    with pytest.raises(ValueError, match="not causal"):
        stream_encoder(offline, 4, 8)


@pytest.mark.parametrize("config", CONFIGS, ids=KINDS)
def test_streams_of_adapters_and_rounded_weights_are_errors(config: EncoderConfig) -> None:
    encoder = make_encoder(config)
    add_adapters(encoder, LoraConfig(rank=2))
    with pytest.raises(ValueError, match="merge_adapters"):
        stream_encoder(copy.deepcopy(encoder), 8, 16)
    merge_adapters(encoder)
    stream_encoder(encoder, 8, 16)
    # No matrix of the small encoders would be quantised.
    part = torch.nn.Sequential(torch.nn.Linear(64, 64))
    round_weights(part, "int8")
    encoder._forward_pre_hooks.update(part._forward_pre_hooks)
    with pytest.raises(ValueError, match="rounds its weights"):
        stream_encoder(encoder, 8, 16)


@pytest.mark.parametrize("config", CONFIGS, ids=KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_padding_that_is_not_finite_changes_no_gradient(
    config: EncoderConfig, value: float
) -> None:
    features, lengths = ragged([90, 41])
    found = []
    for padding in (1.0, value):
        features[1, 41:] = padding
        encoder = make_encoder(config).train()
        torch.manual_seed(2)
        encoded, counts = encoder(features, lengths)
        real_NT = torch.arange(encoded.size(1)) < counts[:, None]
        encoded[real_NT].square().sum().backward()
        found.append([p.grad for p in encoder.parameters() if p.grad is not None])
    for expected, got in zip(*found, strict=True):
        assert got.isfinite().all()
        if not isinstance(encoder, Zipformer):  # its balancers count padding
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("config", [CONFORMER, FASTCONFORMER], ids=KINDS[:2])
def test_chunks_of_evaluation_do_not_change_training(config: ConformerSettings) -> None:
    config = dataclasses.replace(config, chunk_size=4, chunk_sizes=(), random_first_chunk=False)
    features, lengths = ragged([90, 90])
    outputs = []
    for chunk in (4, 8):
        encoder = make_encoder(config).train()
        encoder.set_chunks(chunk, 2 * chunk)
        torch.manual_seed(3)
        outputs.append(encoder(features, lengths)[0])
    assert torch.equal(*outputs)


def test_a_zipformer_that_is_not_causal_needs_no_chunks() -> None:
    assert not ZipformerConfig(downsampling=(1, 2, 3, 3, 2, 1), causal=False).causal
    with pytest.raises(ValueError, match="chunk size is 16, needs a multiple of 6"):
        ZipformerConfig(downsampling=(1, 2, 3, 3, 2, 1), causal=True)


def test_chunks_that_the_stacks_do_not_support_are_errors() -> None:
    encoder = make_encoder(CAUSAL)
    with pytest.raises(ValueError, match="chunk is 3, this Zipformer needs a multiple of 2 frames"):
        encoder.set_chunks(3, 6)
    with pytest.raises(ValueError, match="left is 0"):
        encoder.set_chunks(4, 0)


def test_model_sets_the_step_in_batches_of_ten_minutes() -> None:
    model = tiny_model(CAUSAL).train()
    model.batch_seconds = 150.0
    features, lengths = ragged([70, 50])
    batch = (features, lengths, torch.ones(2, 3, dtype=torch.int32), torch.tensor([3, 2]))
    model(*batch, 40).objective.backward()
    assert isinstance(model.encoder, Zipformer)
    assert model.encoder.clock.step == 10.0
    model.eval()(*batch, 80)
    assert model.encoder.clock.step == 10.0


@pytest.mark.parametrize("chunk", [4, 8, 16])
@pytest.mark.parametrize("config", CONFIGS, ids=KINDS)
@torch.inference_mode()
def test_streaming_search_equals_whole_utterances(config: EncoderConfig, chunk: int) -> None:
    model = tiny_model(config)
    model.encoder.set_chunks(chunk, 2 * chunk)
    features, lengths = ragged([103, 50, 3])
    whole = greedy_search(model, *model.encode(features, lengths))
    stream = StreamDecoder(model, new_greedy_search(model), chunk, 2 * chunk)
    streamed = stream.recognise(features, lengths)
    assert sum(len(found.symbols) for found in whole) > 5
    for one, other in zip(streamed, whole, strict=True):
        assert (one.symbols, one.frames) == (other.symbols, other.frames)
        assert one.score == pytest.approx(other.score, rel=1e-4, abs=1e-4)


def test_kinds_of_configurations() -> None:
    for kind, config in ENCODER_CONFIGS.items():
        assert config().kind == kind  # type: ignore[call-arg]


def test_lists_of_wrong_length_are_errors() -> None:
    with pytest.raises(ValueError, match=r"model\.encoder\.heads has 6 entries, needs one for"):
        ZipformerConfig(downsampling=(1, 2))
