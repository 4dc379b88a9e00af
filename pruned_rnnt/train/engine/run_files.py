"""Files of a run beside its checkpoints: its tokens, the versions of the code that trained it, the
duration of its utterances.

RUN/tokens/           the tokens of the data that the run started with, which its checkpoints need
RUN/versions.jsonl    a line for each start of the training
RUN/utterances.json   the 99th percentile of the durations. Long audio is transcribed in segments of
                      about this length, because a model works poorly on audio that is far longer
                      than its training utterances
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.code_version import code_version
from pruned_rnnt.system.json_file import damaged, read_json
from pruned_rnnt.system.whole_files import write_lines

_P99_KEY = "usual_longest_seconds"


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
    return Tokenizer.load(RunFolder(run).tokens)


def save_tokens(tokenizer: Tokenizer, run: Path) -> None:
    """Save the tokens to a run that has none; those of a run are never overwritten."""
    if not _has_tokens(run):
        tokenizer.save(RunFolder(run).tokens)


def _has_tokens(run: Path) -> bool:
    return (RunFolder(run).tokens / "tokens.model").exists()


def add_version(folder: Path, step: int) -> None:
    """Append the code that trains from `step` on."""
    code = code_version()
    line = {
        "step": step,
        "version": code.version,
        "commit": code.commit,
        "torch": str(torch.__version__),
    }
    with RunFolder(folder).versions.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def versions(folder: Path) -> list[dict[str, str | int]]:
    """The lines in order; none for a run that has no such file, or a damaged one."""
    path = RunFolder(folder).versions
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return []


def save_p99_duration(folder: Path, seconds: float) -> None:
    """Writes `folder`/utterances.json."""
    write_lines(RunFolder(folder).durations, [json.dumps({_P99_KEY: round(seconds, 3)})])


def read_p99_duration(folder: Path) -> float | None:
    """The saved duration in seconds; None if `folder` has none (imported models).

    Raises:
        ValueError: the file is damaged.
    """
    path = RunFolder(folder).durations
    if not path.is_file():
        return None
    advice = f"it needs {{{_P99_KEY!r}: SECONDS}}; correct or remove it"
    seconds = read_json(path, advice).get(_P99_KEY)
    if isinstance(seconds, int | float) and 0 < seconds < float("inf"):
        return float(seconds)
    raise damaged(path, f"{_P99_KEY} is {seconds!r}", advice)
