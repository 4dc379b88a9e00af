"""The page: its numbers equal the scorer's, its texts are escaped, and parts may be missing."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pruned_rnnt.decode.scoring.error_rates import (
    ErrorCounts,
    Transcript,
    confidence_interval,
    count_errors,
)
from pruned_rnnt.report.report_command import make_report
from pruned_rnnt.system.usage_errors import UsageError
from tests.report import run_folders as runs


def percent(rate: float) -> str:
    return f"{100 * rate:.2f}%"


@pytest.mark.slow
def test_numbers_equal_those_of_the_scorer(run: Path) -> None:
    transcripts = runs.random_transcripts(200, 0.2, seed=1)
    runs.write_decoded(run, transcripts)
    page = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    total = count_errors(transcripts)
    characters = count_errors([each.characters() for each in transcripts])
    lower, upper = confidence_interval(transcripts)
    (row,) = page.find("section", **{"aria-labelledby": "results-title"})[0].find("tbody")
    cells = [cell.text for cell in row.find("td")]
    counts = (total.insertions, total.deletions, total.substitutions, total.reference_words)
    assert cells[1] == f"{percent(total.rate)} WER"
    assert cells[2].replace(" ", "") == f"{percent(lower)}\u2013{percent(upper)}"
    assert [int(cell.replace(",", "")) for cell in cells[3:7]] == list(counts)
    assert cells[7] == f"{percent(characters.rate)} CER"
    rows = runs.table(page, "set-0-utterances")
    assert rows["Utterance"] == [each.id for each in transcripts]
    for number, each in enumerate(transcripts):
        counted = count_errors([each])
        assert rows["Errors"][number] == counted.errors
        assert rows["Ins"][number] == counted.insertions
        assert rows["Del"][number] == counted.deletions
        assert rows["Sub"][number] == counted.substitutions
        assert rows["WER"][number] == pytest.approx(counted.rate, abs=1e-5)
    confusions = runs.table(page, "set-0-confusions")
    for kind, count in (
        ("insertion", total.insertions),
        ("deletion", total.deletions),
        ("substitution", total.substitutions),
    ):
        pairs = zip(confusions["Error"], confusions["Count"], strict=True)
        assert sum(number for name, number in pairs if name == kind) == count
    words = runs.table(page, "set-0-words")
    assert sum(words["In reference"]) == total.reference_words
    assert (
        sum(words["Deleted"]) + sum(words["Substituted"]) == total.deletions + total.substitutions
    )
    assert sum(words["Wrongly recognised"]) == total.insertions + total.substitutions


def test_alignments_give_back_the_texts(run: Path) -> None:
    """A hypothesis is left out if it equals the reference; the letters fit both texts."""
    transcripts = runs.random_transcripts(100, 0.3, seed=2)
    runs.write_decoded(run, transcripts)
    page = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    for each, shown in zip(
        transcripts, runs.table(page, "set-0-utterances")["Reference and errors"], strict=True
    ):
        if each.reference == each.hypothesis:
            assert shown == [" ".join(each.reference)]
            continue
        assert shown[0] == " ".join(each.reference)
        assert shown[1] == " ".join(each.hypothesis)
        assert len(shown) == 3
        letters = shown[2]
        assert sum(letter != "i" for letter in letters) == len(each.reference)
        assert sum(letter != "d" for letter in letters) == len(each.hypothesis)
        assert sum(letter != "=" for letter in letters) == count_errors([each]).errors


def test_worst_utterances_show_their_alignments(run: Path) -> None:
    runs.write_decoded(
        run,
        [
            runs.transcript("bad", "a b c d", "a x d e"),
            runs.transcript("worse", "a b c d", "x y z"),
            runs.transcript("good", "a", "a"),
        ],
    )
    page = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    articles = page.find("article")
    assert [article.find("h3")[0].text for article in articles] == ["worse", "bad"]
    pairs = articles[1].find("span", class_="pair")
    shown = [[child.text for child in pair.children] for pair in pairs]  # type: ignore[union-attr]
    assert sorted(map(tuple, shown)) == sorted(
        [("a", "a"), ("b", "x"), ("c", "·"), ("d", "d"), ("·", "e")]
    ) or shown == [["a", "a"], ["b", "·"], ["c", "x"], ["d", "d"], ["·", "e"]]
    # Words have the times of the n-best file, gaps have none.
    starts = [pair.attributes.get("data-start") for pair in pairs]
    assert [start for start in starts if start] == ["0.00", "0.10", "0.20", "0.30"]


def test_texts_cannot_add_elements(run: Path) -> None:
    evil = "<script>alert(1)</script> </script><img/src=x> --> & \" ' \u2028 \u202e"
    spoken = Transcript(id=evil, reference=tuple(evil.split()), hypothesis=("<b>", "שלום"))
    runs.write_decoded(run, [spoken], split="<i>test")
    runs.write_decoded(run, [spoken])
    html = make_report(run, options=runs.NO_MEDIA).html
    page = runs.parse(html)
    assert len(page.find("script")) == len(re.findall(r"<script\b", html))
    assert [script for script in page.find("script") if "alert" in script.text] == [
        script for script in page.find("script", type="application/json") if "alert" in script.text
    ]
    assert not [image for image in page.find("img") if image.attributes.get("src") == "x"]
    assert not page.find("i", class_="test")
    ids = [runs.table(page, f"set-{number}-utterances")["Utterance"] for number in range(2)]
    assert ids == [[evil], [evil]]
    assert {article.find("h3")[0].text for article in page.find("article")} == {
        " ".join(evil.split())
    }


def test_page_asks_for_nothing_from_outside(run: Path) -> None:
    runs.write_decoded(run, runs.random_transcripts(20, 0.3, seed=3))
    page = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    for tag, name in (("img", "src"), ("script", "src"), ("link", "href"), ("a", "href")):
        for element in page.find(tag):
            assert element.attributes.get(name, "#").startswith(("data:", "#"))
    (policy,) = page.find("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_curves_have_the_values_of_the_log(run: Path) -> None:
    page = runs.parse(make_report(run).html)
    titles = [figure.find("h3")[0].text for figure in page.find("figure")]
    assert {"Loss per encoder frame", "Validation WER", "Retained mass"} <= set(titles)
    (script,) = page.find("script", id="data-hover")
    hover = json.loads(script.text)
    assert hover[titles.index("Validation WER")]["lines"] == [[[1, 2, 3, 4], [0.25] * 4]]
    assert hover[titles.index("Retained mass")]["lines"] == [[[1, 2, 3, 4], [0.99] * 4]]
    for figure in page.find("figure"):
        assert figure.find("svg")
        assert figure.find("div", role="img")[0].attributes["aria-label"]


def test_run_without_results_says_what_to_run(run: Path) -> None:
    report = make_report(run)
    assert report.hints == (
        f"run has not been decoded: run `pruned-rnnt decode {run}`, then make the report again.",
    )
    page = runs.parse(report.html)
    assert [hint.text for hint in page.find("p", class_="hint")] == list(report.hints)
    assert page.find("figure")
    assert not page.find("article")


@pytest.mark.slow
def test_run_that_is_still_training(corpus: Path, tmp_path: Path) -> None:
    run = runs.write_run(tmp_path / "run", corpus, steps=100, done=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"group": "train", "step": 4, "total_per_fr')
    hints = make_report(run).hints
    assert hints[0] == "run is at step 3 of 100: this page shows the run so far."


def test_run_without_metrics(corpus: Path, tmp_path: Path) -> None:
    """An imported model has no log."""
    run = runs.write_run(tmp_path / "run", corpus)
    (run / "metrics.jsonl").unlink()
    runs.write_decoded(run, runs.random_transcripts(5, 0.5, seed=4))
    report = make_report(run, options=runs.NO_MEDIA)
    assert report.hints == ("run has no metrics.jsonl, so there are no curves.",)
    assert not runs.parse(report.html).find("section", id="training")


def test_set_without_references(run: Path) -> None:
    runs.write_decoded(run, [runs.transcript("a", "", "x y"), runs.transcript("b", "", "")])
    page = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    assert "No utterance has a reference text" in page.find("p", class_="hint")[-1].text
    rows = runs.table(page, "set-0-utterances")
    assert (rows["WER"], rows["Ins"]) == ([None, 0.0], [2, 0])


@pytest.mark.slow
def test_data_that_are_gone(corpus: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(corpus, tmp_path / "data")
    run = runs.write_run(tmp_path / "run", moved)
    runs.write_decoded(
        run, [runs.transcript("test-0", "red", "blue"), runs.transcript("test-1", "red", "red")]
    )
    whole = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    assert all(seconds > 0 for seconds in runs.table(whole, "set-0-utterances")["Seconds"])
    assert [f.find("h3")[0].text for f in whole.find("figure")].count("WER by duration") == 1
    moved.rename(tmp_path / "elsewhere")
    gone = runs.parse(make_report(run).html)
    assert "add data.path=DIR" in gone.find("p", class_="hint")[0].text
    assert "no audio" in gone.find("article")[0].text
    assert "Seconds" not in runs.table(gone, "set-0-utterances")
    found = runs.parse(make_report(run, overrides=[f"data.path={tmp_path / 'elsewhere'}"]).html)
    assert runs.table(found, "set-0-utterances") == runs.table(whole, "set-0-utterances")


def test_other_data_that_were_moved(corpus: Path, tmp_path: Path) -> None:
    calls = shutil.copytree(corpus, tmp_path / "calls")
    run = runs.write_run(tmp_path / "run", corpus)
    transcripts = [runs.transcript("test-0", "red", "blue")]
    runs.write_decoded(run, transcripts, data="calls", own_data=False, data_path=str(calls))
    empty = tmp_path / "empty"
    empty.mkdir()
    # The data that were decoded still exist.
    kept = runs.parse(
        make_report(run, options=runs.NO_MEDIA, overrides=[f"data.path={empty}"]).html
    )
    assert runs.table(kept, "set-0-utterances")["Seconds"][0] > 0
    moved = calls.rename(tmp_path / "elsewhere")
    gone = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    assert "add data.path=DIR" in gone.find("p", class_="hint")[0].text
    found = runs.parse(
        make_report(run, options=runs.NO_MEDIA, overrides=[f"data.path={moved}"]).html
    )
    assert runs.table(found, "set-0-utterances") == runs.table(kept, "set-0-utterances")
    assert "cannot be read" not in found.text


def test_a_data_folder_that_does_not_exist_is_refused(run: Path, tmp_path: Path) -> None:
    runs.write_decoded(run, [runs.transcript("test-0", "red", "blue")])
    with pytest.raises(UsageError, match=r"data\.path is .*nowhere, which is no folder: needs"):
        make_report(run, overrides=[f"data.path={tmp_path / 'nowhere'}"])


def test_all_sets_are_shown(run: Path) -> None:
    for split in ("dev", "test-other", "test-clean"):
        runs.write_decoded(run, runs.random_transcripts(10, 0.3, seed=8), split)
    page = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    tabs = page.find("button", role="tab")
    assert [tab.text for tab in tabs] == ["test-clean", "test-other", "dev"]
    panels = [panel.attributes["id"] for panel in page.find("div", role="tabpanel")]
    assert [tab.attributes["aria-controls"] for tab in tabs] == panels


def test_older_results_are_listed(run: Path) -> None:
    """Their numbers are those of the errs file."""
    old, new = (runs.random_transcripts(30, rate, seed=11) for rate in (0.5, 0.2))
    runs.write_decoded(run, old)
    runs.write_decoded(run, new, label="modified_beam")
    for path in (run / "results").glob("*modified_beam*"):
        os.utime(path, (2e9, 2e9))
    page = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    (row,) = page.find("tr", class_="older")
    total = count_errors(old)
    cells = [cell.text for cell in row.find("td")]
    assert cells[0].startswith("greedy-step-00000004")
    counts = (total.insertions, total.deletions, total.substitutions, total.reference_words)
    assert [int(cell) for cell in cells[3:7]] == list(counts)
    assert cells[1] == f"{percent(total.rate)} WER"


def test_ids_of_the_page_are_unique(run: Path) -> None:
    for split in ("dev", "test"):
        runs.write_decoded(run, runs.random_transcripts(10, 0.3, seed=9), split)
    page = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    ids = [each.attributes["id"] for each in page.find() if "id" in each.attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_ten_thousand_utterances_are_a_small_page(run: Path) -> None:
    transcripts = runs.random_transcripts(10_000, 0.05, seed=10, length=36)
    runs.write_decoded(run, transcripts)
    html = make_report(run, options=runs.NO_MEDIA).html
    texts = sum(len(" ".join(each.reference + each.hypothesis)) for each in transcripts)
    # Each text once, and about 60 bytes for the numbers of an utterance.
    assert len(html.encode()) < texts + 60 * len(transcripts) + 200_000
    rows = runs.table(runs.parse(html), "set-0-utterances")
    total = sum((count_errors([each]) for each in transcripts), ErrorCounts())
    assert sum(rows["Errors"]) == total.errors


def test_lost_runs_have_a_table(run: Path) -> None:
    transcripts = runs.random_transcripts(50, 0.2, seed=1)
    cut = transcripts[7]
    assert len(cut.reference) >= 3
    transcripts[7] = replace(cut, hypothesis=())
    runs.write_decoded(run, transcripts)
    page = runs.parse(make_report(run, options=runs.NO_MEDIA).html)
    found = runs.table(page, "set-0-lost")
    place = found["Utterance"].index(cut.id)
    assert found["Words"][place] == len(cut.reference)
    assert found["Lost"][place] == " ".join(cut.reference)
