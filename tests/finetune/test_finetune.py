"""`pruned-rnnt finetune` from a run, a model file and an icefall checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pruned_rnnt
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED
from pruned_rnnt.config.written import as_override
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_set import decode_set
from pruned_rnnt.decode.scoring.error_rates import count_errors
from pruned_rnnt.export.model_file import ModelFile, save_model
from pruned_rnnt.finetune.evaluation import Evaluation
from pruned_rnnt.finetune.finetune_task import FinetuneTask
from pruned_rnnt.finetune.settings import load_finetuning
from pruned_rnnt.interop.icefall_model import to_icefall_state
from pruned_rnnt.model.speech_model import ModelLosses
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.run import load_model, run_config
from pruned_rnnt.train.tasks.split_errors import SplitErrors
from tests.finetune.runs import command
from tests.tiny_models import tiny_model, zipformer_of_icefall
from tests.train.processes import run_ranks
from tests.train.run_files import checkpoint_of, killed_at, losses_of


def task_of(*settings: str) -> FinetuneTask:
    config, source = load_finetuning(None, list(settings))
    return FinetuneTask(config, Ranks(), torch.device("cpu"), source=source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ([], True),
        (["data.old_path={root}/old"], False),
        (["data.old_path={root}/old", "data.old_share=0"], True),
        (["data.path={root}/old"], False),
    ],
)
def test_loss_of_the_old_domain_is_announced(
    root: Path,
    tmp_path: Path,
    settings: list[str],
    warned: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before training, with the setting that prevents it."""
    monkeypatch.setattr(Evaluation, "_decode", lambda *_: SplitErrors(errors=0, words=1))
    changes = [setting.format(root=root) for setting in settings]
    named = [f"train.init={root}/run", f"data.path={root}/new"]
    task = task_of(*named, *command(root, tmp_path / "run", *changes)[3:])
    with caplog.at_level(logging.WARNING):
        logging.getLogger("pruned_rnnt").propagate = True
        task.evaluation.measure_source()
    assert task.source is not None
    assert all(parameter.is_meta for parameter in task.source.model.parameters())
    assert not any(parameter.is_meta for parameter in task.model.parameters())
    shown = [line for line in caplog.messages if "makes a model worse" in line]
    assert len(shown) == warned
    assert all(f"data.old_path={root}/old data.old_share=0.25" in line for line in shown)


@pytest.mark.slow
def test_both_test_sets_are_measured_before_and_after(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "tuned"
    assert main(command(root, run, f"data.old_path={root}/old")) == 0
    printed = capsys.readouterr().out
    table = [line for line in printed.splitlines() if "%" in line]
    assert [line.count("%") for line in table] == [2, 2]
    log = (run / "train.log").read_text()
    assert "vocabulary extended: kept 6 symbols, added 2 (▁black, ▁white), dropped 0" in log
    assert f"25% of the utterances from {root}/old" in log
    results = json.loads((run / "finetune.json").read_text())
    assert results["source"] == str(root / "run")
    new, old = results["sets"]
    for each, domain in ((new, "new"), (old, "old")):
        assert each["path"] == str(root / domain)
        assert each["before"] == counts_of(root / "run", root / domain)
        assert each["after"] == counts_of(run, root / domain)
    assert main(["decode", str(run)]) == 0
    assert main(["align", str(run)]) in (0, EXIT_FAILED)


def counts_of(run: Path, data: Path) -> dict[str, Any]:
    """Errors and words of the test set, with the tokens of the run."""
    config = run_config(run)
    loaded = load_model(config)
    module = DataModule(replace(config.data, path=str(data)), tokenizer=loaded.tokenizer)
    decoded = decode_set(loaded.model, module.test_loader("test"), loaded.tokenizer, config.decode)
    counts = count_errors([each.transcript for each in decoded.utterances])
    return {"errors": counts.errors, "words": counts.reference_words, "metric": "wer"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        [],
        [
            *("finetune.lora.rank=2", "data.num_workers=1"),
            *("optimiser.name=scaled_adam", "optimiser.learning_rate=0.009"),
        ],
        [
            *("finetune.layer_decay=0.5", "finetune.vocabulary=replace"),
            "finetune.freeze=[encoder.layers.0,'*.bias']",
        ],
    ],
    ids=["mixed", "adapters", "frozen"],
)
def test_resume_is_exact_without_the_source(
    root: Path, tmp_path: Path, settings: list[str]
) -> None:
    settings = [*settings, "train.save_every=2", "data.augmentation.spec_augment.enabled=true"]
    if "finetune.vocabulary=replace" not in settings:
        settings.append(f"data.old_path={root}/old")
    source = shutil.copytree(root / "run", tmp_path / "source")
    arguments = ["finetune", str(source), str(root / "new"), *command(root, Path())[4:], *settings]
    assert main([*arguments, f"train.folder={tmp_path}/straight"]) == 0
    with killed_at(3):
        main([*arguments, f"train.folder={tmp_path}/resumed", "--debug"])
    before = json.loads((tmp_path / "resumed/finetune.json").read_text())["sets"]
    source.rename(tmp_path / "elsewhere")
    torch.rand(17)
    assert main(["train", f"{tmp_path}/resumed"]) == 0
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert losses_of(resumed) == losses_of(straight)
    assert checkpoint_of(resumed, 4) == checkpoint_of(straight, 4)
    after = [json.loads((run / "finetune.json").read_text()) for run in (straight, resumed)]
    assert after[0] == after[1]
    assert [each["before"] for each in after[1]["sets"]] == [each["before"] for each in before]


