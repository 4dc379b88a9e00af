"""Other packages as systems. README.md explains how to install them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.benchmark.cases import Case, Inputs, Layers, make_layers
from scripts.benchmark.systems import Step, System, end_boundary

SIMPLE_SCALE = 0.5

# Mean loss of float32 logits (N,T,U+1,V), or of packed rows.
FullLoss = Callable[[Case, Inputs, Tensor], Tensor]
# T_n and U_n of each utterance.
Lengths = list[tuple[int, int]]


def _padded_logits(layers: Layers, inputs: Inputs, lengths: Lengths) -> Tensor:
    """Logits (N,T,U+1,V) float32 of the whole lattice, with padding."""
    am, lm = layers.encoder_proj(inputs.first), layers.decoder_proj(inputs.second)
    logits: Tensor = layers.output(torch.tanh(am[:, :, None] + lm[:, None])).float()
    return logits


def _packed_logits(layers: Layers, inputs: Inputs, lengths: Lengths) -> Tensor:
    """The same logits as packed rows; the joiner computes no padding."""
    am, lm = layers.encoder_proj(inputs.first), layers.decoder_proj(inputs.second)
    rows = [
        (am[n, :frames, None] + lm[n, None, : symbols + 1]).flatten(0, 1)
        for n, (frames, symbols) in enumerate(lengths)
    ]
    logits: Tensor = layers.output(torch.tanh(torch.cat(rows))).float()
    return logits


def _log_probs_kind(loss: Callable[..., Tensor]) -> dict[str, Any]:
    """Of a full loss that takes log-probabilities with from_log_probs=True."""

    def log_probs(case: Case, inputs: Inputs) -> Step:
        return Step(lambda: loss(case, inputs, inputs.first, from_log_probs=True), inputs)

    return {"log_probs": log_probs}


def _full_kinds(
    full_loss: FullLoss, join: Callable[[Layers, Inputs, Lengths], Tensor] = _padded_logits
) -> dict[str, Any]:
    """The kinds that a package with only the full loss supports."""

    def full(case: Case, inputs: Inputs) -> Step:
        return Step(lambda: full_loss(case, inputs, inputs.first), inputs)

    def exact_step(case: Case, inputs: Inputs) -> Step:
        layers = make_layers(case)
        lengths = [x.tolist() for x in (inputs.logit_lengths, inputs.target_lengths)]
        pairs = list(zip(*lengths, strict=True))

        def loss() -> Tensor:
            return full_loss(case, inputs, join(layers, inputs, pairs))

        return Step(loss, inputs, *layers.joiner_parameters())

    return {"full": full, "exact_step": exact_step}


class _K2Style:
    """k2 or fast_rnnt, whose functions have the same names."""

    def __init__(self, module: str):
        self.name = module

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.name)

    def _simple(self, case: Case, inputs: Inputs, am: Tensor, lm: Tensor, **options: Any) -> Any:
        return self.module.rnnt_loss_smoothed(
            lm=lm,
            am=am,
            symbols=inputs.targets.long(),
            termination_symbol=0,
            lm_only_scale=case.lm_only_scale,
            am_only_scale=0.0,
            boundary=end_boundary(inputs),
            **options,
        )

    def full_loss(self, case: Case, inputs: Inputs, logits: Tensor) -> Tensor:
        value: Tensor = self.module.rnnt_loss(
            logits=logits,
            symbols=inputs.targets.long(),
            termination_symbol=0,
            boundary=end_boundary(inputs),
            reduction="mean",
        )
        return value

    def simple(self, case: Case, inputs: Inputs) -> Step:
        assert inputs.second is not None
        am, lm = inputs.first, inputs.second

        def loss() -> Tensor:
            value: Tensor = self._simple(case, inputs, am, lm, reduction="mean")
            return value

        return Step(loss, inputs)

    def step(self, case: Case, inputs: Inputs) -> Step:
        layers = make_layers(case)
        encoder, predictor = inputs.first, inputs.second

        def loss() -> Tensor:
            am, lm = layers.simple_am(encoder), layers.simple_lm(predictor)
            # As in icefall: the losses in float32.
            with torch.autocast(encoder.device.type, enabled=False):
                simple, grads = self._simple(
                    case, inputs, am.float(), lm.float(), reduction="mean", return_grad=True
                )
            ranges = self.module.get_rnnt_prune_ranges(
                px_grad=grads[0],
                py_grad=grads[1],
                boundary=end_boundary(inputs),
                s_range=case.S,
            )
            am_pruned, lm_pruned = self.module.do_rnnt_pruning(
                am=layers.encoder_proj(encoder), lm=layers.decoder_proj(predictor), ranges=ranges
            )
            logits = layers.output(torch.tanh(am_pruned + lm_pruned))
            with torch.autocast(encoder.device.type, enabled=False):
                pruned: Tensor = self.module.rnnt_loss_pruned(
                    logits=logits.float(),
                    symbols=inputs.targets.long(),
                    ranges=ranges,
                    termination_symbol=0,
                    boundary=end_boundary(inputs),
                    reduction="mean",
                )
            value: Tensor = SIMPLE_SCALE * simple + pruned
            return value

        return Step(loss, inputs, *layers.parameters())

    def lattice(self, case: Case, inputs: Inputs) -> Step:
        px, py, boundary = inputs.first, inputs.second, end_boundary(inputs)

        def total() -> Tensor:
            value: Tensor = self.module.mutual_information_recursion(px, py, boundary).mean()
            return value

        return Step(total, inputs)

    def bounds(self, case: Case, inputs: Inputs) -> Step:
        px_grad, py_grad, boundary = inputs.first, inputs.second, end_boundary(inputs)

        def start() -> Tensor:
            ranges: Tensor = self.module.get_rnnt_prune_ranges(
                px_grad=px_grad, py_grad=py_grad, boundary=boundary, s_range=case.S
            )
            return ranges[:, :, 0]

        return Step(start, inputs)

    def system(self, name: str) -> System:
        kinds = {
            **_full_kinds(self.full_loss),
            "simple": self.simple,
            "step": self.step,
            "lattice": self.lattice,
            "bounds": self.bounds,
        }
        return System(name, self.name, kinds)


def _optimized_transducer(
    case: Case, inputs: Inputs, logits: Tensor, from_log_probs: bool = False
) -> Tensor:
    """Takes packed logits; a batch without padding has the same memory layout. Writes the gradient
    over the logits."""
    from optimized_transducer import transducer_loss

    assert logits.dim() == 2 or not case.ragged, "padding would have to be removed first"
    value: Tensor = transducer_loss(
        logits.view(-1, case.V),
        *inputs.targets_and_lengths,
        blank=0,
        reduction="mean",
        one_sym_per_frame=False,
        from_log_softmax=from_log_probs,
    )
    return value


def _torchaudio(case: Case, inputs: Inputs, logits: Tensor, from_log_probs: bool = False) -> Tensor:
    from torchaudio.functional import rnnt_loss

    options = {"blank": 0, "reduction": "mean", "fused_log_softmax": not from_log_probs}
    value: Tensor = rnnt_loss(logits, *inputs.targets_and_lengths, **options)
    return value


def _warp_transducer(case: Case, inputs: Inputs, logits: Tensor) -> Tensor:
    from warprnnt_pytorch import RNNTLoss

    value: Tensor = RNNTLoss(blank=0, reduction="mean")(logits, *inputs.targets_and_lengths)
    return value.squeeze()


def _warp_rnnt(case: Case, inputs: Inputs, logits: Tensor, from_log_probs: bool = False) -> Tensor:
    """Takes log-probabilities: of logits, log_softmax is part of the measurement."""
    from warp_rnnt import rnnt_loss

    value: Tensor = rnnt_loss(
        logits if from_log_probs else logits.log_softmax(-1),
        *inputs.targets_and_lengths,
        blank=0,
        reduction="mean",
        gather=True,
    )
    return value


PEERS = [
    _K2Style("fast_rnnt").system("fast_rnnt"),
    _K2Style("k2").system("k2"),
    System(
        "optimized_transducer",
        "optimized_transducer",
        {
            **_full_kinds(_optimized_transducer, _packed_logits),
            **_log_probs_kind(_optimized_transducer),
        },
    ),
    System("warp-transducer", "warprnnt_pytorch", _full_kinds(_warp_transducer)),
    System(
        "warp-rnnt gather",
        "warp_rnnt",
        {**_full_kinds(_warp_rnnt), **_log_probs_kind(_warp_rnnt)},
        devices=("cuda",),
    ),
    # The last one: if it reads out of bounds, nothing else can run on the device afterwards.
    System(
        "torchaudio", "torchaudio", {**_full_kinds(_torchaudio), **_log_probs_kind(_torchaudio)}
    ),
]
