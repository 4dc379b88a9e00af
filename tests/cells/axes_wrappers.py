"""What users put around the layers of PrunedTransducerLoss: hooks, adapters, parametrizations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import pruned_rnnt
from tests.cells import module_subjects
from tests.cells.cell import Cell
from tests.cells.judge import Comparison, Upstream, compute
from tests.cells.logit_subjects import DURATIONS, V
from tests.cells.module_subjects import E, P, criterion
from tests.cells.subject import Arguments, Subject, results_of, seed

Wrapper = Callable[[nn.Linear], nn.Module | None]
_NAMES = ("hook", "layer", "joiner", "parametri", "output_linear", "simple_am_proj")


def forward_hook(layer: nn.Linear) -> None:
    layer.register_forward_hook(lambda _module, _inputs, output: output * 1.5)


def forward_pre_hook(layer: nn.Linear) -> None:
    layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 0.5,))


def backward_hook(layer: nn.Linear) -> None:
    layer.register_full_backward_hook(lambda _m, grads, _o: tuple(2 * x for x in grads))


def backward_pre_hook(layer: nn.Linear) -> None:
    layer.register_full_backward_pre_hook(lambda _m, grads: tuple(2 * x for x in grads))


class Lora(nn.Module):
    """A wrapper as peft makes it: the frozen layer and a product of two factors."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        seed(11)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Scaled(nn.Linear):
    """A subclass whose forward differs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class Plain(nn.Linear):
    """A subclass that adds nothing."""


def subclass(kind: type[nn.Linear]) -> Wrapper:
    def wrap(layer: nn.Linear) -> nn.Module:
        other = kind(layer.in_features, layer.out_features)
        other.load_state_dict(layer.state_dict())
        return other

    return wrap


def patched(layer: nn.Linear) -> None:
    original = layer.forward
    layer.forward = lambda x: original(x) * 1.5  # type: ignore[method-assign]


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def parametrized(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", Double())


def without_bias(layer: nn.Linear) -> nn.Module:
    other = nn.Linear(layer.in_features, layer.out_features, bias=False)
    other.load_state_dict({"weight": layer.weight})
    return other


def frozen(layer: nn.Linear) -> None:
    layer.requires_grad_(False)


def no_weights(wrap: Callable[..., object], **options: object) -> Wrapper:
    """A wrapper of torch that changes the layer in place."""

    def change(layer: nn.Linear) -> None:
        wrap(layer, **options)

    return change


def _in_eval(layer: nn.Linear) -> None:
    """Without the power iteration of each call in training."""
    torch.nn.utils.spectral_norm(layer)
    layer(torch.zeros(1, layer.in_features))
    layer.eval()


def _spectral(layer: nn.Linear) -> None:
    parametrizations.spectral_norm(layer)
    layer.eval()


WRAPPERS: dict[str, Wrapper] = {
    "forward hook": forward_hook,
    "forward pre-hook": forward_pre_hook,
    "backward hook": backward_hook,
    "backward pre-hook": backward_pre_hook,
    "LoRA": Lora,
    "subclass of Linear": subclass(Scaled),
    "plain subclass": subclass(Plain),
    "patched forward": patched,
    "parametrization": parametrized,
    "weight_norm": no_weights(parametrizations.weight_norm),
    "old weight_norm": no_weights(torch.nn.utils.weight_norm),
    "spectral_norm": _spectral,
    "old spectral_norm": _in_eval,
    "prune": no_weights(prune.l1_unstructured, name="weight", amount=0.3),
    "Sequential": lambda layer: nn.Sequential(layer, nn.Tanh()),
    "Sequential of one": nn.Sequential,
    "no bias": without_bias,
    "frozen": frozen,
}
LAYERS = (
    "joiner.encoder_proj",
    "joiner.decoder_proj",
    "joiner.output_linear",
    "simple_am_proj",
    "simple_lm_proj",
)
TDT_LAYERS = (*LAYERS, "joiner.duration_linear", "tdt.simple_am_proj", "tdt.simple_lm_proj")


def wrapped(layer_name: str, wrap: Wrapper) -> Callable[[Arguments], Arguments]:
    """Applies the wrapper to one layer of the module."""

    def change(given: Arguments) -> Arguments:
        owner_name, _, name = layer_name.rpartition(".")
        owner = given["module"].get_submodule(owner_name)
        layer = getattr(owner, name)
        device, dtype = layer.weight.device, layer.weight.dtype
        other = wrap(layer.cpu())
        setattr(owner, name, (layer if other is None else other).to(device, dtype))
        return given

    return change


def two_steps(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """A training step, and another one, which is judged."""
    compute(subject, given, results_of(subject.call(**given)), upstream)
    return compute(subject, given, results_of(subject.call(**given)), upstream)


class OwnForward(pruned_rnnt.Joiner):
    """Overrides forward."""

    def forward(self, am: Tensor, lm: Tensor) -> Tensor:
        return super().forward(am, lm) * 1.5


class OwnHidden(pruned_rnnt.Joiner):
    """Overrides the activation."""

    def hidden(self, am: Tensor, lm: Tensor) -> Tensor:
        return torch.sigmoid(am * lm)


class NothingNew(pruned_rnnt.Joiner):
    """A subclass that adds nothing."""


def joiner_hook(given: Arguments) -> Arguments:
    given["module"].joiner.register_forward_hook(lambda _m, _i, output: output * 1.5)
    return given


def joiner_pre_hook(given: Arguments) -> Arguments:
    given["module"].joiner.register_forward_pre_hook(
        lambda _m, inputs: (inputs[0] * 0.5, *inputs[1:])
    )
    return given


def joiner_backward_hook(given: Arguments) -> Arguments:
    given["module"].joiner.register_full_backward_hook(
        lambda _m, grads, _o: tuple(None if x is None else 2 * x for x in grads)
    )
    return given


def patched_joiner(given: Arguments) -> Arguments:
    joiner = given["module"].joiner
    original = joiner.forward
    joiner.forward = lambda am, lm: original(am, lm) * 1.5
    return given


def patched_hidden(given: Arguments) -> Arguments:
    given["module"].joiner.hidden = lambda am, lm: torch.sigmoid(am * lm)
    return given


def replaced(**options: object) -> Callable[[Arguments], Arguments]:
    """Another module in place of the subject's."""

    def change(given: Arguments) -> Arguments:
        x = given["encoder_out"]
        module = criterion(**options).to(x.device, x.dtype)
        return {**given, "module": module}

    return change


