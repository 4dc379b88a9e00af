"""Fast beam search with k2: hypotheses are paths of a lattice that k2 builds on the device.

Axes: N batch, T encoder frames, E encoder width, D joiner width, H hypotheses of all utterances,
C context size, V vocabulary.

k2 (https://k2-fsa.github.io/k2) keeps, for each utterance, the states whose score is within a beam,
and merges those with the same last C symbols; a frame emits at most one symbol. This module passes
log-probabilities to k2's decoding streams and reads the best path. k2 is not available for every
version of torch; `modified_beam` needs no other package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.config.checks import check_at_least
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.search.search_arguments import silent_mask
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import joint_log_probs

# Practically minus infinity, but finite, so that k2 can add it.
_MINUS_INFINITY = -1e5


@dataclass(frozen=True, kw_only=True)
class FastBeamConfig:
    """Limits on the states that k2 keeps after a frame.

    beam: states this much below the best are dropped; a natural log-probability.
    max_contexts, max_states: maximum number of contexts and of states per utterance.
    """

    beam: float = 20.0
    max_contexts: int = 8
    max_states: int = 64

    def __post_init__(self) -> None:
        check_at_least("decode.fast_beam", self, beam=0, max_contexts=1, max_states=1)


class FastBeamSearch:
    """Finds the best path of each utterance.

    Args:
        model: in evaluation mode, with a stateless predictor and blank 0.
        silent_symbols: ids that are never emitted (such as `<unk>`).

    Raises:
        ValueError: k2 cannot be imported, or the predictor is not stateless.
    """

    def __init__(
        self, model: TransducerModel, config: FastBeamConfig, silent_symbols: Sequence[int] = ()
    ) -> None:
        try:
            import k2
        except (ImportError, OSError) as error:
            raise ValueError(
                "fast_beam_search needs k2, which cannot be imported here "
                f"({str(error).splitlines()[0]}): install the k2 that fits your torch, or use "
                "decode.method=modified_beam, which needs nothing else"
            ) from error
        if not isinstance(model.predictor, StatelessPredictor):
            raise ValueError(
                "fast_beam_search merges hypotheses with the same last symbols: it needs "
                "model.predictor.kind=stateless; use decode.method=modified_beam"
            )
        self._k2: Any = k2
        self.model = model
        self.config = config
        self._silent_V = silent_mask(model.vocab_size, silent_symbols)

    @torch.inference_mode()
    def __call__(self, encoded_NTE: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode whole utterances: (N, T, E) output of `model.encode` and (N,) lengths."""
        k2, model = self._k2, self.model
        self._silent_V = self._silent_V.to(encoded_NTE.device)
        graph = k2.trivial_graph(model.vocab_size - 1, device=encoded_NTE.device)
        streams = k2.RnntDecodingStreams(
            [k2.RnntDecodingStream(graph) for _ in range(len(encoded_NTE))],
            k2.RnntDecodingConfig(
                vocab_size=model.vocab_size,
                decoder_history_len=model.predictor.context_size,
                beam=self.config.beam,
                max_contexts=self.config.max_contexts,
                max_states=self.config.max_states,
            ),
        )
        am_NTD = model.joiner.encoder_proj(encoded_NTE)
        for t in range(am_NTD.size(1)):
            shape, contexts_HC = streams.get_contexts()
            utterance_H = shape.row_ids(1).long()
            streams.advance(self._log_probs(am_NTD[utterance_H, t], contexts_HC.long()))
        streams.terminate_and_flush_to_streams()
        lattice = streams.format_output(lengths.tolist())
        best = k2.shortest_path(lattice, use_double_scores=True)
        return self._hypotheses(best, lengths.tolist())

    def _log_probs(self, am_HD: Tensor, contexts_HC: Tensor) -> Tensor:
        """(H, V). k2 fills contexts before the first symbol with 0, our models with -1, ..., 0."""
        started_HC = contexts_HC.clone()
        started_HC[:, :-1].masked_fill_(contexts_HC[:, 1:] == 0, -1)
        lm_HD = self.model.joiner.decoder_proj(self.model.predictor(started_HC)[:, 0])
        log_probs_HV = joint_log_probs(
            self.model.joiner(am_HD, lm_HD), self.model.predictor.blank, self.model.loss_config.hat
        )
        return log_probs_HV.masked_fill(self._silent_V, _MINUS_INFINITY)

    def _hypotheses(self, best: Any, lengths: Sequence[int]) -> list[list[Hypothesis]]:
        """Read paths: an arc per frame (label 0 for blank), then one to the final state."""
        shape = best.arcs.shape().remove_axis(1)
        labels_NT = self._k2.RaggedTensor(shape, best.labels.contiguous()).tolist()
        scores_NT = self._k2.RaggedTensor(shape, best.scores.contiguous()).tolist()
        totals = best.get_tot_scores(use_double_scores=True, log_semiring=False).tolist()
        found = []
        for labels, scores, total, length in zip(
            labels_NT, scores_NT, totals, lengths, strict=True
        ):
            frames = [frame for frame, label in enumerate(labels[:length]) if label > 0]
            found.append(
                [
                    Hypothesis(
                        symbols=tuple(labels[frame] for frame in frames),
                        frames=tuple(frames),
                        score=total,
                        symbol_scores=tuple(scores[frame] for frame in frames),
                    )
                ]
            )
        return found
