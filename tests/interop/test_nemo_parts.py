"""Parts of NeMo checkpoints, against plain torch code that computes what NeMo's modules do.

Axes: N batch, T frames, U symbols, V symbols without the blank, K durations, E, P, J widths of
encoder, predictor and joint.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import pruned_rnnt
from pruned_rnnt.interop.nemo.parts import parts_from_nemo, parts_to_nemo
from pruned_rnnt.model.predictor import (
    LstmPredictor,
    LstmPredictorConfig,
    PredictorConfig,
    StatelessPredictor,
)
from tests.tdt_paths import tdt_scores, tdt_total

V, E, P, J = 9, 6, 8, 5
DURATIONS = (0, 1, 2, 4)
StateDict = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(12)


def layer(name: str, rows: int, columns: int) -> StateDict:
    shapes = {"weight": (rows, columns), "bias": (rows,)}
    return {f"{name}.{key}": torch.randn(shape).double() for key, shape in shapes.items()}


def nemo_state(predictor: str = "lstm", extra: int = len(DURATIONS), at: int = 2) -> StateDict:
    """predictor: lstm, lstm2 of two layers, or stateless; extra: K; at: N of the output layer."""
    state = {**layer("joint.enc", J, E), **layer("joint.pred", J, P)}
    state |= layer(f"joint.joint_net.{at}", V + 1 + extra, J)
    embedding = torch.randn(V + 1, P).double()
    embedding[V] = 0
    if predictor == "stateless":
        state["decoder.prediction.embeds.0.weight"] = embedding
        return state
    state["decoder.prediction.embed.weight"] = embedding
    prefix = "decoder.prediction.dec_rnn.lstm."
    lstm = torch.nn.LSTM(P, P, 2 if predictor == "lstm2" else 1).double()
    return state | {prefix + name: x for name, x in lstm.state_dict().items()}


def nemo_predictor(state: StateDict, targets_NU: Tensor, norm: bool = False) -> Tensor:
    """(N,U+1,P): the symbols' vectors behind a vector of zeros."""
    key = "decoder.prediction.embed"
    stateless = f"{key}s.0.weight" in state
    embedded = state[f"{key}s.0.weight" if stateless else f"{key}.weight"][targets_NU]
    if norm:
        embedded = functional.layer_norm(embedded, (P,))
    embedded = functional.pad(embedded, (0, 0, 1, 0))
    if stateless:
        return embedded
    prefix = "decoder.prediction.dec_rnn.lstm."
    weights = {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}
    lstm = torch.nn.LSTM(P, P, len(weights) // 4, batch_first=True).double()
    lstm.load_state_dict(weights)
    return lstm(embedded)[0]


def nemo_joint(state: StateDict, encoded_NTE: Tensor, predicted_NUP: Tensor, act=torch.relu):
    """(N,T,U+1,V+1+K): symbols, blank, durations."""
    enc, pred = (
        functional.linear(x, state[f"joint.{name}.weight"], state[f"joint.{name}.bias"])
        for name, x in (("enc", encoded_NTE), ("pred", predicted_NUP))
    )
    (at,) = (key.removesuffix("weight") for key in state if "joint_net" in key and "weight" in key)
    hidden = act(enc[:, :, None] + pred[:, None])
    return functional.linear(hidden, state[at + "weight"], state[at + "bias"])


@pytest.mark.parametrize("predictor", ["lstm", "lstm2", "stateless"])
@pytest.mark.parametrize(("blank", "at", "activation"), [(0, 2, "relu"), (4, 1, "tanh")])
def test_same_logits_and_the_same_tdt_loss(predictor, blank, at, activation) -> None:
    state = nemo_state(predictor, at=at)
    encoded, theirs = torch.randn(2, 5, E).double(), torch.randint(V, (2, 3))
    act = getattr(torch, activation)
    wanted = nemo_joint(state, encoded, nemo_predictor(state, theirs), act)

    options = {"durations": DURATIONS, "activation": activation, "blank": blank}
    parts = parts_from_nemo(state, **options)
    ours = torch.tensor([[parts.order.index(id) for id in row] for row in theirs.tolist()])
    am = parts.joiner.encoder_proj(encoded)[:, :, None]
    lm = parts.joiner.decoder_proj(parts.predictor.forward_targets(ours))[:, None]
    logits, durations = parts.joiner.with_durations(am, lm)
    torch.testing.assert_close(logits, wanted[..., parts.order])
    torch.testing.assert_close(durations, wanted[..., V + 1 :])
    loss = pruned_rnnt.rnnt_loss_tdt(
        logits, durations, ours, durations=DURATIONS, blank=blank, sigma=0.05, reduction="none"
    )
    for n, targets in enumerate(theirs.tolist()):
        rows = wanted[n, ..., : V + 1], wanted[n, ..., V + 1 :]
        scores = tdt_scores(*rows, targets, V, 0.05)
        torch.testing.assert_close(loss[n], -tdt_total(scores, 5, 3, DURATIONS))


def test_layer_norm_becomes_part_of_the_embedding() -> None:
    state, theirs = nemo_state("stateless", 0), torch.randint(V, (2, 3))
    parts = parts_from_nemo(state, layer_norm=True)
    assert parts.joiner.duration_linear is None
    got = parts.predictor.forward_targets(theirs + 1)
    torch.testing.assert_close(got, nemo_predictor(state, theirs, norm=True))


def test_ctc_head_of_a_hybrid_model() -> None:
    state = nemo_state(extra=0)
    prefix = "ctc_decoder.decoder_layers.0."
    state[prefix + "weight"] = torch.randn(V + 1, E, 1).double()
    state[prefix + "bias"] = torch.randn(V + 1).double()
    parts = parts_from_nemo(state)
    encoded = torch.randn(2, 5, E).double()
    wanted = functional.conv1d(encoded.mT, state[prefix + "weight"], state[prefix + "bias"]).mT
    assert parts.ctc_head is not None
    torch.testing.assert_close(parts.ctc_head(encoded), wanted[..., parts.order])


@pytest.mark.parametrize("predictor", ["lstm", "lstm2", "stateless"])
def test_exported_parts_come_back(predictor) -> None:
    state = nemo_state(predictor)
    linear = torch.nn.Linear(E, V + 1).double()
    parts = parts_from_nemo(state, durations=DURATIONS, blank=4)
    back = parts_to_nemo(parts.joiner, parts.predictor, linear)
    assert back.keys() - state.keys() == {
        f"ctc_decoder.decoder_layers.0.{x}" for x in ("weight", "bias")
    }
    for key, value in state.items():
        assert torch.equal(back[key], value), key
    again = parts_from_nemo(back, durations=DURATIONS, blank=4)
    assert again.ctc_head is not None
    assert torch.equal(again.ctc_head.weight, linear.weight)


@pytest.mark.parametrize("kind", ["lstm", "stateless"])
def test_export_of_own_models_gives_the_same_logits(kind) -> None:
    """Also where the embedding of the blank, from which a text starts, is not zero."""
    if kind == "lstm":
        predictor = LstmPredictor(LstmPredictorConfig(dim=P, layers=2, dropout=0.0), V + 1, 2)
    else:
        predictor = StatelessPredictor(PredictorConfig(dim=P, context_size=1), V + 1, 2)
    joiner = pruned_rnnt.Joiner(E, P, J, V + 1, duration_count=2).double()
    predictor.double()
    encoded, ours = torch.randn(1, 4, E).double(), torch.tensor([[0, 9, 3, 1]])
    state = parts_to_nemo(joiner, predictor, dropout=False)
    order = [0, 1, *range(3, V + 1), 2]
    theirs = torch.tensor([[order.index(id) for id in ours[0].tolist()]])
    got = nemo_joint(state, encoded, nemo_predictor(state, theirs), torch.tanh)
    am = joiner.encoder_proj(encoded)[:, :, None]
    lm = joiner.decoder_proj(predictor.forward_targets(ours))[:, None]
    logits, durations = joiner.with_durations(am, lm)
    torch.testing.assert_close(got, torch.cat((logits[..., order], durations), -1))


def test_what_cannot_be_imported_is_named() -> None:
    state = nemo_state()
    odd = {**layer("encoder.layers.0.linear", 2, 2), "preprocessor.featurizer.fb": torch.ones(2)}
    parts_from_nemo({**odd, **state}, durations=DURATIONS, without_encoder=True)
    projected = dict(state)
    projected["decoder.prediction.dec_rnn.lstm.weight_hr_l0"] = torch.ones(4, P)
    without = {key: x for key, x in state.items() if key != "joint.pred.bias"}
    longer = nemo_state("stateless") | {"decoder.prediction.embeds.1.weight": torch.ones(V + 1, 2)}
    adapted = {**state, "joint.adapter_layer.a.module.0.weight": torch.ones(2)}
    for given, options, message in (
        ({**odd, **state}, {}, r"encoder.layers.0.linear.weight cannot .* without_encoder=True"),
        (projected, {}, "lstm.weight_hr_l0 cannot be imported: its shape is"),
        (without, {}, r"state_dict has no joint\.pred\.bias"),
        (longer, {}, r"decoder\.prediction\.embeds\.1\.weight cannot be imported"),
        (adapted, {}, r"joint\.adapter_layer\.a\.module\.0\.weight cannot be imported"),
        (state, {"durations": (0, 1)}, "has 14 rows and durations 2 elements, .* has 10 symbols"),
        (state, {"activation": "sigmoid"}, "activation is 'sigmoid'"),
    ):
        with pytest.raises(ValueError, match=message):
            parts_from_nemo(given, **{"durations": DURATIONS, **options})
    two = StatelessPredictor(PredictorConfig(dim=P, context_size=2), V + 1)
    with pytest.raises(ValueError, match="StatelessPredictor of 2 symbols"):
        parts_to_nemo(pruned_rnnt.Joiner(E, P, J, V + 1), two)
