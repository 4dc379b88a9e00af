"""A model whose joiner has hooks or other layers: losses and searches run these."""

from __future__ import annotations

import pytest
import torch

import pruned_rnnt
from pruned_rnnt.decode.search.greedy import GreedySearch
from pruned_rnnt.model.sequence_log_probs import sequence_log_probs
from pruned_rnnt.model.speech_model import TransducerModel
from tests.tiny_models import tiny_model


def batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    targets = torch.randint(1, 7, (2, 3), dtype=torch.int32)
    return torch.randn(2, 60, 80), torch.tensor([60, 50]), targets, torch.tensor([3, 2])


def halved(model: TransducerModel) -> TransducerModel:
    model.joiner.output_linear.register_forward_hook(lambda _, __, logits: 0.5 * logits)
    return model


@pytest.mark.parametrize("kind", ["full", "pruned"])
@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
def test_losses_run_hooks(kind: str, durations: tuple[int, ...]) -> None:
    plain = tiny_model(kind=kind, durations=durations, s_range=4)
    with torch.no_grad():
        plain.joiner.output_linear.weight.mul_(0.5)
        plain.joiner.output_linear.bias.mul_(0.5)
    wanted = plain(*batch(), step=0)
    got = halved(tiny_model(kind=kind, durations=durations, s_range=4))(*batch(), step=0)
    torch.testing.assert_close(got.objective, wanted.objective)


def test_the_search_runs_hooks() -> None:
    encoded, lengths = torch.randn(2, 20, 16), torch.tensor([20, 12])

    def symbols(model: TransducerModel) -> list[list[int]]:
        search = GreedySearch(model)
        start = search.start(2, encoded.device)
        return search.frames(encoded, lengths, start)[0].tolist()

    model = tiny_model()
    model.joiner.output_linear.register_forward_hook(lambda _, __, logits: logits.roll(1, -1))
    rolled = tiny_model()
    with torch.no_grad():
        for each in (rolled.joiner.output_linear.weight, rolled.joiner.output_linear.bias):
            each.copy_(each.roll(1, 0))
    assert symbols(model) == symbols(rolled) != symbols(tiny_model())


def test_scores_of_sequences_are_refused() -> None:
    model = halved(tiny_model())
    with pytest.raises(ValueError, match=r"joiner\.output_linear has forward hooks"):
        sequence_log_probs(
            model,
            torch.randn(1, 5, 16),
            torch.tensor([5]),
            torch.ones(1, 2, dtype=torch.int32),
            torch.tensor([2]),
        )


def test_the_loss_of_a_model_in_which_a_layer_was_replaced_trains_it() -> None:
    model = tiny_model()
    model.joiner.output_linear = torch.nn.Sequential(
        torch.nn.Linear(16, 4), torch.nn.ReLU(), torch.nn.Linear(4, 7)
    )
    model(*batch(), step=0).objective.backward()
    assert all(p.grad is not None for p in model.joiner.output_linear.parameters())
    assert pruned_rnnt.Joiner is type(model.joiner)
