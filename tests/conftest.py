"""Settings of all tests: `gpu` tests need a CUDA device, and no test fails on a loaded machine."""

import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pruned_rnnt.system.openmp import limit_spinning

limit_spinning()  # before torch is imported

import torch  # noqa: E402

settings.register_profile("any_load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_load")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without searches for garbage, which take a third of the time: what is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a prepared corpus of a few utterances."""
    # Imported here: tests of the losses need no lhotse.
    from tests.tiny_corpus import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`export --format torch` writes a stand-in for each program, which takes seconds to trace.

    For tests of what else an export writes and does.
    """
    from pruned_rnnt.export import torch_folder

    monkeypatch.setattr(torch_folder, "export_program", lambda graph: _stand_in())


@functools.cache
def _stand_in() -> torch.export.ExportedProgram:
    return torch.export.export(torch.nn.ReLU(), (torch.zeros(1),))
