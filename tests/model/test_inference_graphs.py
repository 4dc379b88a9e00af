"""Encoders in inference with CUDA graphs against the same encoders without."""

from __future__ import annotations

import copy

import pytest
import torch

from pruned_rnnt.decode.build_search import build_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.encode import choose_graphs, encode_padded
from pruned_rnnt.model import inference_graphs
from pruned_rnnt.model.captured_passes import CAPTURE_AT, pool_bytes
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.inference_graphs import FrequentGraphs, InferenceGraphs
from pruned_rnnt.model.shape_steps import round_down, round_up
from pruned_rnnt.model.speech_model import SpeechModel
from tests.tiny_models import tiny_conformer, tiny_fastconformer, tiny_model, tiny_zipformer

ENCODERS = [
    tiny_conformer(),
    tiny_conformer(causal=True),
    tiny_fastconformer(),
    tiny_fastconformer(causal=True, feature_norm="none", convolution_norm="layer"),
    tiny_zipformer(causal=False),
    tiny_zipformer(causal=True),
]


@pytest.fixture(params=ENCODERS, ids=lambda each: f"{each.kind}, causal={each.causal}")
def model(request: pytest.FixtureRequest) -> SpeechModel:
    encoder: EncoderConfig = request.param
    torch.manual_seed(0)
    return tiny_model(encoder).eval()


def batches(bins: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two shapes of the grid, each several times, and other lengths within them."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for lengths in (
        [90, 64, 33],
        [200],
        [96, 70, 96],
        [96, 96, 65],
        [190],
        [224, 224],
        [70, 93, 9],
    ):
        features_NTF = torch.randn(len(lengths), max(lengths), bins, generator=generator)
        found.append((features_NTF, torch.tensor(lengths)))
    return found * 3


def test_shapes_are_few_and_padding_is_little() -> None:
    sizes = [round_up(count, 1, steps=8) for count in range(1, 1025)]
    assert all(size >= count for count, size in enumerate(sizes, start=1))
    assert all(size <= 1.126 * count for count, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 80
    assert round_up(33, 32, steps=8) == 64
    below = [round_down(count, 1, steps=8) for count in range(1, 1025)]
    assert below == [max(size for size in sizes if size <= count) for count in range(1, 1025)]


def test_without_a_gpu_the_encoder_runs_as_it_is(model: SpeechModel) -> None:
    choose_graphs("auto", model)
    assert model.inference_graphs is None
    model.inference_graphs = InferenceGraphs()
    for features_NTF, lengths_N in batches(model.config.encoder.num_mel_bins):
        encoded_NTE, frames_N = encode_padded(model, features_NTF, lengths_N)
        with torch.no_grad():
            expected_NTE, expected_N = model.encoder(features_NTF, lengths_N)
        assert torch.equal(encoded_NTE, expected_NTE)
        assert torch.equal(frames_N, expected_N)
    assert not model.inference_graphs._graphs
    assert copy.deepcopy(model).inference_graphs is not model.inference_graphs


class CudaParameter(torch.nn.Parameter):
    """A parameter that says that it is on a GPU."""

    is_cuda = True


def encoder_with(*values: float) -> torch.nn.Module:
    encoder = torch.nn.Module()
    for place, value in enumerate(values):
        encoder.register_parameter(str(place), CudaParameter(torch.tensor([value])))
    return encoder


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FrequentGraphs[object]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    return FrequentGraphs()


def test_shapes_are_captured_again_only_if_they_occur_often_again(
    graphs: FrequentGraphs[object],
) -> None:
    encoder, captured = encoder_with(1.0), []
    for shape in 4 * list(range(2 * inference_graphs._MOST_GRAPHS)):
        for _ in range(2):
            graphs.find(encoder, shape, lambda memory, shape=shape: captured.append(shape))
    # Each shape occurs eight times, and others drop its graph: one of three passes may capture.
    assert len(captured) <= 8 / 3 * 2 * inference_graphs._MOST_GRAPHS


@pytest.mark.parametrize("change", ["moved", "replaced"])
def test_graphs_are_dropped_when_any_parameter_is_moved_or_replaced(
    graphs: FrequentGraphs[object], change: str
) -> None:
    encoder, captured = encoder_with(1.0, 2.0), []

    def find() -> None:
        graphs.find(encoder, "shape", lambda memory: captured.append("shape"))

    for _ in range(4):
        find()
    if change == "moved":
        encoder.get_parameter("1").data = torch.tensor([3.0])
    else:
        encoder.register_parameter("1", CudaParameter(torch.tensor([3.0])))
    find()
    find()
    assert captured == ["shape", "shape"]


def test_large_graphs_need_as_much_free_memory_as_the_process_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 0)
    free = {"bytes": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**30)
    graphs = InferenceGraphs()
    small = inference_graphs._SMALL_FRAMES
    assert graphs._has_room(small, device)
    assert not graphs._has_room(2 * small, device)
    free["bytes"] = 2**30
    assert graphs._has_room(2 * small, device)
    free["bytes"] = 0
    large = torch.empty((4, small), device="meta").unsqueeze(2)
    graphs._graphs["large"] = inference_graphs._Pass(None, large, large, large)  # type: ignore[arg-type]
    assert graphs._has_room(4 * small, device)
    assert not graphs._has_room(4 * small + 1, device)


