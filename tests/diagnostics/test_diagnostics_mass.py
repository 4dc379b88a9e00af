"""retained_mass and band_edge_mass against path posteriors, and the advice."""

import pytest
import torch
from torch import Tensor

from pruned_rnnt.diagnostics import band_edge_mass, retained_mass
from pruned_rnnt.loss.results import Bounds, TdtOccupancy
from tests.lattice_paths import Rows, paths, posteriors, random_rows

LENGTHS = [(4, 3), (3, 1), (4, 0)]
FRAMES = torch.tensor([4, 3, 4])
SYMBOLS = torch.tensor([3, 1, 0])


def occupancy_and_band(rnnt_type: str, s_range: int) -> tuple[Rows, Bounds]:
    rows = random_rows(3, 4, 3, seed=11)
    start = torch.tensor([[0, 0, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    start = start.clamp(max=max(4 - s_range, 0))
    return posteriors(rows.emit, rows.blank, LENGTHS, rnnt_type), Bounds(start, s_range)


@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained"])
@pytest.mark.parametrize("s_range", [2, 3])
def test_retained_mass_is_that_of_the_arcs_inside(rnnt_type: str, s_range: int) -> None:
    occupancy, band = occupancy_and_band(rnnt_type, s_range)
    given = occupancy
    if rnnt_type == "constrained":
        # The losses count the blank that belongs to a symbol among the blanks.
        forced = torch.nn.functional.pad(occupancy.emit[:, :, :-1], (1, 0))
        given = Rows(occupancy.emit, occupancy.blank + forced)
    result = retained_mass(given, band, FRAMES, SYMBOLS, rnnt_type=rnnt_type)
    for n, (frames, symbols) in enumerate(LENGTHS):

        def inside(t: int, u: int, n: int = n, frames: int = frames) -> bool:
            if t == frames:  # the final node
                return True
            return 0 <= u - int(band.start[n, t]) < s_range

        kept = {True: 0.0, False: 0.0}
        mass = {True: 0.0, False: 0.0}
        arcs = {arc for path in paths(frames, symbols, rnnt_type) for arc in path}
        for arc in arcs:
            source = occupancy.emit if arc.is_symbol else occupancy.blank
            share = float(source[n, arc.frame, arc.column])
            frame_step = 1 if rnnt_type != "regular" or not arc.is_symbol else 0
            target = (arc.frame + frame_step, arc.column + int(arc.is_symbol))
            mass[arc.is_symbol] += share
            whole = inside(arc.frame, arc.column) and inside(*target)
            if rnnt_type == "constrained" and arc.is_symbol:
                whole = whole and inside(arc.frame, arc.column + 1)
            if whole:
                kept[arc.is_symbol] += share
        assert result.blank[n].item() == pytest.approx(kept[False] / mass[False])
        if symbols:
            assert result.emit[n].item() == pytest.approx(kept[True] / mass[True])
        else:
            assert result.emit[n].item() == 1.0
        assert result.total[n].item() == pytest.approx(sum(kept.values()) / sum(mass.values()))
    if s_range == 2:
        assert result.total[0] < 0.99


def test_band_of_all_columns_keeps_everything() -> None:
    occupancy, band = occupancy_and_band("regular", 4)
    result = retained_mass(occupancy, band, FRAMES, SYMBOLS)
    for share in result:
        torch.testing.assert_close(share, torch.ones(3, dtype=torch.float64))
    edge = band_edge_mass(occupancy, band, FRAMES, SYMBOLS)
    assert edge.lower.tolist() == [0.0] * 3
    assert edge.upper.tolist() == [0.0] * 3


def test_padding_is_ignored_in_retained_mass() -> None:
    occupancy, band = occupancy_and_band("regular", 2)
    dirty = Rows(occupancy.emit.clone(), occupancy.blank.clone())
    dirty.emit[1, 3:] = 9.0
    dirty.blank[1, :, 2:] = 9.0
    torch.testing.assert_close(
        retained_mass(dirty, band, FRAMES, SYMBOLS),
        retained_mass(occupancy, band, FRAMES, SYMBOLS),
    )


def staircase(spread: int) -> tuple[Rows, Tensor, Tensor]:
    """40 frames, 20 symbols, the mass of each frame spread evenly over 2 * spread + 1 columns."""
    centre = torch.arange(40)[:, None] / 2
    near = (torch.arange(21)[None, :] - centre).abs() <= spread
    blank = (near / near.sum(dim=1, keepdim=True)).to(torch.float64)[None]
    return Rows(torch.zeros_like(blank), blank), torch.tensor([40]), torch.tensor([20])


def centred_band(s_range: int) -> Bounds:
    start = torch.arange(40) // 2 - s_range // 2
    return Bounds(start.clamp(0, 21 - s_range)[None].to(torch.int32), s_range)


@pytest.mark.parametrize(
    ("spread", "s_range", "advice"),
    [
        (4, 5, "s_range=5 is too small: "),
        (4, 5, "of the frames need 9 columns, try s_range=9."),
        (2, 8, "s_range=8 is larger than needed: "),
        (2, 8, "s_range=6 covers 99% of the frames"),
        (2, 6, "s_range=6 fits: "),
    ],
)
def test_advice(spread: int, s_range: int, advice: str) -> None:
    occupancy, frames, symbols = staircase(spread)
    result = band_edge_mass(occupancy, centred_band(s_range), frames, symbols)
    assert advice in result.advice


def test_edge_mass_is_that_of_the_outer_columns() -> None:
    occupancy, frames, symbols = staircase(4)
    band = centred_band(5)
    result = band_edge_mass(occupancy, band, frames, symbols)
    lower = upper = inside = 0.0
    for t, start in enumerate(band.start[0].tolist()):
        row = occupancy.blank[0, t].tolist()
        inside += sum(row[start : start + 5])
        lower += row[start] if start > 0 else 0.0
        upper += row[start + 4] if start + 4 < 20 else 0.0
    assert result.lower.item() == pytest.approx(lower / inside)
    assert result.upper.item() == pytest.approx(upper / inside)
    assert result.needed_s_range == 9


def test_no_mass_at_all() -> None:
    rows = Rows(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))
    band, lengths = Bounds(torch.zeros(1, 2, dtype=torch.int32), 2), torch.tensor([[2], [1]])
    result = band_edge_mass(rows, band, *lengths)
    assert result.needed_s_range == 1
    assert result.advice.startswith("1 of 1 utterances have no path or NaN probabilities")
    assert "fits" not in result.advice
    for share in (*result[:2], *retained_mass(rows, band, *lengths)):
        assert share.isnan().all()


@pytest.mark.parametrize("spoilt", [0.0, torch.nan])
@pytest.mark.parametrize("tdt", [False, True])
def test_utterances_without_a_path_or_with_nan_are_left_out(tdt: bool, spoilt: float) -> None:
    one, frames, symbols = staircase(4)
    arcs = [torch.cat([x, x * spoilt, x]) for x in one[:2]]
    occupancy = Rows(*arcs)
    if tdt:
        stay = torch.zeros_like(arcs[0]) * arcs[0]
        occupancy = TdtOccupancy(*arcs, stay, stay[..., None])
    band = Bounds(centred_band(5).start.expand(3, -1), 5)
    lengths = frames.expand(3), symbols.expand(3)
    alone = band_edge_mass(one, centred_band(5), frames, symbols)
    result = band_edge_mass(occupancy, band, *lengths)
    assert result.needed_s_range == alone.needed_s_range
    assert result.advice.startswith("1 of 3 utterances have no path or NaN probabilities")
    assert result.advice.endswith(alone.advice)
    for share in (*result[:2], *retained_mass(occupancy, band, *lengths)):
        assert share.isnan().tolist() == [False, True, False]


def test_retained_mass_of_a_tdt_lattice_is_that_of_arcs_that_leave_the_band() -> None:
    generator = torch.Generator().manual_seed(4)
    stay, longer, blank = torch.rand(3, 1, 3, 4, generator=generator, dtype=torch.float64)
    for arcs in (stay, longer):
        arcs[:, :, -1] = 0
    occupancy = TdtOccupancy(stay + longer, blank, stay, torch.zeros(1, 3, 4, 5))
    band = Bounds(torch.tensor([[0, 0, 2]], dtype=torch.int32), 2)
    result = retained_mass(occupancy, band, torch.tensor([3]), torch.tensor([3]))
    kept = {"stay": 0.0, "longer": 0.0, "blank": 0.0}
    for t, start in enumerate((0, 0, 2)):
        for u in range(start, start + 2):
            kept["longer"] += float(longer[0, t, u])
            kept["blank"] += float(blank[0, t, u])
            # A symbol of duration 0 lands one column further in the same frame.
            kept["stay"] += float(stay[0, t, u]) if u + 1 < start + 2 else 0.0
    symbols = float((stay + longer).sum())
    assert result.emit.item() == pytest.approx((kept["stay"] + kept["longer"]) / symbols)
    assert result.blank.item() == pytest.approx(kept["blank"] / float(blank.sum()))
    assert result.total.item() == pytest.approx(sum(kept.values()) / (symbols + float(blank.sum())))
