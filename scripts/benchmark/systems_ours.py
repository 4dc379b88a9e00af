"""How this package does the work of a case: with compiled kernels, in a CUDA graph, without."""

from __future__ import annotations

import torch
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


def on_the_host(inputs: Inputs) -> Inputs:
    """Lengths that the host knows let padding be left out, as in a training loop."""
    return inputs._replace(
        logit_lengths=inputs.logit_lengths.cpu(), target_lengths=inputs.target_lengths.cpu()
    )


def step_where_lengths_are(case: Case, inputs: Inputs) -> Step:
    module = _pruned_transducer(case)

    def loss() -> Tensor:
        first, second, *others = inputs
        return module(first, second, *others, 0).loss

    return Step(loss, inputs, *module.parameters())


def step(case: Case, inputs: Inputs) -> Step:
    return step_where_lengths_are(case, on_the_host(inputs))


def trainer_step_where_lengths_are(case: Case, inputs: Inputs) -> Step:
    """The same as the trainer calls it: a sum over the batch, divided by its frames, and the losses
    of each utterance for the log."""
    module = _pruned_transducer(case)
    module.reduction = "sum"
    frames = float(inputs.logit_lengths.sum())

    def loss() -> Tensor:
        first, second, *others = inputs
        losses = module(first, second, *others, 0)
        torch.stack(losses.utterances).sum(dim=1)
        return losses.loss * (1 / frames)

    return Step(loss, inputs, *module.parameters())


def trainer_step(case: Case, inputs: Inputs) -> Step:
    return trainer_step_where_lengths_are(case, on_the_host(inputs))


def exact_step_where_lengths_are(case: Case, inputs: Inputs) -> Step:
    layers = make_layers(case)
    used = (layers.encoder_proj, layers.decoder_proj, layers.output)

    def loss() -> Tensor:
        first, second, targets, *lengths = inputs
        return pruned_rnnt.rnnt_loss_fused(
            layers.encoder_proj(first),
            layers.decoder_proj(second),
            layers.output.weight,
            layers.output.bias,
            targets,
            None,
            *lengths,
        )

    return Step(loss, inputs, *(x for layer in used for x in layer.parameters()))


def exact_step(case: Case, inputs: Inputs) -> Step:
    return exact_step_where_lengths_are(case, on_the_host(inputs))


def lattice(case: Case, inputs: Inputs) -> Step:
    assert inputs.second is not None
    px, py = inputs.first, inputs.second

    def loss() -> Tensor:
        return pruned_rnnt.mutual_information(px, py).total.mean()

    return Step(loss, inputs)


def bounds(case: Case, inputs: Inputs) -> Step:
    assert inputs.second is not None
    emit = torch.nn.functional.pad(inputs.first[:, :, : case.T], (0, 0, 0, 1))
    occupancy = pruned_rnnt.Occupancy(
        emit.transpose(1, 2).contiguous(), inputs.second.transpose(1, 2).contiguous()
    )
    lengths = (inputs.logit_lengths, inputs.target_lengths)

    def start() -> Tensor:
        return pruned_rnnt.prune_bounds(occupancy, *lengths, case.S).start

    return Step(start, inputs)


KINDS = {
    "full": full,
    "simple": simple,
    "step": step,
    "trainer_step": trainer_step,
    "exact_step": exact_step,
    "lattice": lattice,
    "bounds": bounds,
}
# What a graph replays must not depend on the host's lengths.
REPLAYED = {
    **KINDS,
    "step": step_where_lengths_are,
    "trainer_step": trainer_step_where_lengths_are,
    "exact_step": exact_step_where_lengths_are,
}
OURS = [
    System("pruned_rnnt", "pruned_rnnt", KINDS, {"PRUNED_RNNT_BACKEND": "native"}),
    System("pruned_rnnt in a graph", "pruned_rnnt", REPLAYED, devices=("cuda",), replayed=True),
    System(
        "pruned_rnnt fallback",
        "pruned_rnnt",
        KINDS,
        {"PRUNED_RNNT_BACKEND": "fallback"},
        devices=("cpu",),
    ),
]
