"""A prepared data folder that is so simple that a tiny model learns it in seconds.

Every word is a fixed pattern over the mel bins, repeated for some frames, with silence between
words. No word occurs twice in an utterance.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lhotse import CutSet, Features, MonoCut, SupervisionSegment
from lhotse.features.io import NumpyFilesWriter

from pruned_rnnt.cli import main
from pruned_rnnt.config.load import load_config
from pruned_rnnt.data.input.prepared_folder import write_report
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.trainer import Trainer
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.pretrained_encoder import whole_config
from pruned_rnnt.train.tasks.speech_task import SpeechTask

WORDS = ("red", "green", "blue")
BINS = 80
SILENCE = -12.0


def make_corpus(
    folder: Path,
    train: int = 32,
    dev: int = 6,
    seed: int = 0,
    *,
    words: tuple[str, ...] = WORDS,
    prefix: str = "",
    tokens_from: Path | None = None,
) -> Path:
    """Write the splits train, dev and test, and return `folder`; utterances have 1 to 3 words.

    Args:
        seed: of the patterns of the words, and of the utterances.
        prefix: of the utterances' ids.
        tokens_from: another such folder.
    """
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    patterns = {word: rng.uniform(-10, 2, size=BINS).astype(np.float32) for word in words}
    texts = []
    with NumpyFilesWriter(folder / "features") as writer:
        for split, count in (("train", train), ("dev", dev), ("test", dev)):
            cuts = []
            for index in range(count):
                spoken = [str(word) for word in rng.permutation(words)[: rng.integers(1, 4)]]
                texts.append(" ".join(spoken))
                name = f"{prefix}{split}-{index}"
                cuts.append(_cut(name, spoken, patterns, rng, writer, folder))
            CutSet.from_cuts(cuts).to_file(folder / f"{split}_cuts.jsonl.gz")
    if tokens_from is not None:
        tokenizer = Tokenizer.load(tokens_from / "tokens")
    else:
        tokenizer = train_tokenizer(texts, TokenizerConfig(kind="word", vocab_size=50))
    tokenizer.save(folder / "tokens")
    write_report(folder, {"command": "tests"})
    return folder


CONFORMER = [
    "model.encoder.layers=1",
    "model.encoder.dim=32",
    "model.encoder.heads=2",
    "model.encoder.feedforward_dim=32",
    "model.encoder.kernel_size=5",
    "model.encoder.subsampling_channels=4",
    "model.predictor.dim=16",
    "model.joiner_dim=32",
]
ZIPFORMER = [
    "model.encoder.downsampling=[1,2]",
    "model.encoder.layers=[1,1]",
    "model.encoder.dims=[16,24]",
    "model.encoder.unmasked_dims=[8,12]",
    "model.encoder.feedforward_dims=[16,24]",
    "model.encoder.heads=[2,2]",
    "model.encoder.kernel_sizes=[7,7]",
    "model.encoder.query_head_dim=4",
    "model.encoder.value_head_dim=4",
]


def tiny_experiment(corpus: Path, run: Path, *overrides: str) -> ExperimentConfig:
    """An experiment on `corpus` that runs for a second or two."""
    return load_config(ExperimentConfig, None, tiny_overrides(corpus, run, *overrides))


def tiny_overrides(corpus: Path, run: Path, *overrides: str) -> list[str]:
    """The settings of `tiny_experiment`, as arguments of the command line."""
    return [
        f"data.path={corpus}",
        "data.num_workers=0",
        "data.max_duration=8",
        "data.num_buckets=2",
        "data.augmentation.spec_augment.enabled=false",
        f"train.folder={run}",
        "train.steps=4",
        "train.log_every=1",
        "train.device=cpu",
        "train.loggers=[]",  # half of the time would be figures
        *CONFORMER,
        "loss.warm_up_steps=20",
        "schedule.warm_up_steps=5",
        *overrides,
    ]


def trained_run(corpus: Path, folder: Path, *overrides: str) -> Path:
    """The folder of a run that `pruned-rnnt train` trained on the CPU."""
    assert main(["train", *tiny_overrides(corpus, folder, *overrides)]) == 0
    return folder


def _cut(
    name: str,
    words: list[str],
    patterns: dict[str, np.ndarray],
    rng: np.random.Generator,
    writer: NumpyFilesWriter,
    folder: Path,
) -> MonoCut:
    pieces = [np.full((6, BINS), SILENCE, dtype=np.float32)]
    for word in words:
        pieces.append(np.tile(patterns[word], (int(rng.integers(12, 20)), 1)))
        pieces.append(np.full((int(rng.integers(8, 13)), BINS), SILENCE, dtype=np.float32))
    features_TF = np.concatenate(pieces)
    features_TF = features_TF + 0.3 * rng.standard_normal(features_TF.shape).astype(np.float32)
    duration = round(len(features_TF) * 0.01, 2)
    stored = Features(
        type="fbank",
        num_frames=len(features_TF),
        num_features=BINS,
        frame_shift=0.01,
        sampling_rate=16000,
        start=0.0,
        duration=duration,
        storage_type=writer.name,
        storage_path=str(Path(writer.storage_path).relative_to(folder)),
        storage_key=writer.write(name, features_TF),
        channels=0,
    )
    supervision = SupervisionSegment(
        id=name, recording_id=name, start=0.0, duration=duration, text=" ".join(words)
    )
    return MonoCut(
        id=name,
        start=0.0,
        duration=duration,
        channel=0,
        features=stored,
        supervisions=[supervision],
    )


def speech_trainer(
    config: ExperimentConfig, ranks: Ranks | None = None, *, allow_changes: bool = False
) -> Trainer:
    """The trainer of a recogniser, as `pruned-rnnt train` makes it."""
    config = whole_config(config)
    return Trainer(config, ranks, allow_changes=allow_changes, make_task=SpeechTask)
