"""The configuration of a `.nemo` archive that is written; topology.py reads it."""

from __future__ import annotations

from typing import Any

from pruned_rnnt.data.tokens.tokenizer import SOS_EOS_ID, Tokenizer
from pruned_rnnt.model.fastconformer import FastConformer, FastConformerConfig
from pruned_rnnt.model.predictor import LstmPredictorConfig
from pruned_rnnt.model.speech_model import SpeechModel, TransducerModel

_MODULES = "nemo.collections.asr.modules."
_MODELS = "nemo.collections.asr.models."


def archive_config(
    model: SpeechModel, tokenizer: Tokenizer, tokenizer_name: str, most: int
) -> dict[str, Any]:
    """The values of model_config.yaml.

    Raises:
        ValueError: names a setting that NeMo does not have.
    """
    assert isinstance(model.encoder, FastConformer)
    encoder = model.encoder.config
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
        "encoder": _encoder_config(encoder),
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
    return {**config, **_transducer_config(model, len(symbols), most)}


def _encoder_config(encoder: FastConformerConfig) -> dict[str, Any]:
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


def _transducer_config(model: TransducerModel, symbols: int, most: int) -> dict[str, Any]:
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
    decoding: dict[str, Any] = {"strategy": "greedy_batch", "greedy": {"max_symbols": most}}
    loss: dict[str, Any] = {"loss_name": "default"}
    if model.loss_config.rnnt_type != "regular":
        # NeMo ignores the key; the import here reads it.
        loss["rnnt_type"] = model.loss_config.rnnt_type
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
