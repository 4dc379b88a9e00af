"""Losses and gradients published with the test suites of warp-transducer and torchaudio, which
computed some of them in float32."""

import pytest
import torch
from loss_cases import DEVICES

import pruned_rnnt

# One utterance, T = 2, U = 2, V = 5.
SMALL = [
    [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]],
    [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1, 0.1], [0.7, 0.1, 0.2, 0.1, 0.1]],
]
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
# Two utterances, T = 4, U = 2, V = 3.
BATCH = [
    [
        [
            [0.06535690384862791, 0.7875301411923206, 0.08159176605666074],
            [0.5297155426466327, 0.7506749639230854, 0.7541348379087998],
            [0.6097641124736383, 0.8681404965673826, 0.6225318186056529],
        ],
        [
            [0.6685222872103057, 0.8580392805336061, 0.16453892311765583],
            [0.989779515236694, 0.944298460961015, 0.6031678586829663],
            [0.9467833543605416, 0.666202507295747, 0.28688179752461884],
        ],
        [
            [0.09418426230195986, 0.3666735970751962, 0.736168049462793],
            [0.1666804425271342, 0.7141542198635192, 0.3993997272216727],
            [0.5359823524146038, 0.29182076440286386, 0.6126422611507932],
        ],
        [
            [0.3242405528768486, 0.8007644367291621, 0.5241057606558068],
            [0.779194617063042, 0.18331417220174862, 0.113745182072432],
            [0.24022162381327106, 0.3394695622533106, 0.1341595066017014],
        ],
    ],
    [
        [
            [0.5055615569388828, 0.051597282072282646, 0.6402903936686337],
            [0.43073311517251, 0.8294731834714112, 0.1774668847323424],
            [0.3207001991262245, 0.04288308912457006, 0.30280282975568984],
        ],
        [
            [0.6751777088333762, 0.569537369330242, 0.5584738347504452],
            [0.08313242153985256, 0.06016544344162322, 0.10795752845152584],
            [0.7486153608562472, 0.943918041459349, 0.4863558118797222],
        ],
        [
            [0.4181986264486809, 0.6524078485043804, 0.024242983423721887],
            [0.13458171554507403, 0.3663418070512402, 0.2958297395361563],
            [0.9236695822497084, 0.6899291482654177, 0.7418981733448822],
        ],
        [
            [0.25000547599982104, 0.6034295486281007, 0.9872887878887768],
            [0.5926057265215715, 0.8846724004467684, 0.5434495396894328],
            [0.6607698886038497, 0.3771277082495921, 0.3580209022231813],
        ],
    ],
]
BATCH_LOSSES = [4.2806528590890736, 3.9384369822503591]
# d loss / d logits of the first utterance's first frame.
BATCH_GRADIENT_OF_FIRST_FRAME = [
    [-1.86843902e-01, -6.25548810e-02, 2.49398798e-01],
    [-2.03376666e-01, 2.02399328e-01, 9.77333169e-04],
    [-1.41016081e-01, 7.91234672e-02, 6.18926100e-02],
]


def tensor(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device, requires_grad=True)


@pytest.mark.parametrize("device", DEVICES)
def test_blank_first(device) -> None:
    logits = tensor([SMALL], device)
    loss = pruned_rnnt.rnnt_loss(logits, torch.tensor([[1, 2]], device=device))
    assert loss.item() == pytest.approx(4.495666773770733, abs=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_one_frame(device) -> None:
    logits = tensor([SMALL[:1]], device)
    loss = pruned_rnnt.rnnt_loss(logits, torch.tensor([[1, 2]], device=device))
    assert loss.item() == pytest.approx(4.274244594423859, abs=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_target(device) -> None:
    logits = tensor([[SMALL[0][:1]]], device)
    loss = pruned_rnnt.rnnt_loss(logits, torch.empty(1, 0, dtype=torch.int32, device=device))
    assert loss.item() == pytest.approx(1.7314291957733714, abs=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blank", [-1, 4])
def test_blank_last(blank, device) -> None:
    logits = tensor([SMALL], device)
    loss = pruned_rnnt.rnnt_loss(logits, torch.tensor([[1, 2]], device=device), blank=blank)
    assert loss.item() == pytest.approx(5.09566688538, abs=2e-7)
    (grad,) = torch.autograd.grad(loss, logits)
    expected = torch.tensor([SMALL_GRADIENT_OF_LAST_BLANK], dtype=torch.float64)
    torch.testing.assert_close(grad.cpu(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_batch(device) -> None:
    logits = tensor(BATCH, device)
    targets = torch.tensor([[1, 2], [1, 1]], device=device)
    loss = pruned_rnnt.rnnt_loss(logits, targets, reduction="none")
    assert loss.tolist() == pytest.approx(BATCH_LOSSES, abs=1e-12)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    expected = torch.tensor(BATCH_GRADIENT_OF_FIRST_FRAME, dtype=torch.float64)
    torch.testing.assert_close(grad[0, 0].cpu(), expected, rtol=0, atol=1e-6)
