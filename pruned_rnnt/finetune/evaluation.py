"""Word error rates of the old and the new test set before and after fine-tuning.

RUN/finetune.json      source and results, read when the run is continued
"""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.finetune.source import Source
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.json_file import damaged, from_json, read_json
from pruned_rnnt.system.whole_files import write_lines
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import load_model
from pruned_rnnt.train.tasks.split_errors import SplitErrors, first_split, measure_errors

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TestSet:
    """A split that is decoded before and after; domain: new or old."""

    domain: str
    path: str
    split: str
    before: SplitErrors | None = None
    after: SplitErrors | None = None


class Evaluation:
    """The test sets of a fine-tuning run and their results.

    Args:
        source: None to continue a run; the sets and results are then those that it saved.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        source: Source | None,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.config = config
        self.source = source
        self.ranks = ranks
        self.device = device
        if source is None:
            self.sets = _saved(config)
        else:
            old = config.data.old_path or source.data_path
            self.sets = _test_sets(config, old)

    def measure_source(self) -> None:
        """Decode all sets with the source model; nothing if a run is continued.

        Call it once, after the task has made its model: it frees the parameters of the source.
        Logs a warning first if the training will make the model worse on its old domain.
        """
        if self.source is None:
            return
        if self.ranks.is_first and not self._mixes and not self._on_old_data:
            logger.warning(
                "training on other data alone makes a model worse on those that it was trained on, "
                "often much worse: if you still need them, mix them in by data.old_path=%s "
                "data.old_share=0.25",
                self.source.data_path if _is_folder(self.source.data_path) else "DIR",
            )
        model = self.source.model.to(self.device)
        for each in self.sets:
            each.before = self._decode(each, model, self.source.tokenizer)
        # Its parameters are in the new model by now; training needs this memory.
        model.to("meta")

    def measure_result(self) -> None:
        """Decode all sets with the checkpoint that decode.checkpoint names; save the results."""
        loaded = load_model(self.config)
        model = loaded.model.to(self.device)
        for each in self.sets:
            each.after = self._decode(each, model, loaded.tokenizer)
        if self.ranks.is_first:
            self.save(self.config.folder)

    def save(self, folder: Path) -> None:
        """Write the results to the folder of the run."""
        values = {
            "source": self.config.train.init,
            "sets": [dataclasses.asdict(each) for each in self.sets],
        }
        write_lines(RunFolder(folder).finetuning, [json.dumps(values, indent=2)])

    def show(self) -> None:
        """Print the error rates as a table."""
        console = Console()
        table = Table(title=f"{self.config.folder}: error rate")
        for name in ("set", "counted", "before", "after"):
            table.add_column(name, justify="left" if name == "set" else "right")
        for each in self.sets:
            known = each.after or each.before
            table.add_row(
                f"{each.domain}: {each.path} {each.split}",
                f"{known.words} {known.unit}" if known else "",
                *(f"{c.rate:.2%}" if c else "-" for c in (each.before, each.after)),
            )
        console.print(table)
        old = [each for each in self.sets if each.domain == "old" and each.before and each.after]
        if not self._mixes and any(_is_worse(each) for each in old):
            console.print(
                "The error rate of the old domain has risen. To prevent that, mix in its data: "
                f"data.old_path={old[0].path} data.old_share=0.25",
                markup=False,
                soft_wrap=True,
            )

    @property
    def _mixes(self) -> bool:
        return bool(self.config.data.old_path) and self.config.data.old_share > 0

    @property
    def _on_old_data(self) -> bool:
        old = "" if self.source is None else self.source.data_path
        return bool(old) and _same(old, self.config.data.path)

    def _decode(self, each: TestSet, model: SpeechModel, tokenizer: Tokenizer) -> SplitErrors:
        data = dataclasses.replace(self.config.data, path=each.path)
        config = dataclasses.replace(self.config, data=data)
        return measure_errors(model, tokenizer, config, each.split, ranks=self.ranks)


def _is_worse(each: TestSet) -> bool:
    assert each.before is not None
    assert each.after is not None
    return each.after.rate > each.before.rate + 0.01


def _test_sets(config: ExperimentConfig, old: str) -> list[TestSet]:
    """The set of the new data, and that of the old data if they are known and still exist."""
    sets = []
    for domain, path in (("new", config.data.path), ("old", old)):
        if domain == "old" and (not path or _same(path, config.data.path)):
            continue
        split = first_split(path, f"{config.decode.split},{config.data.valid}")
        if split:
            sets.append(TestSet(domain=domain, path=path, split=split))
        elif domain == "old" and not _is_folder(path):
            logger.warning(
                "%s, the data that the model was trained on, is not there: what the model unlearns "
                "is not measured. If it has been moved, add data.old_path=DIR",
                path,
            )
        else:
            logger.info("%s has no test set: its error rate is not measured", path)
    return sets


def _is_folder(path: str) -> bool:
    return bool(path) and Path(path).is_dir()


def _same(path: str, other: str) -> bool:
    return Path(path).resolve() == Path(other).resolve()


def _saved(config: ExperimentConfig) -> list[TestSet]:
    """The sets of a run that is continued; without its file, their rates before are unknown."""
    path = RunFolder(config.folder).finetuning
    if not path.is_file():
        return _test_sets(config, config.data.old_path)
    advice = "remove it: the sets are then decoded after fine-tuning alone"
    values = read_json(path, advice)
    try:
        sets = [from_json(TestSet, each) for each in values["sets"]]
    except (KeyError, TypeError) as error:
        raise damaged(path, error, advice) from error
    return [dataclasses.replace(each, after=None) for each in sets]
