"""The model file of an encoder that reads samples can be fine-tuned."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from pruned_rnnt.finetune.source import load_source
from pruned_rnnt.train.experiment import FinetuneConfig
from tests.model.tiny_pretrained import tiny_pretrained
from tests.pretrained.saved_models import make_tokenizer, save_file
from tests.tiny_models import tiny_model


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_a_model_file_that_reads_samples_has_no_spec_augment(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    model = tiny_model(tiny_pretrained("wav2vec2-layer"), len(tokenizer))
    save_file(tmp_path / "samples", model, tokenizer)
    data = load_source(tmp_path / "samples", FinetuneConfig()).config.data
    assert data.features == "waveform"
    assert not data.augmentation.spec_augment.enabled


def test_a_model_file_that_reads_energies_has_spec_augment(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    save_file(tmp_path / "energies", tiny_model(vocab_size=len(tokenizer)), tokenizer)
    data = load_source(tmp_path / "energies", FinetuneConfig()).config.data
    assert data.augmentation.spec_augment.enabled
