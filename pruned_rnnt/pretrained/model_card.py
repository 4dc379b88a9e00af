"""The model card of a run's exported model: README.md with YAML front matter in the hub's format.

The error rates are those that `pruned-rnnt decode` measured with the same parameters; without any,
the card says that the model is not evaluated.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pruned_rnnt.config.load import to_dict
from pruned_rnnt.config.written import plain_yaml
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.licences.chain import Chain
from pruned_rnnt.licences.terms import TERMS, UNKNOWN, demands, hub_metadata, spdx
from pruned_rnnt.model.parameter_values import fingerprint
from pruned_rnnt.model.speech_model import CtcModel
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.results import ErrorRate, Measurement, read_measurements
from pruned_rnnt.train.engine.run_files import versions
from pruned_rnnt.train.experiment import CardConfig, ExperimentConfig
from pruned_rnnt.train.run import LoadedModel

FILE_NAME = "README.md"
_LIBRARY = "pruned_rnnt"
_TASK = "automatic-speech-recognition"
# Sections that do not say how the model was trained.
_LEFT_OUT = ("card", "decode")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The contents of a model card.

    config: the section `card`, written by the model's owner.
    chain: the licence, and the data and weights that the model was made from.
    name: of the model.
    checkpoint: name of the checkpoint.
    kind: architecture, such as `zipformer transducer`.
    causal: whether the model can stream.
    parameters, symbols: numbers of parameters and of the vocabulary.
    data: a sentence about the training data; empty if unknown.
    results: measurements of exactly these parameters.
    settings: nested settings that differ from the defaults.
    code: version of the code that trained the model; empty if unknown.
    """

    config: CardConfig
    chain: Chain
    name: str
    checkpoint: str
    kind: str
    causal: bool
    parameters: int
    symbols: int
    data: str = ""
    results: tuple[Measurement, ...] = ()
    settings: Mapping[str, Any]
    code: str = ""

    @cached_property
    def _named_results(self) -> list[tuple[Measurement, str]]:
        """The results, each with the name of its search."""
        return list(zip(self.results, _searches(self.results), strict=True))

    def write(self, folder: Path, use: str) -> None:
        """Write README.md; `use`: Markdown sections on how to use the files in the folder."""
        (folder / FILE_NAME).write_text(self.text(use), encoding="utf-8")

    def text(self, use: str) -> str:
        """The whole card."""
        sections = [f"---\n{plain_yaml(self.front_matter())}---", f"# {self.name}"]
        if self.config.description:
            sections.append(self.config.description.strip())
        sections += [
            self._summary(),
            f"## Word error rate\n\n{self._results()}",
            f"## Training data\n\n{self._data()}",
            f"## Licences\n\n{self._licences()}",
            use.strip(),
            "## Configuration\n\nSettings that differ from the defaults of pruned_rnnt:\n\n"
            f"```yaml\n{plain_yaml(self.settings)}```",
        ]
        return "\n\n".join(sections) + "\n"

    def front_matter(self) -> dict[str, Any]:
        """The metadata that the hub reads."""
        values: dict[str, Any] = {
            **hub_metadata(self.chain.licence),
            "library_name": _LIBRARY,
            "pipeline_tag": _TASK,
            "tags": [_TASK, "speech", _LIBRARY, *self.kind.split()],
        }
        if self.config.language:
            values["language"] = list(self.config.language)
        if self.config.datasets:
            values["datasets"] = list(self.config.datasets)
        if self.results:
            index = {"name": self.name, "results": [_index_entry(*x) for x in self._named_results]}
            values["model-index"] = [index]
        return values

    def _summary(self) -> str:
        license_note = self.chain.licence
        if self.chain.licence == UNKNOWN:
            license_note += ": ask the owner of the model (who sets `card.license`)"
        rows = {
            "architecture": f"{self.kind}, {self.parameters / 1e6:.1f} M parameters",
            "input": f"audio at {SAMPLING_RATE:,} Hz, one channel",
            "streaming": "yes (causal)" if self.causal else "no: it needs whole utterances",
            "symbols": f"{self.symbols:,}",
            "checkpoint": self.checkpoint,
            "trained with": self.code or "unknown version of pruned_rnnt",
            "licence": license_note,
        }
        lines = ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows.items())]
        return "\n".join(lines)

    def _results(self) -> str:
        if not self.results:
            return (
                "No results of `pruned-rnnt decode RUN`, which measures error rates; the next "
                "`pruned-rnnt export` includes them."
            )
        lines = [
            "| set | utterances | search | error rate | 95% interval | other rate |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for each, search in self._named_results:
            (kind, rate), (other_kind, other) = _rates(each)
            cells = (
                f"{each.data} {each.split}",
                f"{each.utterances:,}",
                _cell(search),
                f"{kind} {_rate_and_counts(rate, kind)}",
                f"{rate.lower:.2%} to {rate.upper:.2%}",
                f"{other_kind} {other.counts.rate:.2%}",
            )
            lines.append(f"| {' | '.join(cells)} |")
        codes = sorted({each.code for each in self.results})
        lines.append(
            "\nMeasured with the torch model in the precision of decoding (bfloat16 on most GPUs, "
            "float32 on a CPU, unless it is set), by "
            f"{'; '.join(codes)}. Intervals are by bootstrap over utterances."
        )
        if files := sorted({file for each in self.results for file in _files(each)}):
            lines.append(
                "\nSome searches use a language model, texts or hotwords that are not in this "
                f"folder: {', '.join(f'`{file}`' for file in files)}."
            )
        return "\n".join(lines)

    def _licences(self) -> str:
        """What the model was made from, and how its licence fits."""
        lines = [
            "What the model was made from, the oldest first:\n",
            "| | name | licence | demands | source | contents |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for origin in self.chain.origins:
            licence = origin.licence
            name = spdx(licence.id)
            asks = licence.note or demands(name) or ("nothing" if name in TERMS else "unknown")
            cells = (origin.kind, origin.name, licence.id, asks, licence.source, origin.digest)
            lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
        if found := self.chain.contradictions():
            lines += ["", f"The licence {self.chain.licence} contradicts:\n"]
            lines += [f"- {line}" for line in found]
            lines.append(f"\nThe owner's reason: {self.chain.reason.strip()}")
        if unchecked := self.chain.unchecked():
            lines += ["", "Not compared with the model's licence:\n"]
            lines += [f"- {line}" for line in unchecked]
        return "\n".join(lines)

    def _data(self) -> str:
        return self.config.data or self.data or "Unknown."


def is_card(path: Path) -> bool:
    """Whether a file is a card that `ModelCard.write` has written."""
    if not path.is_file():
        return False
    front, end, _ = path.read_text(encoding="utf-8", errors="replace").partition("\n---\n")
    return bool(end) and f"library_name: {_LIBRARY}" in front.splitlines()


def _cell(text: str) -> str:
    """A text in one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _rates(result: Measurement) -> list[tuple[str, ErrorRate]]:
    """WER and CER, the one that describes the set first."""
    rates = [("WER", result.words), ("CER", result.characters)]
    return rates if result.metric == "wer" else rates[::-1]


def _rate_and_counts(rate: ErrorRate, kind: str) -> str:
    counts, unit = rate.counts, "words" if kind == "WER" else "characters"
    return f"{counts.rate:.2%} ({counts.errors:,} errors in {counts.reference_words:,} {unit})"


def _files(result: Measurement) -> list[str]:
    """The names of the files of decode.fusion, by setting: `word_ngram=calls.arpa`."""
    if result.inputs is None:
        return []
    named = result.configuration.get("decode", {}).get("fusion", {})
    digests = {key.rpartition(".")[2]: digest for key, digest in result.inputs.files.items()}
    return [f"{key}={Path(named.get(key) or '').name or digests[key]}" for key in digests]


def _searches(results: Sequence[Measurement]) -> list[str]:
    """The search of each result with its files; if those of a set have one name, also with the
    digits that end the names of its result files."""
    names = [", ".join([each.setting, *_files(each)]) for each in results]
    keys = [(each.data, each.split, name) for each, name in zip(results, names, strict=True)]
    count = Counter(keys)
    return [
        f"{key[-1]}, {each.inputs.fingerprint[:8]}" if count[key] > 1 and each.inputs else key[-1]
        for each, key in zip(results, keys, strict=True)
    ]


def _index_entry(result: Measurement, search: str) -> dict[str, Any]:
    metrics = [
        {
            "type": kind.lower(),
            "name": f"{result.split} {kind} ({search})",
            "value": round(100 * rate.counts.rate, 2),
        }
        for kind, rate in _rates(result)
    ]
    return {
        "task": {"type": _TASK, "name": "Automatic Speech Recognition"},
        "dataset": {"name": result.data, "type": result.data, "split": result.split},
        "metrics": metrics,
    }


def card_of_run(config: ExperimentConfig, loaded: LoadedModel, chain: Chain) -> ModelCard:
    """The card of a run's model.

    Raises:
        ValueError: a stored measurement is damaged.
    """
    model = loaded.model
    is_ctc = isinstance(model, CtcModel)
    return ModelCard(
        config=config.card,
        chain=chain,
        name=config.card.name or config.folder.resolve().name,
        checkpoint=loaded.name,
        kind=f"{model.config.encoder.kind} {'ctc' if is_ctc else 'transducer'}",
        causal=model.encoder.config.causal,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        symbols=model.vocab_size,
        data=_data_sentences(config.data),
        results=tuple(read_measurements(RunFolder(config.folder).results, fingerprint(model))),
        settings=_settings(config),
        code=_training_code(config.folder),
    )


def _data_sentences(data: DataConfig) -> str:
    """About the training data, and old data that are mixed in; empty if nothing is known."""
    sentences = [_data_sentence(data.path, data.train)]
    if data.old_path and data.old_share > 0:
        old = _data_sentence(data.old_path, data.train)
        old = old or f"`{Path(data.old_path).resolve().name}`."
        sentences.append(f"A share of {data.old_share:.0%} of the utterances is old data: {old}")
    return " ".join(sentence for sentence in sentences if sentence)


def _data_sentence(path: str, train: str) -> str:
    """From prepare.json of a folder; empty if it is not there."""
    try:
        report = PreparedFolder(Path(path)).report()
        split = report["splits"][train]
        return (
            f"`{Path(path).resolve().name}`, prepared by the recipe `{report['recipe']}`: "
            f"{split['utterances']:,} utterances, {split['hours']:.2f} hours, "
            f"{len(split['speakers']):,} speakers (split {train})."
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError):
        return ""


def _settings(config: ExperimentConfig) -> dict[str, Any]:
    """Settings that differ from the defaults, without the folders of this machine."""
    values = _changed(to_dict(ExperimentConfig()), to_dict(config))
    return {
        section: _without_folders(value)
        for section, value in values.items()
        if section not in _LEFT_OUT
    }


def _without_folders(value: Any) -> Any:
    """Nested values with the last part alone of each path of this machine."""
    if isinstance(value, Mapping):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(each) for each in value]
    if not isinstance(value, str | Path) or "/" not in str(value):
        return value
    # A name such as owner/model stays. Unlike Path.exists, this takes texts of any length.
    is_path = str(value).startswith(("/", "~", ".")) or os.path.exists(value)  # noqa: PTH110
    return Path(value).resolve().name if is_path else value


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The nested values of `after` that `before` does not have."""
    changed: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping):
            value = _changed(old if isinstance(old, Mapping) else {}, value)
            if value:
                changed[key] = value
        elif key not in before or old != value:
            changed[key] = value
    return changed


def _training_code(folder: Path) -> str:
    lines = versions(folder)
    if not lines:
        return ""
    last = lines[-1]
    commit = f", commit {last['commit']}" if last.get("commit") else ""
    return f"pruned_rnnt {last.get('version')}{commit}, torch {last.get('torch')}"
