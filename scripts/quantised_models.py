"""Error rate, size and speed of a trained model's files of eight-bit and four-bit weights.

    python -m scripts.quantised_models RUN --data data/synthetic --large data/large/test --keep

Runs `pruned-rnnt export --precision P --calibrate DATA/train --measure DATA/test` for each
precision, and prints a row for each: what the command kept in float32, and the errors that it
counted. If it refuses, the row has the files with all layers quantised. Two more numbers come from
sherpa-onnx: the errors in a larger split (`--large`), because a difference of a few percent of the
errors is below one error on a small one, if asked with white noise added (`--snr`), because a model
that is trained for long makes few errors without; and the real-time factor on the first files of
DATA/test.
For this, float32 and both precisions pass over the files in turns, and each file counts with the
least of its times, in which other programs take the smallest part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch

from pruned_rnnt.data.audio.waveform import add_white_noise
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.decode.scoring.error_rates import Transcript
from pruned_rnnt.export.onnx_folder import SETTINGS_NAME
from pruned_rnnt.export.precision import QUANTISED
from pruned_rnnt.export.verify import run_recognise
from pruned_rnnt.quantise.measurements import FileErrors, errors_of
from pruned_rnnt.train.run import load_model, run_config
from scripts.benchmark.results import commit, committed, machine

# Paths in one command line, which has a limited length.
_PATHS_AT_ONCE = 1000
# Percent; with such a bound, the command keeps no layer and refuses nothing.
_NO_BOUND = "1e6"


@dataclass(frozen=True, kw_only=True)
class SetErrors:
    """Errors of a precision in a set, beside those of float32; rates as fractions."""

    name: str
    system: str
    words: int
    errors: int
    fp32_errors: int
    difference: float
    lower: float
    upper: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model in one precision.

    bytes, fp32_bytes: of all ONNX files of the precision, and of float32.
    layers, kept: number of layers that could be quantised, and those that the command kept.
    refused: whether the command found no files within its bound; the numbers are then those of
        files with all layers quantised.
    measured: errors that the command counted; None for float32.
    large: errors in the large split in sherpa-onnx.
    real_time_factors: of sherpa-onnx, by threads.
    """

    model: str
    encoder: str
    parameters: int
    steps: int
    decoding: str
    precision: str
    bytes: int
    fp32_bytes: int
    layers: int
    kept: Sequence[str] = ()
    refused: bool = False
    measured: SetErrors | None = None
    large: SetErrors | None = None
    real_time_factors: Mapping[str, float] = field(default_factory=dict)
    files: int = 0
    repeats: int = 0
    load: float
    sherpa_onnx: str
    machine: str
    torch: str
    commit: str
    date: str


