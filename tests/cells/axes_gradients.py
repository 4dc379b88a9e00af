"""Gradients: which leaves have them, what comes in from above, and what is done to the graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cells.cell import Cell, plain, replacing
from tests.cells.judge import Comparison, Upstream, compute, gradients, names_of, weighted
from tests.cells.subject import Arguments, Results, Subject, leaves_of, results_of

_TWICE = ("differentiated", "second time", "retain_graph")
_CHANGED = ("inplace", "modified", "in-place", "in_place")


def only(name: str) -> Callable[[Arguments], Arguments]:
    """Leaves nothing but this argument, or parameter of the module, with a gradient."""

    def change(given: Arguments) -> Arguments:
        for leaf, x in leaves_of(given).items():
            x.requires_grad_(leaf == name)
        return given

    return change


def finished(
    subject: Subject, given: Arguments, results: Results, grads: dict[str, Tensor | None]
) -> Comparison:
    losses = [name for name, x in results.items() if x.requires_grad]
    return Comparison(given, {k: x.detach() for k, x in results.items()}, losses, grads)


def retained(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    results, leaves = results_of(subject.call(**given)), leaves_of(given)
    total = weighted(results, names_of(subject, results, upstream), upstream)
    for _ in range(2):
        found = torch.autograd.grad(
            total, list(leaves.values()), allow_unused=True, retain_graph=True
        )
    return finished(subject, given, results, dict(zip(leaves, found, strict=True)))


def repeated(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """The graph is used again without retain_graph."""
    results, leaves = results_of(subject.call(**given)), leaves_of(given)
    total = weighted(results, names_of(subject, results, upstream), upstream)
    for _ in range(2):
        grads = gradients(total, leaves, 1)
    return finished(subject, given, results, grads)


def strided_upstream(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    results, leaves = results_of(subject.call(**given)), leaves_of(given)
    names = names_of(subject, results, upstream)
    assert upstream.weights is not None
    weights = []
    for name in names:
        x = upstream.weights(results[name]).to(results[name]) * (1 + 0.1 * len(name))
        weights.append(x.repeat_interleave(2, -1)[..., ::2] if x.dim() > 0 else x)
    found = torch.autograd.grad(
        [results[name] for name in names], list(leaves.values()), weights, allow_unused=True
    )
    return finished(subject, given, results, dict(zip(leaves, found, strict=True)))


def accumulated(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """Two calls, whose gradients add up in .grad."""
    leaves = leaves_of(given)
    for _ in range(2):
        results = results_of(subject.call(**given))
        names = names_of(subject, results, upstream)
        if names:
            weighted(results, names, upstream).backward()
    grads = {name: None if x.grad is None else x.grad / 2 for name, x in leaves.items()}
    return finished(subject, given, results, grads)


def hooked(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """A hook on each leaf doubles its gradient."""
    leaves = leaves_of(given)
    for x in leaves.values():
        x.register_hook(lambda grad: grad * 2)
    found = plain(subject, given, upstream)
    return found._replace(grads={k: None if x is None else x / 2 for k, x in found.grads.items()})


def checkpointed(reentrant: bool) -> Callable[..., Comparison]:
    def run(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
        names: list[str] = []
        tensors = {k: x for k, x in given.items() if isinstance(x, Tensor)}

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            results = results_of(
                subject.call(**{**given, **dict(zip(tensors, values, strict=True))})
            )
            names[:] = results
            return tuple(results.values())

        losses = [k for k, x in results_of(subject.call(**given)).items() if x.requires_grad]
        values = checkpoint(function, *tensors.values(), use_reentrant=reentrant)
        results = dict(zip(names, values, strict=True))
        if not reentrant:
            return compute(subject, given, results, upstream)
        # This kind supports backward() alone, and gives gradients to all results.
        results = {k: x if k in losses else x.detach() for k, x in results.items()}
        weighted(results, names_of(subject, results, upstream), upstream).backward()
        return finished(subject, given, results, {k: x.grad for k, x in leaves_of(given).items()})

    return run


def saved_elsewhere(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """Saved tensors become copies."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        results = results_of(subject.call(**given))
    return compute(subject, given, results, upstream)


def changed_before_backward(name: str) -> Callable[..., Comparison]:
    """The caller overwrites an argument between the forward and the backward pass."""

    def run(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
        results = results_of(subject.call(**given))
        total = weighted(results, names_of(subject, results, upstream), upstream)
        # Some results are views of arguments.
        results = {k: x + 0 for k, x in results.items()}
        x = given[name]
        with torch.no_grad():
            for tensor in x.parameters() if isinstance(x, nn.Module) else [x]:
                tensor.copy_(torch.zeros_like(tensor))
        return finished(subject, given, results, gradients(total, leaves_of(given), 1))

    return run


def in_thread(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    results = results_of(subject.call(**given))
    found: list[Comparison | Exception] = []

    def backward() -> None:
        try:
            found.append(compute(subject, given, results, upstream))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


RUNS = {
    "retain_graph": retained,
    "graph used twice": repeated,
    "strided": strided_upstream,
    "summed in .grad": accumulated,
    "leaf hooks": hooked,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "saved tensors moved": saved_elsewhere,
    "another thread": in_thread,
}
UPSTREAMS = {
    "plain sum": Upstream(weights=None),
    "zeros": Upstream(weights=torch.zeros_like),
    "second derivative": Upstream(order=2),
}


def cells(subjects: list[Subject]) -> Iterator[Cell]:
    for subject in subjects:
        if not has_gradients(subject):
            continue
        leaves = leaves_of(Cell(subject, "", "", "").arguments("cpu"))
        for name in leaves:
            row = f"{subject.name}: {name}"
            yield Cell(subject, "gradients", row, "alone", only(name))
        yield Cell(subject, "gradients", subject.name, "none", only(""))
        for column, run in RUNS.items():
            if subject.overwrites and column == "summed in .grad":
                continue
            words = _TWICE if column == "graph used twice" else ()
            words += _CHANGED if subject.overwrites else ()
            yield Cell(subject, "gradients", subject.name, column, run=run, words=words)
        for column, upstream in UPSTREAMS.items():
            words = (*_TWICE, *_CHANGED) if subject.overwrites else _TWICE
            yield Cell(subject, "gradients", subject.name, column, upstream=upstream, words=words)
        yield from _changed(subject)
        if subject.reduces:
            for kind in ("mean", "sum"):
                change = replacing(reduction=kind)
                yield Cell(subject, "gradients", subject.name, f"reduction={kind}", change)
        if subject.is_module:
            for names in (
                ("simple_loss",),
                ("pruned_loss",),
                ("loss", "simple_loss", "pruned_loss"),
            ):
                column = "of " + ", ".join(names)
                yield Cell(
                    subject, "gradients", subject.name, column, upstream=Upstream(names=names)
                )


def has_gradients(subject: Subject) -> bool:
    return subject.is_differentiable and bool(subject.floats)


def _changed(subject: Subject) -> Iterator[Cell]:
    for name in (*subject.floats, *subject.integers):

        def in_int32(given: Arguments, name: str = name) -> Arguments:
            # As the kernels take them, so that no copy protects them.
            x = given[name]
            is_integer = isinstance(x, Tensor) and not x.is_floating_point()
            return {**given, name: x.to(torch.int32)} if is_integer else given

        yield Cell(
            subject,
            "gradients",
            f"{subject.name}: {name}",
            "overwritten",
            in_int32,
            run=changed_before_backward(name),
            words=_CHANGED,
        )
