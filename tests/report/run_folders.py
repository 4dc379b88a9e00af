"""Folders of runs as `train` and `decode` write them, without training; and the parsed page."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from pruned_rnnt.config.written import to_yaml
from pruned_rnnt.decode.scoring.error_rates import Transcript
from pruned_rnnt.report.report_command import ReportOptions
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.icefall_files import write_icefall_files
from pruned_rnnt.run.result_inputs import ResultInputs
from pruned_rnnt.run.results import ErrorRate, Measurement, save_result
from tests.tiny_corpus import tiny_experiment

VALIDATION = {"total": 0.5, "wer": 0.25, "retained_mass": 0.99, "band_edge_mass": 0.1}
TRAINING = {"total_per_frame": 0.6, "simple_per_frame": 0.7, "learning_rate": 1e-3}
NO_MEDIA = ReportOptions(audio=False, pictures=False)
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "big", "grey", "mouse"]


def transcript(name: str, reference: str, hypothesis: str) -> Transcript:
    return Transcript(
        id=name, reference=tuple(reference.split()), hypothesis=tuple(hypothesis.split())
    )


def random_transcripts(count: int, errors: float, seed: int, length: int = 12) -> list[Transcript]:
    """Transcripts with errors of all kinds; the references depend on the count alone."""
    texts, mistakes = random.Random(count), random.Random(seed)
    made = []
    for number in range(count):
        reference = [texts.choice(WORDS) for _ in range(texts.randint(1, length))]
        hypothesis = []
        for word in reference:
            if mistakes.random() >= errors:
                hypothesis.append(word)
            elif mistakes.random() < 0.7:
                hypothesis += mistakes.choices(WORDS, k=mistakes.randint(1, 2))
        made.append(transcript(f"u-{number:05d}", " ".join(reference), " ".join(hypothesis)))
    return made


def write_run(folder: Path, corpus: Path, steps: int = 4, done: int = 4) -> Path:
    """A run without checkpoints that has done some of its steps."""
    folder.mkdir(parents=True)
    config = tiny_experiment(corpus, folder, f"train.steps={steps}")
    RunFolder(folder).config.write_text(to_yaml(config), encoding="utf-8")
    lines = []
    for step in range(1, done + 1):
        lines.append({"group": "train", "step": step, **TRAINING})
        lines.append({"group": "valid", "step": step, **VALIDATION})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def hypothesis_line(each: Transcript, audio: tuple[int, float] | None) -> dict[str, Any]:
    """The line of an n-best file."""
    words = [
        {"word": word, "start": 0.1 * n, "end": 0.1 * n + 0.1, "confidence": 0.9}
        for n, word in enumerate(each.hypothesis)
    ]
    tokens = [
        {"token": word["word"], "start": word["start"], "end": word["end"], "score": -0.1}
        for word in words
    ]
    best = {"text": " ".join(each.hypothesis), "score": -1.0, "tokens": tokens, "words": words}
    line = {"id": each.id, "reference": " ".join(each.reference), "hypotheses": [best]}
    return line if audio is None else {**line, "audio": {"frames": audio[0], "mean": audio[1]}}


def write_decoded(
    run: Path,
    transcripts: Sequence[Transcript],
    split: str = "test",
    label: str = "greedy",
    *,
    metric: str = "wer",
    audio: tuple[int, float] | None = None,
    languages: Sequence[str] = (),
    data_path: str = "",
    fusion: Mapping[str, Any] | None = None,
    **changes: Any,
) -> str:
    """The result files of a decoded set; returns their STEM.

    audio: of every utterance. languages: of each. data_path: of data that are not the run's own.
    fusion: the values of decode.fusion as they were named.
    changes: of the inputs; `settings` adds to method and metric.
    """
    settings = {"method": label, "metric": metric, **changes.pop("settings", {})}
    values = {
        "split": split,
        "utterances": "data",
        "checkpoint": "step-00000004",
        "model": run.name,
        "label": label,
        "settings": settings,
        **changes,
    }
    inputs = ResultInputs(**values)
    measured = Measurement(
        data="corpus",
        split=split,
        setting=label,
        model=inputs.model,
        checkpoint=inputs.checkpoint,
        utterances=len(transcripts),
        words=ErrorRate.of(transcripts),
        characters=ErrorRate.of([each.characters() for each in transcripts]),
        code="0.2",
        metric=metric,
        inputs=inputs,
        configuration={"data": {"path": data_path}, "decode": {"fusion": fusion or {}}},
    )
    lines = [hypothesis_line(each, audio) for each in transcripts]
    for line, language in zip(lines, languages, strict=False):
        line["language"] = language
    return save_result(run, measured, transcripts, lines)


def write_old_decoded(
    run: Path,
    transcripts: Sequence[Transcript],
    split: str = "test",
    suffix: str = "greedy-step-00000004",
    metric: str = "WER",
) -> None:
    """The result files of a decoded set as version 0.1 wrote them, without their inputs."""
    folder = RunFolder(run).results
    shown = [t.characters() for t in transcripts] if metric == "CER" else transcripts
    write_icefall_files(folder, f"{split}-{suffix}", "greedy", shown, metric)
    text = "".join(json.dumps(hypothesis_line(each, None)) + "\n" for each in transcripts)
    (folder / f"nbest-{split}-{suffix}.jsonl").write_text(text, encoding="utf-8")


@dataclass
class Element:
    """An element of the page with its texts and elements in order."""

    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All texts within, with single spaces."""
        parts = [each if isinstance(each, str) else each.text for each in self.children]
        return " ".join(" ".join(parts).split())

    def find(self, tag: str = "", **attributes: str) -> list[Element]:
        """The elements within that have a tag and attributes; `class_` holds one of the classes."""
        found = []
        for each in self.children:
            if isinstance(each, str):
                continue
            wanted = dict(attributes)
            classes = each.attributes.get("class", "").split()
            fits = wanted.pop("class_", None) in (None, *classes)
            if (not tag or each.tag == tag) and fits and wanted.items() <= each.attributes.items():
                found.append(each)
            found += each.find(tag, **attributes)
        return found


_VOID = {"meta", "link", "br", "img", "input", "hr"}


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("page", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(html: str) -> Element:
    """The page as a tree; an element that is not closed, or closed twice, is an error."""
    builder = _Builder()
    builder.feed(html)
    builder.close()
    assert [element.tag for element in builder.open] == ["page"]
    return builder.open[0]


def table(page: Element, name: str) -> dict[str, list[Any]]:
    """The columns of a table of the page by their labels."""
    (script,) = page.find("script", id=f"data-{name}")
    (text,) = script.children
    assert isinstance(text, str)
    return {column["label"]: column["values"] for column in json.loads(text)["columns"]}
