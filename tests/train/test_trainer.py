"""The training loop: exact continuation, learning, logs, pictures."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.model.training_shapes import TrainingShapes
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.log import progress_bar, read_metrics
from pruned_rnnt.train.engine.report import progress_line, step_line
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from tests.tiny_corpus import speech_trainer, tiny_experiment
from tests.train.run_files import checkpoint_of, killed_at, losses_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["train.save_every=2", "train.validate_every=100"],
        ["train.save_every=2", "train.validate_every=2", "data.num_workers=1"],
        ["train.save_every=1", "train.accumulate=2", "train.precision=bfloat16"],
        ["train.save_every=2", "optimiser.name=scaled_adam", "schedule.kind=eden"],
        ["train.save_every=2", "train.precision=float16"],
        ["train.save_every=2", "mwer.enabled=true", "mwer.nbest=3", "train.accumulate=2"],
        ["train.save_every=2", "loss.cr_ctc_scale=0.02"],
        ["train.save_every=1", "loss.kind=ctc", "loss.cr_ctc_scale=0.2", "train.accumulate=2"],
        ["train.save_every=2", "loss.durations=[0,1,2]", "loss.sigma=0.05", "loss.omega=0.5"],
    ],
    ids=[
        "plain",
        "validation-and-worker",
        "accumulation-bfloat16",
        "scaled-adam",
        "float16",
        "mwer",
        "cr-ctc",
        "ctc-alone",
        "tdt",
    ],
)
def test_four_steps_equal_two_and_two(corpus: Path, tmp_path: Path, overrides: list[str]) -> None:
    # Dropout, shuffling and augmentation draw random numbers.
    random_parts = [
        "data.augmentation.spec_augment.enabled=true",
        "data.augmentation.noise_probability=0.5",
        "train.keep_last=10",
        *overrides,
    ]
    straight = tiny_experiment(corpus, tmp_path / "straight", *random_parts)
    assert speech_trainer(straight).run() == "finished"

    resumed = tiny_experiment(corpus, tmp_path / "resumed", *random_parts)
    with killed_at(3):
        speech_trainer(resumed).run()
    torch.rand(17)
    trainer = speech_trainer(resumed)
    assert trainer.state.counters.step == 2
    assert trainer.run() == "finished"

    assert losses_of(resumed.folder) == losses_of(straight.folder)
    assert checkpoint_of(resumed.folder, 4) == checkpoint_of(straight.folder, 4)


@pytest.mark.slow
def test_resume_at_the_end_of_an_epoch(corpus: Path, tmp_path: Path) -> None:
    overrides = ["train.steps=12", "train.keep_last=10"]
    straight = tiny_experiment(corpus, tmp_path / "straight", *overrides)
    trainer = speech_trainer(straight)
    trainer.run()
    steps_of_epoch = trainer.checkpoints.paths()[0]
    boundary = load_checkpoint(steps_of_epoch)["counters"]
    assert boundary["epoch"] == 1
    assert boundary["batch"] == 0

    resumed = tiny_experiment(corpus, tmp_path / "resumed", *overrides)
    with killed_at(boundary["step"] + 1):
        speech_trainer(resumed).run()
    speech_trainer(resumed).run()
    assert losses_of(resumed.folder) == losses_of(straight.folder)
    assert checkpoint_of(resumed.folder, 12) == checkpoint_of(straight.folder, 12)


def test_checkpoints_keep_the_shapes_of_batches(corpus: Path, tmp_path: Path) -> None:
    task = SpeechTask(tiny_experiment(corpus, tmp_path), Ranks(), torch.device("cpu"))
    assert task.state_dict() == {}
    graphs: Any = SimpleNamespace(shapes=TrainingShapes(6))
    task.model.encoder_graphs = graphs
    for _ in range(2):  # of which the second would have a finer shape
        graphs.shapes.shape_of(33, 1637)
    torch.save(task.state_dict(), tmp_path / "state.pt")
    saved = graphs.shapes.state_dict()
    assert saved["used"]
    assert saved["saved"]
    graphs.shapes = TrainingShapes(6)
    task.load_state_dict({})
    assert graphs.shapes.state_dict() != saved
    task.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert graphs.shapes.state_dict() == saved


def test_a_step_out_of_memory_drops_the_shape_of_its_batch(corpus: Path, tmp_path: Path) -> None:
    task = SpeechTask(tiny_experiment(corpus, tmp_path), Ranks(), torch.device("cpu"))
    task.release_memory()
    cleared: list[bool] = []
    graphs: Any = SimpleNamespace(shapes=TrainingShapes(6), clear=lambda: cleared.append(True))
    task.model.encoder_graphs = graphs
    failed = graphs.shapes.shape_of(64, 1600)
    task.release_memory()
    assert cleared == [True]
    assert graphs.shapes.shape_of(48, 1600) < failed


@pytest.mark.parametrize("kind", ["full", "pruned"])
def test_many_chunk_sizes_with_the_full_loss_have_a_warning(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    causal = [f"model.encoder.{x}" for x in ("causal=true", "feature_norm=fixed", "chunk_size=8")]
    sizes = "model.encoder.chunk_sizes=[8,-1]"
    config = tiny_experiment(corpus, tmp_path, *causal, sizes, f"loss.kind={kind}")
    SpeechTask(config, Ranks(), torch.device("cpu"))
    assert ("one in four with loss.kind=full" in caplog.text) == (kind == "full")


@pytest.mark.slow
def test_validation_does_not_affect_training(corpus: Path, tmp_path: Path) -> None:
    often = tiny_experiment(corpus, tmp_path / "often", "train.validate_every=1")
    never = tiny_experiment(corpus, tmp_path / "never", "train.validate_every=100")
    speech_trainer(often).run()
    speech_trainer(never).run()
    assert losses_of(often.folder) == losses_of(never.folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pruned", "full", "ctc"])
def test_loss_falls_and_model_learns_words(corpus: Path, tmp_path: Path, kind: str) -> None:
    config = tiny_experiment(
        corpus,
        tmp_path / "run",
        f"loss.kind={kind}",
        "train.steps=120",
        "train.log_every=5",
        "train.validate_every=120",
        "train.average_decay=0.9",
        "optimiser.learning_rate=0.01",
        "schedule.warm_up_steps=10",
        "model.encoder.dropout=0.0",
    )
    speech_trainer(config).run()
    losses = losses_of(config.folder)
    assert losses[-1][1] < 0.2 * losses[0][1]
    (valid,) = [line for line in read_metrics(config.folder) if line["group"] == "valid"]
    assert valid["wer"] < 0.35
    if kind == "pruned":
        assert {"simple", "pruned", "ctc", "retained_mass"} <= set(valid)
        assert 0.9 < valid["retained_mass"] <= 1.0001
    else:
        assert {kind, "ctc"} <= set(valid)


def test_pruned_and_full_start_from_the_same_parameters(corpus: Path, tmp_path: Path) -> None:
    models = []
    for kind in ("pruned", "full"):
        config = tiny_experiment(corpus, tmp_path / kind, f"loss.kind={kind}")
        models.append(speech_trainer(config).model.state_dict())
    shared = [name for name in models[1] if name in models[0]]
    assert any(name.startswith("joiner") for name in shared)
    assert set(models[1]) == set(shared)
    assert all(torch.equal(models[0][name], models[1][name]) for name in shared)


@pytest.mark.slow
def test_changed_configuration_is_named(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    speech_trainer(tiny_experiment(corpus, run, "train.steps=1")).run()
    changed = tiny_experiment(corpus, run, "train.steps=2", "optimiser.learning_rate=0.5")
    with pytest.raises(ConfigError, match=r"optimiser\.learning_rate: 0\.002 -> 0\.5") as caught:
        speech_trainer(changed)
    assert "train.steps: 1 -> 2" in str(caught.value)
    assert "--allow-changes" in str(caught.value)
    trainer = speech_trainer(changed, allow_changes=True)
    trainer.run()
    assert trainer.state.counters.step == 2
    # Settings that do not affect training may change without --allow-changes.
    free = tiny_experiment(
        corpus,
        run,
        "train.steps=2",
        "optimiser.learning_rate=0.5",
        "train.log_every=7",
        "decode.beam_size=9",
    )
    speech_trainer(free)


@pytest.mark.slow
def test_truncated_checkpoint_is_named_and_the_previous_one_used(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_experiment(corpus, tmp_path / "run", "train.save_every=2")
    speech_trainer(config).run()
    newest = config.folder / "checkpoints/step-00000004.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    trainer = speech_trainer(config)
    assert trainer.state.counters.step == 2
    assert "step-00000004.pt is truncated" in caplog.text
    trainer.run()
    assert load_checkpoint(newest)["counters"]["step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("durations", ["[]", "[0,1,2,3,4]"])
def test_run_writes_all_logs(corpus: Path, tmp_path: Path, durations: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny_experiment(
        corpus,
        tmp_path / "run",
        "train.validate_every=2",
        f"loss.durations={durations}",
        "train.loggers=[tensorboard]",
    )
    speech_trainer(config).run()
    folder = config.folder
    assert (folder / "config.yaml").is_file()
    assert (folder / "tokens/tokens.txt").is_file()
    log = (folder / "train.log").read_text()
    assert "validation: loss" in log
    assert re.search(r"INFO kernels of the losses on cpu: (native|fallback) \(.+\)", log)
    train = [line for line in read_metrics(folder) if line["group"] == "train"]
    assert [line["step"] for line in train] == [1, 2, 3, 4]
    assert {"simple_per_frame", "pruned_per_symbol", "gradient_norm", "learning_rate"} <= set(
        train[0]
    )
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0})
    board.Reload()
    assert {"valid/lattice", "valid/spectrogram"} <= set(board.Tags()["images"])
    assert {
        "train/total_per_frame",
        "train/utterances_per_second",
        "valid/wer",
        "valid/simple",
        "valid/pruned_per_symbol",
        "valid/retained_mass",
        "valid/band_edge_mass",
    } <= set(board.Tags()["scalars"])


@pytest.mark.slow
def test_pictures_between_validations_do_not_affect_training(corpus: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plain = tiny_experiment(corpus, tmp_path / "plain", "train.validate_every=100")
    speech_trainer(plain).run()
    shown = tiny_experiment(
        corpus,
        tmp_path / "run",
        "train.validate_every=100",
        "train.picture_every=2",
        "train.loggers=[tensorboard]",
    )
    speech_trainer(shown).run()
    board = EventAccumulator(
        str(shown.folder / "tensorboard"), size_guidance={"images": 0, "tensors": 0}
    )
    board.Reload()
    steps = [event.step for event in board.Images("valid/lattice")]
    assert steps[:2] == [2, 4]
    samples = [event.step for event in board.Tensors("valid/samples/text_summary")]
    assert samples[:2] == [2, 4]
    text = board.Tensors("valid/samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "dev-" in text
    assert losses_of(shown.folder) == losses_of(plain.folder)


def test_progress_line_has_all_values() -> None:
    line = progress_line(
        {
            "epoch": 3.0,
            "total_per_frame": 1.5,
            "simple_per_frame": 1.25,
            "pruned_per_frame": 0.75,
            "simple_per_symbol": 9.0,
            "learning_rate": 1e-3,
            "steps_per_second": 2.0,
            "utterances_per_second": 80.0,
            "audio_hours_per_second": 0.25,
            "gpu_memory_gib": 33.25,
            "bad_steps": 2,
        }
    )
    assert line == (
        "epoch 3 loss 1.5000 (simple 1.2500, pruned 0.7500) lr 1.00e-03 2.00 steps/s 80.0 utt/s "
        "0.250 h/s GPU 33.2 GiB 2 skipped"
    )


@pytest.mark.parametrize(
    ("steps_per_second", "left"),
    [(2.0, "0:16:40"), (0.05, "11:06:40"), (0.002, "11d 13h"), (0.0, "?")],
)
def test_log_line_has_the_time_left(steps_per_second: float, left: str) -> None:
    speed = {"steps_per_second": steps_per_second, "learning_rate": 1e-3, "bad_steps": 0}
    line = step_line(1_000_000, 1_002_000, {**speed, "total_per_frame": 12.25})
    shown = f"{steps_per_second:g} steps/s {left} left"
    assert line == f"step 1000000/1002000 loss 12.2500 lr 1.0e-03 {shown}"
    assert len(line) <= 71
    assert step_line(1, 2, {**speed, "bad_steps": 3}).endswith("left 3 skipped")


def test_progress_bar_fits_into_a_small_terminal() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    status = "epoch 3 loss 1.5000 (ctc 1.0000, pruned 0.7500, simple 1.2500) lr 1.00e-03 last word"
    with progress_bar(console) as progress:
        progress.add_task("training", total=100000, completed=12345, status=status)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "12345/100000" in shown
    assert "left" in shown
    assert " ".join(shown.split()).endswith(status)
