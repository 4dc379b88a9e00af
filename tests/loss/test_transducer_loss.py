"""PrunedTransducerLoss: its parts, its warm-up, and its two computations of the pruned loss."""

import pytest
import torch

import pruned_rnnt
from pruned_rnnt import Joiner, PrunedTransducerLoss
from tests.loss.loss_cases import DEVICES, make_batch

E, P, D, V = 6, 5, 8, 12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(41)


def example(device: str = "cpu", blank: int = 0):
    batch = make_batch([12, 9, 5], [5, 3, 0], V, blank)
    encoder = torch.randn(3, 12, E, dtype=torch.float64, device=device, requires_grad=True)
    predictor = torch.randn(3, 6, P, dtype=torch.float64, device=device, requires_grad=True)
    return batch, encoder, predictor


class CalledJoiner(torch.nn.Module):
    """The same network as a callable, so that its logits are stored."""

    def __init__(self, joiner: Joiner):
        super().__init__()
        self.inner = joiner

    def forward(self, am: torch.Tensor, lm: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner.encoder_proj(am), self.inner.decoder_proj(lm))


OPTIONS = [
    {},
    {"rnnt_type": "modified", "delay_penalty": 0.1},
    {"rnnt_type": "constrained", "exact_bounds": True, "blank": V - 1},
    {"rnnt_type": "rna", "fastemit_lambda": 0.2, "am_only_scale": 0.1},
    {"hat": True, "s_range": 3, "reduction": "sum"},
    {"reduction": "none", "s_range": 9},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths_on", ["cpu", "same"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(x) or "default")
def test_fused_equals_stored(options, activation, lengths_on, device) -> None:
    batch, encoder, predictor = example(device, options.get("blank", 0))
    joiner = Joiner(E, P, D, V, activation)
    fused = PrunedTransducerLoss(joiner, E, P, V, **options).to(device, torch.float64)
    stored = PrunedTransducerLoss(CalledJoiner(joiner), E, P, V, **options).to(
        device, torch.float64
    )
    stored.simple_am_proj, stored.simple_lm_proj = fused.simple_am_proj, fused.simple_lm_proj
    lengths = batch.lengths(device if lengths_on == "same" else "cpu")
    results = [
        m(encoder, predictor, batch.targets.to(device), *lengths, 700) for m in (fused, stored)
    ]
    inputs = [encoder, predictor, *fused.parameters()]
    grads = [torch.autograd.grad(r.loss.sum(), inputs) for r in results]
    assert torch.equal(results[0].bounds.start, results[1].bounds.start)
    for name in ("loss", "simple_loss", "pruned_loss"):
        torch.testing.assert_close(getattr(results[0], name), getattr(results[1], name))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("symbols", [[5, 3, 0], [0, 0, 0]])
@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
def test_columns_beyond_the_last_symbol_cost_nothing(rnnt_type, symbols, device) -> None:
    batch = make_batch([12, 9, 5], symbols, V, 0)
    columns = max(symbols) + 1
    encoder = torch.randn(3, 12, E, dtype=torch.float64, device=device)
    predictor = torch.randn(3, columns, P, dtype=torch.float64, device=device)
    shapes, results = [], []
    joiner = CalledJoiner(Joiner(E, P, D, V))
    joiner.inner.register_forward_hook(lambda _, given, logits: shapes.append(logits.shape))
    wide = PrunedTransducerLoss(joiner, E, P, V, s_range=40, rnnt_type=rnnt_type)
    wide = wide.to(device, torch.float64)
    for s_range in (40, max(columns, 2)):
        wide.s_range = s_range
        called = wide(encoder, predictor, batch.targets.to(device), *batch.lengths(device), 0)
        assert called.bounds.s_range == s_range
        assert not called.bounds.start.any()
        wide.joiner = joiner.inner
        fused = wide(encoder, predictor, batch.targets.to(device), *batch.lengths(device), 0)
        wide.joiner = joiner
        torch.testing.assert_close(fused.loss, called.loss)
        results.append(called.loss)
    assert {shape[2] for shape in shapes} == {max(columns, 2)}
    assert torch.equal(*results)


@pytest.mark.parametrize("device", DEVICES)
def test_module_equals_the_functions(device) -> None:
    batch, encoder, predictor = example(device)
    module = PrunedTransducerLoss(Joiner(E, P, D, V), E, P, V, s_range=3).to(device, torch.float64)
    y, lengths = batch.targets.to(device), batch.lengths(device)
    result = module(encoder, predictor, y, *lengths, 0)
    simple = pruned_rnnt.rnnt_loss_simple(
        module.simple_am_proj(encoder),
        module.simple_lm_proj(predictor),
        y,
        *lengths,
        lm_only_scale=0.25,
    )
    bounds = pruned_rnnt.prune_bounds(simple.occupancy, *lengths, 3)
    am, lm = module.joiner.encoder_proj(encoder), module.joiner.decoder_proj(predictor)
    pruned = pruned_rnnt.rnnt_loss_pruned(
        module.joiner(*pruned_rnnt.prune(am, lm, bounds)), y, bounds, *lengths
    )
    torch.testing.assert_close(result.simple_loss, simple.loss)
    torch.testing.assert_close(result.pruned_loss, pruned)
    assert torch.equal(result.bounds.start, bounds.start)
    torch.testing.assert_close(result.occupancy.emit, simple.occupancy.emit)
    torch.testing.assert_close(result.loss, simple.loss + 0.1 * pruned)


@pytest.mark.parametrize(
    ("step", "simple", "pruned"),
    [(0, 1.0, 0.1), (500, 0.875, 0.325), (1000, 0.75, 0.55), (2000, 0.5, 1.0), (10**6, 0.5, 1.0)],
)
def test_warm_up(step, simple, pruned) -> None:
    batch, encoder, predictor = example()
    module = PrunedTransducerLoss(Joiner(E, P, D, V), E, P, V).double()
    result = module(encoder, predictor, batch.targets, *batch.lengths("cpu"), step)
    assert result.simple_scale == pytest.approx(simple)
    assert result.pruned_scale == pytest.approx(pruned)
    torch.testing.assert_close(
        result.loss, simple * result.simple_loss + pruned * result.pruned_loss
    )


def test_no_warm_up() -> None:
    module = PrunedTransducerLoss(Joiner(E, P, D, V), E, P, V, warm_up_steps=0)
    assert module.scales(0) == (0.5, 1.0)


def test_evaluation_needs_no_step() -> None:
    batch, *outputs = example()
    module = PrunedTransducerLoss(Joiner(E, P, D, V), E, P, V, warm_up_steps=10).double().eval()
    inputs = (*outputs, batch.targets, *batch.lengths("cpu"))
    assert torch.equal(module(*inputs).loss, module(*inputs, 10).loss)
    with pytest.raises(TypeError, match="step is None; it must be an integer in training"):
        module.train()(*inputs)


def test_starts_near_the_uniform_distribution() -> None:
    """The simple loss of a fresh module is that of logits without information."""
    batch, encoder, predictor = example()
    module = PrunedTransducerLoss(Joiner(E, P, D, V), E, P, V).double()
    fresh = module(encoder, predictor, batch.targets, *batch.lengths("cpu"), 0).simple_loss
    flat = torch.zeros(3, 12, 6, V, dtype=torch.float64)
    uniform = pruned_rnnt.rnnt_loss(flat, batch.targets, *batch.lengths("cpu"))
    assert abs(fresh - uniform) < 0.1 * uniform


@pytest.mark.parametrize("device", DEVICES)
def test_learns(device) -> None:
    """Adam on one batch brings both losses near zero."""
    batch, encoder, predictor = example(device)
    module = PrunedTransducerLoss(Joiner(E, P, 32, V), E, P, V, s_range=4, warm_up_steps=20)
    module = module.to(device)
    inputs = [x.detach().float().requires_grad_() for x in (encoder, predictor)]
    optimiser = torch.optim.Adam([*module.parameters(), *inputs], lr=0.1)
    y, lengths = batch.targets.to(device), batch.lengths("cpu")
    for step in range(80):
        result = module(*inputs, y, *lengths, step)
        if step == 0:
            first = result
        optimiser.zero_grad()
        result.loss.backward()
        optimiser.step()
    assert result.pruned_loss < 0.02 * first.pruned_loss
    assert result.simple_loss < 0.2 * first.simple_loss


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device) -> None:
    batch, encoder, predictor = example(device)
    module = PrunedTransducerLoss(Joiner(E, P, D, V), E, P, V).to(device)
    inputs = [x.detach().float().requires_grad_() for x in (encoder, predictor)]
    y, lengths = batch.targets.to(device), batch.lengths(device)
    with torch.autocast(device, torch.bfloat16):
        result = module(*inputs, y, *lengths, 0)
    result.loss.backward()
    exact = module(*inputs, y, *lengths, 0)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss, exact.loss, rtol=2e-2, atol=0)
    for x in (*inputs, *module.parameters()):
        assert x.grad.dtype == torch.float32
        assert x.grad.isfinite().all()


def test_options_are_checked_at_construction() -> None:
    joiner = Joiner(E, P, D, V)
    with pytest.raises(ValueError, match="s_range is 1; it must be at least 2"):
        PrunedTransducerLoss(joiner, E, P, V, s_range=1)
    with pytest.raises(ValueError, match="blank is 12"):
        PrunedTransducerLoss(joiner, E, P, V, blank=12)
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        Joiner(E, P, D, V, "gelu")
