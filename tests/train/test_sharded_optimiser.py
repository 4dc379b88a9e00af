"""An optimiser divided among processes has the results and checkpoints of a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.memory import divided_memory
from pruned_rnnt.train.engine.trainer import Trainer
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.optim.optimiser import OptimiserConfig, ParameterGroup, build_optimiser
from pruned_rnnt.train.optim.owners import owners_of
from pruned_rnnt.train.optim.sharded import ShardedOptimiser, build_sharded_optimiser
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from tests.tiny_corpus import speech_trainer, tiny_experiment
from tests.train.processes import run_ranks
from tests.train.run_files import killed_at, losses_of

SHARDED = "train.shard=optimiser"
ADAMW = ("optimiser.name=adamw", "optimiser.eps=1e-3")
SCALED_ADAM = ("optimiser.name=scaled_adam", "optimiser.learning_rate=0.02")
SETTINGS = (
    "data.max_duration=3",
    "train.threads=1",
    "train.keep_last=9",
    "train.save_every=2",
    "train.mean_every=1",
    "train.picture_every=3",
)


def test_elements_are_divided_evenly_and_every_process_gets_some() -> None:
    sizes = [1, 50, 7, 7, 7, 30, 30, 0, 3]
    owners = owners_of(sizes, 3)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == each) for each in range(3)]
    assert sum(loads) == sum(sizes)
    assert sorted(loads) == [41, 44, 50]  # the largest parameter has 50
    assert set(owners_of([0, 0, 0], 3)) == {0, 1, 2}


class TestRefusals:
    def test_float16(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"train\.precision float16"):
            tiny_experiment(tmp_path, tmp_path, SHARDED, "train.precision=float16")

    def test_more_processes_than_parameters(self) -> None:
        with pytest.raises(ValueError, match="3 processes for 2 trained parameters"):
            build_sharded_optimiser(nn.Linear(2, 2), OptimiserConfig(), (), 0, 3)

    @pytest.mark.slow
    def test_an_optimiser_of_the_users_own(self, corpus: Path, tmp_path: Path) -> None:
        config = tiny_experiment(corpus, tmp_path / "run", SHARDED)
        own = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        with pytest.raises(ValueError, match="divides the optimisers of this package only"):
            Trainer(config, make_task=SpeechTask, optimiser=own)


def steps_with_gradients(ranks: Ranks, name: str, sharded: bool) -> list[Any]:
    """Parameters after 25 steps, one of which does not apply, the whole state and its bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 20), nn.Linear(20, 1))
    groups = [
        ParameterGroup(parameters=list(model[:2].parameters())),
        ParameterGroup(parameters=[model[2].weight], rate=0.5),  # of one process only
        ParameterGroup(parameters=[model[2].bias]),
    ]
    config = OptimiserConfig(name=name, learning_rate=0.02)  # type: ignore[arg-type]
    optimiser: Any
    if sharded:
        optimiser = build_sharded_optimiser(model, config, groups, ranks.rank, ranks.world_size)
    else:
        optimiser = build_optimiser(model, config, groups)
    for step in range(25):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if step == 21:
                parameter.grad *= 50.0  # clipped by scaled_adam
        if name == "adamw":
            optimiser.step()
        else:
            optimiser.step_if(torch.tensor(step != 12))
            if step == 12:
                optimiser.take_back()
    state = optimiser.whole_state() if sharded else optimiser.state_dict()
    size = sum(v.nbytes for each in optimiser.state.values() for v in each.values())
    return [[p.detach().clone() for p in model.parameters()], state, size]


def assert_same_state(found: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert found["state"][index].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(found["state"][index][key], value, **tolerance)
    for own, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert own.keys() == other.keys()
        for key, value in other.items():
            torch.testing.assert_close(own[key], value, **tolerance, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "scaled_adam"])
def test_steps_and_state_are_those_of_a_whole_optimiser(name: str) -> None:
    # The norm by which ScaledAdam clips is summed in another order.
    tolerance = {"rtol": 0.0, "atol": 0.0 if name == "adamw" else 1e-5}
    whole, state, _ = steps_with_gradients(Ranks(), name, False)
    found = run_ranks(3, steps_with_gradients, name, True)
    for parameters, _, _ in found:
        for value, expected in zip(parameters, whole, strict=True):
            torch.testing.assert_close(value, expected, **tolerance)
    assert_same_state(found[0][1], state, **tolerance)
    assert [each[1] for each in found[1:]] == [None, None]
    moments = 2 * 4 * sum(p.numel() for p in whole)
    sizes = [each[2] for each in found]
    assert moments <= sum(sizes) < moments * 1.1
    assert max(sizes) < 0.6 * moments  # the largest parameter has half of all elements


