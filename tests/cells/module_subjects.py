"""PrunedTransducerLoss with a Joiner, with a joiner of its own, and with durations.

The reference calls the layers of the same module in float64, one after the other, so that it sees
whatever hooks, adapters or parametrizations a cell has added to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt import Joiner, PrunedTransducerLoss
from tests.cells import band_references, references
from tests.cells.logit_subjects import DURATIONS, LENGTHS, D, K, N, S, T, U, V, batch, random
from tests.cells.subject import Arguments, Results, Subject, seed

E, P = 5, 4
OPTIONS = {"s_range": S, "reduction": "none", "lm_only_scale": 0.25, "warm_up_steps": 10}
STEP = 4


class StoredJoiner(nn.Module):
    """Takes the outputs of encoder and predictor inside the band, in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_proj = nn.Linear(E, D)
        self.decoder_proj = nn.Linear(P, D)
        self.output_linear = nn.Linear(D, V)

    def forward(self, am: Tensor, lm: Tensor) -> Tensor:
        am, lm = (x.to(self.output_linear.weight.dtype) for x in (am, lm))
        return self.output_linear(torch.sigmoid(self.encoder_proj(am) * self.decoder_proj(lm)))


def criterion(joiner: Any = None, **options: Any) -> PrunedTransducerLoss:
    """The module with the same values each time."""
    seed(7)
    if joiner is None:
        joiner = Joiner
    count = len(options.get("durations") or ())
    if isinstance(joiner, type) and issubclass(joiner, Joiner):
        joiner = joiner(E, P, D, V, duration_count=count)
    elif isinstance(joiner, type):
        joiner = joiner()
    module = PrunedTransducerLoss(joiner, E, P, V, **{**OPTIONS, **options})
    # Weights far from the start of training, so that no part of the module is negligible.
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0)
    return module


def _arguments(**options: Any) -> Callable[[], Arguments]:
    encoder_out, predictor_out = random((N, T, E), (N, U + 1, P))

    def make() -> Arguments:
        given = {"encoder_out": encoder_out.clone(), "predictor_out": predictor_out.clone()}
        return {"module": criterion(**options), **given, **batch(), "step": STEP}

    return make


def call(*, module: nn.Module, **given: Any) -> Any:
    return module(**given)


def reference(given: Arguments) -> Results:
    """Losses with the band of the call's own result, given["observed"]."""
    module, encoder_out = given["module"], given["encoder_out"]
    predictor_out, joiner = given["predictor_out"], module.joiner
    am, lm = module.simple_am_proj(encoder_out), module.simple_lm_proj(predictor_out)
    scales = module.simple_options.scales
    shared = {
        **{name: given.get(name) for name in ("targets", *LENGTHS)},
        "rnnt_type": {0: "regular", 1: "modified", 2: "constrained", 3: "rna"}[
            module.options.rnnt_type
        ],
        "reduction": module.reduction,
        "delay_penalty": module.options.delay_penalty,
        "fastemit_lambda": module.options.fastemit_lambda,
    }
    smoothing = {"lm_only_scale": scales.lm_only_scale, "am_only_scale": scales.am_only_scale}
    of_simple = {**shared, **smoothing, "am": am, "lm": lm}
    band = {"start": given["observed"]["bounds.start"].cpu().int(), "s_range": module.s_range}
    if module.tdt is not None:
        of_tdt = {"durations": tuple(module.tdt.durations), "sigma": module.tdt.sigma}
        waits = module.tdt.simple_am_proj(encoder_out), module.tdt.simple_lm_proj(predictor_out)
        of_simple |= {**of_tdt, "duration_am": waits[0], "duration_lm": waits[1]}
        simple = band_references.tdt_simple(of_simple)
        hidden = joiner.hidden(
            joiner.encoder_proj(encoder_out)[:, :, None],
            joiner.decoder_proj(predictor_out)[:, None],
        )
        whole = {"logits": joiner.output_linear(hidden)}
        whole["duration_logits"] = joiner.duration_linear(hidden)
        rows = {name: _in_band(x, band) for name, x in whole.items()}
        pruned = references.tdt({**shared, **of_tdt, **band, **rows})
    else:
        simple = band_references.simple(of_simple)
        if isinstance(joiner, Joiner):
            logits = _in_band(
                joiner(
                    joiner.encoder_proj(encoder_out)[:, :, None],
                    joiner.decoder_proj(predictor_out)[:, None],
                ),
                band,
            )
        else:
            inputs = band_references.prune({"am": encoder_out, "lm": predictor_out, **band})
            logits = joiner(inputs["am"], inputs["lm"])
        pruned = references.rnnt({**shared, **band, "logits": logits})
    simple_scale, pruned_scale = module.scales(given["step"])
    loss, occupancy = simple.pop("loss"), simple
    total = simple_scale * loss + pruned_scale * pruned["result"]
    losses = {"loss": total, "simple_loss": loss, "pruned_loss": pruned["result"]}
    return {**losses, **occupancy}


def _in_band(logits: Tensor, band: Arguments) -> Tensor:
    """(N, T, S, V) of (N, T, U+1, V), zeros beyond U."""
    width = band["s_range"]
    columns = band["start"].long()[:, :, None] + torch.arange(width)
    padded = nn.functional.pad(logits, (0, 0, 0, width))
    return padded.gather(2, columns[..., None].expand(*columns.shape, logits.shape[-1]))


def subject(name: str, **options: Any) -> Subject:
    return Subject(
        f"PrunedTransducerLoss ({name})",
        _arguments(**options),
        call,
        reference,
        floats=("encoder_out", "predictor_out", "module"),
        integers=("targets", *LENGTHS),
        scalars={"step": "step"},
        has_products=True,
        words={"module": ("encoder_out", "predictor_out", "joiner")},
        reduces=False,
    )


SUBJECTS = [
    subject("Joiner"),
    subject("own joiner", joiner=StoredJoiner),
    subject("durations", durations=DURATIONS, sigma=0.05),
]
assert len(DURATIONS) == K
