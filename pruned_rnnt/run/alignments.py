"""Where the files of `pruned-rnnt align` go: RUN/alignments/STEM, or a folder that the user names.

A folder holds one computation of a set: SET-inputs.json has its inputs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.result_inputs import ResultInputs
from pruned_rnnt.system.json_file import read_json
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.system.whole_files import write_lines


@dataclass(frozen=True, kw_only=True)
class AlignmentPlace:
    """The folder for the alignments of a set.

    run: folder of the run.
    inputs: of the computation; `utterances` may still be empty.
    output: a folder that the user named; None for one in the run.
    """

    run: Path
    inputs: ResultInputs
    output: Path | None = None

    def check(self) -> None:
        """Raises UsageError if the named folder holds other alignments, before any are computed."""
        if self.output is None or not self.output.is_dir():
            return
        stored = self._stored(self.output)
        name = self.inputs.split
        if stored is None and (found := sorted(self.output.glob(f"{name}-scores.tsv"))):
            raise UsageError(
                f"--output {self.output} holds {found[0].name} of an earlier version, which would "
                "be overwritten: choose another folder"
            )
        if stored is not None and not stored.equals_up_to_rounding(
            replace(self.inputs, utterances=stored.utterances)
        ):
            raise UsageError(f"{self._held()}: choose another folder")

    @contextmanager
    def unfinished(self) -> Iterator[Path]:
        """A folder to write into, which is removed at the end."""
        parent = self.output or self._own()
        parent.mkdir(parents=True, exist_ok=True)
        folder = parent / f".{self.inputs.split}.{os.getpid()}"
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, unfinished: Path, utterances: str) -> Path:
        """Move finished files to their folder, which is returned.

        Args:
            utterances: digest of the aligned utterances.

        Raises:
            UsageError: the named folder holds alignments of other utterances; the message names
                the folder that the files are in.
        """
        inputs = replace(self.inputs, utterances=utterances)
        target, held = self.output or self._own() / inputs.stem(), ""
        stored = self._stored(target)
        if stored is not None and not stored.equals_up_to_rounding(inputs):
            held = self._held()
            target = target / inputs.stem()
        for path in sorted(unfinished.rglob("*")):
            if path.is_file():
                place = target / path.relative_to(unfinished)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
        text = json.dumps(asdict(inputs), indent=2, ensure_ascii=False)
        write_lines(self._sidecar(target), [text])
        if held:
            raise UsageError(f"{held}: the new alignments are in {target}")
        return target

    def _own(self) -> Path:
        return RunFolder(self.run).alignments

    def _sidecar(self, folder: Path) -> Path:
        return folder / f"{self.inputs.split}-inputs.json"

    def _stored(self, folder: Path) -> ResultInputs | None:
        path = self._sidecar(folder)
        if not path.is_file():
            return None
        try:
            return ResultInputs.from_dict(read_json(path))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path} is damaged ({error}): choose another folder") from error

    def _held(self) -> str:
        stored = self._stored(self.output or self._own())
        about = "" if stored is None else f" by {stored.checkpoint} of model {stored.model}"
        return (
            f"--output {self.output} holds alignments of {self.inputs.split}{about}, which are "
            "those of another model, other data or another calibration"
        )
