"""Reads the folder of a run: configuration, metrics and results, as far as they exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt.config.written import as_override
from pruned_rnnt.report.comparison import has_equal
from pruned_rnnt.run.result_file import ErrorSummary, ResultFile, find_results
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import check_overrides, config_path
from pruned_rnnt.train.tasks.registry import load_experiment


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

    @property
    def step(self) -> int:
        """The last training step that the metrics have."""
        return max((line["step"] for line in self.metrics), default=0)

    def group(self, name: str) -> list[dict[str, Any]]:
        """The metrics of `train` or `valid`."""
        return [line for line in self.metrics if line["group"] == name]

    def newest_results(self) -> dict[str, ResultFile]:
        """The newest result of each set, by its name; test sets first."""
        return self._first_of_each_set(self.results)

    def results_to_compare(self, others: Sequence[ResultFile]) -> dict[str, ResultFile]:
        """The newest result of each set that has one with equal settings among others.

        The newest of all for a set without such a result.
        """
        with_partner = [result for result in self.results if has_equal(result, others)]
        return self._first_of_each_set([*with_partner, *self.results])

    @staticmethod
    def _first_of_each_set(results: Iterable[ResultFile]) -> dict[str, ResultFile]:
        newest: dict[str, ResultFile] = {}
        for result in results:
            newest.setdefault(result.set_name, result)
        # Test sets before dev sets.
        return dict(sorted(newest.items(), key=lambda item: ("test" not in item[0], item[0])))

    def other_results(self, shown: Collection[ResultFile]) -> list[tuple[ResultFile, ErrorSummary]]:
        """The results that are not among those shown, with their errors."""
        others = [(result, result.summary()) for result in self.results if result not in shown]
        return [(result, summary) for result, summary in others if summary is not None]


def read_run(folder: Path, overrides: Sequence[str] = (), pattern: str = "*") -> ReportRun:
    """Read a run; `overrides` are settings such as data.path=DIR.

    Raises:
        ConfigError: the folder is no run, or a setting is wrong, or changes the training.
        UsageError: the run has results, but none that the pattern matches.
    """
    overrides = [as_override("train.folder", folder), *overrides]
    config, _ = load_experiment(config_path(folder), overrides, is_run=True)
    check_overrides(folder, config, overrides)
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
    )
