"""Kernels that were compiled in advance: which of them are taken from the files."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from pruned_rnnt.decode.search import ctc_alignment_kernels
from pruned_rnnt.model import kernels
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.encoder_kinds import build_encoder
from pruned_rnnt.model.kernels import binary, launch, prebuilt, stream, swoosh, target, variants
from pruned_rnnt.model.zipformer import Zipformer
from pruned_rnnt.selfcheck.encoders import encoder_configs
from pruned_rnnt.train.optim import scaled_adam_kernels
from scripts import compile_kernels
from tests.model.fake_gpu import FakeGpu, fake_gpu, forget
from tests.model.zipformer_tiny import TINY

# Nothing runs on a GPU, but only torch for GPUs brings Triton, so that these are tested there.
pytestmark = pytest.mark.gpu
CONSTANTS = (4.0, 0.035, 0.08)
DEVICE = torch.device("cuda", 0)
FILE = "encoder_kernels_90.zip"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGpu]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted")
    with triton.knobs.cache.scope():
        found = fake_gpu(monkeypatch, tmp_path / "cache")
        monkeypatch.setattr(prebuilt, "library_folders", lambda: [tmp_path])
        forget_all()
        yield found
        forget_all()


def forget_all() -> None:
    binary.most_shared_bytes.cache_clear()
    prebuilt._archives.cache_clear()
    forget(swoosh._swoosh_kernel)
    forget(stream._add_kernel)


def launch_swoosh() -> None:
    swoosh.swoosh_forward(torch.zeros(8), None, CONSTANTS, torch.float32)


def write_swoosh(folder: Path, toolkit: str = "12.8") -> Path:
    """A file with the variant of `launch_swoosh` alone; which Triton's cache does not have."""
    with target.chosen_for(90), variants.listed() as names:
        launch_swoosh()
    (variant,) = names.found
    image = variants.compiled_image(*variant, variants.GPUTarget("cuda", 90, 32))
    path = folder / FILE
    prebuilt.write(path, {variant: image}, toolkit)
    forget_all()
    for entry in (folder / "cache").iterdir():
        entry.rename(folder / f"old-{entry.name}")
    variants.counts = variants.Counts()
    return path


def counted() -> tuple[int, int, int]:
    return variants.counts.prebuilt, variants.counts.compiled, variants.counts.loaded


