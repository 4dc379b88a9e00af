"""The checks of encoders, graphs and resumed steps: right here, and wrong ones are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.model import encoder_graphs, inference_graphs
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.kernels import available
from pruned_rnnt.selfcheck import encoders, resumed
from pruned_rnnt.selfcheck.encoders import check_encoders, check_graphs, encoder_configs
from pruned_rnnt.selfcheck.problem import Finding
from pruned_rnnt.selfcheck.resumed import check_resumed
from tests.selfcheck.fakes import cpu


@pytest.fixture(autouse=True)
def _one_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {"Conformer": encoder_configs()["Conformer"]}
    monkeypatch.setattr(encoders, "encoder_configs", lambda: configs)


@pytest.mark.slow
def test_all_encoders_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "encoder_configs", encoder_configs)
    findings = list(check_encoders(cpu()))
    assert sum(finding.error is not None for finding in findings) == len(encoder_configs())
    assert not [finding.failure for finding in findings if finding.failure]


def change_linear(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """What every linear layer of an encoder does while fused kernels are allowed."""
    forward = nn.functional.linear

    def linear(*arguments: Any) -> Tensor:
        out = forward(*arguments)
        is_kernel = available._mode == "auto" and out.dtype != torch.float64
        return change(out) if is_kernel else out

    monkeypatch.setattr(nn.functional, "linear", linear)


def raise_error(x: Tensor) -> Tensor:
    raise RuntimeError("the kernel image is invalid")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: 1.01 * x, "fused kernels differ from float64"),
        (lambda x: x * float("nan"), "fused kernels differ from float64"),
        (raise_error, "the kernel image is invalid"),
    ],
)
def test_wrong_kernels_of_an_encoder(
    change: Callable[[Tensor], Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_linear(monkeypatch, change)
    finding, left_out = check_encoders(cpu())
    assert said in finding.failure
    assert finding.plain_is_right
    assert "not used on cpu" in left_out.note
    assert available._mode == "auto"


@pytest.mark.parametrize("is_wrong", [False, True])
def test_training_passes_with_kernels(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_runs_kernels", lambda device: True)
    monkeypatch.setattr(encoders, "_compile", lambda device, dtypes: None)  # needs Triton
    if is_wrong:
        change_linear(monkeypatch, lambda x: 1.01 * x)
    _, training = check_encoders(cpu())
    assert training.what == "Conformer, float32, training"
    assert ("of training differ from plain torch" in training.failure) == is_wrong
    assert training.plain_is_right == is_wrong


def test_plain_torch_that_is_wrong_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = encoders._passed

    def wrong(encoder: Encoder, dtype: torch.dtype) -> list[Tensor]:
        return [x + (dtype != torch.float64) for x in passed(encoder, dtype)]

    monkeypatch.setattr(encoders, "_passed", wrong)
    finding, _ = check_encoders(cpu())
    assert "plain torch is wrong as well" in finding.failure
    assert not finding.plain_is_right


def findings_of_graphs(factor: float, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """With graphs whose replays are the encoder's output times a factor."""

    class Graphs:
        def __init__(self, encoder: Encoder | None = None) -> None:
            self.encoder, self.calls = encoder, 0

        def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            self.calls += 1
            first, *rest = arguments
            encoder, rest = (self.encoder, list(arguments)) if self.encoder else (first, rest)
            encoded_NTE, lengths_N = encoder(*rest)
            return encoded_NTE * (factor if self.calls > 1 else 1.0), lengths_N

    monkeypatch.setattr(encoder_graphs, "EncoderGraphs", Graphs)
    monkeypatch.setattr(inference_graphs, "InferenceGraphs", Graphs)
    monkeypatch.setattr(encoder_graphs, "graph_obstacle", lambda encoder: "")
    return list(check_graphs(cpu()))


def test_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    (left_out,) = check_graphs(cpu())
    assert left_out.note == "left out: not on cpu"
    right = findings_of_graphs(1.0, monkeypatch)
    assert [finding.failure for finding in right] == ["", ""]
    wrong = findings_of_graphs(1.01, monkeypatch)
    assert len(wrong) == 2
    for finding in wrong:
        assert "the graph differs" in finding.failure
        assert finding.plain_is_right


def test_a_resumed_step_is_the_same_bit_for_bit() -> None:
    before = torch.get_rng_state()
    finding = check_resumed(cpu())
    assert not finding.failure
    assert finding.error == 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["load_optimiser_state", "restore_random_state"])
def test_a_resumed_step_without_a_part_of_the_state(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumed, lost, lambda *arguments: None)
    assert "differ from those of the training that went on" in check_resumed(cpu()).failure


def test_a_step_that_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = resumed._train_step
    noise = iter(range(100))
    monkeypatch.setattr(resumed, "_train_step", lambda *x: steps(*x) + next(noise))
    assert "different bits each time" in check_resumed(cpu()).failure
