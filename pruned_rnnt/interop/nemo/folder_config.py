"""The configurations of a folder of transformers that is written; topology.py reads them."""

from __future__ import annotations

from typing import Any

from pruned_rnnt.model.fastconformer import FastConformer
from pruned_rnnt.model.predictor import LstmPredictorConfig
from pruned_rnnt.model.speech_model import SpeechModel, TransducerModel

# Symbols without sos/eos, and without the blank.
_ABSENT = 2


def folder_config(model: SpeechModel, most: int) -> dict[str, Any]:
    """The values of config.json.

    Raises:
        ValueError: names a setting that transformers does not have.
    """
    assert isinstance(model.encoder, FastConformer)
    encoder = model.encoder.config
    for name, value, needed in (
        ("causal", encoder.causal, False),
        ("window", encoder.window, None),
        ("convolution_norm", encoder.convolution_norm, "batch"),
        ("feature_norm", encoder.feature_norm, "bins"),
    ):
        if value != needed:
            raise ValueError(
                f"model.encoder.{name} is {value}; transformers supports only {needed}: export to "
                "a .nemo archive"
            )
    # transformers computes the width behind the convolutions by a division without remainder.
    if encoder.num_mel_bins % 8:
        raise ValueError(
            f"model.encoder.num_mel_bins is {encoder.num_mel_bins}; transformers needs a multiple "
            "of eight"
        )
    blank = model.vocab_size - _ABSENT
    config: dict[str, Any] = {
        "vocab_size": blank + 1,
        "encoder_config": {
            "model_type": "parakeet_encoder",
            "hidden_size": encoder.dim,
            "num_hidden_layers": encoder.layers,
            "num_attention_heads": encoder.heads,
            "intermediate_size": encoder.feedforward_dim,
            "attention_bias": encoder.bias,
            "convolution_bias": encoder.bias,
            "conv_kernel_size": encoder.kernel_size,
            "subsampling_conv_channels": encoder.subsampling_channels,
            "num_mel_bins": encoder.num_mel_bins,
            "scale_input": encoder.scale_input,
            "dropout": encoder.dropout,
        },
    }
    if not isinstance(model, TransducerModel):
        return {
            "architectures": ["ParakeetForCTC"],
            "model_type": "parakeet_ctc",
            "pad_token_id": blank,
            **config,
        }
    predictor, width = model.config.predictor, model.config.joiner_dim
    assert isinstance(predictor, LstmPredictorConfig)
    if predictor.dim != width:
        raise ValueError(
            f"model.predictor.dim is {predictor.dim} and model.joiner_dim {width}; transformers "
            "needs the same for both: export to a .nemo archive"
        )
    if model.ctc_head is not None:
        raise ValueError(
            f"loss.ctc_scale is {model.loss_config.ctc_scale}; transformers has no transducer with "
            "a CTC head: export to a .nemo archive"
        )
    if model.loss_config.rnnt_type != "regular":
        # With max_symbols_per_step=1, its `generate` leaves out the last frame.
        raise ValueError(
            f"loss.rnnt_type is {model.loss_config.rnnt_type}; transformers supports only regular: "
            "export to a .nemo archive"
        )
    durations = list(model.loss_config.durations)
    kind = "TDT" if durations else "RNNT"
    return {
        "architectures": [f"ParakeetFor{kind}"],
        "model_type": f"parakeet_{kind.lower()}",
        "blank_token_id": blank,
        "pad_token_id": blank,
        "decoder_hidden_size": width,
        "num_decoder_layers": predictor.layers,
        "hidden_act": model.joiner.activation,
        "max_symbols_per_step": most,
        **({"durations": durations} if durations else {}),
        **config,
    }


def extractor_config(num_mel_bins: int) -> dict[str, Any]:
    """The values of preprocessor_config.json."""
    return {
        "feature_extractor_type": "ParakeetFeatureExtractor",
        "feature_size": num_mel_bins,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 512,
        "win_length": 400,
        "preemphasis": 0.97,
        "padding_value": 0.0,
    }
