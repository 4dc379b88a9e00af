"""The check of the losses: right on this machine, and every wrong kernel is found and named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pruned_rnnt.ops.common.library import FALLBACKS
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.selfcheck import losses
from pruned_rnnt.selfcheck.loss_problems import LossProblem, loss_problems
from pruned_rnnt.selfcheck.losses import PlainOps, check_losses, difference
from tests.selfcheck.fakes import Perturbed, Raising, cpu

# Searches have ops of their own, which no loss calls.
NATIVE = [x for x in FALLBACKS if has_native_kernel(x, "cpu") and not x.endswith("_frames")]
needs_library = pytest.mark.skipif(not NATIVE, reason="the CPU library is not built")


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    problems = [x for x in loss_problems() if x.name in names]
    assert len(problems) == len(names)
    monkeypatch.setattr(losses, "loss_problems", lambda: problems)


@pytest.mark.slow
def test_all_losses_are_right_on_this_machine() -> None:
    findings = list(check_losses(cpu()))
    assert len(findings) > 50
    for finding in findings:
        assert not finding.failure
        assert finding.error is not None


@needs_library
@pytest.mark.parametrize("op", ["log_probs", "band_lattice", "log_probs_backward"])
def test_a_wrong_kernel_is_named(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "full")
    with Perturbed(op) as perturbed:
        findings = list(check_losses(cpu()))
    assert perturbed.calls
    for finding in findings:
        assert f"kernels of {op} differ" in finding.failure
        assert finding.plain_is_right
        assert finding.line().startswith("  WRONG  full")


@needs_library
def test_a_kernel_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "full")
    with Raising("band_lattice"):
        finding = next(iter(check_losses(cpu())))
    assert "kernel image is invalid: the kernels of band_lattice differ" in finding.failure
    assert finding.plain_is_right
    assert finding.error == float("inf")


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("op", NATIVE)
def test_every_wrong_kernel_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [dataclasses.replace(x, dtypes=(torch.float32,)) for x in loss_problems()]
    monkeypatch.setattr(losses, "loss_problems", lambda: problems)
    monkeypatch.setattr(losses, "_wanted", wanted)
    with Perturbed(op) as perturbed:
        findings = [x for x in check_losses(cpu()) if x.failure]
    assert perturbed.calls
    assert any(op in x.failure and x.plain_is_right for x in findings)


_KNOWN: dict[str, object] = {}


def wanted(problem: LossProblem, compute: object = losses._wanted) -> object:
    """The references, which take seconds, computed once."""
    if problem.name not in _KNOWN:
        _KNOWN[problem.name] = compute(problem)  # type: ignore[operator]
    return _KNOWN[problem.name]


def test_a_wrong_result_of_plain_torch_is_not_blamed_on_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch, "CTC")
    monkeypatch.setattr(losses, "_wanted", lambda problem: {"loss": torch.zeros(4)})
    finding = next(iter(check_losses(cpu())))
    assert "no single kernel differs from plain torch, which is wrong as well" in finding.failure
    assert not finding.plain_is_right


@needs_library
def test_plain_ops_run_no_kernel() -> None:
    logits = torch.randn(2, 5, 4, 6, requires_grad=True)
    targets = torch.ones(2, 3, dtype=torch.int64)
    with Raising("band_lattice"), PlainOps():
        import pruned_rnnt

        loss = pruned_rnnt.rnnt_loss(logits, targets)
        loss.backward()
    right = pruned_rnnt.rnnt_loss(logits, targets)
    torch.testing.assert_close(loss, right)


def test_difference() -> None:
    wanted = torch.tensor([1.0, -4.0, float("-inf"), -1e30])
    assert difference(wanted.clone(), wanted) == 0
    assert difference(wanted * torch.tensor([1.0, 1.5, 1.0, 1.0]), wanted) == 0.5
    assert difference(wanted.nan_to_num(0.0), wanted) == float("inf")
    nan = torch.tensor([1.0, float("nan"), float("-inf"), -1e30])
    assert difference(nan, wanted) == float("inf")
    assert difference(wanted[:2], wanted) == float("inf")
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5
    assert difference(torch.zeros(2), torch.zeros(2)) == 0
    assert difference(torch.zeros(0), torch.zeros(0)) == 0
