"""Which optional packages the exporters need, told before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
VERIFY_PACKAGES = ("sherpa_onnx",)


class ExportError(ValueError):
    """Something which cannot be exported or loaded; the message says what and why."""


def require(packages: Sequence[str]) -> None:
    """Raise ExportError naming the packages that are missing and how to get them."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        raise ExportError(f"{names} is not installed: pip install 'pruned_rnnt[export]'")
