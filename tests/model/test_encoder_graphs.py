"""Encoders in CUDA graphs against the same encoders without, and the kernels that need graphs."""

from __future__ import annotations

import copy
import dataclasses
import logging
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from pruned_rnnt.model import encoder_graphs, side_branch
from pruned_rnnt.model.conformer import Conformer, ConformerConfig
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.encoder_graphs import EncoderGraphs
from pruned_rnnt.model.fastconformer import FastConformer
from pruned_rnnt.model.lora import LoraConfig, add_adapters
from pruned_rnnt.model.zipformer import Zipformer
from pruned_rnnt.model.zipformer.balancer import Balancer, _mean_limit
from pruned_rnnt.model.zipformer.config import MEDIUM
from pruned_rnnt.model.zipformer.schedule import Clock, Recorder
from pruned_rnnt.model.zipformer.scores import ByPosition, limit_scores, masked_softmax
from pruned_rnnt.model.zipformer.whiten import Whiten
from tests.model.zipformer_tiny import CAUSAL, TINY
from tests.tiny_models import tiny_conformer, tiny_fastconformer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def batch(lengths: list[int], bins: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(lengths), max(lengths), bins, generator=generator)
    return features.cuda(), torch.tensor(lengths)


def gradients(encoder: Encoder) -> Tensor:
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in encoder.parameters()
        ]
    )


def passes(
    encoder: Encoder, use_graphs: bool, batches: list[list[int]], precision: torch.dtype
) -> list[Tensor]:
    """Output and gradients of each batch, all from the same random numbers."""
    graphs = EncoderGraphs(encoder) if use_graphs else None
    results = []
    for index, lengths in enumerate(batches):
        features, frame_counts = batch(lengths, encoder.config.num_mel_bins, index)
        encoder.zero_grad(set_to_none=True)
        encoder.set_step(100.0 * index)
        torch.manual_seed(index)
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            encoded, out_lengths = (graphs or encoder)(features, frame_counts)
        real = torch.arange(encoded.size(1)) < out_lengths[:, None]
        wanted = encoded[real.cuda()]
        generator = torch.Generator("cuda").manual_seed(1)
        weights = torch.randn(wanted.shape, generator=generator, device="cuda")
        (wanted * weights).sum().backward()
        results += [wanted.detach().clone(), gradients(encoder).clone()]
    return results


def on_grid(encoder: Encoder) -> list[list[int]]:
    """Shapes that need no padding draw the same random numbers with and without graphs."""
    more = encoder.receptive_field - 1
    lengths = ([64, 50, 9], [480, 211], [64, 33, 64], [480, 480])
    return [[length + more for length in each] for each in lengths]


