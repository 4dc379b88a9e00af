"""Transforms of torch: compile, export, functorch, TorchScript, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.exc import InductorError

from tests.cells.axes_gradients import has_gradients
from tests.cells.axes_modes import without_gradients
from tests.cells.cell import Absent, Cell
from tests.cells.judge import Comparison, Upstream, compute, names_of, spread, weighted
from tests.cells.subject import Arguments, Results, Subject, leaves_of, results_of

_COMPILED_WORDS = ("compile", "export")
_DYNAMIC, _INDUCTOR = "compile dynamic", "compile inductor"
_TRANSFORM_WORDS = ("vmap", "torch.func", "functorch", "forward-mode", "jvp")


def compiled(**options: Any) -> Callable[..., Comparison]:
    """torch.compile of the call, with options of it."""

    def run(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
        torch._dynamo.reset()
        function = torch.compile(subject.call, **options)
        try:
            results = results_of(function(**given))
        except InductorError as error:
            # torch 2.11 on CUDA, for some sums with dynamic sizes, in functions without our ops.
            raise NotImplementedError("torch cannot compile this call by inductor") from error
        return compute(subject, given, results, upstream)

    return run


class _Wrapped(nn.Module):
    """The call as a module of its tensors, in their order."""

    def __init__(self, subject: Subject, given: Arguments) -> None:
        super().__init__()
        self.function = subject.call
        self.names = list(_tensors(given))
        self.others = {k: x for k, x in given.items() if not isinstance(x, Tensor)}
        if "module" in self.others:
            self.inner = self.others.pop("module")

    def forward(self, *tensors: Tensor) -> Any:
        given = dict(zip(self.names, tensors, strict=True))
        module = {"module": self.inner} if hasattr(self, "inner") else {}
        return tuple(results_of(self.function(**given, **self.others, **module)).values())


def _tensors(given: Arguments) -> dict[str, Tensor]:
    return {k: x for k, x in given.items() if isinstance(x, Tensor)}


def exported(strict: bool) -> Callable[..., Comparison]:
    def run(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
        given = {k: x.detach() if isinstance(x, Tensor) else x for k, x in given.items()}
        names = list(results_of(subject.call(**given)))
        module = _Wrapped(subject, given).requires_grad_(False)
        tensors = tuple(_tensors(given).values())
        program = torch.export.export(module, tensors, strict=strict)
        values = program.module()(*tensors)
        return without_gradients(subject, given, dict(zip(names, values, strict=True)))

    return run


def _loss_of(subject: Subject, given: Arguments, upstream: Upstream) -> Callable[..., Tensor]:
    """The weighted loss as a function of the floating leaves of arguments."""
    plain = results_of(subject.call(**given))
    names = names_of(subject, plain, upstream)

    def loss(values: dict[str, Tensor]) -> Tensor:
        results = results_of(subject.call(**{**given, **values}))
        return weighted(results, names, upstream)

    return loss


def _plain_results(subject: Subject, given: Arguments) -> tuple[Results, list[str]]:
    results = results_of(subject.call(**given))
    losses = [k for k, x in results.items() if x.requires_grad]
    return {k: x.detach() for k, x in results.items()}, losses


def func_grad(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    leaves = {k: x.detach() for k, x in leaves_of(given).items() if "." not in k}
    grads = torch.func.grad(_loss_of(subject, given, upstream))(leaves)
    return Comparison(given, *_plain_results(subject, given), grads)


def vmapped(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """Two equal problems at once."""
    leaves = {k: torch.stack([x.detach()] * 2) for k, x in leaves_of(given).items() if "." not in k}
    names: list[str] = []

    def function(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
        results = results_of(subject.call(**{**given, **values}))
        names[:] = results
        return tuple(results.values())

    values = torch.func.vmap(function)(leaves)
    results = {k: x[1].detach() for k, x in zip(names, values, strict=True)}
    return Comparison(given, results, [], {})


def forward_mode(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """The directional derivative along ones, as a gradient that is scaled to equal it."""
    leaves = {k: x.detach() for k, x in leaves_of(given).items() if "." not in k}
    tangents = {k: torch.ones_like(x) for k, x in leaves.items()}
    loss = _loss_of(subject, given, upstream)
    _, slope = torch.func.jvp(loss, (leaves,), (tangents,))
    plain = torch.autograd.grad(loss(leaves_of(given)), list(leaves_of(given).values()))
    total = sum(x.sum() for x in plain)
    if not torch.allclose(slope, total, rtol=1e-3, atol=1e-4):
        raise AssertionError(f"forward-mode gives {slope}, not {total}")
    return Comparison(given, *_plain_results(subject, given), {})


def traced(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """torch.jit.trace, run on other values of the same shapes."""
    module = _Wrapped(subject, given)
    tensors = _tensors(given)
    other = tuple(
        (x.detach() * 0.5).requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in tensors.values()
    )
    names = list(results_of(subject.call(**given)))
    function = torch.jit.trace(module, other, check_trace=False)
    results = dict(zip(names, function(*tensors.values()), strict=True))
    return compute(subject, given, results, upstream)


def functional(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """torch.func.functional_call of the module with its own parameters."""
    module = given["module"]
    parameters = dict(module.named_parameters())
    others = {k: x for k, x in given.items() if k != "module"}
    results = results_of(torch.func.functional_call(module, parameters, (), others))
    return compute(subject, given, results, upstream)


def captured(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """Both passes in one CUDA graph, replayed."""
    if not torch.cuda.is_available():
        raise Absent("no CUDA device")
    on_device: dict[torch.Size, Tensor] = {}

    def weights(loss: Tensor) -> Tensor:
        """Copied to the device before the capture, which takes no copy."""
        if loss.shape not in on_device:
            on_device[loss.shape] = spread(loss).to(loss)
        return on_device[loss.shape]

    upstream = upstream._replace(weights=weights)
    before = {name: x.detach().clone() for name, x in leaves_of(given).items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute(subject, given, results_of(subject.call(**given)), upstream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            found = compute(subject, given, results_of(subject.call(**given)), upstream)
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        # A call that reads values has to wait for the device, which no capture allows.
        raise NotImplementedError("torch cannot capture this call in a CUDA graph") from error
    with torch.no_grad():
        # The first call may have written over its arguments.
        for name, x in leaves_of(given).items():
            x.copy_(before[name])
    graph.replay()
    torch.cuda.synchronize()
    return found


# aot_eager traces all that the backend eager does, and the backward pass.
COMPILED = {
    "compile aot_eager": compiled(backend="aot_eager"),
    _DYNAMIC: compiled(backend="inductor", dynamic=True),
    _INDUCTOR: compiled(backend="inductor"),
    "export": exported(False),
    "strict export": exported(True),
}
TRANSFORMS = {
    "func.grad": func_grad,
    "vmap": vmapped,
    "jvp": forward_mode,
    "jit.trace": traced,
}


def compilers_of(subjects: list[Subject]) -> Iterator[tuple[Subject, str]]:
    """Inductor and symbolic sizes take seconds: only the first variant of a function, and none of
    the functions of other packages, whose graphs are those of ours."""
    functions = set()
    for subject in subjects:
        is_new = subject.function not in functions and not subject.name.startswith("compat.")
        functions.add(subject.function)
        for column in COMPILED:
            if is_new or column not in (_DYNAMIC, _INDUCTOR):
                yield subject, column


def cells(subjects: list[Subject]) -> Iterator[Cell]:
    for subject, column in compilers_of(subjects):
        yield Cell(
            subject,
            "compilers",
            subject.name,
            column,
            run=COMPILED[column],
            words=(*_COMPILED_WORDS, *subject.floats, *subject.integers),
            slow=True,
        )
    for subject in subjects:
        words = (*subject.floats, *subject.integers)
        if subject.floats and has_gradients(subject):
            for column, run in TRANSFORMS.items():
                yield Cell(
                    subject,
                    "transforms",
                    subject.name,
                    column,
                    run=run,
                    words=(*_TRANSFORM_WORDS, "trace", *words),
                )
            yield Cell(
                subject,
                "transforms",
                subject.name,
                "CUDA graph",
                run=captured,
                words=("CUDA graph", *words),
            )
        if subject.is_module:
            yield Cell(subject, "transforms", subject.name, "functional_call", run=functional)
