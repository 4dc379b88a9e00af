"""Buckets, the usual longest duration and that beside a model come from the whole training split,
not from its start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lhotse import AudioSource, CutSet, MonoCut, Recording, SupervisionSegment

from pruned_rnnt.data.input import datamodule
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule, p99_duration
from pruned_rnnt.data.input.prepared_folder import write_report
from pruned_rnnt.data.input.sampler import duration_bins
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.train.engine.run_files import (
    read_p99_duration,
    save_p99_duration,
)

# As recipes write them that append one corpus to another.
DURATIONS = [1.0] * 30 + [12.0] * 15
MEASURED = 10


def cut(index: int, duration: float) -> MonoCut:
    source = AudioSource(type="file", channels=[0], source=f"{index}.wav")
    name, samples = f"u{index}", int(16000 * duration)
    recording = Recording(
        id=name, sources=[source], sampling_rate=16000, num_samples=samples, duration=duration
    )
    text = SupervisionSegment(id=name, recording_id=name, start=0, duration=duration, text="a")
    return MonoCut(
        id=name,
        start=0,
        duration=duration,
        channel=0,
        supervisions=[text],
        recording=recording,
    )


@pytest.fixture(params=["in memory", "lazy", "shards"])
def config(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> DataConfig:
    monkeypatch.setattr(datamodule, "_MEASURED_CUTS", MEASURED)
    cuts = [cut(index, duration) for index, duration in enumerate(DURATIONS)]
    if request.param == "shards":
        for shard in range(9):
            part = CutSet.from_cuts(cuts[5 * shard : 5 * shard + 5])
            part.to_file(tmp_path / f"train_cuts.{shard:06d}.jsonl.gz")
    else:
        CutSet.from_cuts(cuts).to_file(tmp_path / "train_cuts.jsonl.gz")
    train_tokenizer(["a b"], TokenizerConfig(kind="char")).save(tmp_path / "tokens")
    write_report(tmp_path, {})
    return DataConfig(
        path=str(tmp_path),
        features="waveform",
        lazy=request.param == "lazy",
        num_workers=0,
        max_duration=24.0,
        num_buckets=4,
    )


def test_the_whole_split_is_measured(config: DataConfig) -> None:
    data = DataModule(config)
    bins = data.train_loader().sampler.duration_bins
    assert data.p99_duration == 12.0
    assert bins[-1] == 12.0


def test_a_run_keeps_its_buckets(config: DataConfig) -> None:
    loader = DataModule(config).train_loader()
    state = loader.state_dict(2)
    own = loader.sampler.duration_bins
    other = {**state, "duration_bins": [2.0, 5.0]}
    before = {key: value for key, value in state.items() if key != "duration_bins"}
    first = duration_bins([cut(0, 1.0)] * MEASURED, 4)
    assert first != own
    # Earlier versions saved no buckets, and measured the first cuts.
    for saved, wanted in ((state, own), (other, [2.0, 5.0]), (before, first)):
        continued = DataModule(config).train_loader()
        continued.load_state_dict(saved)
        assert continued.sampler.duration_bins == wanted
        assert next(iter(continued.sampler)) is not None


def test_a_sample_without_usable_cuts(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datamodule.ManifestShards, "spread", lambda self, most: iter(()))
    data = DataModule(config)
    data.train_loader()
    assert data.p99_duration in DURATIONS


def test_p99_ignores_a_few_long_utterances(tmp_path) -> None:
    seconds = p99_duration([2.0] * 99 + [5.0] * 100 + [400.0])
    assert seconds == 5.0
    assert read_p99_duration(tmp_path) is None
    save_p99_duration(tmp_path, seconds)
    assert read_p99_duration(tmp_path) == 5.0


@pytest.mark.parametrize("text", ["", "{", "[3]", "{}", '{"usual_longest_seconds": "long"}'])
def test_error_names_damaged_file(tmp_path, text: str) -> None:
    path = tmp_path / "utterances.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"utterances\.json is damaged"):
        read_p99_duration(tmp_path)
