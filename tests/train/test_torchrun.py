"""Several processes continue exactly after a crash, also by torchrun's restart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.tiny_corpus import speech_trainer, tiny_experiment, tiny_overrides
from tests.train.processes import run_ranks
from tests.train.run_files import checkpoint_of, killed_at, losses_of

pytestmark = pytest.mark.slow

# Dropout and augmentation draw random numbers, different ones in each process.
SETTINGS = (
    "data.max_duration=3",
    "data.augmentation.spec_augment.enabled=true",
    "train.save_every=2",
    "train.steps=5",
    "train.keep_last=9",
    # torchrun gives each process one thread; another number rounds differently.
    "train.threads=1",
)


def train(ranks: Ranks, config: ExperimentConfig) -> str:
    return speech_trainer(config, ranks).run()


def train_killed(ranks: Ranks, config: ExperimentConfig) -> None:
    """Kill all processes after the third step, before they log or save it."""
    with killed_at(3):
        speech_trainer(config, ranks).run()


def check_same(resumed: ExperimentConfig, straight: ExperimentConfig) -> None:
    assert losses_of(resumed.folder) == losses_of(straight.folder)
    assert checkpoint_of(resumed.folder, 5) == checkpoint_of(straight.folder, 5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torchrun_restarts_from_the_checkpoint(corpus: Path, tmp_path: Path, device: str) -> None:
    settings = (*SETTINGS, f"train.device={device}")
    straight = tiny_experiment(corpus, tmp_path / "straight", *settings)
    assert run_ranks(2, train, straight) == ["finished", "finished"]

    restarted = tiny_experiment(corpus, tmp_path / "restarted", *settings)
    marker = tmp_path / "died"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1"]
    command += [str(Path(__file__).parent / "dying_training.py"), str(marker), "4"]
    command += tiny_overrides(corpus, restarted.folder, *settings)
    environment = os.environ | {"PRUNED_RNNT_SHARE_GPUS": "1"}  # if there are fewer than two
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    assert "continuing at step 2 of 5" in done.stderr
    check_same(restarted, straight)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_two_processes_on_gpus_resume_exactly(corpus: Path, tmp_path: Path, precision: str) -> None:
    settings = [*SETTINGS, "train.device=cuda", f"train.precision={precision}"]
    straight = tiny_experiment(corpus, tmp_path / "straight", *settings)
    run_ranks(2, train, straight)
    resumed = tiny_experiment(corpus, tmp_path / "resumed", *settings)
    run_ranks(2, train_killed, resumed)
    run_ranks(2, train, resumed)
    check_same(resumed, straight)
