"""Whether a call's result equals its float64 reference, and whether an error is a refusal."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.cells.subject import Arguments, Results, Subject, floats_of, leaves_of

# Errors of torch's dispatcher and of Python that do not tell a caller what to change.
_RAW = re.compile(
    r"mat1 and mat2|not implemented for|Could not run|expected scalar type|expected m1 and m2"
    r"|INTERNAL ASSERT|has no attribute|unsupported operand|Expected all tensors to be on the same"
    r"|object is not|'NoneType'|positional argument|unexpected keyword|out of bounds"
    r"|invalid literal"
    r"|Expected a value of type|must match the size|Dimension out of range"
    r"|Cannot access data pointer|schema|dispatch"
    r"|torch\.stack|expected Tensor|only tensors|Subtraction, the|not supported between"
    r"|can't be converted|result type|setup_context|data_ptr|No such operator|unhashable"
    r"|cannot be interpreted as an integer|must be real number|CUDA error"
    r"|compile error"
)
_KINDS = (ValueError, TypeError, RuntimeError, NotImplementedError)
# Elements of float32 and float64 may differ by this many roundings, of 16 bits by those below.
_ROUNDINGS, _ROUNDINGS_16 = 256, 6
# Elements of all results and gradients are sums of some of about this size.
_LEAST_SCALE = 0.25


class Comparison(NamedTuple):
    """A call's arguments, its results by name, which of them require gradients, and the gradients
    of its leaves."""

    given: Arguments
    results: Results
    losses: list[str]
    grads: dict[str, Tensor | None]


def wrong_refusal(error: BaseException, words: tuple[str, ...]) -> str | None:
    """Why an error is no refusal that names one of the words; None if it is one."""
    text = str(error)
    found = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    if not isinstance(error, _KINDS) or isinstance(error, RecursionError):
        return found
    if _RAW.search(text) and not isinstance(error, ValueError):
        return found
    if any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for word in words):
        return None
    return f"{found} (names none of {', '.join(words)})"


def widened(given: Arguments) -> Arguments:
    """The same values in float64 on the CPU, with gradients."""

    def wide(x: Any) -> Any:
        if isinstance(x, nn.Module):
            return x.to("cpu", torch.float64).requires_grad_(True)
        if not isinstance(x, Tensor):
            return x
        x = x.detach().cpu()
        if x.is_floating_point():
            return x.to(torch.float64).clone().requires_grad_()
        return x.long() if not x.is_complex() else x

    return {name: wide(x) for name, x in given.items()}


def precision(subject: Subject, got: Comparison) -> torch.dtype:
    """In which the results are exact: that of products with 16 bits, or of the sums."""
    dtypes = [x.dtype for x in floats_of(got.given).values()]
    results = [x.dtype for x in got.results.values() if x.is_floating_point()]
    if not dtypes or not results:
        return torch.float64
    result = results[0]
    if subject.is_module:
        return functools.reduce(wider, dtypes)
    widest = functools.reduce(torch.promote_types, dtypes)
    return wider(result, widest if subject.has_products else torch.float64)


def tolerance(dtype: torch.dtype) -> float:
    """Relative to the largest element."""
    eps = torch.finfo(dtype).eps
    return eps * (_ROUNDINGS_16 if eps > 1e-5 else _ROUNDINGS)


def spread(loss: Tensor) -> Tensor:
    """Incoming gradients, none of them 1."""
    return torch.linspace(-0.75, 1.5, loss.numel(), dtype=torch.float64).view(loss.shape)


class Upstream(NamedTuple):
    """What is differentiated: the weighted sum of results.

    names: of the results; None: of a module the first loss, else all that require gradients.
    weights: of the elements of a result; None: the plain sum, whose gradient has stride 0.
    order: 2 differentiates a sum of the gradients again.
    """

    names: tuple[str, ...] | None = None
    weights: Callable[[Tensor], Tensor] | None = spread
    order: int = 1


def weighted(results: Results, names: list[str], upstream: Upstream) -> Tensor:
    terms = []
    for name in names:
        x = results[name] if upstream.order == 1 else results[name].square()
        if upstream.weights is not None:
            x = x * upstream.weights(x).to(x) * (1 + 0.1 * len(name))
        terms.append(x.sum())
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def difference(name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> str | None:
    if got.shape != want.shape:
        return f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.detach().cpu(), want.detach().cpu()
    if not want.is_floating_point():
        return None if torch.equal(got.long(), want.long()) else f"{name} differs"
    got = got.double()
    is_odd = ~want.isfinite()
    if not torch.equal(got[is_odd].nan_to_num(0.5), want[is_odd].nan_to_num(0.5)):
        return f"{name} is {got[is_odd].tolist()[:3]}, not {want[is_odd].tolist()[:3]}"
    apart = (got - want)[~is_odd].abs()
    if apart.numel() == 0:
        return None
    scale = max(want[~is_odd].abs().max().item(), _LEAST_SCALE)
    most = apart.max().item()
    if most <= tolerance(dtype) * scale:
        return None
    return f"{name} is off by {most / scale:.1e} of its largest element"


def wider(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype of larger roundings."""
    return max(a, b, key=lambda x: torch.finfo(x).eps)


