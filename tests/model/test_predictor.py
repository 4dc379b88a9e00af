"""The stateless predictor: start context, negative symbols, context size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pruned_rnnt.model.predictor import PredictorConfig, StatelessPredictor


@pytest.mark.parametrize("context_size", [1, 2])
def test_output_depends_only_on_the_last_symbols(context_size: int) -> None:
    predictor = StatelessPredictor(PredictorConfig(dim=8, context_size=context_size), 10)
    targets = torch.tensor([[3, 4, 5, 6], [9, 4, 5, 7]], dtype=torch.int32)
    output = predictor.forward_targets(targets)
    assert output.shape == (2, 5, 8)
    torch.testing.assert_close(output[0, 0], output[1, 0])
    assert (output[0, 1] - output[1, 1]).abs().max() > 0
    seen_first = context_size == 2
    assert ((output[0, 2] - output[1, 2]).abs().max() > 0) == seen_first
    torch.testing.assert_close(output[0, 3], output[1, 3])


@pytest.mark.parametrize("context_size", [1, 2])
def test_steps_equal_forward_targets_of_all_symbols(context_size: int) -> None:
    predictor = StatelessPredictor(PredictorConfig(dim=8, context_size=context_size), 10)
    targets = torch.tensor([[3, 4, 5]])
    output = predictor.forward_targets(targets)
    context = predictor.start_context(1, torch.device("cpu"))
    for u in range(4):
        torch.testing.assert_close(predictor(context)[:, 0], output[:, u])
        if u < 3:
            context = torch.cat((context[:, 1:], targets[:, u : u + 1]), dim=1)


@pytest.mark.parametrize("context_size", [1, 2])
def test_start_in_inference_equals_that_with_gradients(context_size: int) -> None:
    config = PredictorConfig(dim=8, context_size=context_size)
    predictor = StatelessPredictor(config, 10).eval()
    wanted, _ = predictor.start(3, torch.device("cpu"))
    assert wanted.requires_grad
    with torch.inference_mode():
        output, (context,) = predictor.start(3, torch.device("cpu"))
    torch.testing.assert_close(output, wanted.detach())
    assert torch.equal(context, predictor.start_context(3, torch.device("cpu")))


class _Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


class _Adapter(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class _OtherPredictor(StatelessPredictor):
    def forward(self, symbols_NL: Tensor) -> Tensor:
        return 3 * super().forward(symbols_NL)


def _replace(predictor: StatelessPredictor) -> None:
    predictor.embedding = nn.Sequential(predictor.embedding, _Tripled())  # type: ignore[assignment]


def _with_bias(predictor: StatelessPredictor) -> None:
    predictor.convolution = nn.Conv1d(8, 8, 2, groups=2)


CHANGES: dict[str, Callable[[StatelessPredictor], Any]] = {
    "subclass": lambda p: setattr(p, "__class__", _OtherPredictor),
    "adapter": lambda p: setattr(p, "embedding", _Adapter(10, 8)),
    "wrapper": _replace,
    "bias": _with_bias,
    "embedding hook": lambda p: p.embedding.register_forward_hook(lambda *x: 3 * x[2]),
    "convolution hook": lambda p: p.convolution.register_forward_hook(lambda *x: 3 * x[2]),
    "predictor hook": lambda p: p.register_forward_hook(lambda *x: 3 * x[2]),
    "parametrization": lambda p: parametrize.register_parametrization(
        p.embedding, "weight", _Tripled()
    ),
    "data": lambda p: p.embedding.weight.data.mul_(3),
    "new parameter": lambda p: setattr(p.embedding, "weight", nn.Parameter(torch.randn(10, 8))),
    "in place": lambda p: p.convolution.weight.detach().mul_(3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_steps_on_the_cpu_follow_every_change_of_the_layers(change: str) -> None:
    torch.manual_seed(0)
    predictor = StatelessPredictor(PredictorConfig(dim=8), 10).eval()

    @torch.inference_mode()
    def outputs() -> tuple[Tensor, Tensor]:
        first, state = predictor.start(2, torch.device("cpu"))
        second, (context,) = predictor.step(torch.tensor([3, 4]), state)
        called = torch.cat([predictor(state[0])[:, 0], predictor(context)[:, 0]])
        return torch.cat([first, second]), called

    before, _ = outputs()
    CHANGES[change](predictor)
    found, called = outputs()
    torch.testing.assert_close(found, called)
    assert not torch.allclose(found, before)


def test_context_of_one_symbol_is_its_embedding() -> None:
    predictor = StatelessPredictor(PredictorConfig(dim=8, context_size=1), 10)
    expected = predictor.embedding.weight[[0, 3, 9]]
    assert (expected < 0).any()
    assert torch.equal(predictor.forward_targets(torch.tensor([[3, 9]]))[0], expected)
    assert [name for name, _ in predictor.named_parameters()] == ["embedding.weight"]


def test_negative_symbols_embed_to_zero() -> None:
    predictor = StatelessPredictor(PredictorConfig(dim=8), 10)
    assert predictor.start_context(2, torch.device("cpu")).tolist() == [[-1, 0], [-1, 0]]
    assert predictor(torch.tensor([[-1, -1]])).abs().max() == 0
    with torch.no_grad():
        predictor.embedding.weight[0] += 1.0
    assert predictor(torch.tensor([[-1, -7]])).abs().max() == 0
    assert predictor(torch.tensor([[0, -1]])).shape == (1, 1, 8)
    predictor(torch.tensor([[-1, 4]])).sum().backward()
    gradient = predictor.embedding.weight.grad
    assert gradient is not None
    assert gradient[0].abs().max() == 0


@pytest.mark.parametrize(
    ("changes", "message"), [({"context_size": 3}, "1 or 2"), ({"dim": 6}, "multiple of 4")]
)
def test_wrong_sizes_are_errors(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PredictorConfig(**changes)


def test_balancers_change_gradients_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pruned_rnnt.model.predictor._BALANCER_PROBABILITY", 1.0)
    torch.manual_seed(0)
    balanced = StatelessPredictor(PredictorConfig(dim=8, balancers=True), 10)
    plain = StatelessPredictor(PredictorConfig(dim=8), 10)
    plain.load_state_dict(balanced.state_dict())
    targets, slopes = torch.randint(0, 10, (3, 20)), torch.randn(3, 21, 8)

    def gradients(predictor: StatelessPredictor) -> dict[str, torch.Tensor]:
        predictor.zero_grad()
        output = predictor.forward_targets(targets)
        torch.testing.assert_close(output, plain.forward_targets(targets))
        (output * slopes).sum().backward()
        return {n: p.grad.clone() for n, p in predictor.named_parameters() if p.grad is not None}

    expected = gradients(plain)
    for name, gradient in gradients(balanced.eval()).items():
        assert torch.equal(gradient, expected[name])
    for name, gradient in gradients(balanced.train()).items():
        assert (gradient - expected[name]).norm() > 1e-3 * expected[name].norm(), name


@pytest.mark.slow
def test_balancers_enlarge_small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a loss that prefers no size, embeddings and output grow towards 0.5."""
    monkeypatch.setattr("pruned_rnnt.model.predictor._BALANCER_PROBABILITY", 1.0)
    torch.manual_seed(0)
    targets = torch.randint(0, 10, (4, 50))

    def sizes_after(*, balancers: bool) -> tuple[float, float]:
        predictor = StatelessPredictor(PredictorConfig(dim=8, balancers=balancers), 10)
        with torch.no_grad():
            predictor.embedding.weight.mul_(0.1)
        optimiser = torch.optim.Adam(predictor.parameters(), lr=3e-3)
        for _ in range(400):
            optimiser.zero_grad()
            output = predictor.forward_targets(targets)
            (output * torch.randn_like(output)).sum().backward()
            optimiser.step()
        sizes = predictor.embedding.weight, predictor.forward_targets(targets)
        embedding, output = (float(values.detach().abs().mean()) for values in sizes)
        return embedding, output

    without, with_balancers = sizes_after(balancers=False), sizes_after(balancers=True)
    assert with_balancers[0] > 0.3 > without[0]
    assert with_balancers[1] > 2 * without[1]
