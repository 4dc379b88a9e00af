"""Error rates of fine-tuning a .nemo archive, by the commands of the tutorial on Parakeet.

    python -m scripts.finetune_nemo FSDD --folder WORK --keep

FSDD: the folder of recordings of `prepare fsdd --source`. A small FastConformer, as a hybrid TDT
model, stands in for published archives: this script trains it on the utterances of
`prepare synthetic` and exports it to a .nemo archive. It is then fine-tuned to the connected digits
of `prepare fsdd`, real recordings of four speakers, as the tutorial does. Both corpora are written
as recordings with a table, the input of `prepare own`. Minutes on a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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
from pruned_rnnt.interop.nemo.imported_model import import_model
from pruned_rnnt.run.folder import RunFolder
from scripts.benchmark.results import append, commit, committed, machine

_COUNTS = {"synthetic": {"train": 2400, "dev": 60, "test": 300}}
_COUNTS["fsdd"] = {"train": 1500, "dev": 60, "test": 500}
_SEED = 42
_SOURCE_STEPS, _STEPS = 2500, 400
_MODEL = (
    "model.encoder.kind=fastconformer",
    "model.encoder.num_mel_bins=80",
    "model.encoder.layers=4",
    "model.encoder.dim=192",
    "model.encoder.heads=4",
    "model.encoder.feedforward_dim=768",
    "model.encoder.subsampling_channels=64",
    "model.encoder.dropout=0",
    "model.predictor.kind=lstm",
    "loss.kind=full",
    "loss.durations=[0,1,2,3,4]",
    "loss.ctc_scale=0.3",
    "optimiser.learning_rate=2e-3",
    "schedule.warm_up_steps=500",
    "train.validate_every=500",
    "data.joining.probability=0",
    "data.joining.silence_probability=0",
)
# Long masks would hide whole words of these short utterances.
_COMMON = (
    "data.max_duration=120",
    "data.num_workers=4",
    "data.augmentation.spec_augment.frame_mask_size=8",
)
# The name in the table, and what is added to the command. The symbols of the stand-in do not spell
# "zero": its texts have no z.
_NEW = ("optimiser.learning_rate=2e-3", "finetune.vocabulary=replace")
_VARIANTS = {"all parameters": _NEW, "adapters": (*_NEW, "finetune.lora.rank=16")}


@dataclass(frozen=True, kw_only=True)
class FinetunedRow:
    """Errors in the test set of a variant, before and after.

    what: settings that are added.
    """

    case: str
    what: str
    parameters: int
    source_steps: int
    steps: int
    words: int
    errors_before: int
    errors_after: int
    system: str = "pruned_rnnt"
    machine: str = field(default_factory=lambda: machine(_device()))
    torch: str = torch.__version__
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())


def _device() -> str:
    """Where the commands train."""
    return "cuda" if torch.cuda.is_available() else "cpu"


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
    """Prepare the data with new symbols and fine-tune the archive, as the tutorial does."""
    settings = _VARIANTS[name]
    data = folder / "data/fsdd"
    if not data.exists():
        _run("prepare", "own", folder / "fsdd/table.tsv", "--features", "waveform",
             "--tokens", "bpe", "--vocab-size", "40", "--output", data)  # fmt: skip
    run = folder / name.replace(" ", "-")
    _run("finetune", archive, data, *settings, f"train.steps={_STEPS}", f"train.folder={run}",
         *_COMMON)  # fmt: skip
    results = json.loads(RunFolder(run).finetuning.read_text(encoding="utf-8"))
    (found,) = (each for each in results["sets"] if each["domain"] == "new")
    # An import has the parameters of the archive.
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
            yield (
                split,
                draw_utterance(pool, split=split, index=index, seed=_SEED, variation=variation),
            )


def _run(*arguments: Any) -> None:
    command = [sys.executable, "-m", "pruned_rnnt", *map(str, arguments)]
    print("$ pruned-rnnt", *arguments, flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
