"""Damaged files are read as far as they are whole, or refused by name; nothing else is raised."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.config.load import load_config
from pruned_rnnt.data.input.manifest_items import manifest_items
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.input.speech_dataset import BadAudio, SpeechDataset
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.calibration import read_calibration
from pruned_rnnt.decode.fusion.ngram_files import read_arpa
from pruned_rnnt.pretrained.onnx_recogniser import OnnxRecogniser
from pruned_rnnt.run.result_file import find_results
from pruned_rnnt.run.results import read_measurement
from pruned_rnnt.system.json_file import from_json
from pruned_rnnt.system.usage_errors import ExportError
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.engine.run_files import read_p99_duration
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.data.recorded_speech import write_audio
from tests.hostile.damages import damaged_bytes, damaged_json

ARPA = "\\data\\\nngram 1=3\n\n\\1-grams:\n-1\t<s>\t-0.5\n-1\t</s>\n-1\tone\n\n\\end\\\n"
METRICS = (
    '{"group": "train", "step": 1, "total_per_frame": 3.0, "learning_rate": 0.1}\n'
    '{"group": "valid", "step": 1, "total": 3.0, "wer": 0.5, "cer": 0.5}\n'
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_audio(folder / "audio/a.wav", 1.0)
    (folder / "audio/a.txt").write_text("one two")
    options = ["--tokens", "char", "--dev-share", "0", "--test-share", "0", "--num-jobs", "1"]
    for name in ("plain", "shar"):
        output = ["--output", str(folder / name), *(["--shar"] if name == "shar" else [])]
        assert main(["prepare", "own", str(folder / "audio"), *options, *output]) == 0
    return folder


class Case(NamedTuple):
    """A file with its contents, and how it is read; `is_json` if it is one JSON value."""

    path: Path
    content: bytes
    read: Callable[[], Any]
    is_json: bool = True


def stored(path: Path, content: bytes | str) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path.read_bytes()


def tokens(folder: Path, corpus: Path) -> Case:
    content = (corpus / "plain/tokens/tokens.model").read_bytes()

    def read() -> None:
        found = Tokenizer.load(folder)
        found.decode(found.encode("one two"))

    return Case(folder / "tokens.model", content, read, is_json=False)


def metrics(folder: Path, corpus: Path) -> Case:
    return Case(folder / "metrics.jsonl", METRICS.encode(), lambda: read_metrics(folder), False)


def metric_line(folder: Path, corpus: Path) -> Case:
    line = METRICS.splitlines()[0].encode()
    return Case(
        folder / "metrics.jsonl",
        line,
        lambda: [
            f"{value:.3f}"
            for each in read_metrics(folder)
            for name, value in each.items()
            if name != "group"
        ],
    )


def calibration(folder: Path, corpus: Path) -> Case:
    times = {"before": [0.1, 0.2], "after": [0.1, 0.2]}
    weights = {"bias": 0.5, "path": 1, "head": 0.0}
    values = {"times": times, "confidence": weights, "source": "dev"}

    def read() -> None:
        found = read_calibration(folder, vocab_size=2)
        if found is not None and found.confidence is not None:
            assert 0 <= found.confidence(-0.1, -0.2) <= 1

    return Case(folder / "calibration.json", json.dumps(values).encode(), read)


def durations(folder: Path, corpus: Path) -> Case:
    content = b'{"usual_longest_seconds": 3.0}'
    return Case(folder / "utterances.json", content, lambda: read_p99_duration(folder))


def scores(folder: Path, corpus: Path) -> Case:
    path = folder / "scores-a.json"
    counts = {"insertions": 1, "deletions": 0, "substitutions": 0, "reference_words": 9}
    rate = {"counts": counts, "lower": 0.1, "upper": 0.2}
    inputs = dict.fromkeys(("split", "utterances", "checkpoint", "model", "label"), "a")
    values = {
        **dict.fromkeys(("data", "split", "setting", "model", "checkpoint", "code"), "a"),
        "utterances": 3,
        "words": rate,
        "characters": rate,
        "inputs": {**inputs, "settings": {"beam": 4}, "files": {"lm": "1"}},
    }
    return Case(path, json.dumps(values).encode(), lambda: read_measurement(path))


def nbest(folder: Path, corpus: Path) -> Case:
    word = {"word": "one", "start": 0.1, "end": 0.2, "confidence": 0.5}
    best = {
        "text": "one",
        "score": -1.0,
        "words": [word],
        "tokens": [{"token": "o", "start": 0.1, "end": 0.2, "score": -1.0}],
    }
    line = {
        "id": "a",
        "reference": "one two",
        "hypotheses": [best],
        "audio": {"frames": 3, "mean": 0.5},
    }

    def read() -> None:
        for result in find_results(folder):
            for each in result.read()[0]:
                str(each.sentence and each.sentence.characters())
                sum(word.end - word.start for word in each.words)

    path = folder / "results/nbest-test-greedy-search-last-1234.jsonl"
    return Case(path, json.dumps(line).encode(), read)


def report(folder: Path, corpus: Path) -> Case:
    content = (corpus / "plain/prepare.json").read_bytes()
    shutil.copytree(corpus / "plain", folder, dirs_exist_ok=True)
    return Case(folder / "prepare.json", content, lambda: PreparedFolder(folder).report())


def manifest(folder: Path, corpus: Path) -> Case:
    (path,) = (corpus / "plain").glob("train_cuts*.jsonl.gz")
    content = gzip.decompress(path.read_bytes())
    return Case(folder / "cuts.jsonl", content, lambda: list(manifest_items(folder / "cuts.jsonl")))


def compressed(folder: Path, corpus: Path) -> Case:
    (path,) = (corpus / "plain").glob("train_cuts*.jsonl.gz")
    new = folder / path.name
    return Case(new, path.read_bytes(), lambda: list(manifest_items(new)), is_json=False)


def features(folder: Path, corpus: Path, name: str = "plain") -> Case:
    shutil.copytree(corpus / name, folder, dirs_exist_ok=True)
    prepared = PreparedFolder(folder)
    (cut,) = prepared.cuts("train")
    dataset = SpeechDataset(prepared.tokenizer, stored=True, augmenter=None)
    suffix = ".tar" if name == "shar" else ".lca"
    (path,) = folder.rglob(f"*{suffix}")
    return Case(path, path.read_bytes(), lambda: dataset._load(cut), is_json=False)


def shar(folder: Path, corpus: Path) -> Case:
    return features(folder, corpus, "shar")


def settings(folder: Path, corpus: Path) -> Case:
    path = folder / "settings.json"
    shutil.copytree(corpus / "plain/tokens", folder, dirs_exist_ok=True)
    values = {"kind": "ctc", "streaming": False, "shortest_seconds": 0.1, "p99_duration": 2.0}

    def read() -> None:
        with pytest.raises(ExportError) as raised:
            OnnxRecogniser(folder)
        if "has no model.onnx" not in str(raised.value):  # what comes after the settings
            raise raised.value

    return Case(path, json.dumps(values).encode(), read)


def arpa(folder: Path, corpus: Path) -> Case:
    path = folder / "lm.arpa"
    return Case(path, ARPA.encode(), lambda: read_arpa(path, ["one"]), is_json=False)


def configuration(folder: Path, corpus: Path) -> Case:
    path = folder / "config.yaml"
    content = b"model:\n  encoder:\n    kind: conformer\n    dim: 64\ntrain:\n  steps: 100\n"
    return Case(path, content, lambda: load_config(ExperimentConfig, path), is_json=False)


CASES = (
    tokens,
    metrics,
    metric_line,
    calibration,
    durations,
    scores,
    nbest,
    report,
    settings,
    manifest,
    compressed,
    features,
    shar,
    arpa,
    configuration,
)
COUNT = 40


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_damaged_files_are_read_or_named(
    make: Callable[[Path, Path], Case], corpus: Path, tmp_path: Path
) -> None:
    case = make(tmp_path / "case", corpus)
    stored(case.path, case.content)
    case.read()
    for content in damages(case):
        stored(case.path, content)
        error = error_of(case.read)
        assert not error or case.path.name in error, content[:200]
        assert not re.search(r"[\x00-\x1f\x7f-\x9f]", error)
        assert len(error) < 1000


def error_of(read: Callable[[], Any]) -> str:
    """Empty without an error; only errors about contents are allowed."""
    try:
        read()
    except (BadAudio, ValueError) as error:
        return str(error)
    return ""


def damages(case: Case) -> Iterator[bytes]:
    if case.is_json:
        yield from damaged_json(case.content)
    yield from damaged_bytes(case.content, COUNT)


def test_a_symbol_that_is_no_text_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    case = tokens(tmp_path, corpus)
    assert b"\x01w" in case.content  # a symbol of one character, with its length
    stored(case.path, case.content.replace(b"\x01w", b"\x01\xff"))
    with pytest.raises(ValueError, match=r"tokens\.model is damaged or not a tokenizer"):
        case.read()


def test_values_of_other_types_are_named() -> None:
    class Item(NamedTuple):
        name: str
        share: float = 0.5
        parts: tuple[int, ...] = ()
        note: str | None = None

    assert from_json(Item, {"name": "a", "share": 1, "other": 3}) == Item("a", 1)
    assert from_json(Item, {"name": "a", "parts": [1, 2], "note": None}).parts == (1, 2)
    assert from_json(Item, {"name": "a", "parts": (1, 2)}).parts == (1, 2)
    for values, message in (
        ({"name": 3}, "name is 3, needs str"),
        ({"name": "a", "share": True}, "share is True, needs float"),
        ({"name": "a", "parts": [1, "2"]}, r"parts\.1 is '2', needs int"),
        ({"name": "a", "note": []}, r"note is \[\], needs str"),
        ({}, "missing .* 'name'"),
        ([], r"it is \[\], needs Item"),
    ):
        with pytest.raises(TypeError, match=message):
            from_json(Item, values)
