"""`pruned-rnnt decode RUN --plot`: pictures of utterances, and unknown ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lhotse import CutSet
from matplotlib.image import imread

from pruned_rnnt.align import best_path, picture
from pruned_rnnt.align.best_path import TargetBatch, align_symbols
from pruned_rnnt.align.picture import draw_utterance, find_cuts
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.speech_dataset import SpeechDataset
from pruned_rnnt.decode.build_search import build_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.decode_set import search_batch
from pruned_rnnt.train.run import load_model, run_config
from tests.tiny_corpus import tiny_overrides

pytestmark = pytest.mark.slow


def train(corpus: Path, folder: Path, *settings: str) -> Path:
    settings = ("train.steps=2", "train.validate_every=100", *settings)
    assert main(["train", *tiny_overrides(corpus, folder, *settings)]) == 0
    return folder


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(corpus, tmp_path_factory.mktemp("exp") / "run")


def test_pictures_of_the_named_utterances(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", str(run), "--plot", "test-3,test-0"]) == 0
    names = [f"test-{number}-greedy-step-00000002-*.png" for number in (3, 0)]
    paths = [next((run / "results/plots").glob(name)) for name in names]
    assert capsys.readouterr().out.splitlines() == [f"drawn: {path}" for path in paths]
    for path in paths:
        assert imread(path).shape[0] > 300
    assert not list((run / "results").glob("recogs-*"))


def test_unknown_ids_suggest_similar_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["decode", str(run), "--plot", "test-0,tset-4", "decode.method=modified_beam"])
    assert code == EXIT_FAILED
    message = capsys.readouterr().err
    assert "no utterance 'tset-4' among the 6 of test" in message
    assert "did you mean test-4" in message
    with pytest.raises(ValueError, match=r"of x; it has \[\] \.\.\."):
        find_cuts([], ["a"], "x")


@pytest.mark.parametrize("kind", ["pruned", "full"])
def test_drawn_values(
    kind: str, corpus: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run if kind == "pruned" else train(corpus, tmp_path / "run", f"loss.kind={kind}")
    loaded = load_model(run_config(folder))
    data = DataModule(run_config(folder).data)
    (cut,) = find_cuts(data.folder.cuts("test"), ["test-2"], "test")
    batch = SpeechDataset(loaded.tokenizer, stored=True, augmenter=None)[0, CutSet.from_cuts([cut])]
    search = build_search(loaded.model, DecodeConfig())
    ((hypothesis, *_),) = search_batch(loaded.model, batch, search)
    drawn = {}
    original = picture.utterance_figure

    def spy(features_TF, emissions, tracks, occupancy, bounds, alignment, **options):  # type: ignore[no-untyped-def]
        drawn.update(options, tracks=tracks, emissions=emissions, bounds=bounds)
        drawn.update(occupancy=occupancy, alignment=alignment)
        return original(features_TF, emissions, tracks, occupancy, bounds, alignment, **options)

    monkeypatch.setattr(picture, "utterance_figure", spy)
    draw_utterance(loaded.model, loaded.tokenizer, batch, hypothesis)
    assert (drawn["bounds"] is None) == (kind == "full")
    with torch.inference_mode():
        encoded, frames = loaded.model.encode(batch.features_NTF, batch.feature_lengths_N)
    targets = TargetBatch(encoded, frames, batch.targets_NU, batch.target_lengths_N)
    (path,) = align_symbols(loaded.model, targets)
    assert path is not None
    assert tuple(drawn["alignment"].frames[0].tolist()) == path.frames
    occupancy = drawn["occupancy"]
    # Every frame is left by exactly one blank, every symbol emitted exactly once.
    torch.testing.assert_close(occupancy.blank.sum(2), torch.ones(1, int(frames)))
    torch.testing.assert_close(occupancy.emit.sum((1, 2)), batch.target_lengths_N.float())
    names = [track.name for track in drawn["tracks"]]
    assert names == ["reference", "recognised"]
    assert [frame for _, frame in drawn["emissions"]] == list(hypothesis.frames)
    draw_utterance(loaded.model, loaded.tokenizer, batch, None)
    assert drawn["emissions"] == []
    short = replace(batch, feature_lengths_N=torch.tensor([3]))
    with pytest.raises(ValueError, match=r"^test-2 is too short for one encoder frame"):
        draw_utterance(loaded.model, loaded.tokenizer, short, None)
    monkeypatch.setattr(best_path, "_MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"^test-2: .* too many for one search in memory"):
        draw_utterance(loaded.model, loaded.tokenizer, batch, None)
