"""Language models and the internal one in beam search, against sums over all paths."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.build_search import build_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.fusion.build import (
    FusionConfig,
    NeuralScorer,
    SymbolBonus,
    build_scorers,
)
from pruned_rnnt.decode.fusion.hotwords import HotwordScorer, read_hotwords
from pruned_rnnt.decode.fusion.ngram import NgramScorer
from pruned_rnnt.decode.fusion.ngram_files import read_word_ngram
from pruned_rnnt.decode.fusion.word_scorer import WordNgramScorer
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.states import TokenScorer
from pruned_rnnt.decode.search.tdt_beam import TdtBeamSearch
from pruned_rnnt.model.language_model import LanguageModel, LanguageModelConfig
from pruned_rnnt.model.speech_model import TransducerModel
from tests.decode.search_model import (
    UNKNOWN,
    VOCAB,
    all_sequences,
    encoded,
    make_model,
    modified_beam_search,
)

SYMBOLS = ["<blk>", "<sos/eos>", "<unk>", "a", "b"]
# Log-probabilities to the base 10; back-off weights in the last column.
ARPA = """\
\\data\\
ngram 1=5
ngram 2=4

\\1-grams:
-1.5\t<unk>\t0
0\t<s>\t-0.3
-0.7\t</s>\t0
-0.5\ta\t-0.2
-0.6\tb\t-0.1

\\2-grams:
-0.1\t<s> a
-0.2\ta b
-0.3\tb </s>
-0.9\tb b

\\end\\
"""
UNIGRAMS = {"</s>": -0.7, "a": -0.5, "b": -0.6}
BIGRAMS = {("<s>", "a"): -0.1, ("a", "b"): -0.2, ("b", "</s>"): -0.3, ("b", "b"): -0.9}
BACK_OFF = {"<s>": -0.3, "a": -0.2, "b": -0.1}


def arpa_score(symbols: tuple[int, ...]) -> float:
    words = ["<s>", *(SYMBOLS[symbol] for symbol in symbols), "</s>"]
    score = 0.0
    for before, word in itertools.pairwise(words):
        if (before, word) in BIGRAMS:
            score += BIGRAMS[before, word]
        else:
            score += BACK_OFF.get(before, 0.0) + UNIGRAMS.get(word, -1.5)
    return score * math.log(10.0)


def make_lm(vocab_size: int = VOCAB) -> LanguageModel:
    torch.manual_seed(5)
    model = LanguageModel(LanguageModelConfig(dim=8, layers=2), vocab_size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def assert_adds_to_every_sequence(
    model: TransducerModel, scorers: list[TokenScorer], extra: dict[tuple[int, ...], float]
) -> None:
    """With a beam that keeps everything, a score is the model's plus `extra`."""
    frames, lengths = encoded([4, 3])
    found = modified_beam_search(
        model,
        frames,
        lengths,
        beam_size=700,
        num_best=700,
        length_norm=False,
        scorers=scorers,
    )
    for n, hypotheses in enumerate(found):
        expected = all_sequences(model, frames[n, : lengths[n]])
        assert {h.symbols for h in hypotheses} == set(expected)
        for h in hypotheses:
            wanted = expected[h.symbols] + extra[h.symbols]
            assert h.score == pytest.approx(wanted, abs=2e-4)
        scores = [h.score for h in hypotheses]
        assert scores == sorted(scores, reverse=True)


def sequences(length: int) -> list[tuple[int, ...]]:
    shorter = [()] if length == 0 else sequences(length - 1)
    longest = [s for s in shorter if len(s) == length - 1]
    return shorter + [(*s, v) for s in longest for v in range(1, VOCAB)] * (length > 0)


@pytest.mark.slow
def test_ngram_adds_its_scores(tmp_path: Path) -> None:
    path = tmp_path / "lm.arpa"
    path.write_text(ARPA)
    scorer = NgramScorer(path, SYMBOLS, 0.4)
    extra = {symbols: 0.4 * arpa_score(symbols) for symbols in sequences(4)}
    assert_adds_to_every_sequence(make_model(), [scorer], extra)
    assert_adds_to_every_sequence(make_model(seed=2), [scorer], extra)


