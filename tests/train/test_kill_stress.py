"""A run killed at random moments, also while writing a checkpoint, ends with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_corpus import make_corpus, speech_trainer, tiny_experiment
from tests.train.kill_loop import results, train_through_deaths
from tests.train.run_files import checkpoint_of

pytestmark = pytest.mark.slow

STEPS = 24


def test_killed_run_ends_with_the_same_results(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    settings = [
        f"train.steps={STEPS}",
        "train.save_every=1",
        "train.validate_every=6",
        "data.augmentation.spec_augment.enabled=true",
    ]
    straight = tiny_experiment(corpus, tmp_path / "straight", *settings)
    speech_trainer(straight).run()
    killed = tiny_experiment(corpus, tmp_path / "killed", *settings)
    deaths = train_through_deaths(killed, kills=4, seed=1)
    assert len(deaths.steps) == 4
    assert deaths.in_writes >= 1
    assert results(killed) == results(straight)
    assert checkpoint_of(killed.folder, STEPS) == checkpoint_of(straight.folder, STEPS)