def test_kernels_are_taken_from_the_file_and_others_compiled(
    gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_swoosh(tmp_path)
    x = torch.zeros(2, 4, 16)
    with variants.compiled_together(DEVICE):
        launch_swoosh()
        stream.add(x, x, None, None)
    assert "fused kernels: 1 compiled, 1 installed with the package, 0 loaded" in caplog.text
    launch_swoosh()
    stream.add(x, x, None, None)
    assert gpu.launched == ["_swoosh_kernel", "_add_kernel"]
    assert counted() == (1, 1, 0)


def test_arguments_are_those_of_a_kernel_that_was_compiled_here(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    x = torch.zeros(8)
    swoosh.swoosh_forward(x, None, CONSTANTS, torch.float32)
    path = write_swoosh(tmp_path)
    swoosh.swoosh_forward(x, None, CONSTANTS, torch.float32)
    assert counted() == (1, 0, 0)
    compiled, taken = gpu.arguments
    assert compiled[:8] == taken[:8]
    assert len(compiled[8]) == len(taken[8])
    with zipfile.ZipFile(path) as file:
        assert file.namelist() == ["index.json", "0.cubin"]


def test_a_changed_source_is_compiled(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_swoosh(tmp_path)
    monkeypatch.setattr(prebuilt, "_source_digest", lambda module: "another")
    launch_swoosh()
    assert counted() == (0, 1, 0)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"half"])
def test_a_damaged_file_is_named_and_kernels_are_compiled(
    gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = write_swoosh(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == b"half" else content)
    launch_swoosh()
    assert counted() == (0, 1, 0)
    assert gpu.launched == ["_swoosh_kernel"]
    assert f"{path} cannot be read, so kernels are compiled" in caplog.text


def test_damaged_machine_code_is_compiled_again(
    gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_swoosh(tmp_path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        begin = file.getinfo("0.cubin").header_offset + 60
    content[begin : begin + 8] = bytes(8)
    path.write_bytes(content)
    launch_swoosh()
    assert counted() == (0, 1, 0)
    assert "cannot be read, so kernels are compiled" in caplog.text


def test_an_older_driver_uses_no_file(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12_090, raising=False)
    path = write_swoosh(tmp_path, toolkit="13.1")
    launch_swoosh()
    assert counted() == (0, 1, 0)
    assert (
        f"{path} is not used, so kernels are compiled: it was compiled with CUDA 13.1"
        in caplog.text
    )


def test_a_kernel_that_cannot_be_loaded_is_compiled_and_others_not_tried(
    gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_swoosh(tmp_path)
    with zipfile.ZipFile(path) as file:
        index = file.read("index.json")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("index.json", index)
        file.writestr("0.cubin", b"no machine code")
    launch_swoosh()
    assert gpu.launched == ["_swoosh_kernel"]
    assert counted() == (1, 1, 0)
    assert "kernels are compiled, since one of the package cannot be loaded" in caplog.text
    forget(swoosh._swoosh_kernel)
    launch_swoosh()
    assert counted() == (1, 1, 1)


def test_other_gpus_do_not_use_the_file(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_swoosh(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    launch_swoosh()
    assert counted() == (0, 1, 0)
    (tmp_path / FILE).rename(tmp_path / "encoder_kernels_80.zip")
    forget_all()
    launch_swoosh()  # The machine code of 8.0 would run on it.
    assert counted() == (1, 1, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 7))
    forget_all()
    launch_swoosh()
    assert counted() == (1, 2, 0)


def test_settings_of_triton_that_change_code_are_kept(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_swoosh(tmp_path)
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    launch_swoosh()
    assert counted() == (0, 1, 0)
    with pytest.raises(SystemExit, match="environment variables of Triton"):
        compile_kernels.main([str(tmp_path), "--capabilities", "90"])


def test_an_unknown_capability_is_refused() -> None:
    with pytest.raises(ValueError, match="capability is 70, needs to be one of 80, 86"):
        target.chosen_for(70).__enter__()


def test_kernels_call_functions_of_their_module_or_folder_alone() -> None:
    """A file is used if these sources did not change."""
    found = 0
    for module in modules_with_kernels():
        for value in vars(module).values():
            jit = value.jit if isinstance(value, launch.Kernel) else value
            if isinstance(jit, triton.runtime.jit.JITFunction):
                found += 1
                name = jit.fn.__module__
                assert name == module.__name__ or name.startswith("pruned_rnnt.model.kernels.")
    assert found > 40


def modules_with_kernels() -> list[ModuleType]:
    names = [each.name for each in pkgutil.iter_modules(kernels.__path__)]
    inside = [importlib.import_module(f"pruned_rnnt.model.kernels.{name}") for name in names]
    return [*inside, scaled_adam_kernels, ctc_alignment_kernels]


def test_a_gpu_that_is_absent_gets_the_kernels_of_one_that_is_there(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Zipformer(TINY)
    there = variants_of(encoder)
    monkeypatch.undo()
    with target.chosen_for(90):
        absent = variants_of(encoder)
    assert len(there) > 60
    # The embedding, whose convolutions of one channel and products are others on a GPU.
    of_embedding = {"_first_kernel", "_first_weight_kernel", "_window_weight_kernel"}
    assert {jit.__name__ for jit, *_ in absent - there} <= {*of_embedding, "_swoosh_kernel"}
    assert not there - absent


def variants_of(encoder: Encoder) -> set[Any]:
    with variants.listed() as names:
        compile_kernels.pass_over(encoder, 64, torch.bfloat16)
    return names.found


def test_the_script_compiles_what_encoders_call(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = build_encoder(encoder_configs()["Conformer"])
    monkeypatch.setattr(compile_kernels, "encoders", lambda: iter([encoder]))
    monkeypatch.setattr(compile_kernels, "_DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(compile_kernels, "_FRAMES", (64,))
    compile_kernels.main([str(tmp_path), "--capabilities", "90"])
    with target.chosen_for(90):
        found = variants_of(encoder)
    assert len(found) > 10
    for variant in found:
        assert prebuilt.image(*variant, 90) is not None
