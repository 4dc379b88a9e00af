"""The trainer of the user's own objects: right, continued exactly, or refused by name."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.train import (
    BatchSize,
    OptimiserConfig,
    ScheduleConfig,
    TrainConfig,
    Trainer,
    load_checkpoint,
    own_batches,
)
from pruned_rnnt.train.engine.checkpoint import CheckpointError, CheckpointFolder
from pruned_rnnt.train.engine.distributed import process_group
from pruned_rnnt.train.engine.random_state import RandomStream
from tests.train.run_files import checkpoint_of

CONSTANT = ScheduleConfig(kind="constant", warm_up_steps=0)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, width), nn.Dropout(0.2), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def new_net(width: int = 8) -> Net:
    torch.manual_seed(3)
    return Net(width)


def pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def loss(model: Net, batch: list[Tensor], step: int) -> Tensor:
    x, wanted = (each.to(next(model.parameters()).device) for each in batch)
    return ((model(x) - wanted) ** 2).squeeze(1)


def size(batch: list[Tensor]) -> BatchSize:
    return BatchSize(utterances=len(batch[0]), frames=len(batch[0]))


def trainer(folder: Path, steps: int = 7, **options: Any) -> Trainer:
    model = options.pop("model", None) or new_net()
    settings: dict[str, Any] = {
        "folder": str(folder), "steps": steps, "save_every": 2, "log_every": 1, "keep_last": 9,
        "average_decay": 0.9, **options.pop("settings", {}),
    }  # fmt: skip
    arguments: dict[str, Any] = {
        "model": model,
        "batches": DataLoader(pairs(), batch_size=3, shuffle=True),
        "loss": loss,
        "size": size,
        "settings": TrainConfig(**settings),
        **options,
    }
    return Trainer(**arguments)


class Drawn:
    def __iter__(self) -> Iterator[float]:
        yield random.random()


class Died(BaseException):
    """As a kill, which nothing catches."""


def dies_at(step: int) -> Callable[[str, int, Mapping[str, float]], None]:
    def log(group: str, now: int, values: Mapping[str, float]) -> None:
        if now == step:
            raise Died

    return log


class Shuffled:
    """Batches in an order of Python's generator, with noise of numpy's and torch's."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[list[Tensor]]:
        for index in random.sample(range(6), 6):
            x = torch.randn(4, 3) + float(np.random.rand()) + index  # noqa: NPY002
            yield [x, x.sum(dim=1, keepdim=True)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    "kind",
    [
        "loader",
        "own optimiser",
        "own batches",
        "accumulated",
        "scaled",
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_run_continues_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """After a death in step 5; the checkpoint of step 4 is in the middle of an epoch."""

    def options() -> dict[str, Any]:
        model = new_net()
        more: dict[str, Any] = {"model": model}
        if kind == "own optimiser":
            more |= {"optimiser": sgd(model), "clip_norm": 1.0}
        if kind == "own batches":
            more |= {"batches": Shuffled(), "settings": {"seed": 5}}
        if kind == "accumulated":
            more |= {"settings": {"accumulate": 2}}
        if kind == "cuda":
            model.to("cuda")
        if kind == "scaled":
            more |= {"optimiser": OptimiserConfig(name="scaled_adam", learning_rate=0.045)}
        return more

    steps = 10
    straight = trainer(tmp_path / "straight", steps, **options())
    assert straight.run() == "finished"
    with pytest.raises(Died):
        trainer(tmp_path / "resumed", steps, log=dies_at(5), **options()).run()
    resumed = trainer(tmp_path / "resumed", steps, **options())
    assert resumed.step == 4
    random.seed(99)
    torch.manual_seed(99)
    assert resumed.run() == "finished"
    assert resumed.step == steps
    one, other = (checkpoint_of(tmp_path / name, steps) for name in ("straight", "resumed"))
    assert one == other
    lines = [
        (tmp_path / n / "metrics.jsonl").read_text().splitlines() for n in ("straight", "resumed")
    ]
    losses = [[json.loads(line)["total_per_frame"] for line in each] for each in lines]
    assert losses[0] == losses[1]
    assert len(losses[0]) == steps


def test_loss_and_learning_rate_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Without dropout, average and schedule, the steps are those of a hand-written loop."""
    limit = 0.01
    batches = [[x, x.sum(dim=1, keepdim=True)] for x in torch.randn(4, 5, 3).unbind()]
    ours, theirs = new_net().double().eval(), new_net().double().eval()
    batches = [[each.double() for each in batch] for batch in batches]
    ours.train = lambda mode=True: ours  # type: ignore[method-assign,assignment]
    optimiser = torch.optim.SGD(
        [
            {"params": ours.layers[0].parameters(), "lr": 0.1},
            {"params": ours.layers[3].parameters(), "lr": 0.02},
        ]
    )
    settings = {"optimiser": optimiser, "schedule": CONSTANT, "clip_norm": limit}
    trainer(tmp_path, 4, model=ours, batches=batches, **settings).run()
    plain = torch.optim.SGD(
        [
            {"params": theirs.layers[0].parameters(), "lr": 0.1},
            {"params": theirs.layers[3].parameters(), "lr": 0.02},
        ]
    )
    for batch in batches:
        plain.zero_grad()
        loss(theirs, batch, 0).mean().backward()
        assert nn.utils.clip_grad_norm_(theirs.parameters(), limit) > limit
        plain.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_metrics_scores_and_checkpoints(tmp_path: Path) -> None:
    seen: list[tuple[str, int, dict[str, float]]] = []
    modes: list[bool] = []

    def validate(model: Net) -> float:
        modes.append(model.training or torch.is_grad_enabled())
        return [0.5, 0.2, 0.7][len(modes) - 1]

    run = trainer(
        tmp_path, 6, validate=validate, settings={"validate_every": 2, "keep_last": 1},
        loss=lambda *all: {"total": loss(*all), "one": torch.ones(len(all[1][0]))},
        log=lambda group, step, values: seen.append((group, step, dict(values))),
    )  # fmt: skip
    assert run.run() == "finished"
    assert modes == [False] * 3
    assert [(step, values) for group, step, values in seen if group == "valid"] == [
        (2, {"score": 0.5}), (4, {"score": 0.2}), (6, {"score": 0.7})
    ]  # fmt: skip
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == [{"group": group, "step": step, **values} for group, step, values in seen]
    train = [values for group, _, values in seen if group == "train"]
    assert all(values["one_per_frame"] == 1 for values in train)
    assert not any(name.endswith("per_symbol") for values in train for name in values)
    best = run.checkpoints.best()
    assert best == tmp_path / "checkpoints/step-00000004.pt"
    saved = load_checkpoint(best)
    assert saved["score"] == 0.2
    assert saved["average"].keys() == run.model.state_dict().keys()
    newest = {name: value.clone() for name, value in run.model.state_dict().items()}
    with run.averaged():
        assert any(not torch.equal(v, newest[n]) for n, v in run.model.state_dict().items())
    assert all(torch.equal(v, newest[n]) for n, v in run.model.state_dict().items())
    with pytest.raises(RuntimeError, match="this Trainer has run"):
        run.run()


def test_skipped_steps_name_the_utterances(tmp_path: Path) -> None:
    def broken(model: Net, batch: list[Tensor], step: int) -> Tensor:
        factor = torch.ones(len(batch[0]))
        factor[1] = float("nan") if step == 2 else 1.0
        return loss(model, batch, step) * factor

    for folder, ids, name in (("named", lambda batch: ["a", "b", "c"], "b"), ("plain", None, "1")):
        trainer(tmp_path / folder, 4, loss=broken, ids=ids).run()
        (path,) = (tmp_path / folder / "bad_steps").iterdir()
        report = json.loads(path.read_text())
        assert report["problem"] == "infinite or NaN loss"
        assert [each["id"] for each in report["utterances"]] == [name]
        assert report["batches"][0]["utterances"] == 3


def test_names_never_end_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(model: Net, batch: list[Tensor], step: int) -> Tensor:
        return loss(model, batch, step) * (float("nan") if step == 2 else 1.0)

    seen: list[int] = []

    def ids(batch: list[Tensor]) -> list[str]:
        seen.append(len(batch))
        return ["a", "b", "c"] if len(seen) == 1 else []

    assert trainer(tmp_path, 4, loss=broken, ids=ids).run() == "finished"
    (path,) = (tmp_path / "bad_steps").iterdir()
    assert [each["id"] for each in json.loads(path.read_text())["utterances"]] == ["0", "1", "2"]
    assert "utterances have their positions as names: ids returned 0 names" in caplog.text


def test_changed_batches_are_refused(tmp_path: Path) -> None:
    """A generator of its own is ahead, or behind, after an interruption."""

    def options() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
        loader = DataLoader(pairs(), batch_size=3, shuffle=True, generator=generator)
        return {"batches": loader, "model": new_net()}

    torch.manual_seed(1)
    with pytest.raises(Died):
        trainer(tmp_path, log=dies_at(5), **options()).run()
    torch.manual_seed(2)
    with pytest.raises(ValueError, match=r"batch 4 of epoch 0 differs .* allow_changes=True"):
        trainer(tmp_path, **options()).run()
    shorter = {**options(), "batches": [next(iter(options()["batches"]))]}
    with pytest.raises(ValueError, match="batch 4 of epoch 0 differs"):
        trainer(tmp_path, **shorter).run()
    assert trainer(tmp_path, allow_changes=True, **options()).run() == "finished"


class Item:
    """An utterance that refers to its batch, which has a tokenizer."""

    def __init__(self, batch: list[Any], number: int) -> None:
        self.batch, self.number = batch, number


def test_digests_of_batches_are_bounded() -> None:
    def batch(change: float = 0.0) -> list[Any]:
        content: list[Any] = [{f"token {n}": n for n in range(100_000)}]
        content += [Item(content, n) for n in range(300)]
        return [content, torch.nested.nested_tensor([torch.zeros(2), torch.full((3,), change)])]

    read: list[Any] = []

    class Recorded(dict[str, int]):
        def items(self) -> Any:
            for item in super().items():
                read.append(item)
                yield item

    assert own_batches._digest_of(batch()) == own_batches._digest_of(batch())
    assert own_batches._digest_of(batch()) != own_batches._digest_of(batch(1.0))
    own_batches._digest_of([Recorded(batch()[0][0])] * 100)
    assert 0 < len(read) <= own_batches._MOST_VALUES


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: torch.nested.nested_tensor([x, x[:1]]),
        lambda x: "a" * 5000 + str(x.tolist()),
    ],
)
def test_digests_tell_batches_apart(change: Callable[[Tensor], Any]) -> None:
    one, other = (own_batches._digest_of(change(torch.tensor([1.0, end]))) for end in (2.0, 3.0))
    assert one == own_batches._digest_of(change(torch.tensor([1.0, 2.0]))) != other


@pytest.mark.parametrize("name", ["digest", "bounded_digest"])
def test_digests_of_earlier_versions_are_not_compared(name: str) -> None:
    batches = own_batches.OwnBatches([[1], [2]], 0, allow_changes=False)
    batches.load_state_dict({"epoch": 0, "batches": 1, name: "of more values"})
    assert [batch.content for batch in batches] == [[2]]


def test_a_state_before_the_newest_batch_can_be_continued() -> None:
    """As after the death of a worker, when a step has only some of its batches."""

    def batches() -> own_batches.OwnBatches:
        return own_batches.OwnBatches([[1], [2], [3]], 0, allow_changes=False)

    first, second = batches(), batches()
    given = iter(first)
    for _ in range(3):
        next(given)
    second.load_state_dict(first.state_dict(2))
    assert [batch.content for batch in second] == [[3]]
    assert first.state_dict(3)["short_digest"]


def test_what_a_step_is_called_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`size` is called once for each batch; an epoch without a validation is saved once."""
    sizes: list[int] = []
    saved: list[int] = []
    save = CheckpointFolder.save

    def counted_save(self: CheckpointFolder, step: int, *values: Any, **more: Any) -> Path:
        saved.append(step)
        return save(self, step, *values, **more)

    def counted_size(batch: list[Tensor]) -> BatchSize:
        sizes.append(len(batch))
        return size(batch)

    monkeypatch.setattr(CheckpointFolder, "save", counted_save)
    trainer(tmp_path, 14, size=counted_size, settings={"save_every": 0}).run()
    assert len(sizes) == 14
    assert saved == [7, 14]


def test_numbers_of_numpy_are_plain_settings(tmp_path: Path) -> None:
    settings = {"seed": np.int64(2), "average_decay": np.float32(0.5)}
    optimiser = OptimiserConfig(learning_rate=np.float64(0.01))
    run = trainer(tmp_path, np.int64(2), settings=settings, optimiser=optimiser)  # type: ignore[arg-type]
    assert run.run() == "finished"
    config = load_checkpoint(run.checkpoints.paths()[-1])["config"]
    found = [
        config["train"]["seed"],
        config["train"]["steps"],
        config["optimiser"]["learning_rate"],
    ]
    assert repr(found) == "[2, 2, 0.01]"


def test_the_folder_may_be_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = TrainConfig(folder="~/run", init="~/source")
    assert (config.folder, config.init) == (f"{tmp_path}/run", f"{tmp_path}/source")
    assert TrainConfig().init == ""


@pytest.mark.parametrize("grouped", [False, True])
def test_samplers_get_the_epoch(tmp_path: Path, grouped: bool) -> None:
    sampler = DistributedSampler(range(6), num_replicas=1, rank=0, shuffle=True)
    groups = BatchSampler(sampler, 2, drop_last=False)
    how: dict[str, Any] = {"batch_sampler": groups} if grouped else {"sampler": sampler}
    seen: list[float] = []

    def watches(model: Net, batch: list[Tensor], step: int) -> Tensor:
        seen.extend(batch[0][:, 0].tolist())
        return loss(model, batch, step)

    x = torch.arange(6.0)[:, None].expand(6, 3)
    data = TensorDataset(x, x[:, :1])
    steps = 9 if grouped else 18
    trainer(tmp_path, steps, batches=DataLoader(data, **how), loss=watches).run()
    epochs = [tuple(seen[start : start + 6]) for start in (0, 6, 12)]
    assert len(set(epochs)) == 3
    assert all(sorted(epoch) == [0, 1, 2, 3, 4, 5] for epoch in epochs)


def test_an_epoch_of_an_earlier_version_keeps_its_order() -> None:
    """Samplers did not get the epoch, so that all had the order of the first."""
    data = TensorDataset(torch.arange(6.0))

    def order(state: dict[str, Any], epoch: int) -> list[float]:
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
        loader = own_batches.OwnBatches(DataLoader(data, sampler=sampler), 0, allow_changes=False)
        loader.load_state_dict(loader.state_dict(0) | state)
        # A run that is stopped once more.
        loader.load_state_dict(loader.state_dict(state["batches"]))
        loader.set_epoch(epoch)
        return [float(batch.content[0]) for batch in loader]

    first = order({"epoch": 0, "batches": 0}, 0)
    saved = {"epoch": 1, "batches": 2, "tells_loader": False}
    assert order(saved, 1) == first[2:]
    assert order(saved, 2) == order({"epoch": 2, "batches": 0}, 2) != first
    batches = own_batches.OwnBatches([], 0, allow_changes=False)
    for count, tells in ((2, False), (0, True)):
        batches.load_state_dict({"epoch": 1, "batches": count})
        assert batches.state_dict(count)["tells_loader"] == tells


@pytest.mark.parametrize("seed", [-1, 3])
def test_seeds_that_fit_stay_as_they_are(seed: int) -> None:
    stream = RandomStream(1_000_003 * seed)
    with stream.used():
        expected = random.random()
    loader = own_batches.OwnBatches(Drawn(), seed, allow_changes=False)
    assert [batch.content for batch in loader] == [expected]


class Ending(Dataset[Tensor]):
    """Ends its worker while the training waits for it, after a signal to the training."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[Tensor]:  # type: ignore[override]
        if index == 4:
            time.sleep(0.2)
            if self.number is not None:
                os.kill(os.getppid(), self.number)
            os.kill(os.getpid(), signal.SIGKILL)
        return [torch.ones(3), torch.ones(1)]


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
@pytest.mark.slow
def test_nothing_is_lost_with_a_worker(tmp_path: Path, number: int | None) -> None:
    batches = DataLoader(
        Ending(number), num_workers=1, prefetch_factor=1, multiprocessing_context="fork"
    )
    run = trainer(tmp_path, batches=batches, settings={"save_every": 99})
    if number is None:
        with pytest.raises(RuntimeError, match="training stopped after step 4: DataLoader worker"):
            run.run()
    else:
        assert run.run() == "preempted"
    assert load_checkpoint(run.checkpoints.paths()[-1])["counters"]["step"] == run.step == 4


class OneEpoch:
    """Its iterator goes on where it was."""

    def __init__(self) -> None:
        self.batches = iter([[torch.ones(3, 3), torch.ones(3, 1)]] * 2)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self.batches


def test_batches_that_do_not_begin_anew_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no batch in epoch 1, .* __iter__ starts a new epoch"):
        trainer(tmp_path, batches=OneEpoch()).run()


def test_persistent_workers_have_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.ones(4, 3), torch.ones(4, 1))
    for persistent in (False, True):
        trainer(tmp_path, batches=DataLoader(data, num_workers=1, persistent_workers=persistent))
        assert ("persistent_workers=True" in caplog.text) == persistent


def test_a_generator_of_ones_own_has_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.ones(4, 3), torch.ones(4, 1))
    generator = torch.Generator()
    ordered = BatchSampler(RandomSampler(data, generator=generator), 2, drop_last=False)
    for loader, is_warned in (
        (DataLoader(data, shuffle=True), False),
        (DataLoader(data, shuffle=True, generator=generator), True),
        (DataLoader(data, batch_sampler=ordered), True),
    ):
        caplog.clear()
        trainer(tmp_path, batches=loader)
        assert ("batches has a generator of its own" in caplog.text) == is_warned


def test_seeds_may_be_times_in_nanoseconds(tmp_path: Path) -> None:
    assert trainer(tmp_path, 1, settings={"seed": 1_795_000_000_123_456_789}).run() == "finished"


def test_an_optimiser_with_its_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    for order in (1, -1):
        model = new_net()
        optimiser = torch.optim.AdamW(list(model.parameters())[::order], lr=0.01)
        options = {"model": model, "optimiser": optimiser, "allow_changes": True}
        if order == 1:
            trainer(tmp_path, 2, **options).run()
        else:
            message = r"AdamW.*another order, layers.0.weight in the place of layers.3.bias"
            with pytest.raises(ConfigError, match=message):
                trainer(tmp_path, 4, **options)


def test_other_optimisers_and_renamed_parameters_are_not_called_reordered(tmp_path: Path) -> None:
    options: dict[str, Any] = {"allow_changes": True, "settings": {"average_decay": 0.0}}
    trainer(tmp_path, 2, **options).run()
    with pytest.raises(ConfigError, match=r"another optimiser .*parameter groups"):
        trainer(tmp_path, 4, optimiser=OptimiserConfig(name="scaled_adam"), **options)

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.renamed = new_net().layers

        def load_state_dict(self, state: Mapping[str, Any], *others: Any, **options: Any) -> Any:
            renamed = {name.replace("layers", "renamed"): each for name, each in state.items()}
            return super().load_state_dict(renamed, *others, **options)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.renamed(x)
            return found

    run = trainer(tmp_path, 4, model=Renamed(), **options)
    assert (run.step, run.run()) == (2, "finished")


def test_an_epoch_that_ends_with_a_validation_has_one(tmp_path: Path) -> None:
    """Also in a continued run; and its checkpoint keeps the score."""
    options: dict[str, Any] = {"validate": lambda model: 1.0, "allow_changes": True}
    for steps in (7, 14):
        run = trainer(tmp_path / "ends", steps, **options)
        run.run()
    lines = (tmp_path / "ends/metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, lines) if line["group"] == "valid"] == [7, 14]
    settings = {"validate_every": 7, "save_every": 0}
    run = trainer(tmp_path / "inside", 15, settings=settings, **options)
    run.run()
    # They continue at the start of the next epoch, also that of the run that was continued there.
    for folder, batches in (("inside", [0, 0, 1]), ("ends", [0, 7])):
        saved = list(
            map(load_checkpoint, CheckpointFolder(tmp_path / folder / "checkpoints").paths())
        )
        saved = [values for values in saved if values["score"] is not None]
        assert [values["counters"]["batch"] for values in saved] == batches
        assert {values["score"] for values in saved} == {1.0}


def test_the_folder_may_be_a_path(tmp_path: Path) -> None:
    assert trainer(tmp_path, settings={"folder": tmp_path}).run() == "finished"
    assert trainer(tmp_path, settings={"folder": tmp_path}).step == 7


def test_an_optimiser_can_be_given_again(tmp_path: Path) -> None:
    """Its rates are those that it was given with, except while it trains."""
    model, rates = new_net(), []
    optimiser = torch.optim.SGD(model.parameters(), lr=np.float64(0.05), momentum=0.9)
    options: dict[str, Any] = {"model": model, "optimiser": optimiser}

    def stop(group: str, step: int, values: Mapping[str, float]) -> None:
        rates.append(values["learning_rate"])
        if step == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        trainer(tmp_path, log=stop, **options).run()
    assert rates[-1] != 0.05
    for _ in range(2):  # the first one does not run
        again = trainer(tmp_path, **options)
        assert optimiser.param_groups[0]["lr"] == 0.05
    assert again.step == 4
    assert again.run() == "finished"
    assert optimiser.param_groups[0]["lr"] == 0.05


def test_a_failing_log_loses_no_steps(tmp_path: Path) -> None:
    def log(group: str, step: int, values: Mapping[str, float]) -> None:
        if step == 3:
            raise ConnectionError("no route to host")

    with pytest.raises(ConnectionError, match="no route"):
        trainer(tmp_path, log=log, settings={"save_every": 0}).run()
    assert trainer(tmp_path, settings={"save_every": 0}).step == 3


def test_the_error_of_a_log_is_shown_if_saving_fails_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def log(group: str, step: int, values: Mapping[str, float]) -> None:
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        (tmp_path / "checkpoints").write_text("a file")
        raise ConnectionError("no route to host")

    with pytest.raises(ConnectionError, match="no route"):
        trainer(tmp_path, log=log, settings={"save_every": 0}).run()
    assert "the last steps could not be saved: " in caplog.text


def test_a_frozen_embedding_may_be_sparse(tmp_path: Path) -> None:
    model = new_net()
    model.names = nn.Embedding(3, 1, sparse=True).requires_grad_(False)
    assert trainer(tmp_path, 2, model=model).run() == "finished"


def test_a_report_that_cannot_be_written_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad_steps").write_text("a file")
    broken = {"loss": lambda *all: loss(*all) * (float("nan") if all[2] == 2 else 1.0)}
    assert trainer(tmp_path, 4, **broken).run() == "finished"
    assert "step-00000003-rank-0.json could not be written (File exists)" in caplog.text


def test_a_run_that_another_trainer_continued_is_not_overwritten(tmp_path: Path) -> None:
    first, second = trainer(tmp_path), trainer(tmp_path)
    first.run()
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match=r"000\d\.pt is newer .* begins at step 0: another"):
        second.run()
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_validations_change_no_training(tmp_path: Path) -> None:
    """Neither how often they are, nor where one is interrupted."""
    drawn: list[list[float]] = []

    def validate(model: Net) -> float:
        next(iter(DataLoader(pairs(), batch_size=3, shuffle=True)))
        drawn.append([random.random(), float(np.random.rand()), float(torch.rand(()))])  # noqa: NPY002
        return 1.0

    def killed(model: Net) -> float:
        validate(model)
        raise Died

    for name, every, function in (("two", 2, validate), ("four", 4, validate), ("dead", 4, killed)):
        options: dict[str, Any] = {"settings": {"validate_every": every}}
        if function is killed:
            with pytest.raises(Died):
                trainer(tmp_path / name, 8, validate=killed, **options).run()
        trainer(tmp_path / name, 8, validate=validate, **options).run()
    two, four, dead = (
        load_checkpoint(tmp_path / name / "checkpoints/step-00000008.pt")["model"]
        for name in ("two", "four", "dead")
    )
    assert all(torch.equal(two[n], four[n]) and torch.equal(dead[n], four[n]) for n in two)
    assert drawn == drawn[:1] * len(drawn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_losses_are_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    """They are beyond float16, and coarse in bfloat16."""

    def large(model: Net, batch: list[Tensor], step: int) -> Tensor:
        return (0.0 * loss(model, batch, step) + 30_001.0 + 500 * batch[0][:, 0].sign()).to(dtype)

    found: list[float] = []
    trainer(
        tmp_path, 1, loss=large, settings={"accumulate": 7, "log_every": 1},
        batches=DataLoader(pairs(), batch_size=3),
        log=lambda group, step, values: found.append(values["total_per_frame"]),
    ).run()  # fmt: skip
    exact = (30_001.0 + 500 * pairs().tensors[0][:, 0].sign()).to(dtype).double().mean()
    assert found == [pytest.approx(float(exact), rel=1e-6)]


def test_other_settings_model_and_optimiser_are_refused(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    with pytest.raises(ConfigError, match=r"train\.seed"):
        trainer(tmp_path, settings={"seed": 3})
    with pytest.raises(ConfigError, match="another model"):
        trainer(tmp_path, model=new_net(9))
    model = new_net()
    with pytest.raises(ConfigError, match="own_optimiser"):
        trainer(tmp_path, model=model, optimiser=sgd(model))


class WithState(Net):
    def get_extra_state(self) -> Any:
        return {"words": ["a"]}

    def set_extra_state(self, state: Any) -> None: ...


def with_frozen() -> dict[str, Any]:
    model = new_net()
    return {"model": model, "optimiser": torch.optim.SGD(model.layers[0].parameters(), lr=0.1)}


def all_frozen() -> dict[str, Any]:
    return {"model": new_net().requires_grad_(False)}


def optimised(kind: Any, **settings: Any) -> dict[str, Any]:
    model = new_net()
    return {"model": model, "optimiser": kind(model.parameters(), **settings)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": len}, "model is of type builtin_function_or_method, needs Module"),
        ({"batches": 3}, "batches is of type int, needs Iterable"),
        ({"batches": iter([])}, "batches is a list_iterator, which can be read only once"),
        ({"loss": 3}, "loss is of type int, needs a function"),
        ({"size": None}, "size is of type NoneType, needs a function"),
        ({"log": 1}, "log is of type int, needs a function"),
        ({"validate": "wer"}, "validate is of type str, needs a function"),
        ({"optimiser": "adam"}, "optimiser is of type str"),
        ({"schedule": 1.0}, "schedule is of type float"),
        ({"settings": {"folder": ""}}, "train.folder is '', needs the path of a folder"),
        ({"settings": {"folder": None}}, "train.folder is None, needs the path of a folder"),
        ({"settings": {"fused_kernels": "on"}}, "train.fused_kernels is 'on', needs one of auto, "),
        ({"settings": {"precision": "int8"}}, "train.precision is 'int8', needs one of float32, "),
        ({"settings": {"validate_every": None}}, "train.validate_every is None, needs a whole num"),
        ({"settings": {"steps": "6"}}, "train.steps is '6', needs a whole number"),
        ({"settings": {"keep_last": 2.0}}, "train.keep_last is 2.0, needs a whole number"),
        ({"settings": {"loggers": "wandb"}}, "train.loggers is 'wandb', needs a list"),
        ({"clip_norm": 1.0}, "clip_norm is 1.0, which is for an optimiser of your own"),
        ({"settings": {"device": "cpu"}}, "settings.device is 'cpu', which is for the commands"),
        ({"settings": {"init": "a.pt"}}, "settings.init is 'a.pt'"),
        ({"settings": {"validate_every": 3}}, "settings.validate_every is 3, which needs"),
        ({"model": WithState()}, "model.state_dict.. has '_extra_state' of type dict"),
        (with_frozen(), "optimiser does not train 2 parameters of model, such as layers.3.weight"),
        ({"optimiser": sgd(new_net())}, "optimiser does not train 4 parameters"),
        (all_frozen(), "model has no parameter that requires a gradient"),
        (optimised(torch.optim.LBFGS), "optimiser is LBFGS, whose step needs a closure"),
        (
            optimised(torch.optim.AdamW, weight_decay=np.float64(0.1)),
            r"optimiser.state_dict\(\) cannot be saved safely: param_groups.0.weight_decay is of",
        ),
        (
            {"model": nn.Sequential(nn.Embedding(3, 1, sparse=True))},
            "module 0 of model has sparse gradients",
        ),
        (
            {"model": nn.Sequential(nn.Linear(3, 1), nn.LazyLinear(2))},
            "parameter 1.weight of model has no shape yet: call the model on a batch",
        ),
        (
            {"model": new_net().half(), "settings": {"precision": "float16"}},
            "settings.precision is float16 and parameter layers.0.weight of model is float16",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        trainer(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def sized(frames: Any) -> Callable[[Any], BatchSize]:
    return lambda batch: BatchSize(utterances=3, frames=frames)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": lambda *all: loss(*all).mean()}, r"loss returned \(\) for 'total', needs \(3,\)"),
        ({"loss": lambda *all: loss(*all).detach()}, "do not depend on the model's parameters"),
        ({"loss": lambda *all: 1.0}, "loss returned an object of type float, needs a tensor"),
        ({"loss": lambda *all: {"a": loss(*all)}}, r"loss returned keys \['a'\]"),
        ({"loss": lambda *all: {"total": loss(*all), "a": 1}}, "type int for 'a'"),
        ({"loss": lambda *all: {"total": loss(*all), 0: loss(*all)}}, "the key 0, needs texts"),
        ({"size": len}, "size returned an object of type int, needs a BatchSize"),
        ({"size": lambda batch: BatchSize(utterances=3, frames=0)}, "at least one utterance and"),
        ({"size": lambda _: BatchSize(utterances=3, frames=3, symbols=-4)}, "nothing below 0"),
        (
            {"size": lambda _: BatchSize(utterances=3, frames=3, audio_seconds="x")},
            "size returned audio_seconds='x', needs a number",
        ),
        ({"size": sized(float("nan"))}, "size returned frames=nan, needs a whole number"),
        ({"size": sized("10")}, "size returned frames='10', needs a whole number"),
        ({"size": sized(10.5)}, "size returned frames=10.5, needs a whole number"),
        ({"ids": lambda batch: 3}, "ids returned an object of type int, needs 3 names"),
        ({"ids": lambda batch: "abc"}, "ids returned an object of type str, needs 3 names"),
        ({"ids": lambda batch: ["a"]}, "ids returned 1 names, needs 3"),
        ({"size": lambda batch: BatchSize(utterances=4, frames=4)}, r"needs \(4,\)"),
        ({"validate": lambda model: "good"}, "validate returned an object of type str"),
    ],
)
def test_wrong_results_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        trainer(tmp_path, 2, **options).run()


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2: this Trainer trains in one process"):
        trainer(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE is 'two' in the environment, needs a number"):
        trainer(tmp_path)


def test_an_empty_number_of_processes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    with process_group() as ranks:
        assert ranks.world_size == 1


def test_commands_refuse_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pruned_rnnt.cli import main

    trainer(tmp_path / "run", 2).run()
    assert main(["decode", str(tmp_path / "run")]) != 0
    assert "is a run of task 'own'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_trains_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code blocks of the page, as a file that is run twice."""
    page = Path(__file__).parents[2] / "docs/tutorials/train_in_python.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "train_in_python.md", "exec"), names)
    first = names["main"]()
    lines = [
        json.loads(line) for line in Path("exp/own_model/metrics.jsonl").read_text().splitlines()
    ]
    scores = [line["score"] for line in lines if line["group"] == "valid"]
    assert scores[-1] < 0.5 * scores[0]
    assert not names["best_model"](first.checkpoints).training
    assert isinstance(names["sgd"](first.model), torch.optim.SGD)
    for path in sorted(Path("exp/own_model/checkpoints").glob("*.pt"))[1:]:
        path.unlink()
    again = names["main"]()
    one, other = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_warm_up_that_never_ends_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path / "short", 2, schedule=ScheduleConfig(warm_up_steps=2)).run()
    assert "schedule.warm_up_steps is 2 and train.steps 2, so that the learning" in caplog.text
    caplog.clear()
    trainer(tmp_path / "long", 3, schedule=ScheduleConfig(warm_up_steps=2)).run()
    assert "warm_up_steps" not in caplog.text


def test_a_launcher_that_sets_no_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    message = "WORLD_SIZE is 2, and RANK is not set: start with torchrun"
    with pytest.raises(ValueError, match=message), process_group():
        pass
