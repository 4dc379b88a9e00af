"""Labels in scripts that the default font lacks, with and without a font for them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib.font_manager
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

from pruned_rnnt.diagnostics import Track, labels, lattice_figure, utterance_figure
from pruned_rnnt.diagnostics.labels import printable
from tests.lattice_paths import posteriors, random_rows

TOKENS = ["▁今", "ガ", "한"]


def save_font(path: Path, family: str, characters: str) -> None:
    """A font in which every character is the same triangle."""
    pen = TTGlyphPen(None)
    for move, point in ((pen.moveTo, (0, 0)), (pen.lineTo, (400, 800)), (pen.lineTo, (800, 0))):
        move(point)
    pen.closePath()
    triangle = pen.glyph()
    names = {ord(character): f"uni{ord(character):04X}" for character in characters}
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    builder.setupGlyf(dict.fromkeys((".notdef", *names.values()), triangle))
    builder.setupHorizontalMetrics(dict.fromkeys((".notdef", *names.values()), (900, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


@pytest.fixture
def fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the only fonts beside matplotlib's own, which nothing has looked at yet."""
    manager = matplotlib.font_manager
    own = Path(matplotlib.get_data_path())
    entries = [e for e in manager.fontManager.ttflist if Path(e.fname).is_relative_to(own)]
    monkeypatch.setattr(manager.fontManager, "ttflist", entries)
    monkeypatch.setattr(
        manager, "findSystemFonts", lambda: [str(p) for p in tmp_path.glob("*.ttf")]
    )
    monkeypatch.setattr(labels, "_families", [])
    monkeypatch.setattr(labels, "_missing", set())
    for cached in (labels._family_with, labels._fonts):
        cached.cache_clear()
    yield tmp_path
    for cached in (labels._family_with, labels._fonts):
        cached.cache_clear()


def draw(folder: Path) -> list[str]:
    """Draws both pictures with such labels everywhere; what matplotlib warned of."""
    rows = random_rows(1, 4, 3, seed=2)
    occupancy = posteriors(rows.emit, rows.blank, [(4, 3)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lattice_figure(occupancy, tokens=TOKENS, title="今日 $5").savefig(folder / "lattice.png")
        figure = utterance_figure(
            torch.randn(16, 80),
            [("▁今", 0), ("한", 2)],
            [Track("spoken", [("今ガ", 0, 2)])],
            occupancy,
            target_length=3,
            logit_length=4,
            tokens=TOKENS,
            frame_seconds=0.04,
            title="今日\nreference: ガ",
        )
        figure.savefig(folder / "utterance.png")
    return [str(warning.message) for warning in caught]


def test_installed_fonts_are_used(fonts: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_font(fonts / "a.ttf", "Test Han", "今日ガ")
    save_font(fonts / "b.ttf", "Test Hangul", "한")
    (fonts / "broken.ttf").write_bytes(b"no font")
    with caplog.at_level(logging.WARNING):
        assert draw(fonts) == []
    assert caplog.messages == []
    assert labels._families == ["Test Han", "Test Hangul"]
    assert printable("▁今日") == "_今日"


def test_without_a_font_code_points_are_shown_and_one_warning(
    fonts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("pruned_rnnt")
    propagate, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.WARNING):
        assert draw(fonts) == []
    logger.propagate = propagate
    (message,) = caplog.messages
    assert "no installed font has U+" in message
    assert "fonts-noto-cjk" in message
    assert printable("▁今日 ok한x\nガ") == "_U+4ECA U+65E5 ok U+D55C x\nU+30AC"
    assert printable("▁$é") == r"_\$é"