def train(ranks: Ranks, config: ExperimentConfig) -> str:
    trainer = speech_trainer(config, ranks, allow_changes=True)
    is_sharded = config.train.shard == "optimiser" and ranks.world_size > 1
    assert isinstance(trainer.optimiser, ShardedOptimiser) == is_sharded
    if is_sharded:
        found = ranks.gather(trainer.memory())
        if ranks.is_first:
            alone = speech_trainer(config, allow_changes=True)
            kept = (alone.average, alone.mean)
            whole, most = alone.memory(), max(found, key=lambda memory: memory.total)
            assert most == divided_memory(alone.model, alone.optimiser, kept, ranks.world_size)
            for part in ("gradients", "optimiser", "averages"):
                sizes = [getattr(memory, part) for memory in found]
                assert sum(sizes) == getattr(whole, part)
                assert max(sizes) < 0.6 * sum(sizes)
    outcome = trainer.run()
    # The averaged parameters are swapped out again in all processes.
    digests = ranks.gather(
        float(sum(p.detach().double().sum() for p in trainer.model.parameters()))
    )
    assert len(set(digests)) == 1
    return outcome


def continued(corpus: Path, run: Path, *settings: str) -> Path:
    """A run of two processes, then one, then two."""
    for processes, steps in ((2, 2), (1, 4), (2, 6)):
        config = tiny_experiment(corpus, run, *SETTINGS, *settings, f"train.steps={steps}")
        if processes == 1:
            train(Ranks(), config)
        else:
            assert run_ranks(processes, train, config) == ["finished"] * processes
    return run


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", [ADAMW, SCALED_ADAM], ids=["adamw", "scaled_adam"])
def test_another_number_of_processes_continues(
    corpus: Path, tmp_path: Path, optimiser: tuple[str, ...]
) -> None:
    whole = continued(corpus, tmp_path / "whole", *optimiser)
    sharded = continued(corpus, tmp_path / "sharded", *optimiser, SHARDED)
    if optimiser is ADAMW:
        assert losses_of(sharded) == losses_of(whole)
    else:
        for (step, loss), (other_step, other) in zip(
            losses_of(sharded), losses_of(whole), strict=True
        ):
            assert step == other_step
            assert loss == pytest.approx(other, abs=1e-4)
    for step in (2, 4, 6):
        found, expected = (
            load_checkpoint(run / "checkpoints" / f"step-{step:08d}.pt") for run in (sharded, whole)
        )
        exact = {"rtol": 0.0, "atol": 0.0 if optimiser is ADAMW else 1e-4}
        assert_same_state(found["optimiser"], expected["optimiser"], **exact)
        for kind in ("model", "average"):
            assert found[kind].keys() == expected[kind].keys()
            for key, value in expected[kind].items():
                torch.testing.assert_close(found[kind][key], value, **exact)
        assert (found["mean"]["count"], found["mean"]["since"]) == (step, 0)
        assert found["mean"]["parameters"].keys() == expected["mean"]["parameters"].keys()
        for key, value in expected["mean"]["parameters"].items():
            torch.testing.assert_close(found["mean"]["parameters"][key], value, **exact)
        assert found["average_updates"] == step
        assert found["score"] == pytest.approx(expected["score"], abs=1e-4)


@pytest.mark.slow
def test_a_run_changes_between_whole_and_sharded(corpus: Path, tmp_path: Path) -> None:
    """Without --allow-changes, and with the same losses."""
    straight = tiny_experiment(corpus, tmp_path / "straight", *SETTINGS, *ADAMW)
    assert run_ranks(2, train, straight) == ["finished", "finished"]
    half = tiny_experiment(corpus, tmp_path / "run", *SETTINGS, *ADAMW)
    run_ranks(2, train_killed, half)
    rest = tiny_experiment(corpus, tmp_path / "run", *SETTINGS, *ADAMW, SHARDED)
    assert run_ranks(2, continue_unchanged, rest) == ["finished", "finished"]
    assert losses_of(rest.folder)[-2:] == losses_of(straight.folder)[-2:]
    for key, value in weights(straight.folder, 4).items():
        assert torch.equal(weights(rest.folder, 4)[key], value)


def train_killed(ranks: Ranks, config: ExperimentConfig) -> None:
    with killed_at(3):
        speech_trainer(config, ranks).run()


def continue_unchanged(ranks: Ranks, config: ExperimentConfig) -> str:
    return speech_trainer(config, ranks).run()


def weights(run: Path, step: int) -> dict[str, Tensor]:
    model: dict[str, Tensor] = load_checkpoint(run / "checkpoints" / f"step-{step:08d}.pt")["model"]
    return model
