"""rnnt_loss_tdt: padded and packed, all durations and options, against all paths one by one."""

import itertools

import pytest
import torch

import pruned_rnnt
from pruned_rnnt import Bounds
from tests.loss import loss_cases as cases
from tests.loss.tdt_cases import (
    DURATIONS,
    TdtInputs,
    every_small_tdt_batch,
    random_tdt_inputs,
    tdt_loss,
    tdt_reference,
)
from tests.tdt_paths import TdtScores, tdt_scores, tdt_total

every_table = pytest.mark.parametrize("durations", DURATIONS, ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(31)


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.every_layout
@every_table
@pytest.mark.parametrize(("blank", "sigma"), [(0, 0.0), (4, 0.3)])
def test_value_and_gradients_are_those_of_all_paths(
    durations, packed, blank, sigma, device
) -> None:
    batch = every_small_tdt_batch(durations, blank)
    inputs = random_tdt_inputs(batch, durations)
    expected = tdt_reference(inputs, batch, durations, sigma)
    loss = tdt_loss(inputs, batch, device, packed, durations=durations, sigma=sigma)
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), *inputs)


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.every_layout
@pytest.mark.parametrize("durations", [(0, 1, 2, 3, 4), (0, 1)], ids=str)
def test_band_drops_the_arcs_that_leave_it(durations, packed, device) -> None:
    batch = cases.make_batch([5, 4, 2], [3, 1, 0], 4, 0)
    inputs = random_tdt_inputs(batch, durations)
    start = torch.tensor([[0, 1, 1, 2, 2], [0] * 5, [0] * 5], dtype=torch.int32)
    bounds = Bounds(start, 2)
    expected = tdt_reference(inputs, batch, durations, bounds=bounds)
    whole = tdt_reference(inputs, batch, durations)
    assert bool((expected >= whole).all())
    assert bool(expected[0] > whole[0])
    columns = (start.long()[:, :, None] + torch.arange(2)).clamp(max=3)
    n, t = torch.arange(3)[:, None, None], torch.arange(5)[:, None]
    rows = TdtInputs(*(x[n, t, columns] for x in inputs))
    if packed:
        kept = [
            torch.cat([x[n, :length].flatten(0, 1) for n, length in enumerate(batch.frames_N)])
            for x in rows
        ]
        rows = TdtInputs(*kept)
    moved = Bounds(start.to(device), 2)
    loss = tdt_loss(rows, batch, device, durations=durations, bounds=moved)
    torch.testing.assert_close(loss.cpu(), expected)
    grads = cases.gradients(expected, batch.upstream(), *inputs)
    got = cases.gradients(loss, batch.upstream(), *inputs)
    for grad, want in zip(got, grads, strict=True):
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_omega_of_one_is_the_rnnt_loss(device) -> None:
    """Without sigma, and with a gradient of 0 for durations."""
    batch = cases.make_batch([6, 4, 1], [4, 2, 3], 7, 0)
    inputs = random_tdt_inputs(batch, (0, 1))
    logits, lengths = inputs.logits, batch.lengths("cpu")
    expected = pruned_rnnt.rnnt_loss(logits, batch.targets, *lengths, reduction="none")
    plain = tdt_loss(inputs, batch, device, durations=(0, 1), omega=1.0, sigma=0.5)
    torch.testing.assert_close(plain.cpu(), expected)
    logits_grad, durations_grad = cases.gradients(plain, batch.upstream(), *inputs)
    (wanted,) = cases.gradients(expected, batch.upstream(), logits)
    torch.testing.assert_close(logits_grad, wanted)
    assert not durations_grad.any()


def test_duration_one_alone_is_the_rna_loss() -> None:
    batch = cases.make_batch([6, 4, 1], [4, 2, 0], 7, 0)
    inputs = random_tdt_inputs(batch, (1,))
    expected = pruned_rnnt.rnnt_loss(
        inputs.logits, batch.targets, *batch.lengths("cpu"), rnnt_type="rna", reduction="none"
    )
    loss = tdt_loss(inputs, batch, durations=(1,))
    torch.testing.assert_close(loss, expected)
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), inputs.logits)


def test_omega_draws_from_the_generator_of_torch() -> None:
    batch = cases.make_batch([4, 3], [2, 1], 5, 0)
    inputs = random_tdt_inputs(batch, DURATIONS[0])
    plain = pruned_rnnt.rnnt_loss(inputs.logits, batch.targets, *batch.lengths("cpu"))
    tdt = tdt_loss(inputs, batch).mean()
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append([tdt_loss(inputs, batch, omega=0.4).mean().item() for _ in range(200)])
    assert runs[0] == runs[1]
    is_plain = torch.tensor(runs[0]) == torch.tensor(plain.item())
    assert bool((is_plain | (torch.tensor(runs[0]) == torch.tensor(tdt.item()))).all())
    assert 0.25 < is_plain.double().mean() < 0.55


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.tolerances(float64=1e-10, float32=2e-5, float16=2e-3, bfloat16=1e-2)
def test_dtypes(dtype, tolerance, device) -> None:
    """The loss is float32 or float64; gradients have the dtypes of their logits."""
    durations = DURATIONS[0]
    batch = cases.make_batch([19, 23, 8], [6, 9, 3], 33, 0)
    rounded = [x.detach().to(dtype) for x in random_tdt_inputs(batch, durations)]
    exact = TdtInputs(*(x.double().requires_grad_() for x in rounded))
    expected = tdt_loss(exact, batch, durations=durations)
    wanted = cases.gradients(expected, batch.upstream(), *exact)
    given = TdtInputs(*(x.to(device).requires_grad_() for x in rounded))
    loss = tdt_loss(given, batch, device, durations=durations)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((loss * batch.upstream().to(loss)).sum(), given)
    for grad, want in zip(grads, wanted, strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.cpu().double(), want, rtol=tolerance, atol=tolerance)


