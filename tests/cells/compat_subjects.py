"""The functions of pruned_rnnt.compat, with the argument names of other packages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.compat import (
    fast_rnnt,
    k2,
    nemo_loss,
    optimized_transducer,
    transformers_loss,
    warp_rnnt,
    warprnnt_pytorch,
)
from pruned_rnnt.compat.torchaudio import functional as torchaudio
from tests.cells import band_references, references
from tests.cells.logit_subjects import (
    FRAMES,
    LENGTHS,
    SYMBOLS,
    D,
    N,
    S,
    T,
    U,
    V,
    batch,
    option,
    random,
    rows_of,
    start,
)
from tests.cells.subject import Arguments, Option, Results, Subject

# Our name by that of another package.
_WARP = {"acts": "logits", "labels": "targets", "act_lens": "logit_lengths"}
_WARP |= {"label_lens": "target_lengths"}
_WARP_RNNT = {"log_probs": "logits", "labels": "targets"}
_WARP_RNNT |= {"frames_lengths": "logit_lengths", "labels_lengths": "target_lengths"}
K2_NAMES = {"symbols": "targets", "termination_symbol": "blank"}
BOUNDARY = torch.tensor([[0, 0, u, t] for t, u in zip(FRAMES, SYMBOLS, strict=True)])
RANGES = start().long()[:, :, None] + torch.arange(S)


def renamed(given: Arguments, meanings: dict[str, str]) -> Arguments:
    """Arguments under the names of the references."""
    ours = {meanings.get(name, name): x for name, x in given.items()}
    boundary = ours.pop("boundary", None)
    if boundary is not None:
        ours["logit_lengths"], ours["target_lengths"] = boundary[:, 3], boundary[:, 2]
    ranges = ours.pop("ranges", None)
    if ranges is not None:
        ours["start"], ours["s_range"] = ranges[:, :, 0].int(), ranges.shape[2]
    return ours


def _made(
    meanings: dict[str, str], logits: Tensor, integers: torch.dtype, **options: Any
) -> Callable[[], Arguments]:
    theirs = {ours: name for name, ours in meanings.items()}

    def make() -> Arguments:
        given = {"logits": logits.clone(), **{k: x.to(integers) for k, x in batch().items()}}
        return {**{theirs.get(name, name): x for name, x in given.items()}, **options}

    return make


def _losses(
    name: str,
    function: Callable[..., Any],
    meanings: dict[str, str],
    logits: Tensor,
    *,
    fixed: Arguments | None = None,
    choices: tuple[Option, ...] = (),
    integers: torch.dtype = torch.int64,
    **options: Any,
) -> Subject:
    """A loss of logits; fixed: what the reference knows besides the arguments."""

    def reference(given: Arguments) -> Results:
        return references.rnnt({**renamed(given, meanings), **(fixed or {})})

    theirs = {ours: name for name, ours in meanings.items()}
    names = [theirs.get(x, x) for x in ("logits", "targets", *LENGTHS)]
    # warp_rnnt's own messages call them so.
    short = dict(zip(names, (("xs",), ("ys",), ("xn",), ("yn",)), strict=True))
    return Subject(
        f"compat.{name}",
        _made(meanings, logits, integers, **options),
        function,
        reference,
        floats=(names[0],),
        integers=tuple(names[1:]),
        options=choices,
        words=short if name.startswith("warp_rnnt") else {},
        meanings=meanings,
        reduces=False,
        overwrites=name.startswith("optimized_transducer"),
    )


def _k2(
    name: str,
    function: Any,
    floats: dict[str, tuple[int, ...]],
    reference: Any,
    package: str = "k2",
) -> Subject:
    tensors = random(*floats.values())
    has_ranges = "pruned" in name

    def make() -> Arguments:
        given = {key: x.clone() for key, x in zip(floats, tensors, strict=True)}
        given |= {
            "symbols": batch()["targets"],
            "termination_symbol": 0,
            "boundary": BOUNDARY.clone(),
        }
        if has_ranges:
            given["ranges"] = RANGES
        return {**given, "reduction": "none"}

    def named(given: Arguments) -> Results:
        found = reference({**renamed(given, K2_NAMES), "averages_padding": True})
        return {"result": next(iter(found.values()))}

    return Subject(
        f"compat.{package}.{name}",
        make,
        function,
        named,
        floats=tuple(floats),
        integers=("symbols", "boundary", *(["ranges"] if has_ranges else [])),
        scalars={"termination_symbol": "integer", "rnnt_type": "choice", "delay_penalty": "finite"},
        options=(option(rnnt_type="modified"), option(rnnt_type="constrained")),
        has_products="simple" in name or "smoothed" in name,
        meanings=K2_NAMES,
        reduces=True,
    )


def _pruning() -> Subject:
    am, lm = random((N, T, D), (N, U + 1, D))

    def make() -> Arguments:
        return {"am": am.clone(), "lm": lm.clone(), "ranges": RANGES}

    def reference(given: Arguments) -> Results:
        found = band_references.prune(renamed(given, {}))
        return {"0": found["am"], "1": found["lm"]}

    return Subject(
        "compat.k2.do_rnnt_pruning",
        make,
        k2.do_rnnt_pruning,
        reference,
        floats=("am", "lm"),
        integers=("ranges",),
        reduces=False,
    )


def _ranges() -> Subject:
    emit, blank = (x.sigmoid() for x in random((N, U, T + 1), (N, U + 1, T)))

    def make() -> Arguments:
        given = {"px_grad": emit.clone(), "py_grad": blank.clone()}
        return {**given, "boundary": BOUNDARY.clone(), "s_range": S}

    return Subject(
        "compat.k2.get_rnnt_prune_ranges",
        make,
        k2.get_rnnt_prune_ranges,
        _ranges_reference,
        floats=("px_grad", "py_grad"),
        integers=("boundary",),
        scalars={"s_range": "integer"},
        reduces=False,
        is_differentiable=False,
    )


def _ranges_reference(given: Arguments) -> Results:
    blank = given["py_grad"].detach().mT
    emit = torch.nn.functional.pad(given["px_grad"].detach()[:, :, :T].mT, (0, 1))
    # k2 searches up to the padded S, and ends at the end of each utterance.
    # s_range is raised to what the longest reference needs, and lowered to S + 1.
    needed = max(-(-s // t) for _, _, s, t in given["boundary"].tolist()) + 1
    width = min(max(int(given["s_range"]), needed, 2), blank.shape[2])
    given = {**given, "s_range": width}
    starts = []
    last = blank.shape[2] - width
    for n, (_, _, symbols, frames) in enumerate(given["boundary"].tolist()):
        best = []
        for t in range(blank.shape[1]):
            scores = []
            for s in range(last + 1):
                kept = float(blank[n, t, s : s + given["s_range"]].sum())
                scores.append(kept - (float(emit[n, t, s - 1]) if s > 0 else 0.0))
            top = max(range(len(scores)), key=scores.__getitem__)
            best.append(top if t < frames - 1 else max(symbols + 1 - given["s_range"], 0))
        low = [min(best[t:]) for t in range(len(best))]
        k = given["s_range"] - 1
        ahead = [max(s - k * i for i, s in enumerate(low[t:])) for t in range(len(low))]
        starts.append([min(k * t, s) for t, s in enumerate(ahead)])
    return {"result": torch.tensor(starts)[:, :, None] + torch.arange(given["s_range"])}


def _recursion() -> Subject:
    px, py = random((N, U, T + 1), (N, U + 1, T))
    return Subject(
        "compat.k2.mutual_information_recursion",
        lambda: {"px": px.clone(), "py": py.clone(), "boundary": BOUNDARY.clone()},
        k2.mutual_information_recursion,
        lambda given: {"result": band_references.information(given)["total"]},
        floats=("px", "py"),
        integers=("boundary",),
        gives_scores=True,
        reduces=False,
    )


def _nemo(**given: Any) -> Tensor:
    return nemo_loss.NemoRNNTLoss(blank=V - 1)(**given)


_nodes = random((N, T, U + 1, V))[0]
_packed = rows_of([u + 1 for u in SYMBOLS], V)
_all_nodes, _of_band = {"logits": (N, T, U + 1, V)}, {"logits": (N, T, S, V)}
_trivial = {"lm": (N, U + 1, V), "am": (N, T, V)}
_last_blank = {"blank": V - 1, "reduction": "none"}
_OPTIMIZED = {"blank": 0, "from_log_softmax": False, "reduction": "sum"}

SUBJECTS = [
    _k2("rnnt_loss_simple", k2.rnnt_loss_simple, _trivial, band_references.simple),
    _k2(
        "rnnt_loss_smoothed",
        functools.partial(k2.rnnt_loss_smoothed, lm_only_scale=0.25, am_only_scale=0.1),
        _trivial,
        lambda given: band_references.simple(
            {**given, "lm_only_scale": 0.25, "am_only_scale": 0.1}
        ),
    ),
    _k2("rnnt_loss", k2.rnnt_loss, _all_nodes, references.rnnt),
    _k2("rnnt_loss_pruned", k2.rnnt_loss_pruned, _of_band, references.rnnt),
    _ranges(),
    _pruning(),
    _recursion(),
    _k2("rnnt_loss", fast_rnnt.rnnt_loss, _all_nodes, references.rnnt, "fast_rnnt"),
    _k2("rnnt_loss_pruned", fast_rnnt.rnnt_loss_pruned, _of_band, references.rnnt, "fast_rnnt"),
    _losses(
        "torchaudio.functional.rnnt_loss",
        torchaudio.rnnt_loss,
        {},
        _nodes,
        choices=(option(blank=0), option(clamp=0.1), option(reduction="sum")),
        **_last_blank,
    ),
    _losses(
        "warprnnt_pytorch.rnnt_loss",
        warprnnt_pytorch.rnnt_loss,
        _WARP,
        _nodes,
        choices=(option(blank=V - 1), option(fastemit_lambda=0.3)),
        reduction="none",
    ),
    _losses(
        "warp_rnnt.rnnt_loss",
        warp_rnnt.rnnt_loss,
        _WARP_RNNT,
        _nodes.log_softmax(-1),
        integers=torch.int32,
        fixed={"from_log_probs": True, "reduction": "none"},
        choices=(option(fastemit_lambda=0.3), option(gather=True)),
    ),
    _losses(
        "optimized_transducer.transducer_loss",
        optimized_transducer.transducer_loss,
        {},
        _packed,
        choices=(option(reduction="mean"),),
        **_OPTIMIZED,
    ),
    _losses(
        "nemo_loss.NemoRNNTLoss", _nemo, _WARP, _nodes, fixed={"blank": V - 1, "reduction": "none"}
    ),
    _losses(
        "transformers_loss.rnnt_loss",
        transformers_loss.rnnt_loss,
        {"blank_token_id": "blank"},
        _nodes,
        blank_token_id=0,
        reduction="none",
    ),
]
