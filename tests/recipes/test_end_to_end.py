"""Recipes of public corpora from download to export, on fabricated corpora, with tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.log import read_metrics
from scripts.fabricate.corpora import Part, scaled_parts
from scripts.fabricate.layouts import fabricate
from scripts.recipe_end_to_end import CHECKPOINTS, Folders, commands, folders
from tests.tiny_corpus import CONFORMER, ZIPFORMER

pytestmark = pytest.mark.slow

STEPS = 6
TRAINING = [
    "train.device=cpu",
    "train.precision=float32",
    "train.loggers=[]",
    "data.num_workers=0",
]
SMALL_ZIPFORMER = [
    *ZIPFORMER,
    "model.predictor.dim=16",
    "model.joiner_dim=32",
    "data.num_buckets=2",
]


class Case(NamedTuple):
    """share: of the real corpus. seconds: mean duration of an utterance; None for the real one.

    export: format; the graphs of a Zipformer take long, and other tests have them.
    splits: the parts of each split that are not drawn from another one.
    """

    recipe: str
    share: float
    seconds: float | None
    settings: Sequence[str]
    prepare: Sequence[str]
    export: str
    splits: dict[str, Sequence[str]]


CASES = [
    Case(
        recipe="librispeech",
        share=0.01,
        seconds=2.0,
        settings=[*SMALL_ZIPFORMER, "data.max_duration=8"],
        prepare=["--vocab-size", "100"],
        export="icefall",
        splits={
            "train": ["train-clean-100", "train-clean-360", "train-other-500"],
            "dev": ["dev-clean", "dev-other"],
            "test": ["test-clean"],
            "test-other": ["test-other"],
        },
    ),
    Case(
        recipe="mini_librispeech",
        share=0.01,
        seconds=None,
        settings=[*CONFORMER, "data.max_duration=40"],
        prepare=["--speeds", "0.9,1.1"],
        export="torch",
        splits={"test": ["dev-clean-2"]},
    ),
    Case(
        recipe="aishell",
        share=0.01,
        seconds=2.0,
        settings=[*SMALL_ZIPFORMER, "data.max_duration=8"],
        prepare=[],
        export="icefall",
        splits={"train": ["train"], "dev": ["dev"], "test": ["test"]},
    ),
    Case(
        recipe="commonvoice",
        share=0.001,
        seconds=2.0,
        settings=[*SMALL_ZIPFORMER, "data.max_duration=8"],
        prepare=["--language", "de", "--vocab-size", "100"],
        export="icefall",
        splits={"train": ["train"], "dev": ["dev"], "test": ["test"]},
    ),
    Case(
        recipe="yesno",
        share=1.0,
        seconds=None,
        settings=[*CONFORMER, "data.max_duration=20"],
        prepare=[],
        export="onnx",
        splits={"test": []},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe)
def test_recipe(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = folders(tmp_path, case.recipe)
    parts = {part.name: part for part in scaled_parts(case.recipe, case.share, case.seconds)}
    fabricate(case.recipe, places.download, list(parts.values()), jobs=1, seed=0)
    for arguments in commands(
        case.recipe,
        places,
        jobs=1,
        steps=STEPS,
        settings=[*TRAINING, *case.settings],
        prepare=case.prepare,
        export_format=case.export,
    ):
        assert pruned_rnnt(arguments) == 0, capsys.readouterr().err
    check_data(case, places, parts)
    check_run(places, case.export)


def check_data(case: Case, places: Folders, parts: dict[str, Part]) -> None:
    folder = PreparedFolder(places.data)
    counts = {split: len(folder.cuts(split)) for split in folder.splits()}
    for split, names in case.splits.items():
        expected = sum(parts[name].utterances for name in names) or 30
        assert counts[split] == expected
    if case.recipe == "mini_librispeech":
        # At three speeds; dev is drawn from it.
        assert counts["train"] + 3 * counts["dev"] == 3 * parts["train-clean-5"].utterances
    if case.recipe == "yesno":
        assert counts["train"] + counts["dev"] == 30
    assert min(counts.values()) >= 1


def check_run(places: Folders, export: str) -> None:
    run = RunFolder(places.run)
    assert sorted(path.name for path in run.checkpoints.glob("step-*.pt")) == [
        f"step-{step:08d}.pt" for step in (2, 4, 6)
    ]
    train = [line for line in read_metrics(places.run) if line["group"] == "train"]
    assert train[-1]["step"] == STEPS
    assert train[-1]["bad_steps"] == 0
    average = run.span_average(CHECKPOINTS - 1)
    assert load_checkpoint(average)["counters"]["step"] == STEPS
    results = json.loads((run.results / "scores.json").read_text(encoding="utf-8"))
    assert len(results) == 2
    exported = {path.name for path in (run.export / export).iterdir()}
    assert {"README.md", "licences.json"} <= exported
    needed = {
        "icefall": {"pretrained.pt"},
        "onnx": {"tokens.txt", "encoder.onnx", "decoder.onnx", "joiner.onnx"},
        "torch": {"model.pt", "encoder.pt2"},
    }
    assert needed[export] <= exported
