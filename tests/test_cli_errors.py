"""The command line without a run: version, help, packaged configurations, one-line errors."""

from __future__ import annotations

import shlex
import subprocess
import sys
from operator import methodcaller
from pathlib import Path

import pytest

import pruned_rnnt
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE, split_arguments
from pruned_rnnt.train.tasks.registry import load_experiment
from tests.tiny_corpus import tiny_overrides

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"pruned-rnnt {pruned_rnnt.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "/nowhere"], EXIT_USAGE, "/nowhere is not a run: it has no config.yaml"),
        (["train", "exp/a", "--config", "b.yaml"], EXIT_USAGE, "exp/a names a run to continue"),
        (["train", "exp/a", "exp/b"], EXIT_USAGE, "name one run to continue, got exp/a exp/b"),
        (["train", "--config", "a", "train.steps", "3"], EXIT_USAGE, "write train.steps=VALUE, "),
        (["decode", "exp/a", "decode.method", "greedy"], EXIT_USAGE, "write decode.method=VALUE"),
        (["train", "--config", "absent.yaml"], EXIT_USAGE, "config file not found: absent.yaml"),
        (["train", "train.stebs=3"], EXIT_USAGE, "did you mean 'train.steps'"),
        (["train", "train.steps=many"], EXIT_USAGE, "train.steps"),
        (["train", "data.path=/nowhere"], EXIT_FAILED, "run `pruned-rnnt prepare`"),
        (["decode", "/nowhere"], EXIT_USAGE, "/nowhere is not a run"),
        (["decode", __file__], EXIT_USAGE, f"{__file__} is not a run: it is a file"),
        (["decode"], EXIT_USAGE, "name one run"),
        (["train", "task=singing"], EXIT_USAGE, "must be 'lm'"),
        (["decode", "a", "b"], EXIT_USAGE, "name one run"),
        (["inspect", "absent.yaml"], EXIT_USAGE, "config file not found"),
        (["inspect", "/", "a.b=1"], EXIT_USAGE, "a.b=1: settings are for a configuration, or for"),
        (["average", "/nowhere"], EXIT_FAILED, "has no checkpoints"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert len(shown.strip().splitlines()) == 1


def test_a_file_may_begin_with_a_dash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-a.wav").touch()
    with pytest.raises(SystemExit):
        main(["transcribe", "run", "-a.wav"])
    shown = capsys.readouterr().err
    assert shown.startswith("usage: pruned-rnnt transcribe ")
    assert shown.endswith("arguments: -a.wav: write ./-a.wav for the file of this name\n")


@pytest.mark.parametrize("command", ["prepare", "train", "decode", "average", "inspect"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 8


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_packaged_config_loads(path: Path) -> None:
    config, _ = load_experiment(path, [])
    assert Path(config.train.folder).name == path.stem


def test_there_are_configs() -> None:
    assert CONFIGS


def test_module_runs_the_command_line() -> None:
    command = [sys.executable, "-m", "pruned_rnnt", "train", "train.stebs=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == EXIT_USAGE
    assert "did you mean" in done.stderr


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (PermissionError(13, "Permission denied", "/x"), ""),
        (OSError(28, "No space left"), " (--debug shows where)"),
        # Not that of standard output.
        (BrokenPipeError(32, "Broken pipe"), " (--debug shows where)"),
    ],
)
def test_errors_of_files_are_one_line(
    error: OSError, hint: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("pruned_rnnt.train.run.keeps_mean", fail)
    assert main(["average", "run"]) == EXIT_FAILED
    assert capfd.readouterr().err == f"pruned-rnnt average: {error}{hint}\n"


def test_errors_of_other_libraries_have_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pruned_rnnt.train.run.keeps_mean", methodcaller("relative_to", "/y"))
    assert main(["average", "run"]) == EXIT_FAILED
    shown = capsys.readouterr().err
    assert "not in" in shown
    assert shown.endswith(" (--debug shows where)\n")


@pytest.mark.parametrize("name", [None, "pruned_rnnt_recipes"])
def test_errors_of_other_code_have_a_hint(
    name: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {} if name is None else {"__name__": name}
    exec("def fail(*_): raise ValueError('x')", values)
    monkeypatch.setattr("pruned_rnnt.train.run.keeps_mean", values["fail"])
    assert main(["average", "run"]) == EXIT_FAILED
    assert capsys.readouterr().err == "pruned-rnnt average: x (--debug shows where)\n"


@pytest.mark.slow
def test_closed_output_is_no_error() -> None:
    command = [sys.executable, "-m", "pruned_rnnt", "inspect", "synthetic", "--keys"]
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(command)} | true"],
        capture_output=True,
        text=True,
        cwd=CONFIGS[0].parent.parent,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.joiner_dim=0", "model.joiner_dim is 0, needs at least 1"),
        ("model.joiner_dim=-3", "model.joiner_dim is -3, needs at least 1"),
        ("model.encoder.layers=0", "model.encoder.layers is 0, needs at least 1"),
        ("model.encoder.dim=0", "model.encoder.dim is 0, needs at least 1"),
        ("model.encoder.heads=0", "model.encoder.heads is 0, needs at least 1"),
        ("model.encoder.feedforward_dim=-1", "model.encoder.feedforward_dim is -1, needs at"),
        ("model.encoder.kernel_size=-5", "model.encoder.kernel_size is -5, needs at least 1"),
        ("model.encoder.subsampling_channels=0", "subsampling_channels is 0, needs at least 1"),
        ("model.encoder.num_mel_bins=0", "model.encoder.num_mel_bins is 0, needs at least 7"),
        ("model.encoder.dropout=1", "model.encoder.dropout is 1.0, needs 0 <= x < 1"),
        ("model.predictor.dim=0", "model.predictor.dim is 0, needs a multiple of 4"),
        ("model.predictor.dim=-4", "model.predictor.dim is -4, needs a multiple of 4"),
        ("loss.s_range=0", "loss.s_range is 0, needs at least 2"),
        ("loss.warm_up_steps=-1", "loss.warm_up_steps is -1, needs at least 0"),
        ("data.max_duration=0", "data.max_duration must be above 0 seconds, got 0.0"),
        ("data.num_buckets=0", "data.num_buckets is 0, needs at least 1"),
        ("data.num_workers=-1", "data.num_workers is -1, needs at least 0"),
        ("data.prefetch_factor=0", "data.prefetch_factor is 0, needs at least 1"),
        ("data.filters.max_symbols=0", "data.filters.max_symbols is 0, needs at least 1"),
        ("data.augmentation.tempo=1", "data.augmentation.tempo is 1.0, needs 0 <= x < 1"),
        ("optimiser.learning_rate=.inf", "optimiser.learning_rate is inf, needs > 0"),
        ("optimiser.betas=[0.9,1.0]", "optimiser.betas is [0.9, 1.0]"),
        ("schedule.eden_steps=0", "schedule.eden_steps is 0.0, needs > 0"),
        ("train.accumulate=0", "train.accumulate is 0, needs at least 1"),
        ("train.threads=100000", "train.threads is 100000, needs at most 1024"),
        (f"train.seed={2**64}", f"train.seed is {2**64}, needs to fit into 64 bits"),
        ("decode.beam_size=0", "decode.beam_size is 0, needs at least 1"),
    ],
)
def test_invalid_sizes_are_named(
    corpus: Path, tmp_path: Path, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *tiny_overrides(corpus, run, setting)]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not run.exists()


@pytest.mark.parametrize(
    "name", ["dims", "layers", "heads", "feedforward_dims", "kernel_sizes", "downsampling"]
)
def test_invalid_sizes_of_stacks_are_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    setting = f"model.encoder.{name}=[0,1,1,1,1,1]"
    assert main(["train", "model.encoder.kind=zipformer", setting]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"model.encoder.{name} is [0, 1, 1, 1, 1, 1], needs at least 1" in line


def test_an_existing_path_is_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=0.01").mkdir()
    long = f"title={'x' * 5000}"
    assert split_arguments(["lr=0.01", "a.b=1", "c", long]) == (["a.b=1", long], ["lr=0.01", "c"])
