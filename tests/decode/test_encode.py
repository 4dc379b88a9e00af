"""The encoder for searches, in float32 and in lower precision."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.decode_config import DecodeConfig, Precision, label, result_settings
from pruned_rnnt.decode.encode import (
    _has_bfloat16,
    choose_kernels,
    choose_passes,
    compute_dtype,
    encode_padded,
)
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.kernels import available
from pruned_rnnt.model.kernels.available import set_mode
from tests.tiny_models import tiny_conformer, tiny_model, tiny_zipformer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("encoder", [tiny_conformer(), tiny_zipformer(causal=False)])
def test_lower_precision_is_near_float32(
    encoder: EncoderConfig, precision: Precision, device: str
) -> None:
    if device == "cpu" and precision == "float16":
        pytest.skip("convolutions in float16 need a GPU")
    torch.manual_seed(0)
    model = tiny_model(encoder).eval().to(device)
    lengths = torch.tensor([60, 41])
    features_NTF = torch.randn(2, 60, model.config.encoder.num_mel_bins)
    with torch.inference_mode():
        exact_NTE, exact_frames = model.encode(features_NTF.to(device), lengths)
    same_NTE, _ = encode_padded(model, features_NTF, lengths)
    assert torch.equal(same_NTE, exact_NTE)
    near_NTE, frames = encode_padded(model, features_NTF, lengths, precision)
    assert near_NTE.dtype == torch.float32
    assert torch.equal(frames, exact_frames)
    error = (near_NTE - exact_NTE).norm() / exact_NTE.norm()
    assert 0 < error < 0.03


def test_results_name_the_precision() -> None:
    config = DecodeConfig(precision="bfloat16", metric="cer")
    assert label(result_settings(config)) == "greedy-bfloat16-cer"


def test_log_says_whether_fused_kernels_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pruned_rnnt")
    gpu = torch.device("cuda")
    obstacle = "Triton is not installed"
    monkeypatch.setattr("pruned_rnnt.model.kernels.available._obstacle", lambda: obstacle)
    try:
        choose_kernels("off", gpu)
        choose_kernels("auto", gpu)
        obstacle = ""
        choose_kernels("auto", gpu)
        choose_kernels("auto", torch.device("cpu"))
    finally:
        set_mode("auto")
    assert [record.message for record in caplog.records] == [
        "fused encoder kernels: off",
        "fused encoder kernels: not used, Triton is not installed",
        "fused encoder kernels: used",
    ]
    with pytest.raises(ValueError, match="mode is 'on', needs to be one of auto, off"):
        choose_kernels("on", gpu)


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The indices of the devices that were current, the last one now, as if there were GPUs."""
    current = [0]

    def exchange(index: int) -> int:
        before = current[-1]
        if index >= 0:
            current.append(index)
        return before

    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchange)
    return current


class OnSecond:
    """A stand-in for a tensor on the second GPU."""

    device = torch.device("cuda", 1)
    is_cuda = True

    def get_device(self) -> int:
        return 1

    def to(self, *args: Any) -> OnSecond:
        return self

    float = to


def test_a_model_on_another_gpu_makes_it_current(second_gpu: list[int]) -> None:
    """Triton launches on the current device, so fused kernels would not run."""
    found = []

    def encode(*args: Any) -> tuple[OnSecond, Tensor]:
        found.append(second_gpu[-1])
        return OnSecond(), torch.tensor([1])

    model: Any = SimpleNamespace(parameters=lambda: iter([OnSecond()]), encode=encode)
    encode_padded(model, OnSecond(), torch.tensor([1]))  # type: ignore[arg-type]
    assert (found, second_gpu[-1]) == ([1], 0)


def test_passes_are_chosen_on_the_gpu_of_the_model(
    second_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("choose_kernels", "choose_graphs", "_compile_kernels"):
        monkeypatch.setattr(
            f"pruned_rnnt.decode.encode.{name}", lambda *args: found.append(second_gpu[-1])
        )
    model: Any = SimpleNamespace(parameters=lambda: iter([OnSecond()]), encoder=None)
    choose_passes(DecodeConfig(precision="float32"), model)
    assert (found, second_gpu[-1]) == ([1, 1, 1], 0)


def test_streams_on_another_gpu_make_it_current(second_gpu: list[int]) -> None:
    found = []

    def encoder(*args: Any) -> tuple[OnSecond, None]:
        found.append(second_gpu[-1])
        return OnSecond(), None

    stream = SimpleNamespace(
        device=OnSecond.device,
        _precision=torch.float32,
        model=SimpleNamespace(inference_graphs=None),
        encoder=Mock(side_effect=encoder),
    )
    StreamDecoder.encode(stream, OnSecond(), (), None)  # type: ignore[arg-type]
    assert (found, second_gpu[-1]) == ([1], 0)


def test_tensors_on_another_gpu_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    available._warn_of_device.cache_clear()
    assert not available.use_kernels(OnSecond())  # type: ignore[arg-type]
    assert not available.use_kernels(OnSecond())  # type: ignore[arg-type]
    (message,) = caplog.messages
    assert message.endswith("cuda:1 is not the current device: call torch.cuda.set_device(1)")


@pytest.mark.parametrize(("supported", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_only_on_gpus_that_have_it(
    monkeypatch: pytest.MonkeyPatch, supported: bool, dtype: torch.dtype
) -> None:
    assert compute_dtype("auto", torch.device("cpu")) == torch.float32
    assert compute_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    _has_bfloat16.cache_clear()
    assert compute_dtype("auto", torch.device("cuda", 0)) == dtype
    assert compute_dtype("float32", torch.device("cuda", 0)) == torch.float32
    _has_bfloat16.cache_clear()
