"""Rows of kept symbols move bit for bit, new ones resemble them, and tokenizers are extended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.data.tokens.train_tokenizer import (
    TOKENIZER_KINDS,
    TokenizerConfig,
    extended_tokenizer,
    train_tokenizer,
)
from pruned_rnnt.finetune.vocabulary import (
    check_coverage,
    choose_vocabulary,
    match_vocabularies,
    transfer_parameters,
)
from pruned_rnnt.model.predictor import LstmPredictorConfig
from tests.tiny_models import tiny_model

OLD = ("<blk>", "<sos/eos>", "<unk>", "a", "b", "c", "d")
NEW = ("<blk>", "<sos/eos>", "<unk>", "d", "x", "b", "y", "z")
OLD_TEXTS = ["turn on the light", "turn off the radio now", "the light is on"]
NEW_TEXTS = ["zero one two three", "four five six", "seven eight nine jazz quiz"]


def tokens(texts: list[str], kind: Any = "char"):  # type: ignore[no-untyped-def]
    return train_tokenizer(texts, TokenizerConfig(kind=kind, vocab_size=40))


def test_symbols_are_matched_by_text() -> None:
    change = match_vocabularies(OLD, NEW)
    assert change.rows == (0, 1, 2, 6, None, 4, None, None)
    assert change.added == ("x", "y", "z")
    assert change.dropped == ("a", "c")
    assert change.kept == 5


@pytest.mark.parametrize("predictor", [None, LstmPredictorConfig(dim=8)], ids=["stateless", "lstm"])
@pytest.mark.parametrize("kind", ["pruned", "full"])
def test_rows_move_with_their_symbols(predictor: Any, kind: str) -> None:
    source = tiny_model(vocab_size=len(OLD), predictor=predictor, kind=kind)
    target = tiny_model(vocab_size=len(NEW), predictor=predictor, kind=kind, seed=1)
    change = match_vocabularies(OLD, NEW)
    assert transfer_parameters(source, target, change) == ()
    old, new = source.state_dict(), target.state_dict()
    by_symbol = {name for name, value in new.items() if value.shape != old[name].shape}
    assert {"predictor.embedding.weight", "joiner.output_linear.bias", "ctc_head.weight"} < (
        by_symbol
    )
    assert ("pruned_loss.simple_am_proj.weight" in by_symbol) == (kind == "pruned")
    for name, value in new.items():
        if name not in by_symbol:
            assert torch.equal(value, old[name]), name
            continue
        for index, row in enumerate(change.rows):
            if row is not None:
                assert torch.equal(value[index], old[name][row]), (name, index)
            elif name.endswith("bias"):
                assert value[index] == old[name][3:].min(), name
            else:
                mean_D, spread_D = old[name][3:].mean(0), old[name][3:].std(0)
                assert ((value[index] - mean_D).abs() < 6 * spread_D).all(), name
                assert not any(torch.equal(value[index], each) for each in old[name])


def test_parts_that_the_source_lacks_keep_their_initial_values() -> None:
    source = tiny_model(kind="full", ctc_scale=0.0)
    target = tiny_model(seed=1)
    before = target.ctc_head.weight.clone()  # type: ignore[union-attr]
    missing = transfer_parameters(source, target, match_vocabularies(OLD, OLD))
    assert {"ctc_head.weight", "pruned_loss.simple_lm_proj.bias"} < set(missing)
    assert torch.equal(target.ctc_head.weight, before)  # type: ignore[union-attr]
    assert torch.equal(target.joiner.output_linear.weight, source.joiner.output_linear.weight)


def test_another_width_is_named() -> None:
    source, target = tiny_model(), tiny_model(joiner_dim=20)
    with pytest.raises(ValueError, match=r"joiner.encoder_proj.weight has the shape \(16, 16\)"):
        transfer_parameters(source, target, match_vocabularies(OLD, OLD))


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("more", TOKENIZER_KINDS)
def test_extended_tokenizers_keep_ids_and_texts(kind: str, more: str) -> None:
    own, other = tokens(OLD_TEXTS, kind), tokens(NEW_TEXTS, more)
    extended = extended_tokenizer(own, other)
    assert extended.symbols[: len(own)] == own.symbols
    assert set(extended.symbols) <= {*own.symbols, *other.symbols}
    for text in OLD_TEXTS:
        assert extended.encode(text) == own.encode(text)
    # Characters and pieces do not make up words, nor whole words their characters.
    if (kind == "word") == (more == "word") or kind == "unigram":
        for text in NEW_TEXTS:
            assert extended.decode(extended.encode(text)) == text


@pytest.mark.parametrize(
    ("how", "texts", "expected"),
    [
        ("auto", ["no light"], "keep"),
        ("auto", NEW_TEXTS, "extend"),
        ("replace", NEW_TEXTS, "replace"),
    ],
)
def test_choice_of_the_vocabulary(how: str, texts: list[str], expected: str) -> None:
    own, other = tokens(OLD_TEXTS), tokens(texts)
    vocabulary = choose_vocabulary(how, own, other, texts)
    assert vocabulary.how == expected
    sizes = {"keep": own, "extend": extended_tokenizer(own, other), "replace": other}
    assert vocabulary.tokenizer.symbols == sizes[expected].symbols
    assert f"kept {vocabulary.change.kept} symbols" in vocabulary.describe()
    check_coverage(vocabulary, texts, "data")


def test_texts_that_the_vocabulary_does_not_cover_are_refused() -> None:
    own, other = tokens(OLD_TEXTS), tokens(NEW_TEXTS)
    kept = choose_vocabulary("keep", own, other, NEW_TEXTS)
    with pytest.raises(ConfigError, match=r"the texts in data are unknown \([a-z, ]*j, q, .*ext"):
        check_coverage(kept, NEW_TEXTS, "data")
    replaced = choose_vocabulary("replace", own, other, NEW_TEXTS)
    with pytest.raises(ConfigError, match=r"replace: .* set finetune.vocabulary=extend"):
        check_coverage(replaced, ["drama", "blurb"], "old")


def test_another_case_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    upper = [text.upper() for text in OLD_TEXTS]
    choose_vocabulary("auto", tokens(upper), tokens(OLD_TEXTS), OLD_TEXTS)
    assert "prepare the data with --case upper" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "how"),
    [
        (("en", "de"), ("fr",), "extend"),
        (("en", "de"), ("en",), "keep"),
        (("en", "de"), (), "keep"),
        ((), ("fr",), "keep"),
    ],
)
def test_new_languages_extend_the_vocabulary(
    old: tuple[str, ...], new: tuple[str, ...], how: str
) -> None:
    source, data = (
        train_tokenizer(OLD_TEXTS, TokenizerConfig(kind="char", languages=languages))
        for languages in (old, new)
    )
    chosen = choose_vocabulary("auto", source, data, OLD_TEXTS)
    assert chosen.how == how
    assert chosen.tokenizer.languages.keys() == {*old, *(new if how == "extend" else ())}
