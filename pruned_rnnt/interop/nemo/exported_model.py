"""Export models with a FastConformer to NeMo and transformers: the reverse of imported_model.py.

The symbol sos/eos, which models there lack, is left out; the blank comes last.

Axes: V symbols without the blank.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from pruned_rnnt.data.audio.features import nemo_constants
from pruned_rnnt.data.tokens.tokenizer import SOS_EOS_ID, Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.search.tdt_greedy import SHERPA_MAX_SYMBOLS
from pruned_rnnt.interop.nemo.files import CONFIG_JSON, TOKENIZER, WEIGHTS, write_safetensors
from pruned_rnnt.interop.nemo.parts import (
    TRANSFORMERS_PREFIXES,
    encoder_to_nemo,
    parts_to_nemo,
    renamed,
)
from pruned_rnnt.interop.nemo.symbols import sentencepiece_of, tokenizer_json_of
from pruned_rnnt.interop.nemo.topology import MAX_SYMBOLS
from pruned_rnnt.model.fastconformer import FastConformer, FastConformerConfig
from pruned_rnnt.model.predictor import LstmPredictor, LstmPredictorConfig
from pruned_rnnt.model.speech_model import BLANK, SpeechModel, TransducerModel

StateDict = dict[str, Tensor]

_MODULES = "nemo.collections.asr.modules."
_MODELS = "nemo.collections.asr.models."
_TOKENIZER_NAME = "tokenizer.model"
_BY_SYMBOL = ("decoder.prediction.embed.", "joint.joint_net.", "ctc_decoder.", "decoder.decoder_")
# Symbols without sos/eos, and without the blank.
_ABSENT = 2


def export_model(
    model: SpeechModel,
    tokenizer: Tokenizer,
    path: Path | str,
    *,
    max_symbols_per_frame: int = 0,
) -> None:
    """Write a `.nemo` archive, or a folder of transformers for any other name.

    Args:
        max_symbols_per_frame: that greedy search emits at most there. 0 chooses 10, the default of
            both packages. It is 1 for a model of a loss.rnnt_type other than regular.

    Raises:
        ValueError: the path exists, or the model has something that the other package cannot
            compute; the message names the setting.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists: choose another path")
    _check(model)
    most = max_symbols_per_frame or MAX_SYMBOLS
    if not _is_regular(model):
        most = 1
    if path.suffix == ".nemo":
        _write_archive(path, model, tokenizer, most)
    else:
        _write_folder(path, model, tokenizer, most)


def archive_differences(model: SpeechModel, decode: DecodeConfig) -> Iterator[str]:
    """One line for each setting that may make the texts of NeMo differ from the run's."""
    is_transducer = isinstance(model, TransducerModel)
    if is_transducer and _is_regular(model) and not decode.max_symbols_per_frame:
        most = SHERPA_MAX_SYMBOLS if model.loss_config.durations else 1
        yield (
            f"decode.max_symbols_per_frame is 0: greedy search here emits at most {most} per "
            f"frame, and the archive says {MAX_SYMBOLS}, NeMo's default (give a number for both)"
        )


def _is_regular(model: SpeechModel) -> bool:
    return model.loss_config.rnnt_type == "regular"


def _check(model: SpeechModel) -> None:
    """Raise ValueError for what both packages lack."""
    kind = model.config.encoder.kind
    if not isinstance(model.encoder, FastConformer):
        raise ValueError(f"model.encoder.kind is {kind}; NeMo and transformers need fastconformer")
    if model.encoder.config.features != "nemo":
        raise ValueError(
            "model.encoder.features is fbank; NeMo and transformers need a model that was trained "
            "with model.encoder.features=nemo"
        )
    norm = model.encoder.config.feature_norm
    if norm not in ("bins", "none"):
        raise ValueError(f"model.encoder.feature_norm is {norm}; supported: bins, none")
    if isinstance(model, TransducerModel):
        if not isinstance(model.predictor, LstmPredictor):
            raise ValueError("model.predictor.kind is stateless; supported: lstm")
        if model.loss_config.hat:
            raise ValueError("loss.hat is true; NeMo and transformers have no HAT")


