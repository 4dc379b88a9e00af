"""How this package does the work of a case, with compiled kernels and without."""

from __future__ import annotations

from torch import Tensor

import pruned_rnnt
from scripts.benchmark.cases import Case, Inputs, make_layers
from scripts.benchmark.systems import Step, System


def full(case: Case, inputs: Inputs) -> Step:
    def loss() -> Tensor:
        return pruned_rnnt.rnnt_loss(
            inputs.first, inputs.targets, inputs.logit_lengths, inputs.target_lengths
        )

    return Step(loss, inputs)


def simple(case: Case, inputs: Inputs) -> Step:
    assert inputs.second is not None
    am, lm = inputs.first, inputs.second

    def loss() -> Tensor:
        return pruned_rnnt.rnnt_loss_simple(
            am,
            lm,
            inputs.targets,
            inputs.logit_lengths,
            inputs.target_lengths,
            lm_only_scale=case.lm_only_scale,
        ).loss

    return Step(loss, inputs)


def _pruned_transducer(case: Case) -> pruned_rnnt.PrunedTransducerLoss:
    layers = make_layers(case)
    joiner = pruned_rnnt.Joiner(case.E, case.P, case.D, case.V)
    module = pruned_rnnt.PrunedTransducerLoss(
        joiner,
        case.E,
        case.P,
        case.V,
        s_range=case.S,
        lm_only_scale=case.lm_only_scale,
        warm_up_steps=0,
    )
    module.simple_am_proj, module.simple_lm_proj = layers.simple_am, layers.simple_lm
    joiner.encoder_proj, joiner.decoder_proj = layers.encoder_proj, layers.decoder_proj
    joiner.output_linear = layers.output
    return module


def step(case: Case, inputs: Inputs) -> Step:
    module = _pruned_transducer(case)

    def loss() -> Tensor:
        return module(
            inputs.first,
            inputs.second,
            inputs.targets,
            inputs.logit_lengths,
            inputs.target_lengths,
            0,
        ).loss

    return Step(loss, inputs, *module.parameters())


KINDS = {"full": full, "simple": simple, "step": step}
OURS = [
    System("pruned_rnnt", "pruned_rnnt", KINDS, {"PRUNED_RNNT_BACKEND": "native"}),
    System("pruned_rnnt fallback", "pruned_rnnt", KINDS, {"PRUNED_RNNT_BACKEND": "fallback"}),
]
