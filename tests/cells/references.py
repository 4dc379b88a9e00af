"""Float64 references in plain torch: sums over all paths, one by one, differentiated by autograd.

Arguments are those of the functions under test, by name, on the CPU and in float64. Axes: N batch,
T frames, U symbols, S band, V vocabulary, K durations, D joiner width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.lattice_paths import joiner_log_probs, log_total
from tests.tdt_paths import tdt_scores, tdt_total

Arguments = dict[str, Any]
Rows = list[Tensor]


class Texts(NamedTuple):
    """Lengths and symbols of the utterances."""

    frames_N: list[int]
    symbols_N: list[int]
    targets_N: list[list[int]]


def texts(given: Arguments, frames: int | None, symbols: int | None = None) -> Texts:
    """frames and symbols: the padded sizes, for lengths that are None."""
    targets = given["targets"]
    size = len(targets)
    frames_N, symbols_N = given.get("logit_lengths"), given.get("target_lengths")
    frames_N = [frames] * size if frames_N is None else torch.as_tensor(frames_N).tolist()
    full = targets.shape[1] if symbols is None else symbols
    symbols_N = [full] * size if symbols_N is None else torch.as_tensor(symbols_N).tolist()
    chosen = [targets[n, :count].tolist() for n, count in enumerate(symbols_N)]
    return Texts(frames_N, symbols_N, chosen)


def reduced(loss_N: Tensor, given: Arguments) -> Tensor:
    kind = given.get("reduction", "mean")
    return {"none": lambda: loss_N, "mean": loss_N.mean, "sum": loss_N.sum}[kind]()


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is multiplied."""
    return x.detach() + factor * (x - x.detach())


def clamped(rows: Tensor, clamp: float | None, loss_of: Any) -> Tensor:
    """loss_of(rows), whose derivatives by the elements of rows are clamped."""
    if clamp is None:
        return loss_of(rows)
    inner = rows.detach().requires_grad_()
    with torch.enable_grad():
        loss = loss_of(inner)
        (grad,) = torch.autograd.grad(loss, inner)
    return loss.detach() + (grad.clamp(-clamp, clamp) * (rows - rows.detach())).sum()


def symbol_rows(emit: Tensor, given: Arguments, frames: int) -> Tensor:
    """Log-probabilities (T, U_n+1) of symbols with penalty and scaled gradient."""
    t = torch.arange(len(emit), dtype=emit.dtype)[:, None]
    emit = emit + given.get("delay_penalty", 0.0) * ((frames - 1) / 2 - t)
    return scaled_gradient(emit, 1 + given.get("fastemit_lambda", 0.0))


def emit_and_blank(rows: Tensor, targets: list[int], given: Arguments) -> tuple[Tensor, Tensor]:
    """Log-probabilities (T, U_n+1) of logits (T, U_n+1, V)."""
    blank = given.get("blank", 0) % rows.shape[-1]
    if given.get("from_log_probs"):
        emit = [rows[:, u, y] for u, y in enumerate(targets)]
        emit.append(torch.full_like(rows[:, 0, 0], -torch.inf))
        return torch.stack(emit, 1), rows[..., blank]
    return joiner_log_probs(rows, targets, blank, hat=given.get("hat", False))


def band_mask(start: Tensor, s_range: int, columns: int) -> Tensor:
    """(T, U_n+1) bool of one utterance's starts (T)."""
    u = torch.arange(columns)
    return (u >= start[:, None]) & (u < start[:, None] + s_range)


def logit_loss(rows: Tensor, n: int, batch: Texts, given: Arguments) -> Tensor:
    """-log P of one utterance by its logits (T_n, U_n+1, V); inside its band, if there is one."""

    def loss(rows: Tensor) -> Tensor:
        emit, blank = emit_and_blank(rows, batch.targets_N[n], given)
        emit = symbol_rows(emit, given, batch.frames_N[n])
        if given.get("start") is not None:
            start = given["start"][n, : len(rows)]
            outside = ~band_mask(start, given["s_range"], rows.shape[1])
            emit, blank = (x.masked_fill(outside, -torch.inf) for x in (emit, blank))
        sizes = batch.frames_N[n], batch.symbols_N[n]
        return -log_total(emit, blank, *sizes, given.get("rnnt_type", "regular"))

    return clamped(rows, given.get("clamp"), loss)


