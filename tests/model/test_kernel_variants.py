"""Variants of kernels: how few there are, compiled together, and repaired or replaced caches."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from pruned_rnnt.model.kernels import binary, stream, swoosh, variants
from pruned_rnnt.model.zipformer import Zipformer
from pruned_rnnt.model.zipformer.schedule import Recorder
from pruned_rnnt.train.optim import scaled_adam_kernels
from pruned_rnnt.train.optim.conditional import Condition
from pruned_rnnt.train.optim.scaled_adam_kernels import FusedPasses
from pruned_rnnt.train.optim.scaled_adam_passes import Rates, Update
from tests.model.fake_gpu import FakeGpu, fake_gpu, forget
from tests.model.zipformer_tiny import TINY

# Nothing runs on a GPU, but only torch for GPUs brings Triton, so that these are tested there.
pytestmark = pytest.mark.gpu
CONSTANTS = (4.0, 0.035, 0.08)
DEVICE = torch.device("cuda", 0)
# Widths of the stacks with the same powers of two above them.
WIDTHS: tuple[dict[str, Any], ...] = (
    {"dims": (192,) * 4, "feedforward_dims": (512,) * 4, "unmasked_dims": (96,) * 4},
    {"dims": (256,) * 4, "feedforward_dims": (768,) * 4, "unmasked_dims": (128,) * 4},
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted")
    with triton.knobs.cache.scope():
        found = fake_gpu(monkeypatch, tmp_path / "cache")
        forget_all()
        yield found
        forget_all()


def forget_all() -> None:
    """Forget what is known of the fake GPU, or of a real one that earlier tests used."""
    binary.most_shared_bytes.cache_clear()
    forget(swoosh._swoosh_kernel)
    forget(stream._add_kernel)
    for each in ("sums", "reduce", "update"):
        forget(getattr(scaled_adam_kernels, f"_{each}_kernel"))


def launch() -> None:
    swoosh.swoosh_forward(torch.zeros(8), None, CONSTANTS, torch.float32)


def variants_of(
    config: Any,
    frames: int,
    dtype: torch.dtype = torch.bfloat16,
) -> set[Any]:
    """The variants of a training pass."""
    encoder = Zipformer(config).train()
    assert encoder.clock is not None
    encoder.clock.recorder = Recorder(torch.device("cpu"))
    features = torch.zeros((2, frames, config.num_mel_bins))
    enabled = dtype != torch.float32
    with (
        variants.listed() as names,
        torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=False),
    ):
        encoded, _ = encoder(features, torch.full((2,), frames))
        parameters = list(encoder.parameters())
        torch.autograd.grad(encoded, parameters, torch.zeros_like(encoded), allow_unused=True)
    return names.found


def test_layers_of_similar_widths_share_their_variants(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = dataclasses.replace(TINY, **WIDTHS[0])
    wider = dataclasses.replace(TINY, **WIDTHS[1])
    one = variants_of(wide, 64)
    other = variants_of(wider, 64)
    assert len(one) > 30
    assert one == other


@pytest.mark.parametrize("shared_bytes", [101_376, 65_536])
def test_all_variants_fit_in_the_shared_memory_of_small_gpus(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, shared_bytes: int
) -> None:
    """In float32, those of an A10, an L4 or a GeForce RTX 30 to 50, and of a T4."""
    gpu.shared_bytes = shared_bytes
    target = variants._target(0)
    found = variants_of(TINY, 64, torch.float32)
    most = max(variants.compiled_image(*variant, target).shared_bytes for variant in found)
    assert 2**14 < most <= shared_bytes


def test_a_kernel_that_needs_more_shared_memory_is_named(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.shared_bytes = 0
    compile_image = variants.compiled_image

    def large(*arguments: Any) -> Any:
        return compile_image(*arguments)._replace(shared_bytes=200_000)

    monkeypatch.setattr(variants, "compiled_image", large)
    with pytest.raises(RuntimeError, match=r"_swoosh_kernel needs 200000 .* GPU has 0"):
        launch()
    assert variants.counts.compiled == 1


def test_variants_are_compiled_together_and_not_launched(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    x = torch.zeros(2, 4, 16)
    with variants.compiled_together(DEVICE):
        launch()
        launch()
        stream.add(x, x, None, None)
    assert gpu.launched == []
    assert sorted(gpu.loaded) == ["_add_kernel", "_swoosh_kernel"]
    assert "fused kernels: 2 compiled, 0 installed with the package, 0 loaded" in caplog.text
    launch()
    stream.add(x, x, None, None)
    assert gpu.launched == ["_swoosh_kernel", "_add_kernel"]
    assert len(gpu.loaded) == 2

    forget(swoosh._swoosh_kernel)
    caplog.clear()
    with variants.compiled_together(DEVICE):
        launch()
    assert "fused kernels: 0 compiled, 0 installed with the package, 1 loaded" in caplog.text


def test_launches_pass_addresses_and_numbers(gpu: FakeGpu) -> None:
    """Sizes beyond 32 bits get a variant of their own; an empty grid launches nothing."""
    x = torch.zeros(2, 3)
    arguments = (x, None, None, x[1:], None)
    constants = (False, False, True, 1.0, 1.0, False, 16, 128)
    for count in (6, 2**40):
        swoosh._swoosh_kernel((1, 2), *arguments, count, 1, 0, 3, *CONSTANTS, *constants)
    swoosh._swoosh_kernel((0, 2), *arguments, 6, 1, 0, 3, *CONSTANTS, *constants)
    types = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 4, *[ctypes.c_float] * 3]
    assert len(gpu.arguments) == 2
    for count, launched in zip((6, 2**40), gpu.arguments, strict=True):
        assert launched[:8] == (1, 2, 1, 128, 1, 1, 0, 0)
        types[2] = ctypes.c_int if count == 6 else ctypes.c_int64
        *places, zero, _, _, _ = launched[8]
        values = [t.from_address(place).value for t, place in zip(types, places, strict=True)]
        expected = [x.data_ptr(), x[1:].data_ptr(), count, 1, 0, 3, *CONSTANTS]
        assert values == pytest.approx(expected)
        assert ctypes.c_int64.from_address(zero).value == 0


def test_a_failed_pass_ends_the_collection(gpu: FakeGpu) -> None:
    with pytest.raises(ZeroDivisionError), variants.compiled_together(DEVICE):
        raise ZeroDivisionError
    launch()
    assert gpu.launched == ["_swoosh_kernel"]


@pytest.mark.parametrize("content", ["", "{}"])
@pytest.mark.parametrize("pattern", ["__grp__*.json", "_swoosh_kernel.json", "*.cubin", "*.ptx"])
def test_damaged_entries_are_compiled_again(
    gpu: FakeGpu, tmp_path: Path, pattern: str, content: str
) -> None:
    launch()
    (path,) = (tmp_path / "cache").rglob(pattern)
    before = path.read_bytes()
    path.write_text(content)
    forget(swoosh._swoosh_kernel)
    launch()
    assert gpu.launched == ["_swoosh_kernel"] * 2
    if pattern != "*.ptx":  # which is not needed again
        assert path.read_bytes()[:16] == before[:16]
    forget(swoosh._swoosh_kernel)
    compiled = variants.counts.compiled
    launch()
    assert variants.counts.compiled == compiled


def test_a_folder_that_cannot_be_written_is_replaced(
    gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    launch()
    stream.add(torch.zeros(2, 4, 16), torch.zeros(2, 4, 16), None, None)
    assert gpu.launched == ["_swoosh_kernel", "_add_kernel"]
    assert caplog.text.count("set TRITON_CACHE_DIR to a folder that can be written") == 1
    assert variants.cache_folder() != tmp_path / "cache"


def test_other_processes_wait_for_the_one_that_compiles(gpu: FakeGpu, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    entered, leave = threading.Event(), threading.Event()

    def enter() -> None:
        with variants.one_process_compiles():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.2)
    fcntl.flock(held, fcntl.LOCK_UN)
    assert entered.wait(60)
    # It has waited, so it does not keep others waiting.
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    leave.set()
    thread.join()
    os.close(held)


@pytest.mark.parametrize("grows", [False, True])
def test_the_optimiser_compiles_what_it_launches(gpu: FakeGpu, grows: bool) -> None:
    parameters = [torch.zeros(size) for size in (5, 12, 7)]
    passes = FusedPasses(parameters)
    with variants.compiled_together(DEVICE):
        passes.call_usual_kernels()
    assert gpu.launched == []
    compiled = variants.counts.compiled
    assert compiled == 6
    numbers = torch.zeros(24)
    passes.start(Condition(torch.tensor(True)))
    passes.value_gradients(torch.ones(()))
    passes.set_rms(torch.ones(3))
    rates = Rates(*[0.5] * 6)
    growth = torch.ones(3) if grows else None
    passes.update(Update(numbers, numbers, growth, rates, Condition(torch.tensor(True))))
    assert gpu.launched == ["_sums_kernel", "_reduce_kernel", "_update_kernel"]
    assert variants.counts.compiled == compiled
