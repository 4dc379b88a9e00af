"""The model card of an export: what was measured with its parameters, and nothing else."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt import __version__
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED
from pruned_rnnt.config.load import load_config
from pruned_rnnt.data.input.prepared_folder import write_report
from pruned_rnnt.decode.scoring.error_rates import count_errors
from pruned_rnnt.model.parameter_values import fingerprint
from pruned_rnnt.pretrained.model_card import _settings
from pruned_rnnt.run.results import read_measurements
from pruned_rnnt.system.code_version import code_version
from pruned_rnnt.train.engine.run_files import versions
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import load_model, run_config
from tests.pretrained.saved_models import make_model, make_tokenizer, save_run
from tests.report.run_folders import transcript, write_decoded
from tests.tiny_corpus import tiny_overrides

pytestmark = pytest.mark.usefixtures("without_programs")


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was decoded after 4 steps and then continued to 6."""
    folder = tmp_path_factory.mktemp("exp") / "digits"
    assert main(["train", *tiny_overrides(corpus, folder)]) == 0
    assert main(["decode", str(folder), "decode.split=dev"]) == 0
    return folder


def export(run: Path, *settings: str) -> str:
    """The card of an export as a model file."""
    assert main(["export", str(run), "--format", "torch", *settings]) == 0
    return (run / "export/torch/README.md").read_text()


