"""Real-time factors of exported models in sherpa-onnx on the CPU, beside our decoder in torch.

    pruned-rnnt export RUN --int8
    python -m scripts.export_speed RUN --audio DIRECTORY/*.wav --keep

Transcribes every file by itself with the models in every folder RUN/export/onnx*. The systems are
measured in turns, so that a change of the machine's speed affects all of them. A row holds the
median over the repeats of processing time divided by the audio's duration; loading and the first
file are not counted. `load` is the machine's load average before the rows: the machine must be idle
for valid times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export.onnx_folder import SETTINGS_NAME
from pruned_rnnt.export.verify import run_recognise
from pruned_rnnt.system.allocator import keep_freed_memory
from pruned_rnnt.train.run import LoadedModel, load_model, run_config
from pruned_rnnt.transcribe.recogniser import Recogniser
from scripts.benchmark.results import FOLDER, commit, machine


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system on one way of decoding.

    search: decode.method; streams have greedy search only.
    """

    model: str
    parameters: int
    decoding: str
    system: str
    precision: str
    threads: int
    real_time_factor: float
    files: int
    repeats: int
    load: float
    machine: str
    torch: str
    commit: str
    date: str
    search: str = "greedy"


# Names of searches here and in sherpa-onnx.
_SEARCHES = {"greedy": "greedy_search", "modified_beam": "modified_beam_search"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="with its exports in RUN/export")
    parser.add_argument("--audio", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--searches", nargs="+", default=["greedy"], choices=_SEARCHES)
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--keep", action="store_true", help="append to results/export.jsonl")
    options = parser.parse_args()
    keep_freed_memory()  # as the commands do
    if len(options.audio) < 2:
        parser.error("--audio needs two files at least: the first one warms up")
    folders = sorted(path.parent for path in options.run.glob(f"export/onnx*/{SETTINGS_NAME}"))
    if not folders:
        parser.error(f"no exports in {options.run}/export: pruned-rnnt export {options.run} --int8")
    loaded = load_model(run_config(options.run, ["train.device=cpu"]))
    here = machine("cpu")
    for folder, threads, search in itertools.product(folders, options.threads, options.searches):
        settings = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8"))
        if settings["streaming"] and search != "greedy":
            continue
        load = os.getloadavg()[0]
        job = _Job(options.audio, threads, search)
        systems: dict[str | None, Callable[[], float]] = {
            precision: partial(_sherpa_onnx, folder, precision, job)
            for precision in settings["precisions"]
        }
        systems[None] = _torch(loaded, settings, job)
        found: dict[str | None, list[float]] = {precision: [] for precision in systems}
        for _ in range(options.repeats):
            for precision, measure in systems.items():
                found[precision].append(measure())
        for precision, factors in found.items():
            row = Row(
                model=settings["source"],
                parameters=sum(p.numel() for p in loaded.model.parameters()),
                decoding=f"stream, chunks of {settings['chunk_seconds']} s"
                if settings["streaming"]
                else "whole utterances",
                system="torch" if precision is None else f"sherpa-onnx {version('sherpa-onnx')}",
                precision=precision or "fp32",
                threads=threads,
                real_time_factor=round(statistics.median(factors), 5),
                files=len(options.audio) - 1,
                repeats=options.repeats,
                load=round(load, 1),
                machine=here,
                torch=torch.__version__,
                commit=commit(),
                date=time.strftime("%Y-%m-%d"),
                search=search,
            )
            line = json.dumps(asdict(row))
            print(line, flush=True)
            if options.keep:
                with (FOLDER / "export.jsonl").open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


class _Job(NamedTuple):
    """What every system does."""

    audio: Sequence[Path]
    threads: int
    search: str


def _sherpa_onnx(folder: Path, precision: str, job: _Job) -> float:
    """The real-time factor of one pass over the files."""
    lines = run_recognise(
        folder, job.audio, precision, method=_SEARCHES[job.search], threads=job.threads
    )[1:]
    elapsed: float = sum(line["elapsed_seconds"] for line in lines)
    return elapsed / sum(line["audio_seconds"] for line in lines)


def _torch(loaded: LoadedModel, settings: dict[str, Any], job: _Job) -> Callable[[], float]:
    """A function that passes over the files once and returns the real-time factor."""
    sounds = [read_audio(path) for path in job.audio]
    recogniser = Recogniser(loaded.model, loaded.tokenizer, decode=DecodeConfig(method=job.search))

    def measure() -> float:
        torch.set_num_threads(job.threads)
        for index, samples_S in enumerate(sounds):
            if index == 1:
                begin = time.perf_counter()
            if settings["streaming"]:
                stream = recogniser.stream(
                    chunk=settings["chunk_frames"], left=settings["left_frames"]
                )
                stream.accept_waveform(samples_S)
                stream.finish()
                while recogniser.step([stream]):
                    pass
            else:
                # Texts, without the times of words, which sherpa-onnx does not compute.
                list(recogniser.transcribe_each([samples_S], words=False))
        elapsed = time.perf_counter() - begin
        return elapsed * SAMPLING_RATE / sum(map(len, sounds[1:]))

    return measure


if __name__ == "__main__":
    sys.exit(main())
