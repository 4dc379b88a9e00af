"""Load the model that fine-tuning starts from: a run, a model file, or an icefall checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pruned_rnnt.config import ConfigError, load_config
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.export import model_file
from pruned_rnnt.interop.icefall.imported_run import read_run
from pruned_rnnt.model.saved_file import UnusableFileError, read_saved
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.train.engine import checkpoint
from pruned_rnnt.train.experiment import CONFIG_NAME, ExperimentConfig
from pruned_rnnt.train.finetune_config import FinetuneConfig
from pruned_rnnt.train.run import load_model, run_config

# Training settings for a model file, which has none.
_ZIPFORMER_TRAINING = (
    "optimiser.name=scaled_adam",
    "optimiser.learning_rate=0.045",
    "train.precision=bfloat16",
)
_TOKEN_FILES = ("bpe.model", "tokens.txt")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained model on the CPU in evaluation mode.

    name: for the log, and for the folder of the new run.
    config: with its sections model and loss, and for a run all others.
    data_path: the data that it was trained on; empty if unknown.
    """

    name: str
    model: SpeechModel
    tokenizer: Tokenizer
    config: ExperimentConfig
    data_path: str = ""


def load_source(path: Path, config: FinetuneConfig) -> Source:
    """Load the source at `path`.

    Args:
        path: the folder of a run, one of its checkpoints, a file or folder that `pruned-rnnt
            export --format torch` wrote, or an icefall checkpoint.
        config: which checkpoint of a run, and the tokens of an icefall checkpoint.

    Raises:
        ConfigError: there is nothing at the path, or no tokens.
        ValueError: the file cannot be used; the message says why.
    """
    if not path.exists():
        raise ConfigError(
            f"train.init={path}: there is no such run or file. To continue a run that was started "
            "from it: pruned-rnnt train RUN"
        )
    if (path / CONFIG_NAME).is_file():
        return _run(path, config.checkpoint)
    if path.is_dir() or _format_of(path) == model_file.FORMAT:
        return _model_file(path)
    if _format_of(path) == checkpoint.FORMAT:
        folder = next((p for p in path.parents if (p / CONFIG_NAME).is_file()), None)
        if folder is None:
            raise ConfigError(f"train.init={path}: the checkpoint is not in the folder of its run")
        return _run(folder, str(path))
    return _icefall(path, config)


def _run(folder: Path, which: str) -> Source:
    config = run_config(folder, [f"decode.checkpoint={which}", "train.device=cpu"])
    loaded = load_model(config)
    return Source(
        name=folder.resolve().name,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        config=run_config(folder),
        data_path=config.data.path,
    )


def _model_file(path: Path) -> Source:
    loaded = model_file.load_model(path)
    is_zipformer = loaded.model.config.encoder.kind == "zipformer"
    training = load_config(ExperimentConfig, None, _ZIPFORMER_TRAINING if is_zipformer else ())
    config = ExperimentConfig(
        model=loaded.model.config,
        loss=loaded.model.loss_config,
        optimiser=training.optimiser,
        train=training.train,
    )
    name = path.resolve().name if path.is_dir() else path.stem
    return Source(name=name, model=loaded.model, tokenizer=loaded.tokenizer, config=config)


def _icefall(path: Path, config: FinetuneConfig) -> Source:
    tokens = Path(config.tokens) if config.tokens else _tokens_beside(path)
    run = read_run(path, tokens, Path("exp/icefall"), trust=config.trust)
    return Source(name=path.stem, model=run.model, tokenizer=run.tokenizer, config=run.config)


def _tokens_beside(path: Path) -> Path:
    """The tokens of an icefall checkpoint, in its folder or the one above."""
    folders = [path.parent, path.resolve().parent.parent]
    candidates = [folder / name for folder in folders for name in _TOKEN_FILES]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise ConfigError(
            f"train.init={path}: there is no {' or '.join(_TOKEN_FILES)} beside this icefall "
            "checkpoint: name the file with finetune.tokens=FILE"
        )
    return found


def _format_of(path: Path) -> str:
    """The format that a file of this package names; empty for other files."""
    try:
        values = read_saved(path, "model")
    except UnusableFileError:
        return ""  # the reader of icefall's checkpoints reports the error
    return str(values.get("format", "")) if isinstance(values, dict) else ""
