"""`train` prints every log line once, also when other packages log."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tiny_corpus import make_corpus, tiny_overrides

# lhotse logs with these functions, which add a handler to a root logger that has none.
PROGRAM = """
import logging, sys
from pruned_rnnt.cli import main
from pruned_rnnt.data.input.datamodule import DataModule

train_loader = DataModule.train_loader

def with_remark(self):
    logging.warning("a remark of another package")
    return train_loader(self)

DataModule.train_loader = with_remark
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_no_log_line_is_printed_twice(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    settings = tiny_overrides(corpus, tmp_path / "run", "train.steps=2")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *settings], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    # Without the time.
    lines = Counter(line.split(" ", 1)[1] for line in done.stderr.splitlines())
    assert lines["WARNING a remark of another package"] == 1
    assert sum(line.startswith("step ") for line in lines) == 3, done.stderr
    assert not any("pruned_rnnt" in line and line.startswith("INFO:") for line in lines)
    assert set(lines.values()) == {1}, done.stderr
