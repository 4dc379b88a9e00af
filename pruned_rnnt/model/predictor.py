"""Base class of predictors, and the stateless one (Ghodsi et al. 2020) over one or two symbols.

Axes: N batch, U symbols, L symbols with their start context, C context size, R rows of a search,
P predictor width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.schedule import Clock

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
        # Of `context_tables`, with the versions of the parameters that they were made of.
        self._tables: tuple[tuple[tuple[int, int], ...], Tensor] | None = None
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
        return self._output(context_RC), (context_RC,)

    def step(self, symbols_R: Tensor, state: State) -> tuple[Tensor, State]:
        context_RC = torch.cat((state[0][:, 1:], symbols_R[:, None]), dim=1)
        return self._output(context_RC), (context_RC,)

    def _output(self, context_RC: Tensor) -> Tensor:
        """Output (R, P) after the contexts.

        A convolution of so few numbers takes the CPU many times as long as its sums.
        """
        if context_RC.device.type != "cpu" or self.training or torch.is_grad_enabled():
            after_RP: Tensor = self(context_RC)[:, 0]
            return after_RP
        tables = self.context_tables()
        if self.convolution is None:
            return tables[0][context_RC[:, 0]]
        summed_RP = tables[0][context_RC[:, 0]]
        for place in range(1, self.context_size):
            summed_RP = summed_RP + tables[place][context_RC[:, place]]
        return torch.relu(summed_RP)

    def context_tables(self) -> Tensor:
        """(C, V + 1, P): what each symbol at each place of the context adds to the output, which
        for a context of several symbols goes through a ReLU. The last row, that of -1, is zero.

        The result is kept until a parameter changes; it has no gradient.
        """
        weights = [self.embedding.weight]
        weights += [] if self.convolution is None else [self.convolution.weight]
        versions = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
        if self._tables is None or self._tables[0] != versions:
            self._tables = (versions, self._make_tables())
        return self._tables[1]

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
