"""Quotation marks in tables with tabs, Common Voice's folders, and columns of languages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.filters import LONGEST_SECONDS, FilterConfig, cut_language
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry, UtteranceLimits
from pruned_rnnt.data.prepare.own_sources import open_source, unread_columns
from tests.data.own_corpus import all_texts, prepare
from tests.data.recorded_speech import write_audio

# As Common Voice writes it: cells with quotation marks are enclosed.
QUOTED = 'b.mp3\t"Popov ""Neden?"" diye soruyor."\ttr'


def entries_of(path: Path) -> list[CorpusEntry]:
    return list(open_source(path)[1])


def texts_of(folder: Path, *rows: str, name: str = "table.tsv") -> list[str]:
    table = folder / name
    table.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return [entry.text for entry in entries_of(table)]


HEADER = "path\tsentence\tlocale"


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        # A doubled mark says that the table is written with quotes.
        ([HEADER, "a.mp3\tMerhaba\ttr", QUOTED], ["Merhaba", 'Popov "Neden?" diye soruyor.']),
        ([HEADER, QUOTED, 'c.mp3\tal "so\ttr'], ['Popov "Neden?" diye soruyor.', 'al "so']),
        ([HEADER, QUOTED, 'c.mp3\t"al\tso"\ttr'], ['Popov "Neden?" diye soruyor.', "al\tso"]),
        ([HEADER, 'a.mp3\t"one"\ttr', 'b.mp3\t"two"\ttr'], ["one", "two"]),
        (['"path"\t"text"', '"a.mp3"\t"one"'], ["one"]),
        (['"a.wav"\t"he said ""go"""', '"b.wav"\t"stop"'], ['he said "go"', "stop"]),
        # One cell that does not fit says that it is not.
        (
            [HEADER, QUOTED, 'c.mp3\t"No" he said\ttr'],
            ['"Popov ""Neden?"" diye soruyor."', '"No" he said'],
        ),
        ([HEADER, QUOTED, 'c.mp3\t"open\ttr'], ['"Popov ""Neden?"" diye soruyor."', '"open']),
        # Without a doubled mark they are marks of the text.
        ([HEADER, 'a.mp3\t"Stop!"\ten', "b.mp3\tgo\ten"], ['"Stop!"', "go"]),
        ([HEADER, 'a.mp3\tsay ""x"" now\ten'], ['say ""x"" now']),
        # So does a line break inside marks.
        ([HEADER, 'a.mp3\t"two\n\nlines"\ten', "b.mp3\tgo\ten"], ["two\n\nlines", "go"]),
        (["path\ttext", 'a.mp3\t"two\nlines"', 'b.mp3\t"""x"""'], ["two\nlines", '"x"']),
        # Marks of several texts enclose whole rows, which have all cells.
        ([HEADER, 'a.mp3\t"go\ten', 'b.mp3\tnow"\ten'], ['"go', 'now"']),
        (["path\ttext", 'a.mp3\t"go', "b.mp3\ton", "", 'c.mp3\tnow"'], ['"go', "on", 'now"']),
    ],
)
def test_quotation_marks_in_a_table_with_tabs(
    tmp_path: Path, rows: list[str], texts: list[str]
) -> None:
    assert texts_of(tmp_path, *rows) == texts


@pytest.mark.parametrize(
    "other", ['c.mp3\t"No" he said\ten', 'c.mp3\t"open\ten\nd.mp3\tclosed"\ten']
)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_line_break_in_a_table_without_matching_quotation_marks_is_an_error(
    tmp_path: Path, other: str, is_first: bool
) -> None:
    rows = [HEADER, 'a.mp3\t"two\nlines"\ten', other]
    lines = (2, 4)
    if is_first:
        rows[1:] = rows[:0:-1]
        lines = (3 + other.count("\n"), 2)
    message = r"table\.tsv:{}: a text in quotation marks has a line break, .* of line {} do not"
    with pytest.raises(ValueError, match=message.format(*lines)):
        texts_of(tmp_path, *rows)
    # The names of the columns need only the first row.
    assert unread_columns(open_source(tmp_path / "table.tsv")[1]) == []


