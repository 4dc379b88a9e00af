"""What a configuration of NeMo or transformers says about a model, as settings of this package.

Each key that changes what a model computes is read or checked; other values than the supported ones
are errors that name the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pruned_rnnt.model.fastconformer import FastConformerConfig
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import LstmPredictorConfig

_TRANSDUCER, _CTC, _HYBRID = "transducer", "ctc", "hybrid"
_NEMO_KINDS = {
    "EncDecRNNTBPEModel": _TRANSDUCER,
    "EncDecCTCModelBPE": _CTC,
    "EncDecHybridRNNTCTCBPEModel": _HYBRID,
}
TRANSFORMERS_KINDS = {
    "parakeet_ctc": _CTC,
    "parakeet_rnnt": _TRANSDUCER,
    "parakeet_tdt": _TRANSDUCER,
}
# Keys of NeMo's encoder, and the only values that are supported.
_ENCODER = {
    "feat_out": (-1,),
    "subsampling": ("dw_striding",),
    "subsampling_factor": (8,),
    "reduction": (None,),
    "untie_biases": (True,),
    "self_attention_model": ("rel_pos",),
    "att_context_style": ("regular", "chunked_limited"),
    "conv_norm_type": ("batch_norm", "layer_norm"),
    "global_tokens": (0,),
}
# In samples or in seconds: NeMo takes one of both.
_PREPROCESSOR = {
    "sample_rate": (16000,),
    "window_size": (0.025, None),
    "n_window_size": (400, None),
    "window_stride": (0.01, None),
    "n_window_stride": (160, None),
    "window": ("hann",),
    "n_fft": (512,),
    "preemph": (0.97,),
    "frame_splicing": (1,),
    "log": (True,),
    "mel_norm": ("slaney",),
    "mag_power": (2.0,),
    "lowfreq": (0,),
    "highfreq": (None, 8000),
    "log_zero_guard_type": ("add",),
    "log_zero_guard_value": (2**-24,),
    "exact_pad": (False,),
    "normalize": ("per_feature", "NA", None),
}
# The same features, as preprocessor_config.json of transformers has them.
EXTRACTOR_SECTION = "preprocessor_config"
_EXTRACTOR = {
    "feature_extractor_type": ("ParakeetFeatureExtractor",),
    "sampling_rate": (16000,),
    "hop_length": (160,),
    "win_length": (400,),
    "n_fft": (512,),
    "preemphasis": (0.97,),
}
# Symbols per frame at most where a file gives no number: transformers' default. NeMo has no limit.
MAX_SYMBOLS = 10
_MAX_SYMBOLS_KEYS = ("max_symbols", "max_symbols_per_step")
# Of loss.rnnt_type: archives of this package have that key, and NeMo ignores it.
_RNNT_TYPES = ("regular", "modified", "constrained", "rna")
# The last ones are those of pruned_rnnt.compat.nemo_loss.
_RNNT_LOSSES = ("default", "warprnnt_numba", "pytorch", "warprnnt", "pruned_rnnt")
_TDT_LOSSES = ("tdt", "pruned_rnnt_tdt")
_TRANSFORMERS_ENCODER = {
    "hidden_act": ("silu",),
    "subsampling_factor": (8,),
    "subsampling_conv_kernel_size": (3,),
    "subsampling_conv_stride": (2,),
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A model of this package that computes the same.

    max_symbols: that greedy search emits at most in a frame.
    """

    model: ModelConfig
    loss: LossConfig
    max_symbols: int = MAX_SYMBOLS

    @property
    def is_ctc(self) -> bool:
        return self.loss.kind == "ctc"


def _check(section: str, values: Mapping[str, Any], supported: Mapping[str, Sequence[Any]]) -> None:
    for key, allowed in supported.items():
        if key in values and values[key] not in allowed:
            raise ValueError(
                f"{section}.{key} is {values[key]!r}; supported: {', '.join(map(repr, allowed))}"
            )


def _check_target(section: str, values: Mapping[str, Any], supported: str) -> None:
    """The class that NeMo would make; the path of its module changes between versions."""
    if str(values.get("_target_", supported)).rpartition(".")[2] != supported:
        raise ValueError(f"{section}._target_ is {values['_target_']}; supported: {supported}")


