"""Check before the first step that data and settings fit the source model.

Axes: F mel bins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pruned_rnnt.config.load import ConfigError, differences, to_dict
from pruned_rnnt.data.audio.feature_kinds import FeatureKind
from pruned_rnnt.data.audio.features import FEATURE_DIM, SAMPLING_RATE
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.model.model_config import LossConfig, ModelConfig

# Utterances of each split that are checked.
_MOST_CUTS = 10_000
_FRAME_SHIFT = 0.01
_WAVEFORM = "set data.features=waveform and prepare the data with --features waveform"
# Settings that may differ from the source's: they change training, but not what parameters mean.
_FREE_MODEL_KEYS = (
    "encoder.dropout",
    "encoder.dropout_scale",
    "encoder.warm_up_steps",
    "encoder.unmasked_dims",
    "encoder.chunk_size",
    "encoder.chunk_sizes",
    "encoder.random_first_chunk",
    "encoder.left_chunks",
    "encoder.left_context",
    "encoder.left_contexts",
    "encoder.name_or_folder",
    "encoder.frozen",
    "encoder.rate",
    "encoder.layer_decay",
    "predictor.dropout",
    "predictor.balancers",
    "joiner_initial_scale",
)
# Settings of the loss that change what the model's outputs mean.
_FIXED_LOSS_KEYS = ("rnnt_type", "hat", "durations")


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Some texts of a prepared folder."""

    path: str
    texts: tuple[str, ...]


def check_model(
    source: tuple[ModelConfig, LossConfig], wanted: tuple[ModelConfig, LossConfig]
) -> None:
    """Raise ConfigError if the configured model or loss differs from the source's."""
    lines = [
        f"model.{line}"
        for line in differences(to_dict(source[0]), to_dict(wanted[0]))
        if line.partition(":")[0] not in _FREE_MODEL_KEYS
    ]
    lines += [
        f"loss.{line}"
        for line in differences(to_dict(source[1]), to_dict(wanted[1]))
        if line.partition(":")[0] in _FIXED_LOSS_KEYS
    ]
    if lines:
        raise ConfigError(
            f"the settings differ from those of the model in train.init ({'; '.join(lines)}): "
            "leave them out to use the source's"
        )


def check_data(config: DataConfig, path: str, kind: FeatureKind, splits: Iterable[str]) -> Texts:
    """Check the features of a prepared folder; returns its texts.

    Args:
        path: the folder.
        kind: the features of the source.
        splits: the splits to read.

    Raises:
        ConfigError: the features are not those that the source was trained on.
        FileNotFoundError: the folder has no such split.
    """
    folder = PreparedFolder(Path(path), config.allow_commands)
    texts: list[str] = []
    for split in splits:
        for cut in islice(folder.cuts(split, lazy=True), _MOST_CUTS):
            problem = _problem(cut, config.features, kind)
            if problem:
                raise ConfigError(f"{path}: {cut.id} of {split} {problem}")
            texts.append(cut_text(cut))
    return Texts(path=path, texts=tuple(texts))


def _problem(cut: Any, features: str, kind: FeatureKind) -> str:
    """Why the source cannot use the features of a cut; empty if it can."""
    num_mel_bins = kind.num_mel_bins
    if kind.needs_samples:
        if features == "stored":
            return f"has stored features, and the source needs those of {kind.name}: " + _WAVEFORM
        return "" if cut.has_recording else f"has no recording: {_WAVEFORM}"
    if features == "waveform":
        if num_mel_bins != FEATURE_DIM:
            return (
                f"would have {FEATURE_DIM} mel bins with data.features=waveform, and the source "
                f"was trained on {num_mel_bins}: store features with {num_mel_bins} bins"
            )
        return ""  # recordings of any rate are resampled
    if not cut.has_features:
        return "has no stored features: set data.features=waveform"
    stored = cut.features
    if stored.num_features != num_mel_bins:
        return (
            f"has features of {stored.num_features} bins, and the source was trained on "
            f"{num_mel_bins}: prepare the data with {num_mel_bins} mel bins"
        )
    if "fbank" not in stored.type:
        return f"has features of the kind {stored.type!r}, and the source needs log-mel (fbank)"
    if abs(stored.frame_shift - _FRAME_SHIFT) > 1e-6:
        return f"has a frame every {stored.frame_shift} s, and the source needs {_FRAME_SHIFT} s"
    if stored.sampling_rate != SAMPLING_RATE:
        return (
            f"has features of audio at {stored.sampling_rate} Hz, and the source was trained at "
            f"{SAMPLING_RATE} Hz: prepare the data again, `pruned-rnnt prepare` resamples"
        )
    return ""
