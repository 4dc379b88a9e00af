"""Folders with a `.nemo` archive, as `pruned-rnnt export --format nemo` and the hub have them."""

from __future__ import annotations

from pathlib import Path

import pytest

import pruned_rnnt
from pruned_rnnt.finetune.source import load_source
from pruned_rnnt.pretrained.found_model import NoModelError, find_model
from pruned_rnnt.train.experiment import FinetuneConfig
from tests.interop.parakeet_models import audio
from tests.interop.test_parakeet import written


def test_the_archive_of_a_folder_is_loaded(tmp_path: Path) -> None:
    archive = written("nemo_ctc", tmp_path)
    (tmp_path / "README.md").touch()
    texts = [
        [found.text for found in pruned_rnnt.load(path).transcribe(audio())]
        for path in (archive, tmp_path)
    ]
    assert texts[0] == texts[1]
    assert any(texts[0])


def test_a_source_in_the_cache_of_the_hub_has_the_name_of_its_archive(tmp_path: Path) -> None:
    """Files there are links to others, whose names are digests."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    blob = written("nemo_ctc", tmp_path).rename(tmp_path / "0123abcd")
    (folder / "parakeet.nemo").symlink_to(blob)
    assert load_source(folder, FinetuneConfig()).name == "parakeet"


def test_a_folder_of_transformers_keeps_its_whole_name(tmp_path: Path) -> None:
    """0.6b and 0.8b would share the folder of a run if what follows the dot were left out."""
    folder = tmp_path / "parakeet-0.6b"
    folder.mkdir()
    written("transformers_ctc", folder)
    assert load_source(folder, FinetuneConfig()).name == "parakeet-0.6b"


def test_which_model_of_a_folder_is_found(tmp_path: Path) -> None:
    with pytest.raises(NoModelError, match=r"a \.nemo archive, or config\.json of transformers"):
        find_model(tmp_path)
    (tmp_path / "config.json").touch()
    assert find_model(tmp_path).path == tmp_path
    (tmp_path / "a.nemo").touch()
    found = find_model(tmp_path)
    assert (found.kind, found.path) == ("nemo", tmp_path / "a.nemo")
    (tmp_path / "b.nemo").touch()
    with pytest.raises(NoModelError, match=r"several \.nemo archives \(a\.nemo, b\.nemo\): pass"):
        find_model(tmp_path)
    # The same model for transformers.
    (tmp_path / "model.safetensors").touch()
    assert find_model(tmp_path).path == tmp_path
