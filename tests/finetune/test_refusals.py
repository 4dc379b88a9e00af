"""What does not fit the source is refused before the first step, with a message that helps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lhotse import CutSet

from pruned_rnnt.cli.command import EXIT_USAGE
from tests.finetune.runs import command, error_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["finetune.freeze=[encoder.layer]"], "'encoder.layer' matches no parameter; the parts"),
        (["model.encoder.dim=48"], "model.encoder.dim: 32 -> 48"),
        (["model.encoder.kind=zipformer"], "the model in train.init has a conformer: leave"),
        (["model.encoder.feature_norm=utterance"], "model.encoder.feature_norm: fixed -> utter"),
        (["loss.rnnt_type=regular"], "loss.rnnt_type: modified -> regular"),
        (["finetune.vocabulary=keep"], "unknown (black, white); set finetune.vocabulary=extend"),
        (["finetune.checkpoint=best", "train.init=nowhere"], "train.init=nowhere: there is no"),
        (["finetune.lora.rank=2", "train.compile_encoder=true"], "does not support adapters"),
        (
            ["finetune.lora.rank=2", "finetune.freeze=[encoder.layers.0]"],
            "'encoder.layers.0' matches encoder.layers.0.feedforward_in.1, which has an adapter",
        ),
        (["finetune.vocabulary=extends"], "finetune.vocabulary"),
        (["train.folder=SOURCE"], "train.folder is the run in train.init"),
        (["data.old_share=0.5"], "data.old_share is 0.5, and data.old_path is empty: name the"),
    ],
)
def test_what_does_not_fit_is_refused(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    message: str,
) -> None:
    run = tmp_path / "tuned"
    settings = [item.replace("SOURCE", str(root / "run")) for item in settings]
    assert message in error_of(command(root, run, *settings), capsys, EXIT_USAGE)
    assert not run.exists()


def test_data_are_a_folder_and_not_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Other commands take data.path=DATA."""
    error = error_of(["finetune", "run", "data.path=data/calls"], capsys, EXIT_USAGE)
    assert "DATA is 'data.path=data/calls', needs a folder without `data.path=`: " in error
    assert "`pruned-rnnt finetune run data/calls`" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: replace(f, num_features=40), "features of 40 bins, and the source was trained"),
        (lambda f: replace(f, type="mfcc"), "features of the kind 'mfcc'"),
        (lambda f: replace(f, frame_shift=0.02), "a frame every 0.02 s"),
        (lambda f: replace(f, sampling_rate=8000), "features of audio at 8000 Hz"),
    ],
)
@pytest.mark.parametrize("domain", ["new", "old"])
def test_other_features_are_refused(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable,  # type: ignore[type-arg]
    message: str,
    domain: str,
) -> None:
    data = shutil.copytree(root / domain, tmp_path / "data")
    path = data / "train_cuts.jsonl.gz"
    cuts = list(CutSet.from_file(path))
    cuts[-1] = replace(cuts[-1], features=change(cuts[-1].features))
    CutSet.from_cuts(cuts).to_file(path)
    key = "path" if domain == "new" else "old_path"
    arguments = command(root, tmp_path / "run", f"data.{key}={data}")
    line = error_of(arguments, capsys, EXIT_USAGE)
    assert f"{data}: train-{len(cuts) - 1} of train has" in line
    assert message in line


def test_settings_without_a_source_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_of(["train", "finetune.freeze=[encoder]"], capsys, EXIT_USAGE)
    assert "the settings of finetune need train.init" in line
    line = error_of(["train", "--config", "lm", "train.init=exp/x"], capsys, EXIT_USAGE)
    assert "train.init" in line
