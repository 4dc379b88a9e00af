"""Which utterances of a user's own data are for training, validation and testing."""

from __future__ import annotations

import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.augmentation import derived_seed
from pruned_rnnt.data.input.filters import cut_language
from pruned_rnnt.data.prepare import splits as split_module
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.own_corpus import DuplicateIdMarker
from pruned_rnnt.data.prepare.splits import SplitPlan, plan_splits
from tests.data.own_corpus import COUNT, left_out, path_of, prepare, write_mixed_audio
from tests.data.recorded_speech import text_of


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_audio(tmp_path_factory.mktemp("audio"))


def test_given_splits_and_an_unknown_one(audio: Path, tmp_path: Path) -> None:
    names = ["train", "valid", "eval", "", "other"]
    table = tmp_path / "table.csv"
    rows = [f"{path_of(audio, i)},{text_of(i)},{names[i % 5]}\n" for i in range(10)]
    table.write_text("path,text,split\n" + "".join(rows))
    folder = prepare(table, tmp_path / "out")
    counts = {split: len(folder.cuts(split)) for split in folder.splits()}
    assert counts == {"train": 4, "dev": 2, "test": 2}
    assert left_out(folder)["table.csv:6"] == "split is none of train, dev and test"


def test_dev_is_drawn_if_the_source_has_none(audio: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    order = [*range(10), 0, 1, 2, 3]
    rows = [
        f"{path_of(audio, each)},{text_of(i)},{'test' if i > 9 else ''}\n"
        for i, each in enumerate(order)
    ]
    table.write_text("path,text,split\n" + "".join(rows))
    for share, wanted in (
        ("0.2", {"train": 8, "dev": 2, "test": 4}),
        ("0", {"train": 10, "test": 4}),
    ):
        folder = prepare(table, tmp_path / "out", "--dev-share", share, "--replace")
        assert {split: len(folder.cuts(split)) for split in folder.splits()} == wanted
        named = "splits as the source names them; 10 utterances without a split counted as train"
        report = (folder.path / "report.txt").read_text()
        assert named in report
        drawn = f"{named}; 2 recordings of train became dev, of speakers who"
        assert (drawn in report) == ("dev" in wanted)


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(1, {"train": 1}), (2, {"train": 1, "dev": 1}), (3, {"train": 1, "dev": 1, "test": 1})],
)
def test_training_comes_before_dev_and_test(
    audio: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    count: int,
    wanted: dict[str, int],
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("".join(f"{path_of(audio, i)}\t{text_of(i)}\n" for i in range(count)))
    folder = prepare(table, tmp_path / "out")
    assert {split: len(folder.cuts(split)) for split in folder.splits()} == wanted
    assert ("no dev split to validate on: set data.valid" in capsys.readouterr().out) == (
        count == 1
    )


def test_speakers_are_in_one_split(audio: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    rows = [f"{path_of(audio, i % COUNT)},{text_of(i)},s{i % 7}\n" for i in range(42)]
    table.write_text("path,text,speaker\n" + "".join(rows))
    folder = prepare(table, tmp_path / "out", "--dev-share", "0.1", "--test-share", "0.2")
    speakers = {
        split: {cut.supervisions[0].speaker for cut in folder.cuts(split)}
        for split in folder.splits()
    }
    assert sum(map(len, speakers.values())) == 7
    assert {split: len(names) for split, names in speakers.items()} == {
        "train": 4, "dev": 1, "test": 2,
    }  # fmt: skip
    assert "no speaker is in two splits" in (folder.path / "report.txt").read_text()


def test_dev_drawn_from_a_named_train_has_speakers_of_its_own(audio: Path, tmp_path: Path) -> None:
    """The test speakers stay as the source has them."""
    table = tmp_path / "table.csv"
    rows = [
        f"{path_of(audio, i % COUNT)},{text_of(i)},{'train' if i < 40 else 'test'},s{i % 10}\n"
        for i in range(45)
    ]
    table.write_text("path,text,split,speaker\n" + "".join(rows))
    folder = prepare(table, tmp_path / "out", "--dev-share", "0.1")
    speakers = {
        split: {cut.supervisions[0].speaker for cut in folder.cuts(split)}
        for split in folder.splits()
    }
    assert len(speakers["dev"]) == 1
    assert speakers["train"] == {f"s{i}" for i in range(10)} - speakers["dev"]
    assert len(folder.cuts("dev")) == 4
    assert len(folder.cuts("test")) == 5
    report = (folder.path / "report.txt").read_text()
    assert "; 1 speaker of train became dev\n" in report


def test_held_out_most_limits_dev_and_test(audio: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    rows = [f"{path_of(audio, i)}\t{text_of(i)}\n" for i in range(COUNT)]
    table.write_text("".join(rows))
    options = ["--dev-share", "0.4", "--test-share", "0.1", "--held-out-most", "3"]
    folder = prepare(table, tmp_path / "out", *options)
    counts = {split: len(folder.cuts(split)) for split in folder.splits()}
    assert counts == {"train": 8, "dev": 3, "test": 1}


def test_recordings_are_in_one_split_without_speakers(audio: Path, tmp_path: Path) -> None:
    """Readings of one file in several rows, with its path spelled in two ways."""
    table = audio / "readings.tsv"
    rows = [f"{'./' * (i % 2)}{path_of(audio, i % COUNT).name}\t{text_of(i)}\n" for i in range(48)]
    table.write_text("".join(rows))
    folder = prepare(table, tmp_path / "out", "--dev-share", "0.1", "--test-share", "0.1")
    files = [
        {Path(cut.recording.sources[0].source).name for cut in folder.cuts(split)}
        for split in ("train", "dev", "test")
    ]
    assert [len(names) for names in files] == [8, 2, 2]
    assert len(set().union(*files)) == COUNT
    assert "a recording" not in (folder.path / "report.txt").read_text()


def test_too_few_recordings_give_single_utterances(
    audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.tsv"
    rows = [f"{path_of(audio, i % 2)}\t{text_of(i)}\n" for i in range(20)]
    table.write_text("".join(rows))
    folder = prepare(table, tmp_path / "out")
    assert {split: len(folder.cuts(split)) for split in folder.splits()} == {
        "train": 18, "dev": 1, "test": 1,
    }  # fmt: skip
    said = "so may a recording, because recordings are too few or have too many utterances"
    assert said in (folder.path / "report.txt").read_text()
    assert "hint: a speaker may be in several splits, because" in capsys.readouterr().out


def test_rows_without_audio_are_not_drawn(audio: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    rows = [f"{path_of(audio, i)}\t{text_of(i)}\n" for i in range(3)]
    table.write_text("".join(rows) + "a.wav\n" * 60)
    folder = prepare(table, tmp_path / "out", "--dev-share", "0.01", "--test-share", "0.01")
    assert {split: len(folder.cuts(split)) for split in folder.splits()} == {
        "train": 1, "dev": 1, "test": 1,
    }  # fmt: skip


def test_a_test_set_alone(audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.csv"
    rows = [f"{path_of(audio, i)},{text_of(i)},{'train' if i else 'dev'}\n" for i in range(6)]
    table.write_text("path,text,split\n" + "".join(rows) + "gone.wav,what,test\n")
    trained = prepare(table, tmp_path / "trained")
    options = ["--only-test", "--tokenizer-from", str(trained.path), "--tokens", "bpe"]
    folder = prepare(table, tmp_path / "out", *options)
    assert folder.splits() == ["test"]
    assert len(folder.cuts("test")) == 6
    assert left_out(folder) == {"table.csv:8": "audio file not found"}
    assert folder.tokenizer().symbols == trained.tokenizer().symbols
    assert f"pruned-rnnt decode RUN data.path={tmp_path}/out" in capsys.readouterr().out
    assert pruned_rnnt(["prepare", "own", str(table), "--only-test"]) == 1
    assert "--only-test needs --tokenizer-from" in capsys.readouterr().err


@pytest.mark.parametrize("speakers", [0, 12])
def test_dev_and_test_have_every_language(audio: Path, tmp_path: Path, speakers: int) -> None:
    table = tmp_path / "table.tsv"
    rows = ["path\ttext\tlanguage\tspeaker"]
    for index in range(40):
        language = "de" if index < 36 else "tr"
        speaker = f"{language}{index % speakers}" if speakers else ""
        rows.append(f"{path_of(audio, index % 12)}\tyes\t{language}\t{speaker}")
    table.write_text("\n".join(rows) + "\n")
    folder = prepare(table, tmp_path / "out")
    found = {split: {cut_language(cut) for cut in folder.cuts(split)} for split in folder.splits()}
    assert found == {split: {"de", "tr"} for split in ("dev", "test", "train")}
    if speakers:
        names = [
            {cut.supervisions[0].speaker for cut in folder.cuts(split)} for split in folder.splits()
        ]
        assert sum(map(len, names)) == len(set().union(*names))


def entry_of(language: str, speaker: str, index: int, split: str = "") -> CorpusEntry:
    name = f"{language}-{speaker}-{index}"
    return CorpusEntry(id=name, origin=name, language=language, speaker=speaker, split=split)


def planned(entries: Iterable[CorpusEntry], most: int = 5000) -> SplitPlan:
    return plan_splits(entries, dev_share=0.1, test_share=0.1, max_held_out=most, seed=1)


def languages_of(plan: SplitPlan, entries: Iterable[CorpusEntry], split: str) -> set[str]:
    return {entry.language for entry in entries if plan.split_of(entry) == split}


def test_dev_and_test_are_drawn_for_languages_without() -> None:
    entries = [entry_of("th", "a", i, split) for i, split in enumerate(["train"] * 9 + ["dev"])]
    entries += [entry_of("fr", "b", i, "train") for i in range(9)]
    entries += [entry_of("ja", "c", i) for i in range(9)]
    plan = planned(entries)
    assert languages_of(plan, entries, "dev") == {"th", "fr", "ja"}
    assert languages_of(plan, entries, "test") == {"ja"}
    assert [plan.split_of(e) for e in entries[:10]] == ["train"] * 9 + ["dev"]
    drawn = "splits as the source names them; 3 recordings of train became dev and test, of"
    assert plan.describe().startswith(drawn)


def test_entries_with_a_problem_do_not_count() -> None:
    """As Kaldi segments of a whole corpus, of which only some have a text."""
    entries = [entry_of("", "", index) for index in range(20)]
    spoilt = [replace(entry_of("", "x", index), problem="not in text") for index in range(400)]
    assert planned([*entries, *spoilt]).recordings == planned(entries).recordings
    assert len(planned(entries).recordings) == 4


def test_recordings_of_one_utterance_are_drawn_by_the_seed_of_its_id() -> None:
    """The splits of earlier versions, whatever the files; these of one file move together."""
    entries = [entry_of("", "", index) for index in range(3000)]
    drawn = planned(entries)
    ranked = sorted(entries, key=lambda entry: derived_seed("split", 1, entry.id))
    wanted = {entry.id: "dev" if i < 300 else "test" for i, entry in enumerate(ranked[:600])}
    assert {entry.id: drawn.split_of(entry) for entry in ranked[:600]} == wanted
    assert Counter(map(drawn.split_of, entries)) == {"train": 2400, "dev": 300, "test": 300}
    parts = [replace(entry, audio=f"{i // 3}.wav") for i, entry in enumerate(entries)]
    together = planned(parts)
    splits: defaultdict[str, set[str | None]] = defaultdict(set)
    for entry in parts:
        splits[entry.audio].add(together.split_of(entry))
    assert all(len(names) == 1 for names in splits.values())
    assert Counter(map(together.split_of, parts)) == {"train": 2400, "dev": 300, "test": 300}


@pytest.mark.parametrize("split", ["dev", "test"])
def test_a_split_that_is_left_out_is_announced(
    audio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str
) -> None:
    table = tmp_path / "table.csv"
    splits = ["train", "dev", "test"]
    paths = [path_of(audio, 0) if name != split else "gone.wav" for name in splits * 2]
    rows = [f"{path},go,{name}\n" for path, name in zip(paths, splits * 2, strict=True)]
    table.write_text("path,text,split\n" + "".join(rows))
    folder = prepare(table, tmp_path / "out")
    assert split not in folder.splits()
    hint = f"int: the {split} split is empty: all its 2 utterances were left out"
    assert f"H{hint}" in capsys.readouterr().out
    assert f"h{hint}" in (folder.path / "report.txt").read_text()


def test_one_language_with_one_speaker_leaves_the_speakers_of_others_apart() -> None:
    entries = [entry_of("de", f"d{i % 30}", i) for i in range(300)]
    entries += [entry_of("is", "i", i) for i in range(20)]
    plan = planned(entries)
    for split in ("dev", "test"):
        assert languages_of(plan, entries, split) == {"de", "is"}
    splits: defaultdict[str, set[str | None]] = defaultdict(set)
    for entry in entries:
        splits[entry.speaker].add(plan.split_of(entry))
    assert splits.pop("i") == {"train", "dev", "test"}
    assert all(len(names) == 1 for names in splits.values())
    assert plan.describe().startswith("no speaker is in two splits of de; in other languages one")


def test_speakers_of_one_language_stay_where_the_source_has_them_in_another() -> None:
    named = [
        entry_of("en", f"s{i % 30}", i, ("train", "dev", "test")[i // 100]) for i in range(300)
    ]
    entries = [entry_of("de", f"s{i % 30}", i, "train") for i in range(300)]
    blank = [entry_of("", f"s{i % 30}", i, "train") for i in range(2)]
    plan = planned([*named, *entries, *blank])
    assert [plan.split_of(e) for e in named] == [e.split for e in named]
    assert [plan.split_of(e) for e in blank] == ["train"] * 2
    assert Counter(plan.split_of(e) for e in entries) == {"train": 270, "dev": 30}
    assert plan.describe() == "splits as the source names them; 3 speakers of train became dev"


def test_what_is_said_of_speakers_is_true_of_each_language() -> None:
    entries = [entry_of("en", f"s{i % 30}", i) for i in range(300)]
    others = [entry_of("de", f"s{i % 20 + 10}", i) for i in range(200)]
    plan = planned([*entries, *others])
    assert plan.describe() == "no speaker is in two splits of one language"
    splits: defaultdict[tuple[str, str], set[str | None]] = defaultdict(set)
    for entry in [*entries, *others]:
        splits[entry.language, entry.speaker].add(plan.split_of(entry))
    assert all(len(names) == 1 for names in splits.values())
    for own in (entries, others):
        assert {plan.split_of(entry) for entry in own} == {"train", "dev", "test"}
    untagged = [replace(entry, language="") for entry in entries]
    said = planned([*untagged, *(replace(entry, speaker="") for entry in others)]).describe()
    assert said.startswith("no speaker is in two splits of utterances without a language; in other")


@pytest.mark.parametrize("split", ["", "train"])
def test_each_language_of_a_recording_is_drawn_by_itself(split: str) -> None:
    """As interpreted calls; what one language holds out is not taken from the others."""
    entries = [
        replace(entry_of(language, "", 100 * call + i, split), audio=f"{call}.wav")
        for call in range(40)
        for language in ("de", "en", "fr", "tr")
        for i in range(5)
    ]
    plan = planned(entries)
    splits: defaultdict[tuple[str, str], set[str | None]] = defaultdict(set)
    for entry in entries:
        splits[entry.language, entry.audio].add(plan.split_of(entry))
    assert all(len(names) == 1 for names in splits.values())
    counts = Counter(map(plan.split_of, entries))
    assert counts == ({"train": 720, "dev": 80} if split else {"train": 640, "dev": 80, "test": 80})
    said = "; each language of a recording is drawn by itself"
    assert plan.describe().endswith(said)
    assert said not in planned([replace(entry, language="") for entry in entries]).describe()


def test_a_large_recording_leaves_its_place_to_others() -> None:
    """Its best utterance is nearly always among the first."""
    large = [replace(entry_of("", "", i), audio="large.wav") for i in range(15)]
    plan = planned([*large, *(entry_of("", "small", i) for i in range(15))])
    assert Counter(plan.recordings.values()) == {"dev": 3, "test": 3}
    assert {plan.split_of(entry) for entry in large} == {"train"}


def test_why_a_speaker_may_be_in_two_splits_is_said_once() -> None:
    entries = [entry_of("de", "", i, "train") for i in range(20)]
    entries += [replace(entry_of("tr", "", i, "train"), audio="a.wav") for i in range(20)]
    said = planned(entries).describe()
    drawn = "; 2 recordings of train became dev; 2 utterances of train became dev, of speakers who"
    assert drawn in said
    assert said.count("because speakers are unknown") == 1


def test_memory_holds_eight_bytes_per_utterance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "_MORE_CANDIDATES", 10)

    class Source:
        def __iter__(self) -> Iterator[CorpusEntry]:
            return (entry_of("", "", i) for i in range(20_000))

    tracemalloc.start()
    planned(DuplicateIdMarker(Source()), most=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * 20_000


def test_held_out_most_limits_speakers_too() -> None:
    entries = [entry_of("", f"s{i % 20}", i) for i in range(2000)]
    plan = planned(entries, most=10)
    counts = Counter(plan.split_of(entry) for entry in entries)
    assert counts == {"train": 1980, "dev": 10, "test": 10}
    assert "with too many utterances to hold some out" in plan.describe()


def test_many_languages_are_read_twice() -> None:
    passes = 0

    class Source:
        def __iter__(self) -> Iterator[CorpusEntry]:
            nonlocal passes
            passes += 1
            return (entry_of(f"l{i % 20}", "", i) for i in range(400))

    plan = planned(Source())
    assert passes == 2
    counts = Counter(plan.split_of(entry) for entry in Source())
    assert counts == {"train": 320, "dev": 40, "test": 40}
