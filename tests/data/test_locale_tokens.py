"""Texts of every locale are the same after encoding and decoding, with every kind of tokens."""

from __future__ import annotations

import io
import unicodedata
from pathlib import Path

import pytest
import sentencepiece

from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.tokens.text_normalisation import normal_form
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import (
    TokenizerConfig,
    extended_tokenizer,
    train_tokenizer,
)
from pruned_rnnt.decode.scoring.error_rates import Transcript, count_errors
from tests.data.locale_texts import LOCALES, each_locale, sample_texts
from tests.data.own_corpus import prepare
from tests.data.recorded_speech import write_audio

TOKENS = [("char", False), ("bpe", False), ("unigram", False), ("char", True), ("bpe", True)]


def old_tokenizer(texts: list[str], kind: str = "char") -> Tokenizer:
    """As earlier versions trained it: SentencePiece normalises by its default rules."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type=kind,
        vocab_size=2000,
        hard_vocab_limit=False,
        use_all_vocab=kind == "char",
        character_coverage=1.0,
        control_symbols=["<blk>", "<sos/eos>"],
        unk_id=UNKNOWN_ID,
        unk_piece="<unk>",
        unk_surface=" <unk> ",
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    return Tokenizer(model.getvalue())


def check_round_trip(tokenizer: Tokenizer, texts: list[str]) -> None:
    """A perfect hypothesis has no error."""
    for text in texts:
        reference = tokenizer.normalise(text)
        hypothesis = tokenizer.decode(tokenizer.encode(text))
        assert hypothesis == reference
        assert tokenizer.normalise(reference) == reference
        words = Transcript(
            id="a", reference=tuple(reference.split()), hypothesis=tuple(hypothesis.split())
        )
        assert count_errors([words]).errors == count_errors([words.characters()]).errors == 0
        assert words.reference


@each_locale
@pytest.mark.parametrize(("kind", "byte_fallback"), TOKENS)
def test_every_locale_is_encoded_without_loss(locale: str, kind: str, byte_fallback: bool) -> None:
    texts = sample_texts(locale)
    config = TokenizerConfig(kind=kind, byte_fallback=byte_fallback)
    # Trained on some of the texts, so that with bytes the others have unknown characters.
    tokenizer = train_tokenizer(texts[:1] if byte_fallback else texts, config)
    assert not tokenizer.has_own_rules
    assert all(tokenizer.normalise(text) == normal_form(text) for text in texts)
    assert not any(UNKNOWN_ID in tokenizer.encode(text) for text in texts)
    check_round_trip(tokenizer, texts)


@each_locale
@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_old_tokenizers_keep_their_rules(locale: str, kind: str) -> None:
    texts = [text for text in sample_texts(locale) if len(text) > 1]
    tokenizer = old_tokenizer(texts, kind)
    assert tokenizer.has_own_rules
    check_round_trip(tokenizer, texts)


def test_old_rules_differ_from_ours() -> None:
    thai, persian = LOCALES["th"][0], LOCALES["fa"][0]
    tokenizer = old_tokenizer([thai, persian])
    assert tokenizer.normalise(thai) != normal_form(thai)
    assert len(tokenizer.normalise(persian).split()) > len(normal_form(persian).split())


def test_symbols_that_an_old_tokenizer_gets_are_in_its_spelling() -> None:
    thai = LOCALES["th"][0]
    source, data = old_tokenizer(["hello"]), train_tokenizer([thai], TokenizerConfig(kind="char"))
    extended = extended_tokenizer(source, data)
    assert extended.has_own_rules
    assert extended.symbols[: len(source)] == source.symbols
    assert UNKNOWN_ID not in extended.encode(thai)
    check_round_trip(extended, [thai])


def test_bytes_come_directly_after_the_special_symbols() -> None:
    """sherpa-onnx takes them for bytes at ids 3 to 258 only."""
    config = TokenizerConfig(kind="bpe", byte_fallback=True, languages=("tr", "de"))
    tokenizer = train_tokenizer(["merhaba d\u00fcnya"] * 9, config)
    assert tokenizer.symbols[3:259] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert tokenizer.has_bytes
    assert list(tokenizer.languages) == ["de", "tr"]
    assert list(tokenizer.languages.values()) == [len(tokenizer) - 2, len(tokenizer) - 1]


def test_rare_characters_are_bytes_and_the_vocabulary_keeps_its_size() -> None:
    common = ["\u4f60\u597d\u4e16\u754c"] * 10
    rare = [chr(0x4E00 + index) for index in range(600)]
    config = TokenizerConfig(kind="bpe", byte_fallback=True, vocab_size=270, languages=("zh",))
    tokenizer = train_tokenizer([*common, *rare], config)
    assert len(tokenizer) <= 270
    assert "\u4f60" in tokenizer.symbols
    check_round_trip(tokenizer, [*rare, "\u4f60\u9f98\u597d"])
    with pytest.raises(ValueError, match="byte_fallback needs the kind unigram, bpe or char"):
        train_tokenizer(common, TokenizerConfig(kind="word", byte_fallback=True))
    with pytest.raises(ValueError, match="vocab_size must be at least 261 with byte_fallback"):
        train_tokenizer(common, TokenizerConfig(kind="bpe", byte_fallback=True, vocab_size=260))


def test_default_size_grows_with_the_characters() -> None:
    many = ["".join(chr(0x4E00 + 30 * line + index) for index in range(30)) for line in range(30)]
    tokenizer = train_tokenizer(many, TokenizerConfig(kind="bpe"))
    assert len(tokenizer) > 900
    with pytest.raises(ValueError, match=r"vocab_size must be at least 9\d\d .*, got 500"):
        train_tokenizer(many, TokenizerConfig(kind="bpe", vocab_size=500))


def test_language_tags_are_emitted_and_not_shown() -> None:
    config = TokenizerConfig(kind="char", languages=("tr", "de"))
    tokenizer = train_tokenizer(["merhaba <|tr|>"], config)
    ids = tokenizer.encode("merhaba", "tr")
    assert ids == [tokenizer.languages["tr"], *tokenizer.encode("merhaba")]
    assert tokenizer.decode(ids) == "merhaba"
    assert tokenizer.language_of(ids) == "tr"
    assert tokenizer.language_of(ids[1:]) == ""
    assert tokenizer.encode("merhaba", "fr") == ids[1:]
    # The text of a tag is text.
    assert not set(tokenizer.languages.values()) & set(tokenizer.encode("<|tr|>"))
    assert tokenizer.decode(tokenizer.encode("<|tr|>")) == "<|tr|>"


def test_missing_characters() -> None:
    tokenizer = train_tokenizer(["\u0645\u06cc\u200c\u062e a"], TokenizerConfig(kind="char"))
    assert [tokenizer.lacks(c) for c in "a\u200c\u200d\u0645b"] == [False, False, True, False, True]
    assert not tokenizer.has_whole_words
    assert train_tokenizer(["a b"], TokenizerConfig(kind="word")).has_whole_words
    with_bytes = train_tokenizer(["a"], TokenizerConfig(kind="char", byte_fallback=True))
    assert not any(map(with_bytes.lacks, "ab\u200d\u4f60"))


@pytest.mark.parametrize("options", [(), ("--byte-fallback", "--language-tags", "--tokens", "bpe")])
def test_batches_of_every_locale_have_the_texts_that_are_scored(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    write_audio(tmp_path / "a.wav", 4.0)
    rows = ["path\tsentence\tlocale\tsplit"]
    for locale, texts in LOCALES.items():
        rows += [
            f"a.wav\t{unicodedata.normalize(form, text)}\t{locale}\t{split}"
            for text in texts
            for form, split in (("NFC", "train"), ("NFD", "dev"), ("NFD", "test"))
        ]
    table = tmp_path / "table.tsv"
    table.write_text("\n".join(rows), encoding="utf-8")
    folder = prepare(table, tmp_path / "out", *options)
    tokenizer = folder.tokenizer()
    config = DataConfig(path=str(folder.path), num_workers=0)
    seen = []
    for batch in DataModule(config).test_loader("test"):
        for targets, length, text, language in zip(
            batch.targets_NU.tolist(),
            batch.target_lengths_N,
            batch.texts,
            batch.languages,
            strict=True,
        ):
            seen.append((language, text))
            assert UNKNOWN_ID not in targets
            assert tokenizer.decode(targets[: int(length)]) == text
            tag = language if "--language-tags" in options else ""
            assert tokenizer.language_of(targets[: int(length)]) == tag
    expected = [(name.lower(), normal_form(t)) for name, texts in LOCALES.items() for t in texts]
    assert sorted(seen) == sorted(expected)