def test_a_pass_out_of_memory_runs_again_without_the_memory_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model = tiny_model(tiny_conformer()).eval()
    graphs, passes = InferenceGraphs(), []
    features_NTF = torch.zeros(1, 64, model.config.encoder.num_mel_bins)
    lengths_N = torch.tensor([64])

    def out_of_memory(module: torch.nn.Module, inputs: object) -> None:
        passes.append(len(graphs._graphs))
        if graphs._graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.encoder.register_forward_pre_hook(out_of_memory)
    graphs._graphs["other"] = None  # type: ignore[assignment]
    encoded_NTE, _ = graphs._without_graph(model.encoder, features_NTF, lengths_N)
    assert torch.equal(encoded_NTE, model.encoder(features_NTF, lengths_N)[0])
    assert passes == [1, 0, 0]
    # A batch that is too large in any case costs the graphs once.
    model.encoder.register_forward_pre_hook(lambda *_: raise_out_of_memory())
    for left in (0, 1):
        graphs._graphs["other"] = None  # type: ignore[assignment]
        with pytest.raises(torch.OutOfMemoryError):
            graphs._without_graph(model.encoder, features_NTF, lengths_N)
        assert len(graphs._graphs) == left


def raise_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_replays_equal_eager_passes(
    model: SpeechModel, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_graphs, "_MOST_GRAPHS", 3)
    model = model.cuda()
    choose_graphs("auto", model)
    graphs = model.inference_graphs
    assert graphs is not None
    tolerance = 1e-4 if precision == "float32" else 0.02
    for features_NTF, lengths_N in batches(model.config.encoder.num_mel_bins):
        choose_graphs("off", model)
        expected_NTE, expected_N = encode_padded(model, features_NTF, lengths_N, precision)
        model.inference_graphs = graphs
        encoded_NTE, frames_N = encode_padded(model, features_NTF, lengths_N, precision)
        assert torch.equal(frames_N, expected_N)
        for got_TE, wanted_TE, frames in zip(
            encoded_NTE, expected_NTE, frames_N.tolist(), strict=True
        ):
            error = (got_TE[:frames] - wanted_TE[:frames]).norm()
            assert error <= tolerance * wanted_TE[:frames].norm()
    assert not graphs._failed
    assert 2 <= len(graphs._graphs) <= 3
    # Results are copies, which the next replay leaves alone.
    features_NTF, lengths_N = batches(model.config.encoder.num_mel_bins)[0]
    first_NTE, _ = encode_padded(model, features_NTF, lengths_N, precision)
    kept_NTE = first_NTE.clone()
    encode_padded(model, features_NTF + 1, lengths_N, precision)
    assert torch.equal(first_NTE, kept_NTE)


@pytest.mark.gpu
def test_graphs_use_memory_that_others_have_freed() -> None:
    """Six shapes take little more than the largest alone."""
    torch.manual_seed(0)
    model = tiny_model(tiny_zipformer(causal=False)).eval().cuda()
    bins = model.config.encoder.num_mel_bins

    def memory(sizes: list[int]) -> int:
        graphs = InferenceGraphs()
        for utterances in sizes:
            for _ in range(CAPTURE_AT):
                features_NTF = torch.randn(utterances, 2000, bins, device="cuda")
                graphs(model.encoder, features_NTF, torch.full((utterances,), 2000, device="cuda"))
        assert len(graphs._graphs) == len(sizes)
        assert graphs._memory is not None
        return pool_bytes(graphs._memory.pool)

    largest = memory([60])
    assert largest > 2**28
    assert memory([60, 56, 52, 48, 44, 40]) <= 1.5 * largest


@pytest.mark.gpu
def test_replays_see_changed_parameters() -> None:
    torch.manual_seed(0)
    model = tiny_model(tiny_zipformer(causal=False)).eval().cuda()
    choose_graphs("auto", model)
    features_NTF = torch.randn(2, 96, model.config.encoder.num_mel_bins)
    lengths_N = torch.tensor([96, 80])
    for _ in range(4):
        before_NTE, _ = encode_padded(model, features_NTF, lengths_N, "bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after_NTE, _ = encode_padded(model, features_NTF, lengths_N, "bfloat16")
    choose_graphs("off", model)
    expected_NTE, _ = encode_padded(model, features_NTF, lengths_N, "bfloat16")
    frames = expected_NTE.size(1)  # the graph has more, of padding
    assert (after_NTE[:, :frames] - expected_NTE)[0].norm() < 0.02 * expected_NTE[0].norm()
    assert (after_NTE - before_NTE)[0].norm() > 0.05 * expected_NTE[0].norm()


@pytest.mark.gpu
def test_searches_find_the_same_with_graphs() -> None:
    torch.manual_seed(0)
    model = tiny_model(tiny_conformer()).eval().cuda()
    search = build_search(model, DecodeConfig())
    features_NTF = torch.randn(3, 160, model.config.encoder.num_mel_bins)
    lengths_N = torch.tensor([160, 131, 90])
    expected = search(*encode_padded(model, features_NTF, lengths_N))
    choose_graphs("auto", model)
    for _ in range(4):
        found = search(*encode_padded(model, features_NTF, lengths_N))
    assert [each[0].symbols for each in found] == [each[0].symbols for each in expected]
