"""Writes corpora as lhotse's downloads leave them: `prepare --download` finds them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile

from scripts.fabricate import texts
from scripts.fabricate.corpora import Part
from scripts.fabricate.tone_speech import ToneVoice

COMMON_VOICE_LANGUAGE = "de"
COMMON_VOICE_RELEASE = "cv-corpus-13.0-2023-03-09"
_CV_COLUMNS = (
    *("client_id", "path", "sentence", "up_votes", "down_votes", "age", "gender", "accents"),
    *("variant", "locale", "segment"),
)
_AISHELL_FIRST_SPEAKER = {"train": 2, "dev": 724, "test": 764}
_PITCHES = tuple(np.linspace(0.9, 1.1, 9).tolist())
# In lhotse, the sign of a finished download.
_COMPLETED = ".completed"
_MAX_SECONDS = 24.0
# Strong compression halves the time of mp3.
_FORMATS = {".mp3": {"compression_level": 0.9}}
_LIBRISPEECH_CHAPTER = 1000


class Speech(NamedTuple):
    """How a corpus sounds. sounds, seconds: of a character; see `ToneVoice`."""

    language: Callable[[], texts.Language]
    sampling_rate: int
    sounds: int
    seconds: float


SPEECH: Mapping[str, Speech] = {
    "librispeech": Speech(texts.english, 16000, 1, 0.07),
    "mini_librispeech": Speech(texts.english, 16000, 1, 0.07),
    "aishell": Speech(texts.mandarin, 16000, 3, 0.25),
    "commonvoice": Speech(texts.german, 32000, 1, 0.07),
}


@dataclass(frozen=True, kw_only=True)
class SpeakerJob:
    """The utterances of one speaker of a part. folder: of the whole corpus.

    number: of the speaker in the part, from 0; first: number of the first utterance in the part.
    """

    corpus: str
    folder: Path
    part: Part
    number: int
    first: int
    count: int
    seed: int


class Written(NamedTuple):
    """A line of the part's table of texts, and the seconds of its audio."""

    line: str
    seconds: float


def fabricate(corpus: str, folder: Path, parts: Sequence[Part], *, jobs: int, seed: int) -> float:
    """Write a corpus into a folder, for `prepare CORPUS --download FOLDER`; returns its hours.

    Raises:
        FileExistsError: the folder has this corpus already.
    """
    root = corpus_root(corpus, folder)
    if root.exists():
        raise FileExistsError(f"{root} exists: remove it, or name another folder")
    if corpus == "yesno":
        return _write_yesno(root, parts[0], seed)
    seconds = 0.0
    with ProcessPoolExecutor(jobs) as pool:
        run = map if jobs == 1 else pool.map
        for part in parts:
            lines: list[str] = []
            for written in run(write_speaker, list(_speaker_jobs(corpus, root, part, seed))):
                lines += [line for line, _ in written]
                seconds += sum(duration for _, duration in written)
            _write_table(corpus, root, part, lines)
    return seconds / 3600


def corpus_root(corpus: str, folder: Path) -> Path:
    """The folder that lhotse's download makes in `folder`, which `prepare --source` takes."""
    names = {
        "aishell": Path("aishell"),
        "yesno": Path("waves_yesno"),
        "commonvoice": Path(COMMON_VOICE_RELEASE) / COMMON_VOICE_LANGUAGE,
    }
    return folder / names.get(corpus, Path("LibriSpeech"))


def _speaker_jobs(corpus: str, root: Path, part: Part, seed: int) -> Iterator[SpeakerJob]:
    bounds = np.linspace(0, part.utterances, part.speakers + 1).astype(int).tolist()
    for number, (first, end) in enumerate(pairwise(bounds)):
        yield SpeakerJob(
            corpus=corpus,
            folder=root,
            part=part,
            number=number,
            first=first,
            count=end - first,
            seed=seed,
        )


