"""Quantised files whose error rate stays within a bound, or none.

The files of a precision are first written with every layer quantised. If they make more errors than
the bound allows, the layers that change the output of their graph most get higher precision
(float32; in int4 files at first eight bits), 1, 2, 4 and so on of them, until the bound is met. If
less than half of the weights would be quantised, the export is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pruned_rnnt.export.onnx_folder import SETTINGS_NAME, add_metadata, file_name
from pruned_rnnt.export.precision import QuantisedPrecision, layers, write_quantised
from pruned_rnnt.quantise.measurements import (
    FileErrors,
    Utterance,
    file_errors,
    layer_errors,
    recorded_runs,
)
from pruned_rnnt.system.usage_errors import ExportError

# Largest relative increase of the error rate, unless it is set.
DEFAULT_INCREASE: Mapping[QuantisedPrecision, float] = {"int8": 0.01, "int4": 0.03}
# On which layers are compared; more audio hardly changes their order, but takes longer.
CALIBRATION_UTTERANCES = 12
_LEAST_QUANTISED = 0.5
# Error rate of float32 files beyond which quantised ones cannot be worse.
_USELESS = 0.9
_KEY = "quantisation"


class MeasuredSet(NamedTuple):
    """Utterances with the name of their data, such as `fsdd dev`."""

    name: str
    utterances: Sequence[Utterance]


@dataclass(frozen=True, kw_only=True)
class KeptLayer:
    """A layer that has higher precision.

    error: relative change of the output of its graph if it alone is quantised.
    """

    graph: str
    name: str
    error: float


@dataclass(frozen=True, kw_only=True)
class QuantisedFiles:
    """The files of one precision, and their errors beside those of the float32 files.

    unit: what errors are counted in, words or characters; `words` is the number of these.
    bytes, fp32_bytes: sizes of all ONNX files of the precision, and of float32.
    increase: largest relative increase of the error rate that was allowed.
    difference, lower, upper: error rate minus that of float32, with its 95% interval.
    kept: the layers that have higher precision.
    layers: number of layers that could be quantised.
    """

    precision: str
    bytes: int
    fp32_bytes: int
    measured_on: str
    calibrated_on: str
    utterances: int
    words: int
    errors: int
    fp32_errors: int
    difference: float
    lower: float
    upper: float
    increase: float
    kept: tuple[KeptLayer, ...]
    layers: int
    unit: str = "words"

    def lines(self) -> Iterator[str]:
        """What is printed."""
        yield (
            f"{self.precision}: {self.fp32_bytes / self.bytes:.2f} times smaller than fp32; "
            f"{self.errors} errors in {self.words} {self.unit} of {self.measured_on} "
            f"({_percent(self.errors, self.words)}), fp32 {self.fp32_errors} "
            f"({_percent(self.fp32_errors, self.words)}); difference {100 * self.difference:+.2f} "
            f"points, 95% interval {100 * self.lower:+.2f} .. {100 * self.upper:+.2f}"
        )
        if self.increase * self.fp32_errors < 1:
            yield (
                f"{self.precision}: one error more than fp32 is already above the bound of "
                f"{self.increase:.1%}: measure on a larger set for a finer answer"
            )
        for layer in self.kept:
            yield (
                f"{self.precision}: kept in higher precision: {layer.graph} {layer.name} "
                f"(quantised alone, it changes the output by {layer.error:.2%})"
            )


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What quantised files are measured on, and the bound.

    calibration: audio on which the layers are compared.
    increase: largest relative increase of the error rate; None for the default of the precision.
    report: gets lines about the progress.
    """

    calibration: MeasuredSet
    measured: MeasuredSet
    increase: float | None = None
    report: Callable[[str], None] = print

    def apply(self, folder: Path, precisions: Sequence[QuantisedPrecision]) -> list[QuantisedFiles]:
        """Measure the folder's files, rewrite those beyond the bound, and store the results.

        Args:
            folder: what `export_onnx` wrote, with the files of these precisions.

        Raises:
            ExportError: no files of a precision meet the bound.
        """
        exact = file_errors(folder, "fp32", self.measured.utterances)
        if not exact.counts.reference_words:
            raise ExportError(f"--measure: {self.measured.name} has no words")
        errors, words = exact.counts.errors, exact.counts.reference_words
        if errors >= _USELESS * words:
            raise ExportError(
                f"--measure: the float32 files make {errors} errors in {words} {exact.unit} of "
                f"{self.measured.name}, so a comparison says nothing: measure on speech that the "
                "model recognises, or export without --calibrate"
            )
        results = [self._apply_one(folder, precision, exact) for precision in precisions]
        path = folder / SETTINGS_NAME
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings[_KEY] = {result.precision: asdict(result) for result in results}
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return results

    def _apply_one(
        self, folder: Path, precision: QuantisedPrecision, exact: FileErrors
    ) -> QuantisedFiles:
        increase = DEFAULT_INCREASE[precision] if self.increase is None else self.increase
        graphs = sorted(path.stem for path in folder.glob("*.onnx") if "." not in path.stem)
        sizes = {
            (graph, layer.name): layer.values.size for graph, layer in _layers_of(folder, graphs)
        }
        ranked: list[KeptLayer] = []
        number = 0
        # Four bits give way to eight, and these to float32 if they are not enough.
        as_float = precision == "int8"
        while True:
            kept = tuple(ranked[:number])
            for graph in graphs if number else ():
                names = [layer.name for layer in kept if layer.graph == graph]
                source, target = (folder / file_name(graph, name) for name in ("fp32", precision))
                write_quantised(precision, source, target, names, as_float=as_float)
            found = file_errors(folder, precision, self.measured.utterances)
            if found.counts.errors <= (1 + increase) * exact.counts.errors:
                break
            self.report(
                f"{precision}: {found.counts.errors} errors with {number} layers in higher "
                f"precision, fp32 {exact.counts.errors}: above the bound of {increase:.1%}"
            )
            if not number:
                ranked = self._ranked(folder, precision, graphs)
            number = max(1, 2 * number)
            if not as_float and not _leaves_most(ranked, number, sizes):
                as_float, number = True, 1
            if not _leaves_most(ranked, number, sizes):
                raise ExportError(
                    f"--precision {precision} raises the error rate on {self.measured.name} from "
                    f"{exact.counts.rate:.2%} to {found.counts.rate:.2%} with {len(kept)} of "
                    f"{len(ranked)} layers in higher precision, and more would leave less "
                    "than half of the weights quantised; --max-wer-increase allows "
                    f"{100 * increase:g}%. "
                    f"Nothing was written. Measure on a larger set, or allow more"
                )
        difference = found.minus(exact)
        result = QuantisedFiles(
            precision=precision,
            bytes=_bytes(folder, graphs, precision),
            fp32_bytes=_bytes(folder, graphs, "fp32"),
            measured_on=self.measured.name,
            calibrated_on=self.calibration.name,
            utterances=len(self.measured.utterances),
            words=exact.counts.reference_words,
            errors=found.counts.errors,
            fp32_errors=exact.counts.errors,
            difference=difference.difference,
            lower=difference.lower,
            upper=difference.upper,
            increase=increase,
            kept=kept,
            layers=len(sizes),
            unit=exact.unit,
        )
        for graph in graphs:
            path = folder / file_name(graph, precision)
            add_metadata(path, {_KEY: json.dumps(asdict(result))})
        return result

    def _ranked(
        self, folder: Path, precision: QuantisedPrecision, graphs: Sequence[str]
    ) -> list[KeptLayer]:
        """The layers of all graphs, those that change their graph's output most first."""
        self.report(
            f"{precision}: comparing the layers on {len(self.calibration.utterances)} utterances "
            f"of {self.calibration.name}"
        )
        runs = recorded_runs(folder, self.calibration.utterances)
        found = [
            KeptLayer(graph=graph, name=name, error=error)
            for graph in graphs
            if graph in runs
            for name, error in layer_errors(
                folder / file_name(graph, "fp32"), precision, runs[graph]
            ).items()
        ]
        return sorted(found, key=lambda layer: -layer.error)


def _leaves_most(
    ranked: Sequence[KeptLayer], number: int, sizes: Mapping[tuple[str, str], int]
) -> bool:
    """Whether at least half of the weights are quantised without so many of the ranked layers."""
    kept = sum(sizes[layer.graph, layer.name] for layer in ranked[:number])
    total = sum(sizes.values())
    return number < len(ranked) and total - kept >= _LEAST_QUANTISED * total


def _layers_of(folder: Path, graphs: Sequence[str]) -> Iterator[tuple[str, Any]]:
    import onnx

    for graph in graphs:
        for layer in layers(onnx.load(folder / file_name(graph, "fp32"))):
            yield graph, layer


def _bytes(folder: Path, graphs: Sequence[str], precision: str) -> int:
    return sum((folder / file_name(graph, precision)).stat().st_size for graph in graphs)


def _percent(errors: int, words: int) -> str:
    return f"{errors / words:.2%}"
