"""The graphs of an exported TDT model, in the form that sherpa-onnx runs: that of NeMo's exports.

Axes: N batch, F mel bins, T feature frames, T' encoder frames, J joiner width, C context size of
the predictor, V vocabulary, D frames of the longest duration.

    encoder  audio_signal (N,F,T), length (N)                       -> outputs (N,J,T'), lengths (N)
    decoder  targets (N,1) int32, target_length (N) int32, two states (1,N,1)
                                                 -> outputs (N,J,1), lengths, next states
    joiner   encoder_outputs (N,J,1), decoder_outputs (N,J,1)       -> logits (N,1,1,V+D+1)

The blank is the last symbol there: the ids of all others are one less than ours. The features
differ from ours, see tdt_features.py. A duration is the index of its logit. The first state is the
symbol before the target as a float, one more than our id, so that the initial 0 stands for -1, the
context before the first symbol. The second state is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID
from pruned_rnnt.export.graphs import MAX_FRAMES, MIN_FRAMES, Graph
from pruned_rnnt.export.tdt_features import KaldiFeatures
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.system.usage_errors import ExportError

# Practically minus infinity.
_NEVER = -1e9
# One of the model types that sherpa-onnx recognises as transducers of NeMo.
_MODEL_TYPE = "EncDecRNNTBPEModel"


class TdtEncoderGraph(nn.Module):
    """The encoder and the joiner's projection, for the features of sherpa-onnx."""

    def __init__(self, model: TransducerModel) -> None:
        super().__init__()
        self.features = KaldiFeatures()
        self.encoder = model.encoder
        self.projection = model.joiner.encoder_proj

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        encoded_NTE, lengths = self.encoder(self.features(audio_signal), length)
        return self.projection(encoded_NTE).transpose(1, 2), lengths