@torch.inference_mode()
@pytest.mark.slow
def test_neural_model_adds_its_scores() -> None:
    lm = make_lm()
    extra = {}
    for symbols in sequences(4):
        texts = torch.tensor([symbols], dtype=torch.int32).view(1, -1)
        extra[symbols] = -0.7 * float(lm(texts, torch.tensor([len(symbols)])).total)
    assert_adds_to_every_sequence(make_model(), [NeuralScorer(lm, 0.7)], extra)


@pytest.mark.slow
def test_symbol_bonus_adds_to_every_symbol() -> None:
    extra = {symbols: 0.6 * len(symbols) for symbols in sequences(4)}
    assert_adds_to_every_sequence(make_model(), [SymbolBonus(0.6, VOCAB)], extra)


@torch.inference_mode()
def test_padding_does_not_change_language_model_losses() -> None:
    lm = make_lm()
    texts = torch.tensor([[3, 4, 2], [4, 3, 1], [0, 0, 0]], dtype=torch.int32)
    together = lm(texts, torch.tensor([3, 1, 0])).total
    for n, length in enumerate([3, 1, 0]):
        alone = lm(texts[n : n + 1, :length], torch.tensor([length])).total
        torch.testing.assert_close(together[n], alone[0])


@pytest.mark.parametrize("scale", [0.5, 1.0])
@torch.inference_mode()
def test_internal_language_model_is_subtracted(scale: float) -> None:
    model = make_model(hat=True)
    frames, lengths = encoded([3])

    def internal(symbols: tuple[int, ...]) -> float:
        total = 0.0
        for u, symbol in enumerate(symbols):
            before = torch.tensor([symbols[:u]]).view(1, u)
            lm_D = model.joiner.decoder_proj(model.predictor.forward_targets(before)[0, -1])
            logits_V = model.joiner(torch.zeros_like(lm_D), lm_D)
            total += float(logits_V[1:].log_softmax(dim=0)[symbol - 1])
        return total

    (found,) = modified_beam_search(
        model, frames, lengths, beam_size=200, num_best=200, length_norm=False, ilm_scale=scale
    )
    expected = all_sequences(model, frames[0])
    assert len(found) == len(expected)
    for h in found:
        wanted = expected[h.symbols] - scale * internal(h.symbols)
        assert h.score == pytest.approx(wanted, abs=2e-4)


def test_internal_language_model_needs_hat() -> None:
    frames, lengths = encoded([3])
    with pytest.raises(ValueError, match=r"loss\.hat=true"):
        modified_beam_search(make_model(), frames, lengths, ilm_scale=0.3)
    config = DecodeConfig(method="modified_beam", fusion=FusionConfig(ilm_scale=0.3))
    with pytest.raises(ValueError, match=r"decode\.fusion\.ilm_scale is 0\.3"):
        build_search(make_model(), config)


@torch.inference_mode()
def test_fusion_in_a_batch_equals_one_at_a_time() -> None:
    model, lm = make_model(), make_lm()
    frames, lengths = encoded([15, 3, 9, 1])
    options = {"beam_size": 4, "num_best": 4, "scorers": [NeuralScorer(lm, 0.5)]}
    together = modified_beam_search(model, frames, lengths, **options)
    plain = modified_beam_search(model, frames, lengths)
    assert [h[0].symbols for h in together] != [h[0].symbols for h in plain]
    for n, length in enumerate(lengths.tolist()):
        (alone,) = modified_beam_search(
            model, frames[n : n + 1, :length], lengths[n : n + 1], **options
        )
        assert [h.symbols for h in alone] == [h.symbols for h in together[n]]
        for one, other in zip(alone, together[n], strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)