@pytest.mark.slow
def test_kept_rows_and_all_other_parameters_are_those_of_the_source(root: Path) -> None:
    settings = [f"train.init={root}/run", f"data.path={root}/new"]
    source = load_model(run_config(root / "run"))
    state = source.model.state_dict()
    for how, symbols in (
        ("extend", [*source.tokenizer.symbols, "▁black", "▁white"]),
        ("replace", Tokenizer.load(root / "new/tokens").symbols),
    ):
        task = task_of(*settings, f"finetune.vocabulary={how}")
        assert task.tokenizer.symbols == symbols
        for name, value in task.model.state_dict().items():
            if value.shape == state[name].shape and "output_linear" not in name:
                if not name.startswith(("predictor.embedding", "pruned_loss", "ctc_head")):
                    assert torch.equal(value, state[name]), name
                continue
            for index, symbol in enumerate(symbols):
                if symbol in source.tokenizer.symbols:
                    row = source.tokenizer.symbols.index(symbol)
                    assert torch.equal(value[index], state[name][row]), (name, symbol)


@pytest.mark.slow
def test_settings_come_from_the_source_with_a_lower_rate(root: Path, tmp_path: Path) -> None:
    old = run_config(root / "run")
    config, _ = load_finetuning(None, [f"train.init={root}/run", f"data.path={root}/new"])
    assert config.model == old.model
    assert config.loss.rnnt_type == "modified"
    assert config.optimiser.learning_rate == pytest.approx(old.optimiser.learning_rate / 5)
    assert config.data.max_duration == old.data.max_duration
    assert config.train.folder == "exp/run-new"
    assert config.train.steps == 200
    yaml = tmp_path / "tune.yaml"
    yaml.write_text(
        f"train:\n  init: {root}/run\n  steps: 7\noptimiser:\n  learning_rate: 0.5\n"
        f"data:\n  path: {root}/new\n"
    )
    config, _ = load_finetuning(yaml, ["train.steps=8"])
    assert config.optimiser.learning_rate == 0.5
    assert config.train.steps == 8
    assert config.model == old.model
    # What depends on the steps follows those that are given.
    config, _ = load_finetuning(yaml, ["train.steps=400"])
    assert (config.schedule.warm_up_steps, config.loss.warm_up_steps) == (20, 20)
    assert config.train.validate_every == 80


@pytest.mark.slow
def test_a_run_keeps_what_its_steps_gave(root: Path, tmp_path: Path) -> None:
    """As earlier versions derived it from other steps; and it had other optimisers."""
    checkpoint = tmp_path / "checkpoints/step-00000004.pt"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    own = "loss:\n  warm_up_steps: 11\nschedule:\n  warm_up_steps: 10\n"
    (tmp_path / "config.yaml").write_text(f"{own}train:\n  validate_every: 40\n")
    settings = [
        *(f"train.init={root}/run", f"data.path={root}/new", f"train.folder={tmp_path}"),
        *("train.steps=400", "optimiser.name=scaled_adam"),
    ]
    config, source = load_finetuning(None, settings)
    assert source is None
    assert (config.schedule.warm_up_steps, config.loss.warm_up_steps) == (10, 11)
    assert (config.train.validate_every, config.train.steps) == (40, 400)
    config, _ = load_finetuning(None, [*settings, "loss.warm_up_steps=3"])
    assert (config.schedule.warm_up_steps, config.loss.warm_up_steps) == (10, 3)


def measure(ranks: Ranks, root: Path) -> list[dict[str, int] | None]:
    settings = [f"train.init={root}/run", f"data.path={root}/new", "data.valid_max_duration=4"]
    config, source = load_finetuning(None, settings)
    task = FinetuneTask(config, ranks, torch.device("cpu"), source=source)
    task.evaluation.measure_source()
    return [each.before and vars(each.before) for each in task.evaluation.sets]


@pytest.mark.slow
def test_processes_measure_together(root: Path) -> None:
    alone = measure(Ranks(), root)
    assert run_ranks(2, measure, root) == [alone, alone]
    assert alone[0] == counts_of(root / "run", root / "new")


@pytest.mark.slow
def test_yaml_trains_as_the_command(root: Path, tmp_path: Path) -> None:
    assert main(command(root, tmp_path / "command")) == 0
    yaml = tmp_path / "tune.yaml"
    yaml.write_text(
        f"data:\n  path: {root}/new\ntrain:\n  init: {root}/run\n  folder: {tmp_path}/yaml\n"
        "  steps: 4\n  log_every: 1\n  device: cpu\n"
    )
    assert main(["train", "--config", str(yaml)]) == 0
    assert losses_of(tmp_path / "command") == losses_of(tmp_path / "yaml")


