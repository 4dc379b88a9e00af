"""compat.torchaudio: values known from torchaudio's tests, defaults, and the path oracle."""

import importlib
import inspect
import io
import sys
from typing import Any

import pytest
import torch

from pruned_rnnt.compat import torchaudio
from tests.compat.batches import BLANK, FRAMES, SYMBOLS, assert_same_gradients, batch, oracle_losses

ONE = torch.tensor(
    [
        [
            [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]],
            [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1, 0.1], [0.7, 0.1, 0.2, 0.1, 0.1]],
        ]
    ]
)


def test_signature_is_torchaudios() -> None:
    parameters = inspect.signature(torchaudio.functional.rnnt_loss).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "logits": inspect.Parameter.empty,
        "targets": inspect.Parameter.empty,
        "logit_lengths": inspect.Parameter.empty,
        "target_lengths": inspect.Parameter.empty,
        "blank": -1,
        "clamp": -1,
        "reduction": "mean",
        "fused_log_softmax": True,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("blank", "expected"), [(-1, 5.09566688538), (4, 5.09566688538), (0, 4.495666773770733)]
)
def test_known_values(dtype: torch.dtype, blank: int, expected: float) -> None:
    targets = torch.tensor([[1, 2]], dtype=torch.int32)
    lengths = torch.tensor([2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    loss = torchaudio.functional.rnnt_loss(ONE.to(dtype), targets, *lengths, blank)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    as_log_probs = torchaudio.functional.rnnt_loss(
        ONE.to(dtype).log_softmax(-1), targets, *lengths, blank, fused_log_softmax=False
    )
    assert as_log_probs.item() == pytest.approx(expected, rel=1e-6)


def test_values_and_gradients_against_all_paths() -> None:
    example = batch()
    got = torchaudio.functional.rnnt_loss(
        example.logits, example.targets, FRAMES, SYMBOLS, blank=BLANK, reduction="none"
    )
    assert_same_gradients(got, oracle_losses(example.logits, example.targets), [example.logits])


def test_log_probs_get_no_softmax_gradient() -> None:
    example = batch()
    log_probs = example.logits.detach().log_softmax(-1).requires_grad_()
    loss = torchaudio.functional.rnnt_loss(
        log_probs, example.targets, FRAMES, SYMBOLS, BLANK, reduction="sum", fused_log_softmax=False
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    # Every path of an utterance has T_n blanks and U_n symbols.
    torch.testing.assert_close(
        -gradient.sum((1, 2, 3)), (FRAMES + SYMBOLS).double(), rtol=1e-9, atol=1e-9
    )
    assert (gradient <= 0).all()


def test_reductions_and_module() -> None:
    example = batch()
    arguments = (example.logits, example.targets, FRAMES, SYMBOLS)
    losses = torchaudio.transforms.RNNTLoss(blank=BLANK, reduction="none")(*arguments)
    assert losses.shape == (4,)
    mean = torchaudio.transforms.RNNTLoss(blank=BLANK)(*arguments)
    total = torchaudio.transforms.RNNTLoss(blank=BLANK, reduction="sum")(*arguments)
    torch.testing.assert_close(mean, losses.mean())
    torch.testing.assert_close(total, losses.sum())


def test_clamp_acts_before_the_upstream_gradient() -> None:
    example = batch()

    def gradient(clamp: float) -> torch.Tensor:
        loss = torchaudio.functional.rnnt_loss(
            example.logits, example.targets, FRAMES, SYMBOLS, BLANK, clamp, "sum"
        )
        return torch.autograd.grad(3 * loss, example.logits)[0]

    free = gradient(-1)
    assert free.abs().max() > 0.3
    torch.testing.assert_close(gradient(0.1), free.clamp(-0.3, 0.3))


def test_unknown_reduction() -> None:
    example = batch()
    with pytest.raises(ValueError, match="reduction is 'max'; it must be 'none', 'mean' or 'sum'"):
        torchaudio.functional.rnnt_loss(
            example.logits, example.targets, FRAMES, SYMBOLS, BLANK, reduction="max"
        )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_costs_have_the_dtype_of_logits(dtype: torch.dtype, reduction: str) -> None:
    example = batch()
    logits = example.logits.detach().to(dtype).requires_grad_()
    arguments = (example.targets, FRAMES, SYMBOLS, BLANK)
    costs = torchaudio.functional.rnnt_loss(logits, *arguments, reduction=reduction)
    assert costs.dtype == dtype
    exact = torchaudio.functional.rnnt_loss(logits.double(), *arguments, reduction=reduction)
    torch.testing.assert_close(costs.double(), exact, rtol=1e-2, atol=1e-3)
    got, expected = (torch.autograd.grad(x.sum(), logits)[0] for x in (costs, exact))
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)


def test_bfloat16_costs_are_float32() -> None:
    example = batch()
    logits = example.logits.detach().bfloat16()
    costs = torchaudio.functional.rnnt_loss(logits, example.targets, FRAMES, SYMBOLS, BLANK)
    assert costs.dtype == torch.float32


def test_modules_are_imported_as_torchaudios() -> None:
    functional = importlib.import_module("pruned_rnnt.compat.torchaudio.functional")
    transforms = importlib.import_module("pruned_rnnt.compat.torchaudio.transforms")
    assert torchaudio.functional.rnnt_loss is functional.rnnt_loss
    assert torchaudio.transforms.RNNTLoss is transforms.RNNTLoss


@pytest.mark.usefixtures("fresh_imports")
def test_other_names_are_the_installed_torchaudios(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "torchaudio"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '9'\ndef load(path): return path\n")
    (folder / "functional.py").write_text("def rnnt_loss(): pass\ndef resample(x): return x\n")
    (folder / "transforms.py").write_text("class Resample: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("torchaudio", "torchaudio.functional", "torchaudio.transforms"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert torchaudio.load("a.wav") == "a.wav"
    assert torchaudio.__version__ == "9"
    assert torchaudio.functional.resample(3) == 3
    assert torchaudio.transforms.Resample.__module__ == "torchaudio.transforms"
    assert torchaudio.functional.rnnt_loss.__module__.startswith("pruned_rnnt.")


@pytest.mark.usefixtures("fresh_imports")
def test_a_torchaudio_for_another_torch_does_not_break_the_loss(tmp_path, monkeypatch) -> None:
    """With a torch without CUDA its public wheel raises OSError, not ImportError."""
    (tmp_path / "torchaudio.py").write_text("raise OSError('libc10_cuda.so')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    with pytest.raises(AttributeError, match=r"'load' of its own.* imported: libc10_cuda\.so"):
        _ = torchaudio.load
    assert torchaudio.functional.rnnt_loss is not None
    assert not hasattr(torchaudio.functional, "nothing")


def loss_of(
    logits: torch.Tensor, targets: torch.Tensor, frames: torch.Tensor, symbols: torch.Tensor
) -> torch.Tensor:
    return torchaudio.functional.rnnt_loss(logits, targets, frames, symbols, blank=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_runs_it_but_cannot_save_it() -> None:
    targets, lengths = torch.tensor([[1, 2]]), torch.tensor([2])
    for scripted in (
        torch.jit.script(torchaudio.transforms.RNNTLoss(blank=0)), torch.jit.script(loss_of)
    ):  # fmt: skip
        logits = ONE.clone().requires_grad_()
        loss = scripted(logits, targets, lengths, lengths)
        assert loss.item() == pytest.approx(4.495666773770733, rel=1e-6)
        loss.backward()
        assert logits.grad.abs().sum() > 0
        with pytest.raises(RuntimeError, match="Could not export Python function call"):
            torch.jit.save(scripted, io.BytesIO())


def test_uniform_log_probs_without_softmax() -> None:
    """Ten frames, two symbols: C(11, 2) paths of twelve arcs, 0.1 each."""
    log_probs = torch.full((2, 10, 3, 4), 0.1, dtype=torch.float64)
    targets, frames = torch.tensor([[1, 2], [1, 2]]), torch.tensor([10, 10])
    costs = torchaudio.functional.rnnt_loss(
        log_probs, targets, frames, torch.tensor([2, 2]), 0, reduction="none",
        fused_log_softmax=False,
    )  # fmt: skip
    expected = -torch.tensor([55.0, 55.0], dtype=torch.float64).log() - 1.2
    torch.testing.assert_close(costs, expected)


def test_what_is_neither_true_nor_false() -> None:
    data = batch()
    given = (data.logits, data.targets, FRAMES, SYMBOLS)
    with pytest.raises(TypeError, match="fused_log_softmax is 'no', needs True or False"):
        torchaudio.functional.rnnt_loss(*given, fused_log_softmax="no")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": [1.0]}, TypeError, "logits is a list; it must be a torch.Tensor"),
        ({"logits": torch.tensor(1.0)}, ValueError, r"logits has shape \(\)"),
        ({"blank": None}, TypeError, "blank is None; it must be an integer"),
        ({"blank": True}, TypeError, "blank is True; it must be an integer"),
        ({"blank": -99}, ValueError, "blank is -99; it must be in 0"),
        ({"clamp": None}, TypeError, "clamp is None; it must be a number"),
    ],
)
def test_wrong_arguments_are_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    data = batch()
    given = {
        "logits": data.logits,
        "targets": data.targets,
        "logit_lengths": FRAMES,
        "target_lengths": SYMBOLS,
    }
    with pytest.raises(error, match=message):
        torchaudio.functional.rnnt_loss(**given | changes)
