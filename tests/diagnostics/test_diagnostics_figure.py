"""lattice_figure: contents and positions of the picture, no global state."""

import io

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Polygon

from pruned_rnnt import Bounds
from pruned_rnnt.diagnostics import lattice_figure, viterbi_alignment
from pruned_rnnt.loss.results import TdtOccupancy
from tests.lattice_paths import Rows, posteriors, random_rows
from tests.torch_forks import run_with_torch

FRAMES = torch.tensor([4, 3])
SYMBOLS = torch.tensor([3, 1])
BAND = Bounds(torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0]], dtype=torch.int32), 2)


def example() -> tuple[Rows, Rows]:
    rows = random_rows(2, 4, 3, seed=2)
    return rows, posteriors(rows.emit, rows.blank, [(4, 3), (3, 1)])


def image_of(figure: Figure) -> AxesImage:
    (image,) = figure.axes[0].get_images()
    return image


def test_image_is_the_probability_of_visiting_each_node() -> None:
    _, occupancy = example()
    image = image_of(lattice_figure(occupancy, index=0))
    expected = (occupancy.emit[0] + occupancy.blank[0]).T
    torch.testing.assert_close(torch.from_numpy(image.get_array().filled()), expected)
    # Every path passes the first node and the last.
    assert expected[0, 0].item() == pytest.approx(1)
    assert expected[-1, -1].item() == pytest.approx(1)


def test_lengths_crop_the_picture() -> None:
    _, occupancy = example()
    figure = lattice_figure(occupancy, BAND, index=1, logit_length=3, target_length=1)
    assert image_of(figure).get_array().shape == (2, 3)
    assert figure.axes[0].get_xlim() == (-0.5, 2.5)
    assert figure.axes[0].get_ylim() == (-0.5, 1.5)


def test_positions_of_band_and_alignment() -> None:
    rows, occupancy = example()
    alignment = viterbi_alignment(rows.emit, rows.blank, FRAMES, SYMBOLS)
    axes = lattice_figure(occupancy, BAND, alignment, title="one", frame_seconds=0.04).axes[0]
    outlines = [p for p in axes.patches if isinstance(p, Polygon)]
    assert len(outlines) == 2
    corners = outlines[-1].get_xy().tolist()
    assert corners[0] == [-0.5, -0.5]
    assert [3.5, 1.5] in corners  # the lower edge of the last frame, start = 2
    assert [3.5, 3.5] in corners  # and its upper edge
    path = axes.lines[-1].get_xydata().tolist()
    assert path[0] == [0, 0]
    assert path[-1] == [3, 3]
    dots = axes.collections[0].get_offsets().tolist()
    assert dots == [[frame, u + 1] for u, frame in enumerate(alignment.frames[0].tolist())]
    labels = axes.get_legend_handles_labels()[1]
    assert set(labels) == {"best path", "symbol emitted", "band kept by pruning, S = 2"}
    assert axes.get_title(loc="left") == "one"


@pytest.mark.parametrize("frame_seconds", [0, -1.0, float("nan"), float("inf")])
def test_frames_have_a_duration(frame_seconds: float) -> None:
    _, occupancy = example()
    with pytest.raises(ValueError, match=r"frame_seconds is .*; it must be (above 0|finite)"):
        lattice_figure(occupancy, frame_seconds=frame_seconds)


