"""Minimum word error rate training: values, gradients, and what it does to expected errors."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.config.files import configs_folder
from pruned_rnnt.config.load import load_config
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.model.model_config import LossConfig
from pruned_rnnt.model.speech_model import ModelLosses, TransducerModel
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.mwer import (
    MinimumWordError,
    MwerConfig,
    candidates_of,
    errors_of,
    expected_errors,
    references_of,
)
from tests.lattice_paths import joiner_log_probs, log_total
from tests.padded_batch import padded_batch
from tests.tiny_corpus import speech_trainer, tiny_experiment
from tests.tiny_models import tiny_model

TEXTS = ("a b", "c", "b a c", "a")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["a b c", "c b a"], TokenizerConfig(kind="word"))


def make_batch(tokenizer: Tokenizer, texts: tuple[str, ...] = TEXTS) -> Batch:
    """Utterances of 28 down to 16 frames of noise, which are 7 down to 4 encoder frames."""
    generator = torch.Generator().manual_seed(3)
    frames = [28 - 4 * n for n in range(len(texts))]
    rows = [torch.randn(count, 80, generator=generator) for count in frames]
    return padded_batch(
        rows,
        [tokenizer.encode(text) for text in texts],
        texts=texts,
        ids=tuple(f"utterance-{n}" for n in range(len(texts))),
        durations=tuple(0.01 * count for count in frames),
        words=((),) * len(texts),
    )


def make_model(tokenizer: Tokenizer, **loss: Any) -> TransducerModel:
    """In training mode, without dropout."""
    model = tiny_model(vocab_size=len(tokenizer), **loss).train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return model


def found(*sequences: tuple[int, ...]) -> list[Hypothesis]:
    return [
        Hypothesis(symbols=symbols, frames=(), score=0.0, symbol_scores=()) for symbols in sequences
    ]


def test_expected_errors_are_those_of_the_plain_formula() -> None:
    log_probs = [[-1.0, -2.5, -4.0], [-7.0, -6.5], [-3.0]]
    errors = [[2.0, 0.0, 1.0], [1.0, 3.0], [2.0]]
    log_probs_NK = torch.zeros(3, 3, dtype=torch.float64)
    errors_NK = torch.full((3, 3), 100.0)
    present_NK = torch.zeros(3, 3, dtype=torch.bool)
    for n, (own, counts) in enumerate(zip(log_probs, errors, strict=True)):
        log_probs_NK[n, : len(own)] = torch.tensor(own, dtype=torch.float64)
        errors_NK[n, : len(own)] = torch.tensor(counts)
        present_NK[n, : len(own)] = True
    log_probs_NK.requires_grad_()
    result = expected_errors(log_probs_NK, errors_NK, present_NK)
    (grad_NK,) = torch.autograd.grad(result.excess.sum(), log_probs_NK)
    for n, (own, counts) in enumerate(zip(log_probs, errors, strict=True)):
        mass = sum(math.exp(x) for x in own)
        shares = [math.exp(x) / mass for x in own]
        expected = sum(p * e for p, e in zip(shares, counts, strict=True))
        assert float(result.expected[n]) == pytest.approx(expected)
        assert float(result.excess[n].detach()) == pytest.approx(
            expected - sum(counts) / len(counts)
        )
        assert float(result.oracle[n]) == min(counts)
        assert float(result.mass[n]) == pytest.approx(mass)
        wanted = [p * (e - expected) for p, e in zip(shares, counts, strict=True)]
        assert grad_NK[n].tolist() == pytest.approx(wanted + [0.0] * (3 - len(own)))
    assert grad_NK[2].tolist() == [0.0, 0.0, 0.0]


def test_candidates_are_unique_and_have_a_path() -> None:
    hypotheses = [found((3, 4), (3,), (3, 4)), found((), (5, 5, 5))]
    candidates = candidates_of(hypotheses, [2, 3], LossConfig(rnnt_type="modified"))
    assert candidates.sequences == (((3, 4), (3,)), ((), (5, 5, 5)))
    assert candidates.present_NK.tolist() == [[True, True], [True, True]]
    # The last frame emits a blank.
    assert candidates_of(hypotheses, [2, 3], LossConfig(rnnt_type="rna")).sequences == (
        ((3,),),
        ((),),
    )
    long = found((3, 4, 3))
    assert candidates_of([long], [2], LossConfig(rnnt_type="regular")).sequences == (((3, 4, 3),),)
    # Without any sequence that has a path.
    assert candidates_of([long], [2], LossConfig(rnnt_type="modified")).sequences == (((),),)
    tdt = [LossConfig(durations=durations) for durations in ((0, 1), (1, 2))]
    found_by = [candidates_of([long], [4], loss).sequences for loss in tdt]
    assert found_by == [(((3, 4, 3),),), (((3, 4, 3),),)]
    assert [candidates_of([long], [3], loss).sequences for loss in tdt][1] == (((),),)
    with_reference = candidates_of(
        hypotheses, [2, 2], LossConfig(rnnt_type="modified"), [(3,), (4,)]
    )
    assert with_reference.sequences == (((3, 4), (3,)), ((), (4,)))
    uneven = candidates_of(
        [found((3, 4), (3,)), found((5,))], [4, 4], LossConfig(rnnt_type="modified")
    )
    assert uneven.present_NK.tolist() == [[True, True], [True, False]]
    assert uneven.target_lengths_H.tolist() == [2, 1, 1, 0]
    assert uneven.targets_HU.tolist() == [[3, 4], [3, 0], [5, 0], [0, 0]]


def test_errors_count_words_or_characters() -> None:
    words = train_tokenizer(["one two three"], TokenizerConfig(kind="word"))
    one, two, three = (words.encode(word)[0] for word in ("one", "two", "three"))
    batch = make_batch(words, ("one two", "three"))
    hypotheses = [found((one, two), (one,), (one, three, one)), found(())]
    candidates = candidates_of(hypotheses, [9, 9], LossConfig(rnnt_type="regular"))
    in_words = errors_of(candidates, batch, words, "wer")
    assert in_words.tolist() == [[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]]
    in_characters = errors_of(candidates, batch, words, "cer")
    # onetwo: one, onethreeone. three: nothing.
    assert in_characters.tolist() == [[0.0, 3.0, 6.0], [5.0, 0.0, 0.0]]
    assert references_of(batch) == [(one, two), (three,)]


def plain_objective(
    model: TransducerModel, batch: Batch, tokenizer: Tokenizer, config: MwerConfig
) -> Tensor:
    """Expected minus mean errors by enumerated paths of hypotheses that are given as texts."""
    model = model.eval()
    encoded_NTE, frames_N = model.encode(batch.features_NTF.double(), batch.feature_lengths_N)
    mwer = MinimumWordError(model, tokenizer, config)
    candidates = mwer._candidates(encoded_NTE, frames_N, batch)
    total = torch.zeros((), dtype=torch.float64)
    for n, own in enumerate(candidates.sequences):
        frames = int(frames_N[n])
        log_probs, errors = [], []
        for symbols in own:
            targets_1U = torch.tensor([symbols], dtype=torch.int32).view(1, -1)
            lm_UD = model.joiner.decoder_proj(model.predictor.forward_targets(targets_1U)[0])
            am_TD = model.joiner.encoder_proj(encoded_NTE[n, :frames])
            logits_TUV = model.joiner(am_TD[:, None], lm_UD[None])
            rows = joiner_log_probs(logits_TUV, list(symbols), 0)
            rnnt_type = model.loss_config.rnnt_type
            log_probs.append(log_total(*rows, frames, len(symbols), rnnt_type))
            errors.append(_distance(batch.texts[n].split(), tokenizer.decode(symbols).split()))
        shares = torch.stack(log_probs).exp()
        shares = shares / shares.sum()
        total = total + (shares * torch.tensor(errors)).sum() - sum(errors) / len(errors)
    model.train()
    return total


def _distance(reference: list[str], hypothesis: list[str]) -> float:
    if not reference or not hypothesis:
        return float(len(reference) + len(hypothesis))
    rest = _distance(reference[1:], hypothesis[1:])
    return min(
        rest + (reference[0] != hypothesis[0]),
        1 + _distance(reference[1:], hypothesis),
        1 + _distance(reference, hypothesis[1:]),
    )


def losses_of(mwer: MinimumWordError, batch: Batch, step: int = 0) -> ModelLosses:
    """As the training task computes them."""
    ordinary: ModelLosses = mwer.model(
        batch.features_NTF,
        batch.feature_lengths_N,
        batch.targets_NU,
        batch.target_lengths_N,
        step,
    )
    return mwer.losses(batch, ordinary)


@pytest.mark.slow
@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
def test_objective_and_gradients_are_those_of_enumerated_paths(
    tokenizer: Tokenizer, rnnt_type: str
) -> None:
    config = MwerConfig(enabled=True, nbest=3, transducer_scale=0.0)
    batch = make_batch(tokenizer)
    model = make_model(tokenizer, rnnt_type=rnnt_type, ctc_scale=0.0, kind="full").double()
    mwer = MinimumWordError(model, tokenizer, config)
    double = dataclasses.replace(batch, features_NTF=batch.features_NTF.double())
    own = losses_of(mwer, double)
    wanted = plain_objective(model, batch, tokenizer, config)
    torch.testing.assert_close(own.objective, wanted)
    torch.testing.assert_close(own.total.sum(), own.objective.detach())
    parameters = [p for name, p in model.named_parameters() if "conv" not in name]
    for mine, theirs in zip(
        torch.autograd.grad(own.objective, parameters, allow_unused=True),
        torch.autograd.grad(wanted, parameters, allow_unused=True),
        strict=True,
    ):
        if theirs is not None:
            assert mine is not None
            torch.testing.assert_close(mine, theirs)


def test_the_ordinary_loss_is_added_with_its_factor(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer)
    model = make_model(tokenizer, rnnt_type="modified")
    alone, both = (
        losses_of(
            MinimumWordError(model, tokenizer, MwerConfig(nbest=3, transducer_scale=scale)),
            batch,
            step=7,
        )
        for scale in (0.0, 0.5)
    )
    ordinary = model(
        batch.features_NTF,
        batch.feature_lengths_N,
        batch.targets_NU,
        batch.target_lengths_N,
        7,
    )
    torch.testing.assert_close(both.objective, alone.objective + 0.5 * ordinary.objective)
    torch.testing.assert_close(both.total, alone.total + 0.5 * ordinary.total)
    assert set(both.parts) == {"mwer", "simple", "pruned", "ctc"}


def test_the_reference_can_be_a_hypothesis(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer)
    model = make_model(tokenizer, rnnt_type="modified")
    config = MwerConfig(nbest=2, add_reference=True)
    losses = losses_of(MinimumWordError(model, tokenizer, config), batch)
    assert losses.measures["oracle_errors"].tolist() == [0.0] * len(batch)
    without = losses_of(MinimumWordError(model, tokenizer, MwerConfig(nbest=2)), batch)
    assert without.measures["oracle_errors"].sum() > 0


def test_the_search_leaves_the_modes_of_all_parts(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, rnnt_type="modified")
    model.joiner.eval()
    before = [part.training for part in model.modules()]
    losses_of(MinimumWordError(model, tokenizer, MwerConfig()), make_batch(tokenizer))
    assert [part.training for part in model.modules()] == before


def test_all_parameters_get_gradients_under_autocast(tokenizer: Tokenizer) -> None:
    """The search uses the same parameters before without gradients."""
    gradients: dict[torch.dtype, dict[str, Tensor]] = {}
    batch = make_batch(tokenizer)
    for dtype in (torch.float32, torch.bfloat16):
        # The full loss, as the parts of the pruned one do not go through the joiner's layers.
        model = make_model(tokenizer, rnnt_type="modified", kind="full")
        mwer = MinimumWordError(model, tokenizer, MwerConfig(nbest=3, transducer_scale=0.0))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            objective = losses_of(mwer, batch).objective
        objective.backward()
        gradients[dtype] = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and bool(parameter.grad.any())
        }
    exact, rounded = gradients.values()
    assert {"predictor.embedding.weight", "joiner.encoder_proj.weight"} <= set(exact)
    assert set(rounded) == set(exact)
    for name in ("joiner.encoder_proj.weight", "joiner.output_linear.weight"):
        cosine = torch.cosine_similarity(exact[name].flatten(), rounded[name].flatten(), dim=0)
        assert cosine > 0.9, name


def test_training_lowers_the_expected_errors(tokenizer: Tokenizer) -> None:
    """Expected errors alone; the opposite sign would raise them to more than there are words."""
    batch = make_batch(tokenizer)
    model = make_model(tokenizer, rnnt_type="modified", kind="full", ctc_scale=0.0)
    mwer = MinimumWordError(model, tokenizer, MwerConfig(nbest=4, transducer_scale=0.0))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []
    for step in range(12):
        losses = losses_of(mwer, batch, step)
        history.append(float(losses.measures["expected_errors"].mean()))
        optimiser.zero_grad()
        losses.objective.backward()
        optimiser.step()
    assert history[-1] < 0.65 * history[0], history


@pytest.mark.slow
def test_a_run_logs_expected_errors(corpus: Path, tmp_path: Path) -> None:
    config = tiny_experiment(
        corpus, tmp_path / "run", "mwer.enabled=true", "mwer.nbest=3", "loss.rnnt_type=modified"
    )
    speech_trainer(config).run()
    lines = [line for line in read_metrics(config.folder) if line["group"] == "train"]
    assert len(lines) == 4
    for line in lines:
        assert 0 <= line["oracle_errors_per_utterance"] <= line["expected_errors_per_utterance"]
        assert 0 < line["nbest_mass_per_utterance"] <= 1.001
        assert {"mwer_per_frame", "pruned_per_frame"} <= set(line)
    assert "nbest_mass_per_utterance_per_frame" not in lines[0]
    log = (config.folder / "train.log").read_text()
    assert f"expected_errors {lines[-1]['expected_errors_per_utterance']:.3f}" in log


@pytest.mark.parametrize(
    "path", sorted(configs_folder().glob("*.yaml")), ids=lambda path: path.stem
)
def test_packaged_configurations_train_on_the_errors_that_they_report(path: Path) -> None:
    if path.stem != "lm":
        config = load_config(ExperimentConfig, path)
        assert config.mwer.metric == config.decode.metric


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"mwer\.nbest is 1, needs at least 2"):
        MwerConfig(nbest=1)
    with pytest.raises(ValueError, match=r"mwer\.transducer_scale is -1"):
        MwerConfig(transducer_scale=-1)
