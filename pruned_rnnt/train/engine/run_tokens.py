"""The tokens of a run: those of the data that it started with, which its checkpoints need."""

from __future__ import annotations

from pathlib import Path

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.data.tokens.tokenizer import Tokenizer

_FOLDER = "tokens"


def check_tokens(tokenizer: Tokenizer, run: Path, data: str) -> None:
    """Raise an error if data have other tokens than a run.

    Args:
        tokenizer: of the data.
        run: folder of the run, which need not exist.
        data: folder of the data, for the message.

    Raises:
        ConfigError: the run has other tokens.
        ValueError: the run's tokens are damaged.
    """
    if not _has_tokens(run):
        return
    own = run_tokenizer(run).symbols
    if tokenizer.symbols != own:
        raise ConfigError(
            f"the tokens of data.path={data} ({len(tokenizer)} symbols) differ from those of the "
            f"run {run} ({len(own)} symbols): use data prepared with the run's tokens, or choose "
            "another train.folder"
        )


def run_tokenizer(run: Path) -> Tokenizer:
    """The tokens of a run.

    Raises:
        FileNotFoundError: it has none.
        ValueError: they are damaged.
    """
    return Tokenizer.load(run / _FOLDER)


def save_tokens(tokenizer: Tokenizer, run: Path) -> None:
    """Save the tokens to a run that has none; those of a run are never overwritten."""
    if not _has_tokens(run):
        tokenizer.save(run / _FOLDER)


def _has_tokens(run: Path) -> bool:
    return (run / _FOLDER / "tokens.model").exists()
