"""The inputs of a computation, which name its results."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pruned_rnnt.system.json_file import from_json

# Keeps the longest file name, with its prefix and digits of a hash, below 255 bytes.
_MOST_BYTES = 150
_NOT_IN_FILE_NAMES = re.compile(r"[^\w.+=@-]+")
# Fields that name the inputs for readers, and do not change what is computed.
_NAMES = ("split", "data", "own_data", "checkpoint", "label")


def name_of_file(text: str, most_bytes: int = _MOST_BYTES) -> str:
    """A text for the name of a file: not longer, and all but word characters and .+=@- become
    underscores."""
    name = _NOT_IN_FILE_NAMES.sub("_", text)
    return name.encode()[:most_bytes].decode(errors="ignore")


@dataclass(frozen=True, kw_only=True)
class ResultInputs:
    """Everything that determines a result; equal inputs make equal results.

    split: of the prepared data.
    data: name of the prepared folder. own_data: it is the run's own, maybe moved.
    utterances: digest of the utterances that were decoded: ids, texts and features.
    checkpoint: name of the checkpoint.
    model: fingerprint of the parameters.
    label: short text of the settings.
    settings: that change the hypotheses, by key.
    files: digests of the contents of files that settings name, by key.
    computation: what changes results by rounding, and times of words: device, kernels, batches,
        version of the code, calibration. Results that differ only in these may be compared.
    """

    split: str
    data: str = ""
    own_data: bool = True
    utterances: str
    checkpoint: str
    model: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    computation: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits of all inputs."""
        values = {name: value for name, value in asdict(self).items() if name not in _NAMES}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @property
    def without_computation(self) -> str:
        """A text that is equal for results that differ in `computation` alone."""
        return f"{replace(self, computation={}).stem(64)} of {self.data}"

    @property
    def set_name(self) -> str:
        """The split, and the data folder if it is not the run's own: `test@calls`."""
        return self.split if self.own_data or not self.data else f"{self.split}@{self.data}"

    def stem(self, digits: int = 8) -> str:
        """SET-LABEL-CHECKPOINT-FINGERPRINT, with so many digits of the fingerprint."""
        parts = (self.set_name, self.label, self.checkpoint)
        text = name_of_file("-".join(part for part in parts if part))
        return f"{text}-{self.fingerprint[:digits]}"

    def equals_up_to_rounding(self, other: ResultInputs) -> bool:
        """Whether device, kernels, batches and the version of the code alone may differ."""

        def compared(inputs: ResultInputs) -> tuple[Any, ...]:
            calibration = inputs.computation.get("calibration", "")
            return inputs.utterances, inputs.model, inputs.settings, inputs.files, calibration

        return compared(self) == compared(other)

    def differing_settings(self, other: ResultInputs) -> list[str]:
        """The settings and files that two results do not share, as `decode.key: this, that`.

        The number of hypotheses in the n-best file does not count.
        """
        own = {**self.settings, **self.files}
        others = {**other.settings, **other.files}
        lines = []
        for key in dict.fromkeys([*own, *others]):
            if key == "num_best":
                continue
            values = [str(each.get(key, "not used")) for each in (own, others)]
            if values[0] != values[1]:
                lines.append(f"decode.{key}: {values[0]}, {values[1]}")
        return lines

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ResultInputs:
        """The inverse of `dataclasses.asdict`; TypeError for a missing value or another type."""
        return from_json(cls, values)
