"""`pruned-rnnt align` on a tiny run: splits, single files, utterances without an alignment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet

from pruned_rnnt.align import best_path
from pruned_rnnt.align.utterance import AlignedUtterance, NotAligned, align_batches, align_file
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.audio.features import audio_features
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.head_paths import head_paths
from pruned_rnnt.train.run import load_model, run_config
from tests.tiny_corpus import WORDS, make_corpus, trained_run
from tests.tiny_models import tiny_conformer, tiny_model


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_corpus(tmp_path_factory.mktemp("corpus"))
    odd = []
    for cut, text in zip(
        CutSet.from_file(folder / "test_cuts.jsonl.gz"), ("", "red " * 80, "blue?"), strict=False
    ):
        cut.supervisions[0].text = text
        odd.append(cut)
    CutSet.from_cuts(odd).to_file(folder / "odd_cuts.jsonl.gz")
    return folder


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ["train.steps=2", "train.validate_every=100", "loss.rnnt_type=modified"]
    return trained_run(corpus, tmp_path_factory.mktemp("exp") / "run", *settings)


def speech(seconds: float) -> np.ndarray:
    return 0.1 * np.random.default_rng(0).standard_normal(int(16000 * seconds), dtype=np.float32)


@pytest.mark.slow
def test_every_format_has_every_utterance(
    run: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        cut.id: cut.supervisions[0].text for cut in CutSet.from_file(corpus / "test_cuts.jsonl.gz")
    }
    assert main(["align", str(run), "--split", "test"]) == 0
    assert "aligned 6 utterances" in capsys.readouterr().out
    grids = sorted((run / "alignments").glob("test-*/test/*.TextGrid"))
    assert [path.stem for path in grids] == sorted(texts)
    output = ["--output", str(tmp_path)]
    assert main(["align", str(run), "--format", "lhotse", *output]) == 0
    for cut in CutSet.from_file(tmp_path / "test_cuts.jsonl.gz"):
        words = cut.supervisions[0].alignment["word"]
        assert " ".join(item.symbol for item in words) == texts[cut.id]
        starts = [item.start for item in words]
        assert starts == sorted(starts)
        assert all(0 <= item.start <= item.start + item.duration <= cut.duration for item in words)
    assert main(["align", str(run), "--format", "ctm", "decode.split=dev", *output]) == 0
    words_of: dict[str, list[str]] = {}
    for line in (tmp_path / "dev-words.ctm").read_text().splitlines():
        name, _, _, _, word, _ = line.split()
        words_of.setdefault(name, []).append(word)
    assert len(words_of) == 6
    assert all(set(words) <= set(WORDS) for words in words_of.values())


def test_times_are_those_of_the_ctc_head(run: Path, tmp_path: Path) -> None:
    assert main(["align", str(run), "--format", "ctm", "--output", str(tmp_path)]) == 0
    config = run_config(run)
    model = load_model(config).model
    starts = {}
    for line in (tmp_path / "test-tokens.ctm").read_text().splitlines():
        name, _, start, _, _, _ = line.split()
        starts.setdefault(name, []).append(float(start))
    for batch in DataModule(config.data).test_loader("test"):
        with torch.inference_mode():
            encoded, lengths = model.encode(batch.features_NTF, batch.feature_lengths_N)
        counts = batch.target_lengths_N.tolist()
        texts = [batch.targets_NU[n, :count].tolist() for n, count in enumerate(counts)]
        found = head_paths(model, encoded, lengths, texts)
        for name, path in zip(batch.ids, found, strict=True):
            assert path is not None
            assert starts[name] == pytest.approx([0.04 * frame for frame in path.frames])


def test_failures_are_reported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["align", str(run), "--split", "odd", "--output", str(tmp_path)])
    assert code == EXIT_FAILED
    shown = capsys.readouterr()
    assert "aligned 1 utterances" in shown.out
    assert "not aligned: 2" in shown.out
    assert "1 text with characters without a token" in shown.err
    assert "as <unk>: 'blue?'\n" in shown.err
    reasons = dict(
        line.split("\t") for line in (tmp_path / "odd-not-aligned.txt").read_text().splitlines()
    )
    assert reasons["test-0"] == "the text is empty"
    assert "80 symbols do not fit into" in reasons["test-1"]
    assert "'modified' emits at most one per frame" in reasons["test-1"]
    (grid,) = (tmp_path / "odd").iterdir()
    assert grid.stem == "test-2"
    assert '"blue?"' in grid.read_text()
    assert grid.read_text().count('"<unk>"') == 1  # among the tokens


def test_utterances_that_cannot_be_read_are_reported(
    run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = list(CutSet.from_file(corpus / "test_cuts.jsonl.gz"))
    cuts[1].features.storage_key = "absent.npy"
    CutSet.from_cuts(cuts).to_file(corpus / "torn_cuts.jsonl.gz")
    read: list[str] = []
    original = PreparedFolder.cuts

    def counted(self: PreparedFolder, split: str, **options: bool) -> CutSet:
        read.append(split)
        return original(self, split, **options)

    monkeypatch.setattr(PreparedFolder, "cuts", counted)
    options = ["--format", "lhotse", "--output", str(tmp_path)]
    assert main(["align", str(run), "--split", "torn", *options]) == EXIT_FAILED
    assert read == ["torn"]  # a manifest may be large
    assert len(CutSet.from_file(tmp_path / "torn_cuts.jsonl.gz")) == len(cuts) - 1
    listed = (tmp_path / "torn-not-aligned.txt").read_text()
    assert listed == f"{cuts[1].id}\tit cannot be read: a warning above says why\n"


def test_audio_too_long_for_one_search(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(run_config(run))
    path = tmp_path / "long.wav"
    soundfile.write(path, speech(2.0), 16000)
    monkeypatch.setattr(best_path, "_MOST_BYTES", 1000)
    (found,) = align_file(loaded.model, loaded.tokenizer, path, "red green")
    assert isinstance(found, NotAligned)
    assert found.reason.endswith("too many for one search in memory: split the audio and its text")


@pytest.mark.parametrize("kind", ["char", "bpe", "word"])
def test_words_have_the_spelling_of_the_text(kind: str) -> None:
    config = TokenizerConfig(kind=kind, vocab_size=20, languages=("en",))
    tokenizer = train_tokenizer(["nine four two"] * 5, config)
    network = tiny_model(tiny_conformer(), len(tokenizer))
    text = "Nine 日 four 本two"
    symbols = tokenizer.encode(text, "en")
    batch = Batch(
        features_NTF=torch.zeros(1, 400, 80),
        feature_lengths_N=torch.tensor([400]),
        targets_NU=torch.tensor([symbols]),
        target_lengths_N=torch.tensor([len(symbols)]),
        texts=(text,),
        ids=("a",),
        durations=(4.0,),
        words=((),),
    )
    (found,) = align_batches(network, [batch], tokenizer)
    assert isinstance(found, AlignedUtterance)
    assert [word.word for word in found.words] == text.split()
    times = [time for word in found.words for time in (word.start, word.end)]
    assert times == sorted(times)


def test_file_with_its_text(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.v1.flac"
    soundfile.write(path, speech(2.0), 8000)
    output = ["--output", str(tmp_path / "out"), "--format", "lhotse"]
    assert main(["align", str(run), str(path), "--text", " red  green ", *output]) == 0
    (cut,) = CutSet.from_file(tmp_path / "out/talk.v1_cuts.jsonl.gz")
    assert cut.duration == pytest.approx(4.0)
    assert [item.symbol for item in cut.supervisions[0].alignment["word"]] == ["red", "green"]
    assert cut.load_audio().shape == (1, 32000)


def test_windows_of_long_audio_keep_all_frames(run: Path, tmp_path: Path) -> None:
    loaded = load_model(run_config(run))
    path = tmp_path / "long.wav"
    soundfile.write(path, speech(8.0), 16000)
    (found,) = align_file(loaded.model, loaded.tokenizer, path, "red green blue " * 30, 2.0)
    assert isinstance(found, AlignedUtterance)
    assert found.seconds == 8.0
    assert len(found.words) == 90
    frames = (len(audio_features(speech(8.0))) - 7) // 4 + 1
    (full,) = align_file(loaded.model, loaded.tokenizer, path, "red " * frames)
    assert isinstance(full, AlignedUtterance)
    assert full.words[-1].start == pytest.approx(0.04 * (frames - 1))
    (over,) = align_file(loaded.model, loaded.tokenizer, path, "red " * (frames + 1))
    assert isinstance(over, NotAligned)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.wav"], "needs its --text"),
        (["--text", "red"], "needs its --text"),
        (["a.wav", "b.wav", "--text", "red"], "an audio file needs its --text"),
        (["a.wav", "--text", "red", "--split", "test"], "cannot be combined with an audio file"),
    ],
)
def test_wrong_options_are_usage_errors(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["align", str(run), *arguments]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_missing_inputs_are_errors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["align", str(run), "absent.wav", "--text", "red"]) == EXIT_FAILED
    assert "audio file not found: absent.wav" in capsys.readouterr().err
    assert main(["align", str(run), "--split", "absent"]) == EXIT_FAILED
    assert "no split 'absent'" in capsys.readouterr().err
