"""Several processes make the same steps as one process, and decide alike about failed ones."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.gradients import SummedGradients
from pruned_rnnt.train.engine.report import StepReport
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.optim.conditional import ConditionalOptimiser
from pruned_rnnt.train.optim.owners import Owners
from tests.padded_batch import padded_batch
from tests.tiny_corpus import make_corpus, speech_trainer, tiny_experiment
from tests.train.failures import FailInBackward, SlowGradient, run_out_of_memory
from tests.train.processes import run_ranks

pytestmark = pytest.mark.slow

# The order of summation changes the last bits of gradients. Adam with its usual eps would amplify
# differences of the smallest ones to 2e-5; with eps 1e-3 they were 6e-8 on a CPU.
TOLERANCE = {"rtol": 0.0, "atol": 1e-6}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def experiment(corpus: Path, run: Path, *overrides: str) -> ExperimentConfig:
    return tiny_experiment(
        corpus, run, "data.max_duration=3", "model.encoder.dropout=0.0", *overrides
    )


def ragged_batches(config: ExperimentConfig) -> list[Batch]:
    """Six batches of different sizes."""
    batches = list(speech_trainer(config).task.train_loader())[:6]
    assert len({batch.features_NTF.shape for batch in batches}) > 1
    return batches


def merged(batches: list[Batch]) -> Batch:
    """One padded batch of all their utterances."""
    features, targets = [], []
    for batch in batches:
        for row, length in zip(batch.features_NTF, batch.feature_lengths_N, strict=True):
            features.append(row[:length])
        for row, length in zip(batch.targets_NU, batch.target_lengths_N, strict=True):
            targets.append(row[:length].tolist())
    return padded_batch(
        features,
        targets,
        texts=tuple(text for batch in batches for text in batch.texts),
        ids=tuple(name for batch in batches for name in batch.ids),
        durations=tuple(seconds for batch in batches for seconds in batch.durations),
        words=tuple(words for batch in batches for words in batch.words),
    )


def weights_after(
    ranks: Ranks, config: ExperimentConfig, steps: list[list[list[Batch]]]
) -> dict[str, Tensor]:
    """Parameters, on the CPU, after training on steps[step][rank]."""
    trainer = speech_trainer(config, ranks)
    trainer.model.train()
    for step, batches in enumerate(steps):
        # TF32 convolutions would round to ten bits, differently for each shape.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            report = trainer.stepper(batches[ranks.rank], step).report()
        assert report.problem == ""
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("objective", [[], ["mwer.enabled=true"]], ids=["ordinary", "mwer"])
@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_equal_one_with_the_doubled_batch(
    corpus: Path, tmp_path: Path, device: str, objective: list[str]
) -> None:
    settings = [f"train.device={device}", "optimiser.eps=1e-3", *objective]
    config = experiment(corpus, tmp_path / "run", *settings)
    b = ragged_batches(config)
    both = run_ranks(2, weights_after, config, [[[b[0]], [b[1]]], [[b[2], b[3]], [b[4], b[5]]]])
    one = weights_after(Ranks(), config, [[[merged(b[:2])]], [[merged(b[2:6])]]])
    accumulated = weights_after(Ranks(), config, [[b[:2]], [b[2:6]]])
    start = weights_after(Ranks(), config, [])
    for name, value in one.items():
        assert torch.equal(both[0][name], both[1][name]), name
        torch.testing.assert_close(both[0][name], value, **TOLERANCE)
        torch.testing.assert_close(both[0][name], accumulated[name], **TOLERANCE)
    moved = max(float((one[name] - start[name]).abs().max()) for name in one)
    assert moved > 50 * TOLERANCE["atol"]


def weights_and_overlap(
    ranks: Ranks, config: ExperimentConfig, batches: list[list[Batch]], overlaps: bool
) -> tuple[Tensor, list[bool]]:
    """Parameters after a step on batches[rank], and whether graphs completed each vector that can
    be sent while one runs."""
    trainer = speech_trainer(config, ranks)
    trainer.model.train()
    graphs = trainer.model.encoder_graphs
    if not overlaps:
        graphs.gradients.on_replay = None
    torch.manual_seed(0)
    for step in range(3):
        assert trainer.stepper(batches[ranks.rank], step).report().problem == ""
    buckets = [x for x in trainer.stepper.gradients._buckets if x.complete is not None]
    weights = torch.cat([p.detach().cpu().flatten() for p in trainer.model.parameters()])
    return weights, [bucket.in_graph for bucket in buckets]


@pytest.mark.gpu
def test_exchange_beside_a_graph_equals_the_exchange_after_it(corpus: Path, tmp_path: Path) -> None:
    config = experiment(corpus, tmp_path / "run", "train.device=cuda")
    batches = ragged_batches(config)
    groups = [batches[:2], batches[2:4]]
    beside = run_ranks(2, weights_and_overlap, config, groups, True)
    after = run_ranks(2, weights_and_overlap, config, groups, False)
    assert [used for _, used in beside] == [[True], [True]]
    assert [used for _, used in after] == [[False], [False]]
    for weights, _ in (*beside, *after):
        assert torch.equal(weights, beside[0][0])


def with_failures(ranks: Ranks, config: ExperimentConfig, batches: list[Batch]) -> list[Any]:
    """Steps with failures on rank 1: (report, whether parameters moved, whether to stop) of each,
    and final parameters."""
    trainer = speech_trainer(config, ranks)
    # An optimiser that can leave the decision to the device does so on every device.
    trainer.stepper.reads_late = isinstance(trainer.optimiser, ConditionalOptimiser)
    trainer.model.train()
    losses = trainer.task.losses
    first_layer = next(trainer.model.parameters())
    failure, passes = "", 0

    def failing(batch: Batch, step: int) -> Any:
        nonlocal passes
        passes += 1
        if failure == "forward" or (failure == "second pass" and passes == 2):
            run_out_of_memory(first_layer.device)
        found = losses(batch, step)
        if failure == "backward":
            # When it fails, the gradients of the last layers are complete and sent.
            failure_term = 0 * FailInBackward.apply(first_layer).sum()
            found = replace(found, objective=found.objective + failure_term)
        return found

    trainer.task.losses = failing  # type: ignore[method-assign]
    outcomes: list[tuple[StepReport, bool, bool]] = []
    for step, name in enumerate(["", "forward", "backward", "second pass", "nan", ""]):
        failure, passes = (name if ranks.rank == 1 else ""), 0
        group = [batches[ranks.rank], batches[2 + ranks.rank]]
        if failure == "nan":
            group[1] = replace(group[1], features_NTF=group[1].features_NTF * float("nan"))
        before = [p.detach().clone() for p in trainer.model.parameters()]
        launched = trainer.stepper(group, step, stop_requested=ranks.rank == 1 and step == 4)
        report = launched.report()
        after = list(trainer.model.parameters())
        moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        outcomes.append((report, moved, launched.stop_requested))
    final = torch.cat([p.detach().cpu().flatten() for p in trainer.model.parameters()])
    return [outcomes, final]


@pytest.mark.parametrize("shard", ["none", "optimiser"])
@pytest.mark.parametrize("optimiser", ["adamw", "scaled_adam"])
@pytest.mark.parametrize("device", DEVICES)
def test_all_processes_skip_a_step_that_fails_on_one(
    corpus: Path, tmp_path: Path, device: str, optimiser: str, shard: str
) -> None:
    overrides = [f"train.device={device}", f"optimiser.name={optimiser}", f"train.shard={shard}"]
    config = experiment(corpus, tmp_path / "run", *overrides)
    batches = ragged_batches(config)
    (first, first_weights), (second, second_weights) = run_ranks(
        2, with_failures, config, batches[:4]
    )
    assert [moved for _, moved, _ in first] == [True, False, False, False, False, True]
    assert [moved for _, moved, _ in second] == [moved for _, moved, _ in first]
    assert torch.equal(first_weights, second_weights)
    assert [stop for _, _, stop in first] == [False] * 4 + [True, False]
    for step in (1, 2, 3):
        assert first[step][0].problem == "out of memory (in another process)"
        assert first[step][0].suspects == ()
        assert second[step][0].problem.startswith("out of memory (")
        assert "another" not in second[step][0].problem
    # The report names the batch that failed: the first one, or the second in the third failure.
    for step, batch in ((1, batches[1]), (2, batches[1]), (3, batches[3])):
        assert tuple(u.id for u in second[step][0].suspects) == batch.ids
    assert first[4][0].problem == second[4][0].problem == "infinite or NaN loss"
    assert first[4][0].suspects == ()
    assert tuple(u.id for u in second[4][0].suspects) == batches[3].ids


def sums_of_partial_passes(ranks: Ranks, divided: bool) -> list[Any]:
    """Gradients after passes that reach different parameters on each process, flags and norm."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3, bias=False) for _ in range(4)]
    weights = [layer.weight for layer in layers]
    owners = Owners(weights, ranks.rank, 2) if divided else None
    gradients = SummedGradients(weights, bucket_bytes=36, owners=owners)
    sums = []
    for _ in range(2):
        gradients.start()
        if ranks.rank == 0:
            weights[0].sum().backward()
        gradients.expect_last_pass()
        used = [SlowGradient.apply(weights[0]), weights[1]] if ranks.rank == 0 else weights[1:3]
        sum(((1 + ranks.rank) * weight).sum() for weight in used).backward()
        flags = gradients.finish(torch.tensor([1.0, float(ranks.rank)]))
        grads = [w.grad for w in weights]
        sums = [None if g is None else [float(g.min()), float(g.max())] for g in grads]
        sums += [flags.tolist(), [float(gradients.norm())]]
    return [*sums, [gradients.kept_bytes()]]


