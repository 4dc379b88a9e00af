"""Predictors: the base class, the stateless one (Ghodsi et al. 2020) over one or two symbols, and
the LSTM (Graves 2012), whose output depends on all previous symbols, with its layers.

Axes: N batch, U symbols, L symbols with their start context, or LSTM layers, C context size, R rows
of a search, P predictor width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.schedule import Clock
from pruned_rnnt.ops.common.plain_layers import called_weight, hook_of

State = tuple[Tensor, ...]
# Fraction of the training batches on which each balancer acts.
_BALANCER_PROBABILITY = 0.05


@dataclass(frozen=True, kw_only=True)
class AnyPredictorConfig:
    """Settings that all predictors have; `kind` is the name in configuration files.

    dim: width of the output, P.
    """

    kind: str
    dim: int = 128


class Predictor(nn.Module):
    """Base class of predictors, which encode the previous symbols for the joiner.

    In a search, the state of each hypothesis is a row (first axis) of some tensors; a search may
    select, repeat and reorder rows.

    Attributes:
        blank: the symbol before the first one.
        context_size: number of symbols of the start context.
    """

    blank: int
    context_size: int

    def forward_targets(self, targets_NU: Tensor) -> Tensor:
        """Output before each target and after the last one: (N, U) -> (N, U + 1, P)."""
        raise NotImplementedError

    def start(self, rows: int, device: torch.device) -> tuple[Tensor, State]:
        """Output (R, P) before the first symbol, and the state."""
        raise NotImplementedError

    def step(self, symbols_R: Tensor, state: State) -> tuple[Tensor, State]:
        """(R,) symbols -> the output (R, P) after them, and the new state."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PredictorConfig(AnyPredictorConfig):
    """Embedding and convolution over the last symbols.

    kind: `stateless`, or `lstm` for the other predictor.
    context_size: number of previous symbols that the output depends on, 1 or 2.
    balancers: in 5% of the training batches, the gradients of the embeddings and of the output also
        push the mean absolute value of each channel to between 0.5 and 1, as in icefall's Zipformer
        recipes: otherwise they may drift, which harms averaged parameters.
    """

    kind: Literal["stateless"] = "stateless"
    context_size: int = 2
    balancers: bool = False

    def __post_init__(self) -> None:
        if self.context_size not in (1, 2):
            raise ValueError(
                f"model.predictor.context_size is {self.context_size}, needs to be 1 or 2"
            )
        if self.dim < 1 or self.dim % 4:
            raise ValueError(f"model.predictor.dim is {self.dim}, needs a multiple of 4")


class _Tables(NamedTuple):
    """The result of `context_tables`, with what tells whether it is still valid: the weights that
    it was made of, their addresses and versions, and copies of them, because only the values show
    a change through `.data`."""

    tables: Tensor
    weights: list[Tensor]
    versions: list[tuple[int, int]]
    copies: list[Tensor]


