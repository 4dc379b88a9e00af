"""A run on texts without spaces is validated, selected and scored by its characters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder, load_checkpoint
from tests.tiny_corpus import make_corpus, tiny_overrides

CHINESE = ("\u7ea2\u7eff", "\u84dd\u9ec4\u7070", "\u9ed1")


def train(folder: Path, *overrides: str) -> Path:
    corpus = make_corpus(folder / "corpus", words=CHINESE)
    run = folder / "run"
    settings = tiny_overrides(corpus, run, "train.validate_every=4", *overrides)
    assert pruned_rnnt(["train", *settings]) == 0
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "metric"), [("auto", "cer"), ("wer", "wer")])
def test_run_without_spaces(
    tmp_path: Path, choice: str, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, f"decode.metric={choice}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (valid,) = [line for line in lines if line["group"] == "valid"]
    assert metric in valid
    assert not {"wer", "cer"} - {metric} & valid.keys()
    checkpoints = CheckpointFolder(run / "checkpoints")
    best = checkpoints.best()
    assert best is not None
    assert load_checkpoint(best)["score"] == valid[metric]
    assert f" {metric.upper()} " in (run / "train.log").read_text()
    capsys.readouterr()
    assert pruned_rnnt(["decode", str(run), "decode.checkpoint=best"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf": {metric.upper()} [\d.]+% \[.*interval of the {metric.upper()} ", shown)
    (errors,) = (run / "results").glob("errs-*.txt")
    assert errors.read_text().startswith(f"%{metric.upper()} = ")
    assert pruned_rnnt(["inspect", str(run)]) == 0
    assert metric.upper() in capsys.readouterr().out
