"""Loads the compiled libraries, which take over the ops they implement."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pruned_rnnt.ops._library import FALLBACKS


def load_native() -> None:
    """Loads the libraries built into pruned_rnnt/lib, unless PRUNED_RNNT_BACKEND=fallback."""
    if os.environ.get("PRUNED_RNNT_BACKEND", "auto") == "fallback":
        return
    for library in sorted((Path(__file__).parent.parent / "lib").glob("libpruned_rnnt_*.so")):
        torch.ops.load_library(str(library))


def backend_report() -> str:
    """One line for each op: which devices have a compiled kernel."""
    lines = []
    for name in FALLBACKS:
        native = [
            key
            for key in ("CPU", "CUDA")
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"pruned_rnnt::{name}", key)
        ]
        lines.append(f"{name}: {', '.join(native) or 'fallback'}")
    return "\n".join(lines)