def test_fusion_needs_beam_search() -> None:
    with pytest.raises(ValueError, match="modified_beam"):
        DecodeConfig(fusion=FusionConfig(hotwords="phrases.txt"))


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("hotword_bonus", "hotwords"),
        ("ngram_scale", "ngram"),
        ("bigram_scale", "bigram_texts"),
        ("word_scale", "word_ngram or decode.fusion.word_texts"),
        ("word_unknown", "word_ngram or decode.fusion.word_texts"),
        ("lm_scale", "lm"),
    ],
)
def test_a_setting_of_a_score_that_is_not_in_use(
    name: str, needs: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = DecodeConfig(method="modified_beam", fusion=FusionConfig(**{name: 0.75}))
    build_search(make_model(), config)
    (record,) = caplog.records
    message = f"decode.fusion.{name} is 0.75, which has no effect without decode.fusion.{needs}: "
    assert record.getMessage().startswith(message)
    build_search(make_model(), replace(config, method="greedy"))  # reads no scores
    assert len(caplog.records) == 1


def test_fusion_needs_the_tokenizer_and_the_language_model() -> None:
    config = DecodeConfig(method="modified_beam", fusion=FusionConfig(lm="runs/lm"))
    with pytest.raises(ValueError, match="needs the model's tokenizer, got None"):
        build_search(make_model(), config)
    tokenizer = train_tokenizer(["abc"], TokenizerConfig(kind="char", vocab_size=30))
    with pytest.raises(ValueError, match=r"decode\.fusion\.lm is runs/lm, .* language_model="):
        build_search(make_model(), config, tokenizer)


@torch.inference_mode()
def test_settings_reach_the_scorers(tmp_path: Path) -> None:
    """All away from the defaults."""
    ngram, texts, hotwords = (tmp_path / name for name in ("lm.arpa", "texts.txt", "hotwords.txt"))
    ngram.write_text(ARPA)
    texts.write_text("ab ba\nab\n")
    hotwords.write_text("ab\n")
    tokenizer = train_tokenizer(["ab ba"], TokenizerConfig(kind="char"))
    symbols, lm = tokenizer.symbols, make_lm(len(tokenizer))
    config = FusionConfig(
        ngram=str(ngram), ngram_scale=0.7, word_texts=str(texts), word_scale=0.9, word_unknown=0.2,
        lm="runs/lm", lm_scale=0.6, hotwords=str(hotwords), hotword_bonus=2.5, symbol_bonus=0.4,
    )  # fmt: skip
    expected: list[TokenScorer] = [
        NgramScorer(ngram, symbols, 0.7),
        WordNgramScorer(read_word_ngram("", str(texts)), symbols, scale=0.9, unknown=0.2),
        NeuralScorer(lm, 0.6),
        HotwordScorer(read_hotwords(hotwords, tokenizer, 2.5), len(symbols)),
        SymbolBonus(0.4, len(symbols)),
    ]
    for got, wanted in zip(build_scorers(config, tokenizer, lm), expected, strict=True):
        state, other = (each.start(1, torch.device("cpu")) for each in (got, wanted))
        torch.testing.assert_close(got.scores(state), wanted.scores(other))
        torch.testing.assert_close(got.final(state), wanted.final(other))


@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
@torch.inference_mode()
def test_settings_reach_the_search(durations: tuple[int, ...]) -> None:
    """Scores that are not normalised, an internal model, and symbols in a frame."""
    model = make_model(hat=not durations, durations=durations)
    own = {"max_symbols_per_frame": 1} if durations else {}
    fusion = FusionConfig(ilm_scale=0.0 if durations else 0.3)
    options = {"beam_size": 3, "num_best": 3, "length_norm": False, **own}
    config = DecodeConfig(method="modified_beam", fusion=fusion, **options)
    kind = TdtBeamSearch if durations else ModifiedBeamSearch
    if fusion.ilm_scale:
        options["ilm_scale"] = fusion.ilm_scale
    batch = encoded([9, 15, 4, 12])
    expected = kind(model, silent_symbols=[UNKNOWN], **options)(*batch)
    assert build_search(model, config)(*batch) == expected
    for name in options:
        others = {key: value for key, value in options.items() if key != name}
        assert kind(model, silent_symbols=[UNKNOWN], **others)(*batch) != expected, name
