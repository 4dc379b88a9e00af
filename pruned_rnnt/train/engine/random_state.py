"""Random number generators: seeding, and their states for a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - other libraries use the global generator
    torch.manual_seed(seed)


def _capture_host() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(words), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }


def capture_random_state(device: torch.device | None = None) -> dict[str, Any]:
    """States of all generators of this process, as tensors and plain values.

    Args:
        device: the GPU whose generator is used; another device, or None, for the current GPU.
    """
    cuda = torch.cuda.get_rng_state(_gpu(device)) if torch.cuda.is_available() else None
    return {**_capture_host(), "cuda": cuda}


def restore_random_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore a state from `capture_random_state`, to the generator of `device`."""
    _restore_host(state)
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"], _gpu(device))


def _gpu(device: torch.device | None) -> torch.device:
    return device if device is not None and device.type == "cuda" else torch.device("cuda")


def _restore_host(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(  # noqa: NPY002
        (name, keys.numpy().astype(np.uint32), position, has_gauss, cached)
    )
    torch.set_rng_state(state["torch"])


class RandomStream:
    """Random numbers for one purpose, apart from those of the rest of the process.

    Draws within `used`, from the generators of Python, numpy and torch (CPU), depend on the seed
    and on earlier draws of the same stream only, and change no other draws.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: dict[str, Any] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw from the stream for the length of the context."""
        others = _capture_host()
        if self._state is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)  # noqa: NPY002
            torch.default_generator.manual_seed(self._seed)
        else:
            _restore_host(self._state)
        try:
            yield
        finally:
            self._state = _capture_host()
            _restore_host(others)
