"""The script that times a Zipformer, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.transducer_model import ModelConfig, TransducerModel
from scripts.zipformer_step import measure, parse
from tests.tiny_models import tiny_zipformer

CONFIG = ModelConfig(
    encoder=tiny_zipformer(causal=False), predictor=PredictorConfig(dim=8), joiner_dim=8
)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rows(precision: str, tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.npz"
    lengths = np.array([30, 12, 25, 26, 27], dtype=np.int16)
    np.savez(shapes, frames=lengths, tokens=lengths // 5)
    sizes = ["--seconds", "2.2", "--batch", "3", "--repeats", "1", "--precision", precision]
    options = parse(["--shapes", str(shapes), *sizes])
    rows = measure(TransducerModel(CONFIG, 20), options)
    assert json.loads(json.dumps(rows)) == rows
    train, greedy = rows
    # 26 and 27 frames make 2.12 seconds, with 30 they would be too many.
    assert (train["row"], train["utterances"], train["longest_frames"]) == ("train", 2, 27)
    assert train["precision"] == precision
    assert train["losses_ms"] > 0
    assert train["losses_share"] == pytest.approx(train["losses_ms"] / train["step_ms"])
    assert (greedy["row"], greedy["utterances"]) == ("greedy", 3)
    assert greedy["audio_seconds"] == pytest.approx((26 + 27 + 30 + 3 * 1.25) * 0.04)
