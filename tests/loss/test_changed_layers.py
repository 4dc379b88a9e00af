"""What users change in the layers of the loss runs: hooks, adapters, subclasses, other layers.

Each change is compared in float64 with the same layers called one by one, and a loss of the stored
logits; the module must also train on, and say once why it takes the slower path.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune

import pruned_rnnt
from pruned_rnnt.loss.composed_losses import projection
from pruned_rnnt.loss.joiner import output_parameters
from pruned_rnnt.ops.joiner.fused_joiner import OutputLayers
from pruned_rnnt.ops.pruning.band_gather import gathered_band

N, T, U, E, P, D, V = 2, 9, 4, 6, 5, 8, 7
DURATIONS = (0, 1, 2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Lora(nn.Module):
    """A wrapper as adapter libraries put it in place of a layer: it has the layer's weight."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * super().forward(x)


class OwnCall(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 1.5 * super().__call__(x)


class OwnCallOfJoiner(pruned_rnnt.Joiner):
    def __call__(self, am: Tensor, lm: Tensor) -> Tensor:
        return 1.5 * super().__call__(am, lm)


class Around(nn.Module):
    def __init__(self, joiner: pruned_rnnt.Joiner) -> None:
        super().__init__()
        self.joiner = joiner

    def forward(self, am: Tensor, lm: Tensor) -> Tensor:
        return self.joiner(am, lm)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


class OwnHidden(pruned_rnnt.Joiner):
    def hidden(self, am: Tensor, lm: Tensor) -> Tensor:
        return torch.tanh(am * torch.sigmoid(lm))


class OwnForward(pruned_rnnt.Joiner):
    def forward(self, am: Tensor, lm: Tensor) -> Tensor:
        return self.output_linear(torch.sin(am + lm))


def forward_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda _, __, output: 1.5 * output + 0.1)
    return layer


def pre_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda _, inputs: (0.5 * inputs[0],))
    return layer


def patched(layer: nn.Module) -> nn.Module:
    original = layer.forward
    layer.forward = lambda x: 2.0 * original(x)
    return layer


def without_bias(layer: nn.Linear) -> nn.Module:
    return nn.Linear(layer.in_features, layer.out_features, bias=False)


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.4)


def parametrized(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def scaled(layer: nn.Linear) -> nn.Module:
    return Scaled(layer.in_features, layer.out_features)


# Each takes a linear layer and returns what replaces it.
LAYER_CHANGES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "forward hook": forward_hook,
    "forward pre-hook": pre_hook,
    "adapter": Lora,
    "subclass": scaled,
    "own call": lambda layer: OwnCall(layer.in_features, layer.out_features),
    "patched forward": patched,
    "no bias": without_bias,
    "sequential": lambda layer: nn.Sequential(
        nn.Linear(layer.in_features, 3), nn.Tanh(), nn.Linear(3, layer.out_features)
    ),
    "old weight_norm": torch.nn.utils.weight_norm,
    "new weight_norm": parametrizations.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
    "new spectral_norm": parametrizations.spectral_norm,
    "prune": pruned,
    "parametrize": parametrized,
}
LAYERS = [
    "simple_am_proj",
    "simple_lm_proj",
    "joiner.encoder_proj",
    "joiner.decoder_proj",
    "joiner.output_linear",
]
TDT_LAYERS = ["tdt.simple_am_proj", "tdt.simple_lm_proj", "joiner.duration_linear"]
CALLS_JOINER = {"joiner.output_linear", "joiner.duration_linear"}
# The gradient of a parametrization and a missing bias are as good without a call.
NO_CALL = {"no bias", "new weight_norm", "new spectral_norm", "parametrize"}


def new_module(joiner_class: type = pruned_rnnt.Joiner, **options) -> nn.Module:
    torch.manual_seed(1)
    joiner = joiner_class(E, P, D, V, duration_count=len(options.get("durations") or ()))
    return pruned_rnnt.PrunedTransducerLoss(
        joiner, E, P, V, s_range=3, warm_up_steps=0, lm_only_scale=0.0, **options
    )