def test_gradients_of_passes_that_reach_different_parameters() -> None:
    sums = [[2.0, 2.0], [3.0, 3.0], [2.0, 2.0], [0.0, 0.0]]
    common = [[2.0, 1.0], [pytest.approx(math.sqrt(9 * (4 + 9 + 4)))]]
    whole = [*sums, *common, [4 * 36]]
    assert run_ranks(2, sums_of_partial_passes, False) == [whole, whole]
    # Of four parameters of one size, the processes have every other one.
    first, second = run_ranks(2, sums_of_partial_passes, True)
    assert first == [sums[0], None, sums[2], None, *common, [2 * 36]]
    assert second == [None, sums[1], None, sums[3], *common, [2 * 36]]


def resume_error(ranks: Ranks, corpus: Path, tmp_path: Path) -> str:
    config = experiment(corpus, tmp_path / "run", "train.steps=1")
    speech_trainer(config, ranks).run()
    ranks.gather(0)  # wait for the checkpoint
    elsewhere = experiment(corpus, tmp_path / "elsewhere", "train.steps=1")
    with pytest.raises(ValueError, match="by rank") as caught:
        speech_trainer(config if ranks.rank == 1 else elsewhere, ranks)
    return str(caught.value)


def test_different_checkpoints_on_different_ranks_are_an_error(
    corpus: Path, tmp_path: Path
) -> None:
    messages = run_ranks(2, resume_error, corpus, tmp_path)
    assert all("different steps, [0, 1] by rank" in message for message in messages)
    assert all("a file system that all machines share" in message for message in messages)


