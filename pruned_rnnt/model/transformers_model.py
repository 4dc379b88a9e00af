"""A model of the transformers library: its settings here, its module and pretrained parameters."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from pruned_rnnt.config.checks import check_at_least
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.system.optional_packages import require

SAMPLING_RATE = 16000
# A feature frame of 10 ms.
SAMPLES_PER_FRAME = 160
# Model types that read samples, and those that read their own log-mel energies.
WAVEFORM_TYPES = ("wav2vec2", "hubert", "wavlm")
WHISPER = "whisper"
_TYPES = (*WAVEFORM_TYPES, WHISPER)
# The embedding of masked frames, which some published models lack: it only serves training.
_MAY_BE_MISSING = ("masked_spec_embed",)


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(EncoderConfig):
    """An encoder of the transformers library, which reads samples: set data.features=waveform.

    Every two of its frames of 20 ms are joined and projected to one of 40 ms.

    kind: transformers
    features: `samples` alone.
    num_mel_bins: samples of a feature frame of 10 ms, 160.
    name_or_folder: pretrained model to start from, a folder or a repository of the Hugging Face
        hub: wav2vec 2.0, HuBERT, WavLM or Whisper. Read once, when a training starts; the run then
        has all that it needs.
    settings: the model's configuration in the transformers library, as JSON. Training reads it from
        name_or_folder if it is empty. With settings and no name_or_folder, parameters are random.
    normalise: scale the samples of each utterance to mean 0 and variance 1, as the model was
        trained; null reads it from the model's preprocessor_config.json, and is false without
        name_or_folder. Not used by Whisper.
    dim: width of the encoder's output.
    frozen: parameters that are not trained: `convolutions` are the layers below the transformer,
        `all` leaves only the projection, and switches off dropout and masks, too.
    rate: factor of the learning rate of the top layer of the model, and of its norms above.
    layer_decay: factor of the learning rate from each layer to the one below it. Fine-tuning with
        train.init has finetune.layer_decay instead, and no `rate`.
    """

    kind: Literal["transformers"] = "transformers"
    features: Literal["samples"] = "samples"
    num_mel_bins: int = SAMPLES_PER_FRAME
    name_or_folder: str = ""
    settings: str = ""
    normalise: bool | None = None
    dim: int = 512
    frozen: Literal["none", "convolutions", "all"] = "convolutions"
    rate: float = 1.0
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        if self.num_mel_bins != SAMPLES_PER_FRAME:
            raise ValueError(
                f"model.encoder.num_mel_bins is {self.num_mel_bins}, but an encoder of kind "
                f"transformers reads {SAMPLES_PER_FRAME} samples a frame: leave it out"
            )
        if self.causal:
            raise ValueError(
                "model.encoder.causal is true, but an encoder of kind transformers needs whole "
                "utterances: use zipformer or conformer for live audio"
            )
        check_at_least("model.encoder", self, dim=1)
        for name in ("rate", "layer_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"model.encoder.{name} is {getattr(self, name)}, needs 0 < {name} <= 1"
                )


def with_settings(config: TransformersConfig) -> TransformersConfig:
    """The configuration with what it takes from `name_or_folder`; it is whole without that.

    Raises:
        MissingPackageError: transformers is not installed.
        ValueError: there is no such model, or it is not of a supported type.
    """
    if config.settings and (config.normalise is not None or not config.name_or_folder):
        return config
    require("transformers")
    if not config.name_or_folder:
        raise ValueError(
            "model.encoder.name_or_folder is empty: name a folder or a repository of the Hugging "
            "Face hub with a pretrained model, or give model.encoder.settings for random parameters"
        )
    import transformers

    name = config.name_or_folder
    settings = config.settings
    if not settings:
        try:
            found = transformers.AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            where = "" if Path(name).is_dir() else " (no local folder, so looked up on the hub)"
            raise ValueError(f"model.encoder.name_or_folder is {name!r}{where}: {error}") from error
        settings = found.to_json_string(use_diff=True).replace("\n", "")
        settings = json.dumps(json.loads(settings), separators=(",", ":"))
    whole = replace(config, settings=settings)
    is_whisper = library_config(whole).model_type == WHISPER
    normalise = config.normalise
    if is_whisper or normalise is None:
        normalise = _preprocessing(name, is_whisper)
    return replace(whole, normalise=normalise)


def _preprocessing(name: str, is_whisper: bool) -> bool:
    """Whether the samples are normalised, after a check of the rest of the preprocessor."""
    import transformers

    try:
        extractor = transformers.AutoFeatureExtractor.from_pretrained(name)
    except (OSError, ValueError) as error:
        if is_whisper:
            return False
        raise ValueError(
            f"model.encoder.name_or_folder is {name!r}, which has no preprocessor_config.json: set "
            f"model.encoder.normalise to true or false, as the model was trained ({error})"
        ) from error
    wanted: dict[str, Any] = {"sampling_rate": SAMPLING_RATE}
    if is_whisper:
        wanted |= {"n_fft": 400, "hop_length": SAMPLES_PER_FRAME}
    for key, value in wanted.items():
        if getattr(extractor, key, value) != value:
            raise ValueError(
                f"model.encoder.name_or_folder is {name!r}, whose {key} is "
                f"{getattr(extractor, key)}; needs {value}"
            )
    return bool(getattr(extractor, "do_normalize", False)) and not is_whisper


def library_config(config: TransformersConfig) -> Any:
    """The transformers configuration that `settings` describe.

    Raises:
        MissingPackageError: transformers is not installed.
        ValueError: `settings` are empty or not readable, or of a type that is not supported.
    """
    require("transformers")
    import transformers

    if not config.settings:
        raise ValueError(
            "model.encoder.settings is empty: an encoder of kind transformers is built from the "
            "settings of its model, which `pruned-rnnt train` reads from name_or_folder"
        )
    try:
        values = json.loads(config.settings)
    except ValueError as error:
        raise ValueError(f"model.encoder.settings is not JSON: {error}") from error
    found = values.pop("model_type", None) if isinstance(values, dict) else None
    if found not in _TYPES:
        raise ValueError(
            f"model.encoder.settings has model_type {found!r}, needs one of {', '.join(_TYPES)}"
        )
    # The library would build, and we would train, a module of the dtype of the pretrained file.
    for key in ("dtype", "torch_dtype"):
        values.pop(key, None)
    made = transformers.AutoConfig.for_model(found, **values)
    if getattr(made, "add_adapter", False):
        raise ValueError(
            "model.encoder.settings has add_adapter=true, which changes the frame rate: "
            "only models without an adapter are supported"
        )
    if found == WHISPER:
        made._attn_implementation = "sdpa"  # its masks may be bool
    return made


def random_network(config: TransformersConfig) -> nn.Module:
    """The library's module with random parameters; of Whisper, the encoder."""
    import transformers

    settings = library_config(config)
    if settings.model_type == WHISPER:
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        network: nn.Module = WhisperEncoder(settings)
    else:
        network = transformers.AutoModel.from_config(settings)
    if settings.model_type == "wavlm":
        # The library passes torch a mask of bools and a bias of floats. One filter, because a
        # `catch_warnings` around each pass would let other warnings repeat with every step.
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask and attn_mask")
    return network


def load_pretrained(network: nn.Module, config: TransformersConfig) -> None:
    """Load the parameters of `name_or_folder` into a module of `random_network`.

    Raises:
        ValueError: there are none, or some of the module's are not among them.
    """
    import transformers

    name = config.name_or_folder
    settings = library_config(config)
    try:
        source, report = transformers.AutoModel.from_pretrained(
            name, config=settings, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"model.encoder.name_or_folder is {name!r}: {error}") from error
    prefix = ""
    if settings.model_type == WHISPER:
        source, prefix = source.get_encoder(), "encoder."
    missing = [
        key
        for key in (*report["missing_keys"], *map(str, report.get("mismatched_keys", ())))
        if key.startswith(prefix) and key.removeprefix(prefix) not in _MAY_BE_MISSING
    ]
    if missing:
        raise ValueError(
            f"model.encoder.name_or_folder is {name!r}, which lacks parameters of its encoder, "
            f"for example {missing[0]}: it is no model of type {settings.model_type}"
        )
    network.load_state_dict(source.state_dict())
