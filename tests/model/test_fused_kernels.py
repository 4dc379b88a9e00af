"""Fused kernels of the encoder against plain torch in float64, and a Zipformer with and without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.attention import rotary_angles, rotated_heads
from pruned_rnnt.model.conformer import Conformer
from pruned_rnnt.model.depthwise import depthwise
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.gated_depthwise import gate
from pruned_rnnt.model.kernels import available
from pruned_rnnt.model.layer_norm import LayerNorm
from pruned_rnnt.model.linear import Linear
from pruned_rnnt.model.predictor import PredictorConfig, StatelessPredictor
from pruned_rnnt.model.subsampling_convolutions import WideConv2d, depthwise_maps
from pruned_rnnt.model.zipformer import Zipformer, attention
from pruned_rnnt.model.zipformer.activation import Kind, Swoosh, SwooshLinear
from pruned_rnnt.model.zipformer.embedding import with_branch
from pruned_rnnt.model.zipformer.gradient import grad_towards_limits
from pruned_rnnt.model.zipformer.norm import BiasNorm
from pruned_rnnt.model.zipformer.residual import Bypass, add_branch, begin_stream
from pruned_rnnt.model.zipformer.schedule import Clock
from pruned_rnnt.model.zipformer.scores import ByPosition, SharedWeights, masked_softmax
from pruned_rnnt.model.zipformer.stack import Downsample
from tests.model.zipformer_tiny import CAUSAL, TINY
from tests.tiny_models import tiny_conformer

pytestmark = pytest.mark.gpu

# Sequences and frames: one frame, no multiple of anything, longer than a tile.
SHAPES = ((1, 1), (3, 37), (2, 1031))
Function = Callable[..., Tensor | tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def mode() -> Iterator[None]:
    available.set_mode("auto")
    yield
    available.set_mode("auto")


def check(function: Function, *inputs: Tensor, tolerance: float = 2e-6) -> None:
    """Values and gradients in float32 with kernels, against those in float64 without."""
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [
            x.to("cuda", dtype).requires_grad_() if x.is_floating_point() else x.cuda()
            for x in inputs
        ]
        outputs = function(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        torch.manual_seed(7)
        weights = [torch.randn(x.shape, dtype=torch.float64).cuda().to(dtype) for x in outputs]
        total = sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True))
        wanted = [x for x in leaves if x.requires_grad]
        gradients = torch.autograd.grad(total, wanted)
        results.append([x.double() for x in (*outputs, *gradients)])
    for fused, plain in zip(*results, strict=True):
        assert (fused - plain).norm() <= tolerance * (plain.norm() + 1e-3)


def test_bias_gradients_of_expanded_gradients() -> None:
    """The gradient of a sum over frames has the stride 0 there."""
    torch.manual_seed(0)
    layer = Linear(20, 24).cuda()

    def run(x: Tensor, bias: Tensor, weights: Tensor) -> Tensor:
        layer._parameters.update(weight=layer.weight.detach().to(x), bias=bias)  # type: ignore[dict-item]
        return layer(x).sum(1) * weights

    check(run, torch.randn(3, 37, 20), torch.randn(24), torch.randn(3, 24))


@pytest.mark.parametrize("kind", ["L", "R"])
@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_swoosh_linear(kind: Kind, batch: int, frames: int) -> None:
    torch.manual_seed(0)
    layer = SwooshLinear(48, 20, kind, 1.0).cuda()
    x = 5 * torch.randn(batch, frames, 48)
    # A slice of a wider mask, as layers get it.
    mask = (torch.rand(batch, 1, 100) > 0.3).float()[..., 10:58] / 0.7

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layer._parameters.update(weight=weight, bias=bias)  # type: ignore[dict-item]
        return layer(x, mask.cuda())

    check(run, x, torch.randn(20, 48), torch.randn(20))


@pytest.mark.parametrize("shape", [(1, 5, 7, 3), (2, 8, 33, 19)])
def test_swoosh_of_maps_in_either_memory_order(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = 5 * torch.randn(shape)
    check(Swoosh("R"), x)
    check(lambda x: Swoosh("L")(x.contiguous(memory_format=torch.channels_last)), x)


def test_swoosh_of_extreme_values_is_finite() -> None:
    x = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30], device="cuda").requires_grad_()
    y = Swoosh("L")(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(("streams", "readers"), [(1, 1), (1, 2), (3, 2)])
def test_begin_stream_under_autocast(streams: int, readers: int) -> None:
    def run(x: Tensor, *, exact: bool) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
            parts = begin_stream(x, streams, readers)
        return sum((3.0**place * part.float()).sum() for place, part in enumerate(parts))  # type: ignore[return-value]

    x = torch.randn(3, 37, 20, device="cuda", requires_grad=True)
    fused, exact = (torch.autograd.grad(run(x, exact=e), x)[0] for e in (False, True))
    assert (fused - exact).norm() <= 1e-6 * exact.norm()


# Heads and channels of a head; 12 is no power of two.
HEADS = ((4, 12), (1, 32), (8, 4))


@pytest.mark.parametrize(("heads", "width"), HEADS)
@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_dot_products(batch: int, frames: int, heads: int, width: int) -> None:
    torch.manual_seed(0)
    channels = heads * width

    def run(projected: Tensor) -> Tensor:
        query, key = projected[..., :channels], projected[..., channels : 2 * channels]
        return attention.dot_products(query, key, heads)

    check(run, torch.randn(batch, frames, 2 * channels + 16))


@pytest.mark.parametrize(("heads", "width"), HEADS)
@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_weighted_sums(batch: int, frames: int, heads: int, width: int) -> None:
    torch.manual_seed(0)
    weights = torch.rand(batch, heads, frames, frames)
    check(attention.weighted_sums, weights, torch.randn(batch, frames, heads * width))


@pytest.mark.parametrize("width", [20, 144])
@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_gate_of_a_slice(batch: int, frames: int, width: int) -> None:
    torch.manual_seed(0)

    def run(x: Tensor, projected: Tensor) -> Tensor:
        return attention.gated(x, projected[..., width:])

    check(run, torch.randn(batch, frames, width), torch.randn(batch, frames, 2 * width))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("shape", [(1, 128, 1, 1), (2, 20, 9, 5), (1, 136, 133, 19)])
def test_branch_of_maps(shape: tuple[int, ...], joined: bool) -> None:
    """With numbers for each sequence, or for each frame of joined utterances."""
    torch.manual_seed(0)
    batch, _, frames, _ = shape
    keep = torch.rand((1, 1, frames, 1) if joined and batch == 1 else (batch, 1, 1, 1))

    def run(x: Tensor, branch: Tensor) -> Tensor:
        return with_branch(x, branch, keep.to(x))

    check(run, torch.randn(shape), torch.randn(shape))


@pytest.mark.parametrize("shape", [(1, 128, 1, 1), (2, 20, 9, 5), (1, 136, 133, 19)])
@pytest.mark.parametrize("size", [3, 7])
def test_depthwise_maps(shape: tuple[int, ...], size: int) -> None:
    torch.manual_seed(0)
    channels, padding = shape[1], size // 2

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return functional.conv2d(x, weight, bias, padding=padding, groups=channels)
        convolution = nn.Conv2d(channels, channels, size, groups=channels)
        convolution._parameters.update(weight=weight, bias=bias)  # type: ignore[dict-item]
        return depthwise_maps(convolution, x)

    weight = torch.randn(channels, 1, size, size)
    check(run, torch.randn(shape), weight, torch.randn(channels))


def test_swoosh_of_maps_keeps_padding_that_is_not_finite_out() -> None:
    torch.manual_seed(0)
    x_1CLF = torch.randn(1, 128, 37, 19, device="cuda")
    real_L = torch.rand(37, device="cuda") > 0.3
    x_1CLF[:, :, ~real_L] = torch.nan
    x_1CLF.requires_grad_()
    out_1CLF, again = Swoosh("R").of_maps(x_1CLF, real_L)
    assert torch.equal(out_1CLF, again())
    assert torch.equal(out_1CLF[:, :, real_L], Swoosh("R")(x_1CLF)[:, :, real_L])
    (of_x,) = torch.autograd.grad(out_1CLF, x_1CLF, torch.full_like(out_1CLF, 2.0))
    assert not out_1CLF[:, :, ~real_L].any()
    assert of_x[:, :, real_L].isfinite().all()


@pytest.mark.parametrize("shape", [(1, 32, 3, 3), (2, 5, 9, 11), (1, 32, 257, 39), (1, 70, 20, 11)])
@pytest.mark.parametrize("stride", [(1, 2), (2, 2)])
def test_wide_convolution(shape: tuple[int, ...], stride: tuple[int, int]) -> None:
    torch.manual_seed(0)
    convolution = WideConv2d(shape[1], 150, 3, stride=stride)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        convolution._parameters.update(weight=weight, bias=bias)  # type: ignore[dict-item]
        return convolution(x)

    with torch.backends.cudnn.flags(allow_tf32=False):
        check(run, torch.randn(shape), torch.randn(150, shape[1], 3, 3), torch.randn(150))


def test_grouped_convolution_of_the_predictor() -> None:
    torch.manual_seed(0)
    predictor = StatelessPredictor(PredictorConfig(dim=24), vocab_size=11).cuda()
    assert predictor.convolution is not None
    targets_NU = torch.randint(1, 11, (3, 7), device="cuda")

    def run(embedding: Tensor, weight: Tensor) -> Tensor:
        predictor.embedding._parameters.update(weight=embedding)  # type: ignore[dict-item]
        predictor.convolution._parameters.update(weight=weight)  # type: ignore
        if weight.dtype == torch.float32:
            return predictor.forward_targets(targets_NU)
        symbols = functional.pad(targets_NU, (1, 0))
        embedded = functional.pad(functional.embedding(symbols, embedding), (0, 0, 1, 0))
        mixed = functional.conv1d(embedded.transpose(1, 2), weight, groups=6)
        return torch.relu(mixed.transpose(1, 2))

    check(run, torch.randn(11, 24), torch.randn(24, 4, 2))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_add_branch(keep: bool, batch: int, frames: int) -> None:
    torch.manual_seed(0)
    kept = (torch.rand(batch, 1, 1) > 0.4).float().cuda()

    def run(x: Tensor, branch: Tensor) -> Tensor:
        return add_branch(x, branch, kept.to(x.dtype) if keep else None)[0]

    check(run, torch.randn(batch, frames, 24), torch.randn(batch, frames, 24))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_bypass(keep: bool, rate: int, batch: int, frames: int) -> None:
    torch.manual_seed(0)
    bypass = Bypass(Clock(), 20).cuda().eval()
    kept = (torch.rand(batch, 1, 1) > 0.4).float().cuda()

    def run(before: Tensor, after: Tensor, scale: Tensor) -> Tensor:
        bypass._parameters["bypass_scale"] = scale  # type: ignore[assignment]
        return bypass(before, after, kept.to(before.dtype) if keep else None, rate=rate)

    check(
        run,
        torch.randn(batch, frames * rate, 20),
        torch.randn(batch, frames, 20),
        torch.randn(20),
    )


@pytest.mark.parametrize("rate", [2, 3, 8])
@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_downsample(rate: int, batch: int, frames: int) -> None:
    """With groups that are whole, that end early, and that are beyond the utterance."""
    torch.manual_seed(0)
    downsample = Downsample(rate)
    lengths_N = torch.randint(2, frames * rate + 1, (batch,))

    def run(x: Tensor, bias: Tensor, lengths_N: Tensor) -> Tensor:
        downsample._parameters["bias"] = bias  # type: ignore[assignment]
        return downsample(x, lengths_N)

    # A weight near 1 has the gradient g - sum(p g), a small difference in float32.
    x = torch.randn(batch, frames * rate, 20)
    check(run, x, torch.randn(rate), lengths_N, tolerance=2e-5)


@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_bias_norm(batch: int, frames: int) -> None:
    torch.manual_seed(0)
    norm = BiasNorm(Clock(), 20).cuda().eval()

    def run(x: Tensor, bias: Tensor, log_scale: Tensor) -> Tensor:
        norm._parameters.update(bias=bias, log_scale=log_scale)  # type: ignore[dict-item]
        return norm(x)

    check(run, torch.randn(batch, frames, 20), torch.randn(20), torch.tensor(0.7), tolerance=5e-6)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("width", [20, 256])
@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_layer_norm(batch: int, frames: int, width: int, silu: bool) -> None:
    torch.manual_seed(0)
    norm = LayerNorm(width, silu=silu).cuda()

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        norm._parameters.update(weight=weight, bias=bias)  # type: ignore[dict-item]
        return norm(x)

    x = 3 * torch.randn(batch, frames, width) + 1
    check(run, x, torch.randn(width), torch.randn(width), tolerance=5e-6)


@pytest.mark.parametrize("silu", [False, True])
def test_layer_norm_before_a_product_has_its_dtype(silu: bool) -> None:
    """Output and gradient are those of float32 but for one rounding of the output."""
    torch.manual_seed(0)
    x = (3 * torch.randn(3, 37, 256, device="cuda") + 1).requires_grad_()
    norms = [LayerNorm(256, before_product=before, silu=silu).cuda() for before in (True, False)]
    with torch.autocast("cuda", torch.bfloat16):
        rounded, whole = (norm(x) for norm in norms)
    assert (rounded.dtype, whole.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(rounded.float(), whole, rtol=2**-8, atol=1e-6)
    grad = torch.randn_like(whole).bfloat16()
    of_rounded, of_whole = (
        torch.autograd.grad(y, x, grad.to(y.dtype))[0] for y in (rounded, whole)
    )
    torch.testing.assert_close(of_rounded, of_whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_rotated_heads(batch: int, frames: int, width: int) -> None:
    torch.manual_seed(0)

    # The angles are the same for both dtypes, so that only the rotation differs.
    def run(x: Tensor) -> tuple[Tensor, ...]:
        return rotated_heads(x, rotary_angles(frames, width, x.device, torch.float32))

    check(run, torch.randn(batch, frames, 3, 5, width))


@pytest.mark.parametrize("chunked", [False, True])
# Position widths of a head; 0: no scores by position; 3 is no power of two.
@pytest.mark.parametrize("width", [0, 4, 3])
@pytest.mark.parametrize(
    ("batch", "frames", "past"),
    # The last has more pairs of sequences and heads than an axis of a grid but the first may have.
    [(1, 1, 0), (2, 37, 0), (3, 20, 45), (40, 130, 0), (1, 700, 0), (33_000, 2, 0)],
)
def test_masked_softmax(chunked: bool, width: int, batch: int, frames: int, past: int) -> None:
    torch.manual_seed(0)
    seen = past + frames
    lengths = torch.randint(1, seen + 1, (batch,))
    blocked = (torch.arange(seen) >= lengths[:, None])[:, None, None]
    if chunked:
        blocked = blocked | (torch.arange(seen) // 8 > (torch.arange(frames)[:, None] + past) // 8)

    def run(scores: Tensor, projected: Tensor, positions_RHP: Tensor) -> SharedWeights:
        if not width:
            return masked_softmax(scores, None, blocked.cuda())
        by_position = ByPosition(projected[..., 16:], positions_RHP.permute(1, 2, 0))
        return masked_softmax(scores, by_position, blocked.cuda())

    scores = 3 * torch.randn(batch, 2, frames, seen)
    projected = torch.randn(batch, frames, 16 + 2 * width)
    positions_RHP = torch.randn(seen + frames, 2, width)
    if not width:
        scores, projected, positions_RHP = scores, projected[:0].long(), positions_RHP[:0].long()
    check(run, scores, projected, positions_RHP, tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("width", [4, 5])
@pytest.mark.parametrize(("frames", "past"), [(37, 0), (20, 45), (304, 0)])
def test_masked_softmax_of_16_bits(
    frames: int, past: int, width: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    seen = past + frames
    blocked = (torch.arange(seen) >= torch.tensor([[seen], [1 + seen // 2]]))[:, None, None]
    inputs = [
        2 * torch.randn(2, 3, frames, seen),
        torch.randn(2, frames, 3 * width),
        torch.randn(3, width, seen + frames),
    ]
    upstream = [torch.randn(2, frames, seen), *torch.randn(2, 2, 3, frames, seen)]
    results = []
    for exact in (False, True):
        leaves = [x.to("cuda", dtype) for x in inputs]
        leaves = [(x.double() if exact else x).requires_grad_() for x in leaves]
        weights = masked_softmax(leaves[0], ByPosition(*leaves[1:]), blocked.cuda())
        grads = [x.to("cuda", weights.one_NHTS.dtype) for x in upstream]
        results.append([*weights, *torch.autograd.grad(weights, leaves, grads)])
    for fused, plain in zip(*results, strict=True):
        assert fused.dtype == dtype
        assert (fused - plain).norm() <= tolerance * plain.norm()


@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_gate(batch: int, frames: int) -> None:
    torch.manual_seed(0)
    lengths = torch.randint(1, frames + 1, (batch, 1))
    real = (torch.arange(frames) < lengths).unsqueeze(-1).cuda()
    check(lambda x: gate(x, real), torch.randn(batch, frames, 40))


@pytest.mark.parametrize(("size", "padding"), [(3, 1), (31, 15), (16, 0), (31, 0)])
@pytest.mark.parametrize(("batch", "frames"), [(1, 31), (3, 77), (2, 1031)])
def test_depthwise(size: int, padding: int, batch: int, frames: int) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv1d(72, 72, size, groups=72, padding=padding).cuda()

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        convolution._parameters.update(weight=weight, bias=bias)  # type: ignore[dict-item]
        return depthwise(convolution, x)

    check(run, torch.randn(batch, frames, 72), torch.randn(72, 1, size), torch.randn(72))


@pytest.mark.parametrize("chunk", [8, 48, 2**20])
@pytest.mark.parametrize(("batch", "frames"), [(3, 77), (2, 1031)])
def test_depthwise_within_chunks(chunk: int, batch: int, frames: int) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv1d(72, 72, 31, groups=72, padding=15).cuda()
    chunk_1 = torch.tensor([chunk], device="cuda")

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        convolution._parameters.update(weight=weight, bias=bias)  # type: ignore[dict-item]
        return depthwise(convolution, x, chunk=chunk_1)

    check(run, torch.randn(batch, frames, 72), torch.randn(72, 1, 31), torch.randn(72))


ENCODERS: dict[tuple[str, bool], Callable[[], Encoder]] = {
    ("zipformer", False): lambda: Zipformer(dataclasses.replace(TINY)),
    ("zipformer", True): lambda: Zipformer(dataclasses.replace(CAUSAL)),
    ("conformer", False): lambda: Conformer(tiny_conformer(dim=40, layers=2)),
    ("conformer", True): lambda: Conformer(tiny_conformer(dim=40, layers=2, causal=True)),
}


def training_pass(
    mode: str, make: Callable[[], Encoder], lengths: list[int], precision: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output and all gradients of an encoder in training mode."""
    available.set_mode(mode)
    torch.manual_seed(0)
    encoder = make().cuda().train()
    encoder.set_step(100.0)
    features = torch.randn(len(lengths), max(lengths), encoder.config.num_mel_bins, device="cuda")
    torch.manual_seed(1)
    with torch.autocast("cuda", precision, enabled=precision != torch.float32):
        encoded, _ = encoder(features, torch.tensor(lengths))
    torch.manual_seed(2)
    encoded.backward(torch.randn_like(encoded))
    gradients = [p.grad.flatten() for p in encoder.parameters() if p.grad is not None]
    return encoded.detach(), torch.cat(gradients)


