"""Joiner, predictor and CTC head of NeMo's RNN-T, TDT and hybrid models, under our names and back.

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

Axes: V symbols without the blank, K durations, E encoder width, P predictor width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.joiner import Joiner
from pruned_rnnt.model.lstm_predictor import LstmPredictor, LstmPredictorConfig
from pruned_rnnt.model.predictor import Predictor, PredictorConfig, StatelessPredictor

StateDict = dict[str, Tensor]

# Encoders and their features, which have no counterpart here.
_ENCODER = ("encoder.", "preprocessor.", "spec_augmentation.")
_EMBED = "decoder.prediction.embed.weight"
_EMBEDS = "decoder.prediction.embeds.0.weight"
_LSTM = "decoder.prediction.dec_rnn.lstm."
_CTC = "ctc_decoder.decoder_layers.0."
_OUTPUT = re.compile(r"(joint\.joint_net\.[12]\.)weight")


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
