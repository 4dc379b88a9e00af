"""Texts of every script in the page: units, directions, languages; and very long words."""

from __future__ import annotations

import base64
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.decode.scoring.error_statistics import align_words
from pruned_rnnt.diagnostics.labels import drawn_by_browser, isolated, printable
from pruned_rnnt.diagnostics.utterance_figure import spectrogram_figure
from pruned_rnnt.report.clips import picture_clip
from pruned_rnnt.report.report_command import make_report
from tests.report import run_folders as runs

BETWEEN = "\u200b"
PERSIAN = "\u0645\u0627\u062c\u0631\u0627\u06cc \u0635\u0628\u062d \u0631\u0648\u0632"
THAI = "\u0e19\u0e49\u0e33\u0e43\u0e19\u0e17\u0e35\u0e48"


def report(run: Path) -> runs.Element:
    return runs.parse(make_report(run, options=runs.NO_MEDIA).html)


@pytest.mark.slow
def test_set_of_characters_shows_words_where_a_script_has_them(run: Path) -> None:
    persian = runs.transcript("fa", PERSIAN, PERSIAN.replace("\u0635\u0628\u062d", "\u0635\u0628"))
    thai = runs.transcript("th", THAI, THAI.replace("\u0e49\u0e33", "\u0e32"))
    runs.write_decoded(run, [persian, thai], metric="cer")
    page = report(run)
    shown = runs.table(page, "set-0-utterances")["Reference and errors"]
    texts = (" ".join(words) for words in (persian.reference, persian.hypothesis))
    assert shown[0] == [*texts, "=s="]
    units = ["\u0e19\u0e49\u0e33", "\u0e43", "\u0e19", "\u0e17\u0e35\u0e48"]
    assert shown[1][0].split(BETWEEN) == units
    assert shown[1][2:] == ["s===", ""]
    (row,) = page.find("section", **{"aria-labelledby": "results-title"})[0].find("tbody")
    cells = [cell.text for cell in row.find("td")]
    assert cells[1].endswith(" CER")
    assert cells[7].endswith(" WER")
    kinds = {each.text.split()[0]: each for each in page.find("article")}
    assert [len(kinds[name].find(**{"class": "alignment words"})) for name in ("fa", "th")] == [
        1,
        0,
    ]
    assert len(kinds["th"].find(**{"class": "alignment characters"})) == 1


def test_texts_have_the_direction_of_their_script(run: Path) -> None:
    runs.write_decoded(run, [runs.transcript("fa", PERSIAN, "x")])
    html = make_report(run, options=runs.NO_MEDIA).html
    assert '<div class="pairs" dir="auto">' in html
    assert 'cell.dir = "auto"' in html


def test_errors_by_language(run: Path) -> None:
    runs.write_decoded(
        run,
        [runs.transcript(name, "a b", "a c") for name in ("1", "2", "3")],
        languages=["tr", "de", "tr"],
    )
    rows = runs.table(report(run), "set-0-languages")
    assert rows["Language"] == ["de", "tr"]
    assert rows["WER"] == [0.5, 0.5]
    assert rows["Utterances"] == [1, 2]


def test_one_language_has_no_table(run: Path) -> None:
    runs.write_decoded(run, [runs.transcript("1", "a", "b")], languages=["tr"])
    assert 'id="data-set-0-languages"' not in make_report(run, options=runs.NO_MEDIA).html


def test_a_word_of_a_megabyte_is_cut(run: Path) -> None:
    word = "ab" * 500_000
    runs.write_old_decoded(
        run,
        [
            runs.transcript("equal", word, word),
            runs.transcript("other", f"hello {word}", f"hello {word[1:]}"),
            runs.transcript("short", "ab " * 10, word[:1000]),
        ],
    )
    page = report(run)
    rows = runs.table(page, "set-0-utterances")
    assert rows["Utterance"] == ["short"]
    assert all(len(text) < 2000 for text in rows["Reference and errors"][0])
    assert "2 utterances with texts of thousands of characters are left out" in page.text
    assert max(len(each.text) for each in page.find("article")) < 10_000


def test_a_long_word_is_cut_in_pictures() -> None:
    words = [("x" * 1_000_000, 0.1)]
    clip = picture_clip(spectrogram_figure(torch.zeros(50, 80), 0.01, words))
    assert "\u2026" in svg_of(clip.url)
    assert len(clip.url) < 200_000


def svg_of(url: str) -> str:
    head, _, data = url.partition(",")
    assert head == "data:image/svg+xml"
    return unquote(data)


def test_pictures_have_texts_that_the_browser_shapes() -> None:
    words = [("\u0915\u094d\u200d\u0937", 0.1), ("a$b", 0.2), ("<i>", 0.3)]
    with drawn_by_browser():
        svg = svg_of(picture_clip(spectrogram_figure(torch.zeros(50, 80), 0.01, words)).url)
    for text in (">\u0915\u094d\u200d\u0937<", ">a$b<", "&lt;i&gt;"):
        assert text in svg
    image = svg.partition("data:image/png;base64,")[2].partition('"')[0]
    assert base64.b64decode(image).startswith(b"\x89PNG")


def test_labels() -> None:
    assert printable("a" * 100) == "a" * 59 + "\u2026"
    assert len(printable("a" * 100, most=10)) == 10
    with drawn_by_browser():
        assert printable("\u2581\u0e48") == "_\u25cc\u0e48"
        assert printable("a\x00b\x1b") == "ab"
        assert printable("\u9f98\U0001f600") == "\u9f98\U0001f600"
    assert isolated(PERSIAN) == f"\u2068{PERSIAN}\u2069"
    assert isolated("hello") == "hello"


def test_texts_that_are_too_long_to_align_are_refused() -> None:
    with pytest.raises(ValueError, match="hypothesis of 30,000 words or characters are too long"):
        align_words(["a"] * 30_000, ["b"] * 30_000)


def test_text_that_is_no_unicode_is_replaced(run: Path) -> None:
    """JSON may hold halves of surrogate pairs."""
    stem = runs.write_decoded(run, [runs.transcript("odd", "a", "b")])
    path = run / "results" / f"nbest-{stem}.jsonl"
    path.write_text(path.read_text().replace('"odd"', '"\\ud800"'))
    page = run / "report.html"
    page.write_text("<title>x · pruned_rnnt report</title>", encoding="utf-8")
    assert main(["report", str(run), "--no-audio", "--no-pictures"]) == 0
    shown = runs.parse(page.read_text(encoding="utf-8"))
    assert runs.table(shown, "set-0-utterances")["Utterance"] == ["?"]