@pytest.mark.parametrize("text", ['"Hello', '"Hello" you', '"Hello"'])
def test_first_text_with_a_quotation_mark_keeps_speaker_and_split(
    tmp_path: Path, text: str
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text(f"a.wav\t{text}\tanna\ttrain\nb.wav\tgo\tben\tdev\n")
    assert [(e.text, e.speaker, e.split) for e in entries_of(table)] == [
        (text, "anna", "train"),
        ("go", "ben", "dev"),
    ]


def test_a_fifth_column_without_a_name_is_no_language(tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("a.wav\tone\tanna\ttrain\tnoise\n")
    assert [e.language for e in entries_of(table)] == [""]


def write_language(folder: Path, language: str, tables: dict[str, list[str]]) -> Path:
    """A language in Common Voice's layout: texts by table."""
    clips = folder / language / "clips"
    for table, texts in tables.items():
        rows = ["client_id\tpath\tsentence\tlocale"]
        for index, text in enumerate(texts):
            name = f"common_voice_{language}_{table}{index}.mp3"
            write_audio(clips / name, 1.0 + 0.01 * index)
            rows.append(f"{table}{index}\t{name}\t{text}\t{language}")
        (clips.parent / f"{table}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / language


TURKISH = ["ISPARTA \u0130yi", QUOTED.split("\t")[1], "g\u00fcnler"]


@pytest.mark.parametrize("source", ["tr", "tr/validated.tsv", ""])
def test_common_voice_layout(tmp_path: Path, source: str) -> None:
    write_language(tmp_path / "cv", "tr", {"validated": TURKISH, "other": ["not this"]})
    (tmp_path / "cv" / "notes").mkdir()
    options = ["--case", "lower", "--punctuation", "remove"]
    folder = prepare(tmp_path / "cv" / source, tmp_path / "out", *options)
    assert sorted(all_texts(folder).values()) == [
        "g\u00fcnler",
        "popov neden diye soruyor",
        "\u0131sparta iyi",
    ]
    assert {cut_language(cut) for split in folder.splits() for cut in folder.cuts(split)} == {"tr"}


def test_validated_clips_of_dev_and_test_are_not_trained_on(tmp_path: Path) -> None:
    folder = write_language(tmp_path, "ja", {"dev": ["a"], "test": ["b"], "validated": ["c"]})
    lines = [(folder / f"{name}.tsv").read_text().splitlines() for name in ("dev", "test")]
    with (folder / "validated.tsv").open("a") as file:
        file.writelines(f"{row}\n" for _, *rows in lines for row in rows)
    found = {(entry.text, entry.split) for entry in entries_of(folder)}
    assert found == {("a", "dev"), ("b", "test"), ("c", "train")}


def test_a_language_whose_table_is_not_recognised_is_an_error(tmp_path: Path) -> None:
    for language in ("ar", "fr"):
        write_language(tmp_path, language, {"validated": ["a"]})
    (tmp_path / "fr/validated.tsv").rename(tmp_path / "fr/other.tsv")
    with pytest.raises(
        ValueError, match=r"/fr next to languages of Common Voice: needs train\.tsv"
    ):
        entries_of(tmp_path)


def test_common_voice_splits_of_several_languages(tmp_path: Path) -> None:
    write_language(tmp_path, "de", {"train": ["ja", "nein"], "dev": ["ja"], "test": ["nein"]})
    write_language(tmp_path, "th", {"train": ["\u0e01\u0e33"], "validated": ["\u0e01"]})
    out = tmp_path / "out"
    folder = prepare(tmp_path, out, "--language-tags")
    found = {split: [cut_language(cut) for cut in folder.cuts(split)] for split in folder.splits()}
    assert found == {"dev": ["de"], "test": ["de"], "train": ["de", "de", "th"]}
    assert list(folder.tokenizer().languages) == ["de", "th"]
    splits = folder.report()["splits"]
    assert splits["train"]["languages"] == {"de": 2, "th": 1}
    assert "languages: 4 de, 1 th" in (out / "report.txt").read_text(encoding="utf-8")


def test_recipe_reads_quoted_tables(tmp_path: Path) -> None:
    write_language(tmp_path, "tr", {"validated": TURKISH})
    arguments = ["--source", str(tmp_path), "--language", "tr", "--output", str(tmp_path / "out")]
    assert pruned_rnnt(["prepare", "commonvoice", *arguments, "--features", "waveform"]) == 0
    texts = all_texts(PreparedFolder(tmp_path / "out")).values()
    assert "popov neden diye soruyor" in texts
    assert "\u0131sparta iyi" in texts


def test_languages_of_other_formats(tmp_path: Path) -> None:
    audio = write_audio(tmp_path / "a.wav")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"audio_filepath": str(audio), "text": "a", "lang": "tr"}) + "\n")
    assert [e.language for e in entries_of(lines)] == ["tr"]
    kaldi = tmp_path / "kaldi"
    kaldi.mkdir()
    (kaldi / "wav.scp").write_text(f"u {audio}\n")
    (kaldi / "text").write_text("u hello\n")
    (kaldi / "utt2lang").write_text("u en\n")
    assert [e.language for e in entries_of(kaldi)] == ["en"]
    folder = prepare(kaldi, tmp_path / "out", "--dev-share", "0", "--test-share", "0")
    manifest = folder.path / "train_cuts.jsonl.gz"
    assert [e.language for e in entries_of(manifest)] == ["en"]