@pytest.mark.parametrize("kind", ["zipformer", "conformer"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[9], [61, 40, 9], [475, 211]])
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)],
)
def test_encoder_trains_the_same_with_and_without(
    kind: str,
    causal: bool,
    lengths: list[int],
    precision: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whether a balancer pushes up or down is a question of rounding near its limits.
    monkeypatch.setattr(Clock, "bernoulli", lambda self, probability: probability >= 1.0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make = ENCODERS[kind, causal]
    plain, of_plain = training_pass("off", make, lengths, precision)
    fused, of_fused = training_pass("auto", make, lengths, precision)
    assert (fused - plain).norm() <= tolerance * plain.norm()
    assert (of_fused - of_plain).norm() <= tolerance * of_plain.norm()
    again, _ = training_pass("auto", make, lengths, precision)
    assert torch.equal(fused, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", [None, (-0.5, 0.5), (-torch.inf, torch.inf)])
@pytest.mark.parametrize(("parts", "channels"), [(1, 1), (264, 1), (3, 37), (131, 1085)])
def test_sums_of_parts(
    parts: int, channels: int, limits: tuple[float, float] | None, dtype: torch.dtype
) -> None:
    """Rounded once, and towards the limits of a parameter as in plain torch."""
    from pruned_rnnt.model.kernels.rows import sums_of_parts

    torch.manual_seed(0)
    # Small integers: every order of summation gives the same sum.
    of_parts = torch.randint(-8, 9, (parts, channels)).float().cuda()
    value = torch.randn(channels).cuda()
    on_device = None if limits is None else torch.tensor([9.0, *limits], device="cuda")[1:]
    found = sums_of_parts(of_parts, dtype, value, on_device)
    plain = grad_towards_limits(of_parts.sum(0), value, limits)
    assert torch.equal(found, plain.to(dtype))