def compare(encoder: Encoder, precision: torch.dtype, tolerance: float) -> None:
    other = copy.deepcopy(encoder)
    plain = passes(encoder, False, on_grid(encoder), precision)
    graphed = passes(other, True, on_grid(encoder), precision)
    for value, reference in zip(graphed, plain, strict=True):
        assert (value - reference).norm() <= tolerance * reference.norm()
    for value, reference in zip(other.buffers(), encoder.buffers(), strict=True):
        assert torch.equal(value, reference)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("precision", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)]
)
def test_zipformer_in_graphs_trains_as_without(
    causal: bool, precision: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    compare(Zipformer(CAUSAL if causal else TINY).cuda().train(), precision, tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_conformer_in_graphs_trains_as_without(causal: bool) -> None:
    torch.manual_seed(0)
    chunks = {"causal": True, "chunk_sizes": (4, 8, -1), "random_first_chunk": True}
    # `compare` replays a graph of step 100 at step 300.
    chunks |= {"smallest_chunk_steps": 200}
    config = ConformerConfig(num_mel_bins=20, layers=2, dim=32, **(chunks if causal else {}))  # type: ignore[arg-type]
    compare(Conformer(config).cuda().train(), torch.float32, 1e-4)


@pytest.mark.parametrize("kind", ["conformer", "fastconformer", "zipformer"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_adapters_and_frozen_layers_in_graphs(kind: str, precision: torch.dtype) -> None:
    torch.manual_seed(0)
    encoder: Encoder
    if kind == "conformer":
        encoder = Conformer(ConformerConfig(num_mel_bins=20, layers=2, dim=32))
    elif kind == "fastconformer":
        encoder = FastConformer(tiny_fastconformer(num_mel_bins=20))
    else:
        encoder = Zipformer(TINY)
    encoder = encoder.cuda().train()
    adapted = copy.deepcopy(encoder)
    first = next(name for name, _ in encoder.named_parameters()).partition(".")[0]
    for parameter in getattr(encoder, first).parameters():
        parameter.requires_grad_(False)
    add_adapters(adapted, LoraConfig(rank=2))
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_up"):
            torch.nn.init.normal_(parameter, std=0.1)
    for each in (encoder, adapted):
        # All variance of these untrained attention outputs is in one direction, so that the
        # penalty of their whiteners is mostly rounding errors (2% in plain float32).
        for module in each.modules():
            if isinstance(module, Whiten):
                module.limit = 1e9
        compare(each, precision, 1e-3 if precision == torch.float32 else 3e-2)
        assert all(p.grad is None for p in each.parameters() if not p.requires_grad)


@pytest.mark.parametrize("kind", ["conformer", "zipformer"])
def test_the_side_branch_changes_no_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of real sizes, which last long enough for a use that does not wait to come first."""
    shapes = [[1200] * 12, [800, 640, 333], [1200] * 12, [1200] * 12, [800, 640, 333]]
    results = []
    forks = 0
    fork = side_branch.SideBranch.fork

    def counted(branch: side_branch.SideBranch, *read: Tensor) -> AbstractContextManager[None]:
        nonlocal forks
        forks += 1
        return fork(branch, *read)

    monkeypatch.setattr(side_branch.SideBranch, "fork", counted)
    for used in (True, False):
        if not used:
            forks = 0
            monkeypatch.setattr(side_branch, "_current", lambda: None)
        torch.manual_seed(0)
        encoder: Encoder = (
            Conformer(ConformerConfig(layers=4, dim=256))
            if kind == "conformer"
            else Zipformer(MEDIUM)
        )
        results.append(passes(encoder.cuda().train(), True, shapes, torch.bfloat16))
        assert (forks > 0) == used
    for beside, alone in zip(*results, strict=True):
        assert torch.equal(beside, alone)


def test_padded_batches_have_the_output_of_their_utterances() -> None:
    torch.manual_seed(0)
    encoder = Zipformer(dataclasses.replace(TINY, dropout_scale=0.0)).cuda().train()
    off_grid = [[61, 40, 9], [475] * 70]
    plain = passes(copy.deepcopy(encoder), False, off_grid, torch.float32)[::2]
    graphed = passes(encoder, True, off_grid, torch.float32)
    for value, reference in zip(graphed[::2], plain, strict=True):
        assert (value - reference).norm() <= 1e-4 * reference.norm()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in graphed[1::2])


def test_a_batch_at_a_larger_shape_has_the_frames_of_its_own_one() -> None:
    torch.manual_seed(0)
    encoder = Conformer(tiny_conformer(dropout=0.0)).cuda().train()
    lengths = [[640, 500], [480, 470]]
    plain = passes(copy.deepcopy(encoder), False, lengths, torch.float32)
    graphed = passes(encoder, True, lengths, torch.float32)
    for value, reference in zip(graphed, plain, strict=True):
        assert (value - reference).norm() <= 1e-4 * reference.norm()
    graphs, frames = EncoderGraphs(encoder), []
    for each in lengths:
        features, counts = batch(each, encoder.config.num_mel_bins, 0)
        encoded, _ = graphs(features, counts)
        encoded.sum().backward()
        frames.append(encoded.size(1))
    assert graphs.captures.number == 1
    assert frames[0] > frames[1] >= int(encoder.output_lengths(torch.tensor(480)))


def test_a_batch_has_a_finer_shape_once_that_repays_its_capture() -> None:
    torch.manual_seed(0)
    encoder = Zipformer(dataclasses.replace(TINY, dropout_scale=0.0)).cuda().train()
    plain = copy.deepcopy(encoder)
    graphs = EncoderGraphs(encoder)
    captured = []
    features, lengths = batch([460] * 17, TINY.num_mel_bins, 460)
    expected, _ = plain(features, lengths)
    for _ in range(200):
        encoded, counts = graphs(features, lengths)
        encoded.sum().backward()
        captured.append(graphs.captures.number)
        if captured[-1] > captured[0]:
            break
    wanted = encoded[:, : int(counts[0])]
    assert (wanted - expected).norm() <= 1e-4 * expected.norm()
    assert captured[0] == captured[10] == captured[-1] - 1
    coarse, fine = (key[0][0] for key in graphs._graphs)
    assert fine < coarse


def test_gradients_of_several_passes_are_added() -> None:
    torch.manual_seed(0)
    encoder = Zipformer(dataclasses.replace(TINY, dropout_scale=0.0)).cuda().train()
    graphs = EncoderGraphs(encoder)
    features, lengths = batch([64, 64], TINY.num_mel_bins, 0)
    totals = []
    for count in (1, 2):
        encoder.zero_grad(set_to_none=True)
        for _ in range(count):
            torch.manual_seed(3)
            graphs(features, lengths)[0].sum().backward()
        totals.append(gradients(encoder).clone())
    assert torch.allclose(totals[1], 2 * totals[0], rtol=1e-3, atol=1e-4 * float(totals[0].norm()))


def test_a_second_batch_before_the_backward_pass_is_an_error() -> None:
    torch.manual_seed(0)
    graphs = EncoderGraphs(Zipformer(TINY).cuda().train())
    first, _ = graphs(*batch([64, 64], TINY.num_mel_bins, 0))
    second, _ = graphs(*batch([64, 80], TINY.num_mel_bins, 1))
    with pytest.raises(RuntimeError, match=r"call backward\(\) after each batch"):
        (first.sum() + second.sum()).backward()
    graphs(*batch([64, 64], TINY.num_mel_bins, 0))[0].sum().backward()


def test_evaluation_mode_runs_without_graphs() -> None:
    torch.manual_seed(0)
    encoder = Conformer(ConformerConfig(num_mel_bins=20, layers=1, dim=32, dropout=0.5)).cuda()
    graphs = EncoderGraphs(encoder.train())
    features, lengths = batch([71, 71], 20, 0)
    graphs(features, lengths)[0].sum().backward()
    encoder.eval()
    torch.testing.assert_close(graphs(features, lengths)[0], encoder(features, lengths)[0])


def test_least_recently_used_graph_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_graphs, "MOST_SHAPES", 2)
    torch.manual_seed(0)
    encoder = Zipformer(TINY).cuda().train()
    graphs = EncoderGraphs(encoder)
    for frames in (64, 80, 64, 96, 112, 64, 80):
        encoded, _ = graphs(*batch([frames], TINY.num_mel_bins, 0))
        encoded.sum().backward()
    assert len(graphs._graphs) == 2
    assert gradients(encoder).isfinite().all()


def test_cleared_graphs_are_captured_anew() -> None:
    torch.manual_seed(0)
    encoder = Zipformer(TINY).cuda().train()
    graphs = EncoderGraphs(encoder)
    for _ in range(2):
        encoded, _ = graphs(*batch([64, 80], TINY.num_mel_bins, 0))
        encoded.sum().backward()
        graphs.clear()
    assert not graphs._graphs
    assert gradients(encoder).isfinite().all()


def test_error_of_capture_is_logged_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    encoder = Zipformer(TINY).cuda().train()
    graphs = EncoderGraphs(encoder)

    def fail(*arguments: object) -> None:
        raise RuntimeError("a kernel that no graph can hold")

    monkeypatch.setattr(graphs, "_try_to_capture", fail)
    for _ in range(2):
        encoded, _ = graphs(*batch([64], TINY.num_mel_bins, 0))
        encoded.sum().backward()
    assert gradients(encoder).any()
    assert caplog.text.count("a kernel that no graph can hold") == 1


def test_hooks_inside_the_encoder_run(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    encoder = Zipformer(TINY).cuda().train()
    graphs = EncoderGraphs(encoder)
    graphs(*batch([64], TINY.num_mel_bins, 0))
    called = 0

    def count(*_: object) -> None:
        nonlocal called
        called += 1

    layer = next(m for m in encoder.modules() if isinstance(m, Whiten))
    layer.register_forward_hook(count)
    for _ in range(2):
        graphs(*batch([64], TINY.num_mel_bins, 0))
    assert called == 2
    assert caplog.text.count("has hooks") == 1


def recorded(clock: Clock) -> Recorder:
    clock.recorder = Recorder(DEVICE)
    return clock.recorder


def switched_gradient(
    module: Balancer | Whiten, x: Tensor, grad: Tensor, settings: list[float]
) -> Tensor:
    """The gradient of x with these settings on the device."""
    recorder = recorded(module.clock)
    x = x.detach().requires_grad_()
    y = module.train()(x)
    recorder.refresh([lambda: settings])
    y.backward(grad.clone())
    assert x.grad is not None
    return x.grad


def plain_gradient(module: Balancer | Whiten, x: Tensor, grad: Tensor) -> Tensor:
    x = x.detach().double().requires_grad_()
    module.clock.bernoulli = lambda probability: True  # type: ignore[method-assign]
    module.clock.recorder = None
    module.train()(x).backward(grad.double())
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("upper_half", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1, 5, 12), -1), ((3, 37, 500), -1), ((2, 40009, 24), -1), ((1, 8, 77, 5), 1)],
)
def test_balancer_that_the_device_switches(
    shape: tuple[int, ...], axis: int, upper_half: bool
) -> None:
    torch.manual_seed(0)
    module = Balancer(
        Clock(), channel_axis=axis, upper_half=upper_half, min_positive=0.45, max_positive=0.55
    )
    x = (
        torch.randn(shape, device=DEVICE)
        * torch.randn(shape[axis], device=DEVICE)
        .exp()
        .view([-1 if index == axis % len(shape) else 1 for index in range(len(shape))])
        + 0.2
    )
    grad = torch.randn(shape, device=DEVICE)
    settings = [1.0, _mean_limit(0.45), _mean_limit(0.55), *module._limits()[1]]
    balanced = switched_gradient(module, x, grad, settings)
    reference = plain_gradient(module, x, grad)
    assert (balanced - reference).norm() <= 1e-4 * reference.norm()
    assert not torch.equal(balanced, grad)
    assert torch.equal(switched_gradient(module, x, grad, [0.0] * 5), grad)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("mean", [3.0, 300.0])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("batch", "frames", "width"), [(1, 3, 32), (3, 37, 144), (2, 20011, 256)])
@pytest.mark.parametrize("limit", [1.01, 1e6])
def test_whitener_that_the_device_switches(
    dtype: torch.dtype,
    tolerance: float,
    mean: float,
    groups: int,
    batch: int,
    frames: int,
    width: int,
    limit: float,
) -> None:
    """Also where the mean is much larger than the deviation."""
    torch.manual_seed(0)
    # As strong as the gradient, so that rounding the sum of both does not hide the push.
    module = Whiten(Clock(), limit, groups=groups, strength=1.0).cuda()
    x = torch.randn(batch, frames, width, device=DEVICE) @ torch.randn(width, width, device=DEVICE)
    x = (x + mean).to(dtype)
    grad = torch.randn(batch, frames, width, device=DEVICE).to(dtype)
    pushed = switched_gradient(module, x, grad, [0.0, 1.0, limit])
    over = bool(module.over_limit)
    module.over_limit.fill_(True)
    reference = plain_gradient(module, x, grad)
    assert bool(module.over_limit) == over == (limit < 2.0)
    push = reference - grad
    assert (pushed - grad - push).norm() <= tolerance * push.norm() + 1e-6
    # Within its limit, the whitener acts if the first number says so.
    module.over_limit.fill_(False)
    assert torch.equal(switched_gradient(module, x, grad, [0.0, 1.0, limit]), grad)
    assert not bool(module.over_limit)
    pushed_again = switched_gradient(module, x, grad, [1.0, 1.0, limit])
    assert torch.equal(pushed_again, pushed)


@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("switch", [0.0, 1.0])
def test_penalty_on_scores_that_the_device_switches(with_positions: bool, switch: float) -> None:
    torch.manual_seed(0)
    inputs = [15 * torch.randn(2, 3, 37, 37, device=DEVICE)]
    if with_positions:
        inputs += [torch.randn(2, 37, 12, device=DEVICE), 7 * torch.randn(3, 4, 74, device=DEVICE)]
    blocked = (torch.arange(37) >= torch.tensor([[37], [20]]))[:, None, None].cuda()
    grad = torch.randn(inputs[0].shape, device=DEVICE)
    results = []
    for dtype in (torch.float32, torch.float64):
        clock = Clock()
        clock.bernoulli = lambda probability: switch > 0.0  # type: ignore[method-assign]
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        if dtype == torch.float32:
            recorder = recorded(clock)
        by_position = ByPosition(leaves[1], leaves[2]) if with_positions else None
        arguments = limit_scores(leaves[0], by_position, clock)
        if dtype == torch.float32:
            recorder.refresh(recorder.program)
        weights = masked_softmax(*arguments[:2], blocked, arguments[2])
        results.append(torch.autograd.grad(weights.one_NHTS, leaves, grad.to(dtype)))
    for fused, plain in zip(*results, strict=True):
        assert (fused - plain).norm() <= 1e-5 * plain.norm()


def test_new_graphs_continue_with_the_same_numbers() -> None:
    """As after a restart: the random state does not depend on when shapes are captured."""
    torch.manual_seed(0)
    encoder = Zipformer(TINY).cuda().train()
    graphs, restarted = EncoderGraphs(encoder), EncoderGraphs(encoder)
    buffers = {name: value.clone() for name, value in encoder.named_buffers()}
    results = []
    for second in (graphs, restarted):
        torch.manual_seed(1)
        encoder.load_state_dict(buffers, strict=False)
        values = []
        for index, frames in enumerate((64, 80, 64, 80)):
            encoder.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                used = graphs if index < 2 else second
                encoded, _ = used(*batch([frames, frames], TINY.num_mel_bins, index))
            encoded.float().square().sum().backward()
            values += [encoded.detach().clone(), gradients(encoder)]
        results.append(values)
    for first, other in zip(*results, strict=True):
        assert torch.equal(first, other)


def test_the_cost_of_graphs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pruned_rnnt")
    passes(Zipformer(TINY).cuda().train(), True, [[64, 50], [480, 211], [64, 9]], torch.bfloat16)
    lines = [line for line in caplog.messages if line.startswith("CUDA graphs of the encoder")]
    assert [" 1 captured in " in lines[0], " 2 captured in " in lines[1]] == [True, True]
    assert len(lines) == 2
    assert "memory of all 0.00 GiB" not in lines[1]
