"""Log-probabilities of several sequences of each utterance, against sums over all paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.data.input.batch import pad_targets
from pruned_rnnt.model import sequence_log_probs as module
from pruned_rnnt.model.predictor import LstmPredictorConfig
from pruned_rnnt.model.sequence_log_probs import sequence_log_probs
from pruned_rnnt.model.speech_model import TransducerModel
from tests.lattice_paths import joiner_log_probs, log_total
from tests.tdt_paths import tdt_scores, tdt_total
from tests.tiny_models import tiny_model

FRAMES = [4, 3, 2]
# Three sequences of each utterance, with at least one frame more than symbols.
SEQUENCES = [[[3, 4, 3], [5], []], [[6, 3], [], [4]], [[5], [3], [6]]]


def encoded_of(model: TransducerModel) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (len(FRAMES), max(FRAMES), model.encoder.output_dim)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def padded(sequences: list[list[list[int]]]) -> tuple[Tensor, Tensor]:
    return pad_targets([each for own in sequences for each in own])


def by_enumeration(
    model: TransducerModel, encoded_NTE: Tensor, sequences: list[list[list[int]]]
) -> Tensor:
    """The same, path by path."""
    scores = []
    for encoded_TE, frames, own in zip(encoded_NTE, FRAMES, sequences, strict=True):
        for symbols in own:
            scores.append(log_prob(model, encoded_TE[:frames], symbols))
    return torch.stack(scores).view(len(FRAMES), -1)


def log_prob(model: TransducerModel, encoded_TE: Tensor, symbols: list[int]) -> Tensor:
    joiner, config = model.joiner, model.loss_config
    targets_1U = torch.tensor([symbols], dtype=torch.int32).view(1, -1)
    lm_UD = joiner.decoder_proj(model.predictor.forward_targets(targets_1U)[0])
    am_TD = joiner.encoder_proj(encoded_TE)
    lengths = len(encoded_TE), len(symbols)
    if config.durations:
        logits = joiner.with_durations(am_TD[:, None], lm_UD[None])
        return tdt_total(tdt_scores(*logits, symbols, 0), *lengths, config.durations)
    rows = joiner_log_probs(joiner(am_TD[:, None], lm_UD[None]), symbols, 0, hat=config.hat)
    return log_total(*rows, *lengths, config.rnnt_type)


def gradients(model: TransducerModel, encoded_NTE: Tensor, scores_NK: Tensor) -> list[Tensor]:
    weights_NK = torch.linspace(-1, 2, scores_NK.numel(), dtype=torch.float64).view_as(scores_NK)
    inputs = [encoded_NTE, *model.joiner.parameters(), *model.predictor.parameters()]
    for each in inputs:
        each.grad = None
    (scores_NK * weights_NK).sum().backward()
    return [each.grad.clone() for each in inputs if each.grad is not None]


@pytest.mark.parametrize("chunked", [False, True], ids=["at-once", "in-chunks"])
@pytest.mark.parametrize(
    "loss",
    [
        *(
            {"rnnt_type": name, "hat": hat}
            for name in ("regular", "modified", "constrained", "rna")
            for hat in (False, True)
        ),
        {"durations": (0, 1, 2), "sigma": 0.5, "omega": 1.0},
        {"durations": (1, 3)},
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_all_paths(
    loss: dict[str, Any], chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither is part of a probability.
    losses = {"delay_penalty": 0.5, "fastemit_lambda": 0.5}
    model = tiny_model(**loss, **losses).double()
    encoded_NTE = encoded_of(model)
    if chunked:
        monkeypatch.setattr(module, "_MOST_ELEMENTS", 1)
    found_NK = sequence_log_probs(model, encoded_NTE, torch.tensor(FRAMES), *padded(SEQUENCES))
    wanted_NK = by_enumeration(model, encoded_NTE, SEQUENCES)
    assert found_NK.dtype == torch.float64
    torch.testing.assert_close(found_NK, wanted_NK)
    own = gradients(model, encoded_NTE, found_NK)
    theirs = gradients(model, encoded_NTE, wanted_NK)
    assert len(own) == 1 + len([*model.joiner.parameters(), *model.predictor.parameters()])
    for mine, wanted in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_only_empty_sequences() -> None:
    model = tiny_model().double()
    encoded_NTE = encoded_of(model)
    empty: list[list[list[int]]] = [[[], []]] * len(FRAMES)
    found_NK = sequence_log_probs(model, encoded_NTE, torch.tensor(FRAMES), *padded(empty))
    torch.testing.assert_close(found_NK, by_enumeration(model, encoded_NTE, empty))


def test_a_predictor_that_sees_all_symbols() -> None:
    predictor = LstmPredictorConfig(dim=8, dropout=0.0)
    model = tiny_model(predictor=predictor, rnnt_type="modified").double()
    encoded_NTE = encoded_of(model)
    found_NK = sequence_log_probs(model, encoded_NTE, torch.tensor(FRAMES), *padded(SEQUENCES))
    torch.testing.assert_close(found_NK, by_enumeration(model, encoded_NTE, SEQUENCES))


def test_each_parameter_gets_one_gradient_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes send a gradient as soon as it is complete."""
    monkeypatch.setattr(module, "_MOST_ELEMENTS", 1)
    model = tiny_model().double()
    counts = dict.fromkeys(dict(model.joiner.named_parameters()), 0)

    for name, parameter in model.joiner.named_parameters():

        def count(_: Tensor, name: str = name) -> None:
            counts[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    encoded_NTE = encoded_of(model)
    found_NK = sequence_log_probs(model, encoded_NTE, torch.tensor(FRAMES), *padded(SEQUENCES))
    found_NK.sum().backward()
    assert set(counts.values()) == {1}, counts