def test_tokens_label_the_rows() -> None:
    _, occupancy = example()
    axes = lattice_figure(occupancy, tokens=["▁a", "b", "$c$"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["start", "_a", "b", r"\$c\$"]


@pytest.mark.parametrize("frames", [torch.tensor([1, 2, 2]), torch.tensor([[1, 2, 2], [0, 0, 0]])])
def test_alignment_as_plain_frames(frames: torch.Tensor) -> None:
    _, occupancy = example()
    axes = lattice_figure(occupancy, alignment=frames).axes[0]
    assert axes.collections[0].get_offsets().tolist() == [[1, 1], [2, 2], [2, 3]]


def test_no_path_draws_no_line() -> None:
    _, occupancy = example()
    axes = lattice_figure(occupancy, alignment=torch.tensor([-1, -1, -1])).axes[0]
    assert not axes.lines
    assert axes.get_legend() is None


@pytest.mark.parametrize(("frames", "symbols"), [(1, 0), (1, 3), (900, 120)])
def test_any_size_can_be_saved(frames: int, symbols: int) -> None:
    blank = torch.rand(1, frames, symbols + 1)
    figure = lattice_figure(Rows(torch.zeros_like(blank), blank), tokens=["x"] * symbols)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=40)
    assert file.getvalue().startswith(b"\x89PNG")


def test_nan_and_bfloat16_are_drawn() -> None:
    blank = torch.full((1, 3, 2), torch.nan, dtype=torch.bfloat16)
    image = image_of(lattice_figure(Rows(torch.zeros_like(blank), blank)))
    assert image.get_array().max() == 0


@pytest.mark.slow
def test_pyplot_is_not_imported() -> None:
    code = (
        "import sys, torch; from pruned_rnnt.diagnostics import lattice_figure\n"
        "assert 'matplotlib' not in sys.modules\n"
        "from collections import namedtuple\n"
        "rows = namedtuple('Rows', 'emit blank')(torch.zeros(1, 3, 2), torch.ones(1, 3, 2))\n"
        "lattice_figure(rows).canvas.draw()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = run_with_torch(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"index": 2}, "index is 2; the batch has 2 utterances"),
        ({"logit_length": 5}, r"logit_length is 5; it must be in 1\.\.4"),
        ({"target_length": 4}, r"target_length is 4; it must be in 0\.\.3"),
        (
            {"bounds": Bounds(BAND.start[:, :3], 2)},
            r"bounds.start has shape \(2, 3\); it must be \(N, T\) = \(2, 4\)",
        ),
        (
            {"alignment": torch.tensor([[1, 2, 2]]), "index": 1},
            r"alignment has shape \(1, 3\); it must be \(N, U\) with N = 2",
        ),
        ({"tokens": ["a"]}, "tokens has 1 entries; it must have one for each of the 3 symbols"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, object], message: str) -> None:
    _, occupancy = example()
    with pytest.raises(ValueError, match=message):
        lattice_figure(occupancy, **arguments)


def test_strip_of_durations_shows_the_arcs_that_leave_each_frame() -> None:
    _, (emit, blank) = example()
    arcs = torch.rand(2, 4, 4, 3, generator=torch.Generator().manual_seed(3)) / 4
    occupancy = TdtOccupancy(emit, blank, torch.zeros_like(emit), arcs)
    figure = lattice_figure(
        occupancy, index=1, logit_length=3, target_length=1, durations=(1, 0, 4)
    )
    lattice, strip, *_ = figure.axes
    (image,) = strip.get_images()
    expected = arcs[1, :3, :2].sum(1).T[[1, 0, 2]].double()
    torch.testing.assert_close(torch.from_numpy(image.get_array().filled()), expected)
    assert [label.get_text() for label in strip.get_yticklabels()] == ["0", "1", "4"]
    assert lattice.get_xlim() == strip.get_xlim()
    with pytest.raises(ValueError, match="durations has 2 elements; the occupancy has 3"):
        lattice_figure(occupancy, durations=(0, 1))
    with pytest.raises(TypeError, match="with durations it must be a TdtOccupancy"):
        lattice_figure(example()[1], durations=(0, 1))


@pytest.mark.parametrize(
    ("name", "value"), [("occupancy", 9), ("bounds", 0), ("alignment", 9), ("index", 0.0)]
)
def test_arguments_of_another_type(name: str, value: object) -> None:
    arguments = {"occupancy": Rows(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2)), name: value}
    with pytest.raises(TypeError, match=f"^{name} is"):
        lattice_figure(**arguments)
