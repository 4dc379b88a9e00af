"""Fixtures for tests that replace installed packages: imports do not outlive a test."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pruned_rnnt.compat import package_names
from tests.compat import nemo_stand_in
from tests.compat.nemo_stand_in import DURATIONS, SYMBOLS, Made

_PACKAGES = ("k2", "torchaudio")


@pytest.fixture
def fresh_imports() -> Iterator[None]:
    """compat imports the packages again in the test, and after it."""
    before = _imported()
    package_names.imported_package.cache_clear()
    yield
    for name in _imported():
        del sys.modules[name]
    sys.modules.update(before)
    package_names.imported_package.cache_clear()


@pytest.fixture
def no_k2(fresh_imports: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if k2 were not installed: Python then raises ImportError for it."""
    monkeypatch.setitem(sys.modules, "k2", None)


@pytest.fixture
def model_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes a model with loss and joint, in replacements for NeMo's modules."""
    losses, joints = nemo_stand_in.loss_module(), nemo_stand_in.joint_module()
    for module in (losses, joints):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # It has the class that NeMo's module had when it was imported.
    monkeypatch.delitem(sys.modules, "pruned_rnnt.compat.nemo_joint", raising=False)

    def make(durations: bool = False, **options: Any) -> Any:
        torch.manual_seed(1)
        joint = joints.RNNTJoint(SYMBOLS, len(DURATIONS) if durations else 0, **options)
        # One that loss_name: default would give, with a reduction of its own.
        return types.SimpleNamespace(joint=joint, loss=losses.RNNTLoss(SYMBOLS, "mean_volume"))

    yield make
    sys.modules.pop("pruned_rnnt.compat.nemo_joint", None)


def _imported() -> dict[str, object]:
    return {name: x for name, x in sys.modules.items() if name.split(".")[0] in _PACKAGES}
