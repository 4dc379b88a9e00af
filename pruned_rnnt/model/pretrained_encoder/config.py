"""Settings of the encoders of the transformers library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pruned_rnnt.config.checks import check_at_least
from pruned_rnnt.model.encoder import EncoderConfig

SAMPLING_RATE = 16000
# A feature frame of 10 ms.
SAMPLES_PER_FRAME = 160


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(EncoderConfig):
    """An encoder of the transformers library, which reads samples: set data.features=waveform.

    Every two of its frames of 20 ms are joined and projected to one of 40 ms.

    kind: transformers
    features: samples
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
    features: Literal["fbank", "nemo", "samples"] = "samples"
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
        if self.features != "samples":
            raise ValueError(
                f"model.encoder.features is {self.features}, but an encoder of kind transformers "
                "reads samples: leave it out"
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
