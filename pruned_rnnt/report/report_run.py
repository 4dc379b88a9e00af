"""Reads the folder of a run: configuration, metrics and results, as far as they exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt.run.result_file import ErrorSummary, ResultFile, find_results
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import config_path
from pruned_rnnt.train.tasks.registry import load_experiment
from pruned_rnnt.usage_errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ReportRun:
    """A run, finished or not.

    name: short, and different for the two runs of a comparison.
    config: None for a run of a language model, which has curves only.
    steps: number of training steps of its configuration.
    metrics: lines of metrics.jsonl.
    results: decoded sets whose settings match the pattern, newest first.
    """

    name: str
    folder: Path
    config: ExperimentConfig | None
    steps: int
    metrics: tuple[dict[str, Any], ...]
    results: tuple[ResultFile, ...]
    pattern: str

    @property
    def step(self) -> int:
        """The last training step that the metrics have."""
        return max((line["step"] for line in self.metrics), default=0)

    def group(self, name: str) -> list[dict[str, Any]]:
        """The metrics of `train` or `valid`."""
        return [line for line in self.metrics if line["group"] == name]

    def newest_results(self) -> dict[str, ResultFile]:
        """The newest result of each set, by its name; test sets first."""
        newest: dict[str, ResultFile] = {}
        for result in self.results:
            newest.setdefault(result.set_name, result)
        # Test sets before dev sets.
        return dict(sorted(newest.items(), key=lambda item: ("test" not in item[0], item[0])))

    def other_results(self) -> list[tuple[ResultFile, ErrorSummary]]:
        """The results that are older than those in `newest_results`, with their errors."""
        newest = self.newest_results().values()
        older = [(result, result.summary()) for result in self.results if result not in newest]
        return [(result, summary) for result, summary in older if summary is not None]


def read_run(folder: Path, overrides: Sequence[str] = (), pattern: str = "*") -> ReportRun:
    """Read a run; `overrides` are settings such as data.path=DIR.

    Raises:
        ConfigError: the folder is no run, or a setting is wrong.
        UsageError: the run has results, but none that the pattern matches.
    """
    config, _ = load_experiment(config_path(folder), [f"train.folder={folder}", *overrides])
    recogniser = config if isinstance(config, ExperimentConfig) else None
    results = find_results(folder, pattern) if recogniser else []
    if not results and pattern != "*" and recogniser:
        settings = dict.fromkeys(result.setting for result in find_results(folder))
        raise UsageError(
            f"no result of {folder} matches {pattern!r}; it has {', '.join(settings) or 'none'}"
        )
    return ReportRun(
        name=folder.resolve().name,
        folder=folder,
        config=recogniser,
        steps=config.train.steps,
        metrics=tuple(read_metrics(folder)),
        results=tuple(results),
        pattern=pattern,
    )
