"""Training: exact resumption, a gradient for every parameter, schedules, casts."""

from __future__ import annotations

import copy
import dataclasses
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pruned_rnnt.model import cast_parameters
from pruned_rnnt.model.zipformer import Zipformer, ZipformerConfig
from pruned_rnnt.model.zipformer import layer as layer_module
from pruned_rnnt.model.zipformer.frames import Chunking, frames_at_rate, relative_positions
from pruned_rnnt.model.zipformer.layer import LayerMasks
from pruned_rnnt.model.zipformer.schedule import Clock, ramp
from pruned_rnnt.model.zipformer.whiten import Whiten
from tests.model.zipformer_tiny import CAUSAL, TINY, ragged_batch


def one_step(encoder: Zipformer, optimiser: torch.optim.Optimizer, step: int) -> float:
    batch, lengths, _ = ragged_batch([60, 41])
    encoder.set_step(step)
    encoded, frames = encoder(batch, lengths)
    loss = sum(
        (encoded[n, :count] * torch.linspace(-1, 1, encoded.size(-1))).square().mean()
        for n, count in enumerate(frames.tolist())
    )
    assert isinstance(loss, Tensor)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.item()


def optimiser_of(encoder: Zipformer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(encoder.parameters(), lr=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("config", [TINY, CAUSAL])
def test_training_resumes_exactly(config: ZipformerConfig) -> None:
    """From the state dicts, the state of torch's generator and the step."""
    torch.manual_seed(0)
    encoder = Zipformer(config).train()
    optimiser = optimiser_of(encoder)
    for step in range(4):
        one_step(encoder, optimiser, 1500 * step)
    file = io.BytesIO()
    saved: dict[str, Any] = {
        "encoder": encoder.state_dict(),
        "optimiser": optimiser.state_dict(),
        "generator": torch.get_rng_state(),
    }
    torch.save(saved, file)
    expected = [one_step(encoder, optimiser, 1500 * step) for step in range(4, 10)]

    file.seek(0)
    loaded = torch.load(file)
    again = Zipformer(config).train()
    again.load_state_dict(loaded["encoder"])
    optimiser = optimiser_of(again)
    optimiser.load_state_dict(loaded["optimiser"])
    torch.set_rng_state(loaded["generator"])
    assert [one_step(again, optimiser, 1500 * step) for step in range(4, 10)] == expected
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    flags = [module.over_limit.item() for module in again.modules() if isinstance(module, Whiten)]
    assert True in flags
    assert False in flags


@pytest.mark.parametrize("config", [TINY, CAUSAL])
def test_every_parameter_has_a_gradient_on_every_batch(config: ZipformerConfig) -> None:
    """Distributed training needs all of them in the graph, also if branches are skipped."""
    torch.manual_seed(2)
    encoder = Zipformer(config).train()
    batch, lengths, _ = ragged_batch([40, 31, 40])
    for step in [0, 0, 0, 300, 3000, 60000]:
        encoder.zero_grad()
        encoder.set_step(step)
        encoder(batch, lengths)[0].square().mean().backward()
        for name, parameter in encoder.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_outputs_vary_more_early_in_training() -> None:
    """Passes over one batch differ by skips and dropout, whose rates decrease."""
    encoder = Zipformer(TINY).train()
    batch, lengths, _ = ragged_batch([60] * 8)
    spread = []
    for step in (0, 100_000):
        torch.manual_seed(3)
        encoder.set_step(step)
        with torch.no_grad():
            outputs = torch.stack([encoder(batch, lengths)[0] for _ in range(8)])
        spread.append(outputs.std(dim=0).mean().item())
    assert spread[0] > 1.2 * spread[1] > 0


def test_training_pass_updates_whiten_probabilities() -> None:
    encoder = Zipformer(TINY)
    whiteners = [module for module in encoder.modules() if isinstance(module, Whiten)]
    for index, whitener in enumerate(whiteners):
        whitener.over_limit.fill_(index % 2 == 0)
    encoder.train()(torch.randn(1, 50, TINY.num_mel_bins), torch.tensor([50]))
    assert {whitener.probability for whitener in whiteners[::2]} == {0.25}
    assert {whitener.probability for whitener in whiteners[1::2]} == {0.025}


def test_layer_with_all_branches_skipped() -> None:
    """Only the first feed-forward module is never skipped."""
    layer = layer_module.ZipformerLayer(Clock(), TINY.stack(0), causal=False, skip=0.0).train()
    begin = torch.randn(2, 6, TINY.dims[0])
    positions = relative_positions(0, 6, TINY.position_dim, begin)
    frames = frames_at_rate(torch.tensor([6, 6]), 6, 1, Chunking(), positions)
    zeros = torch.zeros(2, 1, 1)
    hidden = torch.randint(0, 2, (2, 1, layer.hidden_dims[0])) * 2.0
    masks = LayerMasks(*[zeros] * 5)
    with torch.no_grad():
        out, _ = layer(begin, frames, None, masks._replace(hidden1=hidden))
        clean, _ = layer(begin, frames, None, masks)
        around, _ = layer(begin, frames, None, masks._replace(bypass=zeros))
        middle = torch.lerp(
            begin, begin + layer.feed_forward1(begin, None), layer.bypass_mid.bypass_scale
        )
        expected = torch.lerp(begin, layer.norm(middle), layer.bypass.bypass_scale)
    torch.testing.assert_close(clean, expected)
    torch.testing.assert_close(around, begin)
    assert not torch.equal(out, clean)


def test_deepcopy_has_its_own_clock() -> None:
    encoder = Zipformer(TINY)
    other = copy.deepcopy(encoder)
    other.set_step(7)
    assert (encoder.clock.step, other.clock.step) == (0.0, 7.0)
    clocks = {id(module.clock) for module in other.modules() if hasattr(module, "clock")}
    assert clocks == {id(other.clock)}


def bypasses(encoder: Zipformer) -> list[Any]:
    """The bypasses of whole layers."""
    return [module for name, module in encoder.named_modules() if name.endswith(".bypass")]


def test_warm_up_phases_layers_in_one_by_one() -> None:
    skips = [module.skip for module in bypasses(Zipformer(TINY))]
    begins = [skip.points[0] for skip in skips]
    ends = [skip.points[1] for skip in skips]
    phase = TINY.warm_up_steps / 5
    assert [step for step, _ in begins] == [
        pytest.approx(phase * at) for at in (1.0, 2.0, 2.5, 3.0, 4.0)
    ]
    assert [step for step, _ in ends] == [
        pytest.approx(phase * at) for at in (2.0, 2.5, 3.0, 4.0, 5.0)
    ]
    assert {value for _, value in begins} == {0.5}
    assert [value for _, value in ends] == [
        pytest.approx(0.035 * rate**0.5) for rate in (1, 2, 2, 4, 2)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_training_under_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    encoder = Zipformer(CAUSAL).train()
    batch, lengths, _ = ragged_batch([50, 50])
    for step in range(3):
        encoder.set_step(step)
        with torch.autocast("cpu", dtype=dtype):
            encoded, _ = encoder(batch, lengths)
        encoded.square().mean().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all(), name


def cast_as_on_gpu(monkeypatch: pytest.MonkeyPatch, on_gpu: bool = True) -> None:
    monkeypatch.setattr(cast_parameters, "should_avoid_cudnn_replanning", lambda x: on_gpu)


def test_cast_parameters_equal_autocast_and_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Zipformer(TINY).eval()
    batch, lengths, _ = ragged_batch([50, 41])
    own = dict(encoder.named_parameters())
    results = []
    for joint in (True, False):
        encoder.zero_grad()
        cast_as_on_gpu(monkeypatch, joint)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            encoded, _ = encoder(batch, lengths)
        assert all(own[name] is parameter for name, parameter in encoder.named_parameters())
        encoded.square().mean().backward()
        gradients = [parameter.grad for parameter in own.values() if parameter.grad is not None]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        results.append((encoded, gradients))
    (encoded, gradients), (encoded_by_autocast, expected) = results
    assert torch.equal(encoded, encoded_by_autocast)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.01 * float(want.abs().max()))


def test_cast_parameters_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cast_as_on_gpu(monkeypatch)
    encoder = Zipformer(TINY).train()
    batch, lengths, _ = ragged_batch([50, 41])

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(layer_module.Bypass, "forward", fail)
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        encoder(batch, lengths)
    assert all(parameter.is_leaf for parameter in encoder.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_on_gpu_is_reproducible(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a scaled loss, as float16 needs."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    batch, lengths, _ = ragged_batch([50, 44])
    runs = []
    for _ in range(2):
        torch.manual_seed(4)
        encoder = Zipformer(CAUSAL).train().cuda()
        for step in range(4):
            encoder.set_step(step * 2000)
            with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
                encoded, _ = encoder(batch.cuda(), lengths)
            (encoded.square().mean() * 256).backward()
        gradients = [parameter.grad for parameter in encoder.parameters()]
        assert all(gradient.isfinite().all() for gradient in gradients)
        runs.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert torch.equal(runs[0], runs[1])


def test_schedules_scale_with_the_warm_up() -> None:
    quick = Zipformer(dataclasses.replace(TINY, warm_up_steps=100, dropout_scale=0.5))
    quick.set_step(50)
    assert quick.clock.value(ramp(0.0, 1.0, 4000)) == pytest.approx(0.5)
    assert quick.clock.dropout_rate(layer_module.DROPOUT) == pytest.approx(0.5 * 0.28)
    assert [module.skip for module in bypasses(quick)] == [
        module.skip for module in bypasses(Zipformer(TINY))
    ]


def test_dropout_scale_zero_disables_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without random decisions per batch, training then equals evaluation."""
    monkeypatch.setattr(Clock, "bernoulli", lambda clock, probability: False)
    batch, lengths, _ = ragged_batch([60, 41])
    for scale, same in ((0.0, True), (0.2, False)):
        encoder = Zipformer(dataclasses.replace(TINY, dropout_scale=scale)).train()
        with torch.no_grad():
            trained = encoder(batch, lengths)[0]
            evaluated = encoder.eval()(batch, lengths)[0]
        assert torch.allclose(trained, evaluated, atol=1e-5) == same


@pytest.mark.parametrize("changes", [{"warm_up_steps": 0}, {"dropout_scale": 1.5}])
def test_invalid_schedules_raise(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_refused(reentrant: bool) -> None:
    """It would repeat the dropout masks, but not the decisions that the clock draws."""
    torch.manual_seed(0)
    encoder = Zipformer(TINY).train()
    layer = encoder.encoder._layers[0]
    forward = layer.forward
    layer.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=reentrant)  # type: ignore[method-assign]
    batch, lengths, _ = ragged_batch([60, 41])
    encoded, _ = encoder(batch, lengths)
    with pytest.raises(RuntimeError, match="use no activation checkpointing"):
        encoded.sum().backward()


@pytest.mark.parametrize("name", ["chunk_sizes", "left_contexts"])
def test_an_empty_list_of_chunks_stands_for_the_one_of_evaluation(name: str) -> None:
    config = dataclasses.replace(CAUSAL, chunk_sizes=(8,), left_contexts=(16,))
    batch, lengths, _ = ragged_batch([60, 41])
    outputs = []
    for each in (config, dataclasses.replace(config, **{name: ()})):
        torch.manual_seed(0)
        outputs.append(Zipformer(each).train()(batch, lengths)[0])
    assert torch.equal(*outputs)