class StatelessPredictor(Predictor):
    """Embedding, grouped convolution over the context, ReLU; for a context of one symbol only the
    embedding, as in icefall's recipe.

    Negative symbols embed to zero. The start context is [-1, ..., -1, blank], as sherpa-onnx
    expects.
    """

    def __init__(self, config: PredictorConfig, vocab_size: int, blank: int = 0) -> None:
        super().__init__()
        self.context_size = config.context_size
        self.blank = blank
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.convolution: nn.Conv1d | None = None
        if config.context_size > 1:
            self.convolution = nn.Conv1d(
                config.dim, config.dim, config.context_size, groups=config.dim // 4, bias=False
            )
        self._kept_tables: _Tables | None = None
        self._clock = Clock()
        probability = _BALANCER_PROBABILITY if config.balancers else 0.0
        self.embedding_balancer = _balancer(self._clock, probability)
        self.output_balancer = _balancer(self._clock, probability)

    def start_context(self, batch_size: int, device: torch.device) -> Tensor:
        """(N, C) int64: the context before the first symbol."""
        context_NC = torch.full((batch_size, self.context_size), -1, device=device)
        context_NC[:, -1] = self.blank
        return context_NC

    def forward(self, symbols_NL: Tensor) -> Tensor:
        """Output after each window of C symbols: (N, L) -> (N, L - C + 1, P)."""
        return self._combined(self._embedded(symbols_NL))

    def _embedded(self, symbols_NL: Tensor) -> Tensor:
        embedded_NLP: Tensor = self.embedding(symbols_NL.clamp(min=0))
        return embedded_NLP * (symbols_NL >= 0).unsqueeze(-1)

    def _combined(self, embedded_NLP: Tensor) -> Tensor:
        if self.convolution is None:
            return embedded_NLP
        if embedded_NLP.is_cuda and torch.is_grad_enabled():
            return torch.relu(_grouped_convolution(self.convolution, embedded_NLP))
        mixed_NPL = self.convolution(embedded_NLP.transpose(1, 2))
        return torch.relu(mixed_NPL.transpose(1, 2))

    def start(self, rows: int, device: torch.device) -> tuple[Tensor, State]:
        context_RC = self.start_context(rows, device)
        if device.type == "cpu" and not self.training:
            self.context_tables(compares_values=True)
        return self._output(context_RC), (context_RC,)

    def step(self, symbols_R: Tensor, state: State) -> tuple[Tensor, State]:
        context_RC = torch.cat((state[0][:, 1:], symbols_R[:, None]), dim=1)
        return self._output(context_RC), (context_RC,)

    def _output(self, context_RC: Tensor) -> Tensor:
        """Output (R, P) after the contexts.

        A convolution of so few numbers takes the CPU many times as long as its sums.
        """
        tables = None
        if context_RC.device.type == "cpu" and not self.training and not torch.is_grad_enabled():
            tables = self.context_tables()
        if tables is None:
            after_RP: Tensor = self(context_RC)[:, 0]
            return after_RP
        if self.convolution is None:
            return tables[0][context_RC[:, 0]]
        summed_RP = tables[0][context_RC[:, 0]]
        for place in range(1, self.context_size):
            summed_RP = summed_RP + tables[place][context_RC[:, place]]
        return torch.relu(summed_RP)

    def context_tables(self, compares_values: bool = False) -> Tensor | None:
        """(C, V + 1, P): what each symbol at each place of the context adds to the output, which
        for a context of several symbols goes through a ReLU. The last row, that of -1, is zero.

        None if calls of the predictor or of its layers compute something else: they are adapters or
        other subclasses, or have hooks or parametrizations. The result has no gradient. On a CPU it
        is kept until a parameter changes; a GPU makes it anew, because comparing values would wait
        for it.

        Args:
            compares_values: also notice changes through `.data`; this reads all weights, so only
                `start` does, once a batch or stream.
        """
        weights = self._called_weights()
        if weights is None:
            return None
        if weights[0].device.type != "cpu":
            return self._make_tables()
        versions = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        kept: _Tables | None = self.__dict__.get("_kept_tables")  # not in models pickled earlier
        if (
            kept is None
            or kept.versions != versions
            or any(own is not w for own, w in zip(kept.weights, weights, strict=True))
            or (compares_values and not all(map(torch.equal, kept.copies, weights)))
        ):
            copies = [w.detach().clone() for w in weights]
            kept = self._kept_tables = _Tables(self._make_tables(), weights, versions, copies)
        return kept.tables

    def _called_weights(self) -> list[Tensor] | None:
        """The weights of the layers; None if the predictor or a layer has to be called."""
        for name in _OWN_METHODS:
            if getattr(type(self), name) is not getattr(StatelessPredictor, name):
                return None
        layers: list[tuple[nn.Module, type[nn.Module]]] = [(self.embedding, nn.Embedding)]
        if self.convolution is not None:
            layers.append((self.convolution, nn.Conv1d))
        weights = []
        for layer, kind in layers:
            weight = called_weight(layer, kind)
            if weight is None:
                return None
            weights.append(weight)
        return weights if hook_of(self) is None else None

    def _make_tables(self) -> Tensor:
        embedded_VP = nn.functional.pad(self.embedding.weight.detach(), (0, 0, 0, 1))
        if self.convolution is None:
            return embedded_VP[None]
        # Each group has four channels.
        embedded_GV4 = embedded_VP.unflatten(1, (-1, 4)).transpose(0, 1)
        weight_GO4C = self.convolution.weight.detach().unflatten(0, (-1, 4))
        places = [
            (embedded_GV4 @ weight_GO4C[..., place].mT).transpose(0, 1).flatten(1)
            for place in range(self.context_size)
        ]
        return torch.stack(places)

    def forward_targets(self, targets_NU: Tensor) -> Tensor:
        self._clock.start_batch()
        # The symbols before the start embed to zero; the balancer does not count them.
        symbols_NL = nn.functional.pad(targets_NU.long(), (1, 0), value=self.blank)
        embedded_NLP: Tensor = self.embedding_balancer(self._embedded(symbols_NL))
        if self.convolution is None:
            return embedded_NLP
        padded_NLP = nn.functional.pad(embedded_NLP, (0, 0, self.context_size - 1, 0))
        output: Tensor = self.output_balancer(self._combined(padded_NLP))
        return output