@every_table
def test_gradcheck(durations) -> None:
    batch = cases.make_batch([4, 5], [2, 1], 4, 1)
    inputs = random_tdt_inputs(batch, durations)

    def loss(logits: torch.Tensor, duration_logits: torch.Tensor) -> torch.Tensor:
        given = TdtInputs(logits, duration_logits)
        return tdt_loss(given, batch, durations=durations, sigma=0.05, delay_penalty=0.1)

    assert torch.autograd.gradcheck(loss, tuple(inputs), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_fastemit_scales_the_gradient_through_symbols(device) -> None:
    """Loss unchanged; the gradient of logits is that of symbols scaled by 1 + f."""
    durations = DURATIONS[0]
    batch = every_small_tdt_batch(durations)
    inputs = random_tdt_inputs(batch, durations)
    plain = tdt_loss(inputs, batch, device, durations=durations)
    fast = tdt_loss(inputs, batch, device, durations=durations, fastemit_lambda=0.7)
    assert torch.equal(plain, fast)
    got, got_durations = cases.gradients(fast, batch.upstream(), *inputs)
    without, without_durations = cases.gradients(plain, batch.upstream(), *inputs)
    assert torch.equal(got_durations, without_durations)
    # emit scaled by a factor that has value 1
    delayed = tdt_reference_with_scaled_symbols(inputs, batch, durations, 0.7)
    wanted, _ = cases.gradients(delayed, batch.upstream(), *inputs)
    torch.testing.assert_close(got, wanted)
    assert not torch.equal(got, without)


def tdt_reference_with_scaled_symbols(inputs, batch, durations, factor) -> torch.Tensor:
    losses = []
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        rows = [x[n, :, : symbols + 1] for x in inputs]
        scores = tdt_scores(*rows, batch.targets[n, :symbols].tolist(), batch.blank)
        emit = scores.emit + factor * (scores.emit - scores.emit.detach()).nan_to_num(nan=0.0)
        losses.append(-tdt_total(scores._replace(emit=emit), frames, symbols, durations))
    return torch.stack(losses)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_clamp_bounds_both_gradients(device) -> None:
    batch = cases.make_batch([5, 3], [3, 1], 4, 0)
    inputs = random_tdt_inputs(batch, DURATIONS[0])
    ones = torch.ones(2, dtype=torch.float64)
    free = cases.gradients(tdt_loss(inputs, batch, device), ones, *inputs)
    bound = cases.gradients(tdt_loss(inputs, batch, device, clamp=0.02), ones, *inputs)
    for got, unbounded in zip(bound, free, strict=True):
        torch.testing.assert_close(got, unbounded.clamp(-0.02, 0.02))
        assert not torch.equal(got, unbounded)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_in_place_writes_the_gradient_over_the_logits(device) -> None:
    batch = cases.make_batch([5, 3], [3, 1], 4, 0)
    inputs = random_tdt_inputs(batch, DURATIONS[0])
    wanted = cases.gradients(tdt_loss(inputs, batch, device).sum(), torch.ones(()), *inputs)
    leaves = [x.detach().to(device).clone().requires_grad_() for x in inputs]
    loss = pruned_rnnt.rnnt_loss_tdt(
        *leaves, batch.targets.to(device), *batch.lengths(device), reduction="sum", in_place=True
    )
    loss.backward()
    assert leaves[0].grad.data_ptr() == leaves[0].data_ptr()
    for leaf, want in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad.cpu(), want)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_padding_has_no_effect(device) -> None:
    """NaN in padding changes nothing, and NaN in an utterance stays in it."""
    batch = cases.make_batch([6, 4, 5], [3, 1, 2], 5, 0)
    inputs = random_tdt_inputs(batch, DURATIONS[0])
    clean = tdt_loss(inputs, batch, device)
    dirty = [x.detach().clone() for x in inputs]
    for x in dirty:
        x[1, 4:] = float("nan")
        x[1, :, 2:] = float("nan")
        x[2, 1, 0] = float("nan")
    leaves = TdtInputs(*(x.requires_grad_() for x in dirty))
    loss = tdt_loss(leaves, batch, device)
    assert torch.equal(loss[:2], clean[:2])
    assert loss[2].isnan()
    for got, want in zip(
        cases.gradients(loss[:2].sum(), torch.ones(()), *leaves),
        cases.gradients(clean[:2].sum(), torch.ones(()), *inputs),
        strict=True,
    ):
        assert torch.equal(got[:2], want[:2])