def lattice_rows(logits: Tensor, batch: Texts, given: Arguments) -> Rows:
    """The logits of each utterance's own lattice (T_n, U_n+1, V): of padded or packed logits, of
    the whole lattice or of a band, whose other nodes are 0."""
    start, rows, first = given.get("start"), [], 0
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        columns = symbols + 1 if start is None else given["s_range"]
        if logits.dim() == 2:
            count = frames * columns
            own = logits[first : first + count].view(frames, columns, -1)
            first += count
        else:
            own = logits[n, :frames, :columns]
        if start is not None:
            j = torch.arange(symbols + 1) - start[n, :frames, None]
            inside = (j >= 0) & (j < columns)
            index = j.clamp(0, columns - 1)[:, :, None].expand(-1, -1, own.shape[-1])
            own = own.gather(1, index) * inside[:, :, None]
        rows.append(own)
    return rows


def frame_count(given: Arguments, logits: Tensor) -> int | None:
    return logits.shape[1] if logits.dim() == 4 else None


def rnnt(given: Arguments) -> dict[str, Tensor]:
    logits = given["logits"]
    batch = texts(given, frame_count(given, logits))
    rows = lattice_rows(logits, batch, given)
    losses = [logit_loss(x, n, batch, given) for n, x in enumerate(rows)]
    return {"result": reduced(torch.stack(losses), given)}


def joined(given: Arguments, batch: Texts, weight: Tensor, bias: Tensor | None) -> Rows:
    """Rows act(am + lm) weight^T + bias."""
    act = {"tanh": torch.tanh, "relu": torch.relu, "none": lambda x: x}
    hidden = act[given.get("activation", "tanh")](given["am"][:, :, None] + given["lm"][:, None])
    logits = torch.nn.functional.linear(hidden, weight, bias)
    lengths = zip(batch.frames_N, batch.symbols_N, strict=True)
    return [logits[n, :t, : u + 1] for n, (t, u) in enumerate(lengths)]


def fused(given: Arguments) -> dict[str, Tensor]:
    batch = texts(given, given["am"].shape[1])
    rows = joined(given, batch, given["weight"], given.get("bias"))
    losses = [logit_loss(x, n, batch, given) for n, x in enumerate(rows)]
    return {"result": reduced(torch.stack(losses), given)}


class TdtRow(NamedTuple):
    """Of one utterance: logits (T_n, U_n+1, V) and duration logits (T_n, U_n+1, K)."""

    logits: Tensor
    durations: Tensor


def tdt_loss(row: TdtRow, n: int, batch: Texts, given: Arguments) -> Tensor:
    durations = given.get("durations", (0, 1, 2, 3, 4))
    blank = given.get("blank", 0) % row.logits.shape[-1]
    width = row.logits.shape[-1]

    def loss(both: Tensor) -> Tensor:
        tokens = both[..., :width], both[..., width:]
        scores = tdt_scores(*tokens, batch.targets_N[n], blank, given.get("sigma", 0.0))
        scores = scores._replace(emit=symbol_rows(scores.emit, given, batch.frames_N[n]))
        band = ()
        if given.get("start") is not None:
            band = (given["start"][n], given["s_range"])
        return -tdt_total(scores, batch.frames_N[n], batch.symbols_N[n], durations, *band)

    return clamped(torch.cat(row, -1), given.get("clamp"), loss)


def tdt(given: Arguments) -> dict[str, Tensor]:
    batch = texts(given, frame_count(given, given["logits"]))
    both = [lattice_rows(given[name], batch, given) for name in ("logits", "duration_logits")]
    pairs = zip(*both, strict=True)
    losses = [tdt_loss(TdtRow(*pair), n, batch, given) for n, pair in enumerate(pairs)]
    return {"result": reduced(torch.stack(losses), given)}


