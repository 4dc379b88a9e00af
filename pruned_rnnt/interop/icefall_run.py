"""A run from a model that was trained with icefall's Zipformer recipe."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from pruned_rnnt.config.load import load_config
from pruned_rnnt.config.written import as_override
from pruned_rnnt.data.tokens.tokenizer import (
    BLANK_ID,
    BLANK_SYMBOL,
    SOS_EOS_ID,
    SOS_EOS_SYMBOL,
    UNKNOWN_ID,
    UNKNOWN_SYMBOL,
    Tokenizer,
)
from pruned_rnnt.interop.icefall_model import (
    IcefallImport,
    IcefallSizes,
    icefall_sizes,
    import_icefall,
    read_icefall,
)
from pruned_rnnt.model.build_model import sized_model
from pruned_rnnt.model.parameter_values import describe_broken
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.train.engine.bad_steps import first_ids
from pruned_rnnt.train.experiment import ExperimentConfig, check_no_folder

logger = logging.getLogger(__name__)

# protobuf creates the classes of this module at import, so type checkers do not see them.
proto: Any = sentencepiece_model_pb2

_WORD_START = "▁"
_SPECIAL = [BLANK_SYMBOL, SOS_EOS_SYMBOL, UNKNOWN_SYMBOL]
_ENCODER = "model.encoder."
# Parts of our model that decoding needs.
_NEEDED = ("encoder.", "predictor.", "joiner.")


def read_token_file(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model with `vocab_size` outputs.

    Args:
        path: a SentencePiece model (`*.model`), or a text file of `SYMBOL ID` lines. The text file
            has all that decoding needs, but not how training split texts into symbols; texts are
            then split into as few symbols as possible. Symbols beyond `vocab_size` are ignored.

    Raises:
        ValueError: another kind of file, special symbols other than `<blk>`, `<sos/eos>` and
            `<unk>` at 0, 1 and 2, or another number of symbols.
        FileNotFoundError: `path` does not exist.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no tokens at {path}")
    model = _sentencepiece(path) if path.suffix == ".model" else _lines(path, vocab_size)
    if len(model.pieces) != vocab_size:
        raise ValueError(f"{path} has {len(model.pieces)} symbols, the model {vocab_size}")
    special = [piece.piece for piece in model.pieces[:3]]
    if special != _SPECIAL:
        raise ValueError(f"{path} has the symbols {special} at 0, 1 and 2, needs {_SPECIAL}")
    for index in (BLANK_ID, SOS_EOS_ID):
        model.pieces[index].type = proto.ModelProto.SentencePiece.CONTROL
    model.trainer_spec.unk_surface = f" {UNKNOWN_SYMBOL} "
    return Tokenizer(model.SerializeToString())


def _sentencepiece(path: Path) -> Any:
    model = proto.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's own error types are not part of its interface
        raise ValueError(f"{path} is not a SentencePiece model") from error
    return model


def _lines(path: Path, vocab_size: int) -> Any:
    symbols: dict[int, str] = {}
    try:
        # Not `splitlines`, nor `strip` of any space: a symbol may be U+0085 or U+3000.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        for number, line in enumerate(lines, start=1):
            symbol, _, id_text = line.rpartition(" ")
            symbol = symbol.strip(" ")
            if not symbol or not id_text.isdecimal():
                raise ValueError(f"{path}:{number}: needs `SYMBOL ID`, got {line!r}")
            symbols[int(id_text)] = symbol
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file of `SYMBOL ID` lines") from error
    missing = [index for index in range(vocab_size) if index not in symbols]
    if missing:
        raise ValueError(
            f"{path} has no symbol {missing[0]}, but the model has {vocab_size} symbols from 0 on"
        )
    model = proto.ModelProto()
    kinds = proto.ModelProto.SentencePiece
    for index in range(vocab_size):
        kind = kinds.UNKNOWN if index == UNKNOWN_ID else kinds.NORMAL
        model.pieces.add(piece=symbols[index], score=-1.0, type=kind)
    model.trainer_spec.model_type = proto.TrainerSpec.UNIGRAM
    model.trainer_spec.vocab_size = vocab_size
    model.trainer_spec.unk_id = UNKNOWN_ID
    model.trainer_spec.bos_id = model.trainer_spec.eos_id = model.trainer_spec.pad_id = -1
    # If no symbol starts a word, the symbols are characters of a language without spaces.
    model.normalizer_spec.add_dummy_prefix = any(_WORD_START in s for s in symbols.values())
    return model


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """The imported model in evaluation mode, its configuration and tokens, and what did not fit."""

    model: TransducerModel
    config: ExperimentConfig
    tokenizer: Tokenizer
    fit: IcefallImport


def read_run(
    checkpoint: Path,
    tokens: Path,
    output: Path,
    *,
    since: Path | None = None,
    trust: bool = False,
    overrides: Sequence[str] = (),
) -> ImportedRun:
    """Read a checkpoint as a run; writes nothing, and warns of parameters that no module here has.

    Args:
        checkpoint, since, trust: as for `read_icefall`.
        tokens: the recipe's bpe.model or tokens.txt.
        output: folder of the run, for its configuration.
        overrides: `section.key=value`; those of model.encoder set what cannot be read from the
            parameters.

    Raises:
        ValueError: files of another kind, or a model that ours cannot represent.
        FileNotFoundError: the checkpoint or the tokens do not exist.
        ConfigError: an override is wrong, or names another folder.
    """
    check_no_folder(overrides, output)
    if not checkpoint.is_file():
        raise FileNotFoundError(f"no checkpoint at {checkpoint}")
    parameters = read_icefall(checkpoint, since, trust=trust)
    if broken := describe_broken(parameters):
        raise ValueError(f"{checkpoint} cannot be used: {broken}")
    changes = _encoder_changes(overrides)
    try:
        sizes = icefall_sizes(parameters, **changes)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from error
    if not (sizes.vocab_size and sizes.predictor_dim and sizes.joiner_dim):
        raise ValueError(f"{checkpoint} is not a transducer: it has no decoder and joiner")
    tokenizer = read_token_file(tokens, sizes.vocab_size)
    config = load_config(ExperimentConfig, None, [*_settings(sizes, output), *overrides])
    model = sized_model(
        lambda: TransducerModel(config.model, sizes.vocab_size, config.loss),
        parameters,
        str(checkpoint),
    )
    fit = import_icefall(parameters, model)
    if fit.wrong_shape:
        raise ValueError(
            f"{checkpoint} does not fit: {'; '.join(fit.wrong_shape)}. The file does not hold all "
            "sizes, and the others are the recipe's: give those that differ to `pruned-rnnt "
            "import`, such as model.encoder.num_mel_bins=40 or model.encoder.position_head_dim=2"
        )
    missing = [name for name in fit.missing if name.startswith(_NEEDED)]
    if missing:
        raise ValueError(f"{checkpoint} lacks {', '.join(missing)}")
    if fit.unused:
        logger.warning(
            "%s: %d parameters ignored, because our model has none of these names: %s",
            checkpoint,
            len(fit.unused),
            first_ids(fit.unused),
        )
    model.load_state_dict(fit.state_dict)
    return ImportedRun(model=model.eval(), config=config, tokenizer=tokenizer, fit=fit)


def _encoder_changes(overrides: Sequence[str]) -> dict[str, Any]:
    named = [item for item in overrides if item.startswith(_ENCODER)]
    if not named:
        return {}
    kind = f"{_ENCODER}kind=zipformer"
    encoder = load_config(ExperimentConfig, None, [kind, *named]).model.encoder
    names = [item.removeprefix(_ENCODER).partition("=")[0] for item in named]
    return {name: getattr(encoder, name) for name in names}


def _settings(sizes: IcefallSizes, output: Path) -> list[str]:
    """The run's settings: the model's sizes, and the optimiser and schedule of the recipe."""
    encoder = [f"{_ENCODER}{name}={_plain(value)}" for name, value in vars(sizes.encoder).items()]
    return [
        *encoder,
        f"model.predictor.dim={sizes.predictor_dim}",
        f"model.predictor.context_size={sizes.context_size}",
        "model.predictor.balancers=true",
        f"model.joiner_dim={sizes.joiner_dim}",
        "model.joiner_initial_scale=0.25",
        f"loss.ctc_scale={0.2 if sizes.has_ctc else 0.0}",
        "loss.ctc_dropout=0.1",
        "optimiser.name=scaled_adam",
        "optimiser.learning_rate=0.045",
        "schedule.kind=eden",
        "schedule.warm_up_steps=500",
        as_override("train.folder", output),
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def describe(run: ImportedRun) -> list[str]:
    """The size of the model, and the names of the parameters that are random."""
    count = sum(parameter.numel() for parameter in run.model.parameters())
    lines = [f"wrote {run.config.folder}: Zipformer transducer, {count / 1e6:.1f} M parameters"]
    if run.fit.missing:
        names = ", ".join(run.fit.missing)
        lines.append(f"not in the checkpoint, so random (used only in training): {names}")
    return lines
