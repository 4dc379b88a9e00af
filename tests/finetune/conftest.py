"""Data of two domains, and a run on the old one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pruned_rnnt.cli import main
from tests.finetune.runs import OTHER_WORDS
from tests.tiny_corpus import make_corpus, tiny_overrides


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`old` and `new` data (with other words and sounds), and a `run` on the old ones."""
    root = tmp_path_factory.mktemp("finetune")
    make_corpus(root / "old")
    make_corpus(root / "new", seed=1, words=OTHER_WORDS, train=24)
    settings = ["train.steps=2", "loss.rnnt_type=modified"]
    assert main(["train", *tiny_overrides(root / "old", root / "run", *settings)]) == 0
    return root
