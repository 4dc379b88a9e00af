"""Prepares texts, trains a language model and decodes with it, with the user's commands."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.input.lm_texts import write_texts
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.tasks.lm_task import load_language_model
from tests.tiny_corpus import make_corpus, tiny_overrides

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speech data, a speech model, texts, and a language model trained for 150 steps."""
    root = tmp_path_factory.mktemp("lm")
    make_corpus(root / "data", dev=12)
    assert main(["train", *tiny_overrides(root / "data", root / "speech")]) == 0
    with gzip.open(root / "more.txt.gz", "wt") as file:
        file.write("red green\n\nblue purple\n" + "green " * 30 + "\n")
    texts = ["--text", str(root / "more.txt.gz"), "--output", str(root / "texts")]
    assert main(["prepare", "lm", str(root / "data"), *texts, "--max-symbols", "20"]) == 0
    assert main(["train", *lm_settings(root, "lm", 150)]) == 0
    return root


def lm_settings(root: Path, run: str, steps: int) -> list[str]:
    return [
        "task=lm",
        f"data.path={root / 'texts'}",
        "data.batch_symbols=40",
        "model.dim=32",
        "model.layers=1",
        "optimiser.learning_rate=0.02",
        "schedule.warm_up_steps=5",
        f"train.steps={steps}",
        "train.validate_every=25",
        "train.log_every=5",
        "train.average_decay=0.9",
        "train.device=cpu",
        f"train.folder={root / run}",
    ]


def test_prepare_lm_counts_texts(folder: Path) -> None:
    splits = json.loads((folder / "texts/prepare.json").read_text())["splits"]
    assert splits["train"]["texts"] == 32 + 2
    assert splits["train"]["unknown"] == 1
    assert splits["train"]["too_long"] == 1
    assert splits["dev"]["texts"] == 12


@torch.inference_mode()
def test_model_learns_that_no_word_comes_twice(folder: Path) -> None:
    lines = (folder / "lm/metrics.jsonl").read_text().splitlines()
    valid = [line for line in map(json.loads, lines) if line["group"] == "valid"]
    assert valid[-1]["perplexity"] < 0.9 * valid[0]["perplexity"]
    model, tokenizer = load_language_model(folder / "lm", torch.device("cpu"))
    likely, unlikely = (
        model(torch.tensor([tokenizer.encode(text)]), torch.tensor([3])).total
        for text in ("red green blue", "red red red")
    )
    assert float(likely) < float(unlikely) - 2.0


def test_decode_uses_the_language_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, lm = str(folder / "speech"), f"decode.fusion.lm={folder / 'lm'}"
    phrases = folder / "hotwords.txt"
    phrases.write_text("blue :9\n")
    settings = ["decode.method=modified_beam", "decode.num_best=3", "decode.metric=cer"]
    hotwords = f"decode.fusion.hotwords={phrases}"
    assert main(["decode", run, lm, hotwords, *settings]) == 0
    assert "CER" in capsys.readouterr().out
    (path,) = (folder / "speech/results").glob("nbest-test-modified_beam-lm*-hotwords*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 12
    for line in lines:
        scores = [found["score"] for found in line["hypotheses"]]
        assert 1 <= len(scores) <= 3
        for found in line["hypotheses"]:
            assert [word["word"] for word in found["words"]] == found["text"].split()
    assert any("blue" in line["hypotheses"][0]["text"] for line in lines)
    (errors,) = (folder / "speech/results").glob("errs-test-modified_beam-lm*-hotwords*.txt")
    assert errors.read_text().startswith("%CER")
    assert main(["decode", run, f"decode.fusion.lm={folder / 'speech'}", settings[0]]) != 0
    assert "is no run of a language model" in capsys.readouterr().err


def test_resumed_training_is_exact(folder: Path) -> None:
    def train(name: str, steps: int) -> None:
        settings = [*lm_settings(folder, name, steps), "schedule.kind=constant"]
        assert main(["train", "--allow-changes", *settings]) == 0

    train("halves", 20)
    train("halves", 37)
    train("whole", 37)
    halves, whole = (
        CheckpointFolder(folder / name / "checkpoints").load_newest() or {}
        for name in ("halves", "whole")
    )
    assert halves["counters"] == whole["counters"]
    assert halves["counters"]["step"] == 37
    for part in ("model", "average"):
        for name, values in halves[part].items():
            assert torch.equal(values, whole[part][name]), name


@pytest.mark.parametrize(
    ("setting", "code", "message"),
    [
        ("data.train=none", EXIT_FAILED, "data.train is none, which has no text in"),
        ("data.valid=none", EXIT_FAILED, "data.valid is none, which has no text in"),
        ("data.seed=-1", EXIT_USAGE, "data.seed is -1, needs at least 0"),
    ],
)
def test_wrong_data_are_named(
    folder: Path, setting: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_texts(folder / "texts", "none", []) == 0
    assert main(["train", *lm_settings(folder, "no", 1), setting]) == code
    assert message in capsys.readouterr().err


def test_inspect_shows_language_models_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(folder / "lm")]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert "WER" not in out
    assert main(["inspect", str(folder / "lm"), "--keys"]) == 0
    assert "task: lm" in capsys.readouterr().out

    config = folder / "lm.yaml"
    config.write_text("task: lm\nmodel:\n  dim: 32\n  layers: 1\n")
    assert main(["inspect", str(config), f"data.path={folder / 'texts'}"]) == 0
    out = capsys.readouterr().out
    assert "train: 34 texts" in out
    assert "embedding" in out
    assert "dropout" not in out
    assert main(["inspect", str(config), f"data.path={folder / 'nowhere'}"]) == 0
    assert "no prepared data" in capsys.readouterr().out


def test_a_language_model_is_not_decoded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", str(folder / "lm")]) == EXIT_USAGE
    assert "is a run of task 'lm'" in capsys.readouterr().err
