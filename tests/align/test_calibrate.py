"""`decode --calibrate` on a tiny run, and the commands that use the calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pruned_rnnt.align.best_path import TargetBatch, align_symbols
from pruned_rnnt.align.calibrate import calibrate, word_confidences
from pruned_rnnt.cli import main
from pruned_rnnt.data.audio.features import nemo_features
from pruned_rnnt.data.input.batch import AlignedWord, Batch
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.calibration import (
    Calibration,
    ConfidenceMap,
    SymbolTimes,
    read_calibration,
    save_calibration,
)
from pruned_rnnt.decode.decode_set import Decoded, decode_set
from pruned_rnnt.decode.head_paths import head_paths
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.word_times import WORD_START
from pruned_rnnt.export.model_file import load_model as load_exported
from pruned_rnnt.interop.nemo.imported_model import import_model
from pruned_rnnt.train.run import LoadedModel, load_model, run_config
from tests.interop.parakeet_models import audio
from tests.interop.test_parakeet import written
from tests.tiny_corpus import make_corpus, tiny_overrides


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    folder = tmp_path_factory.mktemp("exp") / "run"
    settings = ["train.steps=2", "train.validate_every=100", "loss.rnnt_type=modified"]
    assert main(["train", *tiny_overrides(corpus, folder, *settings)]) == 0
    return folder


@pytest.fixture(scope="module")
def loaded(run: Path) -> LoadedModel:
    return load_model(run_config(run))


def data_of(run: Path) -> DataModule:
    return DataModule(run_config(run).data)


def word_starts(path: Path) -> list[float]:
    return [float(line.split()[2]) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("without_programs")
def test_commands_use_the_calibration(
    run: Path, loaded: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ctm = ["align", str(run), "--format", "ctm", "--output"]
    assert main([*ctm, str(tmp_path / "before")]) == 0
    assert main(["decode", str(run), "decode.split=dev", "--calibrate"]) == 0
    shown = capsys.readouterr().out
    assert f"calibration: {run / 'calibration.json'}" in shown
    assert "confidences of words: normalised cross entropy" in shown
    size = len(loaded.tokenizer)
    found = read_calibration(run, size)
    assert found is not None
    assert found.source == f"dev, {loaded.name}"
    # Everything 0.1 s later, and half as sure of every word.
    times = SymbolTimes(before=(-0.1,) * size, after=(0.3,) * size)
    other = Calibration(
        times=times, confidence=ConfidenceMap(bias=0.0, path=0.0, head=0.0), source="here"
    )
    save_calibration(run, other)
    assert main([*ctm, str(tmp_path / "after")]) == 0
    before = word_starts(tmp_path / "before/test-words.ctm")
    after = word_starts(tmp_path / "after/test-words.ctm")
    assert after[0] == pytest.approx(before[0] + 0.1)
    lines = (tmp_path / "after/test-words.ctm").read_text().splitlines()
    assert {line.split()[5] for line in lines} == {"0.5000"}
    assert main(["decode", str(run)]) == 0
    (nbest,) = (run / "results").glob("nbest-test-*.jsonl")
    words = [
        word
        for line in nbest.read_text().splitlines()
        for word in json.loads(line)["hypotheses"][0]["words"]
    ]
    assert {word["confidence"] for word in words} <= {0.5}
    exported = tmp_path / "torch"
    arguments = ["export", str(run), "--format", "torch", "--output", str(exported)]
    assert main(arguments) == 0
    assert load_exported(exported).calibration == other


@pytest.mark.parametrize("has_earlier", [False, True])
def test_an_empty_calibration_is_not_saved(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_earlier: bool,
) -> None:
    path = run / "calibration.json"
    path.unlink(missing_ok=True)
    confidence = ConfidenceMap(bias=0.5, path=0.0, head=0.0)
    earlier = Calibration(times=None, confidence=confidence, source="here")
    if has_earlier:
        save_calibration(run, earlier)
    empty = replace(earlier, confidence=None)
    monkeypatch.setattr("pruned_rnnt.cli.decoding.calibrate", lambda *_: empty)
    assert main(["decode", str(run), "decode.split=dev", "--calibrate"]) == 0
    shown = [x for x in capsys.readouterr().out.splitlines() if x.startswith("calibration: ")]
    assert [line.split(":")[1] for line in shown] == [
        " the set has nothing to fit it to, so none is saved",
        " times of words are not calibrated",
        " confidences of words are not calibrated",
    ]
    assert path.is_file() == has_earlier
    path.unlink(missing_ok=True)
    assert [line.split(":")[1] for line in earlier.missing_lines()] == [shown[1].split(":")[1]]


def test_times_of_words_are_learned(run: Path, loaded: LoadedModel) -> None:
    """Words that begin 0.12 s before the frames of the head, and end 0.4 s after them."""
    batches = []
    for batch in data_of(run).test_loader("train"):
        encoded, lengths = loaded.model.encode(batch.features_NTF, batch.feature_lengths_N)
        counts = batch.target_lengths_N.tolist()
        texts = [batch.targets_NU[n, :count].tolist() for n, count in enumerate(counts)]
        words = []
        for path in head_paths(loaded.model, encoded, lengths, texts):
            assert path is not None
            starts = [0.04 * frame - 0.12 for frame in path.frames]
            words.append(tuple(AlignedWord(word="w", start=s, duration=0.52) for s in starts))
        batches.append(replace(batch, words=tuple(words)))
    found = calibrate(loaded.model, loaded.tokenizer, batches, [], "train")
    assert found.times is not None
    assert found.confidence is None
    used = {int(s) for b in batches for s in b.targets_NU.flatten() if s > 0}
    for symbol in used:
        assert found.times.before[symbol] == pytest.approx(0.12, abs=0.01)
        assert found.times.after[symbol] == pytest.approx(0.40, abs=0.01)


def test_without_times_the_borders_of_the_speech_count(run: Path, loaded: LoadedModel) -> None:
    batches = [
        replace(batch, words=((),) * len(batch.ids)) for batch in data_of(run).test_loader("train")
    ]
    found = calibrate(loaded.model, loaded.tokenizer, batches, [], "train")
    assert found.times is not None
    assert all(-3 < seconds < 3 for seconds in (*found.times.before, *found.times.after))
    assert any(found.times.before)


def test_times_of_nemos_ctc_models_are_those_of_their_frames(tmp_path: Path) -> None:
    """Words that begin 0.12 s before frames of 80 ms; nothing is known of sets without words."""
    found = import_model(written("nemo_ctc", tmp_path))
    features, lengths = nemo_features(audio()[:2], torch.device("cpu"), 80)
    begins = [n for n, name in enumerate(found.tokenizer.symbols) if name.startswith(WORD_START)]
    texts = [begins[:3], begins[:1] + begins[2:0:-1]]
    batch = Batch(
        features_NTF=features,
        feature_lengths_N=lengths,
        targets_NU=torch.tensor(texts, dtype=torch.int32),
        target_lengths_N=torch.tensor([3, 3]),
        texts=tuple(found.tokenizer.decode(text) for text in texts),
        ids=("a", "b"),
        durations=(1.0, 1.0),
        words=((), ()),
    )
    assert calibrate(found.model, found.tokenizer, [batch], [], "dev").times is None
    encoded, counts = found.model.encode(features, lengths)
    targets = TargetBatch(encoded, counts, batch.targets_NU, batch.target_lengths_N)
    words = []
    for path in align_symbols(found.model, targets):
        assert path is not None
        assert path.frames[2] > 1
        starts = [0.08 * frame - 0.12 for frame in path.frames]
        words.append(tuple(AlignedWord(word="w", start=x, duration=0.52) for x in starts))
    calibrated = calibrate(
        found.model, found.tokenizer, [replace(batch, words=tuple(words))] * 20, [], "dev"
    )
    assert calibrated.times is not None
    for symbol in (*texts[0], *texts[1]):
        assert calibrated.times.before[symbol] == pytest.approx(0.12, abs=0.01)
        assert calibrated.times.after[symbol] == pytest.approx(0.40, abs=0.01)


def test_words_are_judged_by_the_reference(run: Path, loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    symbols = tuple(tokenizer.encode("red green blue"))
    scores = (-0.1, -2.0, -0.3)
    best = Hypothesis(symbols=symbols, frames=(0, 3, 5), score=-2.4, symbol_scores=scores)
    utterance = Decoded(
        id="a", reference="red blue", texts=("red green blue",), hypotheses=(best,), heads=(None,)
    )
    confidences, right = word_confidences([utterance], tokenizer, None)
    assert right == [True, False, True]
    assert confidences == pytest.approx(torch.tensor(scores).exp().tolist(), abs=1e-4)


@pytest.mark.parametrize("step", [2, 6])
def test_phrases_without_spaces_are_no_words(step: int) -> None:
    """However long they last."""
    text = "one 今日はいいてんきですね two"
    tokenizer = train_tokenizer([text], TokenizerConfig(kind="char"))
    symbols = tuple(tokenizer.encode(text))
    best = Hypothesis(
        symbols=symbols,
        frames=tuple(step * n for n in range(len(symbols))),
        score=-1.0,
        symbol_scores=(-0.1,) * len(symbols),
    )
    utterance = Decoded(id="a", reference=text, texts=(text,), hypotheses=(best,), heads=(None,))
    confidences, right = word_confidences([utterance], tokenizer, None)
    assert right == [True, True]
    assert len(confidences) == 2


def test_decoded_sets_have_the_paths_of_the_head(run: Path, loaded: LoadedModel) -> None:
    config = run_config(run, ["decode.method=modified_beam", "decode.num_best=3"]).decode
    data = data_of(run)
    decoded = decode_set(loaded.model, data.test_loader("test"), loaded.tokenizer, config)
    for utterance in decoded.utterances:
        assert len(utterance.heads) == len(utterance.hypotheses)
        for hypothesis, head in zip(utterance.hypotheses, utterance.heads, strict=True):
            assert head is None or len(head.frames) == len(hypothesis.symbols)
