"""The FastConformer on a GPU: against a CPU, with and without fused kernels, bf16, CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.model.encoder_graphs import EncoderGraphs
from pruned_rnnt.model.fastconformer import FastConformer
from pruned_rnnt.model.kernels import available
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from tests.tiny_models import tiny_fastconformer

pytestmark = pytest.mark.gpu

BINS = 24
KINDS: dict[str, dict[str, object]] = {
    "batch": {},
    "layer": {"convolution_norm": "layer", "bias": False, "scale_input": False},
    "window": {"window": (3, 2)},
    "causal": {"causal": True, "feature_norm": "none", "convolution_norm": "layer"},
}
BATCHES = ([96, 41, 8], [200, 77, 199], [64, 64, 64])


@pytest.fixture(autouse=True)
def exact_and_with_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    available.set_mode("auto")
    yield
    available.set_mode("auto")


def encoder_of(kind: str) -> FastConformer:
    torch.manual_seed(0)
    config = tiny_fastconformer(num_mel_bins=BINS, layers=2, dropout=0.0, **KINDS[kind])
    encoder = FastConformer(config)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.2)
    return encoder.train()


def batch(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(lengths), max(lengths), BINS, generator=generator)
    return features, torch.tensor(lengths)


def passes(encoder: nn.Module, call: object, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Outputs of the real frames, gradients of all parameters, and buffers, in float64."""
    device = next(encoder.parameters()).device
    found = []
    for seed, lengths in enumerate(BATCHES):
        features, counts = batch(lengths, seed)
        encoder.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            encoded, frames = call(features.to(device), counts)  # type: ignore[operator]
        real = torch.arange(encoded.size(1)) < frames.cpu()[:, None]
        wanted = encoded[real.to(device)]
        generator = torch.Generator().manual_seed(9)
        weights = torch.randn(wanted.shape, generator=generator).to(device)
        (wanted.float() * weights).sum().backward()
        grads = [p.grad.flatten() for p in encoder.parameters() if p.grad is not None]
        assert len(grads) == len(list(encoder.parameters()))
        found += [wanted.detach(), torch.cat(grads)]
    found += [buffer.float() for buffer in encoder.buffers()]
    return [each.double().cpu() for each in found]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert (one - other).norm() <= tolerance * (other.norm() + 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_match_a_cpu(kind: str) -> None:
    here = encoder_of(kind)
    there = copy.deepcopy(here).cuda()
    assert_near(passes(there, there), passes(here, here), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_kernels_match_plain_torch(kind: str) -> None:
    fused = encoder_of(kind).cuda()
    plain = copy.deepcopy(fused)
    found = passes(fused, fused)
    available.set_mode("off")
    assert_near(found, passes(plain, plain), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_float32(kind: str) -> None:
    half = encoder_of(kind).cuda()
    full = copy.deepcopy(half)
    expected = passes(full, full)
    found = passes(half, half, torch.bfloat16)
    assert_near(found, expected, 0.1)
    available.set_mode("off")
    plain = copy.deepcopy(half)
    for parameter, start in zip(plain.buffers(), encoder_of(kind).buffers(), strict=True):
        parameter.copy_(start)
    assert_near(passes(plain, plain, torch.bfloat16), expected, 0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"]
)
def test_graphs_train_as_without(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    graphed = encoder_of(kind).cuda()
    eager = copy.deepcopy(graphed)
    found = passes(graphed, EncoderGraphs(graphed), dtype)
    assert_near(found, passes(eager, eager, dtype), tolerance)


@pytest.mark.parametrize("durations", [(), (0, 1, 2, 3, 4)], ids=["rnnt", "tdt"])
@pytest.mark.parametrize("loss", ["full", "pruned"])
def test_a_training_step_matches_a_cpu(loss: str, durations: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=tiny_fastconformer(num_mel_bins=BINS, dropout=0.0),
        predictor=PredictorConfig(dim=8),
        joiner_dim=16,
    )
    options = LossConfig(kind=loss, durations=durations, ctc_scale=0.2)  # type: ignore[arg-type]
    here = TransducerModel(config, 11, options).train()
    there = copy.deepcopy(here).cuda()
    targets = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]], dtype=torch.int32)
    results = []
    for model in (here, there):
        device = next(model.parameters()).device
        features, lengths = batch([120, 90], 1)
        texts = targets.to(device), torch.tensor([4, 3])
        losses = model(features.to(device), lengths, *texts, step=0)
        losses.objective.backward()
        grads = [p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None]
        results.append([losses.total.detach().cpu().double(), torch.cat(grads).double()])
    assert_near(results[1], results[0], 1e-3)
