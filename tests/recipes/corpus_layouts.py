"""Public corpora in their own layout on disk, with noise for speech and few files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

WORDS = ("HELLO", "TO", "THE", "WORLD", "AGAIN")


def _write(path: Path, seconds: float, rate: int = 16000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(sum(path.name.encode()))
    soundfile.write(path, 0.1 * rng.standard_normal(int(rate * seconds)), rate)


def make_yesno(folder: Path) -> Path:
    """lhotse wants the sixty files there are: `1_0_...wav`, at 8 kHz."""
    for number in range(60):
        name = "_".join(f"{number * 4 + 1:08b}")
        _write(folder / f"{name}.wav", 1.0, 8000)
    return folder


def make_librispeech(folder: Path, parts: dict[str, int], speakers: int = 2) -> Path:
    """parts: utterances of each speaker; speakers: number in each part."""
    for place, (part, count) in enumerate(parts.items()):
        for speaker in range(100 + place, 100 * (speakers + 1) + place, 100):
            chapter = folder / "LibriSpeech" / part / str(speaker) / "7"
            lines = []
            for index in range(count):
                name = f"{speaker}-7-{index:04d}"
                _write(chapter / f"{name}.flac", 1.0 + 0.1 * index)
                lines.append(f"{name} {' '.join(WORDS[: 1 + index % 5])}\n")
            (chapter / f"{speaker}-7.trans.txt").write_text("".join(lines))
    return folder


def make_aishell(folder: Path, count: int = 4) -> Path:
    lines = []
    for part, speaker in (("train", "S0002"), ("dev", "S0724"), ("test", "S0764")):
        for index in range(count):
            name = f"BAC009{speaker}W{index:04d}"
            _write(folder / "data_aishell" / "wav" / part / speaker / f"{name}.wav", 1.2)
            rest = "\u4e16\u754c"[: 1 + index % 2]
            lines.append(f"{name} \u4f60\u597d {rest}\n")
    transcript = folder / "data_aishell" / "transcript" / "aishell_transcript_v0.8.txt"
    transcript.parent.mkdir(parents=True)
    transcript.write_text("".join(lines), encoding="utf-8")
    return folder


def make_commonvoice(folder: Path, language: str, count: int = 4) -> Path:
    header = "client_id path sentence up_votes down_votes age gender accents variant locale segment"
    for part in ("train", "dev", "test"):
        rows = [header.replace(" ", "\t")]
        for index in range(count):
            name = f"common_voice_{language}_{part}{index}.mp3"
            _write(folder / language / "clips" / name, 1.3, 32000)
            sentence = f"\u201cWie geht\u2019s\u201d, Nummer {index}?"
            rows.append("\t".join([f"id-{part}", name, sentence, "2", "0", *[""] * 5, ""]))
        (folder / language / f"{part}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def make_musan(folder: Path) -> Path:
    for part, source in (("music", "fma"), ("speech", "us-gov"), ("noise", "sound-bible")):
        _write(folder / part / source / f"{part}-{source}-0000.wav", 2.5)
    (folder / "music" / "fma" / "ANNOTATIONS").write_text("music-fma-0000 jazz N Someone\n")
    return folder


def make_speechocean762(folder: Path, parts: dict[str, int], *, kaldi: bool = False) -> Path:
    """The corpus's own layout, or one Kaldi directory for each part with `kaldi`.

    parts: speakers of each; four utterances a speaker. Every second speaker is a child.
    """
    first = 1
    for part, speakers in parts.items():
        lines: dict[str, list[str]] = {"text": [], "wav.scp": [], "utt2spk": [], "spk2age": []}
        for number in range(first, first + speakers):
            speaker = f"{number:04d}"
            lines["spk2age"].append(f"{speaker} {8 if number % 2 else 30}")
            for index in range(4):
                name = f"{speaker}0{index:03d}"
                audio = f"audio/{name}.wav" if kaldi else f"WAVE/SPEAKER{speaker}/{name}.WAV"
                _write(folder / (part if kaldi else "") / audio, 1.0 + 0.1 * index)
                lines["text"].append(f"{name}\t{' '.join(WORDS[: 2 + index])}")
                lines["wav.scp"].append(f"{name}\t{audio}")
                lines["utt2spk"].append(f"{name}\t{speaker}")
        first += speakers
        for name, content in lines.items():
            path = folder / part / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(content) + "\n")
    return folder
