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
# d loss / d logits, and d loss / d log-probabilities of both.
BATCH_GRADIENT = [
    [
        [
            [-0.186844, -0.062555, 0.249399],
            [-0.203377, 0.202399, 0.000977],
            [-0.141016, 0.079123, 0.061893],
        ],
        [
            [-0.011552, -0.08128, 0.092832],
            [-0.154257, 0.229433, -0.075176],
            [-0.246593, 0.146405, 0.100188],
        ],
        [
            [-0.012918, -0.061593, 0.074512],
            [-0.055986, 0.219831, -0.163845],
            [-0.497627, 0.20924, 0.288387],
        ],
        [
            [0.013605, -0.03022, 0.016615],
            [0.113925, 0.062781, -0.176706],
            [-0.667078, 0.367659, 0.299419],
        ],
    ],
    [
        [
            [-0.356344, -0.055347, 0.411691],
            [-0.096922, 0.029459, 0.067463],
            [-0.063518, 0.027654, 0.035863],
        ],
        [
            [-0.154499, -0.073942, 0.228441],
            [-0.16679, -8.8e-05, 0.166878],
            [-0.17237, 0.105565, 0.066804],
        ],
        [
            [0.023875, -0.118256, 0.094381],
            [-0.104707, -0.108934, 0.213642],
            [-0.369844, 0.180118, 0.189726],
        ],
        [
            [0.025714, -0.079462, 0.053748],
            [0.122328, -0.238789, 0.11646],
            [-0.598687, 0.302203, 0.296484],
        ],
    ],
]
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
    expected = torch.tensor(BATCH_GRADIENT, dtype=torch.float64)
    torch.testing.assert_close(grad.cpu(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("logits", "targets", "losses", "gradient"),
    [
        ([SMALL], [[1, 2]], [4.495666773770733], [SMALL_LOG_PROBS_GRADIENT]),
        (BATCH, [[1, 2], [1, 1]], BATCH_LOSSES, BATCH_LOG_PROBS_GRADIENT),
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