def test_language_option_and_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audio = write_audio(tmp_path / "a.wav")
    table = tmp_path / "table.tsv"
    table.write_text(f"path\ttext\tlanguage\n{audio}\tIS\t\n{audio}\tIS\tde\n{audio}\tx\t<a>\n")
    none = ["--dev-share", "0", "--test-share", "0"]
    folder = prepare(table, tmp_path / "out", "--language", "tr", "--case", "lower", *none)
    assert list(all_texts(folder).values()) == ["\u0131s", "is"]
    assert "1 language is no code" in (folder.path / "report.txt").read_text()
    table.write_text(f"{audio}\tIS\n")
    arguments = ["prepare", "own", str(table), "--output", str(tmp_path / "out2"), *none]
    capsys.readouterr()
    assert pruned_rnnt([*arguments, "--language-tags"]) == 1
    assert "--language-tags needs the languages of the utterances" in capsys.readouterr().err
    assert pruned_rnnt([*arguments, "--language", "a|b"]) == 1
    assert "language must be a code like tr" in capsys.readouterr().err


def table_of(rows: list[tuple[str, str]], folder: Path) -> Path:
    """A table of texts and splits, all of one audio file."""
    audio = write_audio(folder / "a.wav")
    table = folder / "table.tsv"
    table.write_text("".join(f"{audio}\t{text}\t\t{split}\n" for text, split in rows))
    return table


def test_words_without_a_token_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = table_of([("go on", "train"), ("no go no", "dev"), ("on", "test")], tmp_path)
    folder = prepare(table, tmp_path / "out", "--tokens", "word")
    hint = "dev has 1 word without a token (no 2), 2 in all, each of which counts as an error"
    shown = capsys.readouterr().out
    assert f"Hint: {hint}; --tokens unigram, bpe or char" in shown
    assert "Hint: test" not in shown
    assert folder.report()["splits"]["dev"]["unknown_words"] == {"no": 2}
    assert (
        "dev has words that the tokenizer lacks: 2 no" in (folder.path / "report.txt").read_text()
    )
    options = ["--only-test", "--tokenizer-from", str(folder.path)]
    copied = prepare(table, tmp_path / "copied", *options)
    assert copied.report()["splits"]["test"]["unknown_words"] == {"no": 2}


def test_characters_without_a_token_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("abc", "train"), ("ab \u9f98x\u9f98", "dev"), ("c\u0e33", "test")]
    table = table_of(rows, tmp_path)
    folder = prepare(table, tmp_path / "out")
    shown = capsys.readouterr().out
    assert "Hint: dev has 2 characters without a token (\u9f98 2, x 1), 3 in all" in shown
    assert "Hint: test has 1 character without a token (\u0e33 1), 1 in all" in shown
    splits = folder.report()["splits"]
    assert splits["dev"]["unknown_characters"] == {"\u9f98": 2, "x": 1}
    assert "unknown_characters" not in splits["train"]
    copied = tmp_path / "copied"
    prepare(table, copied, "--only-test", "--tokenizer-from", str(folder.path))
    shown = capsys.readouterr().out
    assert "Hint: test has 3 characters without a token" in shown
    assert "--byte-fallback" not in shown
    assert "were prepared with" not in shown
    options = ["--only-test", "--tokenizer-from", str(folder.path)]
    prepare(table, tmp_path / "upper", *options, "--case", "upper")
    expected = f"the texts of {folder.path} were prepared with --case keep --punctuation keep"
    assert expected in capsys.readouterr().out
    assert pruned_rnnt(["prepare", "own", str(table), *options, "--byte-fallback"]) == 1
    assert "--byte-fallback needs a new tokenizer" in capsys.readouterr().err
    prepare(table, tmp_path / "bytes", "--byte-fallback")
    assert "without a token" not in capsys.readouterr().out


def test_pieces_of_many_characters_have_a_default_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audio = write_audio(tmp_path / "a.wav")
    table = tmp_path / "table.tsv"
    texts = ("".join(chr(0x4E00 + 60 * row + i) for i in range(60)) for row in range(10))
    table.write_text("".join(f"{audio}\t{text}\t\ttrain\n" for text in texts), encoding="utf-8")
    none = ["--dev-share", "0", "--test-share", "0", "--tokens", "bpe"]
    assert len(prepare(table, tmp_path / "out", *none).tokenizer()) > 600
    shown = capsys.readouterr().out
    assert "Hint: texts have 600 different characters, so --tokens bpe has " in shown
    arguments = ["prepare", "own", str(table), "--output", str(tmp_path / "small"), *none]
    assert pruned_rnnt([*arguments, "--vocab-size", "500"]) == 1
    error = capsys.readouterr().err
    assert "vocab_size must be at least 604" in error
    assert "add --byte-fallback" in error
    folder = prepare(table, tmp_path / "bytes", *none, "--vocab-size", "500", "--byte-fallback")
    assert len(folder.tokenizer()) <= 500


def test_prepare_and_training_have_one_limit() -> None:
    assert UtteranceLimits().max_duration == FilterConfig().max_duration == LONGEST_SECONDS
