"""`prepare lm`: text files as people have them; texts on disk and their batches: everything once,
the same for every process, resumable.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.batch import OtherBatchesError
from pruned_rnnt.data.input.lm_texts import TextFiles, TextLoader, write_texts
from tests.data.own_corpus import prepare
from tests.data.recorded_speech import text_of, write_audio

TEXTS = [[3 + (i + k) % 5 for k in range(i % 7 + 1)] for i in range(50)] + [list(range(3, 40))]
# The time of the call would be in the name of the test.
_COMPRESSED = gzip.compress(b"go\n" * 99, mtime=0)


@pytest.fixture
def texts(tmp_path: Path) -> TextFiles:
    assert write_texts(tmp_path, "train", iter(TEXTS)) == len(TEXTS)
    return TextFiles(tmp_path, "train")


def test_batches_hold_every_text_once(texts: TextFiles) -> None:
    seen = []
    for batch in TextLoader(texts, 20, shuffle=True, seed=1):
        lengths = batch.lengths_N.tolist()
        assert batch.texts_NU.shape == (len(batch), max(lengths))
        assert len(batch) * (max(lengths) + 1) <= 20 or len(batch) == 1
        for index, row, length in zip(batch.ids, batch.texts_NU.tolist(), lengths, strict=True):
            assert row[:length] == TEXTS[index]
            assert not any(row[length:])
        seen += batch.ids
    assert sorted(seen) == list(range(len(TEXTS)))


def test_order_depends_on_seed_and_epoch(texts: TextFiles) -> None:
    def order(seed: int, epoch: int) -> list[tuple[int, ...]]:
        loader = TextLoader(texts, 20, shuffle=True, seed=seed)
        loader.set_epoch(epoch)
        return [batch.ids for batch in loader]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_processes_share_the_batches(texts: TextFiles) -> None:
    alone = [batch.ids for batch in TextLoader(texts, 20, shuffle=True)]
    shares = [
        [b.ids for b in TextLoader(texts, 20, shuffle=True, rank=rank, world_size=3)]
        for rank in range(3)
    ]
    assert len({len(share) for share in shares}) == 1
    dealt = [batch for round_ in zip(*shares, strict=True) for batch in round_]
    assert dealt[: len(alone)] == alone
    assert set(dealt) == set(alone)


def test_loader_resumes_exactly(texts: TextFiles) -> None:
    loader = TextLoader(texts, 20, shuffle=True, seed=3)
    loader.set_epoch(2)
    whole = [batch.ids for batch in loader]
    state = loader.state_dict(4)
    resumed = TextLoader(texts, 20, shuffle=True, seed=3)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert [batch.ids for batch in resumed] == whole[4:]
    assert [batch.ids for batch in resumed] == whole
    with pytest.raises(ValueError, match="world_size 2"):
        TextLoader(texts, 20, shuffle=True, seed=3, world_size=2).load_state_dict(state)


@pytest.mark.parametrize("changed", [[[9], *TEXTS[1:]], TEXTS[:-1], [*TEXTS[:-1], [3, 3]]])
def test_other_texts_do_not_continue_an_epoch(
    texts: TextFiles, changed: list[list[int]], tmp_path: Path
) -> None:
    state = TextLoader(texts, 20, shuffle=True).state_dict(4)
    write_texts(tmp_path, "changed", iter(changed))
    loader = TextLoader(TextFiles(tmp_path, "changed"), 20, shuffle=True)
    with pytest.raises(OtherBatchesError, match="after batch 4 of epoch 0: the texts have changed"):
        loader.load_state_dict(state)
    loader.load_state_dict({**state, "batches": 0})
    del state["digest"]
    loader.load_state_dict(state)


def test_batches_of_another_size_do_not_continue_an_epoch(texts: TextFiles) -> None:
    state = TextLoader(texts, 20, shuffle=True).state_dict(4)
    loader = TextLoader(texts, 10, shuffle=True)
    with pytest.raises(OtherBatchesError, match=r"batch 4 .* was 20 and is now 10"):
        loader.load_state_dict(state)
    loader.load_state_dict({**state, "batches": 0})
    del state["batch_symbols"]
    loader.load_state_dict(state)


def test_missing_and_empty_splits(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="prepare lm"):
        TextFiles(tmp_path, "train")
    assert write_texts(tmp_path, "none", []) == 0
    assert list(TextLoader(TextFiles(tmp_path, "none"), 10, shuffle=False)) == []
    assert np.load(tmp_path / "none.symbols.npy").size == 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    wav = write_audio(root / "a.wav")
    (root / "table.tsv").write_text("".join(f"{wav}\t{text_of(i)}\n" for i in range(6)))
    return prepare(root / "table.tsv", root / "own data").path


def prepare_lm(data: Path, text: Path) -> int:
    output = str(text.parent / "the lm")
    return pruned_rnnt(["prepare", "lm", str(data), "--text", str(text), "--output", output])


def test_text_with_bom_is_read_and_printed_command_is_quoted(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"\xef\xbb\xbf" + b"go\r\n\r\nstop go\r\n")
    assert prepare_lm(data, text) == 0
    shown = capsys.readouterr().out
    assert "train: 6 texts" in shown
    assert "(0 unknown)" in shown
    assert f"--config lm 'data.path={tmp_path}/the lm'" in shown
    assert len(TextFiles(tmp_path / "the lm", "train")) == 6


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.txt", "go\ncaf\u00e9\n".encode("latin-1"), "text.txt:2 is not UTF-8"),
        ("text.txt.gz", _COMPRESSED[:-9], "text.txt.gz is damaged after line "),
        ("text.txt.gz", b"go\n", "text.txt.gz is damaged after line 0"),
    ],
)
def test_error_names_damaged_text(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes,
    message: str,
) -> None:
    (tmp_path / name).write_bytes(content)
    assert prepare_lm(data, tmp_path / name) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "the lm").exists()
