"""compat.transformers_loss inside installed transformers (skipped without ParakeetForRNNT)."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pruned_rnnt import rnnt_loss
from pruned_rnnt.compat import transformers_loss
from tests.compat.transformers_models import BLANK, LABELS, batch, tiny_parakeet

transformers = pytest.importorskip("transformers", exc_type=ImportError)
try:
    from transformers import ParakeetForRNNT, ParakeetForTDT, ParakeetRNNTConfig, ParakeetTDTConfig
    from transformers.loss import loss_utils
except ImportError:
    pytest.skip("needs a transformers that has ParakeetForRNNT", allow_module_level=True)

LABEL_LENGTHS = torch.tensor([3, 1])


@pytest.fixture(autouse=True)
def restored_losses() -> Iterator[None]:
    kept = dict(loss_utils.LOSS_MAPPING)
    yield
    loss_utils.LOSS_MAPPING.update(kept)


def expected_loss(logits: torch.Tensor) -> torch.Tensor:
    frames = torch.tensor([10, 8])  # 80 and 60 frames, subsampled by 8
    each = rnnt_loss(logits, LABELS, frames, LABEL_LENGTHS, blank=BLANK, reduction="none")
    return each.sum() / LABEL_LENGTHS.sum()


def test_a_model_trains_with_the_registered_loss() -> None:
    model = tiny_parakeet(ParakeetForRNNT, ParakeetRNNTConfig)
    transformers_loss.register()
    output = model(**batch(model))
    torch.testing.assert_close(output.loss, expected_loss(output.logits))
    output.loss.backward()
    assert model.joint.head.weight.grad.norm() > 0
    assert all(p.grad is not None for p in model.encoder_projector.parameters())


def test_bfloat16_model() -> None:
    model = tiny_parakeet(ParakeetForRNNT, ParakeetRNNTConfig).to(torch.bfloat16)
    transformers_loss.use(model)
    arguments = batch(model)
    arguments["input_features"] = arguments["input_features"].to(torch.bfloat16)
    output = model(**arguments)
    assert output.logits.dtype == torch.bfloat16
    torch.testing.assert_close(output.loss, expected_loss(output.logits))


def test_the_same_as_torchaudios() -> None:
    """transformers' own loss of this model needs torchaudio."""
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError):
        pytest.skip("needs torchaudio")
    model = tiny_parakeet(ParakeetForRNNT, ParakeetRNNTConfig)
    theirs = model(**batch(model)).loss
    transformers_loss.use(model)
    torch.testing.assert_close(model(**batch(model)).loss, theirs)


@pytest.mark.parametrize(
    ("durations", "sigma"), [([0, 1, 2, 3, 4], 0.0), ([0, 1, 2, 3, 4], 0.05), ([2, 0, 1, 5], 0.0)]
)
@pytest.mark.parametrize("reduction", ["mean", "mean_volume", "mean_batch", "sum", "none"])
def test_tdt_losses_and_gradients_are_theirs(
    durations: list[int], sigma: float, reduction: str
) -> None:
    from transformers.loss.loss_tdt import tdt_loss

    torch.manual_seed(3)
    inputs = [torch.randn(2, 9, 4, BLANK + 1), torch.randn(2, 9, 4, len(durations))]
    lengths = torch.tensor([9, 6])
    weights = torch.tensor([1.0, 0.7]) if reduction == "none" else torch.tensor(1.3)
    found = []
    for loss in (tdt_loss, transformers_loss.tdt_loss):
        leaves = [each.clone().requires_grad_() for each in inputs]
        value = loss(*leaves, LABELS, lengths, LABEL_LENGTHS, BLANK, durations, sigma, reduction)
        found.append((value.detach(), torch.autograd.grad((value * weights).sum(), leaves)))
    (theirs, their_gradients), (ours, our_gradients) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for our, their in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-5)


