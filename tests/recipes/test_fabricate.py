"""Fabricated corpora: their size, layout and content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from scripts.fabricate.__main__ import main
from scripts.fabricate.corpora import CORPORA, scaled_parts, train_hours
from scripts.fabricate.layouts import corpus_root
from scripts.fabricate.texts import english, german, mandarin
from scripts.fabricate.tone_speech import ToneVoice


def fabricate(corpus: str, folder: Path, *options: str) -> Path:
    main([corpus, str(folder), "--seconds", "0.8", *options])
    return corpus_root(corpus, folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_librispeech_has_a_share_of_every_part(tmp_path: Path) -> None:
    root = fabricate("librispeech", tmp_path, "--share", "0.0005")
    parts = {path.name: len(list(path.rglob("*.flac"))) for path in root.iterdir()}
    expected = {
        part.name: max(2, round(part.utterances * 0.0005)) for part in CORPORA["librispeech"]
    }
    assert parts == expected
    (transcript,) = (root / "dev-clean").rglob("79000-1000.trans.txt")
    name, words = transcript.read_text().splitlines()[0].split(maxsplit=1)
    assert words.isupper()
    audio = soundfile.info(transcript.parent / f"{name}.flac")
    assert audio.samplerate == 16000
    # 70 ms a character, and 0.2 to 0.6 s of silence.
    assert 0.2 <= audio.duration - 0.07 * len(words) <= 0.6


def test_processes_do_not_change_a_corpus(tmp_path: Path) -> None:
    alone = fabricate("aishell", tmp_path / "alone", "--share", "0.0002")
    several = fabricate("aishell", tmp_path / "several", "--share", "0.0002", "--jobs", "2")
    other = fabricate("aishell", tmp_path / "other", "--share", "0.0002", "--seed", "1")
    assert contents(alone) == contents(several)
    assert contents(alone) != contents(other)


def test_hours_choose_the_share() -> None:
    share = 100 / train_hours("librispeech")
    parts = scaled_parts("librispeech", share)
    assert sum(p.hours for p in parts if p.name.startswith("train")) == pytest.approx(100, rel=1e-3)
    assert scaled_parts("yesno", share)[0].utterances == 60
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="needs a positive number"):
            scaled_parts("librispeech", bad)


def test_an_existing_corpus_is_not_mixed_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fabricate("yesno", tmp_path)
    with pytest.raises(SystemExit):
        fabricate("yesno", tmp_path)
    assert "waves_yesno exists" in capsys.readouterr().err


def test_tones_tell_characters_apart() -> None:
    voice = ToneVoice(sampling_rate=16000, sounds=1, seconds=0.07, pitch=1.0)
    spectra = []
    for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
        samples_S = voice.speak(letter, np.random.default_rng(0))
        spectrum = np.abs(np.fft.rfft(samples_S, 16000))
        spectra.append(tuple(sorted(np.argsort(spectrum)[-8:] // 20)))
    assert len(set(spectra)) == 26


def test_texts_look_like_those_of_the_corpora() -> None:
    rng = np.random.default_rng(0)
    text = english().draw(60, rng)
    assert text.isupper()
    assert text.replace(" ", "").isascii()
    assert len(text) >= 59
    sentence = german().draw(60, rng)
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    characters = set(mandarin().draw(200, rng)) - {" "}
    assert all("\u4e00" <= character <= "\u9fff" for character in characters)