# What a subclass may change of the outputs.
_OWN_METHODS = ("forward", "_embedded", "_combined", "start_context", "start", "step")


def _grouped_convolution(convolution: nn.Conv1d, x_NLP: Tensor) -> Tensor:
    """(N, L, P) -> (N, L - C + 1, P), as one matrix product with zeros between the groups.

    cuDNN launches several kernels for each group: four hundred for a hundred groups.
    """
    size, groups = convolution.kernel_size[0], convolution.groups
    weight_GOIC = convolution.weight.unflatten(0, (groups, -1))
    weight_CGIGO = torch.diag_embed(weight_GOIC.permute(3, 2, 1, 0), dim1=1, dim2=3)
    count = x_NLP.size(1) - size + 1
    windows = torch.cat([x_NLP[:, place : place + count] for place in range(size)], dim=-1)
    return windows @ weight_CGIGO.flatten(3).flatten(0, 2)


def _balancer(clock: Clock, probability: float) -> Balancer:
    """Limits the mean absolute value alone."""
    return Balancer(
        clock,
        min_positive=0.0,
        max_positive=1.0,
        min_abs=0.5,
        max_abs=1.0,
        probability=probability,
    )


def check_lstm_sizes(section: str, *, dim: int, layers: int, dropout: float) -> None:
    """Raise ValueError, with the setting's name in `section`, if a size is out of range."""
    for name, value in (("dim", dim), ("layers", layers)):
        if value < 1:
            raise ValueError(f"{section}.{name} is {value}, needs at least 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"{section}.dropout is {dropout}, needs 0 <= x < 1")


class _LstmLayers(nn.LSTM):
    """`nn.LSTM` in the precision of its parameters on a CPU, also in mixed precision.

    oneDNN has no LSTM in bfloat16 on most processors, and raises an error there.
    """

    def forward(self, *arguments: Any) -> Any:
        if not self.weight_ih_l0.is_cpu:
            return super().forward(*arguments)
        with torch.autocast("cpu", enabled=False):
            return super().forward(*arguments)


def lstm_layers(dim: int, layers: int, dropout: float) -> nn.LSTM:
    """Layers of one width over (N, U, dim), with dropout between them."""
    # torch warns if a single layer has dropout.
    between = dropout if layers > 1 else 0.0
    return _LstmLayers(dim, dim, layers, batch_first=True, dropout=between)


@dataclass(frozen=True, kw_only=True)
class LstmPredictorConfig(AnyPredictorConfig):
    """Embedding and LSTM layers.

    kind: `lstm`, or `stateless` for the other predictor.
    dim: width of the embedding and of every layer.
    layers: number of LSTM layers.
    dropout: probability of dropping an input value of each layer in training.
    """

    kind: Literal["lstm"] = "lstm"
    layers: int = 1
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_lstm_sizes("model.predictor", dim=self.dim, layers=self.layers, dropout=self.dropout)


class LstmPredictor(Predictor):
    """Embedding and LSTM layers; blank is the start symbol.

    The state is two tensors (R, L, P): outputs and cells of the layers.
    """

    def __init__(self, config: LstmPredictorConfig, vocab_size: int, blank: int = 0) -> None:
        super().__init__()
        self.config = config
        self.context_size = 1
        self.blank = blank
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = lstm_layers(config.dim, config.layers, config.dropout)

    def forward_targets(self, targets_NU: Tensor) -> Tensor:
        # Padding may be negative.
        symbols_NU = functional.pad(targets_NU.long().clamp(min=0), (1, 0), value=self.blank)
        output_NUP, _ = self.lstm(self.dropout(self.embedding(symbols_NU)))
        output: Tensor = output_NUP
        return output

    def start(self, rows: int, device: torch.device) -> tuple[Tensor, State]:
        zeros_RLP = self.embedding.weight.new_zeros(rows, self.config.layers, self.config.dim)
        blank_R = torch.full((rows,), self.blank, device=device)
        return self.step(blank_R, (zeros_RLP, zeros_RLP))

    def step(self, symbols_R: Tensor, state: State) -> tuple[Tensor, State]:
        # Without cuDNN, whose calls cannot always be captured in a CUDA graph.
        hidden_RLP, cell_RLP = state
        output_RP = self.embedding(symbols_R)
        outputs, cells = [], []
        for layer, weights in enumerate(self.lstm.all_weights):
            before = hidden_RLP[:, layer].contiguous(), cell_RLP[:, layer].contiguous()
            output_RP, cell_RP = torch.lstm_cell(output_RP, before, *weights)
            outputs.append(output_RP)
            cells.append(cell_RP)
        return output_RP, (torch.stack(outputs, dim=1), torch.stack(cells, dim=1))
