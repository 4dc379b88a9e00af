"""Golden test of the whole training loop: the losses of each step equal recorded ones.

After an intended change: delete `loss_curve.json`, run this test, which writes the file and fails,
and check the difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_corpus import make_corpus, speech_trainer, tiny_experiment
from tests.train.run_files import losses_of

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parent / "loss_curve.json"
# The largest difference between compiled and fallback kernels on one machine was 1e-6; other
# processors sum in other orders.
TOLERANCE = 2e-3


@pytest.mark.parametrize("optimiser", ["adamw", "scaled_adam"])
def test_losses_equal_the_recorded_ones(tmp_path: Path, optimiser: str) -> None:
    config = tiny_experiment(
        make_corpus(tmp_path / "corpus"),
        tmp_path / "run",
        "train.steps=40",
        "train.accumulate=2",
        "train.validate_every=100",
        "train.seed=7",
        "model.encoder.dropout=0.0",
        f"optimiser.name={optimiser}",
        f"optimiser.learning_rate={0.01 if optimiser == 'adamw' else 0.045}",
        f"schedule.kind={'cosine' if optimiser == 'adamw' else 'eden'}",
    )
    speech_trainer(config).run()
    losses = [round(loss, 6) for _, loss in losses_of(config.folder)]
    recorded = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    if optimiser not in recorded:
        RECORDED.write_text(json.dumps({**recorded, optimiser: losses}, indent=1) + "\n")
        pytest.fail(f"recorded new losses in {RECORDED}")
    assert losses == pytest.approx(recorded[optimiser], abs=TOLERANCE)
    assert losses[-1] < 0.5 * losses[0]
