"""Float64 references of the simple losses, occupancies and bands; as in references.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.cells.references import Arguments, Texts, reduced, symbol_rows, texts
from tests.lattice_paths import log_total
from tests.tdt_paths import TdtScores, path_scores, tdt_table, tdt_total

_TIE = 1e-5
_LEAST_VISITS = 0.02  # of a frame of a TDT lattice, to choose its own window


def padded(rows: list[Tensor], frames: int, columns: int) -> Tensor:
    """(N, frames, columns, ...) of rows (T_n, U_n+1, ...), zeros elsewhere."""
    whole = rows[0].new_zeros((len(rows), frames, columns, *rows[0].shape[2:]))
    for n, x in enumerate(rows):
        whole[n, : x.shape[0], : x.shape[1]] = x
    return whole


def smoothed(am: Tensor, lm: Tensor, batch: Texts, given: Arguments) -> Tensor:
    """(N, T, U+1, V), the log-probabilities of rnnt_loss_simple."""
    of_lm, of_am = given.get("lm_only_scale", 0.0), given.get("am_only_scale", 0.0)
    combined = (am[:, :, None] + lm[:, None]).log_softmax(-1)
    lm_only = lm.log_softmax(-1)
    if given.get("averages_padding"):
        real = lm_only.flatten(0, 1)
    else:
        real = torch.cat([lm_only[n, : u + 1] for n, u in enumerate(batch.symbols_N)])
    log_q = real.logsumexp(0) - torch.tensor(float(len(real)), dtype=am.dtype).log()
    am_only = (am + log_q).log_softmax(-1)
    parts = of_lm * lm_only[:, None] + of_am * am_only[:, :, None]
    return (1 - of_lm - of_am) * combined + parts


def picked(scores: Tensor, n: int, batch: Texts, blank: int) -> tuple[Tensor, Tensor]:
    """emit, blank (T_n, U_n+1) of log-probabilities (N, T, U+1, V)."""
    frames, targets = batch.frames_N[n], batch.targets_N[n]
    own = scores[n, :frames, : len(targets) + 1]
    emit = [own[:, u, y] for u, y in enumerate(targets)]
    emit.append(torch.full_like(own[:, 0, 0], -torch.inf))
    return torch.stack(emit, 1), own[..., blank % scores.shape[-1]]


def derivatives(total: Tensor, *rows: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(total, rows, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(rows, grads, strict=True)]


def arc_occupancies(
    emit: Tensor, blank: Tensor, frames: int, symbols: int, rnnt_type: str
) -> list[Tensor]:
    """emit, blank (T_n, U_n+1), d log P by each."""
    arcs = [x.detach().requires_grad_() for x in (emit, blank)]
    with torch.enable_grad():
        return derivatives(log_total(*arcs, frames, symbols, rnnt_type), *arcs)


def simple(given: Arguments) -> dict[str, Tensor]:
    am, lm = given["am"], given["lm"]
    batch = texts(given, am.shape[1], lm.shape[1] - 1)
    scores = smoothed(am, lm, batch, given)
    kind = given.get("rnnt_type", "regular")
    losses, occupied = [], []
    for n, sizes in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        emit, blank = picked(scores, n, batch, given.get("blank", 0))
        emit = symbol_rows(emit, given, sizes[0])
        losses.append(-log_total(emit, blank, *sizes, kind))
        occupied.append(arc_occupancies(emit, blank, *sizes, kind))
    names = ("occupancy.emit", "occupancy.blank")
    shape = am.shape[1], lm.shape[1]
    parts = zip(names, zip(*occupied, strict=True), strict=True)
    arcs = {name: padded(list(x), *shape) for name, x in parts}
    return {"loss": reduced(torch.stack(losses), given), **arcs}


def tdt_occupancies(
    scores: TdtScores, frames: int, symbols: int, durations: Sequence[int]
) -> list[Tensor]:
    """emit, blank, stay (T_n, U_n+1) and durations (T_n, U_n+1, K), by summing over paths."""
    emit, blank, waits = (x.detach() for x in scores)
    found = [torch.zeros_like(x) for x in (emit, blank, emit, waits)]
    table = tdt_table(frames, symbols, tuple(durations))
    score_P = path_scores(TdtScores(emit, blank, waits), table)
    probability_PA = (score_P - score_P.logsumexp(0)).exp()[:, None].expand(table.is_arc_PA.shape)
    stays_PA = table.is_symbol_PA & (torch.tensor(durations)[table.duration_PA] == 0)
    for target, is_own_PA in (
        (found[0], table.is_symbol_PA),
        (found[1], ~table.is_symbol_PA),
        (found[2], stays_PA),
    ):
        own_PA = is_own_PA & table.is_arc_PA
        place = table.frame_PA[own_PA], table.column_PA[own_PA]
        target.index_put_(place, probability_PA[own_PA], accumulate=True)
    own_PA = table.is_arc_PA
    place = table.frame_PA[own_PA], table.column_PA[own_PA], table.duration_PA[own_PA]
    found[3].index_put_(place, probability_PA[own_PA], accumulate=True)
    return found


TDT_FIELDS = ("emit", "blank", "stay", "durations")


def tdt_simple(given: Arguments) -> dict[str, Tensor]:
    am, lm = given["am"], given["lm"]
    batch = texts(given, am.shape[1], lm.shape[1] - 1)
    durations = given.get("durations", (0, 1, 2, 3, 4))
    scores = smoothed(am, lm, batch, given) - given.get("sigma", 0.0)
    waits = (given["duration_am"][:, :, None] + given["duration_lm"][:, None]).log_softmax(-1)
    losses, occupied = [], []
    for n, sizes in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        emit, blank = picked(scores, n, batch, given.get("blank", 0))
        emit = symbol_rows(emit, given, sizes[0])
        own = TdtScores(emit, blank, waits[n, : sizes[0], : sizes[1] + 1])
        losses.append(-tdt_total(own, *sizes, durations))
        occupied.append(tdt_occupancies(own, *sizes, durations))
    shape = am.shape[1], lm.shape[1]
    parts = zip(TDT_FIELDS, zip(*occupied, strict=True), strict=True)
    arcs = {f"occupancy.{name}": padded(list(x), *shape) for name, x in parts}
    return {"loss": reduced(torch.stack(losses), given), **arcs}


def lengths_of(given: Arguments, frames: int, symbols: int, size: int) -> list[tuple[int, int]]:
    """(T_n, U_n), the padded sizes for lengths that are None."""
    full = ("logit_lengths", frames), ("target_lengths", symbols)
    found = [
        [count] * size if given.get(name) is None else torch.as_tensor(given[name]).tolist()
        for name, count in full
    ]
    return list(zip(*found, strict=True))


def band_starts(
    emit: Tensor, blank: Tensor, lengths: list[tuple[int, int]], s_range: int, rnnt_type: str
) -> Tensor:
    """start (N, T) by the rule, step by step."""
    k = s_range - 1 if rnnt_type == "regular" else 1
    takes_frame = rnnt_type in ("modified", "rna")
    starts = []
    for n, (frames, symbols) in enumerate(lengths):
        last = max(symbols + 1 - s_range, 0)
        best = []
        for t in range(emit.shape[1]):
            scores = []
            for s in range(last + 1):
                kept = blank[n, t, s : s + s_range].sum()
                if takes_frame:
                    kept = kept + emit[n, t, s : s + s_range].sum()
                elif s > 0:
                    kept = kept - emit[n, t, s - 1]
                scores.append(float(kept))
            tied = [s for s, x in enumerate(scores) if x >= max(scores) - _TIE]
            best.append(tied[(len(tied) - 1) // 2] if t < frames - 1 else last)
        low = [min(best[t:]) for t in range(len(best))]
        ahead = [max(s - k * i for i, s in enumerate(low[t:])) for t in range(len(low))]
        starts.append([min(k * t, s) for t, s in enumerate(ahead)])
    return torch.tensor(starts)


def prune_bounds(given: Arguments) -> dict[str, Tensor]:
    emit, blank = given["emit"].detach(), given["blank"].detach()
    size, frames, columns = emit.shape
    lengths = lengths_of(given, frames, columns - 1, size)
    kind = given.get("rnnt_type", "regular")
    return {"start": band_starts(emit, blank, lengths, given["s_range"], kind)}


def prune_bounds_tdt(given: Arguments) -> dict[str, Tensor]:
    emit, blank, stay = (given[name].detach() for name in TDT_FIELDS[:3])
    size, frames, columns = emit.shape
    leave = emit + blank - stay
    visits = leave.sum(2)
    for n in range(size):
        source = 0
        for t in range(frames):
            source = t if visits[n, t] >= _LEAST_VISITS else source
            if source != t:
                leave[n, t], stay[n, t], visits[n, t] = leave[n, source], stay[n, source], 1.0
            else:
                scale = 1 / visits[n, t].clamp_min(_LEAST_VISITS)
                leave[n, t] *= scale
                stay[n, t] *= scale
    kind = "regular" if 0 in given["durations"] else "modified"
    lengths = lengths_of(given, frames, columns - 1, size)
    return {"start": band_starts(stay, leave, lengths, given["s_range"], kind)}


def prune(given: Arguments) -> dict[str, Tensor]:
    am, lm, start, width = given["am"], given["lm"], given["start"], given["s_range"]
    columns = start.long()[:, :, None] + torch.arange(width)
    inside = (columns >= 0) & (columns < lm.shape[1])
    index = columns.clamp(0, lm.shape[1] - 1)
    gathered = torch.stack([rows[index[n]] for n, rows in enumerate(lm)]) * inside[..., None]
    return {"am": am[:, :, None].expand(-1, -1, width, -1), "lm": gathered}


def information(given: Arguments) -> dict[str, Tensor]:
    """The recursion of k2's layout, node by node; a symbol of `regular` may follow the last
    frame."""
    px, py, boundary = given["px"], given["py"], given.get("boundary")
    kind = given.get("rnnt_type", "regular")
    step = 0 if kind == "regular" else 1
    size, columns, frames = py.shape
    boxes = [[0, 0, columns - 1, frames]] * size if boundary is None else boundary.tolist()
    totals = []
    for n, (u_begin, t_begin, u_end, t_end) in enumerate(boxes):
        alpha = {(u_begin, t_begin): py.new_zeros(())}
        for t in range(t_begin, t_end + 1):
            for u in range(u_begin, u_end + 1):
                arcs = []
                if (u, t - 1) in alpha:
                    arcs.append(alpha[u, t - 1] + py[n, u, t - 1])
                source = (u - 1, t - step)
                is_last = kind == "rna" and t == t_end
                if source in alpha and not is_last and px[n, *source] > -torch.inf:
                    arcs.append(alpha[source] + px[n, *source])
                    if kind == "constrained":
                        arcs[-1] = arcs[-1] + py[n, u, t - step]
                if arcs:
                    alpha[u, t] = torch.stack(arcs).logsumexp(0)
        totals.append(alpha[u_end, t_end])
    total = torch.stack(totals)
    emit, blank = derivatives(total.sum(), px, py) if px.requires_grad else (px, py)
    return {"total": total, "occupancy.emit": emit.detach(), "occupancy.blank": blank.detach()}