def test_a_tdt_model_trains_with_the_registered_loss() -> None:
    model = tiny_parakeet(ParakeetForTDT, ParakeetTDTConfig)
    padded = batch(model)
    theirs = model(**padded).loss
    transformers_loss.register()
    ours = model(**padded).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours.backward()
    assert model.joint.head.weight.grad[-1].norm() > 0
    transformers_loss.use(model, sigma=0.1)
    assert float(model(**padded).loss.detach()) > float(ours.detach())


def gradients_of(model: Any, arguments: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    model.zero_grad()
    torch.manual_seed(2)  # of dropout
    loss = model(**arguments).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("durations", [False, True])
def test_a_fused_model_has_the_loss_and_gradients_of_stored_logits(durations: bool) -> None:
    rnnt, tdt = (ParakeetForRNNT, ParakeetRNNTConfig), (ParakeetForTDT, ParakeetTDTConfig)
    model = tiny_parakeet(*(tdt if durations else rnnt)).double()
    arguments = batch(model, torch.float64)
    model.train()
    # Its running statistics would change between the passes.
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.momentum = 0.0
    transformers_loss.use(model)
    stored = gradients_of(model, arguments)
    transformers_loss.use(model, fused=True)
    fused = gradients_of(model, arguments)
    torch.testing.assert_close(fused[0], stored[0], rtol=1e-10, atol=0)
    for ours, theirs in zip(fused[1], stored[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    torch.manual_seed(2)
    logits = model(**arguments).logits
    transformers_loss.use(model)
    torch.manual_seed(2)
    torch.testing.assert_close(logits.stored(), model(**arguments).logits)
    with pytest.raises(TypeError, match="fused=True does not store in training"):
        logits[0]
    with pytest.raises(TypeError, match=r"nor gathered by nn\.DataParallel, because fused=True"):
        torch.nn.parallel.scatter_gather.gather([logits, logits], "cpu")


@pytest.mark.slow
def test_a_compiled_model_is_the_model() -> None:
    model = tiny_parakeet(ParakeetForRNNT, ParakeetRNNTConfig)
    transformers_loss.use(torch.compile(model), reduction="sum")
    assert model.loss_function.keywords == {"reduction": "sum"}


def test_a_fused_model_has_logits_in_evaluation_and_a_copy_of_its_own(tmp_path: Any) -> None:
    model = tiny_parakeet(ParakeetForRNNT, ParakeetRNNTConfig).eval()
    without_labels = {name: x for name, x in batch(model).items() if name != "labels"}
    expected = model(**without_labels).logits
    transformers_loss.use(model, fused=True)
    output = model(**batch(model))
    assert torch.equal(output.logits, expected)
    torch.testing.assert_close(output.loss, expected_loss(expected))
    copied = copy.deepcopy(model).train()
    copied(**batch(model)).loss.backward()
    assert copied.joint.head.weight.grad.norm() > 0
    assert model.joint.head.weight.grad is None
    model.save_pretrained(tmp_path)
    again = ParakeetForRNNT.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**without_labels).logits, expected)


def test_a_changed_head_is_called(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_parakeet(ParakeetForRNNT, ParakeetRNNTConfig).train()
    transformers_loss.use(model, fused=True)
    model.joint.head.register_forward_hook(lambda module, inputs, output: 0 * output)
    output = model(**batch(model))
    assert isinstance(output.logits, torch.Tensor)
    assert not output.logits.any()
    assert "because joint.head has forward hooks" in caplog.text


def test_models_that_cannot_be_fused_are_refused() -> None:
    model = tiny_parakeet(ParakeetForRNNT, ParakeetRNNTConfig)
    joint, model.joint = model.joint, torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"model\.joint to be one of"):
        transformers_loss.use(model, fused=True)
    model.joint = joint
    model.joint.activation = torch.nn.SiLU()
    with pytest.raises(ValueError, match="ReLU or tanh"):
        transformers_loss.use(model, fused=True)