@torch.no_grad()
def nemo_state(model: SpeechModel) -> StateDict:
    """The parameters under NeMo's names, with its constants of the features."""
    window_S, filters_FB = nemo_constants(torch.device("cpu"), model.encoder.config.num_mel_bins)
    own = model.encoder.state_dict()
    state = {f"encoder.{name}": x for name, x in encoder_to_nemo(own).items()}
    if isinstance(model, TransducerModel):
        state |= parts_to_nemo(model.joiner, model.predictor, model.ctc_head)
    else:
        assert model.ctc_head is not None
        order = [i for i in range(model.vocab_size) if i != BLANK] + [BLANK]
        state["decoder.decoder_layers.0.weight"] = model.ctc_head.weight[order][..., None]
        state["decoder.decoder_layers.0.bias"] = model.ctc_head.bias[order]
    for name, value in state.items():
        if name.startswith(_BY_SYMBOL):
            # Behind the blank's move to the end, sos/eos is the first.
            state[name] = value[SOS_EOS_ID:].clone()
    state["preprocessor.featurizer.window"] = window_S.clone()
    state["preprocessor.featurizer.fb"] = filters_FB[None].clone()
    return {name: x.detach().cpu().contiguous() for name, x in state.items()}


def _write_archive(path: Path, model: SpeechModel, tokenizer: Tokenizer, most: int) -> None:
    weights = io.BytesIO()
    torch.save(nemo_state(model), weights)
    config = _nemo_config(model, tokenizer, _TOKENIZER_NAME, most)
    files = {
        "model_config.yaml": OmegaConf.to_yaml(OmegaConf.create(config)).encode(),
        _TOKENIZER_NAME: sentencepiece_of(tokenizer),
        "vocab.txt": "\n".join(tokenizer.symbols[SOS_EOS_ID + 2 :]).encode(),
        "model_weights.ckpt": weights.getvalue(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _write_folder(path: Path, model: SpeechModel, tokenizer: Tokenizer, most: int) -> None:
    config = _transformers_config(model, most)
    state: StateDict = {}
    start = {nemo: theirs for theirs, nemo in TRANSFORMERS_PREFIXES.items()}
    for name, value in nemo_state(model).items():
        if name.startswith("encoder."):
            inner = renamed(name.removeprefix("encoder."), "transformers", "nemo")
            state[f"encoder.{inner}"] = value
            continue
        name = name.replace("decoder.decoder_layers.", "ctc_decoder.decoder_layers.")
        for nemo, theirs in start.items():
            if name.startswith(nemo):
                state[theirs + name.removeprefix(nemo)] = value
    path.mkdir(parents=True)
    write_safetensors(path / WEIGHTS, state)
    (path / TOKENIZER).write_bytes(tokenizer_json_of(tokenizer))
    (path / CONFIG_JSON).write_text(json.dumps(config, indent=2) + "\n")
    if isinstance(model, TransducerModel):
        # `generate` starts a text with the blank. The end is an id that no symbol has: without one,
        # it does not fill the texts of the shorter recordings in a batch, but goes on with them.
        blank = config["blank_token_id"]
        generation = {
            "decoder_start_token_id": blank,
            "pad_token_id": blank,
            "eos_token_id": blank + 1,
        }
        (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    extractor = _extractor_config(model.encoder.config.num_mel_bins)
    (path / "preprocessor_config.json").write_text(json.dumps(extractor, indent=2) + "\n")


def _encoder(model: SpeechModel) -> FastConformerConfig:
    assert isinstance(model.encoder, FastConformer)
    return model.encoder.config


def _nemo_config(
    model: SpeechModel, tokenizer: Tokenizer, tokenizer_name: str, most: int
) -> dict[str, Any]:
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
    return {**config, **_nemo_transducer(model, len(symbols), most)}


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


def _nemo_transducer(model: TransducerModel, symbols: int, most: int) -> dict[str, Any]:
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
    if not _is_regular(model):
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


def _transformers_config(model: SpeechModel, most: int) -> dict[str, Any]:
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
    if not _is_regular(model):
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


def _extractor_config(num_mel_bins: int) -> dict[str, Any]:
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
