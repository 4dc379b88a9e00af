"""What does not fit the source is refused before the first step, with a message that helps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lhotse import CutSet
from lhotse.testing.dummies import dummy_cut, dummy_supervision

from pruned_rnnt.cli.command import EXIT_USAGE
from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.config.written import to_yaml
from pruned_rnnt.data.audio.features import FBANK
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.export.model_file import ModelFile, save_model
from pruned_rnnt.finetune import source
from pruned_rnnt.finetune.evaluation import _saved
from pruned_rnnt.finetune.settings import continued_finetuning, load_finetuning
from pruned_rnnt.licences.chain import add_origins
from pruned_rnnt.pretrained.found_model import FoundModel
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import load_model, run_config
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
        (["finetune.freeze=['*']"], "leaves nothing to train"),
        (
            ["finetune.freeze=[joiner,encoder]"],
            "finetune.freeze=[joiner,encoder] freezes joiner.output_linear.weight, whose rows for "
            "the 2 added symbols (▁black, ▁white) are random",
        ),
        (
            ["finetune.freeze=[ctc_head]", "finetune.vocabulary=replace"],
            "freezes ctc_head.weight, whose rows",
        ),
        (["optimiser.name=scaled_adam"], "one for adamw: set optimiser.learning_rate"),
        (["finetune.vocabulary=extends"], "finetune.vocabulary"),
        (["train.folder=SOURCE"], "train.folder is the run in train.init"),
        (["data.old_share=0.5"], "data.old_share is 0.5, and data.old_path is empty: name the"),
        (["data.old_share=0.25"], "data.old_share is 0.25, and data.old_path is empty: name"),
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


def test_the_configuration_of_a_run_is_taken(root: Path, tmp_path: Path) -> None:
    """It has all settings, defaults included."""
    named = [f"train.init={root}/run", f"data.path={root}/new", f"train.folder={tmp_path}/tuned"]
    config, source = load_finetuning(root / "run/config.yaml", named)
    assert config.data.old_share == 0.25
    assert source is not None


@pytest.mark.slow
def test_a_run_of_another_source_is_not_continued(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "tuned"
    settings = [f"data.path={root}/new", f"train.folder={run}"]
    config, begun = load_finetuning(None, [f"train.init={root}/run", *settings])
    assert begun is not None
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/step-00000001.pt").touch()
    (run / "config.yaml").write_text(to_yaml(config))
    add_origins(run, begun.origins)
    loaded = load_model(run_config(root / "run"))
    for model in ("same", "other"):
        parts = ModelFile(loaded.model, loaded.tokenizer)
        save_model(parts, tmp_path / model / "model.pt", "a test")
        next(loaded.model.parameters()).data.mul_(1.5)
    same, other = (f"train.init={tmp_path}/{model}" for model in ("same", "other"))
    assert load_finetuning(None, [same, *settings])[1] is None
    assert continued_finetuning(run / "config.yaml", [same])[1] is None
    assert continued_finetuning(run / "config.yaml", [])[1] is None
    message = rf"tuned holds a run made from {root}/run \(.*, and {other} has other weights .*: set"
    with pytest.raises(ConfigError, match=message):
        load_finetuning(None, [other, *settings])
    with pytest.raises(ConfigError, match=message):
        continued_finetuning(run / "config.yaml", [other])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("zipformer/exp/pretrained.pt", "zipformer"),
        ("zipformer/epoch-30.pt", "zipformer"),
        ("mine.pt", "mine"),
        ("calls/export/torch/model.pt", "calls"),
        ("parakeet-0.6b.nemo", "parakeet-0.6b"),
        ("export/a.nemo", "a"),
    ],
)
def test_names_of_sources(tmp_path: Path, path: str, name: str) -> None:
    """Those of files are often the same for all models."""
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert source._own_name(FoundModel(kind="file", path=file)) == name


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


@pytest.mark.parametrize("shards", [1, 4])
def test_texts_are_read_from_all_of_a_split(
    shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split may have one language after the other."""
    monkeypatch.setattr(source, "_MOST_CUTS", 5)
    cuts = [
        dummy_cut(n, supervisions=[dummy_supervision(n, text="hello" if n < 50 else "สวัสดี")])
        for n in range(100)
    ]
    for shard in range(shards):
        name = "train_cuts.jsonl.gz" if shards == 1 else f"train_cuts.{shard:06}.jsonl.gz"
        size = len(cuts) // shards
        CutSet.from_cuts(cuts[shard * size : (shard + 1) * size]).to_file(tmp_path / name)
    config = DataConfig(features="waveform", allow_commands=True)  # their recordings are echoes
    texts = source.check_data(config, str(tmp_path), FBANK, ["train"]).texts
    assert 5 <= len(texts) <= 10
    assert 0.3 < texts.count("hello") / len(texts) < 0.7


def test_a_damaged_or_removed_file_of_results(root: Path, tmp_path: Path) -> None:
    config = ExperimentConfig(
        data=DataConfig(path=str(root / "new"), old_path=str(root / "old")),
        train=TrainConfig(folder=str(tmp_path)),
    )
    path = RunFolder(tmp_path).finetuning
    path.write_text('{"sets": [')
    with pytest.raises(ValueError, match="remove it: the sets are then decoded after fine-tuning"):
        _saved(config)
    path.unlink()
    assert [(each.domain, each.path, each.before) for each in _saved(config)] == [
        ("new", str(root / "new"), None),
        ("old", str(root / "old"), None),
    ]
