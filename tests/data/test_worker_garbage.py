"""Workers leave garbage that they inherit from the training process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.speech_dataset import SpeechDataset
from pruned_rnnt.system.allocator import without_garbage_collection
from tests.data.spoken_corpus import make_corpus


class Freed:
    """Writes its name into a folder when it is freed, as `parent` or `worker`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, os.getpid()

    def __del__(self) -> None:
        (self.folder / ("parent" if os.getpid() == self.process else "worker")).touch()


def collect_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    read = SpeechDataset.__getitem__

    def collect_and_read(self: SpeechDataset, item: Any) -> Batch:
        gc.collect()
        return read(self, item)

    monkeypatch.setattr(SpeechDataset, "__getitem__", collect_and_read)


def batches_with_garbage(corpus: Path, make_garbage: Callable[[], object]) -> int:
    """Reads an epoch by two workers, which are forked when what it made is garbage."""
    config = DataConfig(path=str(corpus), max_duration=12.0, num_workers=2)
    loader = DataModule(config).train_loader()
    with without_garbage_collection():
        cycle = [make_garbage()]
        cycle.append(cycle)
        del cycle
        return len(list(loader))


def test_workers_leave_inherited_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path / "corpus", 12)
    collect_in_workers(monkeypatch)
    assert batches_with_garbage(corpus, lambda: Freed(tmp_path)) > 0
    gc.collect()
    assert (tmp_path / "parent").exists()
    assert not (tmp_path / "worker").exists()


def graph_and_tensors() -> object:
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    return graph, x, y


@pytest.mark.gpu
def test_workers_survive_inherited_tensors_and_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(tmp_path / "corpus", 12)
    collect_in_workers(monkeypatch)
    assert batches_with_garbage(corpus, graph_and_tensors) > 0