def compared(subject: Subject, got: Comparison, want: Comparison, dtype: torch.dtype) -> str | None:
    """The first difference between a call and its reference."""
    other = set(got.losses) - set(want.losses)
    if other or not got.results.keys() & want.results.keys():
        return f"{sorted(other)} require gradients, or nothing can be compared"
    for name in got.results.keys() & want.results.keys():
        found = difference(name, got.results[name], want.results[name], dtype)
        if found:
            return found
    for name, grad in got.grads.items():
        wanted = want.grads[name]
        if grad is None:
            if wanted is not None and wanted.abs().max() > 0:
                return f"the gradient of {name} is missing"
            continue
        leaf = leaves_of(got.given)[name]
        if grad.dtype != leaf.dtype or grad.device != leaf.device:
            return f"the gradient of {name} is {grad.dtype} on {grad.device}"
        if wanted is None:
            wanted = torch.zeros_like(grad, dtype=torch.float64, device="cpu")
        found = difference(f"the gradient of {name}", grad, wanted, wider(dtype, grad.dtype))
        if found:
            return found
    return None


def names_of(subject: Subject, results: Results, upstream: Upstream) -> list[str]:
    losses = [name for name, x in results.items() if x.requires_grad]
    return list(upstream.names or (losses[:1] if subject.is_module else losses))


def compute(subject: Subject, given: Arguments, results: Results, upstream: Upstream) -> Comparison:
    """The gradients of the weighted losses for the leaves among the arguments."""
    losses = [name for name, x in results.items() if x.requires_grad]
    leaves = leaves_of(given)
    grads: dict[str, Tensor | None] = dict.fromkeys(leaves)
    if losses and leaves:
        total = weighted(results, names_of(subject, results, upstream), upstream)
        grads = gradients(total, leaves, upstream.order)
    return Comparison(given, {k: x.detach() for k, x in results.items()}, losses, grads)


def gradients(total: Tensor, leaves: dict[str, Tensor], order: int) -> dict[str, Tensor | None]:
    inputs = list(leaves.values())
    found = torch.autograd.grad(total, inputs, allow_unused=True, create_graph=order == 2)
    if order == 2:
        terms = [(x * spread(x).to(x)).sum() for x in found if x is not None]
        found = torch.autograd.grad(torch.stack(terms).sum(), inputs, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


_REFERENCES: dict[str, Comparison] = {}


def expected(subject: Subject, wide: Arguments, upstream: Upstream) -> Comparison:
    """The reference of float64 arguments; computed once for equal arguments."""
    key = "" if subject.is_module else _key(subject, wide, upstream)
    if key not in _REFERENCES:
        results = subject.reference(wide)
        _REFERENCES[key] = compute(subject, wide, results, upstream)
    return _REFERENCES.pop("") if not key else _REFERENCES[key]


def _key(subject: Subject, wide: Arguments, upstream: Upstream) -> str:
    text = hashlib.sha1(f"{subject.name} {upstream}".encode())
    for name, x in sorted(wide.items()):
        value = x.detach().numpy().tobytes() if isinstance(x, Tensor) else repr(x).encode()
        text.update(f"{name} {getattr(x, 'shape', '')}".encode() + value)
    return text.hexdigest()
