"""PrunedTransducerLoss with durations: the TDT loss of the trivial joiner, and that of the band."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from tests.loss import loss_cases as cases
from tests.loss.step_cases import DURATIONS, assert_captured_equals_eager
from tests.loss.tdt_cases import simple_tdt_loss


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(43)


def module_of(device: str = "cpu", **options) -> pruned_rnnt.PrunedTransducerLoss:
    joiner = pruned_rnnt.Joiner(6, 5, 8, 11, duration_count=len(DURATIONS))
    module = pruned_rnnt.PrunedTransducerLoss(
        joiner, 6, 5, 11, s_range=3, durations=DURATIONS, reduction="none", **options
    )
    return module.to(device, torch.float64)


def module_inputs(batch: cases.Batch) -> list[Tensor]:
    return [
        torch.randn(batch.size, n, width, dtype=torch.float64)
        for n, width in ((batch.frames, 6), (batch.symbols + 1, 5))
    ]


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("lengths_on", ["cpu", "device"])
def test_module_is_its_two_losses(lengths_on, device) -> None:
    batch = cases.make_batch([9, 7, 4], [4, 3, 1], 11, 0)
    module = module_of(device, sigma=0.05, lm_only_scale=0.25, warm_up_steps=0)
    encoder, predictor = (x.to(device) for x in module_inputs(batch))
    lengths = batch.lengths("cpu" if lengths_on == "cpu" else device)
    arguments = (batch.targets.to(device), *lengths)
    losses = module(encoder, predictor, *arguments, 0)
    head, joiner = module.tdt, module.joiner
    simple = simple_tdt_loss(
        module.simple_am_proj(encoder),
        module.simple_lm_proj(predictor),
        head.simple_am_proj(encoder),
        head.simple_lm_proj(predictor),
        *arguments,
        sigma=0.05,
        lm_only_scale=0.25,
        reduction="none",
    )
    bounds = pruned_rnnt.prune_bounds(simple.occupancy, *lengths, 3, durations=DURATIONS)
    am_p, lm_p = pruned_rnnt.prune(
        joiner.encoder_proj(encoder), joiner.decoder_proj(predictor), bounds
    )
    logits, durations = joiner.with_durations(am_p, lm_p)
    pruned = pruned_rnnt.rnnt_loss_tdt(
        logits, durations, *arguments, bounds=bounds, sigma=0.05, reduction="none"
    )
    assert torch.equal(losses.bounds.start, bounds.start)
    torch.testing.assert_close(losses.simple_loss, simple.loss)
    torch.testing.assert_close(losses.pruned_loss, pruned)
    parameters = list(module.parameters())
    wanted = torch.autograd.grad((0.5 * simple.loss + pruned).sum(), parameters)
    for got, want in zip(torch.autograd.grad(losses.loss.sum(), parameters), wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_module_learns() -> None:
    batch = cases.make_batch([9, 7, 4], [4, 3, 1], 11, 0)
    module = module_of(warm_up_steps=0, omega=0.1)
    inputs = module_inputs(batch)
    arguments = (*inputs, batch.targets, *batch.lengths("cpu"))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    first = float(module(*arguments, 0).pruned_loss.detach().mean())
    for step in range(60):
        optimizer.zero_grad()
        module(*arguments, step).loss.mean().backward()
        optimizer.step()
    module.eval()
    with torch.no_grad():
        assert float(module(*arguments, 60).pruned_loss.mean()) < 0.2 * first


def test_omega_applies_in_training_alone() -> None:
    batch = cases.make_batch([9, 7, 4], [4, 3, 1], 11, 0)
    module = module_of(omega=1.0)
    arguments = (*module_inputs(batch), batch.targets, *batch.lengths("cpu"), 0)
    plain = module(*arguments)
    module.eval()
    tdt = module(*arguments)
    module.tdt.omega = 0.0
    module.train()
    assert torch.equal(module(*arguments).simple_loss, tdt.simple_loss)
    assert not torch.equal(plain.simple_loss, tdt.simple_loss)
    rnnt = pruned_rnnt.rnnt_loss_simple(
        module.simple_am_proj(arguments[0]),
        module.simple_lm_proj(arguments[1]),
        *arguments[2:5],
        lm_only_scale=0.25,
        reduction="none",
    )
    torch.testing.assert_close(plain.simple_loss, rnnt.loss)


def test_omega_is_drawn_once_a_step() -> None:
    """The parts of a batch that is split for memory or accumulation use one loss."""
    batch = cases.make_batch([9, 7, 4], [4, 3, 1], 11, 0)
    module = module_of(omega=0.5)
    arguments = (*module_inputs(batch), batch.targets, *batch.lengths("cpu"))
    by_step = [[module(*arguments, n).simple_loss.sum().item() for _ in range(4)] for n in range(9)]
    assert all(len(set(losses)) == 1 for losses in by_step)
    assert len({losses[0] for losses in by_step}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("device", cases.DEVICES)
def test_module_compiles(device) -> None:
    batch = cases.make_batch([9, 7, 4], [4, 3, 1], 11, 0)
    module = module_of(device)
    torch._dynamo.reset()
    inputs = [x.to(device) for x in module_inputs(batch)]
    arguments = (*inputs, batch.targets.to(device), *batch.lengths(device), 100)
    expected = module(*arguments)
    got = torch.compile(module, fullgraph=True, backend="aot_eager")(*arguments)
    torch.testing.assert_close(got.loss, expected.loss)
    torch._dynamo.reset()


@pytest.mark.gpu
def test_a_captured_step_equals_an_eager_one() -> None:
    batch = cases.make_batch([9, 7, 4], [4, 3, 1], 11, 0)
    module = module_of("cuda")
    inputs = [x.cuda().requires_grad_() for x in module_inputs(batch)]
    arguments = (*inputs, batch.targets.cuda(), *batch.lengths("cuda"), 100)

    def step() -> list[Tensor]:
        loss = module(*arguments).loss
        return [loss, *torch.autograd.grad(loss.sum(), inputs)]

    assert_captured_equals_eager(step)


def test_a_band_needs_a_duration_of_one() -> None:
    joiner = pruned_rnnt.Joiner(6, 5, 9, 11, duration_count=3)
    with pytest.raises(ValueError, match=r"durations is \(0, 2, 4\); 1 must be among them"):
        pruned_rnnt.PrunedTransducerLoss(joiner, 6, 5, 11, durations=(0, 2, 4))


def test_a_joiner_with_durations_needs_those_of_the_loss() -> None:
    joiner = pruned_rnnt.Joiner(6, 5, 9, 11, duration_count=3)
    with pytest.raises(ValueError, match=r"duration_count=3, needs durations=\.\.\., one for each"):
        pruned_rnnt.PrunedTransducerLoss(joiner, 6, 5, 11)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sigma": 0.5}, "sigma is 0.5 but durations is None; sigma needs durations="),
        ({"omega": 1}, "omega is 1.0 but durations is None; omega needs durations="),
        ({"sigma": "abc"}, "sigma is 'abc'; it must be a number"),
        ({"omega": 7}, "omega is 7; it must be a probability"),
    ],
)
def test_options_without_durations(options, words) -> None:
    joiner = pruned_rnnt.Joiner(6, 5, 8, 11)
    with pytest.raises((TypeError, ValueError), match=words):
        pruned_rnnt.PrunedTransducerLoss(joiner, 6, 5, 11, **options)


def test_joiner_must_fit_the_durations() -> None:
    joiner = pruned_rnnt.Joiner(6, 5, 8, 11)
    with pytest.raises(ValueError, match="no layer for them"):
        pruned_rnnt.PrunedTransducerLoss(joiner, 6, 5, 11, durations=DURATIONS)
    joiner = pruned_rnnt.Joiner(6, 5, 8, 11, duration_count=3)
    with pytest.raises(ValueError, match="duration_count=5"):
        pruned_rnnt.PrunedTransducerLoss(joiner, 6, 5, 11, durations=DURATIONS)
    with pytest.raises(ValueError, match="rnnt_type is 'rna'"):
        pruned_rnnt.PrunedTransducerLoss(joiner, 6, 5, 11, durations=(0, 1, 2), rnnt_type="rna")
