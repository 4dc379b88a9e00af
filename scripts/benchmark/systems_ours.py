"""This package as a system: with compiled kernels, in a CUDA graph, and in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

import pruned_rnnt
from scripts.benchmark.cases import Case, Inputs, Layers, make_layers
from scripts.benchmark.systems import Step, System


def full(case: Case, inputs: Inputs) -> Step:
    def loss() -> Tensor:
        return pruned_rnnt.rnnt_loss(inputs.first, *inputs.targets_and_lengths)

    return Step(loss, inputs)


def log_probs(case: Case, inputs: Inputs) -> Step:
    def loss() -> Tensor:
        return pruned_rnnt.rnnt_loss(inputs.first, *inputs.targets_and_lengths, from_log_probs=True)

    return Step(loss, inputs)


def simple(case: Case, inputs: Inputs) -> Step:
    assert inputs.second is not None
    am, lm = inputs.first, inputs.second

    def loss() -> Tensor:
        return pruned_rnnt.rnnt_loss_simple(
            am, lm, *inputs.targets_and_lengths, lm_only_scale=case.lm_only_scale
        ).loss

    return Step(loss, inputs)


def _pruned_transducer(case: Case, durations: int = 0) -> pruned_rnnt.PrunedTransducerLoss:
    """Of a TDT model if durations is above 0: their number."""
    layers = make_layers(case)
    activation = "relu" if durations > 0 else "tanh"
    module = pruned_rnnt.PrunedTransducerLoss(
        _joiner(case, layers, activation=activation, duration_count=durations),
        case.E,
        case.P,
        case.V,
        s_range=case.S,
        lm_only_scale=case.lm_only_scale,
        warm_up_steps=0,
        durations=range(durations) if durations > 0 else None,
    )
    module.simple_am_proj, module.simple_lm_proj = layers.simple_am, layers.simple_lm
    return module


def with_lengths_on_host(inputs: Inputs) -> Inputs:
    """Lengths on the CPU, as in a training loop: the loss can then leave padding out."""
    return inputs._replace(
        logit_lengths=inputs.logit_lengths.cpu(), target_lengths=inputs.target_lengths.cpu()
    )


def _step_of(module: pruned_rnnt.PrunedTransducerLoss, inputs: Inputs) -> Step:
    def loss() -> Tensor:
        return module(*inputs, 0).loss

    return Step(loss, inputs, *module.parameters())


def _build_step(case: Case, inputs: Inputs) -> Step:
    return _step_of(_pruned_transducer(case), inputs)


def step(case: Case, inputs: Inputs) -> Step:
    return _build_step(case, with_lengths_on_host(inputs))


def _build_trainer_step(case: Case, inputs: Inputs) -> Step:
    """A step as the trainer calls it: the sum over the batch divided by its frames, and the losses
    of each utterance for the log."""
    module = _pruned_transducer(case)
    module.reduction = "sum"
    frames = float(inputs.logit_lengths.sum())

    def loss() -> Tensor:
        losses = module(*inputs, 0)
        torch.stack(losses.utterances).sum(dim=1)
        return losses.loss * (1 / frames)

    return Step(loss, inputs, *module.parameters())


def trainer_step(case: Case, inputs: Inputs) -> Step:
    return _build_trainer_step(case, with_lengths_on_host(inputs))


def _build_exact_step(case: Case, inputs: Inputs) -> Step:
    layers = make_layers(case)

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

    return Step(loss, inputs, *layers.joiner_parameters())


def exact_step(case: Case, inputs: Inputs) -> Step:
    return _build_exact_step(case, with_lengths_on_host(inputs))


def _joiner(case: Case, layers: Layers, **options: int | str) -> pruned_rnnt.Joiner:
    joiner = pruned_rnnt.Joiner(case.E, case.P, case.D, case.V, **options)
    joiner.encoder_proj, joiner.decoder_proj = layers.encoder_proj, layers.decoder_proj
    joiner.output_linear = layers.output
    return joiner


def _build_tdt_step(case: Case, inputs: Inputs) -> Step:
    module = _pruned_transducer(case, case.K)
    module.to(case.device, getattr(torch, case.dtype))
    return _step_of(module, inputs)


def tdt_step(case: Case, inputs: Inputs) -> Step:
    return _build_tdt_step(case, with_lengths_on_host(inputs))


def _build_tdt_exact_step(case: Case, inputs: Inputs) -> Step:
    joiner = _joiner(case, make_layers(case), duration_count=case.K)
    joiner.to(case.device, getattr(torch, case.dtype))
    assert joiner.duration_linear is not None
    tokens, durations = joiner.output_linear, joiner.duration_linear

    def loss() -> Tensor:
        first, second, targets, *lengths = inputs
        return pruned_rnnt.rnnt_loss_tdt_fused(
            joiner.encoder_proj(first),
            joiner.decoder_proj(second),
            tokens.weight,
            tokens.bias,
            durations.weight,
            durations.bias,
            targets,
            None,
            *lengths,
            durations=range(case.K),
            activation="relu",
        )

    return Step(loss, inputs, *joiner.parameters())


def tdt_exact_step(case: Case, inputs: Inputs) -> Step:
    return _build_tdt_exact_step(case, with_lengths_on_host(inputs))


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
    "log_probs": log_probs,
    "simple": simple,
    "step": step,
    "trainer_step": trainer_step,
    "exact_step": exact_step,
    "tdt_step": tdt_step,
    "tdt_exact_step": tdt_exact_step,
    "lattice": lattice,
    "bounds": bounds,
}
# A graph must not depend on lengths on the host.
KINDS_IN_A_GRAPH = {
    **KINDS,
    "step": _build_step,
    "trainer_step": _build_trainer_step,
    "exact_step": _build_exact_step,
    "tdt_step": _build_tdt_step,
    "tdt_exact_step": _build_tdt_exact_step,
}
OURS = [
    System("pruned_rnnt", "pruned_rnnt", KINDS, {"PRUNED_RNNT_BACKEND": "native"}),
    System(
        "pruned_rnnt in a graph", "pruned_rnnt", KINDS_IN_A_GRAPH, devices=("cuda",), replayed=True
    ),
    System(
        "pruned_rnnt fallback",
        "pruned_rnnt",
        KINDS,
        {"PRUNED_RNNT_BACKEND": "fallback"},
        devices=("cpu",),
    ),
]
