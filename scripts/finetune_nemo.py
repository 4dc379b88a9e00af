"""Error rates of fine-tuning a .nemo archive, by the commands of the tutorial on Parakeet.

    python -m scripts.finetune_nemo FSDD --folder WORK --keep

FSDD: the folder of recordings of `prepare fsdd --source`. Published archives are too large for a
test on a CPU: a small FastConformer with an LSTM predictor stands in for them, which this script
trains on the utterances of `prepare synthetic` and exports to a .nemo archive. It is then
fine-tuned to the connected digits of `prepare fsdd`, real recordings of four speakers, as the
tutorial does. Both corpora are written as recordings with a table, the input of `prepare own`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import soundfile
import torch
from pruned_rnnt.recipes.fsdd.connected import DigitPool, Variation, draw_utterance
from pruned_rnnt.recipes.fsdd.recordings import read_recordings
from pruned_rnnt.recipes.fsdd.splits import split_recordings
from pruned_rnnt.recipes.synthetic.prepare import SAMPLING_RATE, make_utterance

from pruned_rnnt.data.prepare.generated_corpus import Utterance
from pruned_rnnt.data.prepare.speech_synthesis import SpeechEngine
from pruned_rnnt.run.folder import RunFolder
from scripts.benchmark.results import append, commit, committed, machine

_COUNTS = {"synthetic": {"train": 2400, "dev": 60, "test": 300}}
_COUNTS["fsdd"] = {"train": 1500, "dev": 60, "test": 500}
_SEED = 42
_SOURCE_STEPS, _STEPS = 1000, 300
# A small model for short utterances; the rest is as for `own`.
_MODEL = (
    "model.encoder.kind=fastconformer",
    "model.encoder.num_mel_bins=80",
    "model.encoder.layers=4",
    "model.encoder.dim=128",
    "model.encoder.heads=4",
    "model.encoder.feedforward_dim=512",
    "model.encoder.subsampling_channels=64",
    "model.predictor.kind=lstm",
    "model.predictor.dim=128",
    "model.joiner_dim=128",
    "loss.kind=full",
    "optimiser.learning_rate=4e-3",
    "schedule.warm_up_steps=100",
)
_COMMON = ("train.device=cpu", "data.max_duration=60", "data.num_workers=0")
# The name in the table, and what the tutorial adds to the command.
_VARIANTS = {
    "its symbols": (),
    "new symbols": ("finetune.vocabulary=replace",),
    "new symbols, adapters": (
        "finetune.vocabulary=replace",
        "finetune.lora.rank=16",
        "optimiser.learning_rate=2e-3",
    ),
}


@dataclass(frozen=True, kw_only=True)
class FinetunedRow:
    """Errors in the test set of a variant, before and after.

    what: settings that the tutorial adds; seconds: of the whole command, with decoding.
    """

    case: str
    what: str
    parameters: int
    source_steps: int
    steps: int
    words: int
    errors_before: int
    errors_after: int
    seconds: float
    system: str = "pruned_rnnt"
    machine: str = field(default_factory=lambda: machine("cpu"))
    torch: str = torch.__version__
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.finetune_nemo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("fsdd", type=Path, metavar="FSDD")
    parser.add_argument("--folder", type=Path, required=True, help="where data and runs are kept")
    parser.add_argument("--keep", action="store_true", help="append the rows to those in git")
    options = parser.parse_args(arguments)
    archive = source_archive(options.folder)
    if not (options.folder / "fsdd").exists():
        write_table(options.folder / "fsdd", _digits(options.fsdd))
    rows = [finetuned(options.folder, archive, name) for name in _VARIANTS]
    for row in rows:
        print(row)
    if options.keep:
        append(rows, committed("finetune_nemo"))


def source_archive(folder: Path) -> Path:
    """Train the stand-in, unless that is done; returns its archive."""
    archive = folder / "source/export/nemo/model.nemo"
    if archive.exists():
        return archive
    write_table(folder / "synthetic", _commands())
    data, run = folder / "data/synthetic", folder / "source"
    _run("prepare", "own", folder / "synthetic/table.tsv", "--features", "waveform",
         "--tokens", "unigram", "--vocab-size", "120", "--output", data)  # fmt: skip
    _run("train", "--config", "own", f"data.path={data}", f"train.folder={run}",
         f"train.steps={_SOURCE_STEPS}", "data.features=waveform", *_MODEL, *_COMMON)  # fmt: skip
    _run("decode", run)
    _run("export", run, "--format", "nemo")
    return archive


def finetuned(folder: Path, archive: Path, name: str) -> FinetunedRow:
    """Prepare the data and fine-tune the archive, as the tutorial does."""
    settings = _VARIANTS[name]
    has_new_symbols = "finetune.vocabulary=replace" in settings
    imported, data = folder / "imported", folder / f"data/{'new' if has_new_symbols else 'own'}"
    if not imported.exists():
        _run("import", archive, imported)
    symbols = ("--tokens", "bpe", "--vocab-size", "40")
    if not has_new_symbols:
        symbols = ("--tokenizer-from", str(imported))
    if not data.exists():
        table = folder / "fsdd/table.tsv"
        _run("prepare", "own", table, "--features", "waveform", *symbols, "--output", data)
    run = folder / name.replace(", ", "-").replace(" ", "-")
    began = time.monotonic()
    _run("finetune", archive, data, *settings, f"train.steps={_STEPS}", f"train.folder={run}",
         *_COMMON)  # fmt: skip
    seconds = time.monotonic() - began
    results = json.loads(RunFolder(run).finetuning.read_text(encoding="utf-8"))
    (found,) = (each for each in results["sets"] if each["domain"] == "new")
    # An import has the parameters of the archive.
    from pruned_rnnt.interop.nemo.imported_model import import_model

    model = import_model(archive).model
    return FinetunedRow(
        case=name,
        what=" ".join(settings),
        parameters=sum(x.numel() for x in model.parameters()),
        source_steps=_SOURCE_STEPS,
        steps=_STEPS,
        words=found["after"]["words"],
        errors_before=found["before"]["errors"],
        errors_after=found["after"]["errors"],
        seconds=round(seconds, 1),
    )


def write_table(folder: Path, utterances: Iterable[tuple[str, Utterance]]) -> None:
    """Write recordings and table.tsv for `prepare own`, from pairs of split and utterance."""
    folder.mkdir(parents=True)
    lines = ["path\ttext\tspeaker\tsplit\n"]
    for split, utterance in utterances:
        soundfile.write(folder / f"{utterance.id}.wav", utterance.samples_S, SAMPLING_RATE)
        lines.append(f"{utterance.id}.wav\t{utterance.text}\t{utterance.speaker}\t{split}\n")
    (folder / "table.tsv").write_text("".join(lines), encoding="utf-8")


def _commands() -> Iterable[tuple[str, Utterance]]:
    engine = SpeechEngine()
    for split, count in _COUNTS["synthetic"].items():
        for index in range(count):
            yield split, make_utterance(engine, split, index, _SEED)


def _digits(source: Path) -> Iterable[tuple[str, Utterance]]:
    recordings, _ = read_recordings(source)
    for split, members in split_recordings(recordings, ()).items():
        pool, variation = DigitPool(members), Variation()
        for index in range(_COUNTS["fsdd"][split]):
            yield split, draw_utterance(
                pool, split=split, index=index, seed=_SEED, variation=variation
            )


def _run(*arguments: Any) -> None:
    command = [sys.executable, "-m", "pruned_rnnt", *map(str, arguments)]
    print("$ pruned-rnnt", *arguments, flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
