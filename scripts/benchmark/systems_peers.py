"""How other packages do the work of a case. README.md says where to get them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.benchmark.cases import Case, Inputs, make_layers
from scripts.benchmark.systems import Step, System, end_boundary

SIMPLE_SCALE = 0.5


class _K2Style:
    """k2 and fast_rnnt have the same functions of the same names."""

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

    def full(self, case: Case, inputs: Inputs) -> Step:
        def loss() -> Tensor:
            value: Tensor = self.module.rnnt_loss(
                logits=inputs.first,
                symbols=inputs.targets.long(),
                termination_symbol=0,
                boundary=end_boundary(inputs),
                reduction="mean",
            )
            return value

        return Step(loss, inputs)

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
            simple, grads = self._simple(case, inputs, am, lm, reduction="mean", return_grad=True)
            ranges = self.module.get_rnnt_prune_ranges(
                px_grad=grads[0],
                py_grad=grads[1],
                boundary=end_boundary(inputs),
                s_range=case.S,
            )
            am_pruned, lm_pruned = self.module.do_rnnt_pruning(
                am=layers.encoder_proj(encoder), lm=layers.decoder_proj(predictor), ranges=ranges
            )
            pruned: Tensor = self.module.rnnt_loss_pruned(
                logits=layers.output(torch.tanh(am_pruned + lm_pruned)),
                symbols=inputs.targets.long(),
                ranges=ranges,
                termination_symbol=0,
                boundary=end_boundary(inputs),
                reduction="mean",
            )
            value: Tensor = SIMPLE_SCALE * simple + pruned
            return value

        return Step(loss, inputs, *layers.parameters())

    def system(self, name: str) -> System:
        kinds = {"full": self.full, "simple": self.simple, "step": self.step}
        return System(name, self.name, kinds)


def _optimized_transducer_full(case: Case, inputs: Inputs) -> Step:
    """Takes packed logits: the rows of a batch without padding are the same memory."""
    from optimized_transducer import transducer_loss

    assert not case.ragged, "padding would have to be cut out of the logits first"

    def loss() -> Tensor:
        value: Tensor = transducer_loss(
            inputs.first.view(-1, case.V),
            inputs.targets,
            inputs.logit_lengths,
            inputs.target_lengths,
            blank=0,
            reduction="mean",
            one_sym_per_frame=False,
            from_log_softmax=False,
        )
        return value

    return Step(loss, inputs)


def _torchaudio_full(case: Case, inputs: Inputs) -> Step:
    from torchaudio.functional import rnnt_loss

    def loss() -> Tensor:
        value: Tensor = rnnt_loss(
            inputs.first,
            inputs.targets,
            inputs.logit_lengths,
            inputs.target_lengths,
            blank=0,
            reduction="mean",
        )
        return value

    return Step(loss, inputs)


def _warp_transducer_full(case: Case, inputs: Inputs) -> Step:
    from warprnnt_pytorch import RNNTLoss

    criterion = RNNTLoss(blank=0, reduction="mean")

    def loss() -> Tensor:
        value: Tensor = criterion(
            inputs.first, inputs.targets, inputs.logit_lengths, inputs.target_lengths
        )
        return value.squeeze()

    return Step(loss, inputs)


def _warp_rnnt_full(case: Case, inputs: Inputs) -> Step:
    from warp_rnnt import rnnt_loss

    def loss() -> Tensor:
        value: Tensor = rnnt_loss(
            inputs.first.log_softmax(-1),
            inputs.targets,
            inputs.logit_lengths,
            inputs.target_lengths,
            blank=0,
            reduction="mean",
            gather=True,
        )
        return value

    return Step(loss, inputs)


PEERS = [
    _K2Style("fast_rnnt").system("fast_rnnt"),
    _K2Style("k2").system("k2"),
    System(
        "optimized_transducer",
        "optimized_transducer",
        {"full": _optimized_transducer_full},
    ),
    System("torchaudio", "torchaudio", {"full": _torchaudio_full}),
    System("warp-transducer", "warprnnt_pytorch", {"full": _warp_transducer_full}),
    System("warp-rnnt gather", "warp_rnnt", {"full": _warp_rnnt_full}, devices=("cuda",)),
]
