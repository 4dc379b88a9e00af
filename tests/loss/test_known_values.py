"""Losses and gradients published with the test suites of warp-transducer and torchaudio, which
computed some of them in float32."""

import pytest
import torch

import pruned_rnnt
from tests.loss.loss_cases import DEVICES
from tests.loss.published_numbers import (
    BATCH_GRADIENT,
    BATCH_LOGITS,
    BATCH_LOSSES,
    BATCH_TARGETS,
    SMALL_LOGITS,
    SMALL_TARGETS,
)

SMALL_GRADIENT_OF_LAST_BLANK = [
    [
        [0.17703132, -0.39992708, 0.17703132, 0.17703132, -0.13116692],
        [0.12247062, 0.12247062, -0.181684, 0.12247062, -0.1857276],
        [0.06269141, 0.06269141, 0.06928471, 0.12624498, -0.32091248],
    ],
    [
        [0.05456069, -0.2182428, 0.05456069, 0.05456069, 0.05456069],
        [0.12073967, 0.12073967, -0.48295838, 0.12073967, 0.12073967],
        [0.30741188, 0.16871123, 0.18645471, 0.16871123, -0.83128875],
    ],
]
# d loss / d log-probabilities.
BATCH_LOG_PROBS_GRADIENT = [
    [
        [
            [-0.4322264564338117, -0.5677735435661883, 0.0],
            [-0.36565009313836844, 0.0, -0.20212345042782007],
            [-0.20212345042782007, 0.0, 0.0],
        ],
        [
            [-0.16521672442463506, -0.2670097320091765, 0.0],
            [-0.3943653886107811, 0.0, -0.2382944365367636],
            [-0.44041788696458367, 0.0, 0.0],
        ],
        [
            [-0.052129794015740985, -0.11308693040889405, 0.0],
            [-0.18313786985332664, 0.0, -0.3243144491663483],
            [-0.7647323361309323, 0.0, 0.0],
        ],
        [[0.0, -0.052129794015740985, 0.0], [0.0, 0.0, -0.23526766386906767], [-1.0, 0.0, 0.0]],
    ],
    [
        [
            [-0.7161424128232795, -0.2838575871767207, 0.0],
            [-0.18382932237365335, -0.10002826480306751, 0.0],
            [-0.10002826480306751, 0.0, 0.0],
        ],
        [
            [-0.41121794618117213, -0.3049244666421072, 0.0],
            [-0.3295759402552584, -0.15917784876050195, 0.0],
            [-0.2592061135635692, 0.0, 0.0],
        ],
        [
            [-0.11607642141651396, -0.29514152476465827, 0.0],
            [-0.2865333615432337, -0.3381841034766833, 0.0],
            [-0.5973902170402529, 0.0, 0.0],
        ],
        [[0.0, -0.11607642141651396, 0.0], [0.0, -0.4026097829597475, 0.0], [-1.0, 0.0, 0.0]],
    ],
]
SMALL_LOG_PROBS_GRADIENT = [
    [
        [-0.308198071906, -0.6918019280939998, 0.0, 0.0, 0.0],
        [-0.308198071906, 0.0, -0.3836038561880001, 0.0, 0.0],
        [-0.3836038561880001, 0.0, 0.0, 0.0, 0.0],
    ],
    [
        [0.0, -0.308198071906, 0.0, 0.0, 0.0],
        [0.0, 0.0, -0.6163961438119995, 0.0, 0.0],
        [-0.9999999999999991, 0.0, 0.0, 0.0, 0.0],
    ],
]


def tensor(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device, requires_grad=True)


@pytest.mark.parametrize("device", DEVICES)
def test_blank_first(device) -> None:
    logits = tensor([SMALL_LOGITS], device)
    loss = pruned_rnnt.rnnt_loss(logits, torch.tensor([SMALL_TARGETS], device=device))
    assert loss.item() == pytest.approx(4.495666773770733, abs=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_one_frame(device) -> None:
    logits = tensor([SMALL_LOGITS[:1]], device)
    loss = pruned_rnnt.rnnt_loss(logits, torch.tensor([SMALL_TARGETS], device=device))
    assert loss.item() == pytest.approx(4.274244594423859, abs=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_target(device) -> None:
    logits = tensor([[SMALL_LOGITS[0][:1]]], device)
    loss = pruned_rnnt.rnnt_loss(logits, torch.empty(1, 0, dtype=torch.int32, device=device))
    assert loss.item() == pytest.approx(1.7314291957733714, abs=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_blank_last(device) -> None:
    logits = tensor([SMALL_LOGITS], device)
    loss = pruned_rnnt.rnnt_loss(logits, torch.tensor([SMALL_TARGETS], device=device), blank=4)
    assert loss.item() == pytest.approx(5.09566688538, abs=2e-7)
    (grad,) = torch.autograd.grad(loss, logits)
    expected = torch.tensor([SMALL_GRADIENT_OF_LAST_BLANK], dtype=torch.float64)
    torch.testing.assert_close(grad.cpu(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_batch(device) -> None:
    logits = tensor(BATCH_LOGITS, device)
    targets = torch.tensor(BATCH_TARGETS, device=device)
    loss = pruned_rnnt.rnnt_loss(logits, targets, reduction="none")
    assert loss.tolist() == pytest.approx(BATCH_LOSSES, abs=1e-12)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    expected = torch.tensor(BATCH_GRADIENT, dtype=torch.float64)
    torch.testing.assert_close(grad.cpu(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("logits", "targets", "losses", "gradient"),
    [
        ([SMALL_LOGITS], [SMALL_TARGETS], [4.495666773770733], [SMALL_LOG_PROBS_GRADIENT]),
        (BATCH_LOGITS, BATCH_TARGETS, BATCH_LOSSES, BATCH_LOG_PROBS_GRADIENT),
    ],
)
def test_gradients_of_log_probs(logits, targets, losses, gradient, device) -> None:
    log_probs = tensor(logits, device).log_softmax(-1).detach().requires_grad_()
    loss = pruned_rnnt.rnnt_loss(
        log_probs, torch.tensor(targets, device=device), from_log_probs=True, reduction="none"
    )
    assert loss.tolist() == pytest.approx(losses, abs=1e-12)
    (grad,) = torch.autograd.grad(loss.sum(), log_probs)
    expected = torch.tensor(gradient, dtype=torch.float64)
    torch.testing.assert_close(grad.cpu(), expected, rtol=0, atol=1e-12)
