"""compat.torchaudio: values known from torchaudio's tests, defaults, and the path oracle."""

import inspect

import pytest
import torch
from batches import BLANK, FRAMES, SYMBOLS, assert_same_gradients, batch, oracle_losses

from pruned_rnnt.compat import torchaudio

ONE = torch.tensor(
    [
        [
            [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]],
            [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1, 0.1], [0.7, 0.1, 0.2, 0.1, 0.1]],
        ]
    ]
)


def test_signature_is_torchaudios() -> None:
    parameters = inspect.signature(torchaudio.rnnt_loss).parameters
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
    loss = torchaudio.rnnt_loss(ONE.to(dtype), targets, *lengths, blank)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    as_log_probs = torchaudio.rnnt_loss(
        ONE.to(dtype).log_softmax(-1), targets, *lengths, blank, fused_log_softmax=False
    )
    assert as_log_probs.item() == pytest.approx(expected, rel=1e-6)


def test_values_and_gradients_against_all_paths() -> None:
    example = batch()
    got = torchaudio.rnnt_loss(
        example.logits, example.targets, FRAMES, SYMBOLS, blank=BLANK, reduction="none"
    )
    assert_same_gradients(got, oracle_losses(example.logits, example.targets), [example.logits])


def test_log_probs_get_no_softmax_gradient() -> None:
    example = batch()
    log_probs = example.logits.detach().log_softmax(-1).requires_grad_()
    loss = torchaudio.rnnt_loss(
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
    losses = torchaudio.RNNTLoss(blank=BLANK, reduction="none")(*arguments)
    assert losses.shape == (4,)
    mean = torchaudio.RNNTLoss(blank=BLANK)(*arguments)
    total = torchaudio.RNNTLoss(blank=BLANK, reduction="sum")(*arguments)
    torch.testing.assert_close(mean, losses.mean())
    torch.testing.assert_close(total, losses.sum())


def test_clamp_acts_before_the_upstream_gradient() -> None:
    example = batch()

    def gradient(clamp: float) -> torch.Tensor:
        loss = torchaudio.rnnt_loss(
            example.logits, example.targets, FRAMES, SYMBOLS, BLANK, clamp, "sum"
        )
        return torch.autograd.grad(3 * loss, example.logits)[0]

    free = gradient(-1)
    assert free.abs().max() > 0.3
    torch.testing.assert_close(gradient(0.1), free.clamp(-0.3, 0.3))


def test_unknown_reduction() -> None:
    example = batch()
    with pytest.raises(ValueError, match="reduction is 'max'; it must be 'none', 'mean' or 'sum'"):
        torchaudio.rnnt_loss(
            example.logits, example.targets, FRAMES, SYMBOLS, BLANK, reduction="max"
        )
