"""The code that a Conformer uses on a GPU gives the same numbers, tested on the CPU."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pruned_rnnt.model import side_branch
from pruned_rnnt.model.attention import attention_bias, attention_mask
from pruned_rnnt.model.cast_parameters import CastParameters
from pruned_rnnt.model.chunks import Chunks
from pruned_rnnt.model.conformer import Conformer
from pruned_rnnt.model.linear import Linear
from tests.tiny_models import tiny_conformer

MODULES = ("attention", "cast_parameters", "conformer_stack", "subsampling")


def use_gpu_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        module = sys.modules[f"pruned_rnnt.model.{name}"]
        monkeypatch.setattr(module, "should_avoid_cudnn_replanning", lambda x: True)


def make_encoder(causal: bool) -> Conformer:
    torch.manual_seed(1)
    sizes = {"layers": 2, "dim": 24, "feedforward_dim": 40, "kernel_size": 5, "chunk_size": 3}
    return Conformer(tiny_conformer(num_mel_bins=16, dropout=0.0, causal=causal, **sizes))


def outputs_and_gradients(encoder: Conformer, dtype: torch.dtype | None) -> list[Tensor]:
    torch.manual_seed(2)
    features_NTF = torch.randn(3, 61, 16)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        out_NTE, lengths = encoder(features_NTF, torch.tensor([61, 40, 23]))
    real_NT1 = (torch.arange(out_NTE.size(1)) < lengths[:, None]).unsqueeze(-1)
    real_NTE = out_NTE * real_NT1
    encoder.zero_grad()
    (real_NTE * torch.randn_like(real_NTE)).sum().backward()
    gradients = [parameter.grad for parameter in encoder.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [real_NTE, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(None, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.03)]
)
def test_gpu_code_gives_the_same_numbers(
    causal: bool, dtype: torch.dtype | None, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make_encoder(causal)
    expected = outputs_and_gradients(encoder, dtype)
    use_gpu_code(monkeypatch)
    for ours, theirs in zip(outputs_and_gradients(encoder, dtype), expected, strict=True):
        assert ours.dtype == theirs.dtype
        scale = float(theirs.detach().abs().max()) + 1e-3
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)


def test_parameters_are_restored_and_copies_have_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_gpu_code(monkeypatch)
    encoder = make_encoder(causal=False)
    twin = copy.deepcopy(encoder)
    names = [name for name, _ in encoder.named_parameters()]
    for parameter in twin.parameters():
        parameter.data.zero_()
    before = [id(parameter) for parameter in encoder.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_NTE, _ = encoder(torch.randn(1, 31, 16), torch.tensor([31]))
        silent_NTE, _ = twin(torch.randn(1, 31, 16), torch.tensor([31]))
        with pytest.raises(RuntimeError, match="expected input with shape"):
            encoder.layers[0](torch.randn(1, 5, 7), *[torch.zeros(1)] * 2, (out_NTE, out_NTE))
    assert float(out_NTE.detach().abs().max()) > 0
    assert float(silent_NTE.detach().abs().max()) == 0
    assert [id(parameter) for parameter in encoder.parameters()] == before
    assert [name for name, _ in encoder.named_parameters()] == names


def test_threads_that_share_a_layer_leave_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread comes while the first one has the casts in place."""
    use_gpu_code(monkeypatch)
    layer = Linear(4, 4)
    before = dict(layer.named_parameters())
    casts = CastParameters([layer])
    inside, end, entered = (threading.Event() for _ in range(3))

    def first() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), casts.cast(torch.ones(1)):
            inside.set()
            end.wait(10)

    def second() -> None:
        with torch.autocast("cpu", dtype=torch.float16), casts.cast(torch.ones(1)):
            entered.set()

    threads = [threading.Thread(target=each) for each in (first, second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    is_early = entered.wait(0.2)
    end.set()
    for thread in threads:
        thread.join(10)
    assert not is_early
    assert entered.is_set()
    assert all(layer._parameters[name] is value for name, value in before.items())


def test_parametrized_weights_are_left_to_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = make_encoder(causal=False)
    attention = encoder.get_submodule("layers.0.attention")
    torch.nn.utils.parametrizations.weight_norm(attention.get_submodule("in_proj"))
    expected = outputs_and_gradients(encoder, torch.bfloat16)
    use_gpu_code(monkeypatch)
    for ours, theirs in zip(outputs_and_gradients(encoder, torch.bfloat16), expected, strict=True):
        scale = float(theirs.detach().abs().max()) + 1e-3
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05 * scale)


def test_frozen_and_unused_parameters_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu_code(monkeypatch)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    used, frozen, unused = layers
    frozen.requires_grad_(False)
    parameters = CastParameters(layers)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), parameters.cast(x):
        assert used.weight.dtype == unused.weight.dtype == torch.bfloat16
        assert used.weight.requires_grad
        assert not frozen.weight.requires_grad
        frozen(used(x)).sum().backward()
    assert used.weight.grad is not None
    assert used.weight.grad.dtype == torch.float32
    expected = torch.ones(2, 4).mm(frozen.weight).T.mm(x)
    torch.testing.assert_close(used.weight.grad, expected, rtol=0.02, atol=0.05)
    assert frozen.weight.grad is None
    assert unused.weight.grad is None