def new_batch(device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    leaves = [
        x.to(device, dtype).requires_grad_()
        for x in (torch.randn(N, T, E), torch.randn(N, U + 1, P))
    ]
    targets = torch.randint(1, V, (N, U), device=device)
    return (*leaves, targets, torch.tensor([9, 7]), torch.tensor([4, 2]))


def expected_loss(
    module: nn.Module, batch: tuple[Tensor, ...], bounds: pruned_rnnt.Bounds
) -> Tensor:
    """Both losses from stored logits, by calls of the layers alone."""
    encoder, predictor, targets, frames, symbols = batch
    joiner, tdt = module.joiner, module.tdt
    am, lm = joiner.encoder_proj(encoder), joiner.decoder_proj(predictor)
    am_NTSD = am[:, :, None].expand(-1, -1, bounds.s_range, -1)
    lm_NTSD = gathered_band(lm, bounds.start, bounds.s_range)
    nodes = module.simple_am_proj(encoder)[:, :, None] + module.simple_lm_proj(predictor)[:, None]
    lengths = (targets, frames, symbols)
    if tdt is None:
        simple = pruned_rnnt.rnnt_loss(nodes, *lengths)
        full = pruned_rnnt.rnnt_loss_pruned(
            joiner(am_NTSD, lm_NTSD), targets, bounds, frames, symbols
        )
    else:
        duration_nodes = (
            tdt.simple_am_proj(encoder)[:, :, None] + tdt.simple_lm_proj(predictor)[:, None]
        )
        options = {"durations": DURATIONS}
        simple = pruned_rnnt.rnnt_loss_tdt(nodes, duration_nodes, *lengths, **options)
        logits = joiner.with_durations(am_NTSD, lm_NTSD)
        full = pruned_rnnt.rnnt_loss_tdt(*logits, *lengths, bounds=bounds, **options)
    return 0.5 * simple + full


def assert_as_called(module: nn.Module, device: str) -> None:
    """Loss and all gradients, in two steps, because some wrappers fail in the second one."""
    module = module.to(device, torch.float64).eval()  # no power iterations between two calls
    batch = new_batch(device)
    for _ in range(2):
        losses = module(*batch, step=1)
        expected = expected_loss(module, batch, losses.bounds)
        torch.testing.assert_close(losses.loss, expected, rtol=1e-9, atol=1e-9)
        leaves = [*batch[:2], *(p for p in module.parameters() if p.requires_grad)]
        got, wanted = (
            torch.autograd.grad(x, leaves, allow_unused=True) for x in (losses.loss, expected)
        )
        for left, right in zip(got, wanted, strict=True):
            assert (left is None) == (right is None)
            if left is not None:
                torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)


