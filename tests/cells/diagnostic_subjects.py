"""Functions of pruned_rnnt.diagnostics."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt import Bounds, Occupancy, diagnostics
from pruned_rnnt.diagnostics import LogProbRows, TdtLogProbRows
from tests.cells.band_references import (
    TDT_FIELDS,
    arc_occupancies,
    padded,
    tdt_occupancies,
)
from tests.cells.logit_subjects import (
    DURATIONS,
    LENGTHS,
    K,
    N,
    S,
    T,
    U,
    V,
    batch,
    option,
    random,
    start,
)
from tests.cells.references import band_mask, emit_and_blank, lattice_rows, texts
from tests.cells.subject import Arguments, Results, Subject
from tests.lattice_paths import paths
from tests.tdt_paths import TdtScores, tdt_paths

_ARCS = (N, T, U + 1)


def _lengths() -> Arguments:
    return {name: x for name, x in batch().items() if name in LENGTHS}


def _rows(names: str, *shapes: tuple[int, ...], **others: Any) -> Callable[[], Arguments]:
    """Log-probabilities by name."""
    tensors = [x.abs().neg() for x in random(*shapes)]

    def make() -> Arguments:
        given = {name: x.clone() for name, x in zip(names.split(), tensors, strict=True)}
        return {**given, **_lengths(), **{k: x() if callable(x) else x for k, x in others.items()}}

    return make


def _probabilities(names: str, *shapes: tuple[int, ...], **others: Any) -> Callable[[], Arguments]:
    make = _rows(names, *shapes, **others)
    return lambda: {k: x.exp() if k in names.split() else x for k, x in make().items()}


def _sizes(given: Arguments) -> list[tuple[int, int]]:
    return list(zip(*(torch.as_tensor(given[name]).tolist() for name in LENGTHS), strict=True))


def _own(x: Tensor, n: int, sizes: tuple[int, int]) -> Tensor:
    """(T_n, U_n+1) of padded rows."""
    return x[n, : sizes[0], : sizes[1] + 1]


def _log_prob_rows(given: Arguments) -> Results:
    logits = given["logits"].detach()
    # Of all nodes of the padded lattice that an utterance has.
    own = texts(given, logits.shape[1])
    rows = [
        emit_and_blank(x, own.targets_N[n], given)
        for n, x in enumerate(lattice_rows(logits, own, given))
    ]
    whole = {name: [row[k] for row in rows] for k, name in enumerate(("emit", "blank"))}
    if "duration_logits" in given:
        waits = lattice_rows(given["duration_logits"].detach(), own, given)
        whole["durations"] = [x.log_softmax(-1) for x in waits]
    return {name: padded(parts, *logits.shape[1:3]) for name, parts in whole.items()}


def _valid_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rows with zeros for nodes that an utterance does not have, which are not defined."""

    def call(**given: Any) -> Any:
        rows = function(**given)
        frames, columns = rows.emit.shape[1:]
        ends = [given[name].to(rows.emit.device)[:, None, None] for name in LENGTHS]
        t, u = (torch.arange(x, device=rows.emit.device) for x in (frames, columns))
        inside = (t[:, None] < ends[0]) & (u <= ends[1])
        masks = {"durations": inside[..., None]}
        return {
            name: torch.where(masks.get(name, inside), x, 0.0) for name, x in rows._asdict().items()
        }

    return call


def _occupancy(given: Arguments) -> Results:
    kind = given.get("rnnt_type", "regular")
    parts = []
    for n, sizes in enumerate(_sizes(given)):
        emit, blank = (_own(given[name].detach(), n, sizes).clone() for name in ("emit", "blank"))
        parts.append(arc_occupancies(emit, blank, *sizes, kind))
    shape = given["emit"].shape[1:3]
    pairs = zip(("emit", "blank"), zip(*parts, strict=True), strict=True)
    return {name: padded(list(x), *shape) for name, x in pairs}


def _tdt_occupancy(given: Arguments) -> Results:
    parts = []
    for n, sizes in enumerate(_sizes(given)):
        emit, blank, waits = (_own(given[k].detach(), n, sizes) for k in _tdt_arcs)
        own = TdtScores(emit, blank, waits.log_softmax(-1))
        parts.append(tdt_occupancies(own, *sizes, given["durations"]))
    shape = given["emit"].shape[1:3]
    pairs = zip(TDT_FIELDS, zip(*parts, strict=True), strict=True)
    return {name: padded(list(x), *shape) for name, x in pairs}


