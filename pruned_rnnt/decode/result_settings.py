"""The settings of `decode` that determine its hypotheses, and their label in file names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pruned_rnnt.decode.decode_config import BEAM_METHODS, DecodeConfig
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.decode.fusion.ngram_files import read_texts
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.parameter_values import fingerprint

# Settings of every method; those of `metric` and `num_best` change the files only.
_ALWAYS = ("chunk", "left", "precision", "metric", "skip_unknown", "use_average")
# Other settings, and the methods that have them.
_OF_METHODS = {
    "max_symbols_per_frame": ("greedy", "modified_beam"),
    "beam_size": BEAM_METHODS,
    "num_best": BEAM_METHODS,
    "length_norm": ("modified_beam",),
}
# Scores that beam search adds: the settings that switch them on, and their other settings.
_SCORES = (
    (("ngram",), ("ngram_scale",)),
    (("bigram_texts",), ("bigram_scale",)),
    (("word_ngram", "word_texts"), ("word_scale", "word_unknown")),
    (("lm",), ("lm_scale",)),
    (("ilm_scale",), ("ilm_scale",)),
    (("hotwords",), ("hotword_bonus",)),
    (("symbol_bonus",), ("symbol_bonus",)),
)
_FILES = ("ngram", "bigram_texts", "word_ngram", "word_texts", "lm", "hotwords")
# In labels: the scales of scores in use, which are always shown, and short names of settings.
_SCALES = {
    "ngram_scale": "ngram",
    "bigram_scale": "bigrams",
    "word_scale": "words",
    "lm_scale": "lm",
    "ilm_scale": "ilm",
    "hotword_bonus": "hotwords",
    "symbol_bonus": "bonus",
}
_TAGS = {
    "max_symbols_per_frame": "symbols",
    "beam_size": "beam",
    "num_best": "nbest",
    "word_unknown": "unknown",
}
_CHUNK = 2**20
_DIGITS = 16


def result_settings(config: DecodeConfig) -> dict[str, Any]:
    """The settings that the method reads, by their keys in the section `decode`.

    Settings that change results by rounding alone are left out: kernels, graphs, batches.
    """
    names = [name for name, methods in _OF_METHODS.items() if config.method in methods]
    found = {name: getattr(config, name) for name in ("method", *names, *_ALWAYS)}
    if config.checkpoint == "average":  # of the parameters themselves
        del found["use_average"]
        found["checkpoint"] = "average"
    if config.method in BEAM_METHODS:
        for switches, settings in _SCORES:
            if any(getattr(config.fusion, switch) for switch in switches):
                found |= {f"fusion.{name}": getattr(config.fusion, name) for name in settings}
    return found


def file_digests(config: FusionConfig, language_model: LanguageModel | None) -> dict[str, str]:
    """A digest of the contents of each file that the configuration names, by key.

    Args:
        language_model: the model that `config.lm` names.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = {}
    for name in _FILES:
        if not getattr(config, name):
            continue
        path = Path(getattr(config, name))
        if name == "lm":
            assert language_model is not None
            digest = fingerprint(language_model)
        elif not path.exists():
            raise FileNotFoundError(f"decode.fusion.{name} is {path}, and there is no such file")
        elif path.is_dir():
            digest = hashlib.sha256("\n".join(read_texts(path, name)).encode()).hexdigest()
        else:
            digest = file_digest(path)
        found[f"fusion.{name}"] = digest[:_DIGITS]
    return found


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def label(settings: Mapping[str, Any]) -> str:
    """Method, scales of fusion and settings that are not defaults, for the names of files."""
    scales, others = [], []
    for key, value in settings.items():
        name = key.rpartition(".")[2]
        if name in _SCALES:
            scales.append(f"{_SCALES[name]}{value:g}")
        elif key not in ("method", "checkpoint") and value != _default(key):
            others.append(_tag(name, value))
    return "-".join([settings["method"], *scales, *others])


def _default(key: str) -> Any:
    value: Any = DecodeConfig()
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _tag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name.removeprefix("use_") if value else f"no_{name.removeprefix('use_')}"
    return value if isinstance(value, str) else f"{_TAGS.get(name, name)}{value:g}"