def test_only_gradients_of_casts_go_to_the_side_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is joined before they are cast; others may be used as soon as autograd has them."""
    use_gpu_code(monkeypatch)
    monkeypatch.setattr("pruned_rnnt.model.linear.train_with_kernels", lambda *tensors: True)
    events: list[str] = []

    class Branch:
        @contextmanager
        def fork(self, *read: Tensor) -> Iterator[None]:
            events.append("fork")
            yield
            events.append("main")

        def join(self) -> None:
            events.append("join")

    monkeypatch.setattr(side_branch, "_current", Branch)
    inner, outer = (torch.nn.ModuleList(Linear(4, 4) for _ in range(2)) for _ in range(2))
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), CastParameters(inner).cast(x):
        torch.nn.Sequential(*outer, *inner)(x).sum().backward()
    assert events == ["fork", "main", "fork", "main", "join"]
    events.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.nn.Sequential(*inner)(x).sum().backward()
    assert events == []


def test_attention_bias_equals_the_mask_with_aligned_rows() -> None:
    for chunks in (None, Chunks(2, None)):
        mask = attention_mask(torch.tensor([5, 3]), 5, chunks)
        bias = attention_bias(mask, torch.bfloat16)
        assert bias.shape == mask.shape
        assert bias.dtype == torch.bfloat16
        assert torch.equal(bias == 0, mask)
        assert torch.equal(bias == -torch.inf, ~mask)
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_matches_cpu(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    encoder = make_encoder(causal)
    expected = outputs_and_gradients(encoder, None)
    encoder.cuda()
    # Most of a convolution's bias gradient cancels in the sum over all frames.
    for dtype, tolerance in ((None, 1e-3), (torch.bfloat16, 0.25)):
        torch.manual_seed(2)
        features_NTF = torch.randn(3, 61, 16)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            out_NTE, lengths = encoder(features_NTF.cuda(), torch.tensor([61, 40, 23]))
        real_NT1 = (torch.arange(out_NTE.size(1)) < lengths[:, None]).unsqueeze(-1)
        real_NTE = out_NTE.float() * real_NT1.cuda()
        encoder.zero_grad()
        (real_NTE * torch.randn(real_NTE.shape).cuda()).sum().backward()
        ours = [real_NTE, *(parameter.grad for parameter in encoder.parameters())]
        for mine, theirs in zip(ours, expected, strict=True):
            assert mine is not None
            scale = float(theirs.detach().abs().max()) + 1e-3
            torch.testing.assert_close(
                mine.detach().cpu(), theirs.detach().cpu(), rtol=0, atol=tolerance * scale
            )