def _viterbi(given: Arguments) -> Results:
    kind = given.get("rnnt_type", "regular")
    frames = torch.full((len(given["emit"]), given["emit"].shape[2] - 1), -1)
    scores = []
    for n, (t_n, u_n) in enumerate(_sizes(given)):
        emit, blank = given["emit"][n].detach(), given["blank"][n].detach()
        best, chosen = -torch.inf, None
        for path in paths(t_n, u_n, kind):
            score = sum(float((emit if x else blank)[t, u]) for t, u, x in path)
            if kind == "constrained":
                score += sum(float(blank[t, u + 1]) for t, u, is_symbol in path if is_symbol)
            if score > best:
                best, chosen = score, path
        # Without a frame there is no path.
        scores.append(best if t_n > 0 else -torch.inf)
        for t, u, is_symbol in chosen or []:
            if is_symbol:
                frames[n, u] = t
    return {"frames": frames, "score": torch.tensor(scores, dtype=torch.float64)}


def _tdt_viterbi(given: Arguments) -> Results:
    emit, blank, waits = (given[name].detach() for name in ("emit", "blank", "waits"))
    durations = given["durations"]
    found = {
        name: torch.full((len(emit), emit.shape[2] - 1), -1) for name in ("frames", "durations")
    }
    scores = []
    for n, sizes in enumerate(_sizes(given)):
        best, chosen = -torch.inf, None
        for path in tdt_paths(*sizes, durations):
            arcs = [
                float((emit if x else blank)[n, t, u] + waits[n, t, u, k]) for t, u, x, k in path
            ]
            if sum(arcs) > best:
                best, chosen = sum(arcs), path
        scores.append(best)
        for t, u, is_symbol, k in chosen or []:
            if is_symbol:
                found["frames"][n, u], found["durations"][n, u] = t, durations[k]
    return {**found, "score": torch.tensor(scores, dtype=torch.float64)}


def _retained(given: Arguments) -> Results:
    """Arc by arc: kept if both ends are in the band, or the end is that of the lattice."""
    kept: dict[str, list[float]] = {"total": [], "emit": [], "blank": []}
    kind = given.get("rnnt_type", "regular")
    for n, (frames, symbols) in enumerate(_sizes(given)):
        inside = band_mask(given["start"][n], given["s_range"], symbols + 2)
        mass = {"emit": [0.0, 0.0], "blank": [0.0, 0.0]}
        for t, u in itertools.product(range(frames), range(symbols + 1)):
            step = 0 if kind == "regular" else 1
            ends = {"emit": (t + step, u + 1), "blank": (t + 1, u)}
            for name, (t_end, u_end) in ends.items():
                value = given[name][n, t, u].item()
                is_kept = bool(inside[t, u]) and (t_end >= frames or bool(inside[t_end, u_end]))
                mass[name][0] += value
                mass[name][1] += value * is_kept
        for name, (whole, part) in mass.items():
            kept[name].append(part / whole if whole > 0 else 1.0)
        whole, part = (sum(x[k] for x in mass.values()) for k in (0, 1))
        kept["total"].append(part / whole if whole > 0 else 1.0)
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in kept.items()}


def _edges(given: Arguments) -> Results:
    lower, upper = [], []
    for n, (frames, symbols) in enumerate(_sizes(given)):
        mass, low, high = 0.0, 0.0, 0.0
        for t, u in itertools.product(range(frames), range(symbols + 1)):
            first = int(given["start"][n, t])
            value = (given["emit"][n, t, u] + given["blank"][n, t, u]).item()
            last = first + given["s_range"] - 1
            if first <= u <= last:
                mass += value
                low += value * (u == first and first > 0)
                high += value * (u == last and last < symbols)
        lower.append(low / mass if mass > 0 else 0.0)
        upper.append(high / mass if mass > 0 else 0.0)
    return {
        k: torch.tensor(x, dtype=torch.float64) for k, x in (("lower", lower), ("upper", upper))
    }


def _delay(given: Arguments) -> Results:
    emit = given["emit"].detach()
    size, _, columns = emit.shape
    frames = torch.full((size, columns - 1), torch.nan, dtype=torch.float64)
    for n, (t_n, u_n) in enumerate(_sizes(given)):
        t = torch.arange(t_n, dtype=torch.float64)
        for u in range(u_n):
            own = emit[n, :t_n, u]
            frames[n, u] = (own * t).sum() / own.sum()
    ends = given["reference_frames"]
    delay = frames - (0 if ends is None else ends.detach())
    return {"frames": frames, "delay": delay, "mean": delay.nanmean()}


def _of_occupancy(function: Callable[..., Any], has_bounds: bool) -> Callable[..., Any]:
    def call(*, emit: Any, blank: Any, **given: Any) -> Any:
        if has_bounds:
            given["bounds"] = Bounds(given.pop("start"), given.pop("s_range"))
        return function(Occupancy(emit, blank), **given)

    return call