@pytest.mark.parametrize("device", cases.DEVICES)
def test_forbidden_symbols_and_durations(device) -> None:
    """Logits of -inf forbid arcs; a utterance without a path has a loss of inf and no gradient."""
    batch = cases.make_batch([4, 3], [2, 1], 5, 0)
    inputs = random_tdt_inputs(batch, DURATIONS[0])
    forbidden = [x.detach().clone() for x in inputs]
    forbidden[1][0, ..., 2:] = -torch.inf
    forbidden[0][1, ..., 0] = -torch.inf
    leaves = TdtInputs(*(x.requires_grad_() for x in forbidden))
    loss = tdt_loss(leaves, batch, device)
    kept = TdtInputs(leaves.logits, leaves.durations[..., :2])
    expected = tdt_reference(kept, batch, (0, 1))
    torch.testing.assert_close(loss[0].cpu(), expected[0])
    assert loss[1] == torch.inf
    grads = cases.gradients(loss, torch.ones(2, dtype=torch.float64), *leaves)
    assert all(grad.isfinite().all() and not grad[1].any() for grad in grads)


BAD = [
    ({"durations": (0, 1, 1)}, "durations is"),
    ({"durations": (0,)}, "one of them above 0"),
    ({"durations": (0, 1)}, r"duration_logits has shape \(2, 4, 3, 5\).*= \(2, 4, 3, 2\)"),
    ({"durations": tuple(range(17))}, "16 at most"),
    ({"omega": 1.5}, "omega is 1.5"),
    ({"sigma": float("nan")}, "sigma is nan"),
    ({"clamp": -1.0}, "clamp is -1.0"),
    ({"durations": (3, 4, 5, 6, 7)}, "utterance 0 has no path: the durations"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda x: str(x))
def test_bad_arguments(options, message) -> None:
    batch = cases.make_batch([4, 3], [2, 1], 5, 0)
    inputs = random_tdt_inputs(batch, DURATIONS[0])
    with pytest.raises(ValueError, match=message):
        tdt_loss(inputs, batch, **options)


@pytest.mark.gpu
def test_no_path_is_infinite_on_the_device() -> None:
    batch = cases.make_batch([4, 2], [3, 2], 5, 0)
    inputs = random_tdt_inputs(batch, (1, 2))
    loss = tdt_loss(inputs, batch, "cuda", durations=(1, 2))
    assert loss[0].isfinite()
    assert loss[1] == torch.inf
    with pytest.raises(ValueError, match="utterance 1 has no path"):
        tdt_loss(inputs, batch, "cuda", durations=(1, 2), validate=True)


@pytest.mark.parametrize("durations", [*DURATIONS, (0, 3), (1, 4), (2, 3)], ids=str)
def test_a_band_is_refused_only_without_a_path_of_the_durations(durations) -> None:
    frames, symbols, width = 4, 2, 2
    outcomes = []
    for row in itertools.product((0, 1, 2), repeat=frames - 1):
        start = torch.tensor([[0, *row]], dtype=torch.int32)
        shape = (frames, symbols + 1)
        scores = TdtScores(*torch.zeros(2, *shape), torch.zeros(*shape, len(durations)))
        total = tdt_total(scores, frames, symbols, durations, start[0], width)
        logits = torch.zeros(1, frames, width, 4)
        arguments = (logits, torch.zeros(1, frames, width, len(durations)), torch.tensor([[1, 2]]))
        options = {"durations": durations, "bounds": Bounds(start, width)}
        outcomes.append(bool(total > -torch.inf))
        if outcomes[-1]:
            assert pruned_rnnt.rnnt_loss_tdt(*arguments, **options).isfinite()
        else:
            words = "utterance 0 has no path" + " inside bounds" * any(outcomes)
            with pytest.raises(ValueError, match=words):
                pruned_rnnt.rnnt_loss_tdt(*arguments, **options)
    assert not all(outcomes)


def test_a_frame_that_begins_before_the_first_column_has_no_path() -> None:
    start = torch.tensor([[0, -1, 0]], dtype=torch.int32)
    shape = (1, 3, 2)
    arguments = (torch.zeros(*shape, 4), torch.zeros(*shape, 1), torch.tensor([[1]]))
    with pytest.raises(ValueError, match="utterance 0 has no path inside bounds"):
        pruned_rnnt.rnnt_loss_tdt(*arguments, durations=(1,), bounds=Bounds(start, 2))


@pytest.mark.parametrize("device", cases.DEVICES)
def test_validate_reads_the_band_of_durations(device) -> None:
    start = torch.tensor([[0, 0, 2]], dtype=torch.int32, device=device)
    arguments = (torch.zeros(1, 3, 3, 4), torch.zeros(1, 3, 3, 2), torch.tensor([[1, 2, 3, 1]]))
    options = {"durations": (0, 3), "bounds": Bounds(start, 3), "validate": True}
    with pytest.raises(ValueError, match="utterance 0 has no path inside bounds: in its band of 3"):
        pruned_rnnt.rnnt_loss_tdt(*(x.to(device) for x in arguments), **options)
