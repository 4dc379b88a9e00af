"""The page in a headless browser: what is drawn, sorted, filtered, played and printed.

Needs playwright and a Chromium on the path. With REPORT_SCREENSHOTS=FOLDER it keeps pictures.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pruned_rnnt.report.report_command import ReportOptions, make_report
from tests.report.run_folders import random_transcripts, transcript, write_decoded, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"needs one of {', '.join(BROWSERS)}"),
]
EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # CI runs as root, where Chromium has no sandbox.
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def html(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, two sets, 10,000 utterances, one of which attacks the page."""
    folder = tmp_path_factory.mktemp("browser")
    run, other = (write_run(folder / name, corpus) for name in ("run", "other"))
    attack = transcript(EVIL, EVIL, "cafe\u0301")
    for each, errors, count in ((run, 0.05, 10_000), (other, 0.03, 1000)):
        transcripts = random_transcripts(10_000, errors, seed=1, length=30)[:count]
        write_decoded(each, [*transcripts, attack])
        write_decoded(each, random_transcripts(50, errors, seed=2), "dev")
    path = folder / "page.html"
    options = ReportOptions(audio=False, pictures=False)
    path.write_text(make_report(run, other, options).html, encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Any, html: Path) -> Iterator[Any]:
    """The page, opened; an error of its script, or a request, fails the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.on(
        "request",
        lambda request: (
            problems.append(request.url) if not request.url.startswith(("file:", "data:")) else None
        ),
    )
    page.goto(html.as_uri())
    yield page
    page.close()
    assert problems == []


def column(page: Any, table: str, number: int) -> list[str]:
    cells = page.locator(f"[data-table={table}] tbody tr > :nth-child({number})")
    return [text.strip() for text in cells.all_text_contents()]


def built(page: Any, table: str) -> Any:
    root = page.locator(f"[data-table={table}]")
    root.scroll_into_view_if_needed()
    root.locator("tbody tr").first.wait_for()
    return root


def test_table_sorts_filters_and_turns_pages(page: Any) -> None:
    root = built(page, "set-0-utterances")
    assert root.locator(".where").text_content() == "1\u201325 of 10,001"
    errors = [int(text) for text in column(page, "set-0-utterances", 2)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0
    heading = root.locator("th", has_text="Utterance")
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    names = column(page, "set-0-utterances", 1)
    assert names[1:] == [f"u-{number:05d}" for number in range(24)]
    root.locator("button", has_text="Next").click()
    assert column(page, "set-0-utterances", 1)[0] == "u-00024"
    root.locator("input").fill("u-0123 the")
    root.locator(".where", has_not_text="10,001").wait_for()
    found = column(page, "set-0-utterances", 1)
    assert 0 < len(found) <= 10
    assert all(name.startswith("u-0123") for name in found)
    root.locator("input").fill("no such text")
    root.locator(".where", has_text="nothing found").wait_for()


def test_texts_stay_texts(page: Any) -> None:
    root = built(page, "set-0-utterances")
    # The two forms of a letter with an accent are the same.
    root.locator("input").fill("onerror caf\u00e9")
    root.get_by_text("1\u20131 of 1", exact=True).wait_for()
    assert column(page, "set-0-utterances", 1) == [EVIL]
    assert page.locator("img").count() == 0
    assert page.title() == "run and other · pruned_rnnt report"


def test_one_set_at_a_time(page: Any) -> None:
    assert page.locator("#set-0").is_visible()
    assert not page.locator("#set-1").is_visible()
    page.locator("[role=tab]", has_text="test").press("ArrowRight")
    assert page.locator("#set-1").is_visible()
    assert not page.locator("#set-0").is_visible()
    assert page.locator("[role=tab][aria-selected=true]").text_content() == "dev"
    assert built(page, "set-1-utterances").locator(".where").text_content() == "1\u201325 of 50"


def test_chart_shows_values_under_the_pointer(page: Any) -> None:
    chart = page.locator("figure", has=page.locator("h3", has_text="Validation WER"))
    box = chart.locator("svg").bounding_box()
    chart.locator("svg").hover(position={"x": 0.9 * box["width"], "y": 0.4 * box["height"]})
    # A busy browser passes the pointer's event to the page later.
    chart.locator(".at", has_text="step 4").wait_for()
    assert chart.locator(".key b").all_text_contents() == ["25.00%", "25.00%"]
    assert chart.locator(".at").text_content() == "step 4"
    page.mouse.move(0, 0)
    chart.locator(".at", has_text=re.compile("^$")).wait_for(state="attached")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_texts_have_contrast_and_nothing_is_cut_off(
    browser: Any, html: Path, scheme: str, width: int, tmp_path: Path
) -> None:
    """Measured on a screenshot, and by WCAG's formula on texts; no sideways scrolling."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(html.as_uri())
    built(page, "set-0-changes")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    path = Path(os.environ.get("REPORT_SCREENSHOTS", tmp_path)) / f"{scheme}-{width}.png"
    page.screenshot(path=path, full_page=True)
    brightness = np.asarray(Image.open(path).convert("L")).mean()
    assert brightness > 200 if scheme == "light" else brightness < 60
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 20
    assert [each for each in contrasts if each[0] < 4.5] == []
    page.close()


def test_page_prints(page: Any, tmp_path: Path) -> None:
    """Tables that were not built yet are printed, controls are not."""
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("[data-table=set-0-utterances] tbody tr").count() == 25
    assert not page.locator(".controls").first.is_visible()
    assert page.pdf(path=tmp_path / "page.pdf").startswith(b"%PDF")


# Contrast of texts with their background, and the text: rgb(...) colours over opaque ancestors.
CONTRASTS = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = parts(colour).map((x) => x / 255)
      .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const isClear = (element) => parts(getComputedStyle(element).backgroundColor)[3] === 0;
  const found = [];
  for (const element of document.querySelectorAll("p, h1, h2, h3, th, td, del, ins, dt, dd, a")) {
    const texts = [...element.childNodes].filter((node) => node.nodeType === 3);
    const text = texts.map((node) => node.data).join("").trim();
    if (!text || !element.offsetParent || element.classList.contains("zero")) continue;
    let behind = element;
    while (isClear(behind)) behind = behind.parentElement;
    const colours = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
    const [low, high] = colours.map(luminance).sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), text.slice(0, 30)]);
  }
  return found;
}"""
