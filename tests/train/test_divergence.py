"""NaN, infinite or huge parameters are reported, never saved, and refused on loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_bad_steps import spoil_batches

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.tiny_corpus import speech_trainer, tiny_experiment, tiny_overrides
from tests.train.processes import run_ranks

SAVING = ("train.save_every=1", "train.validate_every=99", "train.keep_last=3")


def contents(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("log_every", [1, 100])
def test_divergence_keeps_good_checkpoints(
    corpus: Path, tmp_path: Path, log_every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = tiny_overrides(corpus, run, *SAVING, "train.steps=3", f"train.log_every={log_every}")
    assert main(["train", *settings]) == 0
    good = contents(run)
    assert {f"step-0000000{step}.pt" for step in (1, 2, 3)} <= set(good)
    capsys.readouterr()
    settings += ["train.steps=30", "optimiser.learning_rate=1e30", "--allow-changes"]
    assert main(["train", *settings]) == EXIT_FAILED
    shown = capsys.readouterr().err
    last = shown.splitlines()[-1]
    assert "training stopped at step 4, because it has diverged: parameter " in last
    assert "has values up to " in last
    assert "step-00000003.pt" in last
    assert "optimiser.learning_rate (now 1e+30)" in last
    assert "Traceback" not in shown
    assert "utterances" not in shown
    assert contents(run) == good
    assert not (run / "bad_steps").exists()
    # As the message advises.
    settings += ["train.steps=4", "optimiser.learning_rate=1e-3"]
    assert main(["train", *settings]) == 0


def test_broken_parameters_are_not_reported_as_bad_utterances(corpus: Path, tmp_path: Path) -> None:
    """Also between two checks of the parameters, by the loss."""
    config = tiny_experiment(corpus, tmp_path / "run", "train.log_every=99", "train.save_every=99")
    trainer = speech_trainer(config)
    with torch.no_grad():
        trainer.model.joiner.output_linear.bias[1] = float("nan")  # type: ignore[union-attr,operator]
    message = r"at step 1, .* joiner\.output_linear\.bias has NaN values \(1 of .*no checkpoint"
    with pytest.raises(TrainingStopped, match=message):
        trainer.run()
    assert not (config.folder / "bad_steps").exists()
    assert not trainer.checkpoints.paths()


@pytest.mark.slow
def test_checkpoints_of_skipped_steps_displace_none(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_batches(monkeypatch, [3, 4])
    settings = ["train.save_every=1", "train.keep_last=1", "train.keep_best=0"]
    run = tmp_path / "run"
    for steps, kept in ((2, [2]), (4, [2, 3, 4]), (5, [5])):
        config = tiny_experiment(corpus, run, *settings, f"train.steps={steps}")
        trainer = speech_trainer(config, allow_changes=True)
        trainer.run()
        assert trainer.checkpoints.paths() == [trainer.checkpoints.path(step) for step in kept]


def diverge(ranks: Ranks, config: ExperimentConfig) -> str:
    with pytest.raises(TrainingStopped) as caught:
        speech_trainer(config, ranks).run()
    return str(caught.value)


@pytest.mark.slow
def test_divergence_stops_all_processes(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*SAVING, "data.max_duration=3", "optimiser.learning_rate=1e30"]
    first, second = run_ranks(2, diverge, tiny_experiment(corpus, run, *settings))
    assert first == second
    assert "at step 1, because it has diverged: parameter " in first


@pytest.fixture(scope="module")
def broken_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("exp") / "run"
    speech_trainer(tiny_experiment(corpus, run, "train.steps=1")).run()
    path = run / "checkpoints/step-00000001.pt"
    values = torch.load(path, weights_only=True)
    for state in (values["model"], values["average"]):
        state["joiner.output_linear.weight"][0] = float("nan")
    torch.save(values, path)
    return run


@pytest.mark.parametrize("command", ["transcribe", "decode", "export", "align", "average"])
def test_every_command_names_the_broken_parameter(
    broken_run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"transcribe": ["a.wav"], "export": ["--format", "torch"], "average": ["--last=1"]}
    assert main([command, str(broken_run), *arguments.get(command, [])]) == EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-00000001.pt cannot be used" in line
    assert "parameter joiner.output_linear.weight has NaN values (32 of " in line