def _of_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*, emit: Any, blank: Any, **given: Any) -> Any:
        return function(LogProbRows(emit, blank), **given)

    return call


def _of_tdt_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*, emit: Any, blank: Any, waits: Any, **given: Any) -> Any:
        return function(TdtLogProbRows(emit, blank, waits), **given)

    return call


_WORDS = {
    name: ("occupancy", f"occupancy.{name}", "rows", f"rows.{name}")
    for name in ("emit", "blank", "stay")
}
_WORDS |= {"waits": ("rows", "rows.durations"), "start": ("bounds",), "s_range": ("bounds",)}


def _subject(name: str, make: Any, call: Any, reference: Any, **fields: Any) -> Subject:
    return Subject(
        f"diagnostics.{name}",
        make,
        call,
        reference,
        words=_WORDS,
        reduces=False,
        is_differentiable=False,
        **fields,
    )


_TYPES = tuple(option(rnnt_type=kind) for kind in ("modified", "constrained", "rna"))
_band = {"start": start, "s_range": S}
_arcs = ("emit", "blank")
_tdt_arcs = ("emit", "blank", "waits")
_with_durations = {"durations": DURATIONS}

SUBJECTS = [
    _subject(
        "log_prob_rows",
        lambda: {"logits": random((N, T, U + 1, V))[0], **batch()},
        _valid_rows(diagnostics.log_prob_rows),
        _log_prob_rows,
        floats=("logits",),
        integers=("targets", *LENGTHS),
        scalars={"blank": "integer"},
        options=(option(hat=True), option(from_log_probs=True)),
    ),
    _subject(
        "tdt_log_prob_rows",
        lambda: {
            **dict(
                zip(
                    ("logits", "duration_logits"),
                    random((N, T, U + 1, V), (N, T, U + 1, K)),
                    strict=True,
                )
            ),
            **batch(),
        },
        _valid_rows(diagnostics.tdt_log_prob_rows),
        _log_prob_rows,
        floats=("logits", "duration_logits"),
        integers=("targets", *LENGTHS),
        scalars={"blank": "integer"},
    ),
    _subject(
        "occupancy_of_rows",
        _rows("emit blank", _ARCS, _ARCS),
        _of_rows(diagnostics.occupancy_of_rows),
        _occupancy,
        floats=_arcs,
        integers=LENGTHS,
        scalars={"rnnt_type": "choice"},
        options=_TYPES,
    ),
    _subject(
        "occupancy_of_tdt_rows",
        _rows("emit blank waits", _ARCS, _ARCS, (*_ARCS, K), **_with_durations),
        _of_tdt_rows(diagnostics.occupancy_of_tdt_rows),
        _tdt_occupancy,
        floats=_tdt_arcs,
        integers=LENGTHS,
        scalars={"durations": "durations"},
    ),
    _subject(
        "viterbi_alignment",
        _rows("emit blank", _ARCS, _ARCS),
        diagnostics.viterbi_alignment,
        _viterbi,
        floats=_arcs,
        integers=LENGTHS,
        scalars={"rnnt_type": "choice"},
        options=_TYPES,
    ),
    _subject(
        "tdt_viterbi_alignment",
        _rows("emit blank waits", _ARCS, _ARCS, (*_ARCS, K), **_with_durations),
        _of_tdt_rows(diagnostics.tdt_viterbi_alignment),
        _tdt_viterbi,
        floats=_tdt_arcs,
        integers=LENGTHS,
        scalars={"durations": "durations"},
    ),
    _subject(
        "retained_mass",
        _probabilities("emit blank", _ARCS, _ARCS, **_band),
        _of_occupancy(diagnostics.retained_mass, has_bounds=True),
        _retained,
        floats=_arcs,
        integers=(*LENGTHS, "start"),
        scalars={"s_range": "integer", "rnnt_type": "choice"},
        options=(option(rnnt_type="modified"),),
    ),
    _subject(
        "band_edge_mass",
        _probabilities("emit blank", _ARCS, _ARCS, **_band),
        _of_occupancy(diagnostics.band_edge_mass, has_bounds=True),
        _edges,
        floats=_arcs,
        integers=(*LENGTHS, "start"),
        scalars={"s_range": "integer"},
    ),
    _subject(
        "mean_symbol_delay",
        _probabilities("emit blank reference_frames", _ARCS, _ARCS, (N, U)),
        _of_occupancy(diagnostics.mean_symbol_delay, has_bounds=False),
        _delay,
        floats=(*_arcs, "reference_frames"),
        integers=LENGTHS,
        options=(option(reference_frames=None),),
    ),
]
