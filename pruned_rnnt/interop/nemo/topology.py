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
_TRANSFORMERS_KINDS = {
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
    "stochastic_depth_drop_prob": (0, 0.0),
}
_PREPROCESSOR = {
    "sample_rate": (16000,),
    "window_size": (0.025,),
    "window_stride": (0.01,),
    "window": ("hann",),
    "n_fft": (512,),
    "preemph": (0.97,),
    "frame_splicing": (1,),
    "log": (True,),
    "mag_power": (2.0,),
    "lowfreq": (0,),
    "highfreq": (None, 8000),
    "log_zero_guard_type": ("add",),
    "log_zero_guard_value": (2**-24,),
    "exact_pad": (False,),
    "normalize": ("per_feature", "NA", None),
}
_TRANSFORMERS_ENCODER = {
    "hidden_act": ("silu",),
    "subsampling_factor": (8,),
    "subsampling_conv_kernel_size": (3,),
    "subsampling_conv_stride": (2,),
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A model of this package that computes the same."""

    model: ModelConfig
    loss: LossConfig

    @property
    def is_ctc(self) -> bool:
        return self.loss.kind == "ctc"


def _check(section: str, values: Mapping[str, Any], supported: Mapping[str, Sequence[Any]]) -> None:
    for key, allowed in supported.items():
        if key in values and values[key] not in allowed:
            raise ValueError(
                f"{section}.{key} is {values[key]!r}; supported: {', '.join(map(repr, allowed))}"
            )


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{name} is missing in the configuration of the model")
    return found


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
    prednet, jointnet = _section(decoder, "prednet"), _section(joint, "jointnet")
    _check("decoder", decoder, {"normalization_mode": (None,), "blank_as_pad": (True,)})
    if str(decoder.get("_target_", "RNNTDecoder")).rpartition(".")[2] != "RNNTDecoder":
        raise ValueError(f"decoder._target_ is {decoder['_target_']}; supported: RNNTDecoder")
    _check("joint.jointnet", jointnet, {"activation": ("relu", "tanh")})
    return _transducer(
        encoder,
        width=int(prednet["pred_hidden"]),
        layers=int(prednet.get("pred_rnn_layers", 1)),
        joint=int(jointnet["joint_hidden"]),
        activation=jointnet.get("activation", "relu"),
        durations=_nemo_durations(config, joint),
        ctc=kind == _HYBRID,
        tdt=_nemo_tdt(config),
    )


def _nemo_durations(config: Mapping[str, Any], joint: Mapping[str, Any]) -> tuple[int, ...]:
    loss = config.get("loss") or {}
    name = loss.get("loss_name", "default")
    extra = int(joint.get("num_extra_outputs") or 0)
    if name == "tdt":
        durations = (loss.get("tdt_kwargs") or {}).get("durations") or ()
        if len(durations) != extra:
            raise ValueError(
                f"loss.tdt_kwargs.durations is {durations} and joint.num_extra_outputs {extra}; "
                "they must have the same number"
            )
        return tuple(int(x) for x in durations)
    if extra or name not in ("default", "warprnnt_numba", "pytorch", "warprnnt"):
        raise ValueError(
            f"loss.loss_name is {name!r} with joint.num_extra_outputs {extra}; supported: RNN-T "
            "without extra outputs, tdt"
        )
    return ()


def _nemo_tdt(config: Mapping[str, Any]) -> dict[str, float]:
    """The settings of the TDT loss, which training continues with."""
    loss = config.get("loss") or {}
    if loss.get("loss_name") != "tdt":
        return {}
    kwargs = loss.get("tdt_kwargs") or {}
    return {name: float(kwargs.get(name) or 0.0) for name in ("sigma", "omega")}


def _nemo_encoder(config: Mapping[str, Any]) -> FastConformerConfig:
    features, values = _section(config, "preprocessor"), _section(config, "encoder")
    _check("preprocessor", features, _PREPROCESSOR)
    if str(values.get("_target_", "ConformerEncoder")).rpartition(".")[2] != "ConformerEncoder":
        raise ValueError(f"encoder._target_ is {values['_target_']}; supported: ConformerEncoder")
    _check("encoder", values, _ENCODER)
    causal = bool(values.get("causal_downsampling", False))
    style = values.get("att_context_style", "regular")
    kernel = int(values.get("conv_kernel_size", 31))
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
    dim = int(values["d_model"])
    channels = int(values.get("subsampling_conv_channels", -1))
    normalise = features.get("normalize", "per_feature")
    norm = values.get("conv_norm_type", "batch_norm")
    return FastConformerConfig(
        num_mel_bins=int(values["feat_in"]),
        layers=int(values["n_layers"]),
        dim=dim,
        heads=int(values.get("n_heads", 4)),
        feedforward_dim=dim * int(values.get("ff_expansion_factor", 4)),
        kernel_size=kernel,
        subsampling_channels=dim if channels < 0 else channels,
        dropout=float(values.get("dropout", 0.1)),
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
    left, right = context[0] if isinstance(context[0], list) else context
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
    """The model of a config.json.

    Raises:
        ValueError: names the key whose value is not supported.
    """
    model_type = config.get("model_type")
    if model_type not in _TRANSFORMERS_KINDS:
        supported = ", ".join(_TRANSFORMERS_KINDS)
        raise ValueError(f"model_type is {model_type!r}; supported: {supported}")
    kind = _TRANSFORMERS_KINDS[model_type]
    values = _section(config, "encoder_config")
    _check("encoder_config", values, _TRANSFORMERS_ENCODER)
    bias = bool(values.get("attention_bias", True))
    if bool(values.get("convolution_bias", True)) != bias:
        raise ValueError(
            f"encoder_config.attention_bias is {bias} and convolution_bias {not bias}; supported: "
            "the same value for both"
        )
    blank = config.get("pad_token_id" if kind == _CTC else "blank_token_id")
    if blank != config["vocab_size"] - 1:
        raise ValueError(
            f"the id of the blank is {blank} and vocab_size {config['vocab_size']}; supported: the "
            "last id"
        )
    encoder = FastConformerConfig(
        num_mel_bins=int(values.get("num_mel_bins", 80)),
        features="nemo",
        layers=int(values.get("num_hidden_layers", 24)),
        dim=int(values.get("hidden_size", 1024)),
        heads=int(values.get("num_attention_heads", 8)),
        feedforward_dim=int(values.get("intermediate_size", 4096)),
        kernel_size=int(values.get("conv_kernel_size", 9)),
        subsampling_channels=int(values.get("subsampling_conv_channels", 256)),
        dropout=float(values.get("dropout", 0.1)),
        bias=bias,
        scale_input=bool(values.get("scale_input", True)),
    )
    if kind == _CTC:
        return _ctc(encoder)
    _check("config", config, {"hidden_act": ("relu", "tanh")})
    width = int(config.get("decoder_hidden_size", 640))
    return _transducer(
        encoder,
        width=width,
        layers=int(config.get("num_decoder_layers", 2)),
        joint=width,
        activation=config.get("hidden_act", "relu"),
        durations=tuple(config["durations"]) if model_type == "parakeet_tdt" else (),
        ctc=False,
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
    tdt: Mapping[str, float] | None = None,
) -> Topology:
    predictor = LstmPredictorConfig(dim=width, layers=layers, dropout=0.2)
    return Topology(
        model=ModelConfig(
            encoder=encoder, predictor=predictor, joiner_dim=joint, joiner_activation=activation
        ),
        # The exact loss: the parameters of the simple loss of `pruned` are not in these files.
        loss=LossConfig(
            kind="full",
            durations=durations,
            sigma=(tdt or {}).get("sigma", 0.0),
            omega=(tdt or {}).get("omega", 0.0),
            ctc_scale=0.3 if ctc else 0.0,
        ),
    )
