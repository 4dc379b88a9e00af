"""CR-CTC in training: batches of two views, their sizes, and several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pruned_rnnt.data.input.augmentation import FeatureAugmenter
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.dry_run import DryRun
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from tests.tiny_corpus import speech_trainer, tiny_experiment
from tests.train.processes import run_ranks

VIEWS = [
    "data.augmentation.spec_augment.enabled=true",
    "data.augmentation.spec_augment.frame_mask_size=10",
    "loss.cr_ctc_scale=0.2",
]


def task_of(config: ExperimentConfig) -> SpeechTask:
    return SpeechTask(config, Ranks(), torch.device("cpu"))


def seconds(batches: list[Batch]) -> list[float]:
    return [sum(batch.durations) for batch in batches]


def test_batches_have_two_views_and_half_the_utterances(corpus: Path, tmp_path: Path) -> None:
    config = tiny_experiment(corpus, tmp_path, "data.max_duration=12", *VIEWS)
    task = task_of(config)
    batches = list(task.train_loader())
    plain = tiny_experiment(corpus, tmp_path, "data.max_duration=12")
    ids = {name for batch in batches for name in batch.ids}
    assert ids == {name for batch in task_of(plain).train_loader() for name in batch.ids}
    assert max(seconds(batches)) <= 6
    assert max(seconds(list(task_of(plain).train_loader()))) > 6
    for batch in batches:
        second = batch.second_view_NTF
        assert second is not None
        assert second.shape == batch.features_NTF.shape
        assert not torch.equal(second, batch.features_NTF)
        kept = batch.select(torch.arange(len(batch)) == 0)
        assert kept.second_view_NTF is not None
        assert torch.equal(kept.second_view_NTF, second[:1])
        shapes = task.shapes(batch)
        assert shapes["features"] == [2 * len(batch), *second.shape[1:]]
        assert shapes["lattice"][0] == 2 * len(batch)
        assert task.size(batch).utterances == len(batch)
    assert all(batch.second_view_NTF is None for batch in task.data.valid_loader())


@pytest.mark.parametrize(
    ("setting", "utterances"), [("data.max_cuts=4", 2), ("data.max_cuts=1", 1)]
)
def test_other_bounds_count_both_views(
    corpus: Path, tmp_path: Path, setting: str, utterances: int
) -> None:
    config = tiny_experiment(corpus, tmp_path, "data.max_duration=100", setting, *VIEWS)
    assert max(len(batch) for batch in task_of(config).train_loader()) == utterances


def test_lattice_bound_counts_both_views(corpus: Path, tmp_path: Path) -> None:
    settings = ["data.max_duration=100", "data.max_lattice=600"]
    config = tiny_experiment(corpus, tmp_path, *settings, *VIEWS)
    task = task_of(config)
    sizes = [task.shapes(batch)["lattice_nodes"] for batch in task.train_loader()]
    assert 300 < max(sizes) <= 600


def test_mask_factor_is_that_of_the_settings(corpus: Path, tmp_path: Path) -> None:
    config = tiny_experiment(corpus, tmp_path, *VIEWS, "loss.cr_ctc_mask_factor=1.7")
    found = task_of(config).train_loader().dataset.augmenter
    assert found is not None
    wanted = FeatureAugmenter(found.config, seed=found.seed, view_mask_factor=1.7)
    features_TF = torch.randn(300, 80)
    views = [each.two_views(features_TF, epoch=0, cut_id="a") for each in (found, wanted)]
    assert all(torch.equal(*pair) for pair in zip(*views, strict=True))


def test_draws_are_those_of_the_epoch(corpus: Path, tmp_path: Path) -> None:
    loader = task_of(tiny_experiment(corpus, tmp_path, *VIEWS)).train_loader()
    views = {}
    for name, epoch in (("first", 0), ("again", 0), ("next", 1)):
        loader.set_epoch(epoch)
        views[name] = {
            utterance: row[:length]
            for batch in loader
            if batch.second_view_NTF is not None
            for utterance, row, length in zip(
                batch.ids, batch.second_view_NTF, batch.feature_lengths_N, strict=True
            )
        }
    same = [torch.equal(view, views["again"][name]) for name, view in views["first"].items()]
    other = [torch.equal(view, views["next"][name]) for name, view in views["first"].items()]
    assert all(same)
    assert sum(other) < len(other) / 2


@pytest.mark.slow
def test_dry_run_counts_both_views(corpus: Path, tmp_path: Path) -> None:
    frames = []
    for settings in ([], VIEWS):
        config = tiny_experiment(corpus, tmp_path, "data.max_cuts=2", *settings)
        trials = DryRun(config)
        largest = trials.scan(100, 100).largest["padded frames"]
        frames.append(largest.frames)
        assert largest.utterances == (1 if settings else 2)
        assert trials.try_batch(largest).problem == ""
    assert 0.8 < frames[1] / frames[0] < 1.3


def after_a_step(
    ranks: Ranks, config: ExperimentConfig, batches: list[list[Batch]]
) -> torch.Tensor:
    """All parameters, as one vector, after one step on batches[rank]."""
    trainer = speech_trainer(config, ranks)
    trainer.model.train()
    report = trainer.stepper(batches[ranks.rank], 0).report()
    assert report.problem == ""
    assert set(report.sums) == {"total", "simple", "pruned", "ctc", "consistency"}
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.slow
def test_two_processes_equal_accumulation(corpus: Path, tmp_path: Path) -> None:
    settings = ["model.encoder.dropout=0.0", "optimiser.eps=1e-3", "data.max_duration=6"]
    config = tiny_experiment(corpus, tmp_path / "run", *settings, *VIEWS)
    first, second = list(speech_trainer(config).task.train_loader())[:2]
    both = run_ranks(2, after_a_step, config, [[first], [second]])
    one = after_a_step(Ranks(), config, [[first, second]])
    for parameters in both:
        torch.testing.assert_close(parameters, one, rtol=0, atol=1e-6)
