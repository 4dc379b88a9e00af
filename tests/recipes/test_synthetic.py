"""The synthetic recipe: disjoint voices, times of words, the same corpus however it is made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pruned_rnnt.recipes.synthetic import prepare as recipe
from pruned_rnnt.recipes.synthetic.commands import draw_command, vocabulary

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.prepared_folder import PreparedFolder

# The speech engine needs a fresh process for each split.
pytestmark = pytest.mark.slow

OPTIONS = ["--train", "9", "--dev", "4", "--test", "8"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedFolder:
    output = tmp_path_factory.mktemp("synthetic") / "data"
    assert pruned_rnnt(["prepare", "synthetic", "--output", str(output), *OPTIONS]) == 0
    return PreparedFolder(output)


def test_splits(corpus: PreparedFolder) -> None:
    assert corpus.splits() == ["dev", "test", "train"]
    words = set(vocabulary())
    assert 60 <= len(words) <= 120
    for split, count in (("train", 9), ("dev", 4), ("test", 8)):
        cuts = corpus.cuts(split)
        assert len(cuts) == count
        for cut in cuts:
            assert words.issuperset(cut_text(cut).split())
            assert cut.recording.sampling_rate == 16000
            assert cut.num_features == 80
            assert 0.8 < cut.duration < 6.0
            assert cut.supervisions[0].speaker in recipe.split_variants(split)


def test_no_voice_is_in_two_splits() -> None:
    groups = [set(recipe.split_variants(split)) for split in ("train", "dev", "test")]
    assert len(set.union(*groups)) == sum(len(group) for group in groups)
    assert [len(group) for group in groups] >= [40, 4, 8]


def test_word_times_match_the_audio(corpus: PreparedFolder) -> None:
    for cut in corpus.cuts("train"):
        words = cut.supervisions[0].alignment["word"]
        assert [word.symbol for word in words] == cut_text(cut).split()
        starts = [word.start for word in words]
        assert starts == sorted(starts)
        assert 0.1 <= starts[0] <= 0.3
        assert words[-1].start + words[-1].duration <= cut.duration - 0.1
        samples_S = cut.load_audio()[0]
        speech = samples_S[int(starts[0] * 16000) : int((cut.duration - 0.15) * 16000)]
        silence = samples_S[: int(0.09 * 16000)]
        assert np.square(speech).mean() > 10 * np.square(silence).mean()


def test_tokenizer_covers_the_grammar(corpus: PreparedFolder) -> None:
    tokenizer = corpus.tokenizer()
    for word in vocabulary():
        assert 2 not in tokenizer.encode(word)
        assert tokenizer.decode(tokenizer.encode(word)) == word


def test_tokenizer_of_other_data(corpus: PreparedFolder, tmp_path: Path) -> None:
    output = tmp_path / "char"
    options = ["--output", str(output), "--train", "2", "--dev", "1", "--test", "1"]
    recipe.main([*options, "--tokens", "char", "--tokenizer-from", str(corpus.path)])
    assert PreparedFolder(output).tokenizer().symbols == corpus.tokenizer().symbols


def test_corpus_does_not_depend_on_number_of_jobs(corpus: PreparedFolder, tmp_path: Path) -> None:
    recipe.main(["--output", str(tmp_path / "again"), *OPTIONS, "--num-jobs", "1"])
    again = PreparedFolder(tmp_path / "again")
    for split in corpus.splits():
        for one, other in zip(corpus.cuts(split), again.cuts(split), strict=True):
            assert one.id == other.id
            assert np.array_equal(one.load_audio(), other.load_audio())
            assert np.array_equal(one.load_features(), other.load_features())
            assert one.supervisions == other.supervisions


def test_report_has_counts_and_versions(corpus: PreparedFolder) -> None:
    report = json.loads((corpus.path / "prepare.json").read_text())
    assert report["recipe"] == "synthetic"
    assert report["splits"]["test"]["utterances"] == 8
    assert report["splits"]["test"]["speakers"] == sorted(recipe.TEST_VARIANTS)
    assert report["tokens"] == len(corpus.tokenizer())
    assert report["options"]["seed"] == 42
    assert report["versions"]["lhotse"]


def test_batches_have_words(corpus: PreparedFolder) -> None:
    data = DataModule(DataConfig(path=str(corpus.path), num_workers=0))
    assert sum(len(batch) for batch in data.train_loader()) == 9
    (batch,) = data.test_loader()
    assert all(
        len(words) == len(text.split())
        for words, text in zip(batch.words, batch.texts, strict=True)
    )


def test_every_template_can_be_drawn() -> None:
    import random

    rng = random.Random(0)
    drawn = {word for _ in range(3000) for word in draw_command(rng).split()}
    assert drawn == set(vocabulary())


def test_bad_counts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "data"
    assert pruned_rnnt(["prepare", "synthetic", "--output", str(output), "--dev", "0"]) == 1
    assert "--dev must be at least 1, got 0" in capsys.readouterr().err
    assert not output.exists()