class Speech(NamedTuple):
    """Recordings with their texts."""

    name: str
    paths: Sequence[Path]
    texts: Sequence[str]

    @classmethod
    def of(cls, split: Path) -> Speech:
        """The recordings of DATA/SPLIT; each must be one utterance."""
        cuts = list(PreparedFolder(split.parent).cuts(split.name))
        for cut in cuts:
            if cut.start or cut.duration != cut.recording.duration:
                raise ValueError(f"{split}: {cut.id} is a part of a recording")
        return cls(
            f"{split.parent.name} {split.name}",
            [Path(cut.recording.sources[0].source) for cut in cuts],
            [cut.supervisions[0].text for cut in cuts],
        )

    def with_noise(self, snr_db: float, folder: Path) -> Speech:
        """Copies in a new folder, with white noise of a power relative to that of the recording."""
        folder.mkdir()
        generator = np.random.default_rng(0)
        paths = [folder / f"{n}.wav" for n in range(len(self.paths))]
        for old, new in zip(self.paths, paths, strict=True):
            samples_S, rate = soundfile.read(old, dtype="float32")
            level_db = 10 * np.log10(np.mean(samples_S**2)) - snr_db
            soundfile.write(new, add_white_noise(samples_S, level_db, generator), rate)
        return Speech(f"{self.name}, noise at {snr_db:g} dB", paths, self.texts)

    def errors(self, folder: Path, precision: str) -> FileErrors:
        """Decoded by sherpa-onnx."""
        lines = []
        for begin in range(0, len(self.paths), _PATHS_AT_ONCE):
            lines += run_recognise(folder, self.paths[begin : begin + _PATHS_AT_ONCE], precision)
        return errors_of(
            Transcript(
                id=str(path), reference=tuple(text.split()), hypothesis=tuple(line["text"].split())
            )
            for path, text, line in zip(self.paths, self.texts, lines, strict=True)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--data", type=Path, required=True, metavar="DATA", help="train and test")
    parser.add_argument("--large", type=Path, metavar="DATA/SPLIT", help="more test utterances")
    parser.add_argument("--snr", type=float, metavar="DB", help="add noise to --large")
    parser.add_argument("--name", help="in the rows (default: that of the folder)")
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], metavar="N")
    parser.add_argument("--files", type=int, default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--keep", action="store_true", help="append to results/quantised.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for row in rows(options, Path(place)):
            line = json.dumps(asdict(row))
            print(line, flush=True)
            if options.keep:
                with committed("quantised").open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


def rows(options: argparse.Namespace, place: Path) -> list[Row]:
    """A row for float32 and for each quantised precision."""
    load = os.getloadavg()[0]
    refused = {name: _export(options, place / name, name) for name in QUANTISED}
    folders = {"fp32": place / QUANTISED[0], **{name: place / name for name in QUANTISED}}
    settings = json.loads((folders["fp32"] / SETTINGS_NAME).read_text(encoding="utf-8"))
    loaded = load_model(run_config(options.run, ["train.device=cpu"]))
    speech = Speech.of(options.data / "test")
    factors = _real_time_factors(options, folders, speech.paths[: options.files])
    large, found = None, {}
    if options.large is not None:
        large = Speech.of(options.large)
        if options.snr is not None:
            large = large.with_noise(options.snr, place / "noisy")
        found = {name: large.errors(folder, name) for name, folder in folders.items()}
    result = []
    for precision, folder in folders.items():
        stored = _stored(folder, precision)
        row = Row(
            model=options.name or options.run.name,
            encoder=loaded.model.config.encoder.kind,
            parameters=sum(p.numel() for p in loaded.model.parameters()),
            steps=loaded.step,
            decoding=f"stream, chunks of {settings['chunk_seconds']} s"
            if options.streaming
            else "whole utterances",
            precision=precision,
            bytes=_bytes(folder, precision),
            fp32_bytes=_bytes(folder, "fp32"),
            layers=stored.get("layers", 0),
            kept=[f"{each['graph']} {each['name']}" for each in stored.get("kept", ())],
            refused=refused.get(precision, False),
            measured=_measured(stored) if stored else None,
            large=_set_errors(large.name, found[precision], found["fp32"]) if large else None,
            real_time_factors=factors[precision],
            files=options.files,
            repeats=options.repeats,
            load=round(load, 1),
            sherpa_onnx=version("sherpa-onnx"),
            machine=machine("cpu"),
            torch=torch.__version__,
            commit=commit(),
            date=time.strftime("%Y-%m-%d"),
        )
        result.append(row)
    return result


def _export(options: argparse.Namespace, folder: Path, precision: str) -> bool:
    """Export with the command's default bound; without one, and True, if it refuses."""
    command = [sys.executable, "-m", "pruned_rnnt", "export", str(options.run), "train.device=cpu"]
    command += ["--output", str(folder), "--precision", precision]
    command += ["--calibrate", str(options.data / "train")]
    command += ["--measure", str(options.data / "test")]
    command += ["--streaming"] * options.streaming
    done = subprocess.run(command, check=False, stdout=sys.stderr)
    if done.returncode:
        subprocess.run([*command, "--max-wer-increase", _NO_BOUND], check=True, stdout=sys.stderr)
    return bool(done.returncode)


def _stored(folder: Path, precision: str) -> dict[str, Any]:
    """What the command measured; empty for float32."""
    settings = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8"))
    stored: dict[str, Any] = settings["quantisation"].get(precision, {})
    return stored


def _measured(stored: Mapping[str, Any]) -> SetErrors:
    names = ("words", "errors", "fp32_errors", "difference", "lower", "upper")
    return SetErrors(
        name=stored["measured_on"],
        system=f"onnxruntime {version('onnxruntime')}",
        **{name: stored[name] for name in names},
    )


def _set_errors(name: str, found: FileErrors, exact: FileErrors) -> SetErrors:
    difference = found.minus(exact)
    return SetErrors(
        name=name,
        system=f"sherpa-onnx {version('sherpa-onnx')}",
        words=exact.counts.reference_words,
        errors=found.counts.errors,
        fp32_errors=exact.counts.errors,
        difference=difference.difference,
        lower=difference.lower,
        upper=difference.upper,
    )


def _bytes(folder: Path, precision: str) -> int:
    files = folder.glob("*.onnx" if precision == "fp32" else f"*.{precision}.onnx")
    return sum(file.stat().st_size for file in files if precision != "fp32" or "." not in file.stem)


def _real_time_factors(
    options: argparse.Namespace, folders: Mapping[str, Path], audio: Sequence[Path]
) -> dict[str, dict[str, float]]:
    """By precision and threads; the first file warms up, and is not counted."""
    found: dict[str, dict[str, float]] = {precision: {} for precision in folders}
    for threads in options.threads:
        passes: dict[str, list[list[float]]] = {precision: [] for precision in folders}
        for _ in range(options.repeats):
            for precision, folder in folders.items():
                lines = run_recognise(folder, audio, precision, threads=threads)[1:]
                passes[precision].append([line["elapsed_seconds"] for line in lines])
        seconds = sum(line["audio_seconds"] for line in lines)
        for precision, times in passes.items():
            least = sum(map(min, zip(*times, strict=True)))
            found[precision][str(threads)] = round(least / seconds, 5)
    return found


if __name__ == "__main__":
    main()