class TdtDecoderGraph(nn.Module):
    """The predictor and the joiner's projection, for one symbol."""

    def __init__(self, model: TransducerModel) -> None:
        super().__init__()
        self.predictor = model.predictor
        self.projection = model.joiner.decoder_proj
        self.context_size = model.predictor.context_size
        self.vocab_size = model.vocab_size

    def forward(
        self, targets: Tensor, target_length: Tensor, state: Tensor, unused: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        symbols_N1 = (targets.long() + 1) % self.vocab_size
        context_NC = symbols_N1
        if self.context_size == 2:
            context_NC = torch.cat((state[0].long() - 1, symbols_N1), dim=1)
        output_NJ = self.projection(self.predictor(context_NC)[:, 0])
        next_state = (symbols_N1 + 1).to(state.dtype)[None]
        # Sums, because an output of a graph must not be one of its inputs.
        return output_NJ[:, :, None], target_length + 0, next_state, unused + 0


class TdtJoinerGraph(nn.Module):
    """The joiner, for one frame and one symbol.

    sherpa-onnx emits `<unk>`. Here it never wins: the blank gets its logit where that is larger, so
    that the most probable symbol is that of our greedy search.
    """

    order: Tensor
    places: Tensor

    def __init__(self, model: TransducerModel) -> None:
        super().__init__()
        self.joiner = model.joiner
        self.has_unknown = model.vocab_size > UNKNOWN_ID
        blank = model.predictor.blank
        symbols = [symbol for symbol in range(model.vocab_size) if symbol != blank]
        self.register_buffer("order", torch.tensor([*symbols, blank]))
        durations = model.loss_config.durations
        # A duration that the model does not have takes the place after the last one.
        places = [durations.index(d) if d in durations else len(durations) for d in _all(durations)]
        self.register_buffer("places", torch.tensor(places))

    def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> Tensor:
        inputs = encoder_outputs[:, :, 0], decoder_outputs[:, :, 0]
        logits_NV, duration_logits_NK = self.joiner.with_durations(*inputs)
        logits_NV = logits_NV.index_select(1, self.order)
        if self.has_unknown:
            others = logits_NV[:, : UNKNOWN_ID - 1], logits_NV[:, UNKNOWN_ID:-1]
            unknown_N1 = logits_NV[:, UNKNOWN_ID - 1 : UNKNOWN_ID]
            blank_N1 = torch.maximum(logits_NV[:, -1:], unknown_N1)
            never_N1 = torch.full_like(unknown_N1, _NEVER)
            logits_NV = torch.cat((others[0], never_N1, others[1], blank_N1), dim=1)
        missing_N1 = torch.full_like(duration_logits_NK[:, :1], _NEVER)
        with_missing = torch.cat((duration_logits_NK, missing_N1), dim=1)
        durations_ND = with_missing.index_select(1, self.places)
        return torch.cat((logits_NV, durations_ND), dim=1)[:, None, None]


def _all(durations: tuple[int, ...]) -> range:
    return range(max(durations) + 1)


def tdt_graphs(model: TransducerModel) -> tuple[Graph, ...]:
    """Encoder, decoder and joiner."""
    batch = torch.export.Dim("N")
    frames = torch.export.Dim("T", min=MIN_FRAMES, max=MAX_FRAMES)
    width, bins = model.config.joiner_dim, model.encoder.config.num_mel_bins
    encoder = Graph(
        name="encoder",
        module=TdtEncoderGraph(model),
        inputs=(torch.full((2, bins, 103), -5.0), torch.tensor([103, 90])),
        input_names=("audio_signal", "length"),
        output_names=("outputs", "encoded_lengths"),
        dynamic_axes=({0: batch, 2: frames}, {0: batch}),
    )
    symbols = torch.zeros(2, 1, dtype=torch.int32)
    states = torch.zeros(1, 2, 1), torch.zeros(1, 2, 1)
    decoder = Graph(
        name="decoder",
        module=TdtDecoderGraph(model),
        inputs=(symbols, torch.ones(2, dtype=torch.int32), *states),
        input_names=("targets", "target_length", "states.1", "states.2"),
        output_names=("outputs", "prednet_lengths", "next_states.1", "next_states.2"),
        dynamic_axes=({0: batch}, {0: batch}, {1: batch}, {1: batch}),
    )
    joiner = Graph(
        name="joiner",
        module=TdtJoinerGraph(model),
        inputs=(torch.zeros(2, width, 1), torch.zeros(2, width, 1)),
        input_names=("encoder_outputs", "decoder_outputs"),
        output_names=("logits",),
        dynamic_axes=({0: batch}, {0: batch}),
    )
    return encoder, decoder, joiner


def check_tdt_export(*, streaming: bool, fp16: bool) -> None:
    """Raise ExportError for options that sherpa-onnx or the features do not support."""
    if streaming:
        raise ExportError(
            "--streaming does not work for a model of loss.durations: sherpa-onnx cannot stream "
            "TDT models; export without it, or use `pruned-rnnt transcribe` for streams"
        )
    if fp16:
        raise ExportError(
            "--fp16 does not work for a model of loss.durations: the energies of its features are "
            "too small for half precision; use --int8"
        )


def tdt_metadata(model: TransducerModel) -> dict[str, Any]:
    """The metadata that sherpa-onnx reads from the encoder; vocab_size excludes the blank."""
    return {
        "model_type": _MODEL_TYPE,
        # With this value, sherpa-onnx expects durations in the joiner's output.
        "url": "tdt",
        "vocab_size": model.vocab_size - 1,
        "subsampling_factor": SUBSAMPLING_FACTOR,
        "normalize_type": "",
        "pred_rnn_layers": 1,
        "pred_hidden": 1,
        "feat_dim": model.encoder.config.num_mel_bins,
    }


def tdt_tokens(symbols: list[str]) -> str:
    """tokens.txt: the blank is the last symbol, and has the name that sherpa-onnx looks for."""
    names = [*symbols[1:], "<blk>"]
    return "".join(f"{name} {index}\n" for index, name in enumerate(names))