def write_speaker(job: SpeakerJob) -> list[Written]:
    """Write the audio of a speaker, and in LibriSpeech the texts of the chapter."""
    speech = SPEECH[job.corpus]
    rng = np.random.default_rng([job.seed, *job.part.name.encode(), job.number])
    voice = _voice(job.corpus, int(rng.integers(len(_PITCHES))))
    language = _language(job.corpus)
    written = []
    for index in range(job.count):
        seconds = min(_MAX_SECONDS, job.part.seconds * rng.uniform(0.4, 1.6))
        text = language.draw(max(1, round((seconds - 0.4) / speech.seconds)), rng)
        path, line = _PLACES[job.corpus](job, index, text)
        samples_S = voice.speak(text, rng)
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, samples_S, speech.sampling_rate, **_FORMATS.get(path.suffix, {}))
        written.append(Written(line=line, seconds=len(samples_S) / speech.sampling_rate))
    if job.corpus.endswith("librispeech"):
        chapter = path.parent
        name = f"{chapter.parent.name}-{chapter.name}.trans.txt"
        _write_text(chapter / name, [line for line, _ in written])
    return written


@cache
def _language(corpus: str) -> texts.Language:
    return SPEECH[corpus].language()


@cache
def _voice(corpus: str, number: int) -> ToneVoice:
    _, sampling_rate, sounds, seconds = SPEECH[corpus]
    return ToneVoice(
        sampling_rate=sampling_rate, sounds=sounds, seconds=seconds, pitch=_PITCHES[number]
    )


def _librispeech_place(job: SpeakerJob, index: int, text: str) -> tuple[Path, str]:
    # No speaker is in two parts.
    speaker = str(1000 * sum(job.part.name.encode()) % 100_000 + job.number)
    chapter = str(_LIBRISPEECH_CHAPTER + job.number)
    name = f"{speaker}-{chapter}-{index:04d}"
    return job.folder / job.part.name / speaker / chapter / f"{name}.flac", f"{name} {text}"


def _aishell_place(job: SpeakerJob, index: int, text: str) -> tuple[Path, str]:
    speaker = f"S{_AISHELL_FIRST_SPEAKER[job.part.name] + job.number:04d}"
    name = f"BAC009{speaker}W{121 + index:04d}"
    folder = job.folder / "data_aishell" / "wav" / job.part.name / speaker
    return folder / f"{name}.wav", f"{name} {text}"


def _commonvoice_place(job: SpeakerJob, index: int, text: str) -> tuple[Path, str]:
    number = sum(job.part.name.encode()) * 100_000 + job.first + index
    name = f"common_voice_{COMMON_VOICE_LANGUAGE}_{number}.mp3"
    client = f"{job.part.name}-{job.number:05d}".encode().hex()
    values = {"client_id": client, "path": name, "sentence": text, "up_votes": "2"}
    values |= {"down_votes": "0", "locale": COMMON_VOICE_LANGUAGE}
    line = "\t".join(values.get(column, "") for column in _CV_COLUMNS)
    return job.folder / "clips" / name, line


_PLACES: Mapping[str, Callable[[SpeakerJob, int, str], tuple[Path, str]]] = {
    "librispeech": _librispeech_place,
    "mini_librispeech": _librispeech_place,
    "aishell": _aishell_place,
    "commonvoice": _commonvoice_place,
}


def _write_table(corpus: str, root: Path, part: Part, lines: Sequence[str]) -> None:
    """The texts of a part, where the corpus keeps them outside the folders of speakers."""
    if corpus == "aishell":
        data = root / "data_aishell"
        _write_text(data / "transcript" / "aishell_transcript_v0.8.txt", lines, append=True)
        _write_text(root / "resource_aishell" / "speaker.info", [])
        for folder in (data, root / "resource_aishell"):
            (folder / _COMPLETED).touch()
    elif corpus == "commonvoice":
        _write_text(root / f"{part.name}.tsv", ["\t".join(_CV_COLUMNS), *lines])
        (root / _COMPLETED).touch()
    else:
        (root / part.name / _COMPLETED).touch()


def _write_yesno(root: Path, part: Part, seed: int) -> float:
    """Eight words a file, named by its words: 1 is yes, 0 is no."""
    rng = np.random.default_rng(seed)
    voice = ToneVoice(sampling_rate=8000, sounds=1, seconds=0.35, pitch=0.9)
    root.mkdir(parents=True)
    samples = 0
    for number in rng.choice(256, part.utterances, replace=False):
        words = f"{number:08b}"
        spoken_S = voice.speak(" ".join(words), rng)
        soundfile.write(root / f"{'_'.join(words)}.wav", spoken_S, voice.sampling_rate)
        samples += len(spoken_S)
    (root / "README").write_text("Fabricated: not the recordings of the real corpus.\n")
    (root / _COMPLETED).touch()
    return samples / voice.sampling_rate / 3600


def _write_text(path: Path, lines: Sequence[str], *, append: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
