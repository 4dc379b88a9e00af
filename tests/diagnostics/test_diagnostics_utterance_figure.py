"""utterance_figure: all panels share one time axis."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
import torch

from pruned_rnnt import Bounds
from pruned_rnnt.diagnostics import Track, utterance_figure, viterbi_alignment
from pruned_rnnt.diagnostics.labels import columns
from tests.lattice_paths import Rows, posteriors, random_rows

TRACKS = [Track("spoken", [("ab", 0.0, 2.0), ("c$", 2.0, 4.0)]), Track("recognised", [])]


def example(**changes: object) -> dict[str, object]:
    rows = random_rows(1, 4, 3, seed=2)
    lengths = torch.tensor([4]), torch.tensor([3])
    return {
        "features_TF": torch.arange(19 * 10.0).view(19, 10),
        "emissions": [("▁a", 0), ("b", 3)],
        "tracks": TRACKS,
        "occupancy": posteriors(rows.emit, rows.blank, [(4, 3)]),
        "bounds": Bounds(torch.tensor([[0, 0, 1, 2]], dtype=torch.int32), 2),
        "alignment": viterbi_alignment(rows.emit, rows.blank, *lengths),
        "target_length": 3,
        "logit_length": 4,
        "tokens": ["▁a", "b", "▁c$"],
        "frame_seconds": 0.04,
        "title": "one",
        **changes,
    }


def test_panels_share_their_time() -> None:
    figure = utterance_figure(**example())  # type: ignore[arg-type]
    spectrogram, words, lattice = figure.axes[:3]
    for axes in (spectrogram, words, lattice):
        assert axes.get_xlim() == (-0.5, 3.5)
    (image,) = spectrogram.get_images()
    assert image.get_extent() == [-0.5, 3.5, -0.5, 9.5]
    # 19 features for 4 frames: the last three belong to no frame.
    assert image.get_array().shape == (10, 16)
    assert [line.get_xdata()[0] for line in spectrogram.lines] == [0, 3]
    assert [text.get_text() for text in spectrogram.texts] == ["_a", "b"]
    assert [text.get_text() for text in words.texts] == ["ab", r"c\$"]
    assert [bar.get_x() for bar in words.patches] == [-0.5, 1.5]
    assert [label.get_text() for label in words.get_yticklabels()] == ["spoken", "recognised"]
    assert [label.get_text() for label in lattice.get_yticklabels()][1] == "_a"
    assert lattice.get_xticklabels()[1].get_text().split("\n")[1].endswith(" s")


def test_labels_without_room_are_dropped_but_not_their_lines() -> None:
    occupancy = Rows(torch.zeros(1, 300, 1), torch.rand(1, 300, 1))
    arguments = example(
        features_TF=torch.zeros(1200, 80),
        emissions=[(str(frame), frame) for frame in range(300)],
        occupancy=occupancy,
        bounds=None,
        alignment=None,
        target_length=0,
        logit_length=300,
        tokens=[],
    )
    spectrogram = utterance_figure(**arguments).axes[0]  # type: ignore[arg-type]
    assert len(spectrogram.lines) == 300
    places = [int(text.get_text()) for text in spectrogram.texts]
    assert 20 < len(places) < 150
    assert min(b - a for a, b in pairwise(places)) > 1


def test_words_without_room_are_dropped_but_not_their_bars() -> None:
    crowded = Track("spoken", [("extraordinary", 0.0, 0.1), ("words", 0.1, 0.2), ("b", 3.0, 3.1)])
    words = utterance_figure(**example(tracks=[crowded])).axes[1]  # type: ignore[arg-type]
    assert [text.get_text() for text in words.texts] == ["extraordinary", "b"]
    assert len(words.patches) == 3


@pytest.mark.parametrize(
    "title",
    ["U+0E21 " * 60, "THE QUICK BROWN FOX " * 30, "id\n\ntext"],
    ids=["codes", "capitals", "empty line"],
)
def test_titles_fit_into_the_picture(title: str) -> None:
    figure = utterance_figure(**example(title=title))  # type: ignore[arg-type]
    figure.canvas.draw()
    (shown,) = (text for text in figure.texts if text.get_text())
    extent = shown.get_window_extent()
    assert 0 <= extent.x0 < extent.x1 <= figure.bbox.x1


def test_wide_characters_and_marks_count() -> None:
    assert [columns(text) for text in ("", "ab", "\u4e2d\u6587", "e\u0301")] == [0, 2, 4, 1]


@pytest.mark.parametrize(("frames", "symbols"), [(1, 0), (1500, 400)])
def test_any_length_can_be_saved(frames: int, symbols: int) -> None:
    arguments = example(
        features_TF=torch.full((4 * frames + 3, 80), torch.nan),
        occupancy=Rows(torch.zeros(1, frames, symbols + 1), torch.rand(1, frames, symbols + 1)),
        bounds=None,
        alignment=None,
        target_length=symbols,
        logit_length=frames,
        tokens=["x"] * symbols,
        title="word $ " * 300,
    )
    figure = utterance_figure(**arguments)  # type: ignore[arg-type]
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=30)
    assert file.getvalue().startswith(b"\x89PNG")
    assert len(figure.axes[2].get_yticklabels()) <= 49
    assert figure.get_figwidth() < 30
