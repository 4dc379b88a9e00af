"""Parts of the models of NeMo and transformers under our names, and back.

    NeMo                                     ours
    joint.enc.*, joint.pred.*                joiner.encoder_proj.*, joiner.decoder_proj.*
    joint.joint_net.N.*, rows 0..V           joiner.output_linear.*, with the blank, V, moved
                         rows from V+1 on    joiner.duration_linear.*
    decoder.prediction.embed.weight          embedding.weight of an LSTM predictor
    decoder.prediction.dec_rnn.lstm.*        lstm.*
    decoder.prediction.embeds.0.weight       embedding.weight of a stateless predictor
    ctc_decoder.decoder_layers.0.*           ctc_head.*, there a convolution over one frame

N is 1, or 2 with dropout. NeMo's predictors start from a vector of zeros, ours from the embedding
of the blank: an import sets that to zero, and an export moves it into the layer behind it.

Parameters of FastConformer, for example:

    ours (encoder.)                  NeMo (encoder.)               transformers (encoder.)
    subsampling.levels.1.0           pre_encode.conv.2             subsampling.layers.2
    layers.0.feedforward_in.1        ..feed_forward1.linear1       ..feed_forward1.linear1
    layers.0.attention.in_proj       ..self_attn.linear_q, _k, _v  ..self_attn.q_proj, k_, v_
    layers.0.convolution.depthwise   ..conv.depthwise_conv         ..conv.depthwise_conv

Axes: V symbols without the blank, K durations, E encoder width, P predictor width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.joiner import Joiner
from pruned_rnnt.model.predictor import (
    LstmPredictor,
    LstmPredictorConfig,
    Predictor,
    PredictorConfig,
    StatelessPredictor,
)

StateDict = dict[str, Tensor]


class _Names(NamedTuple):
    ours: str
    nemo: str
    transformers: str


def _same(ours: str, theirs: str) -> _Names:
    return _Names(ours, theirs, theirs)


_OUTSIDE_LAYERS = [
    *(
        _Names(f"subsampling.levels.{at}.", f"pre_encode.conv.{i}.", f"subsampling.layers.{i}.")
        for at, i in (("0.0", 0), ("1.0", 2), ("1.1", 3), ("2.0", 5), ("2.1", 6))
    ),
    _Names("subsampling.projection.", "pre_encode.out.", "subsampling.linear."),
]
_ATTENTION = "attention.in_proj."
_IN_LAYER = [
    _same("feedforward_in.0.", "norm_feed_forward1."),
    _same("feedforward_in.1.", "feed_forward1.linear1."),
    _same("feedforward_in.3.", "feed_forward1.linear2."),
    _same("attention_norm.", "norm_self_att."),
    _Names("attention.in_proj.0.", "self_attn.linear_q.", "self_attn.q_proj."),
    _Names("attention.in_proj.1.", "self_attn.linear_k.", "self_attn.k_proj."),
    _Names("attention.in_proj.2.", "self_attn.linear_v.", "self_attn.v_proj."),
    _Names("attention.position_proj.", "self_attn.linear_pos.", "self_attn.relative_k_proj."),
    _Names("attention.out_proj.", "self_attn.linear_out.", "self_attn.o_proj."),
    _Names("attention.content_bias", "self_attn.pos_bias_u", "self_attn.bias_u"),
    _Names("attention.position_bias", "self_attn.pos_bias_v", "self_attn.bias_v"),
    _same("convolution.norm.", "norm_conv."),
    _same("convolution.pointwise_in.", "conv.pointwise_conv1."),
    _same("convolution.depthwise.", "conv.depthwise_conv."),
    _Names("convolution.depthwise_norm.", "conv.batch_norm.", "conv.norm."),
    _same("convolution.pointwise_out.", "conv.pointwise_conv2."),
    _same("feedforward_out.0.", "norm_feed_forward2."),
    _same("feedforward_out.1.", "feed_forward2.linear1."),
    _same("feedforward_out.3.", "feed_forward2.linear2."),
    _same("output_norm.", "norm_out."),
]
# Linear layers here, convolutions over one frame there.
_CONVOLUTIONS = re.compile(r"pointwise_(in|out)\.weight$")
_BATCHES = "num_batches_tracked"
_LAYER_START = re.compile(r"layers\.\d+\.")
# Encoders and their features, which have no counterpart here.
_ENCODER = ("encoder.", "preprocessor.", "spec_augmentation.")
_EMBED = "decoder.prediction.embed.weight"
_EMBEDS = "decoder.prediction.embeds.0.weight"
_LSTM = "decoder.prediction.dec_rnn.lstm."
_CTC = "ctc_decoder.decoder_layers.0."
_OUTPUT = re.compile(r"(joint\.joint_net\.[12]\.)weight")
# Names of transformers outside the encoder, and NeMo's.
TRANSFORMERS_PREFIXES = {
    "encoder_projector.": "joint.enc.",
    "decoder.embedding.": "decoder.prediction.embed.",
    "decoder.lstm.": _LSTM,
    "decoder.decoder_projector.": "joint.pred.",
    "joint.head.": "joint.joint_net.2.",
    "ctc_head.": _CTC,
}


def renamed(name: str, to: str, since: str = "ours") -> str | None:
    """A parameter's name elsewhere; None if the encoder has none of this name.

    Args:
        to, since: `ours`, `nemo` or `transformers`.
    """
    layer = _LAYER_START.match(name)
    start = layer[0] if layer else ""
    rest = name[len(start) :]
    for names in _IN_LAYER if layer else _OUTSIDE_LAYERS:
        prefix, target = str(getattr(names, since)), str(getattr(names, to))
        if rest.startswith(prefix):
            return start + target + rest[len(prefix) :]
    return None


def encoder_from_nemo(theirs: Mapping[str, Tensor]) -> tuple[StateDict, list[str]]:
    """Our encoder's parameters, and the names of those that it does not have.

    Args:
        theirs: parameters of NeMo's encoder, without the prefix `encoder.`.
    """
    found: StateDict = {}
    unknown = []
    for name, value in theirs.items():
        own = renamed(name, "ours", "nemo")
        if own is None:
            unknown.append(name)
        elif not own.endswith(_BATCHES):
            found[own] = value.squeeze(-1) if _CONVOLUTIONS.search(own) else value
    for own in [name for name in found if f"{_ATTENTION}0." in name]:
        parts = [own.replace(f"{_ATTENTION}0.", f"{_ATTENTION}{i}.") for i in range(3)]
        if all(part in found for part in parts):
            joined = torch.cat([found.pop(part) for part in parts])
            found[own.replace(f"{_ATTENTION}0.", _ATTENTION)] = joined
    return found, unknown


def encoder_to_nemo(ours: Mapping[str, Tensor]) -> StateDict:
    """NeMo's parameters for a FastConformer's: the reverse of `encoder_from_nemo`."""
    found: StateDict = {}
    for name, value in ours.items():
        parts = {name: value}
        if _ATTENTION in name:
            thirds = value.chunk(3)
            parts = {name.replace(_ATTENTION, f"{_ATTENTION}{i}."): x for i, x in enumerate(thirds)}
        for own, part in parts.items():
            theirs = renamed(own, "nemo")
            assert theirs is not None, own
            part = part.unsqueeze(-1) if _CONVOLUTIONS.search(own) else part
            found[theirs] = part.detach().clone()
            if own.endswith("running_var"):
                found[theirs.replace("running_var", _BATCHES)] = torch.zeros((), dtype=torch.int64)
    return found


@dataclass(frozen=True, kw_only=True)
class NemoParts:
    """Modules with the parameters of a NeMo model, in their dtype.

    joiner: for V + 1 symbols and K durations.
    predictor: an LSTM, or a stateless one of one symbol.
    ctc_head: (E, V + 1), of a hybrid model.
    order: NeMo's id of each of our symbols.
    """

    joiner: Joiner
    predictor: Predictor
    ctc_head: nn.Linear | None
    order: list[int]


def parts_from_nemo(
    state_dict: Mapping[str, Tensor],
    *,
    durations: Sequence[int] = (),
    activation: str = "relu",
    blank: int = 0,
    layer_norm: bool = False,
    without_encoder: bool = False,
) -> NemoParts:
    """The parts of a NeMo transducer that our modules can compute, with the same outputs.

    Args:
        state_dict: of an RNN-T, TDT or hybrid model (model_weights.ckpt in a .nemo file).
        durations: those of a TDT model, in the order of its configuration.
        activation: that of the joint in its configuration, `relu` or `tanh`.
        blank: our id of the blank.
        layer_norm: whether a stateless predictor has the normalization_mode `layer`.
        without_encoder: leave the encoder out, which cannot be imported.

    Raises:
        ValueError: names a key that is missing or cannot be imported.
    """
    rest = dict(state_dict)
    output = next((m[1] for m in map(_OUTPUT.fullmatch, rest) if m), "joint.joint_net.2.")
    encoder, decoder, outputs = (_layer(rest, x) for x in ("joint.enc.", "joint.pred.", output))
    embedding = _take(rest, _EMBEDS if _EMBEDS in rest else _EMBED)
    size = outputs["weight"].shape[0] - len(durations)
    # Without blank_as_pad the blank has no embedding.
    if embedding.shape[0] not in (size, size - 1):
        raise ValueError(
            f"{output}weight has {outputs['weight'].shape[0]} rows and durations {len(durations)} "
            f"elements, but the predictor has {embedding.shape[0]} symbols; the rows must be those "
            "of its symbols, a blank and durations"
        )
    order = list(range(size - 1))
    order.insert(blank % size, size - 1)
    joiner = Joiner(
        encoder["weight"].shape[1],
        decoder["weight"].shape[1],
        encoder["weight"].shape[0],
        size,
        activation,
        duration_count=len(durations),
    )
    layers = {
        "encoder_proj": encoder,
        "decoder_proj": decoder,
        "output_linear": _rows(outputs, order),
    }
    if durations:
        layers["duration_linear"] = {name: x[size:] for name, x in outputs.items()}
    _fill(joiner, {f"{at}.{name}": x for at, layer in layers.items() for name, x in layer.items()})
    if layer_norm:
        embedding = nn.functional.layer_norm(embedding, embedding.shape[1:])
    embedding = torch.cat((embedding[: size - 1], torch.zeros_like(embedding[:1])))[order]
    predictor = _predictor(rest, embedding, order.index(size - 1))
    ctc_head = None
    if _CTC + "weight" in rest:
        ctc_head = nn.Linear(encoder["weight"].shape[1], size)
        layer = _rows(_layer(rest, _CTC), order)
        _fill(ctc_head, {name: x.view_as(ctc_head.state_dict()[name]) for name, x in layer.items()})
    for key in rest:
        if not key.startswith(_ENCODER):
            raise ValueError(f"{key} cannot be imported: no module here computes the same")
        if not without_encoder:
            raise ValueError(
                f"{key} cannot be imported: NeMo's encoders have no counterpart here; pass "
                "without_encoder=True to import the other parts"
            )
    return NemoParts(joiner=joiner, predictor=predictor, ctc_head=ctc_head, order=order)


def _take(rest: StateDict, key: str) -> Tensor:
    if key not in rest:
        raise ValueError(f"state_dict has no {key}; it must be that of a NeMo transducer")
    return rest.pop(key)


def _layer(rest: StateDict, prefix: str) -> StateDict:
    return {name: _take(rest, prefix + name) for name in ("weight", "bias")}


def _rows(layer: StateDict, order: list[int]) -> StateDict:
    return {name: x[order] for name, x in layer.items()}


def _fill(module: nn.Module, state: StateDict) -> None:
    module.to(next(iter(state.values())).dtype).load_state_dict(state)


def _predictor(rest: StateDict, embedding: Tensor, blank: int) -> Predictor:
    """The predictor with this embedding (V+1,P), whose other parameters are taken from `rest`."""
    size, dim = embedding.shape
    state = {"embedding.weight": embedding}
    lstm = [key for key in rest if key.startswith(_LSTM)]
    if not lstm:
        stateless = StatelessPredictor(PredictorConfig(dim=dim, context_size=1), size, blank)
        _fill(stateless, state)
        return stateless
    layers = sum("weight_ih" in key for key in lstm)
    config = LstmPredictorConfig(dim=dim, layers=layers, dropout=0.0)
    predictor = LstmPredictor(config, size, blank)
    shapes = {name: x.shape for name, x in predictor.state_dict().items()}
    for key in lstm:
        name = "lstm." + key.removeprefix(_LSTM)
        if rest[key].shape != shapes.get(name):
            raise ValueError(
                f"{key} cannot be imported: its shape is {tuple(rest[key].shape)}, and the LSTM "
                f"here has layers of the embedding's width, {dim}, without projection"
            )
        state[name] = rest.pop(key)
    _fill(predictor, state)
    return predictor


@torch.no_grad()
def parts_to_nemo(
    joiner: Joiner, predictor: Predictor, ctc_head: nn.Linear | None = None, *, dropout: bool = True
) -> StateDict:
    """NeMo's state dict for these parts: the reverse of parts_from_nemo, with the same outputs.

    Args:
        joiner: with the activation that the configuration of the NeMo model names.
        predictor: an LstmPredictor, or a StatelessPredictor of one symbol.
        ctc_head: (E, V + 1) for a hybrid model.
        dropout: whether the joint of the NeMo model has dropout.

    Raises:
        ValueError: for another predictor.
    """
    own = predictor.state_dict()
    is_lstm = isinstance(predictor, LstmPredictor)
    if not is_lstm and set(own) != {"embedding.weight"}:
        raise ValueError(
            f"predictor is a {type(predictor).__name__} of {predictor.context_size} symbols; NeMo "
            "can compute an LstmPredictor, or a StatelessPredictor with context_size=1"
        )
    embedding = own.pop("embedding.weight")
    size, blank = embedding.shape[0], predictor.blank
    order = [id for id in range(size) if id != blank] + [blank]
    start = embedding[blank]
    state = {_LSTM + name.removeprefix("lstm."): x.clone() for name, x in own.items()}
    state[_EMBED if is_lstm else _EMBEDS] = (embedding - start)[order]
    for name, x in joiner.state_dict().items():
        at, _, kind = name.partition(".")
        if at in ("encoder_proj", "decoder_proj"):
            state[f"joint.{'enc' if at == 'encoder_proj' else 'pred'}.{kind}"] = x.clone()
    # What the start added to the input of this layer.
    behind = (_LSTM + "weight_ih_l0", _LSTM + "bias_ih_l0")
    weight, bias = behind if is_lstm else ("joint.pred.weight", "joint.pred.bias")
    state[bias] += state[weight] @ start
    for kind in ("weight", "bias"):
        outputs = [getattr(joiner.output_linear, kind)[order]]
        if joiner.duration_linear is not None:
            outputs.append(getattr(joiner.duration_linear, kind))
        state[f"joint.joint_net.{2 if dropout else 1}.{kind}"] = torch.cat(outputs)
        if ctc_head is not None:
            x = getattr(ctc_head, kind)[order]
            state[_CTC + kind] = x[..., None] if kind == "weight" else x
    return state
