"""Utterances of an old corpus are mixed in by their share, differently in each epoch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from tests.tiny_corpus import make_corpus

NEW, OLD = 24, 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("corpora")
    new = make_corpus(root / "new", train=NEW, prefix="new-")
    return new, make_corpus(root / "old", train=OLD, prefix="old-", seed=1)


def module(folders: tuple[Path, Path], world: tuple[int, int] = (0, 1), **changes: Any) -> Any:
    values: dict[str, Any] = {
        "path": str(folders[0]),
        "old_path": str(folders[1]),
        "old_share": 0.4,
        "max_duration": 6.0,
        "num_workers": 0,
        "seed": 7,
    }
    return DataModule(DataConfig(**{**values, **changes}), rank=world[0], world_size=world[1])


def fingerprint(batch: Batch) -> tuple[Any, ...]:
    return batch.ids, batch.features_NTF.double().sum().item(), batch.targets_NU.tolist()


def epoch_of(data: Any, epoch: int = 0) -> list[tuple[Any, ...]]:
    loader = data.train_loader()
    loader.set_epoch(epoch)
    return [fingerprint(batch) for batch in loader]


def ids_of(batches: list[tuple[Any, ...]]) -> list[str]:
    return [name for ids, *_ in batches for name in ids]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("share", "expected"), [(0.4, 16), (0.2, 6), (0.75, 72), (0.0, 0)])
def test_share(folders: tuple[Path, Path], lazy: bool, share: float, expected: int) -> None:
    data = module(folders, lazy=lazy, old_share=share)
    names = ids_of(epoch_of(data))
    new = [name for name in names if name.startswith("new-")]
    old = [name for name in names if name.startswith("old-")]
    assert sorted(new) == sorted(f"new-train-{index}" for index in range(NEW))
    assert len(old) == expected
    assert len(set(names)) == len(names)
    # All old utterances are used before one is used again.
    assert len({name.rpartition("-1")[0] or name for name in old if name.count("-") == 3}) == max(
        0, expected - OLD
    )


def test_every_epoch_has_other_old_utterances(folders: tuple[Path, Path]) -> None:
    data = module(folders)
    old = [{n for n in ids_of(epoch_of(data, e)) if n.startswith("old-")} for e in range(8)]
    assert old[0] != old[1]
    assert len(set().union(*old)) > 0.8 * OLD
    assert ids_of(epoch_of(data, 1)) == ids_of(epoch_of(data, 1))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("lazy", [False, True])
def test_resume_is_exact(folders: tuple[Path, Path], workers: int, lazy: bool) -> None:
    data = module(folders, num_workers=workers, lazy=lazy)
    whole = epoch_of(data, epoch=3)
    resumed = data.train_loader()
    loader = data.train_loader()
    loader.set_epoch(3)
    torch.rand(5)
    resumed.load_state_dict(loader.state_dict(3))
    assert [fingerprint(batch) for batch in resumed] == whole[3:]
    resumed.set_epoch(4)
    assert [fingerprint(batch) for batch in resumed] == epoch_of(data, epoch=4)


def test_ranks_share_the_mixture(folders: tuple[Path, Path]) -> None:
    first, second = (ids_of(epoch_of(module(folders, (rank, 2)))) for rank in range(2))
    names = {name for name in first + second if "_dup" not in name}
    assert names == set(ids_of(epoch_of(module(folders))))


def test_streamed_old_data_log_the_epoch(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("pruned_rnnt").propagate = True
    data = module(folders, lazy=True, old_share=0.95)
    with caplog.at_level(logging.INFO):
        orders = [ids_of(epoch_of(data, epoch)) for epoch in (0, 3)]
    notes = {message.partition(", left out")[0] for message in caplog.messages}
    assert {"epoch 0", "epoch 3", "epoch 3, pass 2"} <= notes
    assert all(int(note.split()[1].rstrip(",")) in (0, 3) for note in notes if "epoch" in note)
    assert orders[0] != orders[1]


def test_bad_settings(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.old_share is 1.0, needs 0 <= x < 1"):
        DataConfig(old_share=1.0)
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        module(folders, old_path=str(tmp_path)).train_loader()
