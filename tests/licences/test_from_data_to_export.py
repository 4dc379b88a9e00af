"""Licences from `prepare` through training and fine-tuning to the exported model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_USAGE
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.export.model_file import load_model
from pruned_rnnt.interop.icefall_model import to_icefall_state
from pruned_rnnt.licences.chain import Licence, read_chain
from pruned_rnnt.run.folder import RunFolder
from tests.data.recorded_speech import write_audio
from tests.interop.test_import_icefall import SYMBOLS, checkpoint, make_model, write_tokens
from tests.tiny_corpus import make_corpus, tiny_overrides

pytestmark = pytest.mark.usefixtures("without_programs")

TEXTS = ("red green", "blue", "green blue red", "red")


def write_table(folder: Path) -> Path:
    """A table of utterances that say nothing."""
    folder.mkdir()
    lines = []
    for index in range(16):
        write_audio(folder / f"u{index}.wav", 1.0 + 0.05 * index, 16000)
        lines.append(f"u{index}.wav\t{TEXTS[index % 4]}\n")
    table = folder / "calls.tsv"
    table.write_text("".join(lines))
    return table


def prepare(table: Path, output: Path, *options: str) -> int:
    shares = ["--dev-share", "0.2", "--test-share", "0.2", "--tokens", "char", "--num-jobs", "1"]
    return main(["prepare", "own", str(table), "--output", str(output), *shares, *options])


def test_prepare_records_licence_and_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, output = write_table(tmp_path / "audio"), tmp_path / "calls"
    assert prepare(table, output, "--license", "LDC User Agreement") == EXIT_USAGE
    assert "--license-note" in capsys.readouterr().err
    assert prepare(table, output) == 0
    before = PreparedFolder(output).origin()
    assert before.licence == Licence()
    # The licence can be added later, by the same command.
    assert prepare(table, output, "--license", "cc-by-nc-4.0", "--source", "our archive") == 0
    origin = PreparedFolder(output).origin()
    assert origin.licence == Licence(id="CC-BY-NC-4.0", source="our archive")
    assert origin.digest == before.digest
    note = ["--license", "LDC User Agreement", "--license-note", "research only"]
    assert prepare(table, output, *note) == 0
    licence = PreparedFolder(output).origin().licence
    assert licence.note == "research only"
    report = json.loads((output / "prepare.json").read_text())
    (output / "prepare.json").write_text(json.dumps({**report, "licence": "MIT"}))
    with pytest.raises(ValueError, match=r"prepare\.json is damaged \(licence: .*id, source and"):
        PreparedFolder(output).origin()
    (output / "prepare.json").write_text(json.dumps(report))
    # Data that are taken from this folder keep its licence, unless another one is stated.
    manifest, again = output / "train_cuts.jsonl.gz", tmp_path / "again"
    assert prepare(manifest, again) == 0
    assert PreparedFolder(again).origin().licence == licence
    assert prepare(manifest, again, "--license", "CC-BY-4.0") == 0
    assert PreparedFolder(again).origin().licence == Licence(id="CC-BY-4.0")


@pytest.mark.slow
def test_chain_reaches_card_metadata_and_inspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path / "audio")
    old, new, run = tmp_path / "old", tmp_path / "new", tmp_path / "run"
    assert prepare(table, old, "--license", "CC-BY-NC-4.0", "--source", "our archive") == 0
    tokens = ["--tokenizer-from", str(old)]
    assert prepare(table, new, "--license", "CC-BY-4.0", "--source", "a friend", *tokens) == 0
    assert main(["train", *tiny_overrides(old, run, "train.steps=2")]) == 0
    assert main(["export", str(run), "--format", "torch", "card.license=cc-by-nc-4.0"]) == 0
    file = run / "export/torch/model.pt"
    card = (file.parent / "README.md").read_text()
    assert "license: cc-by-nc-4.0" in card
    assert "| data | old | CC-BY-NC-4.0 | attribution, no commercial use | our archive |" in card
    tuned = tmp_path / "tuned"
    steps = [f"train.folder={tuned}", "train.steps=2", "train.device=cpu"]
    assert main(["finetune", str(file.parent), str(new), *steps]) == 0
    chain = read_chain(tuned)
    assert chain is not None
    assert [(o.kind, o.name, o.licence.id) for o in chain.origins] == [
        ("data", "old", "CC-BY-NC-4.0"),
        ("weights", "run", "CC-BY-NC-4.0"),
        ("data", "new", "CC-BY-4.0"),
    ]
    assert chain.origins[1].digest.startswith("parameters:")
    # The old data allow no commercial use, although nothing of them is left on this disk.
    command = ["export", str(tuned), "--format", "torch", "card.license=apache-2.0"]
    capsys.readouterr()
    assert main(command) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert "data old (CC-BY-NC-4.0): it allows commercial use" in shown
    assert "weights run (CC-BY-NC-4.0)" in shown
    assert not (tuned / "export").exists()
    assert main([*command, "card.license_reason=a contract | of 2026"]) == 0
    folder = tuned / "export/torch"
    card = (folder / "README.md").read_text()
    assert "The owner's reason: a contract | of 2026" in card
    assert "- data old (CC-BY-NC-4.0): it allows commercial use" in card
    stored = load_model(folder).chain
    assert stored == read_chain(folder)
    assert stored is not None
    assert (stored.licence, len(stored.origins)) == ("Apache-2.0", 3)
    (folder / "licences.json").unlink()
    for target in (tuned, folder, folder / "model.pt"):
        capsys.readouterr()
        assert main(["inspect", str(target)]) == 0
        shown = capsys.readouterr().out
        assert "data old: CC-BY-NC-4.0; attribution, no commercial use; our archive" in shown
        assert "weights run: CC-BY-NC-4.0" in shown
    assert "licence Apache-2.0 (a contract | of 2026)" in shown


@pytest.mark.slow
def test_a_run_of_an_older_version_says_what_is_unknown(tmp_path: Path) -> None:
    corpus, run = make_corpus(tmp_path / "old"), tmp_path / "run"
    assert main(["train", *tiny_overrides(corpus, run, "train.steps=2")]) == 0
    onnx = pytest.importorskip("onnx")
    for kept, form in (("{}", "torch"), (None, "onnx")):
        RunFolder(run).licences.unlink()
        if kept is not None:
            RunFolder(run).licences.write_text(kept)
        assert main(["export", str(run), "--format", form, "card.license=mit"]) == 0
        card = (run / "export" / form / "README.md").read_text()
        assert "| data | old | unknown | unknown |" in card
        assert "- data old: the licence is unknown" in card
    for path in (run / "export/onnx").glob("*.onnx"):
        values = {p.key: p.value for p in onnx.load(path).metadata_props}
        assert values["license"] == "MIT"
        assert '"name": "old"' in values["license_chain"]


def test_imported_weights_have_licence_and_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    path = checkpoint(tmp_path / "epoch-1.pt", to_icefall_state(make_model()))
    tokens, run = write_tokens(tmp_path / "tokens.txt", SYMBOLS), tmp_path / "run"
    command = ["import-icefall", str(path), "--tokens", str(tokens), "--output", str(run)]
    assert main([*command, "--license", "CC-BY-SA-4.0", "--source", "the hub"]) == 0
    chain = read_chain(run)
    assert chain is not None
    (origin,) = chain.origins
    assert (origin.name, origin.licence.id) == ("epoch-1.pt", "CC-BY-SA-4.0")
    assert origin.digest.startswith("sha256:")
    assert main(["inspect", str(run)]) == 0
    assert "weights epoch-1.pt: CC-BY-SA-4.0" in capsys.readouterr().out
    assert main(["export", str(run), "--format", "icefall", "card.license=mit"]) == EXIT_USAGE
    assert "demands the same licence" in capsys.readouterr().err
    assert main(["export", str(run), "--format", "icefall"]) == 0
    exported = read_chain(run / "export/icefall")
    assert exported is not None
    assert exported.origins == (origin,)
