"""Corpora in shards: streamed, each process its own part; Shar read by byte ranges."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lhotse import AudioSource, CutSet, MonoCut, Recording, SupervisionSegment
from rich.console import Console

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input import manifest_items, sampler
from pruned_rnnt.data.input.batch import OtherBatchesError
from pruned_rnnt.data.input.data_config import AugmentationConfig, DataConfig, SpecAugmentConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.filters import FilterConfig
from pruned_rnnt.data.input.loader import BatchLoader
from pruned_rnnt.data.input.manifest_items import item_of
from pruned_rnnt.data.input.prepared_folder import PreparedFolder, write_report
from pruned_rnnt.data.input.shar_members import with_shar_audio
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.train.inspection import show_split
from tests.data.recorded_speech import text_of, truncate, write_audio
from tests.data.shard_ranks import batches, data_of

COUNT = 50
PLAIN = AugmentationConfig(spec_augment=SpecAugmentConfig(enabled=False))


def prepare(table: Path, output: Path, *options: str) -> PreparedFolder:
    arguments = ["prepare", "own", str(table), "--output", str(output), "--tokens", "char"]
    splits = ["--dev-share", "0", "--test-share", "0", "--num-jobs", "1", "--shard-size", "7"]
    assert pruned_rnnt([*arguments, *splits, *options]) == 0
    return PreparedFolder(output)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    rows = []
    for index in range(COUNT):
        rate = 8000 if index % 5 == 0 else 16000
        write_audio(folder / f"u{index}.wav", 0.5 + 0.017 * index, rate)
        rows.append(f"u{index}.wav\t{text_of(index)}\n")
    (folder / "table.tsv").write_text("".join(rows))
    return folder / "table.tsv"


@pytest.fixture(scope="module")
def shar(table: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedFolder:
    return prepare(table, tmp_path_factory.mktemp("shar") / "out", "--shar")


def ids(made: list[list[object]]) -> list[str]:
    return [str(name) for names, _ in made for name in names]  # type: ignore[attr-defined]


def test_shar_has_the_same_features_as_a_plain_folder(
    table: Path, shar: PreparedFolder, tmp_path: Path
) -> None:
    plain = {cut.id: cut.load_features() for cut in prepare(table, tmp_path / "p").cuts("train")}
    ours = {cut.id: cut.load_features() for cut in shar.cuts("train")}
    lhotse = {cut.id: cut.load_features() for cut in CutSet.from_shar(in_dir=shar.path / "train")}
    assert ours.keys() == lhotse.keys() == plain.keys()
    assert len(plain) == COUNT
    for name, features in plain.items():
        assert np.array_equal(ours[name], lhotse[name])
        assert ours[name].shape == features.shape
        # Two formats of lossy compression.
        assert np.abs(ours[name] - features).max() < 0.1


def test_a_shard_may_have_no_usable_utterance(
    table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = table.read_text().splitlines()
    rows[7:14] = [row.partition("\t")[0] + "\t" for row in rows[7:14]]
    source = table.with_name("gap.tsv")
    source.write_text("\n".join(rows) + "\n")
    folder = prepare(source, tmp_path / "out", "--shar")
    assert len(folder.cuts("train")) == COUNT - 7
    assert [path.name for path in folder.manifests("train")][1] == "train_cuts.000002.jsonl.gz"
    assert any("train_cuts.000001.jsonl.gz is missing" in line for line in caplog.messages)


@pytest.mark.slow
def test_audio_of_a_shar(table: Path, tmp_path: Path) -> None:
    plain = prepare(table, tmp_path / "plain", "--features", "waveform")
    folder = prepare(table, tmp_path / "shar", "--features", "waveform", "--shar")
    waves = {cut.id: cut.load_audio() for cut in plain.cuts("train")}
    for cut in folder.cuts("train"):
        assert np.abs(with_shar_audio(cut).load_audio() - waves[cut.id]).max() < 1e-4
    filters = FilterConfig(subsampling_factor=1)
    features = {}
    for path in (plain.path, folder.path):
        config = DataConfig(
            path=str(path), features="waveform", speed_factors=(0.9,), num_workers=0,
            filters=filters, augmentation=PLAIN,
        )  # fmt: skip
        loader = DataModule(config).train_loader()
        features[path] = {
            name: batch.features_NTF[n, :frames].mean().item()
            for batch in loader
            for n, (name, frames) in enumerate(
                zip(batch.ids, batch.feature_lengths_N.tolist(), strict=True)
            )
        }
        assert loader.left_out == 0
    assert len(features[plain.path]) == 2 * COUNT
    assert features[folder.path] == pytest.approx(features[plain.path], abs=1e-3)
    (tar,) = sorted(folder.path.glob("train/*000007.tar"))
    truncate(tar)
    loader = DataModule(config).train_loader()
    list(loader)
    assert loader.left_out > 0


def test_shards_are_detected_and_streamed_in_another_order_each_epoch(
    shar: PreparedFolder,
) -> None:
    assert len(shar.manifests("train")) == -(-COUNT // 7)
    data = data_of(str(shar.path), 0, 0, 1)
    first, again, second = batches(data, 0), batches(data, 0), batches(data, 1)
    assert first == again != second
    all_ids = [f"{i + 1:08d}-u{i}" for i in range(COUNT)]
    assert sorted(ids(first)) == sorted(ids(second)) == all_ids
    assert batches(data, 1, after=5) == second[5:]


@pytest.mark.parametrize("world_size", [2, 3, 4, 12])
def test_processes_read_different_cuts(shar: PreparedFolder, world_size: int) -> None:
    parts = [
        [
            cut.id
            for cut in data_of(str(shar.path), 0, rank, world_size).train_loader().sampler.source
        ]
        for rank in range(world_size)
    ]
    assert Counter(name for part in parts for name in part) == Counter(
        f"{i + 1:08d}-u{i}" for i in range(COUNT)
    )
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.slow
def test_two_processes(shar: PreparedFolder, tmp_path: Path) -> None:
    script = Path(__file__).parent / "shard_ranks.py"
    command = [sys.executable, str(script)]
    running = [
        subprocess.Popen([*command, str(rank), str(shar.path), str(tmp_path)]) for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    answers = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for answer in answers:
        assert answer["whole 0"] == answer["whole 2"]
        assert answer["next 0"] == answer["next 2"]
        assert answer["resumed 0"] == answer["resumed 2"] == answer["next 0"][3:]
        assert len(answer["next 0"]) > 5
    for epoch in ("whole 0", "next 0"):
        one, other = (answer[epoch] for answer in answers)
        assert len(one) == len(other)
        assert not set(ids(one)) & set(ids(other))
        assert len(ids(one) + ids(other)) > 0.8 * COUNT
    assert ids(answers[0]["whole 0"]) != ids(answers[0]["next 0"])


def test_sharded_loading_needs_a_process_group(shar: PreparedFolder) -> None:
    loader = data_of(str(shar.path), 0, 0, 2).train_loader()
    with pytest.raises(ValueError, match=r"torch\.distributed"):
        next(iter(loader))


def test_filters_log_counts_each_epoch(
    shar: PreparedFolder, caplog: pytest.LogCaptureFixture
) -> None:
    filters = FilterConfig(min_duration=0.6, subsampling_factor=1)
    loader = DataModule(
        DataConfig(path=str(shar.path), num_workers=0, filters=filters)
    ).train_loader()
    logger = logging.getLogger("pruned_rnnt")
    propagate, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, logger="pruned_rnnt"):
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            assert len(list(loader.sampler)) > 0
    logger.propagate = propagate
    short = sum(cut.duration < 0.6 for cut in shar.cuts("train"))
    assert short > 2
    for epoch in (0, 1):
        assert any(
            f"epoch {epoch}, left out: {short} shorter than 0.6 s (0000" in message
            for message in caplog.messages
        )


def test_inspect_streams_shards(shar: PreparedFolder, capsys: pytest.CaptureFixture) -> None:
    config = DataConfig(
        path=str(shar.path), max_lattice=4321, filters=FilterConfig(min_duration=0.6)
    )
    show_split(shar, config, Console(width=200))
    shown = capsys.readouterr().out
    kept = sum(cut.duration >= 0.6 for cut in shar.cuts("train"))
    too_short = COUNT - kept
    assert f"{too_short} shorter than 0.6 s" in shown
    assert "in 8 shards" in shown
    assert "bound for a batch (data.max_lattice): 4,321" in shown
    counts = [line.split() for line in shown.partition("duration, s")[2].splitlines()]
    histogram = [int(fields[1]) for fields in counts if len(fields) > 1 and fields[0][0].isdigit()]
    utterances = int(shown.split()[1])
    assert sum(histogram[:10]) == sum(histogram[10:20]) == utterances


def write_shards(folder: Path, durations: list[list[float]]) -> Path:
    """A folder with shards of silent cuts, which exist in manifests alone."""
    folder.mkdir()
    for shard, seconds in enumerate(durations):
        cuts = [one_cut(f"s{shard}-{n}", each) for n, each in enumerate(seconds)]
        CutSet.from_cuts(cuts).to_file(folder / f"train_cuts.{shard:06d}.jsonl.gz")
    train_tokenizer(["a b"], TokenizerConfig(kind="char")).save(folder / "tokens")
    write_report(folder, {})
    return folder


def one_cut(name: str, seconds: float) -> MonoCut:
    recording = Recording(
        id=name,
        sources=[AudioSource(type="file", channels=[0], source=f"{name}.wav")],
        sampling_rate=16000,
        num_samples=round(16000 * seconds),
        duration=seconds,
    )
    text = SupervisionSegment(name, name, 0, seconds, text="a")
    return MonoCut(name, 0, seconds, 0, supervisions=[text], recording=recording)


def loader_of(folder: Path, rank: int, world_size: int, **changes: Any) -> BatchLoader:
    values = {"path": str(folder), "features": "waveform", "num_workers": 0, "max_duration": 60.0}
    return DataModule(
        DataConfig(**{**values, **changes}), rank=rank, world_size=world_size
    ).train_loader()


@pytest.mark.parametrize("longest", [20.0, 50.0])  # with 50 s, no cut of a shard can be used
def test_processes_have_as_many_batches_of_unlike_shards(longest: float, tmp_path: Path) -> None:
    """An epoch ends in all processes when it ends in one, so others would lose their data."""
    folder = write_shards(tmp_path / "data", [[2.0] * 200, [longest] * 200])
    counts = [len(list(loader_of(folder, rank, 2).sampler)) for rank in range(2)]
    assert min(counts) >= 0.9 * max(counts) > 0


def test_alternating_lines_are_spread_over_processes(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [[2.0, 20.0] * 100])
    for rank in range(2):
        source = loader_of(folder, rank, 2, lazy=True).sampler.source
        long = sum(cut.duration > 10 for cut in source)
        assert 30 < long < 70


def test_a_process_parses_its_own_lines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_shards(tmp_path / "data", [[2.0] * 20] * 4)
    source = loader_of(folder, 1, 8).sampler.source
    parsed: list[str] = []
    for module in (sampler, manifest_items):
        monkeypatch.setattr(
            module,
            "item_of",
            lambda line, *allow: parsed.append(line.text) or item_of(line, *allow),
        )
    assert len(list(source)) == 10
    assert len(parsed) == 10


def test_an_epoch_of_whole_shards_is_not_continued_by_lines(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [[2.0] * 100] * 4)
    loader = loader_of(folder, 0, 2)
    whole = [[cut.id for cut in batch] for batch in loader.sampler]
    before = {**loader.state_dict(2)}
    del before["divided_lines"]
    for state in (before, {**before, "digest": None}):  # 0.2 saved no digest
        resumed = loader_of(folder, 0, 2)
        with pytest.raises(OtherBatchesError, match=r"batch 2 of epoch 0: .* in another way") as e:
            resumed.load_state_dict(state)
        assert e.value.batches == 2
        # The place is that for --allow-changes.
        assert [cut.id for cut in next(iter(resumed.sampler))] == whole[2]
    loader_of(folder, 0, 2).load_state_dict(loader.state_dict(2))
    loader_of(folder, 0, 2).load_state_dict({**before, "batches": 0, "digest": ""})
    alone = loader_of(folder, 0, 1)
    list(alone.sampler)
    state = alone.state_dict(2)
    del state["divided_lines"]
    loader_of(folder, 0, 1).load_state_dict(state)


def test_more_processes_than_old_utterances(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [[2.0] * 50] * 2)
    old = write_shards(tmp_path / "old", [[3.0] * 2])
    used = set()
    for rank in range(4):
        source = loader_of(folder, rank, 4, old_path=str(old), old_share=0.5).sampler.source
        cuts = list(source)
        names = [cut.id for cut in cuts if cut.duration == 3.0]
        assert len(names) == len(set(names)) == 25
        used |= {name.rpartition("-")[0] if name.count("-") > 1 else name for name in names}
        source.set_epoch(0)
        assert [cut.id for cut in source] == [cut.id for cut in cuts]
    assert used == {"s0-0", "s0-1"}
