"""The plain mean of parameters: against explicitly averaged ones, resumed, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pruned_rnnt.cli import main
from pruned_rnnt.train.engine.average import ParameterMean, mean_between
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from tests.tiny_corpus import speech_trainer, tiny_experiment, tiny_overrides
from tests.train.run_files import checkpoint_of

SETTINGS = [
    "train.mean_every=2",
    "train.save_every=4",
    "train.keep_last=10",
    "train.steps=12",
    "train.loggers=[]",
]


def parameters(run: Path, step: int) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = load_checkpoint(run / f"checkpoints/step-{step:08d}.pt")[
        "model"
    ]
    return model


def mean_of(run: Path, steps: list[int]) -> dict[str, torch.Tensor]:
    states = [parameters(run, step) for step in steps]
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0)
        for name, value in states[0].items()
        if value.is_floating_point()
    }


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps, of which every second one is in the mean and every one in a checkpoint."""
    folder = tmp_path_factory.mktemp("exp") / "run"
    settings = tiny_overrides(corpus, folder, *SETTINGS, "train.save_every=1")
    assert main(["train", *settings, "train.keep_last=20"]) == 0
    return folder


@pytest.mark.slow
def test_mean_of_a_span_is_that_of_its_steps(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "average.pt"
    arguments = ["average", str(run), "--last", "6", "--output", str(output)]
    assert main([*arguments, "--over", "steps"]) == 0
    averaged = load_checkpoint(output)
    # From checkpoint 6 to checkpoint 12: the parameters of steps 8, 10 and 12.
    expected = mean_of(run, [8, 10, 12])
    newest = load_checkpoint(run / "checkpoints/step-00000012.pt")
    own = set(newest["mean"]["parameters"])
    assert "ctc_head.bias" in own
    assert own < set(newest["model"])
    for name, value in averaged["model"].items():
        if name in own:
            torch.testing.assert_close(value.double(), expected[name], rtol=3e-7, atol=1e-8)
        else:
            torch.testing.assert_close(value, newest["model"][name])
    assert averaged["counters"]["step"] == 12
    points = mean_of(run, [7, 8, 9, 10, 11, 12])
    assert any(not torch.equal(points[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_what_is_averaged_follows_the_run(
    run: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["average", str(run), "--last", "4"]) == 0
    out = capsys.readouterr().out
    assert "averaged 2 sets of parameters" in out
    assert (run / "average-over-last-4.pt").is_file()
    assert main(["average", str(run), "--last", "2", "--over", "checkpoints"]) == 0
    mean = load_checkpoint(run / "average-last-2.pt")["model"]
    for name, value in mean_of(run, [11, 12]).items():
        torch.testing.assert_close(mean[name].double(), value, rtol=1e-6, atol=1e-8)
    assert main(["decode", str(run), f"decode.checkpoint={run / 'average-over-last-4.pt'}"]) == 0
    plain = tmp_path / "plain"
    assert (
        main(["train", *tiny_overrides(corpus, plain, "train.save_every=1", "train.loggers=[]")])
        == 0
    )
    capsys.readouterr()
    assert main(["average", str(plain), "--last", "2"]) == 0
    assert "step-00000003.pt" in capsys.readouterr().out
    assert main(["average", str(plain), "--last", "2", "--over", "steps"]) == 1
    assert "train.mean_every" in capsys.readouterr().err


@pytest.mark.slow
def test_too_few_checkpoints_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["average", str(run), "--last", "12"]) == 1
    error = capsys.readouterr().err
    assert "has 12 checkpoints" in error
    assert "needs 13" in error
    assert "train.keep_last" in error


@pytest.mark.slow
def test_resumed_mean_is_exact(corpus: Path, tmp_path: Path) -> None:
    straight = tiny_experiment(corpus, tmp_path / "straight", *SETTINGS)
    speech_trainer(straight).run()
    first = tiny_experiment(corpus, tmp_path / "resumed", *SETTINGS)
    trainer = speech_trainer(first)
    save = trainer.state.save

    def save_and_stop(*arguments: object, **named: object) -> Path | None:
        path = save(*arguments, **named)
        if trainer.state.counters.step == 4:
            raise InterruptedError
        return path

    trainer.state.save = save_and_stop  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        trainer.run()
    speech_trainer(first).run()
    assert checkpoint_of(tmp_path / "resumed", 12) == checkpoint_of(tmp_path / "straight", 12)
    saved = load_checkpoint(tmp_path / "resumed/checkpoints/step-00000012.pt")["mean"]
    assert saved["count"] == 6
    assert all(value.dtype == torch.float64 for value in saved["parameters"].values())


@pytest.mark.slow
def test_mean_that_is_begun_later_has_no_earlier_spans(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    kept = ["train.save_every=2", "train.keep_last=10", "train.loggers=[]"]
    assert main(["train", *tiny_overrides(corpus, folder, *kept)]) == 0
    more = ["train.mean_every=1", "train.steps=8"]
    settings = tiny_overrides(corpus, folder, *kept, *more)
    assert main(["train", "--allow-changes", *settings]) == 0
    capsys.readouterr()
    # Step 4 was saved again when the run continued.
    assert main(["average", str(folder), "--last", "3"]) == 1
    assert "step-00000002.pt has no mean" in capsys.readouterr().err
    assert main(["average", str(folder), "--last", "2"]) == 0


def test_means_are_those_of_the_added_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.add_module("same", model[0])
    mean = ParameterMean(model)
    seen, states = [], [_copy(mean)]
    for _ in range(50):
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value))
        mean.add()
        states.append(_copy(mean))
        seen.append({name: value.double().clone() for name, value in model.named_parameters()})
    for first, last in ((0, 50), (10, 50), (49, 50), (20, 21)):
        span = mean_between(states[first], states[last])
        assert span.count == last - first
        for name, value in span.parameters.items():
            expected = torch.stack([state[name] for state in seen[first:last]]).mean(0)
            torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="no parameters were added"):
        mean_between(states[3], states[3])
    with pytest.raises(ValueError, match="begun anew after step 7"):
        mean_between(states[3], {**states[5], "since": 7})
    other = ParameterMean(nn.Linear(3, 5)).state_dict()
    with pytest.raises(ValueError, match="different models"):
        mean_between(other, states[5])


def _copy(mean: ParameterMean) -> dict[str, object]:
    state = mean.state_dict()
    return {**state, "parameters": {n: v.clone() for n, v in state["parameters"].items()}}


def test_a_mean_of_float64_is_apart_from_the_parameters() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    mean = ParameterMean(model)
    for value in (1.0, 4.0):
        nn.init.constant_(model.weight, value)
        mean.add()
        assert model.weight.item() == value
    assert _copy(mean)["parameters"]["weight"].item() == 2.5  # type: ignore[index]