def _stored(am: Tensor, lm: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(am[..., :P] + lm) @ weight.to(am)


_WEIGHT = torch.linspace(-1, 1, P * V, dtype=torch.float64).view(P, V).sin()
# Of the whole joiner; those of TDT have durations as well.
JOINERS: dict[str, Callable[[Arguments], Arguments]] = {
    "forward hook": joiner_hook,
    "forward pre-hook": joiner_pre_hook,
    "backward hook": joiner_backward_hook,
    "patched forward": patched_joiner,
    "patched hidden": patched_hidden,
}
CLASSES = {"own forward": OwnForward, "own hidden": OwnHidden, "as it is": NothingNew}


def cells() -> Iterator[Cell]:
    plain, own, tdt = module_subjects.SUBJECTS
    for subject, layers in ((plain, LAYERS), (tdt, TDT_LAYERS)):
        for layer in layers:
            for column, wrap in WRAPPERS.items():
                row = f"{subject.name}: {layer}"
                yield _cell(subject, row, column, wrapped(layer, wrap))
        options = {"durations": DURATIONS, "sigma": 0.05} if subject is tdt else {}
        classes = {k: replaced(joiner=kind, **options) for k, kind in CLASSES.items()}
        for column, change in {**JOINERS, **classes}.items():
            # A loss with durations calls with_durations, which a change of forward says nothing of.
            is_lost = subject is tdt and column not in ("patched hidden", "own hidden", "as it is")
            row = f"{subject.name}: joiner"
            yield _cell(subject, row, column, change, must_refuse=is_lost)
    own_joiners = {
        "function": functools.partial(_stored, weight=_WEIGHT),
        "lambda": lambda am, lm: _stored(am, lm, _WEIGHT),
        "bilinear module": _Bilinear,
    }
    for column, joiner in own_joiners.items():
        yield _cell(own, f"{own.name}: joiner", column, replaced(joiner=joiner))


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(E, P, V)

    def forward(self, am: Tensor, lm: Tensor) -> Tensor:
        return self.layer(am.contiguous(), lm)


def _cell(
    subject: Subject,
    row: str,
    column: str,
    change: Callable[[Arguments], Arguments],
    must_refuse: bool = False,
) -> Cell:
    options = {"run": two_steps, "words": _NAMES, "must_refuse": must_refuse}
    return Cell(subject, "wrappers", row, column, change, **options)
