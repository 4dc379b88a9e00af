"""Zipformer models on a CUDA device: gradients, mixed precision, streams."""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.encoder_kinds import stream_encoder
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.model.zipformer import ZipformerConfig
from pruned_rnnt.model.zipformer.schedule import Clock
from pruned_rnnt.model.zipformer.whiten import Whiten
from pruned_rnnt.train.optim.optimiser import OptimiserConfig, build_optimiser
from tests.model.zipformer_tiny import CAUSAL, TINY, ragged_batch, sine_encoder
from tests.tiny_models import tiny_conformer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCAB = 11
CONFORMER = tiny_conformer(
    num_mel_bins=CAUSAL.num_mel_bins, layers=2, feedforward_dim=24, kernel_size=5, causal=True
)


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def make_model(encoder: EncoderConfig) -> TransducerModel:
    torch.manual_seed(0)
    config = ModelConfig(encoder=encoder, predictor=PredictorConfig(dim=8), joiner_dim=16)
    return TransducerModel(config, VOCAB, LossConfig())


def make_targets() -> tuple[Tensor, Tensor]:
    targets = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]], dtype=torch.int32)
    return targets, torch.tensor([4, 3])


@pytest.mark.parametrize("config", [TINY, CAUSAL], ids=["offline", "causal"])
def test_evaluation_gradients_match_cpu(config: ZipformerConfig) -> None:
    """In evaluation mode, because random numbers differ between devices."""
    here = sine_encoder(config)
    there = copy.deepcopy(here).to(DEVICE)
    batch, lengths, _ = ragged_batch([90, 61])
    for encoder, features in ((here, batch), (there, batch.to(DEVICE))):
        encoded, frames = encoder(features, lengths)
        total = sum(encoded[n, : int(count)].square().mean() for n, count in enumerate(frames))
        assert isinstance(total, Tensor)
        total.backward()
    theirs = dict(there.named_parameters())
    for name, parameter in here.named_parameters():
        if parameter.grad is None:
            assert theirs[name].grad is None
            continue
        scale = float(parameter.grad.abs().max()) + 1e-6
        torch.testing.assert_close(
            theirs[name].grad.cpu(), parameter.grad, rtol=0, atol=2e-3 * scale, msg=name
        )


@pytest.mark.parametrize(
    ("dtype", "summary", "tolerance"),
    [(torch.float64, max, 1e-6), (torch.bfloat16, statistics.median, 0.1)],
    ids=["wide", "low"],
)
def test_training_gradients_match_cpu(
    dtype: torch.dtype,
    summary: Callable[[list[float]], float],
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all balancers, whiteners and limits, and without random numbers of the device.

    In float64, rounding moves no statistic across a limit. In bfloat16, gradients of some
    parameters, such as those of attention scores, are mostly rounding, so the median is compared.
    """
    monkeypatch.setattr(Clock, "bernoulli", lambda clock, probability: probability > 0.0)
    # Make the CPU join utterances for the balancers as a GPU does.
    monkeypatch.setattr(
        "pruned_rnnt.model.zipformer.embedding.should_avoid_cudnn_replanning", lambda x: True
    )
    low = dtype == torch.bfloat16
    here = sine_encoder(dataclasses.replace(TINY, dropout_scale=0.0)).train()
    batch, lengths, _ = ragged_batch([90, 61], garbage=0.0)
    if not low:
        here, batch = here.to(dtype), batch.to(dtype)
    there = copy.deepcopy(here).to(DEVICE)
    for encoder, features in ((here, batch), (there, batch.to(DEVICE))):
        encoder.set_step(5000)
        device = features.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=low):
            encoded, _ = encoder(features, lengths)
        encoded.to(batch.dtype).square().mean().backward()
    theirs = dict(there.named_parameters())
    differences = [
        float((theirs[name].grad.cpu() - parameter.grad).norm() / parameter.grad.norm())
        for name, parameter in here.named_parameters()
        if parameter.dim() >= 2  # sums over all frames cancel too much in vectors
    ]
    assert summary(differences) <= tolerance


@pytest.mark.parametrize("shared_bytes", [2**16, 2**18], ids=["small", "large"])
def test_whiteners_of_small_and_large_gpus_equal_the_formula(
    shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, whose tiles have 32 or 64 rows and channels by the GPU's shared memory."""
    kernels = pytest.importorskip("pruned_rnnt.model.kernels.whiten")
    monkeypatch.setattr(kernels, "shared_bytes", lambda: shared_bytes)
    monkeypatch.setattr(Clock, "bernoulli", lambda clock, probability: True)
    torch.manual_seed(0)
    x = (torch.randn(150, 200) @ torch.randn(200, 200) + 5.0).double().requires_grad_()
    grad = torch.randn(150, 200)
    module = Whiten(Clock(), limit=1.0, strength=0.3, groups=2).train()
    module(x).backward(grad.double())
    expected = x.grad
    assert expected is not None
    changed = grad.to(DEVICE)
    kernels.whiten_gradient(
        x.detach().float().to(DEVICE),
        changed,
        torch.tensor([1.0, 1.0, 1.0], device=DEVICE),
        torch.ones((), dtype=torch.bool, device=DEVICE),
        groups=2,
        strength=0.3,
    )
    assert float((expected - grad).norm()) > 0.1 * float(grad.norm())
    torch.testing.assert_close(changed.cpu().double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_steps_stay_finite(dtype: torch.dtype) -> None:
    model = make_model(dataclasses.replace(CAUSAL, warm_up_steps=4)).to(DEVICE).train()
    optimiser = build_optimiser(model, OptimiserConfig(name="scaled_adam", learning_rate=0.02))
    batch, lengths, _ = ragged_batch([90, 61])
    targets, target_lengths = make_targets()
    totals = []
    for step in range(12):
        optimiser.zero_grad()
        with torch.autocast(DEVICE, dtype=dtype, enabled=dtype != torch.float32):
            losses = model(batch.to(DEVICE), lengths, targets.to(DEVICE), target_lengths, step)
        losses.objective.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
        totals.append(float(losses.total.sum()))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert min(totals[6:]) < totals[0]


@pytest.mark.parametrize("config", [CAUSAL, CONFORMER], ids=["zipformer", "conformer"])
@torch.inference_mode()
def test_streaming_equals_whole_utterances(config: EncoderConfig) -> None:
    model = make_model(config).eval().to(DEVICE)
    batch, lengths, _ = ragged_batch([131, 90])
    features = batch.to(DEVICE)
    chunk, left = config.stream_sizes
    whole, frames = model.encode(features, lengths)
    stream = stream_encoder(model.encoder, chunk, left)
    state, pieces = stream.start(2), []
    for begin in range(0, features.size(1), stream.shift):
        part = features[:, begin : begin + stream.input_frames]
        part = torch.nn.functional.pad(part, (0, 0, 0, stream.input_frames - part.size(1)))
        left_over = (lengths - begin).clamp(0, stream.input_frames)
        encoded, state = stream(part, state, left_over)
        pieces.append(encoded)
    streamed = torch.cat(pieces, dim=1)
    for n, count in enumerate(frames.tolist()):
        torch.testing.assert_close(streamed[n, :count], whole[n, :count], rtol=0, atol=1e-4)
    recogniser = StreamDecoder(model, new_greedy_search(model), chunk, left)
    there = recogniser.recognise(features, lengths)
    model.cpu()
    here = StreamDecoder(model, new_greedy_search(model), chunk, left).recognise(batch, lengths)
    for one, other in zip(there, here, strict=True):
        assert one.score == pytest.approx(other.score, rel=1e-3, abs=1e-3)
