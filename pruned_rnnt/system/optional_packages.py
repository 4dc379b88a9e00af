"""The optional packages, and the extra of this package that installs each of them.

`import pruned_rnnt` and the losses need torch and numpy alone. If another package is missing, the
error is one line with the pip command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

# Names as they are imported; pyproject.toml has the same packages as they are installed.
PACKAGES_OF_EXTRA = {
    "train": (
        "lhotse",
        "urllib3",
        "lilcom",
        "scipy",
        "soundfile",
        "sentencepiece",
        "tensorboard",
        "omegaconf",
        "rich",
        "kaldialign",
        "matplotlib",
    ),
    "recipes": ("espeakng_loader",),
    "export": ("onnx", "onnxruntime", "onnxscript", "sherpa_onnx"),
    "k2": ("k2",),
    "microphone": ("sounddevice",),
    "report": ("jinja2",),
    "vad": ("silero_vad", "onnxruntime"),
    "hub": ("huggingface_hub",),
    "transformers": ("transformers",),
    "bitsandbytes": ("bitsandbytes",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
}
# Packages of each kind of export.
ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
VERIFY_PACKAGES = ("sherpa_onnx",)
# The first extra that has a package.
_EXTRA_OF = {
    package: extra for extra, names in reversed(PACKAGES_OF_EXTRA.items()) for package in names
}


class MissingPackageError(ModuleNotFoundError):
    """Optional packages are not installed; the message is one line with the pip command."""

    def __init__(self, packages: Sequence[str]) -> None:
        names = ", ".join(package.replace("_", "-") for package in packages)
        extras = ",".join(dict.fromkeys(_EXTRA_OF[package] for package in packages))
        verb = "is" if len(packages) == 1 else "are"
        super().__init__(
            f"{names} {verb} not installed: pip install 'pruned_rnnt[{extras}]'", name=packages[0]
        )


def require(*packages: str) -> None:
    """Raise MissingPackageError, which names the missing ones, unless all are installed."""
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        raise MissingPackageError(missing)


@contextmanager
def missing_packages_named() -> Iterator[None]:
    """Within the context, importing a missing optional package raises MissingPackageError."""
    try:
        yield
    except MissingPackageError:
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        raise MissingPackageError([package]) from error


def _is_installed(package: str) -> bool:
    # None in sys.modules marks a module that cannot be imported.
    return sys.modules[package] is not None if package in sys.modules else bool(find_spec(package))
