"""One process of two that read the shards of a corpus; run by test_shards.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch import distributed

from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.filters import FilterConfig


def batches(data: DataModule, epoch: int, after: int = 0) -> list[list[object]]:
    """Ids and sum of features of the batches of an epoch after the first so many."""
    loader = data.train_loader()
    if after:
        whole = data.train_loader()
        whole.set_epoch(epoch)
        assert len(list(whole)) > after
        loader.load_state_dict(whole.state_dict(after))
        assert loader.state_dict(after) == whole.state_dict(after)
    loader.set_epoch(epoch)
    return [[list(batch.ids), batch.features_NTF.double().sum().item()] for batch in loader]


def data_of(path: str, workers: int, rank: int, world_size: int) -> DataModule:
    config = DataConfig(
        path=path,
        num_workers=workers,
        max_duration=3.0,
        max_lattice=3000,
        num_buckets=3,
        buffer_size=20,
        filters=FilterConfig(subsampling_factor=1),
    )
    return DataModule(config, rank=rank, world_size=world_size)


def main() -> None:
    rank, path, output = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    store = distributed.FileStore(str(output / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    answers = {}
    for workers in (0, 2):
        data = data_of(path, workers, rank, 2)
        answers[f"whole {workers}"] = batches(data, 0)
        answers[f"next {workers}"] = batches(data, 1)
        answers[f"resumed {workers}"] = batches(data, 1, after=3)
    (output / f"rank{rank}.json").write_text(json.dumps(answers))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
