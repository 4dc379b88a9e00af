"""Encoders without gradients: fused kernels against plain torch, and which kernels run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.conformer import Conformer
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.kernels import available
from pruned_rnnt.model.subsampling_convolutions import depthwise_maps
from tests.model.zipformer_tiny import CAUSAL, TINY, ragged_batch, sine_encoder
from tests.tiny_models import tiny_conformer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# Feature frames: one encoder frame; no multiple of anything; longer than a tile of each kernel.
LENGTHS = ([9], [61, 40, 9], [475, 211, 9])
CONFORMER = tiny_conformer(
    num_mel_bins=TINY.num_mel_bins, layers=2, feedforward_dim=24, kernel_size=5
)
ZIPFORMER_KERNELS = {
    "attention._heads_kernel",
    "attention._product_kernel",
    "attention._squash_kernel",
    "convolution._depthwise_kernel",
    "convolution._gate_kernel",
    "downsample._downsample_kernel",
    "windows._first_kernel",
    "maps._maps_kernel",
    "norms._bias_norm_kernel",
    "softmax._forward_kernel",
    "stream._add_kernel",
    "stream._bypass_kernel",
    "swoosh._swoosh_kernel",
}


@pytest.fixture(autouse=True)
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    available.set_mode("auto")


@torch.inference_mode()
def encode(
    encoder: Encoder,
    lengths: list[int],
    mode: str,
    precision: torch.dtype,
    chunks: dict[str, int],
) -> list[Tensor]:
    """The output of each utterance, without padding."""
    available.set_mode(mode)
    features_NTF, lengths_N, _ = ragged_batch(lengths)
    features_NTF = features_NTF.to(DEVICE, next(encoder.parameters()).dtype)
    with torch.autocast(DEVICE.type, precision, enabled=precision == torch.bfloat16):
        encoded_NTE, frames = encoder(features_NTF, lengths_N, **chunks)
    return [x[:count].double() for x, count in zip(encoded_NTE, frames.tolist(), strict=True)]


def relative_errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Of each utterance, as an error in a short one is small beside the others."""
    return [
        float((x - y).norm() / y.norm().clamp(min=1e-6))
        for x, y in zip(found, expected, strict=True)
    ]


def check(encoder: Encoder, lengths: list[int], precision: torch.dtype, **chunks: int) -> None:
    """Fused kernels are about as close to float64 as plain torch is."""
    encoder = encoder.to(DEVICE)
    fused = encode(encoder, lengths, "auto", precision, chunks)
    plain = encode(encoder, lengths, "off", precision, chunks)
    exact = encode(encoder.double(), lengths, "off", torch.float64, chunks)
    assert all(x.isfinite().all() for x in fused)
    rounding = 1e-5 if precision == torch.float32 else 3e-2
    errors = zip(relative_errors(fused, exact), relative_errors(plain, exact), strict=True)
    assert all(of_fused <= 1.5 * of_plain + rounding for of_fused, of_plain in errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 128, 1, 1), (2, 20, 9, 5), (1, 136, 133, 19)])
def test_depthwise_maps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    channels = shape[1]
    convolution = nn.Conv2d(channels, channels, 7, groups=channels).to(DEVICE, dtype)
    x_NCTF = torch.randn(shape).to(DEVICE, dtype)
    with torch.inference_mode():
        found = depthwise_maps(convolution, x_NCTF)
        expected = convolution.double()(functional.pad(x_NCTF.double(), (3, 3, 3, 3)))
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_zipformer(lengths: list[int], precision: torch.dtype) -> None:
    check(sine_encoder(TINY), lengths, precision)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "left"), [(8, 16), (32, -1), (-1, -1)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_zipformer(
    lengths: list[int], chunk: int, left: int, precision: torch.dtype
) -> None:
    check(sine_encoder(CAUSAL), lengths, precision, chunk_size=chunk, left_context=left)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_conformer(lengths: list[int], precision: torch.dtype) -> None:
    torch.manual_seed(0)
    check(Conformer(CONFORMER).eval(), lengths, precision)


@pytest.mark.parametrize("inference", [torch.inference_mode, torch.no_grad])
def test_every_forward_kernel_runs_without_gradients(
    inference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pruned_rnnt.model.kernels import launch

    names: set[str] = set()
    launch_kernel = launch.Kernel.__call__

    def record(kernel: Any, *arguments: Any, **options: Any) -> None:
        function = kernel.jit.fn
        names.add(f"{function.__module__.split('.')[-1]}.{function.__name__}")
        launch_kernel(kernel, *arguments, **options)

    monkeypatch.setattr(launch.Kernel, "__call__", record)
    torch.manual_seed(0)
    encoder = sine_encoder(TINY).to(DEVICE)
    features_NTF, lengths_N, _ = ragged_batch([61, 40])
    for mode, expected in (("off", set()), ("auto", ZIPFORMER_KERNELS)):
        available.set_mode(mode)
        names.clear()
        with inference():
            encoder(features_NTF.to(DEVICE), lengths_N)
        assert names == expected
    names.clear()
    with inference():
        Conformer(CONFORMER).eval().to(DEVICE)(features_NTF.to(DEVICE), lengths_N)
    assert names == {
        "convolution._depthwise_kernel",
        "convolution._gate_kernel",
        "windows._first_kernel",
    }
