"""A run of a model with durations through all commands."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from lhotse import CutSet

from pruned_rnnt.cli import main
from pruned_rnnt.decode.build_search import build_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.run import load_model, run_config
from tests.tiny_corpus import trained_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ["loss.durations=[0,1,2,3,4]", "loss.sigma=0.02", "loss.omega=0.1"]
    settings += ["train.steps=150", "train.validate_every=75", "loss.warm_up_steps=40"]
    settings += ["optimiser.learning_rate=0.01", "loss.ctc_scale=0", "train.log_every=10"]
    return trained_run(corpus, tmp_path_factory.mktemp("exp") / "run", *settings)


def test_validation_logs_losses_and_masses(run: Path) -> None:
    lines = [line for line in read_metrics(run) if line["group"] == "valid"]
    assert {"simple", "pruned", "wer", "retained_mass", "band_edge_mass"} <= set(lines[-1])
    assert 0.9 < lines[-1]["retained_mass"] <= 1.0 + 1e-6
    assert lines[-1]["pruned"] < lines[0]["pruned"]
    assert lines[-1]["wer"] < 0.5


@pytest.mark.parametrize("method", ["greedy", "modified_beam"])
def test_decoding_writes_times_that_durations_bound(run: Path, method: str) -> None:
    settings = [f"decode.method={method}", "decode.num_best=1"]
    assert main(["decode", str(run), *settings]) == 0
    (path,) = (run / "results").glob(f"nbest-test-{method}*.jsonl")
    lengths = []
    for line in path.read_text(encoding="utf-8").splitlines():
        (found,) = json.loads(line)["hypotheses"]
        tokens = found["tokens"]
        assert found["text"].split() == [word["word"] for word in found["words"]]
        lengths += [round((token["end"] - token["start"]) / 0.04) for token in tokens]
        for token, following in itertools.pairwise(tokens):
            assert token["end"] <= following["start"] + 1e-6
    assert max(lengths) > 1


def test_pictures_and_alignments(run: Path, tmp_path: Path) -> None:
    assert main(["decode", str(run), "--plot", "test-1"]) == 0
    assert list((run / "results/plots").glob("test-1-greedy-*.png"))
    command = ["align", str(run), "--split", "test", "--format", "ctm", "--output", str(tmp_path)]
    assert main(command) == 0
    words = (tmp_path / "test-words.ctm").read_text(encoding="utf-8").split("\n")
    assert len({line.split()[0] for line in words if line}) == 6


def test_model_file_decodes_as_the_run(run: Path, corpus: Path, tmp_path: Path) -> None:
    import pruned_rnnt

    assert main(["export", str(run), "--format", "torch", "--output", str(tmp_path)]) == 0
    model = load_model(run_config(run)).model
    recogniser = pruned_rnnt.load(tmp_path)
    joiner = torch.export.load(tmp_path / "joiner.pt2").module()
    assert recogniser.model.loss_config.durations == (0, 1, 2, 3, 4)
    right = 0
    for cut in CutSet.from_file(corpus / "test_cuts.jsonl.gz").with_features_path_prefix(corpus):
        features_TF = torch.from_numpy(cut.load_features())
        with torch.inference_mode():
            encoded = model.eval().encode(features_TF[None], torch.tensor([len(features_TF)]))
            am_TD = model.joiner.encoder_proj(encoded[0])[0]
            inputs = am_TD, torch.zeros_like(am_TD)
            for one, other in zip(
                joiner(*inputs), model.joiner.with_durations(*inputs), strict=True
            ):
                torch.testing.assert_close(one, other)
        ((wanted,),) = build_search(model, DecodeConfig())(*encoded)
        ((found,),) = build_search(recogniser.model, DecodeConfig())(*encoded)
        assert (found.symbols, found.frames) == (wanted.symbols, wanted.frames)
        assert (found.durations, found.score) == (wanted.durations, wanted.score)
        right += recogniser.transcribe_features(features_TF).text == cut.supervisions[0].text
    assert right >= 4
