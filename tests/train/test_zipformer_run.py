"""All commands with a Zipformer: train, continue, decode with other chunks, average, stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.model.zipformer import Zipformer
from pruned_rnnt.train.run import load_model, run_config
from tests.tiny_corpus import ZIPFORMER, make_corpus, tiny_overrides

pytestmark = pytest.mark.slow

TINY = [
    "model.encoder.kind=zipformer",
    "model.encoder.causal=true",
    *ZIPFORMER,
    "model.encoder.chunk_sizes=[8,16]",
    "model.encoder.left_contexts=[16,32]",
    "model.encoder.chunk_size=8",
    "model.encoder.left_context=16",
    "optimiser.name=scaled_adam",
    "optimiser.learning_rate=0.045",
    "schedule.kind=eden",
]


def overrides(corpus: Path, folder: Path, *more: str) -> list[str]:
    of_conformer = "model.encoder."
    kept = [item for item in tiny_overrides(corpus, folder) if not item.startswith(of_conformer)]
    return [*kept, *TINY, "train.save_every=1", *more]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), train=12, dev=3)


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exp") / "run"
    assert main(["train", *overrides(corpus, folder, "train.steps=3")]) == 0
    return folder


def checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    path = folder / f"checkpoints/step-{step:08d}.pt"
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["model"]
    return state


def test_continued_run_equals_an_uninterrupted_one(run: Path, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    # The schedule of the learning rate does not depend on train.steps.
    assert main(["train", *overrides(corpus, folder, "train.steps=2")]) == 0
    more = ["train.steps=3", "--allow-changes"]
    assert main(["train", *overrides(corpus, folder, *more)]) == 0
    expected = checkpoint(run, 3)
    for name, value in checkpoint(folder, 3).items():
        assert torch.equal(value, expected[name]), name


def test_decode_with_other_chunks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {}
    for chunk, left in ((0, 0), (4, 8), (8, 8), (16, 16)):
        config = run_config(run, [f"decode.chunk={chunk}", f"decode.left={left}"])
        loaded = load_model(config)
        batch = next(iter(DataModule(config.data).test_loader("test")))
        encoded, _ = loaded.model.encode(batch.features_NTF, batch.feature_lengths_N)
        scores[chunk] = float(encoded.detach().double().square().sum())
    assert scores[0] == scores[4]
    assert len(set(scores.values())) == 3
    assert main(["decode", str(run), "decode.chunk=8"]) == 0
    assert "WER" in capsys.readouterr().out
    assert main(["decode", str(run), "decode.left=3"]) == 1
    assert "decode.chunk and decode.left: chunk is 4 and left is 3" in capsys.readouterr().err


def test_average_then_decode(run: Path) -> None:
    assert main(["average", str(run), "--last", "2"]) == 0
    assert main(["decode", str(run), f"decode.checkpoint={run / 'average-last-2.pt'}"]) == 0


def test_streaming_a_batch_equals_streaming_each_utterance(run: Path) -> None:
    config = run_config(run)
    model = load_model(config).model
    assert isinstance(model.encoder, Zipformer)
    batch = next(iter(DataModule(config.data).test_loader("test")))
    stream = StreamDecoder(model, new_greedy_search(model), *model.encoder.config.stream_sizes)
    together = stream.recognise(batch.features_NTF, batch.feature_lengths_N)
    for n, length in enumerate(batch.feature_lengths_N.tolist()):
        (alone,) = stream.recognise(
            batch.features_NTF[n : n + 1, :length], batch.feature_lengths_N[n : n + 1]
        )
        assert (alone.symbols, alone.frames) == (together[n].symbols, together[n].frames)
        assert alone.score == pytest.approx(together[n].score, rel=1e-4, abs=1e-4)
