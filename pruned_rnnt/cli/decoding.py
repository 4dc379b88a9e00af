"""`pruned-rnnt decode`, after the model is loaded: decode splits, store and print their results."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.align.calibrate import calibrate, word_confidences
from pruned_rnnt.align.picture import draw_utterances
from pruned_rnnt.cli.command import run_inputs
from pruned_rnnt.config.load import to_dict
from pruned_rnnt.data.input.batch import BatchIdentity
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.decode.calibration import Calibration, read_calibration, save_calibration
from pruned_rnnt.decode.decode_config import DecodeConfig, file_digests, label, result_settings
from pruned_rnnt.decode.decode_output import (
    hypothesis_lines,
    language_table,
    lost_lines,
    unknown_lines,
)
from pruned_rnnt.decode.decode_set import decode_set
from pruned_rnnt.decode.emission_delay import delay_lines, summary_lines, word_delays
from pruned_rnnt.decode.scoring.error_rates import SetErrors
from pruned_rnnt.decode.scoring.error_statistics import lost_runs, normalised_cross_entropy
from pruned_rnnt.decode.word_times import frame_seconds
from pruned_rnnt.model.build_model import as_transducer
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.result_inputs import ResultInputs
from pruned_rnnt.run.results import ErrorRate, Measurement, save_result
from pruned_rnnt.system.code_version import code_version
from pruned_rnnt.system.console import progress_bar
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import LoadedModel

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A run's model, the data to decode, and the search.

    Attributes:
        config: names one run; `decode.split` may name several splits.
    """

    config: ExperimentConfig
    loaded: LoadedModel
    data: DataModule
    language_model: LanguageModel | None
    console: Console | None

    def decode(self, split: str, *, calibrating: bool = False) -> None:
        """Decode a split, write its results and print its error rates."""
        folder, loaded, config = self.config.folder, self.loaded, self._of_split(split)
        inputs = self._inputs  # before decoding: the files may change
        loader, identity = self.data.test_loader(split), BatchIdentity()
        with progress_bar(self.console, f"decoding {split}, utterances", loader.utterances) as bar:
            decoded = decode_set(
                loaded.model,
                identity.over(bar.over(loader, size=len)),
                loaded.tokenizer,
                config,
                self.language_model,
            )
        calibration, fitted = self._calibration(), None
        if calibrating:
            fitted = calibrate(
                loaded.model,
                loaded.tokenizer,
                loader,
                decoded.utterances,
                f"{split}, {loaded.name}",
            )
            # An empty one must not replace an earlier one.
            calibration = calibration if fitted.is_empty else fitted
        words = [utterance.transcript for utterance in decoded.utterances]
        lost = [(each, run) for each in words for run in lost_runs(each)]
        by_word = ErrorRate.of(words)
        by_character = ErrorRate.of([transcript.characters() for transcript in words])
        errors = SetErrors.of(words)
        metric = errors.metric(config.metric)
        languages = language_table(decoded.utterances, loaded.tokenizer, config.metric)
        times = "" if calibration is None else calibration.digest
        inputs = replace(
            inputs,
            split=split,
            utterances=identity.digest,
            computation={**inputs.computation, "calibration": times},
        )
        measured = Measurement(
            data=inputs.data,
            split=split,
            setting=inputs.label,
            model=inputs.model,
            checkpoint=loaded.name,
            utterances=len(words),
            words=by_word,
            characters=by_character,
            code=str(code_version()),
            metric=metric,
            lost_runs=len(lost),
            inputs=inputs,
            configuration={
                "decode": to_dict(config),
                "data": {"path": str(Path(self.config.data.path).resolve())},
            },
        )
        seconds = frame_seconds(loaded.model.encoder)
        lines = hypothesis_lines(
            decoded.utterances,
            loaded.tokenizer,
            calibration,
            identity.audio,
            frame_seconds=seconds,
        )
        delays = [
            (utterance.id, delay)
            for utterance in decoded.utterances
            for found in utterance.hypotheses[:1]
            for delay in word_delays(found, utterance.spoken, loaded.tokenizer, seconds)
        ]
        stem = save_result(
            folder, measured, words, lines, languages=languages, delays=delay_lines(delays)
        )
        chosen = by_word if metric == "wer" else by_character
        print(
            f"{inputs.set_name} {inputs.label} {loaded.name}: "
            f"{errors.describe(config.metric)}, "
            f"95% interval of the {metric.upper()} {chosen.lower:.2%} .. {chosen.upper:.2%}, "
            f"{len(words)} utterances, real-time factor {decoded.real_time_factor:.4f}"
        )
        for line in lost_lines(lost, by_word.counts.reference_words):
            print(line)
        for line in unknown_lines(decoded.utterances, loaded.tokenizer):
            print(line)
        if languages:
            print("\n".join(languages).expandtabs(14))
        confidences = word_confidences(decoded.utterances, loaded.tokenizer, calibration)
        entropy = normalised_cross_entropy(*confidences)
        if math.isfinite(entropy):  # else all words are right, or none
            print(f"confidences of words: normalised cross entropy {entropy:.3f}")
        chunks = (config.chunk, config.left)
        for line in summary_lines(loaded.model.encoder, chunks, [delay for _, delay in delays]):
            print(line)
        print(f"results: {RunFolder(folder).results}/*-{stem}.*")
        if fitted is not None:
            if not fitted.is_empty:
                print(f"calibration: {save_calibration(folder, fitted)}")
            for line in fitted.missing_lines():
                print(line)

    def plot(self, split: str, ids: list[str]) -> None:
        """Draw utterances of a split into results/plots, named as results with ID for SET."""
        model = as_transducer(self.loaded.model, "--plot")
        config, folder = self._of_split(split), RunFolder(self.config.folder).results / "plots"
        folder.mkdir(parents=True, exist_ok=True)
        for picture in draw_utterances(
            (model, self.loaded.tokenizer), self.data, ids, config, self.language_model
        ):
            identity = BatchIdentity()
            identity.add(picture.batch)
            inputs = replace(
                self._inputs, split=picture.id, own_data=True, utterances=identity.digest
            )
            path = folder / f"{inputs.stem()}.png"
            picture.figure.savefig(path)
            print(f"drawn: {path}")

    @cached_property
    def _inputs(self) -> ResultInputs:
        """The inputs of a result, without its split, utterances and calibration."""
        settings = result_settings(self.config.decode)
        return replace(
            run_inputs(self.config, self.loaded),
            label=label(settings),
            settings=settings,
            files=file_digests(self.config.decode.fusion, self.language_model),
        )

    def _calibration(self) -> Calibration | None:
        return read_calibration(self.config.folder, self.loaded.model.vocab_size)

    def _of_split(self, split: str) -> DecodeConfig:
        return replace(self.config.decode, split=split)
