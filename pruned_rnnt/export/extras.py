"""The optional packages that the exporters need, and the error that they raise."""

from __future__ import annotations

ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
VERIFY_PACKAGES = ("sherpa_onnx",)


class ExportError(ValueError):
    """Something which cannot be exported or loaded; the message says what and why."""