@pytest.mark.slow
@pytest.mark.usefixtures("without_programs")
def test_adapters_are_merged_in_what_is_exported(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "tuned"
    assert main(command(root, run, "finetune.lora.rank=2", "optimiser.learning_rate=0.05")) == 0
    saved = load_checkpoint(run / "checkpoints/step-00000004.pt")["average"]
    name = "encoder.layers.0.attention.in_proj"
    loaded = load_model(run_config(run)).model.state_dict()
    up, down = saved[f"{name}.lora_up"], saved[f"{name}.lora_down"]
    assert up.abs().max() > 0
    torch.testing.assert_close(loaded[f"{name}.weight"], saved[f"{name}.weight"] + 8.0 * up @ down)
    assert not any("lora" in key for key in loaded)
    assert main(["export", str(run), "--format", "torch"]) == 0
    exported = pruned_rnnt.load(run / "export/torch").model.state_dict()
    for key, value in loaded.items():
        assert torch.equal(exported[key], value), key


def test_model_file_as_source(root: Path, tmp_path: Path) -> None:
    loaded = load_model(run_config(root / "run"))
    save_model(ModelFile(loaded.model, loaded.tokenizer), tmp_path / "model.pt", "a test")
    for path in (tmp_path / "model.pt", tmp_path):
        task = task_of(f"train.init={path}", f"data.path={root}/old")
        assert task.notes()[1].startswith("vocabulary kept: kept 6 symbols, added 0")
        for name, value in loaded.model.state_dict().items():
            assert torch.equal(task.model.state_dict()[name], value), name
        assert [each.domain for each in task.evaluation.sets] == ["new"]


def test_checkpoint_of_a_run_as_source(root: Path, tmp_path: Path) -> None:
    # Neither a comment of YAML nor a mapping.
    run = shutil.copytree(root / "run", tmp_path / "a: run #1")
    path = run / "checkpoints/step-00000002.pt"
    task = task_of(
        as_override("train.init", path), f"data.path={root}/old", "decode.use_average=false"
    )
    assert task.config.model == run_config(root / "run").model


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.slow
def test_icefall_checkpoint_as_source(root: Path, tmp_path: Path, beside: bool) -> None:
    symbols = Tokenizer.load(root / "old/tokens").symbols
    model = tiny_model(zipformer_of_icefall(), len(symbols))
    path = tmp_path / "epoch-3.pt"
    torch.save({"model": to_icefall_state(model)}, path)
    tokens = (tmp_path if beside else root) / "tokens.txt"
    tokens.write_text("".join(f"{symbol} {index}\n" for index, symbol in enumerate(symbols)))
    settings = [f"train.init={path}", f"data.path={root}/new"]
    if not beside:
        with pytest.raises(ValueError, match=r"no bpe.model or tokens.txt beside.*finetune.tokens"):
            load_finetuning(None, settings)
        settings.append(f"finetune.tokens={tokens}")
    task = task_of(*settings)
    assert task.config.optimiser.name == "scaled_adam"
    assert task.config.optimiser.learning_rate == pytest.approx(0.009)
    assert task.config.train.folder == f"exp/{tmp_path.name}-new"  # all runs have an epoch-3.pt
    assert task.tokenizer.symbols == [*symbols, "▁black", "▁white"]
    new, old = task.model.state_dict(), model.state_dict()
    for name, value in old.items():
        assert torch.equal(new[name][: len(value)] if value.dim() else new[name], value), name
    task.model.train()
    task.losses(next(iter(task.train_loader())), 0)
    assert task.model.encoder.clock.step > 50_000  # type: ignore[union-attr]


@pytest.mark.slow
def test_trials_are_those_of_the_fine_tuning(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it, and when it is continued: with its adapters, and the frozen rest."""
    trained: list[set[str]] = []
    losses = FinetuneTask.losses

    def recorded(self: FinetuneTask, batch: Batch, step: int) -> ModelLosses:
        trained.append({n for n, p in self.model.encoder.named_parameters() if p.requires_grad})
        return losses(self, batch, step)

    monkeypatch.setattr(FinetuneTask, "losses", recorded)
    run = tmp_path / "run"
    settings = ["finetune.lora.rank=2", f"train.folder={run}", "train.device=cpu", "train.steps=2"]
    new = [f"train.init={root / 'run'}", f"data.path={root / 'new'}", *settings]
    estimate = ["--estimate", "--estimate-seconds", "0.1"]
    assert main(["train", "--dry-run", *new]) == 0
    assert main(["train", *estimate, *new]) == 0
    assert not run.exists()
    assert main(["finetune", str(root / "run"), str(root / "new"), *settings]) == 0
    files = sorted(path for path in run.rglob("*"))
    assert main(["train", *estimate, str(run)]) == 0
    assert sorted(path for path in run.rglob("*")) == files
    assert len(trained) > 4
    assert all(names and all("lora" in name for name in names) for names in trained)