def front_matter(card: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    _, yaml, _ = card.split("---\n", maxsplit=2)
    return OmegaConf.to_container(OmegaConf.create(yaml))


@pytest.mark.slow
def test_card_has_the_measured_rates(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["decode", str(run), "decode.split=dev", "decode.method=modified_beam"]) == 0
    printed = capsys.readouterr().out
    rate, errors, words = re.search(r"WER ([\d.]+)% \[(\d+) / (\d+)", printed).groups()
    low, high = re.search(r"interval of the WER ([\d.]+)% .. ([\d.]+)%", printed).groups()
    card = export(run, "card.license=cc-by-4.0", "card.language=[en]", "card.name=My model")
    assert f"| modified_beam | WER {rate}% ({errors} errors in {words} words) |" in card
    assert f"| {low}% to {high}% |" in card
    values = front_matter(card)
    assert values["license"] == "cc-by-4.0"
    assert values["language"] == ["en"]
    assert values["library_name"] == "pruned_rnnt"
    (index,) = values["model-index"]
    assert index["name"] == "My model"
    beam = next(r for r in index["results"] if "modified_beam" in r["metrics"][0]["name"])
    assert beam["dataset"] == {"name": corpus.name, "type": corpus.name, "split": "dev"}
    assert beam["metrics"][0]["value"] == pytest.approx(float(rate))
    assert {r["metrics"][0]["type"] for r in index["results"]} == {"wer"}
    assert f"pruned_rnnt {__version__}" in card
    assert versions(run)[0]["commit"] == code_version().commit
    assert str(corpus) not in card
    assert str(run.parent) not in card
    assert "dim: 32" in card
    assert "## Use" in card
    # A measurement of other parameters does not count.
    assert "No results of `pruned-rnnt decode RUN`" in export(run, "decode.use_average=false")
    assert main(["train", str(run), "train.steps=6", "--allow-changes"]) == 0
    newer = export(run)
    assert "No results of `pruned-rnnt decode RUN`" in newer
    assert "model-index" not in front_matter(newer)
    assert "modified_beam" in export(run, "decode.checkpoint=" + str(_checkpoint(run, 4)))


def _checkpoint(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:08d}.pt"


def test_card_without_settings_says_what_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no data lies at the default of data.path
    tokenizer = make_tokenizer()
    run = save_run(tmp_path / "run", make_model(tokenizer), tokenizer)
    assert main(["export", str(run), "--format", "icefall"]) == 0
    card = (run / "export/icefall/README.md").read_text()
    assert front_matter(card)["license"] == "unknown"
    assert "| licence | unknown: ask the owner" in card
    assert "No results of `pruned-rnnt decode RUN`" in card
    assert "## Training data\n\nUnknown." in card
    assert "unknown version of pruned_rnnt" in card
    assert "icefall's Zipformer recipe" in card
    data, text = "card.data=10 h of calls", "card.description=For calls only."
    assert main(["export", str(run), "--format", "icefall", data, text]) == 0
    card = (run / "export/icefall/README.md").read_text()
    assert "## Training data\n\n10 h of calls" in card
    assert "\n\nFor calls only.\n\n" in card


@pytest.mark.slow
def test_card_names_old_data(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    run = save_run(tmp_path / "run", make_model(tokenizer), tokenizer)
    split = {"utterances": 3, "hours": 0.5, "speakers": ["a"]}
    (tmp_path / "new").mkdir()
    write_report(tmp_path / "new", {"recipe": "own", "splits": {"train": split}})
    paths = [f"data.path={tmp_path / 'new'}", f"data.old_path={tmp_path / 'old'}"]
    card = export(run, *paths, "data.old_share=0.3")
    assert (
        "`new`, prepared by the recipe `own`: 3 utterances, 0.50 hours, 1 speakers (split train). "
        "A share of 30% of the utterances is old data: `old`."
    ) in card


@pytest.mark.slow
def test_onnx_folder_has_a_card(run: Path) -> None:
    assert main(["export", str(run)]) == 0
    card = (run / "export/onnx/README.md").read_text()
    assert front_matter(card)["pipeline_tag"] == "automatic-speech-recognition"
    assert "python recognise.py a.wav" in card


@pytest.mark.slow
def test_a_repeated_measurement_is_shown_once(tmp_path: Path) -> None:
    right = [transcript("u", "a", "a")]
    for number, (computation, words) in enumerate(
        (({"code": "1"}, [transcript("u", "a", "b")]), ({"code": "2"}, right))
    ):
        stem = write_decoded(tmp_path, words, computation=computation)
        path = tmp_path / f"results/scores-{stem}.json"
        os.utime(path, (1e9 + number, 1e9 + number))
    write_decoded(tmp_path, right, label="modified_beam")
    found = read_measurements(tmp_path / "results", tmp_path.name)
    assert {m.setting: m.words.counts.errors for m in found} == {"greedy": 0, "modified_beam": 0}
    assert len(found) == 2
    assert read_measurements(tmp_path / "results", "other model") == []


@pytest.mark.parametrize("kind", ["lm", "hotwords", "word_ngram"])
def test_card_tells_results_with_other_files_apart(tmp_path: Path, kind: str) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    run = save_run(tmp_path / "run", model, tokenizer)
    right = [transcript("u", "a", "a")]

    def decoded(name: str, digest: str, scale: float, errors: list[Any], age: int) -> str:
        stem = write_decoded(
            run,
            errors,
            label="modified_beam",
            model=fingerprint(model),
            files={f"fusion.{kind}": digest} if name else {},
            settings={"num_best": age} | ({f"fusion.{kind}_scale": scale} if name else {}),
            fusion={kind: name},
        )
        os.utime(run / f"results/scores-{stem}.json", (1e9 - age, 1e9 - age))
        return stem[-8:]

    decoded("", "", 0, right, 1)
    decoded("/home/me/one|file", "1", 0.5, right, 1)
    digits = [decoded(f"{folder}/other", folder, 0.5, right, 1) for folder in "23"]
    assert main(["export", str(run), "--format", "icefall"]) == 0
    card = (run / "export/icefall/README.md").read_text()
    names = [f"{kind}=one|file", *(f"{kind}=other, {each}" for each in digits)]
    searches = ["modified_beam", *(f"modified_beam, {name}" for name in names)]
    for search in searches:
        assert "| corpus test | 1 | {} | WER 0.00%".format(search.replace("|", "\\|")) in card
    assert card.count("| corpus test |") == len(searches)
    assert "/home/me" not in card
    assert f"that are not in this folder: `{kind}=one|file`, `{kind}=other`." in card
    (index,) = front_matter(card)["model-index"]
    found = [each["metrics"][0]["name"] for each in index["results"]]
    assert sorted(found) == sorted(f"test WER ({search})" for search in searches)


def test_stored_measurement_is_that_of_the_result_files(run: Path) -> None:
    loaded = load_model(run_config(run, [f"decode.checkpoint={_checkpoint(run, 4)}"]))
    results = run / "results"
    found = read_measurements(results, fingerprint(loaded.model))
    (greedy,) = [each for each in found if each.setting == "greedy"]
    (path,) = results.glob(f"errs-dev-greedy-{greedy.checkpoint}-*.txt")
    errors = path.read_text()
    counts = greedy.words.counts
    assert (
        f"Errors: {counts.insertions} insertions, {counts.deletions} deletions, "
        f"{counts.substitutions} substitutions, over {counts.reference_words} reference words"
    ) in errors
    assert greedy.utterances == 6
    assert greedy.words.lower <= counts.rate <= greedy.words.upper
    assert count_errors([]) != counts


def test_damaged_measurement_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    run = save_run(tmp_path / "run", make_model(tokenizer), tokenizer)
    (run / "results").mkdir()
    for text in ("{", json.dumps({"model": "x"})):
        (run / "results/scores-dev-greedy-x.json").write_text(text)
        assert main(["export", str(run), "--format", "icefall"]) == EXIT_FAILED
        shown = capsys.readouterr().err
        assert "scores-dev-greedy-x.json is damaged" in shown
        assert len(shown.splitlines()) == 1


def test_fingerprint_is_of_the_parameters() -> None:
    tokenizer = make_tokenizer()
    model, same = make_model(tokenizer), make_model(tokenizer)
    assert fingerprint(model) == fingerprint(same)
    with torch.no_grad():
        next(same.parameters()).view(-1)[0] += 1e-6
    assert fingerprint(model) != fingerprint(same)
    assert re.fullmatch(r"[0-9a-f]{16}", fingerprint(model))


def test_settings_have_no_folders_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exp/base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    named = {
        "data.path": ("/home/me/data/calls", "calls"),
        "data.old_path": ("~/data/old", "old"),
        "data.augmentation.noise_cuts": ("../client/noise.jsonl.gz", "noise.jsonl.gz"),
        "train.init": ("exp/base", "base"),
        "model.encoder.name_or_folder": ("facebook/wav2vec2-base", "facebook/wav2vec2-base"),
    }
    others = ["model.encoder.kind=transformers", "data.features=waveform"]
    others.append("data.augmentation.spec_augment.enabled=false")
    overrides = [f"{name}={value}" for name, (value, _) in named.items()]
    config = load_config(ExperimentConfig, None, [*others, *overrides])
    settings = _settings(config)
    for name, (_, expected) in named.items():
        found: Any = settings
        for key in name.split("."):
            found = found[key]
        assert found == expected, name