def replaced(module: nn.Module, name: str, change: Callable[[nn.Linear], nn.Module]) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    setattr(owner, leaf, change(getattr(owner, leaf)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", LAYER_CHANGES)
@pytest.mark.parametrize("layer", [*LAYERS, *TDT_LAYERS])
@pytest.mark.parametrize("durations", [None, DURATIONS], ids=["rnnt", "tdt"])
def test_a_changed_layer_runs(
    layer: str, change: str, durations: tuple[int, ...] | None, device: str, caplog
) -> None:
    if layer in TDT_LAYERS and durations is None:
        pytest.skip("only a TDT loss has this layer")
    module = new_module(durations=durations)
    replaced(module, layer, LAYER_CHANGES[change])
    with caplog.at_level(logging.WARNING, "pruned_rnnt"):
        assert_as_called(module, device)
    calls = [r.getMessage() for r in caplog.records if "calls the joiner" in r.getMessage()]
    called = layer in CALLS_JOINER and change not in NO_CALL
    assert [message.startswith(layer) for message in calls] == [True] * called


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [OwnHidden, OwnForward, OwnCallOfJoiner, "hook", "patched"])
def test_a_changed_joiner_runs(kind: object, device: str, caplog) -> None:
    module = new_module(kind if isinstance(kind, type) else pruned_rnnt.Joiner)
    if kind == "hook":
        module.joiner.register_forward_hook(lambda _, __, logits: 0.5 * logits)
    elif kind == "patched":
        own = module.joiner.hidden
        module.joiner.hidden = lambda am, lm: 0.5 * own(am, lm)
    with caplog.at_level(logging.WARNING, "pruned_rnnt"):
        assert_as_called(module, device)
    assert len([r for r in caplog.records if "joiner" in r.getMessage()]) == 1


def test_a_joiner_with_its_own_hidden_runs_with_durations() -> None:
    assert_as_called(new_module(OwnHidden, durations=DURATIONS), "cpu")


def test_changes_that_a_call_with_durations_would_miss_are_refused() -> None:
    for kind, name in ((OwnForward, "forward"), (OwnCallOfJoiner, "__call__")):
        module = new_module(kind, durations=DURATIONS).double()
        with pytest.raises(ValueError, match=rf"Own\w+ with a {name} of its own.*with_durations"):
            module(*new_batch("cpu"), step=0)
    module = new_module(durations=DURATIONS).double()
    module.joiner.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"joiner has forward hooks.*joiner\.output_linear"):
        module(*new_batch("cpu"), step=0)
    with pytest.raises(ValueError, match="duration_count"):
        pruned_rnnt.Joiner(E, P, D, V).with_durations(torch.zeros(D), torch.zeros(D))


WRAPPED = {
    "compile": torch.compile,
    "DataParallel": nn.DataParallel,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "checkpoint": checkpoint_wrapper,
    "both": lambda joiner: torch.compile(checkpoint_wrapper(joiner)),
    "script": torch.jit.script,
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_wrapped_joiner_is_refused(wrapper: str) -> None:
    wrapped = WRAPPED[wrapper](pruned_rnnt.Joiner(8, 8, 8, V))
    with pytest.raises(TypeError, match=r"of a pruned_rnnt\.Joiner, whose encoder_proj.*compile"):
        pruned_rnnt.PrunedTransducerLoss(wrapped, 8, 8, V)
    module = pruned_rnnt.PrunedTransducerLoss(torch.add, 8, 8, V)
    module.joiner = wrapped
    with pytest.raises(TypeError, match=r"of a pruned_rnnt\.Joiner, whose encoder_proj.*compile"):
        module(torch.zeros(N, T, 8), torch.zeros(N, U + 1, 8), *new_batch("cpu")[2:], step=0)


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("kind", ["lambda", "bound", "module"])
def test_a_callable_that_leaves_out_the_projections_is_refused(kind: str, width: int) -> None:
    joiner = pruned_rnnt.Joiner(width, width, 8, V)
    around = {"lambda": lambda am, lm: joiner(am, lm), "bound": joiner.forward}
    callee = around.get(kind) or Around(joiner)
    module = pruned_rnnt.PrunedTransducerLoss(callee, width, width, V)
    inputs = torch.zeros(N, T, width), torch.zeros(N, U + 1, width), *new_batch("cpu")[2:]
    with pytest.raises(ValueError, match=r"am is not projected: .*joiner\.encoder_proj\(am\)"):
        module(*inputs, step=0)


def test_an_activation_that_does_not_exist_is_refused() -> None:
    module = new_module().double()
    module.joiner.activation = "gelu"
    with pytest.raises(ValueError, match=r"joiner\.activation is 'gelu'; it must be one of"):
        module(*new_batch("cpu"), step=0)


def test_sharded_projections_without_hooks_are_refused() -> None:
    class DTensor(nn.Parameter):
        """As that of torch.distributed, by its name."""

    layer = nn.Linear(2, 3)
    layer.weight = DTensor(layer.weight.detach())
    with pytest.raises(ValueError, match=r"sharded parameters.*apply fully_shard to the loss"):
        projection(layer, torch.zeros(1, 2))
    layer.register_forward_pre_hook(lambda *_: None)  # as that of fully_shard(layer)
    assert projection(layer, torch.zeros(1, 2)).shape == (1, 3)


def test_a_backward_hook_of_the_output_layer_runs() -> None:
    module = new_module().double()
    seen: list[Tensor] = []
    module.joiner.output_linear.register_full_backward_hook(lambda _, __, out: seen.append(out[0]))
    module(*new_batch("cpu"), step=0).loss.backward()
    assert len(seen) == 1
    assert seen[0].shape == (N, T, 3, V)


def test_global_hooks_run() -> None:
    module = new_module().double()
    called: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: called.append(m))
    try:
        module(*new_batch("cpu"), step=0)
    finally:
        handle.remove()
    assert module.joiner in called
    assert module.joiner.output_linear in called


