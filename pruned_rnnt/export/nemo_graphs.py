"""The graphs of a TDT model, or of a model from NeMo, in the form of NeMo's exports.

Axes: N batch or streams, F mel bins, T feature frames, T' encoder frames, J joiner width, E encoder
width, H context size of the predictor, L LSTM or encoder layers, P LSTM width, or encoder frames of
the past, V vocabulary, D frames of the longest duration; of a chunk of a stream: C encoder frames,
T = 8 C feature frames, K frames of a convolution's past, B feature frames of the past.

    encoder  audio_signal (N,F,T), length (N)                       -> outputs (N,J,T'), lengths (N)
    decoder  targets (N,1) int32, target_length (N) int32, two states (L,N,P)
                                                 -> outputs (N,J,1), lengths, next states
    joiner   encoder_outputs (N,J,1), decoder_outputs (N,J,1)       -> logits (N,1,1,V+D+1)

    model    audio_signal (N,F,T), length (N)      -> logprobs (N,T',V), lengths; of a CTC model

The blank is the last symbol there: the ids of all others are one less than ours. A duration is the
index of its logit; without durations there are V logits. The states of an LSTM are its outputs and
cells, zero at the start. Those of a stateless predictor are (1,N,1): the first one is the symbol
before the target as a float, one more than our id, so that the initial 0 stands for -1, the context
before the first symbol; the second one is not used.

The features that sherpa-onnx computes for such models differ a little from those of training: a
graph for our features converts them (tdt_features.py), one for NeMo's uses them as they are.

Of a causal model of NeMo, the encoder for one chunk has the form of NeMo's cache-aware exports:

    audio_signal (N,F,T), length (N), cache_last_channel (N,L,P,E), cache_last_time (N,1,1,S),
    cache_last_channel_len (N) feature frames
        -> outputs (N,J,C), encoded_lengths (N), and the three caches

The S numbers of a stream are the past of the convolutions (L,K,E), then that of the features (B,F).
The output of a CTC model is logprobs (N,C,V). sherpa-onnx creates the first caches: zeros, in the
shapes of the metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID
from pruned_rnnt.export.graphs import MAX_FRAMES, MIN_FRAMES, Graph
from pruned_rnnt.export.streaming_graphs import StreamingEncoderGraph, output_layer
from pruned_rnnt.export.tdt_features import KaldiFeatures
from pruned_rnnt.model.encoder_kinds import stream_encoder
from pruned_rnnt.model.ensemble_encoder import EnsembleEncoder
from pruned_rnnt.model.fastconformer import StreamingFastConformer
from pruned_rnnt.model.predictor import LstmPredictor
from pruned_rnnt.model.speech_model import CtcModel, SpeechModel, TransducerModel
from pruned_rnnt.system.usage_errors import ExportError

# Practically minus infinity: the logit of what is not chosen.
NEVER = -1e9
# One of the model types that sherpa-onnx recognises as transducers of NeMo.
_MODEL_TYPE = "EncDecRNNTBPEModel"
_CTC_MODEL_TYPE = "EncDecCTCModelBPE"


class TdtEncoderGraph(nn.Module):
    """The encoder and the joiner's projection, for the features of sherpa-onnx.

    sherpa-onnx has normalised those of `normalize_type`; to do so again changes nothing.
    """

    def __init__(self, model: SpeechModel) -> None:
        super().__init__()
        is_nemo = model.config.encoder.features == "nemo"
        self.features = NemoFeatures() if is_nemo else KaldiFeatures()
        self.encoder = model.encoder
        self.output = NemoOutput(model)

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        encoded_NTE, lengths = self.encoder(self.features(audio_signal), length)
        return self.output(encoded_NTE), lengths


class NemoOutput(nn.Module):
    """The output of an encoder (N, T', E) for sherpa-onnx.

    Of a transducer, the joiner's projection (N, J, T'); of a CTC model, log-probabilities
    (N, T', V) with the blank as the last symbol.

    Attributes:
        graph_name, name: of the graph and of its output.
        frame_axis: the axis of the frames.
    """

    def __init__(self, model: SpeechModel) -> None:
        super().__init__()
        self.projection = output_layer(model)
        self.is_ctc = isinstance(model, CtcModel)
        names = ("model", "logprobs") if self.is_ctc else ("encoder", "outputs")
        self.graph_name, self.name = names
        self.frame_axis = 1 if self.is_ctc else 2

    def forward(self, encoded_NTE: Tensor) -> Tensor:
        projected_NTJ: Tensor = self.projection(encoded_NTE)
        if not self.is_ctc:
            return projected_NTJ.transpose(1, 2)
        return torch.cat((projected_NTJ[..., 1:], projected_NTJ[..., :1]), dim=-1)


class NemoFeatures(nn.Module):
    """Log-energies of NeMo's filters (N, F, T) -> (N, T, F)."""

    def forward(self, features_NFT: Tensor) -> Tensor:
        return features_NFT.transpose(1, 2)


class LstmDecoderGraph(nn.Module):
    """An LSTM predictor and the joiner's projection, for one symbol."""

    def __init__(self, model: TransducerModel) -> None:
        super().__init__()
        assert isinstance(model.predictor, LstmPredictor)
        self.predictor = model.predictor
        self.projection = model.joiner.decoder_proj
        self.vocab_size = model.vocab_size
        self.state_sizes = model.predictor.config.layers, model.predictor.config.dim

    def forward(
        self, targets: Tensor, target_length: Tensor, hidden_LNP: Tensor, cell_LNP: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        symbols_N = (targets[:, 0].long() + 1) % self.vocab_size
        # Not the LSTM module: this is the step of our search.
        before = hidden_LNP.transpose(0, 1), cell_LNP.transpose(0, 1)
        output_NP, after = self.predictor.step(symbols_N, before)
        output_NJ = self.projection(output_NP)
        hidden_LNP, cell_LNP = (x_NLP.transpose(0, 1) for x_NLP in after)
        return output_NJ[:, :, None], target_length + 0, hidden_LNP, cell_LNP


class TdtDecoderGraph(nn.Module):
    """A stateless predictor and the joiner's projection, for one symbol."""

    state_sizes = 1, 1

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
        context_NH = symbols_N1
        if self.context_size == 2:
            context_NH = torch.cat((state[0].long() - 1, symbols_N1), dim=1)
        output_NJ = self.projection(self.predictor(context_NH)[:, 0])
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
        self.has_durations = bool(durations)
        # A duration that the model does not have takes the place after the last one.
        all_durations = range(max(durations, default=-1) + 1)
        places = [durations.index(d) if d in durations else len(durations) for d in all_durations]
        self.register_buffer("places", torch.tensor(places))

    def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> Tensor:
        inputs = encoder_outputs[:, :, 0], decoder_outputs[:, :, 0]
        if self.has_durations:
            logits_NV, duration_logits_NK = self.joiner.with_durations(*inputs)
        else:
            logits_NV, duration_logits_NK = self.joiner(*inputs), None
        logits_NV = logits_NV.index_select(1, self.order)
        if self.has_unknown:
            others = logits_NV[:, : UNKNOWN_ID - 1], logits_NV[:, UNKNOWN_ID:-1]
            unknown_N1 = logits_NV[:, UNKNOWN_ID - 1 : UNKNOWN_ID]
            blank_N1 = torch.maximum(logits_NV[:, -1:], unknown_N1)
            never_N1 = torch.full_like(unknown_N1, NEVER)
            logits_NV = torch.cat((others[0], never_N1, others[1], blank_N1), dim=1)
        if duration_logits_NK is None:
            return logits_NV[:, None, None]
        missing_N1 = torch.full_like(duration_logits_NK[:, :1], NEVER)
        with_missing = torch.cat((duration_logits_NK, missing_N1), dim=1)
        durations_ND = with_missing.index_select(1, self.places)
        return torch.cat((logits_NV, durations_ND), dim=1)[:, None, None]


def decoder_and_joiner(model: TransducerModel) -> tuple[Graph, Graph]:
    """The graphs beside that of the encoder."""
    batch = torch.export.Dim("N")
    width = model.config.joiner_dim
    symbols = torch.zeros(2, 1, dtype=torch.int32)
    module = _decoder(model)
    layers, size = module.state_sizes
    states = torch.zeros(layers, 2, size), torch.zeros(layers, 2, size)
    decoder = Graph(
        name="decoder",
        module=module,
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
    return decoder, joiner


def tdt_encoder(model: SpeechModel) -> Graph:
    """The encoder for whole utterances; of a CTC model, the whole model."""
    module = TdtEncoderGraph(model)
    batch = torch.export.Dim("N")
    frames = torch.export.Dim("T", min=MIN_FRAMES, max=MAX_FRAMES)
    bins = model.encoder.config.num_mel_bins
    return Graph(
        name=module.output.graph_name,
        module=module,
        inputs=(torch.full((2, bins, 103), -5.0), torch.tensor([103, 90])),
        input_names=("audio_signal", "length"),
        output_names=(module.output.name, "encoded_lengths"),
        dynamic_axes=({0: batch, 2: frames}, {0: batch}),
    )


def _decoder(model: TransducerModel) -> LstmDecoderGraph | TdtDecoderGraph:
    is_lstm = isinstance(model.predictor, LstmPredictor)
    return LstmDecoderGraph(model) if is_lstm else TdtDecoderGraph(model)


def has_nemo_layout(model: SpeechModel) -> bool:
    """Whether a model is exported as one of NeMo: it has durations, or NeMo's features."""
    if model.config.encoder.features == "nemo":
        return True
    return isinstance(model, TransducerModel) and bool(model.loss_config.durations)


def check_tdt_export(model: SpeechModel, *, streaming: bool, fp16: bool) -> None:
    """Raise ExportError for options and models that sherpa-onnx or the features do not support."""
    kind = "loss.durations" if model.loss_config.durations else "model.encoder.features=nemo"
    if isinstance(model.encoder, EnsembleEncoder):
        raise ExportError(
            f"--format onnx does not work for an ensemble of models of {kind}: use --format torch"
        )
    if model.loss_config.hat:
        raise ExportError(f"loss.hat is true, which sherpa-onnx does not run for a model of {kind}")
    if streaming and model.loss_config.durations:
        raise ExportError(
            f"--streaming does not work for a model of {kind}: sherpa-onnx cannot stream TDT "
            "models; export without it, or use `pruned-rnnt transcribe` for streams"
        )
    if fp16:
        raise ExportError(
            f"--fp16 does not work for a model of {kind}: the energies of its features are "
            "too small for half precision; use --int8"
        )


def has_normalised_features(model: SpeechModel) -> bool:
    """Whether sherpa-onnx normalises the features, as the model's encoder does in training."""
    encoder = model.encoder.config
    return (encoder.features, getattr(encoder, "feature_norm", "none")) == ("nemo", "bins")


def tdt_metadata(model: SpeechModel) -> dict[str, Any]:
    """The metadata that sherpa-onnx reads from the encoder; vocab_size excludes the blank."""
    encoder = model.encoder.config
    shared = {
        "vocab_size": model.vocab_size - 1,
        "subsampling_factor": model.encoder.subsampling_factor,
        "normalize_type": "per_feature" if has_normalised_features(model) else "",
        "feat_dim": encoder.num_mel_bins,
    }
    if not isinstance(model, TransducerModel):
        return {**shared, "model_type": _CTC_MODEL_TYPE}
    layers, size = _decoder(model).state_sizes
    return {
        **shared,
        "model_type": _MODEL_TYPE,
        # With `tdt`, sherpa-onnx expects durations in the joiner's output.
        "url": "tdt" if model.loss_config.durations else "",
        "pred_rnn_layers": layers,
        "pred_hidden": size,
    }


def tdt_tokens(symbols: list[str]) -> str:
    """tokens.txt: the blank is the last symbol, and has the name that sherpa-onnx looks for."""
    names = [*symbols[1:], "<blk>"]
    return "".join(f"{name} {index}\n" for index, name in enumerate(names))


class StreamingNemoGraph(StreamingEncoderGraph):
    layout = "nemo_transducer"
    state_names = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
    next_names = tuple(f"{name}_next" for name in state_names)
    stream_axes = (0, 0, 0)
    stream: StreamingFastConformer

    def __init__(self, model: SpeechModel, stream: StreamingFastConformer) -> None:
        super().__init__()
        self.stream = stream
        self.features = NemoFeatures()
        self.output = NemoOutput(model)
        self.frame_axis = self.output.frame_axis
        self.own_metadata = tdt_metadata(model)

    def forward(self, audio_signal: Tensor, length: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        state = self.stream.unpack(self._packed(*states))
        encoded_NCE, after = self.stream(self.features(audio_signal), state)
        lengths_N = length // self.stream.encoder.subsampling_factor
        return self.output(encoded_NCE), lengths_N, *self._caches(*self.stream.pack(after))

    def start(self, streams: int) -> tuple[Tensor, ...]:
        return self._caches(*self.stream.pack(self.stream.start(streams)))

    def inputs(self, chunk_NTF: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        frames_N = torch.full((len(chunk_NTF),), chunk_NTF.size(1))
        return chunk_NTF.transpose(1, 2).contiguous(), frames_N, *states

    def advance(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(outputs[2:])

    def metadata(self) -> dict[str, Any]:
        channel, time, _ = self.start(1)
        values = {
            **self.own_metadata,
            "window_size": self.stream.input_frames,
            "chunk_shift": self.stream.shift,
        }
        for name, cache in (("channel", channel), ("time", time)):
            for axis in range(1, cache.dim()):
                values[f"cache_last_{name}_dim{axis}"] = cache.size(axis)
        return values

    def _caches(
        self, attention_NLPE: Tensor, convolution_NLKE: Tensor, frames_N: Tensor, past_NBF: Tensor
    ) -> tuple[Tensor, ...]:
        numbers_NS = torch.cat((convolution_NLKE.flatten(1), past_NBF.flatten(1)), dim=1)
        return attention_NLPE, numbers_NS[:, None, None], frames_N

    def _packed(
        self, attention_NLPE: Tensor, time_N11S: Tensor, frames_N: Tensor
    ) -> tuple[Tensor, ...]:
        """The state of the streaming encoder, packed."""
        _, convolution_LKNE, _, past_NBF = self.stream.start(1)
        assert past_NBF is not None
        layers, frames, _, width = convolution_LKNE.shape
        convolution_NS, past_NS = time_N11S[:, 0, 0].split(
            (layers * frames * width, past_NBF[0].numel()), dim=1
        )
        return (
            attention_NLPE,
            convolution_NS.unflatten(1, (layers, frames, width)),
            frames_N,
            past_NS.unflatten(1, past_NBF.shape[1:]),
        )


def nemo_stream(model: SpeechModel, chunk_size: int, left_frames: int) -> Graph:
    """The graph of the causal encoder, or of a whole CTC model; errors as for `stream_encoder`."""
    streams = torch.export.Dim("N")
    stream = stream_encoder(model.encoder, chunk_size, left_frames)
    assert isinstance(stream, StreamingFastConformer)
    module = StreamingNemoGraph(model, stream)
    chunk_NTF = torch.full((2, stream.input_frames, model.encoder.config.num_mel_bins), -5.0)
    return Graph(
        name=module.output.graph_name,
        module=module,
        inputs=module.inputs(chunk_NTF, module.start(2)),
        input_names=("audio_signal", "length", *module.state_names),
        output_names=(module.output.name, "encoded_lengths", *module.next_names),
        dynamic_axes=({0: streams}, {0: streams}, ({0: streams},) * len(module.state_names)),
    )
