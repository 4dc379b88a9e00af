"""The model that fine-tuning starts from: load it from a run, a model file or a file of another
toolkit, and check that data and settings fit it.

Axes: F mel bins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pruned_rnnt.config.load import ConfigError, differences, load_config, to_dict
from pruned_rnnt.data.audio.features import FEATURE_DIM, SAMPLING_RATE, FeatureKind
from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig, SpecAugmentConfig
from pruned_rnnt.data.input.filters import FilterConfig, cut_text
from pruned_rnnt.data.input.manifest_items import item_of, spread_lines
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.export import model_file
from pruned_rnnt.interop.icefall_run import read_run
from pruned_rnnt.interop.nemo import imported_model as nemo
from pruned_rnnt.interop.nemo.files import WEIGHTS
from pruned_rnnt.licences.chain import Chain, Origin, chain_of_weights
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.pretrained.found_model import FoundModel, NoModelError, find_model
from pruned_rnnt.pretrained.hub import HubError, hub_name, local_path, source_name
from pruned_rnnt.train.experiment import ExperimentConfig, FinetuneConfig
from pruned_rnnt.train.run import load_model, run_config
from pruned_rnnt.train.run_chain import chain_of_run, with_itself

# Training settings for a model file, which has none.
_ZIPFORMER_TRAINING = (
    "optimiser.name=scaled_adam",
    "optimiser.learning_rate=0.045",
    "train.precision=bfloat16",
)
# Utterances of each split that are checked, at equal distances: up to twice as many.
_MOST_CUTS = 5_000
_FRAME_SHIFT = 0.01
# Files that have these names in all runs of icefall, and in all exports of this package.
_SHARED_NAME = re.compile(r"(model|pretrained|(epoch|checkpoint)-\d+)\.\w+")
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
    "encoder.smallest_chunk_steps",
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
class Source:
    """A trained model on the CPU in evaluation mode.

    name: for the log, and for the folder of the new run: that of the repository, run, file or
        folder.
    config: with its sections model and loss, and for a run all others.
    data_path: the data that it was trained on; empty if unknown.
    origins: what it was made from, and itself.
    """

    name: str
    model: SpeechModel
    tokenizer: Tokenizer
    config: ExperimentConfig
    data_path: str = ""
    origins: tuple[Origin, ...] = ()

    def __post_init__(self) -> None:
        # Now, not after the source has decoded its test sets.
        self.model.encoder.check_trainable()


def load_source(path: Path, config: FinetuneConfig) -> Source:
    """Load the source at `path`.

    Args:
        path: the folder of a run, one of its checkpoints, a file or folder that `pruned-rnnt
            export --format torch` wrote, an icefall checkpoint, a `.nemo` archive, a folder of
            transformers or with one such archive, or the name of a repository of the hub with one
            of these.
        config: which checkpoint of a run, and the tokens of an icefall checkpoint.

    Raises:
        ConfigError: the path does not exist, or there are no tokens.
        ValueError: the file cannot be used; the message has the reason.
    """
    named = path
    try:
        path = local_path(path)
    except HubError as error:
        raise ConfigError(f"train.init={path}: {error}") from error
    source = source_name(named, path)
    if not path.exists():
        raise ConfigError(
            f"train.init={path}: there is no such run or file. To continue a run that was started "
            "from it: pruned-rnnt train RUN"
        )
    tokens = Path(config.tokens) if config.tokens else None
    try:
        found = find_model(path, tokens)
    except NoModelError as error:
        raise ConfigError(
            f"train.init={error} (finetune.tokens=FILE names the tokens of an icefall checkpoint)"
        ) from error
    # A folder in the hub's cache has the name of a commit, and a file there is a link to a digest.
    name = hub_name(str(named)).repository.partition("/")[2] if source else _own_name(found)
    if found.kind == "run":
        return _run(found.path, str(found.checkpoint or config.checkpoint), name, source)
    if found.kind == "file":
        return _model_file(found.path, name, source)
    if found.kind == "onnx":
        raise ConfigError(
            f"train.init={path}: ONNX files cannot be trained; name the run or its model.pt"
        )
    if found.kind == "nemo":
        return _nemo(found.path, name, source)
    return _icefall(found, name, source, trust=config.trust)


def _own_name(found: FoundModel) -> str:
    """The name of a file or folder here, or of the folder above if all models share the name."""
    path = found.path
    path = path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    if found.kind == "run":
        return path.name
    if _SHARED_NAME.fullmatch(path.name):
        path = path.parent
        if path.parent.name == "export":  # RUN/export/FORMAT
            path = path.parent.parent
        elif path.name == "exp":  # of icefall's recipes, and of repositories with their models
            path = path.parent
    return (path.stem if path.is_file() else path.name) or found.path.stem


def _run(folder: Path, which: str, name: str, source: str) -> Source:
    saved = run_config(folder)
    loaded = load_model(
        replace(
            saved,
            decode=replace(saved.decode, checkpoint=which),
            train=replace(saved.train, device="cpu"),
        )
    )
    return Source(
        name=name,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        config=saved,
        data_path=saved.data.path,
        origins=with_itself(chain_of_run(saved), name, loaded.model, source),
    )


def _model_file(file: Path, name: str, source: str) -> Source:
    loaded = model_file.load_model(file)
    is_zipformer = loaded.model.config.encoder.kind == "zipformer"
    training = load_config(ExperimentConfig, None, _ZIPFORMER_TRAINING if is_zipformer else ())
    features = loaded.model.config.encoder.features
    # Samples are no log-mel energies, which it masks.
    spec_augment = SpecAugmentConfig(enabled=features != "samples")
    config = ExperimentConfig(
        data=DataConfig(
            features="stored" if features == "fbank" else "waveform",
            filters=FilterConfig(subsampling_factor=loaded.model.encoder.subsampling_factor),
            augmentation=AugmentationConfig(spec_augment=spec_augment),
        ),
        model=loaded.model.config,
        loss=loaded.model.loss_config,
        optimiser=training.optimiser,
        train=training.train,
    )
    return Source(
        name=name,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        config=config,
        origins=with_itself(loaded.chain or Chain(), name, loaded.model, source),
    )


def _icefall(found: FoundModel, name: str, source: str, *, trust: bool) -> Source:
    assert found.tokens is not None
    path = found.path
    run = read_run(path, found.tokens, Path("exp/icefall"), trust=trust)
    return Source(
        name=name,
        model=run.model,
        tokenizer=run.tokenizer,
        config=run.config,
        origins=chain_of_weights(path, source=source),
    )


def _nemo(path: Path, name: str, source: str) -> Source:
    run = nemo.read_run(path, Path("exp/nemo"))
    weights = path if path.is_file() else path / WEIGHTS
    return Source(
        name=name,
        model=run.model,
        tokenizer=run.tokenizer,
        config=run.config,
        origins=chain_of_weights(weights, source=source),
    )


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
    """Check the features of a prepared folder; returns its texts. Of a large split, utterances at
    equal distances are read.

    Args:
        path: the folder.
        kind: the features of the source.
        splits: the splits to read.

    Raises:
        ConfigError: the features are not those that the source was trained on.
        FileNotFoundError: the folder has no such split.
        ValueError: as `item_of`.
    """
    folder = PreparedFolder(Path(path), config.allow_commands)
    texts: list[str] = []
    for split in splits:
        for line in spread_lines(folder.manifests(split), _MOST_CUTS):
            cut = item_of(line, config.allow_commands)
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
