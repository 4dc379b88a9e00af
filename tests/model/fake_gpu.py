"""A GPU for which Triton compiles, but on which nothing runs: launches are counted."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from pruned_rnnt.model.kernels import available, launch, variants  # noqa: E402


class FakeGpu:
    """What Triton's driver does, and torch's device functions that launches use.

    launched: names of kernels. loaded: names of binaries.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.loaded: list[str] = []
        self.utils = SimpleNamespace(
            load_binary=self._load_binary,
            get_device_properties=lambda device: {"max_shared_mem": 2**17},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launched.append(metadata.name)

    def _load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        if not binary.startswith(b"\x7fELF"):
            raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")
        self.loaded.append(name)
        return None, None, 16, 0, 1024


def fake_gpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakeGpu:
    """Let kernels take CPU tensors and compile into the folder `cache`, with no variant known."""
    gpu = FakeGpu()
    monkeypatch.setattr(triton.runtime.driver, "_active", gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(variants, "counts", variants.Counts())
    monkeypatch.setattr(available, "_is_reachable", lambda x: True)
    monkeypatch.setattr(available, "_obstacle", lambda: "")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    return gpu


def forget(kernel: launch.Kernel) -> None:
    """Forget what this process has compiled and loaded of a kernel."""
    kernel.compiled.clear()
    kernel.jit.device_caches.clear()
