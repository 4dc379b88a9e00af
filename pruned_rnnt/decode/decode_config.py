"""The settings of the section `decode`: the search method, and what to decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pruned_rnnt.config.checks import Removed, check_at_least, joined_names
from pruned_rnnt.decode.encode import Precision
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.decode.scoring.headline import MetricChoice
from pruned_rnnt.model.encoder import WHOLE

BEAM_METHODS = ("modified_beam", "ctc_prefix_beam")
_NEEDS_BEAM = f"decode.method={' or '.join(BEAM_METHODS)}"


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
    cuda_graphs: `auto` replays the encoder's passes over small batches on a GPU as CUDA graphs;
        shapes that occur several times are captured. `off` launches each kernel by itself. Results
        differ by rounding. Validations of a training use train.cuda_graphs.
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
    length_norm: order hypotheses of modified beam search by score per symbol.
    chunk, left: encoder frames (40 ms) in a chunk of a causal encoder, and of its left context; 0:
        as the model is configured. A chunk of -1 is the whole utterance.
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
        if self.batch_seconds is not None and not self.batch_seconds >= 0:
            raise ValueError(f"decode.batch_seconds is {self.batch_seconds}, needs >= 0 or null")
        if self.fusion.enabled and self.method not in BEAM_METHODS:
            raise ValueError(f"decode.fusion needs {_NEEDS_BEAM}, got {self.method}")
        if self.fusion.ilm_scale and self.method == "ctc_prefix_beam":
            raise ValueError(
                f"decode.fusion.ilm_scale is {self.fusion.ilm_scale}, which needs "
                "decode.method=modified_beam: a CTC head has no internal language model"
            )
        if self.num_best > 1 and self.method not in BEAM_METHODS:
            raise ValueError(
                f"decode.num_best is {self.num_best}, which needs {_NEEDS_BEAM}: {self.method} "
                "finds one hypothesis"
            )

    @property
    def splits(self) -> list[str]:
        """The names of `split`."""
        return list(self.split.split(","))
