"""A GPU for which Triton compiles, but on which nothing runs: launches are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pruned_rnnt.model.kernels import available, binary, launch, prebuilt, variants

_INVALID_IMAGE = 200


class FakeGpu:
    """What CUDA's driver does. A module and its function are the place of its name in `loaded`.

    launched: names of kernels. loaded: names of functions. arguments: of each launch.
    shared_bytes: of a block of threads.
    """

    def __init__(self) -> None:
        self.shared_bytes = 232_448
        self.launched: list[str] = []
        self.loaded: list[str] = []
        self.arguments: list[Any] = []

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        return 0 if image.startswith(b"\x7fELF") else _INVALID_IMAGE

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self.loaded.append(name.decode())
        function._obj.value = len(self.loaded)
        return 0

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: int) -> int:
        found._obj.value = self.shared_bytes
        return 0

    def cuFuncSetAttribute(self, *arguments: Any) -> int:
        return 0

    def cuLaunchKernel(self, function: int, *arguments: Any) -> int:
        self.launched.append(self.loaded[function - 1])
        self.arguments.append(arguments)
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"device kernel image is invalid"
        return 0


def fake_gpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakeGpu:
    """Let kernels take CPU tensors and compile into the folder `cache`, with no variant known."""
    gpu = FakeGpu()
    monkeypatch.setattr(binary, "_driver", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(variants, "counts", variants.Counts())
    monkeypatch.setattr(prebuilt, "library_folders", list)
    prebuilt._archives.cache_clear()
    monkeypatch.setattr(available, "_is_reachable", lambda x: True)
    monkeypatch.setattr(available, "_obstacle", lambda: "")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    return gpu


def forget(kernel: launch.Kernel) -> None:
    """Forget what this process has compiled and loaded of a kernel."""
    kernel.compiled.clear()