def _section(
    config: Mapping[str, Any], name: str, *, default: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The section whose key is the last part of a name such as loss.tdt_kwargs."""
    found = config.get(name.rpartition(".")[2])
    found = default if found is None else found
    if found is None:
        raise ValueError(f"{name} is missing in the configuration of the model")
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {found!r}; it must be a mapping")
    return found


def _int(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The integer whose key is the last part of a name such as encoder.d_model; null is the
    default."""
    value = values.get(name.rpartition(".")[2])
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; it must be an integer")
    return value


def _float(values: Mapping[str, Any], name: str, default: float) -> float:
    """As `_int`, for any number; null is the default."""
    value = values.get(name.rpartition(".")[2])
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    return float(value)


def _durations(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    found = values.get(name.rpartition(".")[2])
    if not isinstance(found, list) or not found or any(type(each) is not int for each in found):
        raise ValueError(f"{name} is {found!r}; it must be a list of integers")
    return tuple(found)


def nemo_topology(config: Mapping[str, Any]) -> Topology:
    """The model of a model_config.yaml.

    Raises:
        ValueError: names the key whose value is not supported.
    """
    target = str(config.get("target") or "").rpartition(".")[2]
    if target not in _NEMO_KINDS:
        raise ValueError(f"target is {target!r}; supported: {', '.join(_NEMO_KINDS)}")
    kind = _NEMO_KINDS[target]
    encoder = _nemo_encoder(config)
    if kind == _CTC:
        return _ctc(encoder)
    decoder, joint = _section(config, "decoder"), _section(config, "joint")
    prednet, jointnet = _section(decoder, "decoder.prednet"), _section(joint, "joint.jointnet")
    _check("decoder", decoder, {"normalization_mode": (None,), "blank_as_pad": (True,)})
    _check_target("decoder", decoder, "RNNTDecoder")
    _check("joint.jointnet", jointnet, {"activation": ("relu", "tanh")})
    loss = _section(config, "loss", default={})
    _check("loss", loss, {"rnnt_type": _RNNT_TYPES})
    greedy = _section(_section(config, "decoding", default={}), "decoding.greedy", default={})
    # NeMo takes the first that is neither 0 nor null.
    limits = (_int(greedy, f"decoding.greedy.{name}", 0) for name in _MAX_SYMBOLS_KEYS)
    return _transducer(
        encoder,
        width=_int(prednet, "decoder.prednet.pred_hidden"),
        layers=_int(prednet, "decoder.prednet.pred_rnn_layers", 1),
        joint=_int(jointnet, "joint.jointnet.joint_hidden"),
        activation=jointnet.get("activation", "relu"),
        durations=_nemo_durations(loss, joint),
        ctc=kind == _HYBRID,
        tdt=_nemo_tdt(loss),
        rnnt_type=loss.get("rnnt_type", "regular"),
        max_symbols=next(filter(None, limits), MAX_SYMBOLS),
    )


def _nemo_durations(loss: Mapping[str, Any], joint: Mapping[str, Any]) -> tuple[int, ...]:
    name = loss.get("loss_name", "default")
    extra = _int(joint, "joint.num_extra_outputs", 0)
    if name in _TDT_LOSSES:
        key = f"loss.{name}_kwargs"
        durations = _durations(_section(loss, key, default={}), f"{key}.durations")
        if len(durations) != extra:
            raise ValueError(
                f"{key}.durations is {list(durations)} and joint.num_extra_outputs {extra}; "
                "they must have the same number"
            )
        return durations
    if extra or name not in _RNNT_LOSSES:
        raise ValueError(
            f"loss.loss_name is {name!r} with joint.num_extra_outputs {extra}; supported: "
            f"{', '.join(_RNNT_LOSSES)} without extra outputs, {' and '.join(_TDT_LOSSES)} with "
            "one for each duration"
        )
    return ()


def _nemo_tdt(loss: Mapping[str, Any]) -> dict[str, float]:
    """The settings of the TDT loss, which training continues with."""
    if loss.get("loss_name") not in _TDT_LOSSES:
        return {}
    key = f"loss.{loss['loss_name']}_kwargs"
    kwargs = _section(loss, key, default={})
    return {name: _float(kwargs, f"{key}.{name}", 0.0) for name in ("sigma", "omega")}


def _nemo_encoder(config: Mapping[str, Any]) -> FastConformerConfig:
    features, values = _section(config, "preprocessor"), _section(config, "encoder")
    # NeMo's default.
    features = {"window_size": 0.02} | features
    _check("preprocessor", features, _PREPROCESSOR)
    _check_target("preprocessor", features, "AudioToMelSpectrogramPreprocessor")
    _check("model_config", config, {"sample_rate": (16000, None)})
    _check_target("encoder", values, "ConformerEncoder")
    _check("encoder", values, _ENCODER)
    causal = bool(values.get("causal_downsampling", False))
    style = values.get("att_context_style", "regular")
    kernel = _int(values, "encoder.conv_kernel_size", 31)
    past = values.get("conv_context_size")
    is_causal_convolution = past == "causal" or past == [kernel - 1, 0]
    if not is_causal_convolution and past not in (None, [kernel // 2, kernel // 2]):
        raise ValueError(f"encoder.conv_context_size is {past}; supported: null, causal")
    if not (causal == is_causal_convolution == (style == "chunked_limited")):
        raise ValueError(
            f"encoder.causal_downsampling is {causal}, conv_context_size {past} and "
            f"att_context_style {style!r}; supported: true, causal and chunked_limited, or false, "
            "null and regular"
        )
    dim = _int(values, "encoder.d_model")
    channels = _int(values, "encoder.subsampling_conv_channels", -1)
    normalise = features.get("normalize", "per_feature")
    norm = values.get("conv_norm_type", "batch_norm")
    return FastConformerConfig(
        num_mel_bins=_int(values, "encoder.feat_in"),
        layers=_int(values, "encoder.n_layers"),
        dim=dim,
        heads=_int(values, "encoder.n_heads", 4),
        feedforward_dim=dim * _int(values, "encoder.ff_expansion_factor", 4),
        kernel_size=kernel,
        subsampling_channels=dim if channels < 0 else channels,
        dropout=_float(values, "encoder.dropout", 0.1),
        features="nemo",
        feature_norm="bins" if normalise == "per_feature" else "none",
        convolution_norm="batch" if norm == "batch_norm" else "layer",
        bias=bool(values.get("use_bias", True)),
        scale_input=bool(values.get("xscaling", True)),
        causal=causal,
        **_context(values.get("att_context_size") or [-1, -1], causal),
    )


def _context(context: Any, causal: bool) -> dict[str, Any]:
    """The window, or the chunks: the first pair if there are several."""
    pair = context
    if isinstance(context, list) and isinstance(context[0], list):
        pair = context[0]
    if not isinstance(pair, list) or [type(each) for each in pair] != [int, int]:
        raise ValueError(
            f"encoder.att_context_size is {context!r}; it must be two integers, or a list of such "
            "pairs"
        )
    left, right = pair
    if causal:
        if right < 0:
            raise ValueError(
                f"encoder.att_context_size is {context}; supported: limited on the right"
            )
        chunk = right + 1
        return {"chunk_size": chunk, "left_chunks": None if left < 0 else left // chunk}
    if left < 0 and right < 0:
        return {}
    if left < 0 or right < 0:
        raise ValueError(
            f"encoder.att_context_size is {context}; supported: both limited, or both -1"
        )
    return {"window": (left, right)}


def transformers_topology(config: Mapping[str, Any]) -> Topology:
    """The model of `SourceFiles.config` of a folder.

    Raises:
        ValueError: names the key whose value is not supported.
    """
    model_type = config["model_type"]
    kind = TRANSFORMERS_KINDS[model_type]
    values = _section(config, "encoder_config")
    _check("encoder_config", values, _TRANSFORMERS_ENCODER)
    bias = bool(values.get("attention_bias", True))
    if bool(values.get("convolution_bias", True)) != bias:
        raise ValueError(
            f"encoder_config.attention_bias is {bias} and convolution_bias {not bias}; supported: "
            "the same value for both"
        )
    blank = config.get("pad_token_id" if kind == _CTC else "blank_token_id")
    vocab_size = _int(config, "vocab_size")
    if blank != vocab_size - 1:
        raise ValueError(
            f"the id of the blank is {blank} and vocab_size {vocab_size}; supported: the last id"
        )
    bins = _int(values, "encoder_config.num_mel_bins", 80)
    extractor = _section(config, EXTRACTOR_SECTION, default={})
    _check(EXTRACTOR_SECTION, extractor, _EXTRACTOR | {"feature_size": (bins,)})
    encoder = FastConformerConfig(
        num_mel_bins=bins,
        features="nemo",
        layers=_int(values, "encoder_config.num_hidden_layers", 24),
        dim=_int(values, "encoder_config.hidden_size", 1024),
        heads=_int(values, "encoder_config.num_attention_heads", 8),
        feedforward_dim=_int(values, "encoder_config.intermediate_size", 4096),
        kernel_size=_int(values, "encoder_config.conv_kernel_size", 9),
        subsampling_channels=_int(values, "encoder_config.subsampling_conv_channels", 256),
        dropout=_float(values, "encoder_config.dropout", 0.1),
        bias=bias,
        scale_input=bool(values.get("scale_input", True)),
    )
    if kind == _CTC:
        return _ctc(encoder)
    _check("config", config, {"hidden_act": ("relu", "tanh")})
    width = _int(config, "decoder_hidden_size", 640)
    return _transducer(
        encoder,
        width=width,
        layers=_int(config, "num_decoder_layers", 2),
        joint=width,
        activation=config.get("hidden_act", "relu"),
        durations=_durations(config, "durations") if model_type == "parakeet_tdt" else (),
        ctc=False,
        max_symbols=_int(config, "max_symbols_per_step", MAX_SYMBOLS),
    )


def _ctc(encoder: FastConformerConfig) -> Topology:
    return Topology(model=ModelConfig(encoder=encoder), loss=LossConfig(kind="ctc"))


def _transducer(
    encoder: FastConformerConfig,
    *,
    width: int,
    layers: int,
    joint: int,
    activation: Any,
    durations: tuple[int, ...],
    ctc: bool,
    max_symbols: int,
    tdt: Mapping[str, float] | None = None,
    rnnt_type: Any = "regular",
) -> Topology:
    predictor = LstmPredictorConfig(dim=width, layers=layers, dropout=0.2)
    return Topology(
        model=ModelConfig(
            encoder=encoder, predictor=predictor, joiner_dim=joint, joiner_activation=activation
        ),
        # The exact loss: the parameters of the simple loss of `pruned` are not in these files.
        loss=LossConfig(
            kind="full",
            rnnt_type=rnnt_type,
            durations=durations,
            sigma=(tdt or {}).get("sigma", 0.0),
            omega=(tdt or {}).get("omega", 0.0),
            ctc_scale=0.3 if ctc else 0.0,
        ),
        max_symbols=max_symbols,
    )
