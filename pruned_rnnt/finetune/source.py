"""Load the model that fine-tuning starts from: a run, a model file, or one of another toolkit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pruned_rnnt.config.load import ConfigError, load_config
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.filters import FilterConfig
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.export import model_file
from pruned_rnnt.interop.icefall.imported_run import read_run
from pruned_rnnt.interop.nemo import imported_run as nemo
from pruned_rnnt.interop.nemo.source_files import WEIGHTS
from pruned_rnnt.licences.chain import Chain, Origin, chain_of_weights
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.pretrained.found_model import FoundModel, NoModelError, find_model
from pruned_rnnt.pretrained.hub import HubError, local_path
from pruned_rnnt.train.experiment import ExperimentConfig, FinetuneConfig
from pruned_rnnt.train.run import load_model, run_config
from pruned_rnnt.train.run_chain import chain_of_run, with_itself

# Training settings for a model file, which has none.
_ZIPFORMER_TRAINING = (
    "optimiser.name=scaled_adam",
    "optimiser.learning_rate=0.045",
    "train.precision=bfloat16",
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained model on the CPU in evaluation mode.

    name: for the log, and for the folder of the new run.
    config: with its sections model and loss, and for a run all others.
    data_path: the data that it was trained on; empty if unknown.
    origins: what it was made from, and itself.
    """

    name: str
    model: SpeechModel
    tokenizer: Tokenizer
    config: ExperimentConfig
    data_path: str = ""
    origins: tuple[Origin, ...] = ()

    def __post_init__(self) -> None:
        # Now, not after the source has decoded its test sets.
        self.model.encoder.check_trainable()


def load_source(path: Path, config: FinetuneConfig) -> Source:
    """Load the source at `path`.

    Args:
        path: the folder of a run, one of its checkpoints, a file or folder that `pruned-rnnt
            export --format torch` wrote, an icefall checkpoint, a `.nemo` archive, a folder of
            transformers, or the name of a repository of the hub with one of these.
        config: which checkpoint of a run, and the tokens of an icefall checkpoint.

    Raises:
        ConfigError: the path does not exist, or there are no tokens.
        ValueError: the file cannot be used; the message has the reason.
    """
    named = path
    try:
        path = local_path(path)
    except HubError as error:
        raise ConfigError(f"train.init={path}: {error}") from error
    source = "" if path == named else f"Hugging Face hub, {named}"
    if not path.exists():
        raise ConfigError(
            f"train.init={path}: there is no such run or file. To continue a run that was started "
            "from it: pruned-rnnt train RUN"
        )
    tokens = Path(config.tokens) if config.tokens else None
    try:
        found = find_model(path, tokens)
    except NoModelError as error:
        raise ConfigError(
            f"train.init={error} (finetune.tokens=FILE names the tokens of an icefall checkpoint)"
        ) from error
    if found.kind == "run":
        return _run(found.path, str(found.checkpoint or config.checkpoint))
    if found.kind == "file":
        return _model_file(path, found.path, source)
    if found.kind == "onnx":
        raise ConfigError(
            f"train.init={path}: ONNX files cannot be trained; name the run or its model.pt"
        )
    if found.kind == "nemo":
        return _nemo(found.path, source)
    return _icefall(found, source, trust=config.trust)


def _run(folder: Path, which: str) -> Source:
    config = run_config(folder, [f"decode.checkpoint={which}", "train.device=cpu"])
    loaded = load_model(config)
    name = folder.resolve().name
    return Source(
        name=name,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        config=run_config(folder),
        data_path=config.data.path,
        origins=with_itself(chain_of_run(run_config(folder)), name, loaded.model),
    )


def _model_file(path: Path, file: Path, source: str) -> Source:
    loaded = model_file.load_model(file)
    is_zipformer = loaded.model.config.encoder.kind == "zipformer"
    training = load_config(ExperimentConfig, None, _ZIPFORMER_TRAINING if is_zipformer else ())
    features = loaded.model.config.encoder.features
    filters = FilterConfig(subsampling_factor=loaded.model.encoder.subsampling_factor)
    config = ExperimentConfig(
        data=DataConfig(features="stored" if features == "fbank" else "waveform", filters=filters),
        model=loaded.model.config,
        loss=loaded.model.loss_config,
        optimiser=training.optimiser,
        train=training.train,
    )
    name = path.resolve().name if path.is_dir() else path.stem
    return Source(
        name=name,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        config=config,
        origins=with_itself(loaded.chain or Chain(), name, loaded.model, source),
    )


def _icefall(found: FoundModel, source: str, *, trust: bool) -> Source:
    assert found.tokens is not None
    path = found.path
    run = read_run(path, found.tokens, Path("exp/icefall"), trust=trust)
    return Source(
        name=path.stem,
        model=run.model,
        tokenizer=run.tokenizer,
        config=run.config,
        origins=chain_of_weights(path, source=source),
    )


def _nemo(path: Path, source: str) -> Source:
    run = nemo.read_run(path, Path("exp/nemo"))
    weights = path if path.is_file() else path / WEIGHTS
    return Source(
        name=path.resolve().stem,
        model=run.model,
        tokenizer=run.tokenizer,
        config=run.config,
        origins=chain_of_weights(weights, source=source),
    )
