"""Configurations of NeMo and transformers for a model of this package."""

from __future__ import annotations

from typing import Any

from pruned_rnnt.data.tokens.tokenizer import SOS_EOS_ID, Tokenizer
from pruned_rnnt.model.fastconformer import FastConformer, FastConformerConfig
from pruned_rnnt.model.lstm_predictor import LstmPredictorConfig
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.model.transducer_model import TransducerModel

_MODULES = "nemo.collections.asr.modules."
_MODELS = "nemo.collections.asr.models."
# Symbols without sos/eos, and without the blank.
_ABSENT = 2


def _encoder(model: SpeechModel) -> FastConformerConfig:
    assert isinstance(model.encoder, FastConformer)
    return model.encoder.config


def nemo_config(model: SpeechModel, tokenizer: Tokenizer, tokenizer_name: str) -> dict[str, Any]:
    """The values of model_config.yaml.

    Raises:
        ValueError: names a setting that NeMo does not have.
    """
    encoder = _encoder(model)
    if encoder.feedforward_dim % encoder.dim:
        raise ValueError(
            f"model.encoder.feedforward_dim is {encoder.feedforward_dim}; NeMo needs a multiple of "
            f"model.encoder.dim = {encoder.dim}"
        )
    symbols = tokenizer.symbols[SOS_EOS_ID + 1 :]
    head = {
        "_target_": _MODULES + "ConvASRDecoder",
        "feat_in": encoder.dim,
        "num_classes": len(symbols),
        "vocabulary": symbols,
    }
    kind = "hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel"
    if not isinstance(model, TransducerModel):
        kind = "ctc_bpe_models.EncDecCTCModelBPE"
    elif model.ctc_head is None:
        kind = "rnnt_bpe_models.EncDecRNNTBPEModel"
    config: dict[str, Any] = {
        "target": _MODELS + kind,
        "sample_rate": 16000,
        "preprocessor": {
            "_target_": _MODULES + "AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "per_feature" if encoder.feature_norm == "bins" else "NA",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": encoder.num_mel_bins,
            "n_fft": 512,
            "frame_splicing": 1,
            "dither": 1e-5,
            "pad_to": 0,
        },
        "encoder": _nemo_encoder(encoder),
        "tokenizer": {
            "type": "bpe",
            "dir": None,
            "model_path": f"nemo:{tokenizer_name}",
            "vocab_path": "nemo:vocab.txt",
            "spe_tokenizer_vocab": None,
        },
    }
    if not isinstance(model, TransducerModel):
        return {**config, "decoder": head}
    if model.ctc_head is not None:
        config["aux_ctc"] = {
            "ctc_loss_weight": model.loss_config.ctc_scale,
            "decoder": head,
            "decoding": {"strategy": "greedy"},
        }
    return {**config, **_nemo_transducer(model, len(symbols))}


def _nemo_encoder(encoder: FastConformerConfig) -> dict[str, Any]:
    left, right = encoder.window or (-1, -1)
    if encoder.causal:
        right = encoder.chunk_size - 1
        left = -1 if encoder.left_chunks is None else encoder.left_chunks * encoder.chunk_size
    return {
        "_target_": _MODULES + "ConformerEncoder",
        "feat_in": encoder.num_mel_bins,
        "feat_out": -1,
        "n_layers": encoder.layers,
        "d_model": encoder.dim,
        "subsampling": "dw_striding",
        "subsampling_factor": 8,
        "subsampling_conv_channels": encoder.subsampling_channels,
        "causal_downsampling": encoder.causal,
        "ff_expansion_factor": encoder.feedforward_dim // encoder.dim,
        "self_attention_model": "rel_pos",
        "n_heads": encoder.heads,
        "att_context_size": [left, right],
        "att_context_style": "chunked_limited" if encoder.causal else "regular",
        "xscaling": encoder.scale_input,
        "untie_biases": True,
        "pos_emb_max_len": 5000,
        "use_bias": encoder.bias,
        "conv_kernel_size": encoder.kernel_size,
        "conv_norm_type": f"{encoder.convolution_norm}_norm",
        "conv_context_size": "causal" if encoder.causal else None,
        "dropout": encoder.dropout,
        "dropout_pre_encoder": encoder.dropout,
        "dropout_emb": 0.0,
        "dropout_att": encoder.dropout,
    }


def _nemo_transducer(model: TransducerModel, symbols: int) -> dict[str, Any]:
    predictor, durations = model.config.predictor, list(model.loss_config.durations)
    assert isinstance(predictor, LstmPredictorConfig)
    widths = {
        "enc_hidden": model.encoder.output_dim,
        "pred_hidden": predictor.dim,
        "joint_hidden": model.config.joiner_dim,
    }
    joint: dict[str, Any] = {
        "_target_": _MODULES + "RNNTJoint",
        "log_softmax": None,
        "preserve_memory": False,
        "fuse_loss_wer": False,
        "num_classes": symbols,
        "vocabulary": [],
        "jointnet": {
            "joint_hidden": model.config.joiner_dim,
            "activation": model.joiner.activation,
            "dropout": 0.2,
            "encoder_hidden": model.encoder.output_dim,
            "pred_hidden": predictor.dim,
        },
    }
    decoding: dict[str, Any] = {"strategy": "greedy_batch", "greedy": {"max_symbols": 10}}
    loss: dict[str, Any] = {"loss_name": "default"}
    if durations:
        joint["num_extra_outputs"] = len(durations)
        decoding |= {"model_type": "tdt", "durations": durations}
        config = model.loss_config
        kwargs = {"durations": durations, "sigma": config.sigma, "omega": config.omega}
        loss = {"loss_name": "tdt", "tdt_kwargs": kwargs}
    return {
        "model_defaults": widths | ({"tdt_durations": durations} if durations else {}),
        "decoder": {
            "_target_": _MODULES + "RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "vocab_size": symbols,
            "prednet": {
                "pred_hidden": predictor.dim,
                "pred_rnn_layers": predictor.layers,
                "t_max": None,
                "dropout": predictor.dropout,
            },
        },
        "joint": joint,
        "decoding": decoding,
        "loss": loss,
    }


def transformers_config(model: SpeechModel) -> dict[str, Any]:
    """The values of config.json.

    Raises:
        ValueError: names a setting that transformers does not have.
    """
    encoder = _encoder(model)
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
    durations = list(model.loss_config.durations)
    kind = "TDT" if durations else "RNNT"
    return {
        "architectures": [f"ParakeetFor{kind}"],
        "model_type": f"parakeet_{kind.lower()}",
        "blank_token_id": blank,
        "decoder_hidden_size": width,
        "num_decoder_layers": predictor.layers,
        "hidden_act": model.joiner.activation,
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