def resume_with_two(
    ranks: Ranks, corpus: Path, run: Path, device: str
) -> tuple[str, int, int, str]:
    """Continue a run of one process with two: error message, position, steps, outcome."""
    settings = (f"train.device={device}", "train.validate_every=9")
    with pytest.raises(ValueError, match="allow-changes") as caught:
        speech_trainer(experiment(corpus, run, "train.steps=2", *settings), ranks)
    config = experiment(corpus, run, "train.steps=3", *settings)
    trainer = speech_trainer(config, ranks, allow_changes=True)
    place = trainer.state.counters.batch
    outcome = trainer.run()
    return str(caught.value), place, trainer.state.counters.step, outcome


@pytest.mark.parametrize("device", DEVICES)
def test_number_of_processes_may_change_if_allowed(
    corpus: Path, tmp_path: Path, device: str
) -> None:
    run = tmp_path / "run"
    settings = ("train.steps=2", "train.validate_every=9", f"train.device={device}")
    speech_trainer(experiment(corpus, run, *settings)).run()
    for message, place, steps, outcome in run_ranks(2, resume_with_two, corpus, run, device):
        assert "a run of 1 process(es), and there are 2 now" in message
        assert place == 1
        assert steps == 3
        assert outcome == "finished"


def test_fewer_batches_in_an_epoch_end_it(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run near the end of an epoch, with processes that have more batches than one has."""
    run = tmp_path / "run"
    speech_trainer(experiment(corpus, run, "train.steps=1")).run()
    path = run / "checkpoints/step-00000001.pt"
    values = torch.load(path, weights_only=True)
    values["random"] *= 2
    values["counters"]["batch"] = 20
    torch.save(values, path)
    config = experiment(corpus, run, "train.steps=2")
    trainer = speech_trainer(config, allow_changes=True)
    place = trainer.state.counters.batch
    assert place == len(list(trainer.task.data.train_loader())) < 40  # type: ignore[attr-defined]
    assert f"continuing after batch {place} of the epoch" in caplog.text
    assert trainer.run() == "finished"
    assert (trainer.state.counters.epoch, trainer.state.counters.batch) == (1, 1)


def places_of_two(ranks: Ranks, config: ExperimentConfig) -> None:
    trainer = speech_trainer(config, ranks)
    # As after the last, smaller group of an epoch, of which one process has lost a worker.
    trainer.state.counters.batch = 2 if ranks.rank == 0 else 1
    trainer.state.save(trainer.checkpoints, score=None)


def test_processes_save_one_place_in_the_epoch(corpus: Path, tmp_path: Path) -> None:
    run_ranks(2, places_of_two, experiment(corpus, tmp_path / "run"))
    values = load_checkpoint(tmp_path / "run/checkpoints/step-00000000.pt")
    assert values["counters"]["batch"] == 1
    assert [sampler["batches"] for sampler in values["samplers"]] == [1, 1]


def two_parts(ranks: Ranks, corpus: Path, moved: Path, other: Path, run: Path) -> str:
    """Train with two processes, continue with equal data: the error about other data."""
    settings = ("train.steps=2", "train.validate_every=9")
    speech_trainer(experiment(corpus, run, *settings), ranks).run()
    ranks.gather(0)  # wait for the checkpoint
    assert speech_trainer(experiment(moved, run, *settings), ranks).state.counters.batch == 2
    with pytest.raises(ValueError, match="other utterances") as caught:
        speech_trainer(experiment(other, run, *settings), ranks)
    return str(caught.value)


def test_each_process_recognises_its_batches(corpus: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(corpus, tmp_path / "moved")
    other = make_corpus(tmp_path / "other", seed=1, tokens_from=corpus)
    run = tmp_path / "run"
    messages = run_ranks(2, two_parts, corpus, moved, other, run)
    assert all(f"data.path: {corpus} -> {other}" in message for message in messages)
    first, second = load_checkpoint(run / "checkpoints/step-00000002.pt")["samplers"]
    assert first["digest"] != second["digest"]


def lines_of_restoring(ranks: Ranks, config: ExperimentConfig) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pruned_rnnt").addHandler(handler)
    speech_trainer(config, ranks, allow_changes=True)
    return lines


def test_only_the_first_process_logs_common_warnings(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["train.steps=2", "train.save_every=1", "train.validate_every=9"]
    trainer = speech_trainer(experiment(corpus, run, *settings))
    trainer.run()
    trainer.checkpoints.path(2).write_bytes(b"")
    first, second = run_ranks(2, lines_of_restoring, experiment(corpus, run, "train.steps=3"))
    assert [line.split(" ")[0] for line in first] == [
        str(trainer.checkpoints.path(2)),
        "configuration",
        "2",
    ]
    assert second == []