def tdt_fused(given: Arguments) -> dict[str, Tensor]:
    batch = texts(given, given["am"].shape[1])
    tokens = joined(given, batch, given["weight"], given.get("bias"))
    waits = joined(given, batch, given["duration_weight"], given.get("duration_bias"))
    pairs = zip(tokens, waits, strict=True)
    losses = [tdt_loss(TdtRow(*pair), n, batch, given) for n, pair in enumerate(pairs)]
    return {"result": reduced(torch.stack(losses), given)}


def multi_blank(given: Arguments) -> dict[str, Tensor]:
    logits = given["logits"]
    batch = texts(given, frame_count(given, logits))
    losses = []
    for n, rows in enumerate(lattice_rows(logits, batch, given)):
        frames, symbols = batch.frames_N[n], batch.symbols_N[n]
        blanks = {given.get("blank", 0) % rows.shape[-1]: 1, **given["big_blanks"]}

        def loss(
            rows: Tensor,
            n: int = n,
            frames: int = frames,
            symbols: int = symbols,
            blanks: dict[int, int] = blanks,
        ) -> Tensor:
            scores = rows.log_softmax(-1) - given.get("sigma", 0.0)
            targets = batch.targets_N[n]
            emit = torch.stack(
                [scores[:, u, y] for u, y in enumerate(targets)] + [scores[:, 0, 0]], 1
            )
            emit = symbol_rows(emit, given, len(rows))
            alpha = {(0, 0): rows.new_zeros(())}
            for t in range(frames + 1):
                for u in range(symbols + 1):
                    arcs = [
                        alpha[t - d, u] + scores[t - d, u, column]
                        for column, d in blanks.items()
                        if t >= d
                    ]
                    if u > 0 and t < frames:
                        arcs.append(alpha[t, u - 1] + emit[t, u - 1])
                    if arcs:
                        alpha[t, u] = torch.stack(arcs).logsumexp(0)
            return -alpha[frames, symbols]

        losses.append(clamped(rows, given.get("clamp"), loss))
    return {"result": reduced(torch.stack(losses), given)}


def ctc(given: Arguments) -> dict[str, Tensor]:
    """Over all label sequences; 0 for an utterance without a path."""
    log_probs = given["logits"].log_softmax(-1)
    batch = texts(given, log_probs.shape[1])
    blank = given.get("blank", 0) % log_probs.shape[-1]
    losses = []
    for n, targets in enumerate(batch.targets_N):
        frames = batch.frames_N[n]
        labels = sorted({blank, *targets})
        paths = torch.cartesian_prod(*[torch.tensor(labels)] * frames).view(-1, frames)
        kept = [path for path in paths.tolist() if _collapsed(path, blank) == targets]
        scores = [log_probs[n, torch.arange(frames), torch.tensor(path)].sum() for path in kept]
        none = 0 * log_probs[n].nan_to_num().sum()
        losses.append(-torch.stack(scores).logsumexp(0) if scores else none)
    return {"result": reduced(torch.stack(losses), given)}


def _collapsed(path: list[int], blank: int) -> list[int]:
    pairs = zip(path, [blank, *path[:-1]], strict=True)
    return [x for x, before in pairs if x != before and x != blank]


def ctc_consistency(given: Arguments) -> dict[str, Tensor]:
    ours, theirs = (given[x].log_softmax(-1) for x in ("logits", "other_logits"))
    lengths = given.get("logit_lengths")
    losses = []
    for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        frames = len(a) if lengths is None else int(torch.as_tensor(lengths)[n])
        a, b = a[:frames], b[:frames]
        one = (b.exp().detach() * (b.detach() - a)).sum()
        other = (a.exp().detach() * (a.detach() - b)).sum()
        losses.append((one + other) / 2)
    return {"result": reduced(torch.stack(losses), given)}
