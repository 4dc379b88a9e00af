"""The settings of the section `decode`: the search method, and what to decode.

Some of them determine the hypotheses, and are part of a result's identity; their label is part of
the names of its files.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pruned_rnnt.config.checks import Removed, check_at_least, joined_names
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.decode.fusion.ngram_files import read_texts
from pruned_rnnt.decode.scoring.error_rates import MetricChoice
from pruned_rnnt.model.encoder import WHOLE
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.model.parameter_values import fingerprint

logger = logging.getLogger(__name__)

Precision = Literal["auto", "float32", "bfloat16", "float16"]
_BEAM_METHODS = ("modified_beam", "ctc_prefix_beam")
_NEEDS_BEAM = f"decode.method={' or '.join(_BEAM_METHODS)}"
# Settings of every method; those of `metric` and `num_best` change the files only.
_ALWAYS = ("chunk", "left", "precision", "metric", "skip_unknown", "use_average")
# Other settings, and the methods that have them.
_OF_METHODS = {
    "max_symbols_per_frame": ("greedy", "modified_beam"),
    "beam_size": _BEAM_METHODS,
    "num_best": _BEAM_METHODS,
    "length_norm": ("modified_beam",),
}
# Scores that beam search adds: the settings that switch them on, and their other settings.
_SCORES = (
    (("ngram",), ("ngram_scale",)),
    (("bigram_texts",), ("bigram_scale",)),
    (("word_ngram", "word_texts"), ("word_scale", "word_unknown")),
    (("lm",), ("lm_scale",)),
    (("ilm_scale",), ("ilm_scale",)),
    (("hotwords",), ("hotword_bonus",)),
    (("symbol_bonus",), ("symbol_bonus",)),
)
_FILES = ("ngram", "bigram_texts", "word_ngram", "word_texts", "lm", "hotwords")
# In labels: the scales of scores in use, which are always shown, and short names of settings.
_SCALES = {
    "ngram_scale": "ngram",
    "bigram_scale": "bigrams",
    "word_scale": "words",
    "lm_scale": "lm",
    "ilm_scale": "ilm",
    "hotword_bonus": "hotwords",
    "symbol_bonus": "bonus",
}
_TAGS = {
    "max_symbols_per_frame": "symbols",
    "beam_size": "beam",
    "num_best": "nbest",
    "word_unknown": "unknown",
}
_CHUNK = 2**20
_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """The search method, its settings, and the data and checkpoint to decode.

    method: greedy; modified_beam (supports fusion); ctc_greedy and ctc_prefix_beam (supports
        fusion), of the CTC head. Models of loss.kind=ctc have only the last two; greedy is then
        ctc_greedy.
    precision: dtype of the encoder's matrix products; `auto` is bfloat16 on GPUs that have it,
        which takes half of the time, else float32. The search itself is always float32.
    fused_kernels: `auto` computes the encoder's elementwise parts with fused kernels if Triton can
        compile them for the device; `off` with plain torch. Results differ by rounding. Validations
        of a training use train.fused_kernels.
    cuda_graphs: `auto` replays the encoder's passes on a GPU as CUDA graphs, except over very large
        batches; shapes that occur several times are captured. `off` launches each kernel by itself.
        Results differ by rounding. Validations of a training use train.cuda_graphs.
    batch_seconds: of audio that transcription decodes together, with padding: segments of long
        audio and of several recordings. null: 600 to 3840 on a GPU, by its memory, and on a CPU
        each segment by itself.
    split: split of the prepared data, or several: `dev,test` or `[dev, test]`.
    checkpoint: `last`, `best` (lowest error rate on the dev set), `average` (the mean of the
        parameters of the newest three checkpoints, or of all if there are fewer, as `pruned-rnnt
        average` makes it), or the path of a checkpoint.
    use_average: decode with the running average of the parameters; not for checkpoint=average.
    max_symbols_per_frame: for greedy search with models of loss.rnnt_type=regular, and for beam
        search with models of loss.durations. 0: what exported models in sherpa-onnx emit at most in
        greedy search: 5 with loss.durations (3 in beam search), else 1.
    skip_unknown: never emit `<unk>`, like sherpa-onnx.
    beam_size, num_best: for modified beam search and CTC prefix beam search.
    length_norm: order hypotheses of modified beam search by score / (symbols + context size of the
        predictor), as icefall does, not by score.
    chunk, left: encoder frames (40 ms; 80 ms of a FastConformer) in a chunk of a causal encoder,
        and of its left context; 0: as the model is configured. A chunk of -1 is the whole
        utterance.
    metric: of error rates in result files, of validations, and of the best checkpoint: wer counts
        words, cer characters without spaces. `auto`: cer if more than a tenth of the references are
        in a script without spaces between words (Chinese, Japanese, Thai, ...).
    """

    REMOVED: ClassVar[Mapping[str, Removed]] = {
        "method": Removed(
            "use modified_beam instead of k2's fast_beam_search, or greedy instead of "
            "non_autoregressive",
            replacements={"fast_beam_search": "modified_beam", "non_autoregressive": "greedy"},
        ),
        "fast_beam": Removed(
            "decode.method=modified_beam has decode.beam_size",
            unused={"beam": 20.0, "max_contexts": 8, "max_states": 64},
        ),
        "refinements": Removed("decode.method=modified_beam has decode.beam_size", unused=0),
    }

    method: Literal["greedy", "modified_beam", "ctc_greedy", "ctc_prefix_beam"] = "greedy"
    precision: Precision = "auto"
    fused_kernels: Literal["auto", "off"] = "auto"
    cuda_graphs: Literal["auto", "off"] = "auto"
    batch_seconds: float | None = None
    # A text or a list, which `__post_init__` joins.
    split: Any = "test"
    checkpoint: str = "last"
    use_average: bool = True
    max_symbols_per_frame: int = 0
    skip_unknown: bool = True
    beam_size: int = 4
    num_best: int = 1
    length_norm: bool = True
    chunk: int = 0
    left: int = 0
    metric: MetricChoice = "auto"
    fusion: FusionConfig = field(default_factory=FusionConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", joined_names("decode.split", self.split))
        check_at_least("decode", self, max_symbols_per_frame=0, beam_size=1, num_best=1)
        check_at_least("decode", self, chunk=WHOLE, left=0)
        if self.chunk == WHOLE and self.left:
            raise ValueError(
                f"decode.left is {self.left}, but decode.chunk is {WHOLE}: a whole utterance has "
                "no left context, needs decode.left=0"
            )
        if self.batch_seconds is not None and not 0 <= self.batch_seconds < math.inf:
            raise ValueError(
                f"decode.batch_seconds is {self.batch_seconds}, needs a number >= 0 or null"
            )
        if self.fusion.enabled and self.method not in _BEAM_METHODS:
            raise ValueError(f"decode.fusion needs {_NEEDS_BEAM}, got {self.method}")
        if self.fusion.ilm_scale and self.method == "ctc_prefix_beam":
            raise ValueError(
                f"decode.fusion.ilm_scale is {self.fusion.ilm_scale}, which needs "
                "decode.method=modified_beam: a CTC head has no internal language model"
            )
        if self.num_best > 1 and self.method not in _BEAM_METHODS:
            raise ValueError(
                f"decode.num_best is {self.num_best}, which needs {_NEEDS_BEAM}: {self.method} "
                "finds one hypothesis"
            )

    @property
    def splits(self) -> list[str]:
        """The names of `split`."""
        return list(self.split.split(","))


def warn_of_unused_settings(config: DecodeConfig) -> None:
    """Warn of settings that a beam search ignores, because they belong to scores not in use.

    No error: the config.yaml of a run may keep scales for commands that name the files.
    """
    if config.method not in _BEAM_METHODS:
        return
    for switches, settings in _SCORES:
        if any(getattr(config.fusion, switch) for switch in switches):
            continue
        for name in settings:
            value, default = getattr(config.fusion, name), getattr(FusionConfig(), name)
            if value != default:
                needs = " or ".join(f"decode.fusion.{switch}" for switch in switches)
                logger.warning(
                    "decode.fusion.%s is %g, which has no effect without %s: set that, or "
                    "decode.fusion.%s=%g",
                    *(name, value, needs, name, default),
                )


def result_settings(config: DecodeConfig) -> dict[str, Any]:
    """The settings that the method reads, by their keys in the section `decode`.

    Settings that change results by rounding alone are left out: kernels, graphs, batches.
    """
    names = [name for name, methods in _OF_METHODS.items() if config.method in methods]
    found = {name: getattr(config, name) for name in ("method", *names, *_ALWAYS)}
    if config.checkpoint == "average":  # of the parameters themselves
        del found["use_average"]
        found["checkpoint"] = "average"
    if config.method in _BEAM_METHODS:
        for switches, settings in _SCORES:
            if any(getattr(config.fusion, switch) for switch in switches):
                found |= {f"fusion.{name}": getattr(config.fusion, name) for name in settings}
    return found


def file_digests(config: FusionConfig, language_model: LanguageModel | None) -> dict[str, str]:
    """A digest of the contents of each file that the configuration names, by key.

    Args:
        language_model: the model that `config.lm` names.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = {}
    for name in _FILES:
        if not getattr(config, name):
            continue
        path = Path(getattr(config, name))
        if name == "lm":
            assert language_model is not None
            digest = fingerprint(language_model)
        elif not path.exists():
            raise FileNotFoundError(f"decode.fusion.{name} is {path}, and there is no such file")
        elif path.is_dir():
            digest = hashlib.sha256("\n".join(read_texts(path, name)).encode()).hexdigest()
        else:
            digest = file_digest(path)
        found[f"fusion.{name}"] = digest[:_DIGITS]
    return found


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def label(settings: Mapping[str, Any]) -> str:
    """Method, scales of fusion and settings that are not defaults, for the names of files."""
    scales, others = [], []
    for key, value in settings.items():
        name = key.rpartition(".")[2]
        if name in _SCALES:
            scales.append(f"{_SCALES[name]}{value:g}")
        elif key not in ("method", "checkpoint") and value != _default(key):
            others.append(_tag(name, value))
    return "-".join([settings["method"], *scales, *others])


def _default(key: str) -> Any:
    value: Any = DecodeConfig()
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _tag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name.removeprefix("use_") if value else f"no_{name.removeprefix('use_')}"
    return value if isinstance(value, str) else f"{_TAGS.get(name, name)}{value:g}"