def test_a_hook_that_is_removed_lets_the_loss_compute_in_chunks_again() -> None:
    module = new_module().double()
    handle = module.joiner.output_linear.register_forward_hook(lambda *_: None)
    assert output_parameters(module.joiner) == "joiner.output_linear has forward hooks"
    batch = new_batch("cpu")
    stored = module(*batch, step=0).loss
    handle.remove()
    assert isinstance(output_parameters(module.joiner), OutputLayers)
    fused = module(*batch, step=0).loss
    torch.testing.assert_close(fused, stored, rtol=1e-12, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("durations", [None, DURATIONS], ids=["rnnt", "tdt"])
@pytest.mark.parametrize("change", ["adapter", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_inputs_of_another_dtype_than_the_layers(
    dtype: torch.dtype,
    change: str | None,
    durations: tuple[int, ...] | None,
    device: str,
    autocast: bool,
) -> None:
    if autocast and dtype == torch.float64:
        pytest.skip("autocast takes no float64")
    module = new_module(durations=durations).to(device)
    if change is not None:
        replaced(module, "joiner.output_linear", lambda layer: Lora(layer).to(device))
    given, exact = new_batch(device, dtype), new_batch(device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        losses = module(*given, step=1)
    losses.loss.backward()
    assert given[0].grad is not None
    assert given[0].grad.dtype == dtype
    expected = copy.deepcopy(module).double()(*exact, step=1)
    assert losses.loss.item() == pytest.approx(expected.loss.item(), rel=2e-2)


def test_copies_and_pickles_keep_the_changes() -> None:
    module = new_module()
    replaced(module, "joiner.output_linear", Lora)
    module = module.double()
    batch = new_batch("cpu")
    wanted = module(*batch, step=0).loss
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*batch, step=0).loss, wanted)


def test_streamed_loss_takes_changed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pruned_rnnt.ops.simple.streamed_loss.MOST_STORED_BYTES", 0)
    assert_as_called(new_module(), "cpu")
    module = new_module()
    replaced(module, "simple_am_proj", Lora)
    assert_as_called(module, "cpu")


def test_projection_takes_the_dtype_of_the_parameters() -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert projection(layers, torch.zeros(1, 2, dtype=torch.float64)).dtype == torch.float32


def test_peft_adapters_of_the_joiner_learn() -> None:
    peft = pytest.importorskip("peft")
    module = new_module().double()
    module.joiner = peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=2, target_modules=["output_linear", "encoder_proj"], init_lora_weights=False
        ),
        module.joiner,
    )
    assert_as_called(module, "cpu")
    losses = module(*new_batch("cpu"), step=0)
    losses.loss.backward()
    learnt = [p for name, p in module.named_parameters() if "lora_" in name]
    assert learnt
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learnt)
